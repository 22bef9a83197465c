//! Host storage of K and V, and views of K/V and row arrays that others own.

mod copies;
mod dtype;
mod host;
pub(crate) mod layout;
pub(crate) mod pack;
mod paged;
mod reserve;
pub(crate) mod rows;
mod slab;

pub use copies::independent_runs;
pub use dtype::{Dtype, Element};
pub use host::HostKv;
pub use layout::{KvConfig, KvLayout, MAX_DIM};
pub use paged::{PageStrides, PagedKv, PagedShape};
pub use reserve::Reserve;
pub use rows::{Rows, RowsLayout, RowsMut};
pub(crate) use slab::SLACK;
