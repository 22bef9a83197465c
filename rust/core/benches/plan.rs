//! Planning: steps of a tree at different numbers of resident chunks, their diffs, and block
//! tables.

use std::hint::black_box;
use std::time::{Duration, Instant};

use chunkcache::plan::{
    BlockTablePlanner, Cutter, DeviceCosts, HeadShape, PageTable, Planner, WorkLimits,
    plan_from_block_tables,
};
use chunkcache::tree::{PrefixTree, SeqHandle, TreeConfig};
use criterion::{Criterion, criterion_group, criterion_main};

const CHUNK: u32 = 64;
const BATCH: u32 = 256;
const SHARED_TOKENS: u32 = 2048;
const RESIDENT: [u32; 4] = [1 << 10, 1 << 14, 1 << 17, 1 << 20];

/// How long a sequence gets before it is replaced by a new one.
const MAX_TOKENS: usize = 4000;

/// What one step took on the host.
#[derive(Default)]
struct Times {
    /// `Planner::plan`.
    plan: Duration,
    /// `Image::diff_since` and `Image::write_patch`.
    diff: Duration,
}

/// A tree that retains other prompts' chunks, and a decoding batch behind one prompt, with work
/// items.
struct Decoding {
    tree: PrefixTree,
    planner: Planner,
    seqs: Vec<SeqHandle>,
    /// What the device holds of the tables.
    synced: u64,
    staging: Vec<u32>,
    next_tail: u32,
}

impl Decoding {
    fn new(resident: u32) -> Self {
        let capacity = resident + 64 * BATCH;
        let mut tree = PrefixTree::new(TreeConfig::new(capacity as usize, 64)).unwrap();
        for prompt in 0..resident / 256 {
            let first = prompt * 256 * CHUNK;
            let tokens: Vec<u32> = (first..first + 256 * CHUNK).map(|id| id | 1 << 31).collect();
            let seq = tree.insert(&tokens, b"").unwrap().seq;
            tree.commit(&[(seq, tokens.len() as u32)]).unwrap();
            tree.remove(seq).unwrap();
        }
        let limits = Planner::default_limits(CHUNK, capacity);
        // Items for an H200, and heads as those of Llama 3.1 8B.
        let cutter =
            Cutter::new(HeadShape::new(8, 4, 8, true).unwrap(), DeviceCosts::default()).unwrap();
        let work = WorkLimits { max_items: 1 << 14, max_rows: 1 << 13, max_merges: 1 << 15 };
        let planner = Planner::with_items(CHUNK, limits, work, cutter).unwrap();
        let staging = vec![0; planner.image().words().len() + 16];
        let mut decoding =
            Self { tree, planner, seqs: Vec::new(), synced: 0, staging, next_tail: 0 };
        decoding.renew();
        decoding
    }

    /// A new sequence behind the shared prompt, computed up to its last token.
    fn join(&mut self) {
        self.next_tail = (self.next_tail + 1) % (1 << 14);
        let tail = self.next_tail << 16;
        let tokens: Vec<u32> = (0..SHARED_TOKENS).chain(tail..tail + 70).collect();
        let inserted = self.tree.insert(&tokens, b"").unwrap();
        let left = tokens.len() - inserted.num_computed_tokens;
        if left > 1 {
            self.tree.commit(&[(inserted.seq, left as u32 - 1)]).unwrap();
        }
        self.seqs.push(inserted.seq);
    }

    /// Replaces all sequences by new ones.
    fn renew(&mut self) {
        for seq in std::mem::take(&mut self.seqs) {
            self.tree.remove(seq).unwrap();
        }
        for _ in 0..BATCH {
            self.join();
        }
    }

    /// One step, which decodes one token of each sequence.
    fn step(&mut self) -> Times {
        let batch: Vec<_> = self.seqs.iter().copied().map(Some).collect();
        let start = Instant::now();
        let mut plan = self.planner.plan(&mut self.tree, &batch, None).unwrap();
        let planned = Instant::now();
        let image = self.planner.image();
        let diff = image.diff_since(self.synced);
        black_box(image.write_patch(&diff, &mut self.staging).unwrap());
        let times = Times { plan: planned - start, diff: planned.elapsed() };
        self.synced = image.version();
        self.tree.commit_step(plan.close().unwrap()).unwrap();
        self.tree.append_batch(&self.seqs, &vec![1; self.seqs.len()]).unwrap();
        times
    }

    /// Tokens that the first leaf's last chunk has room for.
    fn room(&self) -> usize {
        let tokens = self.tree.sequence(self.seqs[0]).unwrap().num_tokens;
        tokens.next_multiple_of(CHUNK as usize) - tokens
    }

    fn steady(&mut self) -> Option<Times> {
        let is_steady = (1..CHUNK as usize - 2).contains(&self.room());
        let times = self.step();
        is_steady.then_some(times)
    }

    fn all_fill(&mut self) -> Option<Times> {
        let fills = self.room() == CHUNK as usize - 1;
        let times = self.step();
        fills.then_some(times)
    }

    /// `COUNT` sequences leave, and in the step after that as many join the others.
    fn joins<const COUNT: usize>(&mut self) -> Option<Times> {
        for gone in self.seqs.drain(..COUNT) {
            self.tree.remove(gone).unwrap();
        }
        self.step();
        (0..COUNT).for_each(|_| self.join());
        Some(self.step())
    }

    fn all_join(&mut self) -> Option<Times> {
        self.renew();
        Some(self.step())
    }
}

type Case = fn(&mut Decoding) -> Option<Times>;

/// The times of `count` steps of the wanted kind, summed up.
fn total(decoding: &mut Decoding, count: u64, case: Case) -> Times {
    let mut total = Times::default();
    let mut taken = 0;
    while taken < count {
        if decoding.tree.sequence(decoding.seqs[0]).unwrap().num_tokens > MAX_TOKENS {
            decoding.renew();
        }
        if let Some(times) = case(decoding) {
            total.plan += times.plan;
            total.diff += times.diff;
            taken += 1;
        }
    }
    total
}

fn tree_steps(c: &mut Criterion) {
    let cases: [(&str, Case); 6] = [
        ("steady", Decoding::steady),
        ("all_fill", Decoding::all_fill),
        ("1_joins", Decoding::joins::<1>),
        ("4_join", Decoding::joins::<4>),
        ("16_join", Decoding::joins::<16>),
        ("all_join", Decoding::all_join),
    ];
    for resident in RESIDENT {
        // Made when first needed, so that a filter on the benchmarks spares the large trees.
        let mut made = None;
        for (name, case) in cases {
            let id = |part: &str| format!("{part}_256/{name}/{resident}_resident");
            c.bench_function(&id("plan"), |b| {
                let decoding = made.get_or_insert_with(|| Decoding::new(resident));
                b.iter_custom(|count| total(decoding, count, case).plan);
            });
            c.bench_function(&id("diff"), |b| {
                let decoding = made.get_or_insert_with(|| Decoding::new(resident));
                b.iter_custom(|count| total(decoding, count, case).diff);
            });
        }
    }
}

const PAGE: u32 = 16;
const NUM_SEQUENCES: usize = 256;
const WIDTH: usize = 513;
const LEN: i32 = 8192;

/// A block table whose sequence `i` shares its first `shared(i)` pages with sequence 0.
fn block_table(shared: impl Fn(usize) -> usize) -> Vec<i32> {
    let mut table = vec![-1; NUM_SEQUENCES * WIDTH];
    for (i, row) in table.chunks_mut(WIDTH).enumerate() {
        for (page, id) in row.iter_mut().enumerate() {
            let owner = if page < shared(i) { 0 } else { i };
            *id = (owner * WIDTH + page) as i32;
        }
    }
    table
}

fn block_tables(c: &mut Criterion) {
    let mut group = c.benchmark_group("block_tables_256x8192");
    let lens = vec![LEN; NUM_SEQUENCES];
    let tables = [
        ("nothing_shared", block_table(|_| 0)),
        ("half_shared", block_table(|_| 256)),
        ("all_shared", block_table(|_| 512)),
        ("ladder", block_table(|i| 2 * i)),
    ];
    let other = block_table(|_| 1);
    let other = PageTable::Dense { block_table: &other, width: WIDTH, seq_lens: &lens };
    for (name, table) in &tables {
        let dense = PageTable::Dense { block_table: table, width: WIDTH, seq_lens: &lens };
        let mut planner = BlockTablePlanner::new(PAGE, 256, WIDTH as u32).unwrap();
        group.bench_function(format!("{name}/find"), |b| {
            b.iter_custom(|count| {
                let mut total = Duration::ZERO;
                for _ in 0..count {
                    planner.update(&other, None).unwrap();
                    let start = Instant::now();
                    black_box(planner.update(&dense, None).unwrap());
                    total += start.elapsed();
                }
                total
            });
        });
        group.bench_function(format!("{name}/again"), |b| {
            b.iter(|| planner.update(&dense, None).unwrap());
        });
        group.bench_function(format!("{name}/grown"), |b| {
            b.iter(|| planner.update_grown(&dense, None).unwrap());
        });
        group.bench_function(format!("{name}/once"), |b| {
            b.iter(|| plan_from_block_tables(table, WIDTH, &lens, PAGE, None).unwrap());
        });
    }
    group.finish();
}

criterion_group!(benches, tree_steps, block_tables);
criterion_main!(benches);
