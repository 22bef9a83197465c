//! The kernel: partial attention of some query rows of one K/V head over a run of keys.
//!
//! Both phases are this one computation (the paper's `partial_attn`): chunk-first with the rows of
//! all sequences of a shared run, sequence-first with those of one. Keys are taken in blocks;
//! scores are a product of register tiles, kept in base 2; the running maximum, sum and output of
//! a row follow the online softmax of Milakov and Gimelshein (2018).

mod block;
pub(crate) mod dispatch;
mod product;
pub(crate) mod scratch;
pub(crate) mod softmax;
pub(crate) mod task;

/// Strips of 16 keys in a block.
pub(crate) const BLOCK_STRIPS: usize = 8;
/// Keys of a block.
pub(crate) const BLOCK_KEYS: usize = BLOCK_STRIPS * crate::kv::layout::STRIP;
/// Bytes from one row of scores to the next.
pub(crate) const SCORE_STRIDE: usize = BLOCK_KEYS * 4;
/// The most query rows of a register tile.
pub(crate) const MAX_TILE_ROWS: usize = 8;
/// The most query rows (tokens times heads of a group) of a task.
pub(crate) const MAX_TASK_ROWS: usize = 256;
