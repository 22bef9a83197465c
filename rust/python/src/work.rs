//! Work items for the GPU kernel, as numpy arrays.

use chunkcache::error::{Error, Result};
use chunkcache::plan::{Cutter, DeviceCosts, HeadShape, PlanView, SegmentRow, SequenceRow, Work};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;

use crate::args::IntoPython;
use crate::numpy::uint32_array;

/// K/V heads, query heads per K/V head, warps of a block that compute, and whether four of them
/// multiply together.
pub type Heads = (u32, u32, u32, bool);

/// Items, merge items, tokens, merges and rows without keys, flat, and the number of partial slots.
pub type WorkArrays<'py> = (
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    u32,
);

/// The head shape that these heads make.
///
/// # Errors
/// As [`HeadShape::new`].
pub fn head_shape(heads: Heads) -> Result<HeadShape> {
    let (num_kv_heads, group, warps, grouped) = heads;
    HeadShape::new(num_kv_heads, group, warps, grouped)
}

/// A cutter for heads on a device (blocks, cost of an item, of a tile of
/// rows per key, of a partial row).
///
/// # Errors
/// As [`HeadShape::new`] and [`Cutter::new`].
pub fn cutter(heads: Heads, costs: (u32, f32, f32, f32)) -> Result<Cutter> {
    let (num_blocks, item, row_tile, partial_row) = costs;
    Cutter::new(head_shape(heads)?, DeviceCosts { num_blocks, item, row_tile, partial_row })
}

/// The tables of a cut.
pub fn work_arrays<'py>(py: Python<'py>, work: &Work) -> PyResult<WorkArrays<'py>> {
    let items: Vec<u32> = work.items.iter().flat_map(|item| *item.words()).collect();
    Ok((
        uint32_array(py, &items)?,
        uint32_array(py, work.merge_items.as_flattened())?,
        uint32_array(py, work.tokens.as_flattened())?,
        uint32_array(py, work.merges.as_flattened())?,
        uint32_array(py, &work.pad_rows)?,
        work.num_slots,
    ))
}

/// Contiguous uint32 words.
type Words = PyBuffer<u32>;

fn slice(words: &Words) -> &[u32] {
    // SAFETY: the export keeps the array in place; it was made for this call.
    words.as_slice_ptr().map_or(&[], |slice| unsafe { slice.as_ref() })
}

/// Cut tables that were made by hand, for tests and benchmarks: as `Plan.tables` returns them, and
/// heads and costs as `Plan.cut` takes them.
#[pyfunction]
#[pyo3(signature = (tables, heads, costs))]
pub fn cut_tables<'py>(
    py: Python<'py>,
    tables: (u32, u32, Words, Words, Words, Words, Words),
    heads: Heads,
    costs: (u32, f32, f32, f32),
) -> PyResult<WorkArrays<'py>> {
    let (page_size, num_qo_rows, order, sequences, segment_order, segments, page_ids) = &tables;
    let (sequences, _) = slice(sequences).as_chunks();
    let (segments, _) = slice(segments).as_chunks();
    let sequences: Vec<SequenceRow> = sequences
        .iter()
        .map(|&[leaf, qo_begin, qo_len, kv_len, num_cached_rows]| SequenceRow {
            leaf,
            qo_begin,
            qo_len,
            kv_len,
            num_cached_rows,
        })
        .collect();
    let segments: Vec<SegmentRow> = segments
        .iter()
        .map(|&[parent, seq_begin, seq_end, start_pos, num_pages, ids_begin]| SegmentRow {
            parent,
            seq_begin,
            seq_end,
            start_pos,
            num_pages,
            ids_begin,
        })
        .collect();
    let view = PlanView {
        page_size: *page_size,
        num_qo_rows: *num_qo_rows,
        order: slice(order),
        sequences: &sequences,
        segment_order: slice(segment_order),
        segments: &segments,
        page_ids: slice(page_ids),
    };
    check(&view).into_python(py)?;
    let mut cutter = cutter(heads, costs).into_python(py)?;
    work_arrays(py, cutter.cut(&view))
}

/// Refuses tables that name what is not there.
fn check(view: &PlanView<'_>) -> Result<()> {
    let invalid = |what: &str, row: u32| {
        Error::invalid("tables", format!("{what} {row}"), "tables as Plan.tables returns them")
    };
    if view.page_size == 0 || !view.page_size.is_multiple_of(16) {
        return Err(invalid("pages of", view.page_size));
    }
    if let Some(&row) = view.order.iter().find(|&&row| row as usize >= view.sequences.len()) {
        return Err(invalid("sequence row", row));
    }
    for &row in view.segment_order {
        let Some(segment) = view.segments.get(row as usize) else {
            return Err(invalid("segment row", row));
        };
        let ids_end = u64::from(segment.ids_begin) + u64::from(segment.num_pages);
        if segment.seq_begin > segment.seq_end
            || segment.seq_end as usize > view.order.len()
            || ids_end > view.page_ids.len() as u64
        {
            return Err(invalid("segment row", row));
        }
    }
    Ok(())
}
