//! Memory that is had before it is known which chunk needs it.

use super::layout::KvLayout;
use super::slab::Slab;
use crate::error::{Error, Result};

/// Room for one more slab of a [`HostKv`](super::HostKv): filled before an operation that may have
/// to copy a chunk, so that the copy cannot fail once the operation has changed something.
#[derive(Debug)]
pub struct Reserve {
    slab_bytes: usize,
    capacity: usize,
    pub(super) slab: Option<Slab>,
}

impl Reserve {
    /// An empty reserve for storages of this layout.
    pub fn new(layout: &KvLayout) -> Self {
        Self { slab_bytes: layout.slab_bytes(), capacity: layout.config().capacity, slab: None }
    }

    /// Asks the system for a slab, if there is none in reserve. Its pages are taken when they are
    /// written.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] if the system has no memory.
    pub fn fill(&mut self) -> Result<()> {
        if self.slab.is_none() {
            let given = format!("{} chunks, and no memory for the next", self.capacity);
            let allowed = "what the system has memory for";
            let slab = Slab::new(self.slab_bytes);
            self.slab = Some(slab.ok_or_else(|| Error::invalid("capacity", given, allowed))?);
        }
        Ok(())
    }
}
