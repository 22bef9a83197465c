//! Partial attention over keys and values in plain arrays: the paper's `partial_attn`.

use super::{AttentionParams, KvSource, Workers, attend};
use crate::error::{Error, Result};
use crate::kv::rows::check_rows;
use crate::kv::{PageStrides, PagedKv, PagedShape, Rows, RowsLayout, RowsMut};
use crate::plan::{NONE, PlanView, SegmentRow, SequenceRow};

/// Keys of a page.
const PAGE_SIZE: u32 = 64;

/// Attention of every query to all keys: a state `(out, lse)` that can be merged with others.
///
/// `q` is `[tokens, num_qo_heads, head_dim]`; `k` and `v` are `[keys, num_kv_heads, head_dim]`, all
/// of one dtype. `out` and `lse` are as in [`attend`]; without keys they are 0 and -inf.
///
/// # Errors
/// [`Error::InvalidConfig`] for arguments that do not fit together, and for a window: the positions
/// of the queries are not known here.
pub fn partial_attention(
    q: &Rows<'_>,
    k: &Rows<'_>,
    v: &Rows<'_>,
    params: &AttentionParams,
    out: &mut RowsMut<'_>,
    lse: Option<&mut [f32]>,
    workers: &Workers,
) -> Result<()> {
    if params.window_left != -1 {
        return Err(Error::invalid("window_left", params.window_left, "-1 in partial attention"));
    }
    let RowsLayout { num_tokens: num_keys, num_heads, head_dim, .. } = *k.layout();
    check_rows("v", v.layout(), v.dtype(), (num_heads, head_dim, k.dtype()))?;
    if v.layout().num_tokens != num_keys {
        let given = format!("{} keys", v.layout().num_tokens);
        return Err(Error::invalid("v", given, format!("{num_keys}, as k")));
    }
    let num_rows = q.layout().num_tokens;
    let (Ok(keys), Ok(rows)) = (i32::try_from(num_keys), u32::try_from(num_rows)) else {
        return Err(Error::invalid("k", format!("{num_keys} keys"), "below 2^31"));
    };
    let keys = keys.unsigned_abs();
    // Pages, so that a long run of keys can be cut. The rows past the last key are not read.
    let page_size = keys.clamp(1, PAGE_SIZE);
    let num_pages = keys.div_ceil(page_size);
    let shape = PagedShape {
        num_pages: num_pages as usize,
        page_size: page_size as usize,
        num_kv_heads: num_heads,
        head_dim,
        dtype: k.dtype(),
    };
    let strides = |rows: &Rows<'_>| PageStrides {
        page: page_size as usize * rows.layout().token_stride,
        head: rows.layout().head_stride,
        token: rows.layout().token_stride,
    };
    // SAFETY: the pages are the rows of k and v, and those past the last are not read.
    let paged = unsafe { PagedKv::from_raw(k.base(), v.base(), shape, strides(k), strides(v))? };
    let leaf = if keys == 0 { NONE } else { 0 };
    let sequences = (0..rows)
        .map(|row| SequenceRow { leaf, qo_begin: row, qo_len: 1, kv_len: keys, num_cached_rows: 0 })
        .collect::<Vec<_>>();
    let order = (0..rows).collect::<Vec<_>>();
    let page_ids = (0..num_pages).collect::<Vec<_>>();
    let segment = SegmentRow {
        parent: NONE,
        seq_begin: 0,
        seq_end: rows,
        start_pos: 0,
        num_pages,
        ids_begin: 0,
    };
    let view = PlanView {
        page_size,
        num_qo_rows: rows,
        order: &order,
        sequences: &sequences,
        segment_order: if keys == 0 { &[] } else { &[0] },
        segments: &[segment],
        page_ids: &page_ids,
    };
    attend(&view, &KvSource::Paged(paged), q, params, out, lse, workers)
}
