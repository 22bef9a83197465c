//! Plans: the context tables of one step, and how they change from step to step.

mod arena;
mod block_planner;
mod diff;
mod forest;
mod image;
mod indices;
mod items;
mod layout;
mod page_table;
mod planner;
mod rows;
mod shared_pages;
mod source;
mod step;
mod tree_step;
mod view;

pub use block_planner::{BlockTablePlanner, plan_from_block_tables, plan_from_csr};
pub use diff::{Diff, apply_patch};
pub use image::Image;
pub use indices::Index;
pub use items::{Cutter, DeviceCosts, HeadShape, ItemRow, MergeItem, MergeRow, TokenRow, Work};
pub use layout::{Layout, Limits, WorkLimits};
pub use page_table::PageTable;
pub use planner::Planner;
pub use step::{NO_SLOT, Plan};
pub use view::{NONE, PlanView, SegmentRow, SequenceRow};
