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
    /// A plan, or step, that was used after it was closed.
    #[error("plan: got plan {plan}, which is closed, allowed is an open plan; make a new one")]
    ClosedPlan {
        /// The plan's epoch, or the step's number.
        plan: u64,
    },
    /// A plan that was used after a later one took over its tables.
    #[error(
        "plan: got plan {plan}, whose tables a later plan has taken over, allowed is the last plan \
         that was made; use that one, or make a new one"
    )]
    StalePlan {
        /// The plan's epoch.
        plan: u64,
    },
    /// An open plan, or step, that builds on one that was aborted: on K/V that no one writes.
    #[error(
        "plan: got plan {plan}, which builds on an earlier one that was closed without a commit, \
         allowed is a plan that builds on written K/V; close it and make a new one"
    )]
    AbandonedPlan {
        /// The plan's epoch, or the step's number.
        plan: u64,
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
