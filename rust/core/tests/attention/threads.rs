//! Equal inputs give equal bits.

use crate::support::{Case, DTYPES, Tree, forest};

fn bits(case: &Case) -> (Vec<u64>, Vec<u32>) {
    let output = case.run();
    let out = output.out.iter().map(|x| x.to_bits()).collect();
    (out, output.lse.iter().map(|x| x.to_bits()).collect())
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let mut long = Tree::new(64);
    let root = long.segment(None, 40);
    for _ in 0..5 {
        long.leaf(Some(root), 700, 2);
    }
    for tree in [forest(16), long] {
        for dtype in DTYPES {
            let mut case = Case::new(tree.clone(), 64, 2, 3);
            case.dtype = dtype;
            let expected = bits(&case);
            for num_threads in [2, 3, 8] {
                case.num_threads = num_threads;
                assert_eq!(bits(&case), expected, "{num_threads} threads");
            }
        }
    }
}

#[test]
fn working_memory_of_an_earlier_call_leaves_no_trace() {
    let mut case = Case::new(forest(16), 64, 2, 3);
    let expected = bits(&case);
    case.scale = f32::NAN;
    case.run();
    case.scale = 1.0;
    assert_eq!(bits(&case), expected);
}
