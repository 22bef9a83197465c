//! Blocks of keys: strips of 16 in the packed layout, where they lie or as packed on the way.

use super::BLOCK_STRIPS;
use crate::attention::KvSource;
use crate::attention::schedule::KeyPage;
use crate::kv::layout::STRIP;
use crate::kv::pack::{PackedStrip, StripRows};
use crate::kv::{HostKv, PagedKv, PagedShape};

/// 16 keys and their values in the packed layout.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Strip {
    /// The keys' first line.
    pub(crate) k: *const u8,
    /// The values' first line.
    pub(crate) v: *const u8,
    /// Token position of the first key.
    pub(crate) position: u32,
    /// Keys in it.
    pub(crate) num_keys: u32,
}

impl Strip {
    /// No keys.
    pub(crate) const EMPTY: Self =
        Self { k: std::ptr::null(), v: std::ptr::null(), position: 0, num_keys: 0 };
}

/// Up to [`BLOCK_STRIPS`] strips in ascending order of position. All but the last are full, so
/// that key `i` of the block is key `i % 16` of strip `i / 16`.
#[derive(Debug)]
pub(crate) struct Block {
    strips: [Strip; BLOCK_STRIPS],
    len: usize,
}

impl Block {
    /// No strips.
    pub(crate) const fn new() -> Self {
        Self { strips: [Strip::EMPTY; BLOCK_STRIPS], len: 0 }
    }

    /// The strips.
    pub(crate) fn strips(&self) -> &[Strip] {
        &self.strips[..self.len]
    }

    /// Keys in all.
    pub(crate) fn num_keys(&self) -> usize {
        self.strips().last().map_or(0, |last| (self.len - 1) * STRIP + last.num_keys as usize)
    }

    /// Position of the first key.
    pub(crate) fn first_position(&self) -> u32 {
        self.strips[0].position
    }

    /// Position of the last key.
    pub(crate) fn last_position(&self) -> u32 {
        self.strips().last().map_or(0, |last| last.position + last.num_keys - 1)
    }

    /// How many keys stand before `position`.
    pub(crate) fn keys_before(&self, position: u32) -> usize {
        let mut count = 0;
        for strip in self.strips() {
            if position <= strip.position {
                break;
            }
            count += (position - strip.position).min(strip.num_keys) as usize;
        }
        count
    }

    fn push(&mut self, strip: Strip) {
        self.strips[self.len] = strip;
        self.len += 1;
    }

    fn is_full(&self) -> bool {
        self.len == BLOCK_STRIPS
            || self.strips().last().is_some_and(|last| (last.num_keys as usize) < STRIP)
    }
}

/// Where foreign keys and values are packed: [`BLOCK_STRIPS`] strips each. A block's memory must
/// outlast the making of the next, so there are two in turn.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PackBuffers {
    pub(crate) k: *mut u8,
    pub(crate) v: *mut u8,
}

/// The keys of a task, block by block.
#[derive(Debug)]
pub(crate) struct KeyStream<'a> {
    source: &'a KvSource<'a>,
    kv_head: usize,
    pages: &'a [KeyPage],
    page_size: usize,
    /// Positions that some row sees: from the first to one past the last.
    visible: (u32, u32),
    /// Next key: a page, and a token in it.
    page: usize,
    token: usize,
    buffers: [PackBuffers; 2],
}

impl<'a> KeyStream<'a> {
    /// The visible keys of `pages`.
    pub(crate) fn new(
        source: &'a KvSource<'a>,
        kv_head: usize,
        pages: &'a [KeyPage],
        page_size: usize,
        visible: (u32, u32),
        buffers: [PackBuffers; 2],
    ) -> Self {
        Self { source, kv_head, pages, page_size, visible, page: 0, token: 0, buffers }
    }

    /// The next block; false when there is none.
    pub(crate) fn next(&mut self, block: &mut Block) -> bool {
        block.len = 0;
        match self.source {
            KvSource::Host { kv, layer } => self.next_host(block, kv, *layer),
            KvSource::Paged(paged) => self.next_paged(block, paged),
        }
        block.len > 0
    }

    fn next_host(&mut self, block: &mut Block, kv: &HostKv, layer: usize) {
        let plane_bytes = kv.layout().plane_bytes();
        let strip_bytes = plane_bytes / self.page_size * STRIP;
        while !block.is_full() && self.page < self.pages.len() {
            let page = self.pages[self.page];
            let position = page.position + self.token as u32;
            if position >= self.visible.1 {
                self.page = self.pages.len();
                return;
            }
            if position + STRIP as u32 > self.visible.0 {
                let plane =
                    kv.plane(layer, page.id, self.kv_head).expect("checked by the schedule");
                let k = plane.wrapping_add(self.token / STRIP * strip_bytes);
                let v = k.wrapping_add(plane_bytes);
                block.push(Strip { k, v, position, num_keys: STRIP as u32 });
            }
            self.token += STRIP;
            if self.token == self.page_size {
                (self.page, self.token) = (self.page + 1, 0);
            }
        }
    }

    fn next_paged(&mut self, block: &mut Block, paged: &PagedKv<'_>) {
        let PagedShape { head_dim, dtype, .. } = *paged.shape();
        let strip_bytes = STRIP * head_dim * dtype.itemsize();
        self.buffers.swap(0, 1);
        while !block.is_full() && self.page < self.pages.len() {
            let mut rows = StripRows::new();
            let mut first = 0;
            while rows.len() < STRIP && self.page < self.pages.len() {
                let page = self.pages[self.page];
                let position = page.position + self.token as u32;
                if position >= self.visible.1 {
                    self.page = self.pages.len();
                    break;
                }
                if position >= self.visible.0 {
                    if rows.len() == 0 {
                        first = position;
                    } else if position != first + rows.len() as u32 {
                        break;
                    }
                    rows.push(
                        paged.k_row(page.id, self.kv_head, self.token),
                        paged.v_row(page.id, self.kv_head, self.token),
                    );
                }
                self.token += 1;
                if self.token == self.page_size {
                    (self.page, self.token) = (self.page + 1, 0);
                }
            }
            if rows.len() > 0 {
                let k = self.buffers[0].k.wrapping_add(block.len * strip_bytes);
                let v = self.buffers[0].v.wrapping_add(block.len * strip_bytes);
                // SAFETY: the rows are the paged cache's, the buffers hold whole strips.
                unsafe { PackedStrip { k, v, head_dim, dtype }.write(0, &rows) };
                block.push(Strip { k, v, position: first, num_keys: rows.len() as u32 });
            }
        }
    }
}
