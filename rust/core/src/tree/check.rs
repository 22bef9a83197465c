//! Numbered invariants.
use super::PrefixTree;
impl PrefixTree {
    /// Checks.
    pub fn check_invariants(&self) -> Result<(), String> {
        Ok(())
    }
}
