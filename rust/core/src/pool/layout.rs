//! Where a key or value lies in the memory behind a pool: 64-bit address arithmetic.

use crate::error::{Error, Result};

/// The strides of one arena `[layer][chunk][K, V][num_kv_heads][chunk_size][head_dim]`, in bytes.
///
/// Each layer is a FlashInfer-style HND paged tensor of `num_chunks` pages. Addresses are byte
/// addresses of 64 bits: a chunk id times its stride passes 2^32 in any pool worth having.
///
/// ```
/// use chunkcache::pool::KvLayout;
///
/// // 32 layers, 100,000 chunks, 8 heads of 128 values of 2 bytes, 64 tokens a chunk.
/// let layout = KvLayout::arena(0x7000_0000_0000, 32, 100_000, 8, 64, 128, 2)?;
/// assert_eq!(layout.chunk_stride(), 2 * 8 * 64 * 128 * 2);
/// assert_eq!(layout.key_address(0, 99_999, 0, 0), 0x7000_0000_0000 + 99_999 * 262_144);
/// # Ok::<(), chunkcache::error::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLayout {
    base: u64,
    num_layers: u32,
    num_chunks: u32,
    layer_stride: u64,
    chunk_stride: u64,
    value_offset: u64,
    head_stride: u64,
    token_stride: u64,
}

impl KvLayout {
    /// The layout of an arena at byte address `base`, with items of `item_size` bytes.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] if a dimension is zero or the arena does not fit into 64 bits.
    pub fn arena(
        base: u64,
        num_layers: u32,
        num_chunks: u32,
        num_kv_heads: u32,
        chunk_size: u32,
        head_dim: u32,
        item_size: u32,
    ) -> Result<Self> {
        for (argument, value) in [
            ("num_layers", num_layers),
            ("num_chunks", num_chunks),
            ("num_kv_heads", num_kv_heads),
            ("chunk_size", chunk_size),
            ("head_dim", head_dim),
            ("item_size", item_size),
        ] {
            if value == 0 {
                return Err(Error::invalid(argument, value, "1 or more"));
            }
        }
        let strides = || {
            let token_stride = u64::from(head_dim) * u64::from(item_size);
            let head_stride = token_stride.checked_mul(chunk_size.into())?;
            let value_offset = head_stride.checked_mul(num_kv_heads.into())?;
            let chunk_stride = value_offset.checked_mul(2)?;
            let layer_stride = chunk_stride.checked_mul(num_chunks.into())?;
            let bytes = layer_stride.checked_mul(num_layers.into())?;
            base.checked_add(bytes)?;
            Some(Self {
                base,
                num_layers,
                num_chunks,
                layer_stride,
                chunk_stride,
                value_offset,
                head_stride,
                token_stride,
            })
        };
        strides().ok_or_else(|| {
            let size = format!(
                "{num_layers} layers x {num_chunks} chunks x 2 x {num_kv_heads} heads x \
                 {chunk_size} tokens x {head_dim} x {item_size} bytes at {base:#x}"
            );
            Error::invalid("arena", size, "an arena within 64-bit addresses")
        })
    }

    /// Bytes of the whole arena.
    pub fn num_bytes(&self) -> u64 {
        self.layer_stride * u64::from(self.num_layers)
    }

    /// Bytes from a layer to the next.
    pub fn layer_stride(&self) -> u64 {
        self.layer_stride
    }

    /// Bytes from a chunk to the next within a layer; K and V of all heads.
    pub fn chunk_stride(&self) -> u64 {
        self.chunk_stride
    }

    /// Bytes from a chunk's keys to its values.
    pub fn value_offset(&self) -> u64 {
        self.value_offset
    }

    /// Bytes from a head to the next within a chunk's keys or values.
    pub fn head_stride(&self) -> u64 {
        self.head_stride
    }

    /// Bytes from a token to the next within a head.
    pub fn token_stride(&self) -> u64 {
        self.token_stride
    }

    /// Byte address of a layer's chunk 0, keys first: what a kernel takes as its K base.
    pub fn layer_address(&self, layer: u32) -> u64 {
        debug_assert!(layer < self.num_layers);
        self.base + u64::from(layer) * self.layer_stride
    }

    /// Byte address of one head's key of the token at `offset` in `chunk`.
    pub fn key_address(&self, layer: u32, chunk: u32, head: u32, offset: u32) -> u64 {
        debug_assert!(chunk < self.num_chunks);
        self.layer_address(layer)
            + u64::from(chunk) * self.chunk_stride
            + u64::from(head) * self.head_stride
            + u64::from(offset) * self.token_stride
    }

    /// Byte address of one head's value of the token at `offset` in `chunk`.
    pub fn value_address(&self, layer: u32, chunk: u32, head: u32, offset: u32) -> u64 {
        self.key_address(layer, chunk, head, offset) + self.value_offset
    }
}
