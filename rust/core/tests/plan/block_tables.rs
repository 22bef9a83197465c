//! Plans from block tables: which pages are found to be shared, what is refused, what changes.

use crate::support::{Copy, Expected, check_tables, path};
use chunkcache::error::Error;
use chunkcache::plan::{
    BlockTablePlanner, NO_SLOT, NONE, PageTable, Plan, PlanView, plan_from_block_tables,
    plan_from_csr,
};
use proptest::prelude::*;

const PAGE: u32 = 16;

/// A batch as plain lists: the pages of each sequence and its length.
#[derive(Debug, Clone)]
struct Batch {
    pages: Vec<Vec<i32>>,
    lens: Vec<i32>,
}

impl Batch {
    fn width(&self) -> usize {
        self.pages.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// Rows padded with -1, which nothing may read.
    fn table(&self) -> Vec<i32> {
        let width = self.width();
        let pad = |row: &Vec<i32>| {
            let mut row = row.clone();
            row.resize(width, -1);
            row
        };
        self.pages.iter().flat_map(pad).collect()
    }

    fn expected(&self, qo_indptr: &[u32]) -> Vec<Expected> {
        let rows = self.pages.iter().zip(&self.lens).zip(qo_indptr.windows(2));
        rows.map(|((pages, &len), span)| Expected {
            qo_begin: span[0],
            qo_len: span[1] - span[0],
            kv_len: len as u32,
            num_cached_rows: 0,
            pages: pages.iter().map(|&id| id as u32).collect(),
        })
        .collect()
    }

    fn plan(&self) -> (BlockTablePlanner, Plan) {
        plan_from_block_tables(&self.table(), self.width(), &self.lens, PAGE, None).unwrap()
    }
}

fn update(planner: &mut BlockTablePlanner, batch: &Batch, grown: bool) -> Plan {
    let table = batch.table();
    let table =
        PageTable::Dense { block_table: &table, width: batch.width(), seq_lens: &batch.lens };
    if grown { planner.update_grown(&table, None) } else { planner.update(&table, None) }.unwrap()
}

/// The pages of each sequence that others share, by its place in the batch.
fn shared_pages(view: &PlanView<'_>, num_sequences: u32) -> Vec<u32> {
    let shared = |row| {
        let path = path(view, row);
        let shared = path.iter().filter(|segment| segment.seq_end - segment.seq_begin > 1);
        shared.map(|segment| segment.num_pages).sum()
    };
    (0..num_sequences).map(shared).collect()
}

fn batch(rows: &[(&[i32], i32)]) -> Batch {
    let (pages, lens) = rows.iter().map(|(pages, len)| (pages.to_vec(), *len)).unzip();
    Batch { pages, lens }
}

#[test]
fn a_common_prefix_is_one_segment() {
    let batch = batch(&[(&[7, 8, 1], 40), (&[7, 8, 2], 48), (&[7, 8, 3], 33)]);
    let (planner, step) = batch.plan();
    let view = step.view(planner.image()).unwrap();
    check_tables(&view, &batch.expected(step.qo_indptr())).unwrap();
    assert_eq!(shared_pages(&view, 3), [2, 2, 2]);
    assert_eq!(view.segment_order.len(), 4);
}

#[test]
fn several_groups_and_levels_are_found_in_any_batch_order() {
    let batch = batch(&[
        (&[1, 2, 3, 10], 64),
        (&[5, 6, 11], 40),
        (&[1, 2, 4, 12], 64),
        (&[9], 3),
        (&[1, 2, 3, 13], 50),
        (&[5, 6, 14], 34),
        (&[1, 15], 32),
    ]);
    let (planner, step) = batch.plan();
    let view = step.view(planner.image()).unwrap();
    check_tables(&view, &batch.expected(step.qo_indptr())).unwrap();
    assert_eq!(shared_pages(&view, 7), [3, 2, 2, 0, 3, 2, 1]);
}

#[test]
fn a_partly_used_page_is_not_shared() {
    let batch = batch(&[(&[1, 2], 31), (&[1, 2], 32), (&[1, 2], 31)]);
    let (planner, step) = batch.plan();
    let view = step.view(planner.image()).unwrap();
    check_tables(&view, &batch.expected(step.qo_indptr())).unwrap();
    assert_eq!(shared_pages(&view, 3), [1, 1, 1]);
}

#[test]
fn a_full_page_that_holds_the_query_itself_is_shared() {
    let batch = batch(&[(&[1, 2], 32), (&[1, 2, 3], 40)]);
    let (planner, step) = batch.plan();
    let view = step.view(planner.image()).unwrap();
    check_tables(&view, &batch.expected(step.qo_indptr())).unwrap();
    assert_eq!(shared_pages(&view, 2), [2, 2]);
}

#[test]
fn an_empty_sequence_has_no_path() {
    let batch = batch(&[(&[], 0), (&[1], 5)]);
    let (planner, step) = batch.plan();
    let view = step.view(planner.image()).unwrap();
    assert_eq!(view.sequences[0].leaf, NONE);
    assert_eq!((step.positions(), step.slot_mapping()), (&[0, 4][..], &[NO_SLOT, 20][..]));
}

#[test]
fn rows_of_several_queries_stand_for_the_last_tokens() {
    let batch = batch(&[(&[3, 5], 18), (&[3, 9], 20)]);
    let table = batch.table();
    let indptr = Some(&[0, 3, 4][..]);
    let (_, step) = plan_from_block_tables(&table, 2, &batch.lens, PAGE, indptr).unwrap();
    assert_eq!(step.positions(), [15, 16, 17, 19]);
    assert_eq!(step.slot_mapping(), [3 * 16 + 15, 5 * 16, 5 * 16 + 1, 9 * 16 + 3]);
}

#[test]
fn both_forms_give_the_same_plan() {
    let batch = batch(&[(&[1, 2, 3], 40), (&[], 0), (&[1, 2], 32), (&[4], 1)]);
    let (dense, _) = batch.plan();
    let (csr, step) =
        plan_from_csr(&[0, 3, 3, 5, 6], &[1, 2, 3, 1, 2, 4], &[8, 0, 16, 1], PAGE, None).unwrap();
    check_tables(&step.view(csr.image()).unwrap(), &batch.expected(step.qo_indptr())).unwrap();
    assert_eq!(dense.image().words(), csr.image().words());
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let dense = |table: &[i32], width, lens: &[i32], page, indptr: Option<&[i32]>| {
        plan_from_block_tables(table, width, lens, page, indptr).unwrap_err()
    };
    let csr = |indptr: &[i32], ids: &[i32], last: &[i32]| {
        plan_from_csr(indptr, ids, last, 16, None).unwrap_err()
    };
    let cases = [
        (dense(&[1, 2, 3], 2, &[1, 1], 16, None), "block_table"),
        (dense(&[1, 2], 1, &[1, 17], 16, None), "seq_lens[1]"),
        (dense(&[1, 2], 1, &[1, -1], 16, None), "seq_lens[1]"),
        (dense(&[1, 2, -3, 4], 2, &[1, 1], 16, None), "block_table[1, 0]"),
        (dense(&[1, 2, 3, -4], 2, &[1, 17], 16, None), "block_table[1, 1]"),
        (dense(&[1], 1, &[1], 0, None), "page_size"),
        (dense(&[1], 1, &[1], (1 << 20) + 1, None), "page_size"),
        (dense(&[1], 1, &[1], u32::MAX, None), "page_size"),
        (dense(&[1, 2], 1, &[1, 1], 16, Some(&[0, 1])), "qo_indptr"),
        (dense(&[1, 2], 1, &[1, 1], 16, Some(&[1, 1, 2])), "qo_indptr[0]"),
        (dense(&[1, 2], 1, &[2, 2], 16, Some(&[0, 2, 1])), "qo_indptr[2]"),
        (dense(&[1, 2], 1, &[1, 1], 16, Some(&[0, 2, 3])), "qo_indptr[1]"),
        (csr(&[0, 2, 1], &[1, 2], &[1, 1]), "kv_indptr[2]"),
        (csr(&[0, 3], &[1, 2], &[1]), "kv_indptr[1]"),
        (csr(&[0, 2], &[1, 2], &[17]), "kv_last_page_len[0]"),
        (csr(&[0, 2], &[1, 2], &[0]), "kv_last_page_len[0]"),
        (csr(&[0, 2], &[1, -2], &[1]), "kv_indices[1]"),
    ];
    for (error, name) in cases {
        let Error::InvalidConfig { argument, .. } = &error else { panic!("{error}") };
        assert_eq!(argument, name, "{error}");
    }
}

#[test]
fn a_sequence_keeps_to_the_last_position() {
    let error = plan_from_block_tables(&[1u32], 1, &[1 << 31], 16, None).unwrap_err();
    let message = "seq_lens[0]: got 2147483648, allowed is 0 to 2147483632";
    assert_eq!(error.to_string(), message);
    let ids = vec![1u32; 2048];
    let error = plan_from_csr(&[0, 2048], &ids, &[1], 1 << 20, None).unwrap_err();
    assert!(error.to_string().starts_with("kv_indptr[1]: got 2048 pages"), "{error}");
    assert!(plan_from_csr(&[0, 2047], &ids, &[1], 1 << 20, None).is_ok());
}

#[test]
fn a_batch_past_a_capacity_changes_nothing() {
    let mut planner = BlockTablePlanner::new(PAGE, 2, 2).unwrap();
    let small = batch(&[(&[1, 2], 20), (&[1, 3], 20)]);
    let step = update(&mut planner, &small, false);
    let words = planner.image().words().to_vec();
    for large in [batch(&[(&[1], 1), (&[1], 1), (&[1], 1)]), batch(&[(&[1, 2, 3], 40)])] {
        let (ids, width) = (large.table(), large.width());
        let table = PageTable::Dense { block_table: &ids, width, seq_lens: &large.lens };
        let error = planner.update(&table, None).unwrap_err();
        assert!(error.to_string().contains("at most max_"), "{error}");
    }
    assert_eq!(planner.image().words(), words);
    assert!(step.view(planner.image()).is_ok());
}

#[test]
fn a_step_that_only_advances_changes_no_word() {
    let mut planner = BlockTablePlanner::new(PAGE, 4, 8).unwrap();
    let mut batch = batch(&[(&[1, 2, 3], 34), (&[1, 2, 4], 40)]);
    let old = update(&mut planner, &batch, false);
    batch.lens.iter_mut().for_each(|len| *len += 1);
    update(&mut planner, &batch, true);
    let diff = planner.image().diff_since(old.epoch());
    assert!(diff.is_empty() && diff.advance, "{diff:?}");
}

#[test]
fn a_page_that_is_added_costs_a_few_words() {
    let mut planner = BlockTablePlanner::new(PAGE, 4, 8).unwrap();
    let mut batch = batch(&[(&[1, 2, 3], 48), (&[1, 2, 4], 40)]);
    let old = update(&mut planner, &batch, false);
    batch.lens.iter_mut().for_each(|len| *len += 1);
    batch.pages[0].push(9);
    update(&mut planner, &batch, true);
    assert_eq!(planner.image().diff_since(old.epoch()).num_words(), 2);
}

#[test]
fn an_older_step_is_stale() {
    let mut planner = BlockTablePlanner::new(PAGE, 4, 8).unwrap();
    let batch = batch(&[(&[1], 3)]);
    let old = update(&mut planner, &batch, false);
    update(&mut planner, &batch, false);
    let error = old.view(planner.image()).unwrap_err();
    assert_eq!(error, Error::StalePlan { plan: 2 });
}

/// Sequences that are random walks over few pages, so that they share prefixes of all lengths.
fn batches() -> impl Strategy<Value = Batch> {
    let sequence = (prop::collection::vec(0..3_i32, 0..7), 0..16_i32);
    prop::collection::vec(sequence, 0..9).prop_map(|sequences| {
        let (pages, lens) = sequences
            .into_iter()
            .map(|(pages, spare)| {
                let len = (pages.len() as i32 * 16 - spare).max(0);
                (pages, len)
            })
            .unzip();
        Batch { pages, lens }
    })
}

/// For each sequence the most full pages that it has in common with any other.
fn longest_shared(batch: &Batch) -> Vec<u32> {
    let full = |i: usize| &batch.pages[i][..batch.lens[i] as usize / PAGE as usize];
    let common = |i, j| full(i).iter().zip(full(j)).take_while(|(a, b)| a == b).count() as u32;
    let all = 0..batch.pages.len();
    let longest = |i| all.clone().filter(|&j| j != i).map(|j| common(i, j)).max().unwrap_or(0);
    all.clone().map(longest).collect()
}

proptest! {
    #[test]
    fn every_shared_prefix_is_found(batch in batches()) {
        let (planner, step) = batch.plan();
        let view = step.view(planner.image()).unwrap();
        check_tables(&view, &batch.expected(step.qo_indptr())).map_err(TestCaseError::fail)?;
        prop_assert_eq!(shared_pages(&view, batch.lens.len() as u32), longest_shared(&batch));
    }

    #[test]
    fn patches_keep_a_copy_equal(batches in prop::collection::vec((batches(), 0..40_i32), 1..12)) {
        let mut planner = BlockTablePlanner::new(PAGE, 16, 16).unwrap();
        let (mut every, mut third) = (Copy::default(), Copy::default());
        for (index, (mut batch, growth)) in batches.into_iter().enumerate() {
            update(&mut planner, &batch, false);
            every.sync(planner.image());
            for step in 0..growth {
                for (pages, len) in batch.pages.iter_mut().zip(&mut batch.lens) {
                    *len += 1;
                    if *len as usize > pages.len() * PAGE as usize {
                        pages.push(100 + step);
                    }
                }
                let rows = update(&mut planner, &batch, step % 2 == 0);
                let view = rows.view(planner.image()).unwrap();
                check_tables(&view, &batch.expected(rows.qo_indptr()))
                    .map_err(TestCaseError::fail)?;
                every.sync(planner.image());
                prop_assert_eq!(&every.words, planner.image().words());
            }
            if index % 3 == 0 {
                third.sync(planner.image());
                prop_assert_eq!(&third.words, planner.image().words());
            }
        }
    }
}
