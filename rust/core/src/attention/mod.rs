//! Two-phase attention on the CPU, after ChunkAttention (ACL 2024, section 3.2).
//!
//! Phase one takes each shared run of chunks once, with the queries of all its sequences; phase two
//! takes each sequence's own chunks. Both give partial states, which are merged in a fixed order.

mod cost;
mod isa;
mod kernel;
mod lobby;
mod output;
mod partial;
mod run;
mod schedule;
mod simd;
mod state;
mod tables;
mod team;
mod workers;

pub use isa::Isa;
pub use partial::partial_attention;
pub use run::{AttentionParams, KvSource, attend};
pub use schedule::Sharing;
pub use state::{merge_state, merge_states};
pub use workers::Workers;
