//! Work items: every key of every row exactly once, every partial state merged exactly once; how
//! many words a step changes.

use std::collections::HashMap;

use chunkcache::plan::{BlockTablePlanner, MergeItem, MergeRow, TokenRow};
use chunkcache::plan::{
    Cutter, DeviceCosts, Diff, HeadShape, Image, ItemRow, Limits, NONE, PageTable, PlanView,
    Planner, WorkLimits, apply_patch,
};
use chunkcache::tree::SeqHandle;
use proptest::prelude::*;

use crate::support::{self, Steps, tokens};

const CHUNK: u32 = 64;

/// The tables of a cut.
struct Tables<'a> {
    items: &'a [ItemRow],
    merge_items: Vec<MergeItem>,
    tokens: Vec<TokenRow>,
    merges: Vec<MergeRow>,
    pad_rows: Vec<u32>,
}

/// A (token, query head) that is counted.
type Reader = (u32, u32);

/// What the walk over the items has met.
#[derive(Default)]
struct Met {
    /// Keys of each reader, as intervals.
    seen: HashMap<Reader, Vec<(u32, u32)>>,
    /// Partial states by slot.
    slots: HashMap<u32, Reader>,
    /// How often each reader's row is finished.
    finished: HashMap<Reader, u32>,
}

/// Walks the items as the kernel does, on intervals of keys instead of numbers.
fn check(view: &PlanView<'_>, tables: &Tables<'_>, shape: &HeadShape) -> Result<(), String> {
    let mut met = Met::default();
    let position = |token: u32| {
        let [q_row, seq, ..] = tables.tokens[token as usize];
        let row = view.sequences[seq as usize];
        row.kv_len - row.qo_len + q_row - row.qo_begin
    };
    let finishing = |item: &ItemRow| item.slot_begin == NONE;
    if !tables.items.is_sorted_by_key(finishing) {
        return Err("an item waits for one after it".into());
    }
    for item in tables.items {
        walk(view, item, shape, position, &mut met)?;
    }
    for &[tok_begin, num_tok, first_unit, num_units] in &tables.merge_items {
        let rows = num_tok * shape.group;
        for row in first_unit * 8..((first_unit + num_units) * 8).min(rows * shape.num_kv_heads) {
            let (kv_head, row) = (row / rows, row % rows);
            let (token, head) = (tok_begin + row / shape.group, row % shape.group);
            *met.finished.entry((token, kv_head * shape.group + head)).or_default() += 1;
        }
    }
    for (token, &[q_row, _, begin, count]) in (0..).zip(&tables.tokens) {
        let is_pad = tables.pad_rows.contains(&q_row);
        for qo_head in 0..shape.num_qo_heads() {
            let reader = (token, qo_head);
            let finished = met.finished.remove(&reader).unwrap_or_default();
            if finished != u32::from(!is_pad) {
                return Err(format!("{reader:?}, padding: {is_pad}, is finished {finished} times"));
            }
            let mut parts = met.seen.remove(&reader).unwrap_or_default();
            parts.sort_unstable();
            let mut next = 0;
            for (begin, end) in parts.into_iter().filter(|part| part.0 < part.1) {
                if begin != next {
                    return Err(format!("{reader:?} reads from {begin} after {next}"));
                }
                next = end;
            }
            if !is_pad && next != position(token) + 1 {
                return Err(format!("{reader:?} reads {next} keys"));
            }
            let (kv_head, head) = (qo_head / shape.group, qo_head % shape.group);
            for merge in &tables.merges[begin as usize..(begin + count) as usize] {
                let slot = merge[0] + kv_head * merge[1] + head;
                if met.slots.remove(&slot) != Some(reader) {
                    return Err(format!("slot {slot} is not one of {reader:?}"));
                }
            }
        }
    }
    match met.slots.iter().next() {
        None => Ok(()),
        Some(slot) => Err(format!("a slot that no one merges: {slot:?}")),
    }
}

/// Notes what one item reads and writes.
fn walk(
    view: &PlanView<'_>,
    item: &ItemRow,
    shape: &HeadShape,
    position: impl Fn(u32) -> u32,
    met: &mut Met,
) -> Result<(), String> {
    let rows = item.num_tok * shape.group;
    let warps = item.row_tiles * item.num_heads * item.key_groups;
    if rows > item.row_tiles * 16 || warps > shape.warps {
        return Err(format!("too much for a block: {item:?}"));
    }
    let range = item.tok_begin..item.tok_begin + item.num_tok;
    let highest = range.clone().map(&position).max().unwrap_or(0) + 1;
    let lowest = range.clone().map(&position).min().unwrap_or(0) + 1;
    let end = match item.num_keys {
        NONE => highest.max(item.start_pos),
        keys => (item.start_pos + keys).min(highest.max(item.start_pos)),
    };
    if item.bounded == 0 && (item.num_keys == NONE || lowest < item.start_pos + item.num_keys) {
        return Err(format!("not bounded: {item:?}"));
    }
    let num_pages = (end - item.start_pos).div_ceil(view.page_size) as usize;
    let ids = &view.page_ids[item.ids_begin as usize..item.ids_begin as usize + num_pages];
    let carried = num_pages.min(ItemRow::PAGES);
    if item.pages[..carried] != ids[..carried] {
        return Err(format!("pages {ids:?}, not those of {item:?}"));
    }
    let slot_rows = if rows < 8 { rows } else { rows.next_multiple_of(8) };
    for (token, index) in range.zip(0..) {
        let last = end.min(position(token) + 1).max(item.start_pos);
        for side in 0..item.num_heads {
            for head in 0..shape.group {
                let reader = (token, (item.kv_head + side) * shape.group + head);
                met.seen.entry(reader).or_default().push((item.start_pos, last));
                if item.slot_begin == NONE {
                    *met.finished.entry(reader).or_default() += 1;
                    continue;
                }
                for key_group in 0..item.key_groups {
                    let state = side * item.key_groups + key_group;
                    let row = index * shape.group + head;
                    let slot = item.slot_begin + state * slot_rows + row;
                    if let Some(other) = met.slots.insert(slot, reader) {
                        return Err(format!("slot {slot} of {reader:?} and {other:?}"));
                    }
                }
            }
        }
    }
    Ok(())
}

/// The work items' sections of an image, which the kernels find by its header.
fn tables_of(image: &Image) -> Tables<'_> {
    let (words, layout) = (image.words(), image.layout());
    let (num_pad_rows, num_tokens) = (words[14] as usize, words[23] as usize);
    let begin = words[24] as usize;
    let (merge_items, _) = words[begin..begin + 4 * words[15] as usize].as_chunks();
    let (tokens, _) = words[layout.tokens..layout.tokens + 4 * num_tokens].as_chunks();
    let num_merges = tokens.iter().map(|&[_, _, begin, count]| begin + count).max().unwrap_or(0);
    let (merges, _) = words[layout.merges..].as_chunks();
    Tables {
        items: image.items(),
        merge_items: merge_items.to_vec(),
        tokens: tokens.to_vec(),
        merges: merges[..(num_merges as usize).min(layout.work.max_merges as usize)].to_vec(),
        pad_rows: words[layout.pad_rows..layout.pad_rows + num_pad_rows].to_vec(),
    }
}

/// Checks the items of a planner's current step.
pub fn check_items(planner: &Planner) {
    let Some(cutter) = planner.cutter() else { return };
    let image = planner.image();
    let checked = check(&image.view(), &tables_of(image), &cutter.shape());
    checked.unwrap_or_else(|error| panic!("{error}"));
}

pub fn work_limits() -> WorkLimits {
    WorkLimits { max_items: 1 << 14, max_rows: 1 << 15, max_merges: 1 << 17 }
}

fn cutter(shape: HeadShape, num_blocks: u32) -> Cutter {
    Cutter::new(shape, DeviceCosts { num_blocks, ..DeviceCosts::default() }).unwrap()
}

/// A planner with items for a tree of `capacity` chunks.
pub fn planner(capacity: u32, limits: Option<Limits>, work: WorkLimits) -> Planner {
    let limits = limits.unwrap_or_else(|| Planner::default_limits(CHUNK, capacity));
    let shape = HeadShape::new(8, 4, 8, true).unwrap();
    Planner::with_items(CHUNK, limits, work, cutter(shape, 132)).unwrap()
}

fn steps(capacity: u32) -> Steps {
    let mut steps = Steps::new(capacity as usize, CHUNK as usize, None);
    steps.planner = planner(capacity, None, work_limits());
    steps
}

fn compute(steps: &mut Steps, seqs: &[SeqHandle]) -> Diff {
    let diff = support::compute(steps, seqs);
    check_items(&steps.planner);
    diff
}

fn decode(steps: &mut Steps, seqs: &[SeqHandle]) -> Diff {
    steps.tree.append_batch(seqs, &vec![3; seqs.len()]).unwrap();
    compute(steps, seqs)
}

/// `count` sequences behind one prompt, with all but their last token computed.
fn batch(count: u32, shared: u32, own: u32) -> (Steps, Vec<SeqHandle>) {
    let mut steps = steps(1 << 13);
    let prompt = |i| [tokens(0, shared * CHUNK), tokens(1 + i, own)].concat();
    let seqs: Vec<_> = (0..count).map(|i| steps.insert(&prompt(i))).collect();
    compute(&mut steps, &seqs);
    (steps, seqs)
}

#[test]
fn steady_decoding_changes_no_word() {
    let (mut steps, seqs) = batch(30, 10, CHUNK + 1);
    decode(&mut steps, &seqs);
    for _ in 0..CHUNK - 3 {
        let diff = decode(&mut steps, &seqs);
        assert!(diff.is_empty() && diff.advance, "{diff:?}");
    }
}

#[test]
fn a_leaf_that_fills_costs_a_page_id_and_that_of_each_of_its_items() {
    let (mut steps, seqs) = batch(30, 10, 4 * CHUNK - 1);
    decode(&mut steps, &seqs);
    let diff = decode(&mut steps, &seqs);
    // The id and the number of pages of each segment; one item holds all eight K/V heads.
    assert_eq!((diff.num_words(), diff.advance), (3 * 30, true), "{diff:?}");
}

#[test]
fn a_leaf_that_has_grown_much_is_cut_anew() {
    let mut steps = steps(1 << 13);
    let seq = steps.insert(&tokens(0, 100));
    compute(&mut steps, &[seq]);
    for _ in 0..8 * CHUNK {
        decode(&mut steps, &[seq]);
    }
    assert!(steps.planner.image().items().len() > 8);
}

#[test]
fn a_join_costs_items_and_rows_alone() {
    let words = |shared| {
        let (mut steps, mut seqs) = batch(30, shared, 3 * CHUNK);
        decode(&mut steps, &seqs);
        let new = steps.insert(&[tokens(0, shared * CHUNK), tokens(99, 70)].concat());
        steps.tree.append_batch(&seqs, &[3; 30]).unwrap();
        seqs.insert(10, new);
        compute(&mut steps, &seqs).num_words()
    };
    // What the shared prompt is long does not matter but for its own items.
    let (short, long) = (words(10), words(60));
    assert!(short < 132 * 32 + 100 * 32 && long < 132 * 32 + 100 * 32, "{short} {long}");
}

#[test]
fn a_step_past_the_capacity_is_refused_and_says_what_it_needs() {
    let mut steps = steps(1 << 10);
    let work = WorkLimits { max_items: 64, max_rows: 64, max_merges: 64 };
    steps.planner = planner(1 << 10, None, work);
    let seq = steps.insert(&tokens(0, 100));
    let words = steps.planner.image().words().to_vec();
    let error = steps.plan(&[Some(seq)], Some(&[0, 100])).unwrap_err();
    assert!(error.to_string().contains("at most max_rows = 64"), "{error}");
    assert_eq!(steps.planner.image().words(), words);
    let needed = steps.planner.work_needed().unwrap();
    assert!(needed.max_rows == 100 && needed.max_merges >= 100, "{needed:?}");
    steps.planner = planner(1 << 10, None, needed);
    steps.run(&[Some(seq)], Some(&[0, 100])).unwrap();
    check_items(&steps.planner);
}

#[test]
fn another_head_shape_is_a_version_of_its_own() {
    let (mut steps, seqs) = batch(5, 3, 100);
    steps.tree.append_batch(&seqs, &[1; 5]).unwrap();
    let batch: Vec<_> = seqs.iter().copied().map(Some).collect();
    let mut plan = steps.plan(&batch, None).unwrap();
    let other = cutter(HeadShape::new(2, 7, 4, false).unwrap(), 20);
    steps.planner.set_cutter(Some(&mut plan), other).unwrap();
    check_items(&steps.planner);
    plan.view(steps.planner.image()).unwrap();
}

#[test]
fn too_many_query_heads_are_refused() {
    let error = HeadShape::new(1, 129, 8, false).unwrap_err().to_string();
    assert!(error.contains("num_qo_heads / num_kv_heads"), "{error}");
}

/// Lengths of sequences behind shared pages, as a paged cache has them.
fn groups() -> impl Strategy<Value = Vec<(u32, Vec<u32>)>> {
    let tails = prop::collection::vec(1..300_u32, 1..5);
    prop::collection::vec((0..20_u32, tails), 1..4)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn every_key_once_over_block_tables(
        groups in groups(),
        page_size in prop::sample::select(vec![16_u32, 48, 64, 128]),
        qo_len in 1..9_u32,
        group in prop::sample::select(vec![1_u32, 3, 8, 40]),
        num_kv_heads in 1..12_u32,
        warps in prop::sample::select(vec![4_u32, 8]),
        num_blocks in prop::sample::select(vec![1_u32, 10, 132, 1000]),
        grouped in any::<bool>(),
    ) {
        let mut next = 0;
        let mut take = |count: u32| { next += count; next - count..next };
        let mut rows: Vec<(Vec<u32>, u32)> = Vec::new();
        for (shared, tails) in &groups {
            let head: Vec<u32> = take(*shared).collect();
            for &tail in tails {
                let len = shared * page_size + tail.max(qo_len);
                let own = take(tail.max(qo_len).div_ceil(page_size));
                rows.push((head.iter().copied().chain(own).collect(), len));
            }
        }
        let width = rows.iter().map(|row| row.0.len()).max().unwrap_or(0);
        let table: Vec<u32> = rows.iter().flat_map(|row| {
            row.0.iter().copied().chain(std::iter::repeat(0)).take(width)
        }).collect();
        let lens: Vec<u32> = rows.iter().map(|row| row.1).collect();
        let indptr: Vec<u32> = (0..=rows.len() as u32).map(|i| i * qo_len).collect();
        let dense = PageTable::Dense { block_table: &table, width, seq_lens: &lens };
        let mut planner =
            BlockTablePlanner::new(page_size, rows.len() as u32, width.max(1) as u32).unwrap();
        let plan = planner.update(&dense, Some(&indptr)).unwrap();
        let view = plan.view(planner.image()).unwrap();
        let shape = HeadShape::new(num_kv_heads, group, warps, grouped).unwrap();
        let mut cutter = cutter(shape, num_blocks);
        let work = cutter.cut(&view);
        let tables = Tables {
            items: &work.items,
            merge_items: work.merge_items.clone(),
            tokens: work.tokens.clone(),
            merges: work.merges.clone(),
            pad_rows: work.pad_rows.clone(),
        };
        prop_assert_eq!(check(&view, &tables, &shape), Ok(()));
    }
}

/// A paged cache whose sequences grow, and a planner of its steps with a copy that follows it.
struct PagedSteps {
    pages: Vec<Vec<u32>>,
    lens: Vec<u32>,
    next_page: u32,
    planner: BlockTablePlanner,
    copy: (u64, u64, Vec<u32>),
    has_cutter: bool,
}

impl PagedSteps {
    fn new(groups: &[(u32, Vec<u32>)]) -> Self {
        let planner = BlockTablePlanner::new(16, 16, 64).unwrap();
        let (pages, lens, copy) = (Vec::new(), Vec::new(), (0, 0, Vec::new()));
        let mut steps = Self { pages, lens, next_page: 0, planner, copy, has_cutter: false };
        for (shared, tails) in groups {
            let head: Vec<u32> = (0..*shared).map(|_| steps.new_page()).collect();
            for &tail in tails {
                steps.pages.push(head.clone());
                steps.lens.push(16 * shared);
                steps.grow(steps.lens.len() - 1, tail);
            }
        }
        steps
    }

    fn new_page(&mut self) -> u32 {
        self.next_page += 1;
        self.next_page
    }

    fn grow(&mut self, sequence: usize, num_tokens: u32) {
        self.lens[sequence] = (self.lens[sequence] + num_tokens).min(64 * 16);
        while (self.pages[sequence].len() as u32) < self.lens[sequence].div_ceil(16) {
            let page = self.new_page();
            self.pages[sequence].push(page);
        }
    }

    /// Plans a step and checks its items, and the copy; returns the words that the copy needed.
    fn step(&mut self, grown: bool) -> usize {
        let width = self.pages.iter().map(Vec::len).max().unwrap_or(0);
        let row = |row: &Vec<u32>| row.iter().copied().chain([0; 64]).take(width).collect();
        let table: Vec<u32> = self.pages.iter().flat_map::<Vec<u32>, _>(row).collect();
        let table = PageTable::Dense { block_table: &table, width, seq_lens: &self.lens };
        let update = if grown {
            self.planner.update_grown(&table, None)
        } else {
            self.planner.update(&table, None)
        };
        let mut plan = update.unwrap();
        if !self.has_cutter {
            let cutter = cutter(HeadShape::new(2, 4, 8, false).unwrap(), 20);
            self.planner.set_cutter(&mut plan, cutter).unwrap();
            self.has_cutter = true;
        }
        let image = self.planner.image();
        let view = plan.view(image).unwrap();
        let shape = self.planner.cutter().unwrap().shape();
        check(&view, &tables_of(image), &shape).unwrap_or_else(|error| panic!("{error}"));
        let path = |row: u32| -> Vec<u32> {
            let ids = |s: chunkcache::plan::SegmentRow| {
                view.page_ids[s.ids_begin as usize..(s.ids_begin + s.num_pages) as usize].to_vec()
            };
            support::path(&view, row).into_iter().flat_map(ids).collect()
        };
        for (row, pages) in self.pages.iter().enumerate() {
            assert_eq!(&path(row as u32), pages);
        }
        let (id, version, words) = &mut self.copy;
        let diff = image.diff_for(*id, *version);
        let mut staging = vec![0; diff.patch_words()];
        image.write_patch(&diff, &mut staging).unwrap();
        words.resize(image.words().len(), 0);
        apply_patch(words, &staging).unwrap();
        assert_eq!(words, image.words());
        (*id, *version) = (image.id(), image.version());
        diff.num_words()
    }
}

#[test]
fn tables_of_others_that_only_grow_change_no_word_but_of_new_pages() {
    let mut steps = PagedSteps::new(&[(10, vec![5, 5, 5]), (0, vec![300])]);
    steps.step(false);
    let mut words = Vec::new();
    for step in 0..20 {
        (0..4).for_each(|sequence| steps.grow(sequence, 1));
        words.push(steps.step(step % 2 == 0));
    }
    let changed: Vec<_> = (0..20).filter(|&step| words[step] > 0).collect();
    // 165 and 300 tokens end 11 and 4 tokens before their page does.
    assert_eq!(changed, [4, 11]);
    assert!(words[11] < 40, "{words:?}");
}

#[test]
fn another_last_page_reaches_the_items() {
    let mut steps = PagedSteps::new(&[(2, vec![5, 5])]);
    steps.step(false);
    steps.grow(0, 1);
    *steps.pages[0].last_mut().unwrap() = 77;
    steps.step(false);
    let items = steps.planner.image().items();
    assert!(items.iter().any(|item| item.pages[0] == 77));
}

/// What happens to a paged cache before a step: who grows by how much, and whether the last page of
/// one is replaced, or all begins anew.
fn paged_ops() -> impl Strategy<Value = (Vec<u32>, Option<usize>, bool, bool)> {
    let growth = prop_oneof![4 => Just(1_u32), 1 => Just(0), 1 => 2..60_u32];
    let growths = prop::collection::vec(growth, 16);
    (growths, prop::option::weighted(0.2, 0..16_usize), prop::bool::weighted(0.1), any::<bool>())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn items_over_tables_that_grow_stay_right(
        groups in groups(),
        ops in prop::collection::vec(paged_ops(), 1..40),
    ) {
        let mut steps = PagedSteps::new(&groups);
        steps.step(false);
        for (growths, replaced, renewed, grown) in ops {
            for (sequence, growth) in (0..steps.lens.len()).zip(growths) {
                steps.grow(sequence, growth);
            }
            if let Some(sequence) = replaced.filter(|&at| at < steps.lens.len()) {
                let full = (steps.lens[sequence] / 16) as usize;
                if full < steps.pages[sequence].len() {
                    steps.pages[sequence][full] = steps.new_page();
                }
            }
            if renewed {
                steps.lens.reverse();
                steps.pages.reverse();
            }
            steps.step(grown && !renewed);
        }
    }
}
