//! Attention over hand-made plans, against plain attention in float64.

mod support;

mod accuracy;
