//! The packed layout of K and V on the host, and where a chunk lies. Pure arithmetic.
//!
//! Per layer, chunk and head, K comes first and V follows, each of `chunk_size * head_dim`
//! elements, in strips of [`STRIP`] tokens. A vector register holds, of K, one element of each of
//! the strip's keys; of V, neighbouring elements of one token:
//!
//! | dtype | K strip | V strip |
//! |---|---|---|
//! | f32, f16 | `[head_dim][16 keys]` | `[16 tokens][head_dim]` |
//! | bf16 | `[head_dim / 2][16 keys][2]` | `[16 tokens / 2][head_dim][2]` |
//!
//! so that scores and outputs are sums of register times broadcast scalar, without a sum across a
//! register; in bf16 the pairs are what a dot-product instruction takes.

use crate::error::{Error, Result};
use crate::kv::dtype::Dtype;
use crate::pool::MAX_CAPACITY;

/// Tokens of a strip.
pub(crate) const STRIP: usize = 16;

/// Slabs are about this large, in bytes.
const SLAB_BYTES: usize = 64 << 20;

/// Layers, heads of a layer, and elements of a head at most: beyond any model, and few enough that
/// the bytes of a chunk never overflow.
pub const MAX_DIM: usize = 1 << 16;

/// Consecutive elements of the contraction (dimensions in K, tokens in V) that lie side by side.
pub(crate) const fn pack(dtype: Dtype) -> usize {
    match dtype {
        Dtype::F32 | Dtype::F16 => 1,
        Dtype::Bf16 => 2,
    }
}

/// The sizes of a host K/V storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvConfig {
    /// Layers of the model.
    pub num_layers: usize,
    /// K/V heads of a layer.
    pub num_kv_heads: usize,
    /// Elements of one head's key or value.
    pub head_dim: usize,
    /// Tokens of a chunk: a multiple of 16 from 16 to 128.
    pub chunk_size: usize,
    /// Element type.
    pub dtype: Dtype,
    /// Chunks in all.
    pub capacity: usize,
}

/// Address arithmetic of a host K/V storage: 64 bit throughout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLayout {
    config: KvConfig,
    chunks_per_slab: usize,
}

impl KvLayout {
    /// The layout of a storage.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] naming the size that is not allowed.
    pub fn new(config: KvConfig) -> Result<Self> {
        let KvConfig { num_layers, num_kv_heads, head_dim, chunk_size, dtype, capacity } = config;
        let dims =
            [("num_layers", num_layers), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim)];
        for (argument, value) in dims {
            if !(1..=MAX_DIM).contains(&value) {
                return Err(Error::invalid(argument, value, format!("1 to {MAX_DIM}")));
            }
        }
        check_head_dim(head_dim, dtype)?;
        if !(16..=128).contains(&chunk_size) || !chunk_size.is_multiple_of(STRIP) {
            return Err(Error::invalid("chunk_size", chunk_size, "16 to 128, a multiple of 16"));
        }
        let chunk_bytes = 2 * num_layers * num_kv_heads * chunk_size * head_dim * dtype.itemsize();
        let max_capacity = MAX_CAPACITY.min(isize::MAX as usize / chunk_bytes);
        if !(1..=max_capacity).contains(&capacity) {
            let allowed = format!("1 to {max_capacity} chunks of {chunk_bytes} bytes");
            return Err(Error::invalid("capacity", capacity, allowed));
        }
        let chunks_per_slab = (SLAB_BYTES / chunk_bytes).clamp(1, capacity);
        Ok(Self { config, chunks_per_slab })
    }

    /// The sizes that the layout was made for.
    pub const fn config(&self) -> &KvConfig {
        &self.config
    }

    /// Chunks of one slab.
    pub const fn chunks_per_slab(&self) -> usize {
        self.chunks_per_slab
    }

    /// Slabs that hold the whole capacity.
    pub const fn num_slabs(&self) -> usize {
        self.config.capacity.div_ceil(self.chunks_per_slab)
    }

    /// Bytes of K, or of V, of one head in one chunk of one layer.
    pub const fn plane_bytes(&self) -> usize {
        self.config.chunk_size * self.config.head_dim * self.config.dtype.itemsize()
    }

    /// Bytes of K and V of all heads in one chunk of one layer.
    pub const fn layer_chunk_bytes(&self) -> usize {
        2 * self.plane_bytes() * self.config.num_kv_heads
    }

    /// Bytes of K and V of one chunk over all layers.
    pub const fn chunk_bytes(&self) -> usize {
        self.layer_chunk_bytes() * self.config.num_layers
    }

    /// Bytes of a slab.
    pub const fn slab_bytes(&self) -> usize {
        self.chunk_bytes() * self.chunks_per_slab
    }

    /// The slab of a chunk, and in it the offset in bytes of one head's K in one layer; V follows
    /// [`plane_bytes`](Self::plane_bytes) later.
    pub const fn locate(&self, layer: usize, chunk: u32, head: usize) -> (usize, usize) {
        let chunk = chunk as usize;
        let in_slab = chunk % self.chunks_per_slab;
        let offset = (layer * self.chunks_per_slab + in_slab) * self.layer_chunk_bytes()
            + head * 2 * self.plane_bytes();
        (chunk / self.chunks_per_slab, offset)
    }
}

/// Fails unless a row of K or V is a positive multiple of 16 bytes.
pub(crate) fn check_head_dim(head_dim: usize, dtype: Dtype) -> Result<()> {
    if head_dim == 0 || !(head_dim * dtype.itemsize()).is_multiple_of(16) {
        let step = 16 / dtype.itemsize();
        return Err(Error::invalid(
            "head_dim",
            head_dim,
            format!(
                "a positive multiple of {step} for {dtype}, so that a row is a multiple of 16 bytes"
            ),
        ));
    }
    Ok(())
}
