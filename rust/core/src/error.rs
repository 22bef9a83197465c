//! The errors of the crate: each is raised before anything changes.

use thiserror::Error;

/// What went wrong, with the sizes or values that the caller needs to put it right.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Error {
    /// The pool cannot give the chunks that an operation needs.
    #[error(
        "out of chunks: {needed} needed, {free} free and {evictable} evictable of {capacity} in all"
    )]
    OutOfChunks {
        /// Chunks that the operation needs.
        needed: usize,
        /// Chunks on the free list.
        free: usize,
        /// Chunks that eviction could free.
        evictable: usize,
        /// Chunks in the pool.
        capacity: usize,
    },
    /// A handle that was never given out, or was already removed.
    #[error("{argument}: sequence {handle} does not exist or was already removed")]
    UnknownSequence {
        /// The argument that held the handle.
        argument: String,
        /// The handle.
        handle: u64,
    },
    /// An argument or a configuration that is not allowed.
    #[error("{argument}: got {given}, allowed is {allowed}")]
    InvalidConfig {
        /// The argument.
        argument: String,
        /// What was given.
        given: String,
        /// What is allowed.
        allowed: String,
    },
    /// A plan that was used after its epoch, or after it was closed.
    #[error(
        "stale plan: made for epoch {plan}, closed or overtaken since (the tables are at epoch \
         {current}); make a new plan"
    )]
    StalePlan {
        /// The plan's epoch.
        plan: u64,
        /// The epoch now.
        current: u64,
    },
}

impl Error {
    /// An [`Error::InvalidConfig`] from anything printable.
    pub fn invalid(
        argument: impl Into<String>,
        given: impl ToString,
        allowed: impl Into<String>,
    ) -> Self {
        Self::InvalidConfig {
            argument: argument.into(),
            given: given.to_string(),
            allowed: allowed.into(),
        }
    }
}

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;
