//! What changed since a plan last looked.

use super::PrefixTree;

#[derive(Debug, Clone, Default)]
pub(super) struct Journal {
    /// Changes with every segment of a live path that is made, split, merged or dropped, and with
    /// every live sequence that comes or goes.
    pub structure_version: u64,
    generation: u64,
}

impl Journal {
    pub(super) fn next_generation(&mut self) -> u64 {
        self.generation += 1;
        self.generation
    }
}

impl PrefixTree {
    /// A number that changes whenever the segments of a live path or the set of live sequences
    /// change. While it stays, segments keep their ids, starts and first chunks, and change only by
    /// growing at their end.
    pub fn structure_version(&self) -> u64 {
        self.journal.structure_version
    }
}
