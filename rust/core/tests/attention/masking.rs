//! What is not seen has no influence, whatever it holds.

use chunkcache::attention::{Isa, Sharing};

use crate::support::{Case, DTYPES, Layout, Tree, forest};

/// A shared prefix of 96 tokens, and sequences with some of their own.
fn shared_prefix() -> Tree {
    let mut tree = Tree::new(32);
    let root = tree.segment(None, 3);
    for private in [1, 7, 33, 64, 70] {
        tree.leaf(Some(root), private, 1);
    }
    tree.leaf(Some(root), 40, 6);
    tree
}

#[test]
fn nan_and_infinity_past_the_end_do_not_leak() {
    for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for isa in Isa::available() {
            for dtype in DTYPES {
                for layout in [Layout::Host, Layout::Nhd] {
                    let mut case = Case::new(forest(32), 24, 2, 3);
                    (case.dtype, case.layout, case.poison) = (dtype, layout, poison);
                    case.params.isa = isa;
                    case.check();
                }
            }
        }
    }
}

#[test]
fn a_window_bounds_every_row() {
    for isa in Isa::available() {
        for window_left in [0, 1, 17, 40, 64, 100, 165, 1000, i32::MAX] {
            for sharing in [Sharing::Always, Sharing::Never, Sharing::Auto] {
                for dtype in DTYPES {
                    let mut case = Case::new(shared_prefix(), 24, 2, 3);
                    (case.dtype, case.params.isa) = (dtype, isa);
                    (case.params.window_left, case.params.sharing) = (window_left, sharing);
                    case.check();
                }
            }
        }
    }
}

#[test]
fn a_window_bounds_foreign_pages() {
    for window_left in [0, 17, 40, 100] {
        for page_size in [1, 20, 64] {
            let mut case = Case::new(forest(page_size), 24, 2, 3);
            (case.layout, case.params.window_left) = (Layout::Nhd, window_left);
            case.check();
        }
    }
}

#[test]
fn a_window_and_a_soft_cap_go_together() {
    let mut case = Case::new(shared_prefix(), 64, 2, 2);
    (case.params.window_left, case.params.logits_soft_cap) = (50, Some(3.0));
    case.check();
}

#[test]
fn a_sequence_without_keys_gives_the_empty_state() {
    let mut tree = Tree::new(16);
    tree.leaf(None, 5, 1);
    tree.sequence(None, 0, 1);
    tree.sequence(None, 0, 2);
    for dtype in DTYPES {
        let mut case = Case::new(tree.clone(), 64, 2, 2);
        case.dtype = dtype;
        let output = case.run();
        let heads = 4;
        assert!(output.out[heads * 64..].iter().all(|&x| x == 0.0));
        assert!(output.lse[heads..].iter().all(|&x| x == f32::NEG_INFINITY));
        case.check();
    }
}

#[test]
fn padding_rows_give_the_empty_state() {
    let mut tree = Tree::new(16);
    tree.padding(1);
    tree.leaf(None, 5, 1);
    tree.padding(2);
    let output = Case::new(tree, 64, 1, 1).run();
    for row in [0, 2, 3] {
        assert!(output.out[row * 64..(row + 1) * 64].iter().all(|&x| x == 0.0));
        assert_eq!(output.lse[row], f32::NEG_INFINITY);
    }
}

#[test]
fn a_batch_without_sequences_gives_nothing() {
    let output = Case::new(Tree::new(16), 64, 1, 1).run();
    assert!(output.out.is_empty());
}
