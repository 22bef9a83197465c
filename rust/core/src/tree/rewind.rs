//! Rewinding: queries of tokens whose K/V is there already.

use super::PrefixTree;
use super::types::SeqHandle;
use crate::error::{Error, Result};

impl PrefixTree {
    /// Lets the next step of a sequence begin at an earlier token, `num_computed_tokens`.
    ///
    /// The sequence's chunks stay as they are: tokens that are written get queries without a write
    /// ([`StepRow::num_cached_rows`](super::StepRow::num_cached_rows)), for those who need the
    /// model's output at positions that were found in the tree.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::InvalidConfig`] if the sequence has computed less, or
    /// has rows in an open step. Nothing changes then.
    pub fn rewind(&mut self, seq: SeqHandle, num_computed_tokens: usize) -> Result<()> {
        let slot = self.resolve("seq", seq)?;
        let sequence = &mut self.sequences[slot];
        if sequence.open_steps > 0 {
            let given = format!("sequence {seq}, which has rows in an open step");
            return Err(Error::invalid("seq", given, "a sequence that is in no open step"));
        }
        if num_computed_tokens > sequence.computed as usize {
            let allowed = format!("0 to {}, what is computed", sequence.computed);
            return Err(Error::invalid("num_computed_tokens", num_computed_tokens, allowed));
        }
        sequence.computed = num_computed_tokens as u32;
        sequence.scheduled = num_computed_tokens as u32;
        Ok(())
    }
}
