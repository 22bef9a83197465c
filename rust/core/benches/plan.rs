//! Planning: block tables of 256 sequences of 8,192 tokens.

use std::hint::black_box;

use chunkcache::plan::{BlockTablePlanner, PageTable, plan_from_block_tables};
use criterion::{Criterion, criterion_group, criterion_main};

const PAGE: u32 = 16;
const NUM_SEQUENCES: usize = 256;
const WIDTH: usize = 513;
const LEN: i32 = 8192;

/// A block table whose sequence `i` shares its first `shared(i)` pages with sequence 0.
fn block_table(shared: impl Fn(usize) -> usize) -> Vec<i32> {
    let mut table = vec![-1; NUM_SEQUENCES * WIDTH];
    for (i, row) in table.chunks_mut(WIDTH).enumerate() {
        for (page, id) in row.iter_mut().take(WIDTH).enumerate() {
            let owner = if page < shared(i) { 0 } else { i };
            *id = (owner * WIDTH + page) as i32;
        }
    }
    table
}

fn block_tables(c: &mut Criterion) {
    let mut group = c.benchmark_group("block_tables_256x8192");
    let mut lens = vec![LEN; NUM_SEQUENCES];
    let tables = [
        ("nothing_shared", block_table(|_| 0)),
        ("half_shared", block_table(|_| 256)),
        ("all_shared", block_table(|_| 512)),
        ("ladder", block_table(|i| 2 * i)),
    ];
    for (name, table) in &tables {
        let table = PageTable::Dense { block_table: table, width: WIDTH, seq_lens: &lens };
        let other = block_table(|_| 1);
        let other = PageTable::Dense { block_table: &other, width: WIDTH, seq_lens: &lens };
        let mut planner = BlockTablePlanner::new(PAGE, 256, WIDTH as u32).unwrap();
        group.bench_function(format!("{name}/find"), |b| {
            b.iter_custom(|n| {
                let mut total = std::time::Duration::ZERO;
                for _ in 0..n {
                    planner.update(&other, None).unwrap();
                    let start = std::time::Instant::now();
                    black_box(planner.update(&table, None).unwrap());
                    total += start.elapsed();
                }
                total
            });
        });
        group.bench_function(format!("{name}/again"), |b| {
            b.iter(|| planner.update(&table, None).unwrap());
        });
    }
    let table = &tables[1].1;
    group.bench_function("once", |b| {
        b.iter(|| plan_from_block_tables(table, WIDTH, &lens, PAGE, None).unwrap());
    });
    let mut planner = BlockTablePlanner::new(PAGE, 256, WIDTH as u32).unwrap();
    let start = PageTable::Dense { block_table: table, width: WIDTH, seq_lens: &lens };
    planner.update(&start, None).unwrap();
    group.bench_function("grown", |b| {
        b.iter(|| {
            lens.iter_mut().for_each(|len| *len = LEN + (*len + 1) % 16);
            let table = PageTable::Dense { block_table: table, width: WIDTH, seq_lens: &lens };
            planner.update_grown(&table, None).unwrap()
        });
    });
    group.finish();
}

criterion_group!(benches, block_tables);
criterion_main!(benches);
