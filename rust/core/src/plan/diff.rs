//! What a copy of the tables needs to catch up.

use std::ops::Range;

use super::image::{Image, advance_words};
use crate::error::{Error, Result};

/// Unchanged words between two ranges that cost less to send than a range of their own.
const MAX_GAP: u32 = 3;

/// Words of a patch before the ranges.
const PATCH_HEADER: usize = 2;

/// Words of a patch for each range.
const PATCH_RANGE: usize = 3;

/// The changes that bring a copy of the image from one version to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diff {
    /// The version of the copy; 0 if it is all zeros.
    pub from: u64,
    /// The version that the copy has afterwards.
    pub to: u64,
    /// The copy first advances its sequences, `kv_len += qo_len` for each that its `order` names.
    pub advance: bool,
    /// The word ranges to overwrite: ascending, apart from each other.
    pub ranges: Vec<Range<u32>>,
}

impl Diff {
    /// Words to overwrite.
    pub fn num_words(&self) -> usize {
        self.ranges.iter().map(|range| range.len()).sum()
    }

    /// Nothing to overwrite; the lengths may still advance.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Words of the patch that [`Image::write_patch`] makes of it.
    pub fn patch_words(&self) -> usize {
        PATCH_HEADER + self.ranges.len() * PATCH_RANGE + self.num_words()
    }
}

impl Image {
    /// What a copy at `version` needs, where 0 is a copy of zeros. Several copies may be behind by
    /// different numbers of versions; one at a version that this image never had gets all words.
    pub fn diff_since(&self, version: u64) -> Diff {
        let to = self.version();
        let diff = |advance, ranges| Diff { from: version, to, advance, ranges };
        if version == to {
            return diff(false, Vec::new());
        }
        if version > to {
            return self.whole(version);
        }
        let changes = (version + 1..=to).filter_map(|step| self.change(step));
        if version + 1 == to
            && let Some(change) = self.change(to)
        {
            return diff(change.advance, coalesce(change.ranges.iter().copied()));
        }
        // Over several versions a sequence may have advanced by different numbers of tokens.
        let lengths = self.advanced_since(version).map(|index| (index, index + 1));
        let ranges = match self.change(version + 1) {
            Some(_) => {
                coalesce(changes.flat_map(|change| change.ranges.iter().copied()).chain(lengths))
            }
            None => coalesce(self.written_since(version).chain(lengths)),
        };
        diff(false, ranges)
    }

    fn whole(&self, version: u64) -> Diff {
        let all = 0..self.words().len() as u32;
        Diff { from: version, to: self.version(), advance: false, ranges: vec![all] }
    }

    /// [`Image::diff_since`] for a copy that follows several images, as the copy on the device may:
    /// all words if it holds another one now, or if the changes would be more to send. Image 0 is no
    /// image: a copy of zeros.
    pub fn diff_for(&self, image_id: u64, version: u64) -> Diff {
        let diff = match image_id {
            0 => self.diff_since(0),
            same if same == self.id() => self.diff_since(version),
            _ => return self.whole(version),
        };
        if diff.patch_words() > self.max_patch_words() { self.whole(version) } else { diff }
    }

    /// Words of the longest patch that [`Image::diff_for`] asks for.
    pub fn max_patch_words(&self) -> usize {
        PATCH_HEADER + PATCH_RANGE + self.words().len()
    }

    /// Writes the patch that carries `diff` into `staging` and returns its length in words.
    ///
    /// A patch is, in words: advance (0 or 1); number of ranges n; n times (first word of the
    /// image, number of words, index of their first value in the patch); then the values.
    ///
    /// # Errors
    /// [`Error::StalePlan`] if the image has moved on since the diff was taken,
    /// [`Error::InvalidConfig`] if `staging` is too short. Nothing is written then.
    pub fn write_patch(&self, diff: &Diff, staging: &mut [u32]) -> Result<usize> {
        if diff.to != self.version() {
            return Err(Error::StalePlan { plan: diff.to });
        }
        let num_words = diff.patch_words();
        if staging.len() < num_words {
            let allowed = format!("at least the {num_words} words of the patch");
            return Err(Error::invalid("staging", format!("{} words", staging.len()), allowed));
        }
        staging[0] = u32::from(diff.advance);
        staging[1] = diff.ranges.len() as u32;
        let mut value = PATCH_HEADER + diff.ranges.len() * PATCH_RANGE;
        for (index, range) in diff.ranges.iter().enumerate() {
            let at = PATCH_HEADER + index * PATCH_RANGE;
            staging[at..at + PATCH_RANGE].copy_from_slice(&[
                range.start,
                range.len() as u32,
                value as u32,
            ]);
            let words = &self.words()[range.start as usize..range.end as usize];
            staging[value..value + words.len()].copy_from_slice(words);
            value += words.len();
        }
        Ok(num_words)
    }
}

/// Applies a patch to a copy of an image, as the device does: advance, then overwrite.
///
/// # Errors
/// [`Error::InvalidConfig`] if the patch is cut short or reaches past the copy, or if it advances a
/// copy that is no image. Nothing is changed then.
pub fn apply_patch(words: &mut [u32], patch: &[u32]) -> Result<()> {
    let invalid = |given: String| Error::invalid("patch", given, "a whole patch for this image");
    let &[advance, num_ranges, ref rest @ ..] = patch else {
        return Err(invalid(format!("{} words", patch.len())));
    };
    let ranges = rest
        .get(..num_ranges as usize * PATCH_RANGE)
        .ok_or_else(|| invalid(format!("{} words for {num_ranges} ranges", patch.len())))?;
    let (ranges, _) = ranges.as_chunks::<PATCH_RANGE>();
    let bounds = |&[target, len, value]: &[u32; PATCH_RANGE]| {
        let span = |begin: u32| begin as usize..begin as usize + len as usize;
        (span(target), span(value))
    };
    for (target, value) in ranges.iter().map(bounds) {
        if target.end > words.len() || value.end > patch.len() {
            return Err(invalid(format!("words {target:?} from {value:?}")));
        }
    }
    if advance != 0 && !advance_words(words) {
        return Err(Error::invalid("words", "no image", "an image to advance"));
    }
    for (target, value) in ranges.iter().map(bounds) {
        words[target].copy_from_slice(&patch[value]);
    }
    Ok(())
}

/// Sorts ranges and joins those that overlap or nearly touch.
fn coalesce(ranges: impl Iterator<Item = (u32, u32)>) -> Vec<Range<u32>> {
    let mut sorted: Vec<_> = ranges.collect();
    // Stable, since that is fast where most come in order.
    sorted.sort();
    let mut joined: Vec<Range<u32>> = Vec::new();
    for (begin, end) in sorted {
        match joined.last_mut() {
            Some(last) if begin <= last.end + MAX_GAP => last.end = last.end.max(end),
            _ => joined.push(begin..end),
        }
    }
    joined
}
