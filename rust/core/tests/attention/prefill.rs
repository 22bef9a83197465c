//! Several query tokens per sequence: each sees the keys up to its own.

use chunkcache::attention::{Isa, Sharing};

use crate::support::{Case, DTYPES, Layout, Tree};

#[test]
fn a_prompt_without_a_prefix_is_causal() {
    for isa in Isa::available() {
        for dtype in DTYPES {
            for layout in [Layout::Host, Layout::Hnd] {
                let mut tree = Tree::new(64);
                tree.leaf(None, 200, 200);
                let mut case = Case::new(tree, 24, 1, 3);
                (case.dtype, case.params.isa, case.layout) = (dtype, isa, layout);
                case.check();
            }
        }
    }
}

#[test]
fn suffixes_over_a_shared_prefix_are_causal() {
    for dtype in DTYPES {
        for sharing in [Sharing::Always, Sharing::Never] {
            let mut tree = Tree::new(16);
            let root = tree.segment(None, 9);
            tree.leaf(Some(root), 77, 77);
            tree.leaf(Some(root), 3, 3);
            tree.leaf(Some(root), 40, 1);
            let mut case = Case::new(tree, 64, 2, 2);
            (case.dtype, case.params.sharing) = (dtype, sharing);
            case.check();
        }
    }
}

#[test]
fn a_shared_segment_may_end_past_a_sequence() {
    // A chunk of a prompt is computed while another sequence already has all of it.
    for dtype in DTYPES {
        for sharing in [Sharing::Always, Sharing::Never] {
            for chunk in [(10, 10), (37, 5), (64, 30), (128, 1)] {
                let mut tree = Tree::new(32);
                let root = tree.segment(None, 4);
                tree.sequence(Some(root), chunk.0, chunk.1);
                tree.leaf(Some(root), 9, 2);
                tree.sequence(Some(root), 100, 3);
                let mut case = Case::new(tree, 64, 2, 2);
                (case.dtype, case.params.sharing) = (dtype, sharing);
                case.check();
            }
        }
    }
}

#[test]
fn queries_inside_a_shared_segment_are_causal() {
    let mut tree = Tree::new(16);
    let root = tree.segment(None, 8);
    tree.sequence(Some(root), 128, 120);
    tree.leaf(Some(root), 5, 1);
    tree.leaf(Some(root), 6, 50);
    let mut case = Case::new(tree, 64, 1, 7);
    case.params.sharing = Sharing::Always;
    case.check();
}

#[test]
fn a_window_slides_over_a_prompt() {
    for window_left in [0, 5, 16, 31, 100] {
        for dtype in DTYPES {
            let mut tree = Tree::new(16);
            let root = tree.segment(None, 4);
            tree.leaf(Some(root), 90, 90);
            tree.leaf(Some(root), 20, 60);
            let mut case = Case::new(tree, 64, 1, 3);
            (case.dtype, case.params.window_left) = (dtype, window_left);
            case.params.sharing = Sharing::Always;
            case.check();
        }
    }
}

#[test]
fn a_long_prompt_is_cut_into_blocks_of_rows() {
    let mut tree = Tree::new(128);
    let root = tree.segment(None, 3);
    tree.leaf(Some(root), 700, 700);
    tree.leaf(Some(root), 1, 1);
    Case::new(tree, 8, 1, 2).check();
}

#[test]
fn more_queries_than_keys_give_empty_rows_first() {
    let mut tree = Tree::new(16);
    let leaf = tree.segment(None, 1);
    tree.sequence(Some(leaf), 3, 5);
    let case = Case::new(tree, 64, 1, 1);
    let output = case.run();
    assert!(output.lse[..2].iter().all(|&x| x == f32::NEG_INFINITY));
    assert!(output.lse[2..].iter().all(|&x| x.is_finite()));
    case.check();
}
