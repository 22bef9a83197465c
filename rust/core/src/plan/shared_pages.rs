//! Finds which sequences start with the same pages, from the page ids alone.

use std::cmp::Reverse;

use super::indices::common_prefix;
use super::view::NONE;

/// Pages that several sequences share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SharedRun {
    /// The shared run before it, or [`NONE`].
    pub parent: u32,
    /// Its pages, as indices into the row of each sequence that it covers.
    pub begin: u32,
    pub end: u32,
    /// The sequences that it covers, by their place in the order.
    pub seq_begin: u32,
    pub seq_end: u32,
    /// The first sequence past its first branch: no two runs have the same.
    pub key: u32,
}

/// The shared runs of a batch of page rows.
#[derive(Debug, Default)]
pub(super) struct SharedPages {
    /// Runs, parents before children.
    pub runs: Vec<SharedRun>,
    /// Sequences in depth-first order.
    pub order: Vec<u32>,
    /// For each sequence, the last shared run of its path or [`NONE`].
    pub last_run: Vec<u32>,
    groups: Vec<Group>,
    ranked: Vec<Rank>,
}

/// Sequences `order[begin..end]` whose rows agree in their first `depth` pages, and for whose first
/// `start` pages there are runs.
#[derive(Debug, Clone, Copy)]
struct Group {
    begin: usize,
    end: usize,
    start: u32,
    depth: u32,
    parent: u32,
}

/// A sequence's place among its group: those that share most with the group's first come first,
/// then those that branch off at the same page by that page.
type Rank = (Reverse<u32>, Option<u32>, u32);

impl SharedPages {
    /// Compares the rows of `num_sequences` sequences; `row(i)` are the pages of sequence `i` that
    /// may be shared.
    ///
    /// Each group is compared with its first sequence and falls apart by where the others leave
    /// it, so that every page id is read a bounded number of times.
    pub fn find<'a>(&mut self, num_sequences: usize, row: impl Fn(u32) -> &'a [u32]) {
        self.runs.clear();
        self.last_run.clear();
        self.last_run.resize(num_sequences, NONE);
        self.order.clear();
        self.order.extend(0..num_sequences as u32);
        self.groups.clear();
        self.groups.push(Group { begin: 0, end: num_sequences, start: 0, depth: 0, parent: NONE });
        while let Some(group) = self.groups.pop() {
            if group.end - group.begin > 1 {
                self.split(group, &row);
            } else if group.begin < group.end {
                self.last_run[self.order[group.begin] as usize] = group.parent;
            }
        }
    }

    fn split<'a>(&mut self, group: Group, row: &impl Fn(u32) -> &'a [u32]) {
        let Self { runs, order, last_run, groups, ranked } = self;
        let members = &mut order[group.begin..group.end];
        let first = row(members[0]);
        ranked.clear();
        ranked.extend(members.iter().map(|&sequence| {
            let pages = row(sequence);
            let shared = common_prefix(first, pages, group.depth as usize);
            (Reverse(shared as u32), pages.get(shared).copied(), sequence)
        }));
        ranked.sort_unstable();
        for (member, rank) in members.iter_mut().zip(ranked.iter()) {
            *member = rank.2;
        }
        // From the shallowest branch inwards: members[..count] share `shared` pages.
        let mut count = ranked.len();
        let mut start = group.start;
        let mut parent = group.parent;
        while count > 0 {
            let Reverse(shared) = ranked[count - 1].0;
            let inner = ranked[..count].partition_point(|rank| rank.0.0 > shared);
            if count > 1 && shared > start {
                runs.push(SharedRun {
                    parent,
                    begin: start,
                    end: shared,
                    seq_begin: group.begin as u32,
                    seq_end: (group.begin + count) as u32,
                    key: ranked[inner.max(1)].2,
                });
                parent = runs.len() as u32 - 1;
                start = shared;
            }
            let mut begin = inner;
            while begin < count {
                let page = ranked[begin].1;
                let same = ranked[begin..count].iter().take_while(|rank| rank.1 == page).count();
                let end = begin + same;
                if page.is_none() {
                    for rank in &ranked[begin..end] {
                        last_run[rank.2 as usize] = parent;
                    }
                } else {
                    groups.push(Group {
                        begin: group.begin + begin,
                        end: group.begin + end,
                        start,
                        depth: shared + 1,
                        parent,
                    });
                }
                begin = end;
            }
            count = inner;
        }
    }
}
