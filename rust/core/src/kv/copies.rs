//! Copies of chunk heads that run side by side.

use std::collections::HashSet;

use crate::tree::CopyChunk;

/// Cuts copies, in the order in which they are to be made, into runs whose copies may be made all at
/// once: none of a run reads or writes a chunk that another one of it writes.
///
/// ```
/// use chunkcache::kv::independent_runs;
/// use chunkcache::tree::CopyChunk;
///
/// let copy = |src, dst| CopyChunk { src, dst, num_tokens: 3 };
/// // The second copy reads what the first writes, and the third overwrites what the second reads.
/// let copies = [copy(0, 1), copy(1, 2), copy(5, 1)];
/// assert_eq!(independent_runs(&copies).count(), 3);
/// assert_eq!(independent_runs(&[copy(0, 1), copy(0, 2)]).count(), 1);
/// ```
pub fn independent_runs(copies: &[CopyChunk]) -> impl Iterator<Item = &[CopyChunk]> {
    let mut rest = copies;
    std::iter::from_fn(move || {
        let (mut read, mut written) = (HashSet::new(), HashSet::new());
        let len = rest
            .iter()
            .take_while(|copy| {
                let is_apart = !written.contains(&copy.src)
                    && !written.contains(&copy.dst)
                    && !read.contains(&copy.dst);
                read.insert(copy.src);
                written.insert(copy.dst);
                is_apart
            })
            .count();
        let (run, later) = rest.split_at(len);
        rest = later;
        (!run.is_empty()).then_some(run)
    })
}
