//! The tree's invariants, numbered. A violation's message begins with its number.
//!
//!  1. Every chunk is free, or held by an open step, or in exactly one segment.
//!  2. The running totals equal a recount, and capacity = free + evictable + in use.
//!  3. Every segment but a root is once among its parent's children, and begins where that ends.
//!  4. Every segment but a root has tokens; only one without children ends in a partial chunk, and
//!     exactly one sequence covers that.
//!  5. The windows on a run lie on one path, one after another, and the last ends with the run.
//!  6. A segment's sequences and pins are those that end there and those of its children.
//!  7. filled <= scheduled <= len and known <= len; a child has written, scheduled or known tokens
//!     only if all of its parent's are.
//!  8. Unwritten tokens have a writer: the oldest sequence that covers them.
//!  9. The eviction list holds exactly the retained segments, children before parents.
//! 10. A retained segment consists of full, written, known chunks and is in the table.
//! 11. The table of first chunks finds exactly the segments that are marked as being in it; every
//!     other one with a full known first chunk is a twin of one of those, and listed as such.
//! 12. The chains by first token hold exactly the children with a known first token.
//! 13. A sequence ends at one segment and is in its list; computed <= scheduled <= its tokens, and
//!     neither cursor is past what it still has to write.
//! 14. Rows of open steps name sequences that exist and account for all that is scheduled; a
//!     leaving sequence is in an open step; chunks are held only while a step is open.
//! 15. A waiting fork has the tokens of its source's unwritten chunk, and has not written them.
//! 16. Every pin ends at a segment, and pinned segments are full, written and known.
//! 17. Namespaces and roots belong together one to one, and every root has children.
//! 18. Without prefix sharing, no segment has two holders and none is retained.

mod cursors;
mod nodes;
mod tables;
#[cfg(test)]
mod tests;

use super::PrefixTree;

/// Fails with the invariant's number.
macro_rules! ensure {
    ($number:literal, $condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(format!("invariant {}: {}", $number, format_args!($($message)+)));
        }
    };
}
use ensure;

impl PrefixTree {
    /// Checks every invariant by a full recount. For tests: the cost grows with the whole tree.
    ///
    /// # Errors
    /// A message that begins with the number of the violated invariant, as this module lists them.
    pub fn check_invariants(&self) -> Result<(), String> {
        // Links first: the later checks follow them.
        let occupied = self.segments.occupied();
        self.check_namespaces(&occupied)?;
        self.check_links(&occupied)?;
        let segments: Vec<u32> =
            (0..self.segments.bound()).filter(|&id| occupied[id as usize]).collect();
        self.check_ends(&segments)?;
        self.check_shape(&segments)?;
        self.check_runs(&segments)?;
        self.check_holders(&segments)?;
        self.check_progress(&segments)?;
        self.check_writers(&segments)?;
        self.check_eviction_list(&segments)?;
        self.check_retained(&segments)?;
        self.check_first_chunks(&segments)?;
        self.check_chains(&segments)?;
        self.check_pins(&segments)?;
        self.check_cursors()?;
        self.check_steps(&segments)?;
        self.check_waits()?;
        self.check_chunks(&segments)?;
        self.check_accounts(&segments)
    }
}
