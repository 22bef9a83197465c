//! Checks of a plan's tables, and what is read from them before any key is.

use super::schedule::TokenRow;
use crate::error::{Error, Result};
use crate::plan::{NONE, PlanView};

/// For each place in `order`, its first query token; at the end, the number of tokens. Checks the
/// sequence rows on the way.
pub(super) fn token_spans(view: &PlanView<'_>) -> Result<Vec<usize>> {
    let mut spans = vec![0];
    for &sequence in view.order {
        let row = view.sequences.get(sequence as usize).ok_or_else(|| {
            invalid(format!("sequence row {sequence}"), format!("below {}", view.sequences.len()))
        })?;
        if u64::from(row.qo_begin) + u64::from(row.qo_len) > u64::from(view.num_qo_rows) {
            return Err(invalid(
                format!("query rows {} + {}", row.qo_begin, row.qo_len),
                format!("at most {}", view.num_qo_rows),
            ));
        }
        if row.kv_len > i32::MAX as u32 {
            return Err(invalid(format!("kv_len {}", row.kv_len), "below 2^31"));
        }
        if row.leaf != NONE && row.leaf as usize >= view.segments.len() {
            return Err(invalid(
                format!("leaf {}", row.leaf),
                format!("below {}", view.segments.len()),
            ));
        }
        spans.push(spans[spans.len() - 1] + row.qo_len as usize);
    }
    Ok(spans)
}

/// Checks the segment rows.
pub(super) fn check_segments(view: &PlanView<'_>) -> Result<()> {
    if view.page_size == 0 {
        return Err(invalid("page_size 0", "1 or more"));
    }
    let mut seen = vec![false; view.segments.len()];
    for &row in view.segment_order {
        let Some(segment) = view.segments.get(row as usize) else {
            return Err(invalid(
                format!("segment row {row}"),
                format!("below {}", view.segments.len()),
            ));
        };
        let ids_end = u64::from(segment.ids_begin) + u64::from(segment.num_pages);
        if ids_end > view.page_ids.len() as u64 {
            return Err(invalid(
                format!("page ids up to {ids_end} of segment {row}"),
                format!("at most {}", view.page_ids.len()),
            ));
        }
        if segment.seq_begin > segment.seq_end || segment.seq_end as usize > view.order.len() {
            return Err(invalid(
                format!("sequences {}..{} of segment {row}", segment.seq_begin, segment.seq_end),
                format!("a range of 0..{}", view.order.len()),
            ));
        }
        let start = match segment.parent {
            NONE => 0,
            parent if seen.get(parent as usize) == Some(&true) => end_position(view, parent),
            parent => {
                return Err(invalid(
                    format!("parent {parent} of segment {row}"),
                    "a segment before it in segment_order",
                ));
            }
        };
        if u64::from(segment.start_pos) != start || end_position(view, row) > i32::MAX as u64 {
            return Err(invalid(
                format!("start_pos {} of segment {row}", segment.start_pos),
                format!("{start}, where its parent ends, and an end below 2^31"),
            ));
        }
        seen[row as usize] = true;
    }
    for &sequence in view.order {
        let leaf = view.sequences[sequence as usize].leaf;
        if leaf != NONE && !seen[leaf as usize] {
            return Err(invalid(format!("leaf {leaf}"), "a segment of segment_order"));
        }
    }
    Ok(())
}

/// One past the position of a segment's last key.
pub(super) fn end_position(view: &PlanView<'_>, segment: u32) -> u64 {
    let row = &view.segments[segment as usize];
    u64::from(row.start_pos) + u64::from(row.num_pages) * u64::from(view.page_size)
}

/// The query tokens, in the order of the sequences.
pub(super) fn token_rows(view: &PlanView<'_>, window_left: Option<u32>) -> Vec<TokenRow> {
    let mut tokens = Vec::new();
    for &sequence in view.order {
        let row = &view.sequences[sequence as usize];
        for t in 0..row.qo_len {
            // A query before position 0 sees nothing.
            let key_end = (row.kv_len + t + 1).saturating_sub(row.qo_len);
            let key_begin = match window_left {
                Some(window) => key_end.saturating_sub(window.saturating_add(1)),
                None => 0,
            };
            tokens.push(TokenRow { q_row: row.qo_begin + t, key_begin, key_end });
        }
    }
    tokens
}

/// Query rows that no sequence names. Checks that no row is named twice.
pub(super) fn padding_rows(view: &PlanView<'_>, tokens: &[TokenRow]) -> Result<Vec<u32>> {
    let mut named = vec![false; view.num_qo_rows as usize];
    for token in tokens {
        if std::mem::replace(&mut named[token.q_row as usize], true) {
            return Err(invalid(format!("query row {} twice", token.q_row), "each row once"));
        }
    }
    Ok((0..view.num_qo_rows).filter(|&row| !named[row as usize]).collect())
}

/// A fault in a plan.
pub(super) fn invalid(given: impl ToString, allowed: impl Into<String>) -> Error {
    Error::invalid("plan", given, allowed)
}
