//! What items are cut for: a head shape and a device.

use crate::error::{Error, Result};

/// Query rows of one warp.
pub(super) const WARP_ROWS: u32 = 16;

/// Keys that one stage of the kernel's ring holds.
pub(super) const STAGE_KEYS: u32 = 32;

/// Keys that a warp takes at a time.
pub(super) const STEP_KEYS: u32 = 64;

/// Tiles of rows that a warpgroup multiplies together.
pub(super) const GROUP_TILES: u32 = 4;

/// Rows of partial states that are merged together.
pub(super) const SLOT_ROWS: u32 = 8;

/// The heads of an attention layer, and how many warps of a block share their work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadShape {
    /// K/V heads.
    pub num_kv_heads: u32,
    /// Query heads per K/V head.
    pub group: u32,
    /// Warps of a block that compute, a power of two: 8 up to a `head_dim` of 128, else 4.
    pub warps: u32,
    /// Whether four warps multiply as a warpgroup, 64 rows at a time.
    pub grouped: bool,
}

impl HeadShape {
    /// Checks a shape.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a dimension of 0, a number of warps that is no power of two,
    /// or more query heads per K/V head than a block has rows for.
    pub fn new(num_kv_heads: u32, group: u32, warps: u32, grouped: bool) -> Result<Self> {
        if num_kv_heads == 0 {
            return Err(Error::invalid("num_kv_heads", num_kv_heads, "at least 1"));
        }
        if !warps.is_power_of_two() || !(GROUP_TILES..=1 << 16).contains(&warps) {
            return Err(Error::invalid("warps", warps, "a power of two from 4 to 65536"));
        }
        let max_rows = warps * WARP_ROWS;
        if group == 0 || group > max_rows {
            let name = "num_qo_heads / num_kv_heads";
            return Err(Error::invalid(name, group, format!("1 to {max_rows}")));
        }
        Ok(Self { num_kv_heads, group, warps, grouped })
    }

    /// Query heads.
    pub fn num_qo_heads(&self) -> u32 {
        self.num_kv_heads * self.group
    }

    /// Query tokens whose rows fit into one block.
    pub(super) fn max_tokens(&self) -> u32 {
        self.warps * WARP_ROWS / self.group
    }
}

/// Measured constants of one device, in the time of one key of one head at full bandwidth.
///
/// The defaults are an H200's, from the sweep that `cuda/NOTES.md` records.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeviceCosts {
    /// Blocks of the persistent grid, one a multiprocessor.
    pub num_blocks: u32,
    /// What an item costs beside its keys.
    pub item: f32,
    /// Tensor-core time of one tile of 16 rows per key; hidden behind the read below 1.
    pub row_tile: f32,
    /// Writing and merging one partial row.
    pub partial_row: f32,
}

impl Default for DeviceCosts {
    fn default() -> Self {
        Self { num_blocks: 132, item: 150.0, row_tile: 0.2, partial_row: 8.0 }
    }
}

impl DeviceCosts {
    /// Checks the constants.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for no blocks, and for costs that are negative or no numbers.
    pub fn check(&self) -> Result<()> {
        if self.num_blocks == 0 {
            return Err(Error::invalid("num_blocks", self.num_blocks, "at least 1"));
        }
        let named =
            [("item", self.item), ("row_tile", self.row_tile), ("partial_row", self.partial_row)];
        match named.into_iter().find(|&(_, cost)| !(cost >= 0.0 && cost.is_finite())) {
            Some((name, cost)) => Err(Error::invalid(name, cost, "a finite number of 0 or more")),
            None => Ok(()),
        }
    }
}
