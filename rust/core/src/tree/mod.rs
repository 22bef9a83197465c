//! Prefix tree.
