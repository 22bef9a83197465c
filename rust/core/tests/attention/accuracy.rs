//! The error against float64 over types, shapes, layouts and instruction sets.

use chunkcache::attention::{Isa, Sharing};

use crate::support::{Case, DTYPES, Layout, Tree, forest};

#[test]
fn every_dtype_head_dim_and_ratio_is_accurate() {
    for dtype in DTYPES {
        for head_dim in [8, 24, 64, 80, 96, 112, 128, 192, 256] {
            for group in [1, 3, 4, 7, 8] {
                let mut case = Case::new(forest(16), head_dim, 2, group);
                (case.dtype, case.seed) = (dtype, (head_dim * group) as u64);
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

#[test]
fn every_chunk_size_is_accurate() {
    for chunk_size in (16..=128).step_by(16) {
        for dtype in DTYPES {
            let mut case = Case::new(forest(chunk_size), 24, 2, 3);
            case.dtype = dtype;
            case.check();
        }
    }
}

#[test]
fn foreign_pages_of_any_size_are_accurate() {
    for page_size in [1, 5, 16, 20, 33, 64, 256] {
        for layout in [Layout::Nhd, Layout::Hnd] {
            for dtype in DTYPES {
                let mut case = Case::new(forest(page_size), 40, 2, 3);
                (case.dtype, case.layout) = (dtype, layout);
                case.check();
            }
        }
    }
}

#[test]
fn sequences_that_share_nothing_are_accurate() {
    let mut tree = Tree::new(16);
    for private in [1, 15, 16, 17, 300, 1100] {
        tree.leaf(None, private, 1);
    }
    Case::new(tree, 64, 2, 4).check();
}

#[test]
fn sequences_that_share_everything_are_accurate() {
    let mut tree = Tree::new(64);
    let root = tree.segment(None, 20);
    for _ in 0..19 {
        tree.leaf(Some(root), 0, 1);
    }
    Case::new(tree, 64, 2, 4).check();
}

#[test]
fn a_segment_in_several_rows_is_accurate() {
    let mut tree = Tree::new(16);
    let mut end = None;
    for pages in [1, 4, 2] {
        end = Some(tree.segment(end, pages));
    }
    tree.leaf(end, 9, 1);
    tree.leaf(end, 18, 1);
    Case::new(tree, 64, 2, 4).check();
}

#[test]
fn one_token_attends_to_itself() {
    let mut tree = Tree::new(16);
    tree.leaf(None, 1, 1);
    for dtype in DTYPES {
        let mut case = Case::new(tree.clone(), 64, 1, 1);
        case.dtype = dtype;
        case.check();
    }
}

#[test]
fn strided_queries_are_read_where_they_lie() {
    for dtype in DTYPES {
        let mut case = Case::new(forest(32), 24, 2, 3);
        (case.dtype, case.q_gap) = (dtype, 5);
        case.check();
    }
}

#[test]
fn a_soft_cap_bounds_the_scores() {
    for isa in Isa::available() {
        for cap in [0.5, 5.0, 50.0] {
            for dtype in DTYPES {
                let mut case = Case::new(forest(32), 64, 2, 3);
                (case.dtype, case.params.isa, case.scale) = (dtype, isa, 2.0);
                case.params.logits_soft_cap = Some(cap);
                case.check();
            }
        }
    }
}

#[test]
fn a_scale_may_be_negative_or_zero() {
    for sm_scale in [-0.3, 0.0] {
        let mut case = Case::new(forest(32), 64, 2, 3);
        case.params.sm_scale = sm_scale;
        case.check();
    }
}
