//! The prefix tree by example: capacity, sharing, steps.

mod capacity;
mod sharing;
mod steps;
mod support;
