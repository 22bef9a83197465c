//! The error against float64 over types, shapes and instruction sets.

use chunkcache::attention::{Isa, Sharing};
use chunkcache::kv::Dtype;

use crate::support::{Case, Layout, Tree};

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

/// Two roots: one of three levels with ragged leaves, one with a single sequence; padding rows.
fn forest(page_size: u32) -> Tree {
    let mut tree = Tree::new(page_size);
    let root = tree.segment(None, 3);
    let left = tree.segment(Some(root), 2);
    tree.leaf(Some(left), 1, 1);
    tree.padding(1);
    tree.leaf(Some(left), page_size + 5, 1);
    tree.leaf(Some(root), 0, 1);
    let right = tree.segment(Some(root), 1);
    tree.leaf(Some(right), 2 * page_size, 1);
    tree.leaf(Some(right), 3, 3);
    tree.leaf(None, 37, 1);
    tree.padding(2);
    tree
}

#[test]
fn every_dtype_head_dim_and_ratio_is_accurate() {
    for dtype in DTYPES {
        for head_dim in [8, 24, 64, 80, 96, 112, 128, 192, 256] {
            for group in [1, 3, 4, 7, 8] {
                let mut case = Case::new(forest(16), head_dim, 2, group);
                case.dtype = dtype;
                case.seed = (head_dim * group) as u64;
                case.check();
            }
        }
    }
}

#[test]
fn every_instruction_set_is_accurate() {
    for isa in Isa::available() {
        for dtype in DTYPES {
            for head_dim in [8, 24, 64, 80, 128] {
                for layout in [Layout::Host, Layout::Nhd, Layout::Hnd] {
                    let mut case = Case::new(forest(32), head_dim, 2, 3);
                    (case.dtype, case.params.isa, case.layout) = (dtype, isa, layout);
                    case.check();
                }
            }
        }
    }
}

#[test]
fn every_sharing_policy_is_accurate() {
    for sharing in [Sharing::Auto, Sharing::Always, Sharing::Never] {
        for dtype in DTYPES {
            let mut case = Case::new(forest(48), 64, 2, 2);
            (case.dtype, case.params.sharing) = (dtype, sharing);
            case.check();
        }
    }
}
