//! Plans: the context tables of one step, and how they change from step to step.

mod view;

pub use view::{NONE, PlanView, SegmentRow, SequenceRow};
