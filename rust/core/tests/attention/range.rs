//! Scores at the ends of what float32 holds.

use chunkcache::attention::Isa;

use chunkcache::kv::Dtype;

use crate::support::{Case, DTYPES, forest};

#[test]
fn scores_of_ten_thousand_stay_finite_and_right() {
    for isa in Isa::available() {
        for sign in [1.0, -1.0] {
            for dtype in DTYPES {
                let mut case = Case::new(forest(32), 64, 2, 3);
                (case.dtype, case.params.isa) = (dtype, isa);
                // Products of about normal rows are of size 8; the largest here are beyond 20.
                case.params.sm_scale = sign * 400.0;
                // A score of 10,000 in float32 is known to 0.0005, and a weight to as much.
                case.slack = if dtype == Dtype::F32 { 500.0 } else { 2.0 };
                assert!(case.run().out.iter().all(|x| x.is_finite()));
                case.check();
            }
        }
    }
}

#[test]
fn rows_whose_scores_are_all_very_negative_are_right() {
    for isa in Isa::available() {
        for dtype in DTYPES {
            let mut case = Case::new(forest(32), 64, 2, 3);
            (case.dtype, case.params.isa) = (dtype, isa);
            (case.scale, case.offsets) = (0.1, (35.0, -35.0));
            // Float32 products of -78,400 are known to 0.008, a few times that as sums.
            case.slack = if dtype == Dtype::F32 { 500.0 } else { 2.0 };
            assert!(case.run().lse.iter().all(|&x| x < -9000.0));
            case.check();
        }
    }
}

#[test]
fn rows_whose_scores_are_all_equal_average_the_values() {
    for dtype in DTYPES {
        let mut case = Case::new(forest(32), 64, 2, 3);
        (case.dtype, case.scale) = (dtype, 0.0);
        case.check();
    }
}

#[test]
fn a_nan_that_is_seen_is_not_hidden() {
    for isa in Isa::available() {
        for dtype in DTYPES {
            let mut case = Case::new(forest(32), 64, 2, 3);
            (case.dtype, case.params.isa, case.scale) = (dtype, isa, f32::NAN);
            let output = case.run();
            let computed = output.lse.iter().filter(|&&x| x != f32::NEG_INFINITY);
            assert!(computed.clone().count() > 0 && computed.clone().all(|x| x.is_nan()));
        }
    }
}
