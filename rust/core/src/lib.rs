//! Shared-prefix K/V caching: a prefix tree of fixed-size chunks (PAKV) and a two-phase
//! attention over it (TPP), after ChunkAttention (ACL 2024).
//!
//! The modules build on one another in this order: [`error`], [`pool`], [`tree`], [`plan`],
//! [`kv`], [`attention`]. None of them knows about Python.

pub mod attention;
pub mod error;
pub mod kv;
pub mod plan;
pub mod pool;
pub mod tree;
