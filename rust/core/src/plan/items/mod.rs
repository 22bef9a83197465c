//! Work items: how a plan's segments are cut for the multiprocessors of one device.
//!
//! A plan says which sequences cover which pages. The attention kernel (`cuda/tpp_attention.cuh`)
//! takes items of about equal cost, shared segments first: a slice of a segment's pages, a run of
//! K/V heads, a tile of query rows. Each slice leaves partial states of its rows, so that a cut is
//! a balance: enough items to fill the device, few enough that their partials do not
//! cost more than they save.
//!
//! Items say nothing of lengths while sequences decode in leaves of their own: the last slice of
//! such a leaf is open at its end, and the kernel bounds it by the sequence's own length. So a
//! step that changes no structure writes no word, and a leaf that fills writes the page id.

mod costs;
mod cutter;
mod kinds;
mod room;
mod row;
mod slices;
mod span;
mod tiles;
mod work;

pub use costs::{DeviceCosts, HeadShape};
pub use cutter::Cutter;
pub use row::{ItemRow, MergeItem, MergeRow, TokenRow};
pub use work::Work;

pub(in crate::plan) use room::{Room, room_of, room_of_spans};
