//! One task: the rows of some tokens against a run of keys, to a normalised partial state.

use super::block::{Block, KeyStream, PackBuffers, Strip};
use super::product::{Outputs, Prefetch, Queries, score_tile, value_row, value_tile};
use super::scratch::Scratch;
use super::softmax::{RowState, ScoreScale, update_row};
use super::{BLOCK_STRIPS, MAX_TILE_ROWS, SCORE_STRIDE};
use crate::attention::KvSource;
use crate::attention::output::Output;
use crate::attention::schedule::{KeyPage, TokenRow};
use crate::attention::simd::operand::Operand;
use crate::attention::simd::{LANES, Simd};
use crate::kv::layout::STRIP;
use crate::kv::{Rows, SLACK};

/// What all tasks of a call have in common.
#[derive(Debug)]
pub(crate) struct Shared<'a> {
    /// K and V.
    pub(crate) source: &'a KvSource<'a>,
    /// Queries `[rows, num_qo_heads, head_dim]`.
    pub(crate) q: &'a Rows<'a>,
    /// Tokens of a page.
    pub(crate) page_size: usize,
    /// Query heads of one K/V head.
    pub(crate) group: usize,
    /// How products become scores.
    pub(crate) scale: ScoreScale,
}

/// What one task computes.
#[derive(Debug)]
pub(crate) struct Task<'a> {
    /// The K/V head.
    pub(crate) kv_head: usize,
    /// The query tokens; each has `group` rows.
    pub(crate) tokens: &'a [TokenRow],
    /// The keys.
    pub(crate) pages: &'a [KeyPage],
    /// Where the result goes.
    pub(crate) output: Output<'a>,
}

/// The positions that a row or a tile of rows sees.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    /// The first that some row sees.
    min_begin: u32,
    /// The first that all rows see.
    max_begin: u32,
    /// One past the last that all rows see.
    min_end: u32,
    /// One past the last that some row sees.
    max_end: u32,
}

/// Computes a task.
#[inline(always)]
pub(crate) fn run<S: Simd, E: Operand<S>>(
    s: S,
    shared: &Shared<'_>,
    task: &Task<'_>,
    scratch: &mut Scratch,
) {
    let head_dim = shared.q.layout().head_dim;
    let rows = task.tokens.len() * shared.group;
    let padded_rows = rows.next_multiple_of(MAX_TILE_ROWS);
    let vectors = head_dim.div_ceil(LANES);
    let query_stride = vectors * LANES * E::SCALAR_BYTES;
    let strip_bytes = STRIP * head_dim * E::DTYPE.itemsize();
    let memory = Memory {
        queries: scratch.queries.get(padded_rows * query_stride),
        query_stride,
        outputs: scratch.outputs.get(padded_rows * vectors * LANES * 4).cast(),
        maxima: scratch.maxima.get(padded_rows * 4).cast(),
        sums: scratch.sums.get(padded_rows * LANES * 4).cast(),
        scores: scratch.scores.get(MAX_TILE_ROWS * SCORE_STRIDE),
        vectors,
    };
    let block_bytes = BLOCK_STRIPS * strip_bytes + SLACK;
    let packed = scratch.packed.get(4 * block_bytes);
    let buffers = [0, 2].map(|i| PackBuffers {
        k: packed.wrapping_add(i * block_bytes),
        v: packed.wrapping_add((i + 1) * block_bytes),
    });
    tile_bounds(&mut scratch.bounds, task.tokens, shared.group, S::TILE_ROWS);
    let visible = scratch.bounds.iter().fold((u32::MAX, 0), |(begin, end), tile| {
        (begin.min(tile.min_begin), end.max(tile.max_end))
    });

    // SAFETY: the buffers above have room for all rows, and for rows up to a whole tile.
    unsafe {
        load_queries::<S, E>(s, shared, task, &memory);
        memory.clear(padded_rows);
        let mut block = Block::new();
        let mut stream = KeyStream::new(
            shared.source,
            task.kv_head,
            task.pages,
            shared.page_size,
            visible,
            buffers,
        );
        let mut next_block = Block::new();
        let mut more = stream.next(&mut block);
        while more {
            more = stream.next(&mut next_block);
            for (number, bounds) in scratch.bounds.iter().enumerate() {
                let first_row = number * S::TILE_ROWS;
                let tile = Tile {
                    first_row,
                    num_rows: S::TILE_ROWS.min(rows - first_row),
                    bounds: *bounds,
                    prefetch: Prefetch {
                        strips: next_block.strips(),
                        tile: number,
                        num_tiles: scratch.bounds.len(),
                    },
                };
                attend_tile::<S, E>(s, shared, task, &memory, &block, tile);
            }
            std::mem::swap(&mut block, &mut next_block);
        }
        write_states(s, shared, task, &memory);
    }
}

/// The working memory of a task.
#[derive(Debug, Clone, Copy)]
struct Memory {
    queries: *mut u8,
    query_stride: usize,
    outputs: *mut f32,
    maxima: *mut f32,
    sums: *mut f32,
    scores: *mut u8,
    vectors: usize,
}

impl Memory {
    /// The state before the first key.
    ///
    /// # Safety
    /// The buffers have room for `rows` rows.
    unsafe fn clear(&self, rows: usize) {
        // SAFETY: the caller's contract.
        unsafe {
            self.outputs.write_bytes(0, rows * self.vectors * LANES);
            self.sums.write_bytes(0, rows * LANES);
            for row in 0..rows {
                self.maxima.add(row).write(f32::NEG_INFINITY);
            }
        }
    }

    fn state(&self, row: usize) -> RowState {
        RowState {
            max: self.maxima.wrapping_add(row),
            sum: self.sums.wrapping_add(row * LANES),
            output: self.outputs.wrapping_add(row * self.vectors * LANES),
            vectors: self.vectors,
        }
    }
}

fn tile_bounds(bounds: &mut Vec<Bounds>, tokens: &[TokenRow], group: usize, tile_rows: usize) {
    bounds.clear();
    let rows = tokens.len() * group;
    let mut first = 0;
    while first < rows {
        let last = (first + tile_rows).min(rows) - 1;
        let mut tile = Bounds { min_begin: u32::MAX, max_begin: 0, min_end: u32::MAX, max_end: 0 };
        for token in &tokens[first / group..=last / group] {
            tile.min_begin = tile.min_begin.min(token.key_begin);
            tile.max_begin = tile.max_begin.max(token.key_begin);
            tile.min_end = tile.min_end.min(token.key_end);
            tile.max_end = tile.max_end.max(token.key_end);
        }
        bounds.push(tile);
        first += tile_rows;
    }
}

/// Converts the query rows to scalars.
///
/// # Safety
/// The memory has room for all rows.
#[inline(always)]
unsafe fn load_queries<S: Simd, E: Operand<S>>(
    s: S,
    shared: &Shared<'_>,
    task: &Task<'_>,
    memory: &Memory,
) {
    let head_dim = shared.q.layout().head_dim;
    let (whole, rest) = (head_dim / LANES, head_dim % LANES);
    let vector_bytes = LANES * E::DTYPE.itemsize();
    let mut to = memory.queries;
    // SAFETY: the caller's contract; the last elements of a row, behind which nothing may be read,
    // go by way of a whole vector here.
    unsafe {
        for token in task.tokens {
            for head in task.kv_head * shared.group..(task.kv_head + 1) * shared.group {
                let from = shared.q.row(token.q_row as usize, head);
                for vector in 0..whole {
                    let scalars = to.add(vector * LANES * E::SCALAR_BYTES);
                    E::to_scalars(s, from.add(vector * vector_bytes), scalars);
                }
                if rest > 0 {
                    let mut tail = [0u8; LANES * 4];
                    let last = from.add(whole * vector_bytes);
                    let bytes = rest * E::DTYPE.itemsize();
                    tail.as_mut_ptr().copy_from_nonoverlapping(last, bytes);
                    let scalars = to.add(whole * LANES * E::SCALAR_BYTES);
                    E::to_scalars(s, tail.as_ptr(), scalars);
                }
                to = to.add(memory.query_stride);
            }
        }
    }
}

/// Rows of a register tile.
#[derive(Debug, Clone, Copy)]
struct Tile<'a> {
    first_row: usize,
    num_rows: usize,
    bounds: Bounds,
    prefetch: Prefetch<'a>,
}

/// Adds a block of keys to the states of a tile of rows.
///
/// # Safety
/// The memory has room for the tile's rows, up to a whole tile.
#[inline(always)]
unsafe fn attend_tile<S: Simd, E: Operand<S>>(
    s: S,
    shared: &Shared<'_>,
    task: &Task<'_>,
    memory: &Memory,
    block: &Block,
    tile: Tile<'_>,
) {
    let num_keys = block.num_keys();
    let (first, last) = (block.first_position(), block.last_position());
    let Bounds { min_begin, max_begin, min_end, max_end } = tile.bounds;
    if min_begin > last || max_end <= first {
        return;
    }
    let whole = max_begin <= first && min_end > last;
    // Keys that some row sees, and keys that all rows see.
    let (some, all) = if whole {
        ((0, num_keys), (0, num_keys))
    } else {
        (
            (block.keys_before(min_begin), block.keys_before(max_end)),
            (block.keys_before(max_begin), block.keys_before(min_end)),
        )
    };
    if some.0 >= some.1 {
        return;
    }
    let strips = some.0 / STRIP..(some.1 - 1) / STRIP + 1;
    let queries = Queries {
        rows: memory.queries.wrapping_add(tile.first_row * memory.query_stride),
        stride: memory.query_stride,
        head_dim: shared.q.layout().head_dim,
    };
    let scale = s.splat(shared.scale.product);
    let scores = memory.scores.wrapping_add(strips.start * STRIP * 4);
    let outputs = Outputs {
        rows: memory.state(tile.first_row).output,
        vectors: memory.vectors,
        v_stride: shared.q.layout().head_dim * E::PACK * E::DTYPE.itemsize(),
    };
    // SAFETY: the caller's contract; strips hold 16 keys' lines in K and in V.
    unsafe {
        by_rows::<S, _>(
            tile.num_rows,
            ScoreTile::<S, E> {
                s,
                queries,
                strips: &block.strips()[strips],
                scale,
                scores,
                prefetch: tile.prefetch,
                operand: std::marker::PhantomData,
            },
        );
        for row in 0..tile.num_rows {
            let keys =
                if whole { some } else { row_keys(shared, task, block, tile.first_row + row) };
            if keys.0 < keys.1 {
                let scores = memory.scores.add(row * SCORE_STRIDE);
                let state = memory.state(tile.first_row + row);
                update_row::<S, E>(s, scores, keys, shared.scale.cap, state);
            }
        }
        let all = (all.0.next_multiple_of(E::PACK), all.1 / E::PACK * E::PACK);
        let common = all.0 < all.1;
        if common {
            by_rows::<S, _>(
                tile.num_rows,
                ValueTile::<S, E> {
                    s,
                    weights: memory.scores,
                    strips: block.strips(),
                    keys: all,
                    outputs,
                    prefetch: tile.prefetch,
                    operand: std::marker::PhantomData,
                },
            );
        }
        if whole && all == some {
            return;
        }
        for row in 0..tile.num_rows {
            let keys =
                if whole { some } else { row_keys(shared, task, block, tile.first_row + row) };
            let weights = memory.scores.add(row * SCORE_STRIDE);
            let rest = if common { [(keys.0, all.0), (all.1, keys.1)] } else { [keys, (0, 0)] };
            for (begin, end) in rest {
                if begin < end {
                    let outputs = outputs.at_row(row);
                    value_row::<S, E>(s, weights, block.strips(), (begin, end), outputs);
                }
            }
        }
    }
}

/// The keys of a block that a row sees.
fn row_keys(shared: &Shared<'_>, task: &Task<'_>, block: &Block, row: usize) -> (usize, usize) {
    let token = &task.tokens[row / shared.group];
    (block.keys_before(token.key_begin), block.keys_before(token.key_end))
}

/// A computation that is compiled for some numbers of rows.
trait ByRows {
    /// The computation for `R` rows.
    ///
    /// # Safety
    /// As the operation behind it, with `R` rows.
    unsafe fn call<const R: usize>(self);
}

/// Calls with the least of 1, 2, 4 and 8 that is not below `rows`, at most a whole tile.
///
/// # Safety
/// As the computation, for a whole tile.
#[inline(always)]
unsafe fn by_rows<S: Simd, C: ByRows>(rows: usize, computation: C) {
    // SAFETY: the caller's contract.
    unsafe {
        match rows {
            1 => computation.call::<1>(),
            2 => computation.call::<2>(),
            // Code for 8 rows is not even made where a tile has 4.
            _ if S::TILE_ROWS == 4 || rows <= 4 => computation.call::<4>(),
            _ => computation.call::<8>(),
        }
    }
}

struct ScoreTile<'a, S: Simd, E> {
    s: S,
    queries: Queries,
    strips: &'a [Strip],
    scale: S::V,
    scores: *mut u8,
    prefetch: Prefetch<'a>,
    operand: std::marker::PhantomData<E>,
}

impl<S: Simd, E: Operand<S>> ByRows for ScoreTile<'_, S, E> {
    #[inline(always)]
    unsafe fn call<const R: usize>(self) {
        // SAFETY: the caller's contract.
        unsafe {
            score_tile::<S, E, R>(
                self.s,
                self.queries,
                self.strips,
                self.scale,
                self.scores,
                self.prefetch,
            );
        }
    }
}

struct ValueTile<'a, S: Simd, E> {
    s: S,
    weights: *const u8,
    strips: &'a [Strip],
    keys: (usize, usize),
    outputs: Outputs,
    prefetch: Prefetch<'a>,
    operand: std::marker::PhantomData<E>,
}

impl<S: Simd, E: Operand<S>> ByRows for ValueTile<'_, S, E> {
    #[inline(always)]
    unsafe fn call<const R: usize>(self) {
        // SAFETY: the caller's contract.
        unsafe {
            value_tile::<S, E, R>(
                self.s,
                self.weights,
                self.strips,
                self.keys,
                self.outputs,
                self.prefetch,
            );
        }
    }
}

/// Normalises the rows and writes them where they go.
///
/// # Safety
/// The memory holds the states of all rows.
#[inline(always)]
unsafe fn write_states<S: Simd>(s: S, shared: &Shared<'_>, task: &Task<'_>, memory: &Memory) {
    for (t, token) in task.tokens.iter().enumerate() {
        for g in 0..shared.group {
            let state = memory.state(t * shared.group + g);
            let head = task.kv_head * shared.group + g;
            // SAFETY: the caller's contract; each row of the output is one task's.
            unsafe {
                let sum = s.reduce_add(s.load(state.sum));
                let (factor, lse) = if sum == 0.0 {
                    (0.0, f32::NEG_INFINITY)
                } else {
                    let log2 = f64::from(state.max.read()) + f64::from(sum).log2();
                    (1.0 / sum, (log2 * std::f64::consts::LN_2) as f32)
                };
                let row = (token.q_row as usize, t, head);
                task.output.write(s, row, state.output, s.splat(factor), lse);
            }
        }
    }
}
