//! Steps of a prefix tree: begun in the tree and laid out in the tables, or neither.

use super::indices::{MAX_QO_ROWS, parse_indptr};
use super::planner::Planner;
use super::source::Query;
use super::step::Plan;
use crate::error::{Error, Result};
use crate::tree::{PrefixTree, SeqHandle};

impl Planner {
    /// Plans a step over `batch`, in the caller's order; `None` is padding. Entry `i` has the rows
    /// `qo_indptr[i]..qo_indptr[i + 1]` of `q`, or row `i` alone without `qo_indptr`, and they
    /// stand for the next tokens that the sequence has to compute. The step holds its chunks in
    /// the tree until it is committed or aborted ([`Plan::close`]).
    ///
    /// A planner serves one tree. Its earlier plans are stale from here on.
    ///
    /// ```
    /// use chunkcache::plan::Planner;
    /// use chunkcache::tree::{PrefixTree, TreeConfig};
    ///
    /// let mut tree = PrefixTree::new(TreeConfig::new(100, 4))?;
    /// let mut planner = Planner::new(4, Planner::default_limits(4, 100))?;
    /// let seq = tree.insert(&[1, 2, 3, 4, 5, 6], b"")?.seq;
    /// let mut plan = planner.plan(&mut tree, &[Some(seq), None], Some(&[0, 6, 7]))?;
    /// assert_eq!(plan.positions(), [0, 1, 2, 3, 4, 5, 0]);
    /// assert_eq!(plan.view(planner.image())?.segment_order.len(), 1);
    /// if let Some(step) = plan.close() {
    ///     tree.commit_step(step)?;
    /// }
    /// # Ok::<(), chunkcache::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::InvalidConfig`] for a sequence that stands in the
    /// batch twice, is not ready or has no token left, for a `qo_indptr` that does not fit the
    /// batch or gives a sequence no row or more than it has tokens left, and for a step past a
    /// capacity. Nothing changes then.
    pub fn plan(
        &mut self,
        tree: &mut PrefixTree,
        batch: &[Option<SeqHandle>],
        qo_indptr: Option<&[u32]>,
    ) -> Result<Plan> {
        let (page_size, chunk_size) = (self.page_size(), tree.chunk_size());
        if page_size as usize != chunk_size {
            let given = format!("chunks of {chunk_size} tokens");
            return Err(Error::invalid("tree", given, format!("the planner's {page_size}")));
        }
        let rows = match qo_indptr {
            Some(given) => parse_indptr("qo_indptr", given, batch.len(), MAX_QO_ROWS)?,
            None => (0..=batch.len() as u32).collect(),
        };
        let mut entries = Vec::with_capacity(batch.len());
        let mut requests = Vec::with_capacity(batch.len());
        for (entry, (sequence, span)) in batch.iter().zip(rows.windows(2)).enumerate() {
            if let Some(sequence) = *sequence {
                entries.push(entry);
                requests.push((sequence, span[1] - span[0]));
            }
        }
        let name = |error| at_entry(error, &entries, qo_indptr.is_some());
        let step = tree.begin_step(&requests).map_err(name)?;
        let query = |(row, &entry): (&crate::tree::StepRow, &usize)| Query {
            sequence: row.seq,
            qo_begin: rows[entry],
            qo_len: row.len,
            kv_len: row.start + row.len,
            num_cached_rows: row.num_cached_rows,
        };
        let queries: Vec<Query> = step.rows.iter().zip(&entries).map(query).collect();
        let num_rows = rows.last().copied().unwrap_or(0);
        if let Err(error) = self.update(tree, &queries, num_rows) {
            tree.abort_step(step.id)?;
            return Err(name(error));
        }
        let watch = tree.watch_step(step.id)?;
        Ok(Plan::new(self.image(), rows, Some(watch)))
    }
}

/// Names the caller's entry in an error about one of the sequences, which stand without padding:
/// `batch[i]` becomes the caller's `batch[entries[i]]`, and `qo_len[i]` the end of its rows in
/// `qo_indptr`, if that was given.
fn at_entry(mut error: Error, entries: &[usize], has_indptr: bool) -> Error {
    if let Error::InvalidConfig { argument, .. } | Error::UnknownSequence { argument, .. } =
        &mut error
    {
        let index = argument.split_once('[').and_then(|(_, rest)| rest.strip_suffix(']'));
        let index = index.and_then(|index| index.parse::<usize>().ok());
        if let Some(entry) = index.and_then(|index| entries.get(index)) {
            *argument = match argument.starts_with("qo_len") && has_indptr {
                true => format!("qo_indptr[{}]", entry + 1),
                false => format!("batch[{entry}]"),
            };
        }
    }
    error
}
