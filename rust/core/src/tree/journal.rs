//! What changed since a plan last looked, at the cost of what changed.

use std::collections::VecDeque;

use super::PrefixTree;
use super::types::SeqHandle;

/// Growth entries that are kept for a reader that lags behind.
const KEPT_GROWTH: usize = 1 << 16;

#[derive(Debug, Clone, Default)]
pub(super) struct Journal {
    /// Changes with every segment of a live path that is made, split, merged or dropped, and with
    /// every live sequence that comes or goes.
    pub structure_version: u64,
    growth: VecDeque<SeqHandle>,
    growth_begin: u64,
    generation: u64,
}

impl Journal {
    pub(super) fn record_growth(&mut self, seq: SeqHandle) {
        if self.growth.len() == KEPT_GROWTH {
            self.growth.pop_front();
            self.growth_begin += 1;
        }
        self.growth.push_back(seq);
    }

    pub(super) fn next_generation(&mut self) -> u64 {
        self.generation += 1;
        self.generation
    }
}

impl PrefixTree {
    /// A number that changes whenever the segments of a live path or the set of live sequences
    /// change. While it stays, segments keep their ids, starts and first chunks, and change only by
    /// growing at their end, which [`growth_since`](Self::growth_since) tells.
    pub fn structure_version(&self) -> u64 {
        self.journal.structure_version
    }

    /// The end of the growth journal: what to give to [`growth_since`](Self::growth_since) later.
    pub fn growth_end(&self) -> u64 {
        self.journal.growth_begin + self.journal.growth.len() as u64
    }

    /// The sequences whose leaf gained chunks since the journal's end was `position`, in order and
    /// possibly repeated; `None` if the journal no longer reaches back that far.
    pub fn growth_since(&self, position: u64) -> Option<impl Iterator<Item = SeqHandle> + '_> {
        let skip = position.checked_sub(self.journal.growth_begin)?;
        Some(self.journal.growth.iter().skip(skip as usize).copied())
    }
}
