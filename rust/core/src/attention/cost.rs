//! What work costs, by constants measured on x86-64 servers: which segments are worth sharing, and
//! how finely work is cut.

use super::schedule::Geometry;

/// Tasks that a call is cut into, at least, where the work is large enough.
const TARGET_TASKS: u64 = 64;
/// Keys of a split, at least: a split costs a partial state and its merge.
const MIN_SPLIT_KEYS: usize = 512;
/// Cycles to read a byte of K or V from memory.
const CYCLES_PER_BYTE: f64 = 0.25;
/// Cycles of a multiply-add of one element.
const CYCLES_PER_MAC: f64 = 0.04;
/// Cycles that a partial state costs in all: to write it, to read it, to merge it.
const CYCLES_PER_STATE: f64 = 300.0;

/// Whether to take a run of `keys` keys that `covered` sequences with `tokens` query tokens in all
/// have in common once, rather than once for each sequence.
pub(super) fn sharing_pays(geometry: &Geometry, covered: usize, tokens: usize, keys: u64) -> bool {
    let bytes = 2.0 * keys as f64 * (geometry.head_dim * geometry.itemsize) as f64;
    let rows = (tokens * geometry.group) as f64;
    let spared = bytes * (covered - 1) as f64 * CYCLES_PER_BYTE;
    let compute = rows * 2.0 * keys as f64 * geometry.head_dim as f64 * CYCLES_PER_MAC;
    let once = (bytes * CYCLES_PER_BYTE).max(compute);
    let each = (bytes * covered as f64 * CYCLES_PER_BYTE).max(compute);
    // Reading is spared even where computing takes longer: the memory is everybody's.
    let gain = (each - once).max(spared / 4.0);
    gain > rows * CYCLES_PER_STATE
}

/// The work of a block of rows against some keys, in cycles for each K/V head.
pub(super) fn work(geometry: &Geometry, tokens: usize, keys: usize) -> u64 {
    let read = (2 * keys * geometry.head_dim * geometry.itemsize) as f64 * CYCLES_PER_BYTE;
    let rows = (tokens * geometry.group) as f64;
    let compute = rows * (2 * keys * geometry.head_dim) as f64 * CYCLES_PER_MAC;
    read.max(compute) as u64
}

/// Splits of a block's keys.
pub(super) fn num_splits(geometry: &Geometry, work: u64, total: u64, keys: usize) -> usize {
    let tasks = (work * TARGET_TASKS).div_ceil(total.max(1)) as usize;
    tasks.div_ceil(geometry.num_kv_heads).clamp(1, (keys / MIN_SPLIT_KEYS).max(1))
}
