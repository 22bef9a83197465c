//! The page ids and lengths of a batch, as paged caches keep them.

use super::indices::{Index, parse, parse_indptr};
use crate::error::{Error, Result};
use crate::tree::MAX_POSITIONS;

/// The pages of a batch of sequences, in one of the two forms in which paged caches keep them.
#[derive(Debug, Clone, Copy)]
pub enum PageTable<'a, T> {
    /// vLLM's form: row `i` of the block table starts with the pages of sequence `i`. What
    /// follows them in the row is not read.
    Dense {
        /// The rows one after the other, `[num_sequences, width]`.
        block_table: &'a [T],
        /// Entries of one row.
        width: usize,
        /// Tokens of each sequence, this step's included.
        seq_lens: &'a [T],
    },
    /// FlashInfer's form: `kv_indices[kv_indptr[i]..kv_indptr[i + 1]]` are the pages of sequence
    /// `i`.
    Csr {
        /// Offsets, one more than there are sequences.
        kv_indptr: &'a [T],
        /// The pages of all sequences one after the other.
        kv_indices: &'a [T],
        /// Tokens in the last page of each sequence, 1 to the page size; not read for a sequence
        /// without pages.
        kv_last_page_len: &'a [T],
    },
}

/// One sequence's pages and length.
#[derive(Debug, Clone, Copy)]
pub(super) struct PageRow<'a, T> {
    /// Its pages, the last perhaps partly used.
    pub pages: &'a [T],
    /// Where its pages begin in the argument that holds them.
    pub begin: usize,
    /// Its tokens, this step's included.
    pub kv_len: u32,
}

impl<'a, T: Index> PageTable<'a, T> {
    /// Sequences, and the pages of the longest one.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for lengths and offsets that do not fit the rest.
    pub fn size(&self, page_size: u32) -> Result<(usize, usize)> {
        let rows = self.rows(page_size)?;
        Ok((rows.len(), rows.iter().map(|row| row.pages.len()).max().unwrap_or(0)))
    }

    /// The name of a page id, given its index in the argument that holds them all.
    pub(super) fn name_of(&self, index: usize) -> String {
        match *self {
            Self::Dense { width, .. } => {
                format!("block_table[{}, {}]", index / width.max(1), index % width.max(1))
            }
            Self::Csr { .. } => format!("kv_indices[{index}]"),
        }
    }

    /// The sequences one by one; lengths are checked, page ids are not.
    pub(super) fn rows(&self, page_size: u32) -> Result<Vec<PageRow<'a, T>>> {
        match *self {
            Self::Dense { block_table, width, seq_lens } => {
                dense_rows(block_table, width, seq_lens, page_size)
            }
            Self::Csr { kv_indptr, kv_indices, kv_last_page_len } => {
                csr_rows(kv_indptr, kv_indices, kv_last_page_len, page_size)
            }
        }
    }
}

/// Tokens of one sequence at most: positions are of 31 bits, to the end of the last page.
fn max_tokens(page_size: u32) -> u32 {
    MAX_POSITIONS - MAX_POSITIONS % page_size
}

fn dense_rows<'a, T: Index>(
    block_table: &'a [T],
    width: usize,
    seq_lens: &[T],
    page_size: u32,
) -> Result<Vec<PageRow<'a, T>>> {
    let (num_ids, num_sequences) = (block_table.len(), seq_lens.len());
    if num_sequences.checked_mul(width) != Some(num_ids) {
        let given = match num_ids.checked_div(width) {
            Some(rows) if num_ids.is_multiple_of(width) => format!("{rows} rows"),
            _ => format!("{num_ids} entries in rows of {width}"),
        };
        let allowed = format!("{num_sequences} rows of {width}, one row for each of seq_lens");
        return Err(Error::invalid("block_table", given, allowed));
    }
    let row = |(index, &len): (usize, &T)| {
        let kv_len = parse(len, max_tokens(page_size), || format!("seq_lens[{index}]"))?;
        let num_pages = kv_len.div_ceil(page_size) as usize;
        if num_pages > width {
            let allowed = format!("at most block_table's {width} pages of {page_size} tokens");
            return Err(Error::invalid(format!("seq_lens[{index}]"), len, allowed));
        }
        let begin = index * width;
        Ok(PageRow { pages: &block_table[begin..begin + num_pages], begin, kv_len })
    };
    seq_lens.iter().enumerate().map(row).collect()
}

fn csr_rows<'a, T: Index>(
    kv_indptr: &[T],
    kv_indices: &'a [T],
    kv_last_page_len: &[T],
    page_size: u32,
) -> Result<Vec<PageRow<'a, T>>> {
    let offsets = parse_indptr("kv_indptr", kv_indptr, kv_last_page_len.len(), kv_indices.len())?;
    let row = |(index, (span, &last_len)): (usize, (&[u32], &T))| {
        let (begin, end) = (span[0] as usize, span[1] as usize);
        let name = || format!("kv_last_page_len[{index}]");
        let mut kv_len = 0;
        if begin < end {
            let allowed = || format!("1 to {page_size}");
            let last: Option<u32> = last_len.try_into().ok();
            let last = last.filter(|last| (1..=page_size).contains(last));
            let last = last.ok_or_else(|| Error::invalid(name(), last_len, allowed()))?;
            let max_pages = max_tokens(page_size) / page_size;
            if span[1] - span[0] > max_pages {
                let given = format!("{} pages of {page_size} tokens", end - begin);
                let allowed = format!("at most {max_pages} for one sequence");
                return Err(Error::invalid(format!("kv_indptr[{}]", index + 1), given, allowed));
            }
            kv_len = (span[1] - span[0] - 1) * page_size + last;
        }
        Ok(PageRow { pages: &kv_indices[begin..end], begin, kv_len })
    };
    offsets.windows(2).zip(kv_last_page_len).enumerate().map(row).collect()
}
