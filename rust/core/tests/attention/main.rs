//! Attention over hand-made plans, against plain attention in float64.

mod support;

mod accuracy;
mod errors;
mod masking;
mod partial;
mod prefill;
mod range;
mod threads;
