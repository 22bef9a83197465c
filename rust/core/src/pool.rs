//! Chunk pool.
