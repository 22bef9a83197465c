//! K and V of all layers in host memory, chunk by chunk, in the packed layout.

use std::ptr;

use crate::error::{Error, Result};
use crate::kv::dtype::Dtype;
use crate::kv::layout::{KvConfig, KvLayout, STRIP};
use crate::kv::pack::{PackedStrip, StripRows};
use crate::kv::reserve::Reserve;
use crate::kv::rows::{Rows, RowsLayout, RowsMut, check_rows};
use crate::kv::slab::Slab;

/// Host storage of K and V: memory grows slab by slab as chunks are first written, up to the
/// capacity, and is given back on drop.
///
/// A slot is `chunk * chunk_size + offset`, as in a slot mapping of vLLM.
///
/// ```
/// use chunkcache::kv::{Dtype, HostKv, KvConfig, Rows, RowsLayout, RowsMut};
///
/// let config = KvConfig {
///     num_layers: 1, num_kv_heads: 1, head_dim: 4, chunk_size: 16, dtype: Dtype::F32, capacity: 8,
/// };
/// let mut kv = HostKv::new(config)?;
/// let layout = RowsLayout::contiguous(1, 1, 4);
/// let (k, v) = ([1.0f32, 2.0, 3.0, 4.0], [5.0f32, 6.0, 7.0, 8.0]);
/// kv.write_kv(0, &Rows::new(&k, layout)?, &Rows::new(&v, layout)?, &[35])?;
/// let (mut k2, mut v2) = ([0.0f32; 4], [0.0f32; 4]);
/// kv.read_kv(0, &[35], &mut RowsMut::new(&mut k2, layout)?, &mut RowsMut::new(&mut v2, layout)?)?;
/// assert_eq!((k, v), (k2, v2));
/// # Ok::<(), chunkcache::error::Error>(())
/// ```
#[derive(Debug)]
pub struct HostKv {
    layout: KvLayout,
    /// As many as chunks were written to; they are written in about the order of their ids.
    slabs: Vec<Option<Slab>>,
}

impl HostKv {
    /// An empty storage: no memory is taken yet.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] naming the size that is not allowed.
    pub fn new(config: KvConfig) -> Result<Self> {
        let layout = KvLayout::new(config)?;
        Ok(Self { layout, slabs: Vec::new() })
    }

    /// The sizes.
    pub const fn config(&self) -> &KvConfig {
        self.layout.config()
    }

    /// The address arithmetic.
    pub const fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Bytes of the slabs taken so far.
    pub fn allocated_bytes(&self) -> usize {
        self.slabs.iter().flatten().count() * self.layout.slab_bytes()
    }

    /// Writes rows `[tokens, num_kv_heads, head_dim]` of the storage's dtype; row `t` goes to slot
    /// `slot_mapping[t]`, or nowhere if that is -1.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a layer, slot, shape or dtype that is not allowed, or when the
    /// system has no memory. Nothing is written then.
    pub fn write_kv(
        &mut self,
        layer: usize,
        k: &Rows<'_>,
        v: &Rows<'_>,
        slot_mapping: &[i64],
    ) -> Result<()> {
        self.check_layer(layer)?;
        self.check_rows("k", k.layout(), k.dtype(), slot_mapping.len())?;
        self.check_rows("v", v.layout(), v.dtype(), slot_mapping.len())?;
        for &slot in slot_mapping {
            if slot != -1 {
                self.check_slot("slot_mapping", slot)?;
            }
        }
        let chunk_size = self.config().chunk_size as i64;
        for &slot in slot_mapping {
            if slot != -1 {
                self.grow((slot / chunk_size) as u32)?;
            }
        }
        let mut begin = 0;
        for len in strip_runs(slot_mapping) {
            let slot = slot_mapping[begin];
            let rows = begin..begin + len;
            begin += len;
            if slot == -1 {
                continue;
            }
            let (chunk, token) = ((slot / chunk_size) as u32, (slot % chunk_size) as usize);
            for head in 0..self.config().num_kv_heads {
                let plane = self.plane(layer, chunk, head).expect("grown above");
                let mut strip_rows = StripRows::new();
                for row in rows.clone() {
                    strip_rows.push(k.row(row, head), v.row(row, head));
                }
                // SAFETY: the plane is in a slab that `&mut self` owns, and the shapes were checked.
                unsafe { self.strip(plane, token).write(token % STRIP, &strip_rows) };
            }
        }
        Ok(())
    }

    /// Reads the rows of slots into `k` and `v`, `[slots, num_kv_heads, head_dim]`.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a layer, slot, shape or dtype that is not allowed, or a slot
    /// of a chunk that lies in memory never written. Nothing is read then.
    pub fn read_kv(
        &self,
        layer: usize,
        slots: &[i64],
        k: &mut RowsMut<'_>,
        v: &mut RowsMut<'_>,
    ) -> Result<()> {
        self.check_layer(layer)?;
        self.check_rows("k", k.layout(), k.dtype(), slots.len())?;
        self.check_rows("v", v.layout(), v.dtype(), slots.len())?;
        let chunk_size = self.config().chunk_size as i64;
        for &slot in slots {
            self.check_slot("slots", slot)?;
            self.check_written("slots", (slot / chunk_size) as u32)?;
        }
        for (row, &slot) in slots.iter().enumerate() {
            let (chunk, token) = ((slot / chunk_size) as u32, (slot % chunk_size) as usize);
            for head in 0..self.config().num_kv_heads {
                let plane = self.plane(layer, chunk, head).expect("checked above");
                let (k, v) = (k.row(row, head), v.row(row, head));
                // SAFETY: the plane is in a slab, and the shapes were checked; the output rows are
                // borrowed exclusively.
                unsafe { self.strip(plane, token).read(token % STRIP, k, v) };
            }
        }
        Ok(())
    }

    /// Copies the first `num_tokens` tokens of chunk `src` to chunk `dst`, in all layers.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for chunks or a length that are not allowed. Nothing is copied then.
    pub fn copy_chunk_head(&mut self, src: u32, dst: u32, num_tokens: usize) -> Result<()> {
        let KvConfig { num_layers, num_kv_heads, head_dim, chunk_size, dtype, .. } = *self.config();
        for (argument, chunk) in [("src", src), ("dst", dst)] {
            self.check_chunk(argument, chunk)?;
        }
        if num_tokens > chunk_size {
            return Err(Error::invalid("num_tokens", num_tokens, format!("0 to {chunk_size}")));
        }
        self.check_written("src", src)?;
        if src == dst || num_tokens == 0 {
            return Ok(());
        }
        self.grow(dst)?;
        let whole_strips = num_tokens / STRIP * STRIP;
        let strip_bytes = whole_strips * head_dim * dtype.itemsize();
        let row_bytes = head_dim * dtype.itemsize();
        let mut row = vec![0u8; 2 * row_bytes];
        let (k_row, v_row) = row.split_at_mut(row_bytes);
        for layer in 0..num_layers {
            for head in 0..num_kv_heads {
                let from = self.plane(layer, src, head).expect("checked above");
                let to = self.plane(layer, dst, head).expect("grown above").cast_mut();
                let v = self.layout.plane_bytes();
                // SAFETY: two planes of different chunks do not overlap, strips are contiguous in
                // K and in V, and tokens are below the chunk size.
                unsafe {
                    ptr::copy_nonoverlapping(from, to, strip_bytes);
                    ptr::copy_nonoverlapping(from.add(v), to.add(v), strip_bytes);
                    for token in whole_strips..num_tokens {
                        let (k_row, v_row) = (k_row.as_mut_ptr(), v_row.as_mut_ptr());
                        self.strip(from, token).read(token % STRIP, k_row, v_row);
                        let mut rows = StripRows::new();
                        rows.push(k_row, v_row);
                        self.strip(to, token).write(token % STRIP, &rows);
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether memory was taken for a chunk: it, or one near it, was written before.
    pub fn has_memory(&self, chunk: u32) -> bool {
        self.plane(0, chunk, 0).is_some()
    }

    /// The address of one head's K of a chunk in one layer; V lies
    /// [`KvLayout::plane_bytes`] behind it. `None` if the memory was never written.
    pub(crate) fn plane(&self, layer: usize, chunk: u32, head: usize) -> Option<*const u8> {
        let (slab, offset) = self.layout.locate(layer, chunk, head);
        Some(self.slabs.get(slab)?.as_ref()?.as_ptr().wrapping_add(offset).cast_const())
    }

    /// Fails if a chunk lies in memory that was never written.
    pub(crate) fn check_written(&self, argument: &str, chunk: u32) -> Result<()> {
        match self.plane(0, chunk, 0) {
            Some(_) => Ok(()),
            None => Err(Error::invalid(
                argument,
                format!("chunk {chunk}, which was never written"),
                format!("chunks that were written, below {}", self.config().capacity),
            )),
        }
    }

    /// Fails unless the layer exists.
    pub(crate) fn check_layer(&self, layer: usize) -> Result<()> {
        let num_layers = self.config().num_layers;
        if layer >= num_layers {
            return Err(Error::invalid("layer", layer, format!("0 to {}", num_layers - 1)));
        }
        Ok(())
    }

    fn check_rows(
        &self,
        argument: &str,
        layout: &RowsLayout,
        dtype: Dtype,
        num_tokens: usize,
    ) -> Result<()> {
        let config = self.config();
        check_rows(argument, layout, dtype, (config.num_kv_heads, config.head_dim, config.dtype))?;
        if layout.num_tokens != num_tokens {
            return Err(Error::invalid(
                argument,
                format!("{} tokens", layout.num_tokens),
                format!("{num_tokens}, one for each slot"),
            ));
        }
        Ok(())
    }

    fn check_slot(&self, argument: &str, slot: i64) -> Result<()> {
        let num_slots = self.config().capacity as u128 * self.config().chunk_size as u128;
        if u128::try_from(slot).is_ok_and(|slot| slot < num_slots) {
            return Ok(());
        }
        Err(Error::invalid(argument, slot, format!("slots 0 to {}", num_slots - 1)))
    }

    /// Takes memory for a chunk, if it has none, from `reserve` if that has some.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a chunk past the capacity, or if the reserve is empty and the
    /// system has no memory.
    pub fn back(&mut self, chunk: u32, reserve: &mut Reserve) -> Result<()> {
        self.check_chunk("chunk", chunk)?;
        if !self.has_memory(chunk) {
            reserve.fill()?;
            let (slab, _) = self.layout.locate(0, chunk, 0);
            if self.slabs.len() <= slab {
                self.slabs.resize_with(slab + 1, || None);
            }
            self.slabs[slab] = reserve.slab.take();
        }
        Ok(())
    }

    fn grow(&mut self, chunk: u32) -> Result<()> {
        self.back(chunk, &mut Reserve::new(&self.layout))
    }

    fn check_chunk(&self, argument: &str, chunk: u32) -> Result<()> {
        let capacity = self.config().capacity;
        if chunk as usize >= capacity {
            return Err(Error::invalid(argument, chunk, format!("0 to {}", capacity - 1)));
        }
        Ok(())
    }

    /// The strip of a plane that holds a token.
    fn strip(&self, plane: *const u8, token: usize) -> PackedStrip {
        let KvConfig { head_dim, dtype, .. } = *self.config();
        let k = plane.wrapping_add(token / STRIP * STRIP * head_dim * dtype.itemsize()).cast_mut();
        PackedStrip { k, v: k.wrapping_add(self.layout.plane_bytes()), head_dim, dtype }
    }
}

/// Lengths of runs of consecutive slots inside a strip; slots of -1 are runs of their own.
fn strip_runs(slots: &[i64]) -> impl Iterator<Item = usize> {
    slots.chunk_by(|&a, &b| a != -1 && b == a + 1 && b % STRIP as i64 != 0).map(<[i64]>::len)
}
