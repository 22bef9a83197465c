//! What work costs, in cycles measured on an x86-64 server (Emerald Rapids, AVX-512, K/V in the
//! caches): which segments are worth sharing, and how finely work is cut.
//!
//! A pass of a register tile over a cache line of K or V costs a constant and a part for each row;
//! what sharing spares is passes, what it costs is partial states.

use super::schedule::Geometry;

/// Tasks that a call is cut into, at least, where the work is large enough.
const TARGET_TASKS: u64 = 32;
/// Keys of a split, at least: a split costs a partial state and its merge.
const MIN_SPLIT_KEYS: usize = 512;
/// Keys of a shared run, at least: below, tasks cost more than keys.
const MIN_SHARED_KEYS: u64 = 32;
/// Bytes of a cache line.
const LINE: u64 = 64;
/// Rows of a register tile.
const TILE_ROWS: u64 = 8;
/// Cycles to read a line from memory, with all cores reading.
const MEMORY_PER_LINE: u64 = 20;
/// Cycles that a partial state costs for each element: to write it, to read it, to merge it.
const STATE_PER_ELEMENT: u64 = 6;

/// Twice the cycles of a pass of `rows` rows over one line.
fn pass(geometry: &Geometry, rows: u64) -> u64 {
    let (constant, per_row) = if geometry.itemsize == 4 { (6, 1) } else { (10, 2) };
    let rest = rows % TILE_ROWS;
    let partial_tile = if rest == 0 { 0 } else { constant + per_row * rest.next_power_of_two() };
    rows / TILE_ROWS * (constant + per_row * TILE_ROWS) + partial_tile
}

/// Lines of K and V of some keys of one head.
fn lines(geometry: &Geometry, keys: u64) -> u64 {
    2 * keys * (geometry.head_dim * geometry.itemsize) as u64 / LINE
}

/// Whether to take a run of `keys` keys once, rather than once for each of the sequences that have
/// it in common; `tokens` are their numbers of query tokens, `alone` says that they have no other
/// keys, so that nothing is merged.
pub(super) fn sharing_pays(
    geometry: &Geometry,
    tokens: impl Iterator<Item = usize>,
    keys: u64,
    alone: bool,
) -> bool {
    let group = geometry.group as u64;
    let (mut rows, mut apart) = (0, 0);
    for tokens in tokens {
        rows += tokens as u64 * group;
        apart += pass(geometry, tokens as u64 * group);
    }
    let spared = apart.saturating_sub(pass(geometry, rows));
    let states = if alone { 0 } else { rows * STATE_PER_ELEMENT * geometry.head_dim as u64 };
    keys >= MIN_SHARED_KEYS && lines(geometry, keys) * spared > 2 * states
}

/// The work of a block of query tokens against some keys, for each K/V head.
pub(super) fn work(geometry: &Geometry, tokens: usize, keys: usize) -> u64 {
    let rows = (tokens * geometry.group) as u64;
    lines(geometry, keys as u64) * pass(geometry, rows).max(2 * MEMORY_PER_LINE)
}

/// Splits of a block's keys.
pub(super) fn num_splits(geometry: &Geometry, work: u64, total: u64, keys: usize) -> usize {
    let share = u128::from(work) * u128::from(TARGET_TASKS);
    let tasks = share.div_ceil(u128::from(total.max(1))) as usize;
    tasks.div_ceil(geometry.num_kv_heads).clamp(1, (keys / MIN_SPLIT_KEYS).max(1))
}
