//! Integer arguments of any width, checked.

use std::fmt::Display;

use crate::error::{Error, Result};

/// An integer that an index table may be made of: `i32` as vLLM and FlashInfer have them, `u32`,
/// `i64`.
pub trait Index: Copy + Display + TryInto<u32> {}

impl<T: Copy + Display + TryInto<u32>> Index for T {}

/// Rows of `q` that one step may have: more than any memory holds, and few enough that a wrong
/// `qo_indptr` is refused before anything of its size is allocated.
pub(super) const MAX_QO_ROWS: usize = 1 << 24;

/// Integers compared at a time: enough for the compiler to use vector instructions.
const STRIDE: usize = 64;

/// Reads one integer from 0 to `max`; `argument` names it in the error.
pub(super) fn parse<T: Index>(
    value: T,
    max: u32,
    argument: impl FnOnce() -> String,
) -> Result<u32> {
    let parsed: Option<u32> = value.try_into().ok().filter(|&parsed| parsed <= max);
    parsed.ok_or_else(|| Error::invalid(argument(), value, format!("0 to {max}")))
}

/// Reads offsets that start at 0, never fall, and end at most at `limit`; one more than `count`.
pub(super) fn parse_indptr<T: Index>(
    argument: &str,
    values: &[T],
    count: usize,
    limit: usize,
) -> Result<Vec<u32>> {
    if values.len() != count + 1 {
        let allowed = format!("{} entries, one more than there are sequences", count + 1);
        return Err(Error::invalid(argument, format!("{} entries", values.len()), allowed));
    }
    let mut offsets = Vec::with_capacity(values.len());
    let mut last = 0;
    for (index, &value) in values.iter().enumerate() {
        let name = || format!("{argument}[{index}]");
        let end = if index == 0 { 0 } else { u32::try_from(limit).unwrap_or(u32::MAX) };
        let range = last..=end;
        let offset: Option<u32> = value.try_into().ok().filter(|offset| range.contains(offset));
        let offset = offset.ok_or_else(|| {
            let allowed = if index == 0 { "0".to_owned() } else { format!("{last} to {end}") };
            Error::invalid(name(), value, allowed)
        })?;
        offsets.push(offset);
        last = offset;
    }
    Ok(offsets)
}

/// Checks that all integers are non-negative and of 32 bits.
pub(super) fn check_ids<T: Index>(ids: &[T], argument: impl Fn(usize) -> String) -> Result<()> {
    let is_id = |id: T| id.try_into().is_ok();
    let (strides, rest) = ids.as_chunks::<STRIDE>();
    let all = |stride: &[T]| stride.iter().fold(true, |ok, &id| ok & is_id(id));
    if strides.iter().all(|stride| all(stride)) && all(rest) {
        return Ok(());
    }
    for (index, &id) in ids.iter().enumerate() {
        parse(id, u32::MAX, || argument(index))?;
    }
    Ok(())
}

/// Whether `given` holds the same ids as `held`.
pub(super) fn same_ids<T: Index>(held: &[u32], given: &[T]) -> bool {
    let differ = |(&old, &new): (&u32, &T)| new.try_into().map_or(true, |new: u32| new != old);
    held.len() == given.len()
        && held.chunks(STRIDE).zip(given.chunks(STRIDE)).all(|(held, given)| {
            !held.iter().zip(given).fold(false, |any, pair| any | differ(pair))
        })
}

/// The number of leading words in which two rows agree, given that they agree up to `from`.
pub(super) fn common_prefix(left: &[u32], right: &[u32], from: usize) -> usize {
    let len = left.len().min(right.len());
    let mut at = from;
    while at + STRIDE <= len && left[at..at + STRIDE] == right[at..at + STRIDE] {
        at += STRIDE;
    }
    let rest = left[at..len].iter().zip(&right[at..len]);
    at + rest.take_while(|(left, right)| left == right).count()
}
