//! Cost of the tree's operations against the length of the prompt and the size of the tree.
//!
//! Every group holds what its ratio is taken against, measured in the same run: `memcmp` of the
//! same bytes for matching, the smallest tree for everything else. Trees are filled with written,
//! retained prompts of 2,048 tokens; the prompts that are timed are warm.

use std::hint::black_box;
use std::time::{Duration, Instant};

use chunkcache::tree::{PrefixTree, SeqHandle, TreeConfig};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

const CHUNK: usize = 64;
const RESIDENT: [usize; 4] = [1_000, 10_000, 100_000, 1_000_000];
const PROMPTS: [usize; 5] = [64, 512, 4_096, 32_768, 131_072];
/// Tokens of the prompts that fill a tree.
const FILLER: usize = 2_048;
/// Operations between two readings of the clock.
const BATCH: usize = 64;

/// Tokens that do not repeat, from a seed (a multiplicative congruential generator).
fn tokens(count: usize, seed: u64) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(0xd134_2543_de82_ef95).wrapping_add(1);
            (state >> 32) as u32
        })
        .collect()
}

fn write(tree: &mut PrefixTree, seq: SeqHandle) {
    let info = tree.sequence(seq).unwrap();
    let left = info.num_tokens - info.num_computed_tokens;
    if left > 0 {
        tree.commit(&[(seq, left as u32)]).unwrap();
    }
}

fn retain(tree: &mut PrefixTree, prompt: &[u32]) {
    let seq = tree.insert(prompt, b"").unwrap().seq;
    write(tree, seq);
    tree.remove(seq).unwrap();
}

/// A tree with about `resident` chunks in retained prompts, and room for more.
fn filled(resident: usize) -> PrefixTree {
    let mut tree = PrefixTree::new(TreeConfig::new(resident + 100_000, CHUNK)).unwrap();
    for seed in 0..resident.div_ceil(FILLER / CHUNK) as u64 {
        retain(&mut tree, &tokens(FILLER, seed + 1));
    }
    tree
}

fn label(resident: usize) -> String {
    format!("{resident}-chunks")
}

/// Times `operation` in batches of at most `batch`, with `restore` untimed after each.
fn timed<T>(
    iterations: u64,
    batch: usize,
    state: &mut T,
    mut operation: impl FnMut(&mut T, usize),
    mut restore: impl FnMut(&mut T, usize),
) -> Duration {
    let mut total = Duration::ZERO;
    let mut left = iterations as usize;
    while left > 0 {
        let count = left.min(batch);
        let begin = Instant::now();
        for i in 0..count {
            operation(state, i);
        }
        total += begin.elapsed();
        restore(state, count);
        left -= count;
    }
    total
}

/// Matching a wholly cached prompt, beside comparing the same bytes.
fn bench_match(criterion: &mut Criterion) {
    for resident in RESIDENT {
        let mut group = criterion.benchmark_group(format!("match/{}", label(resident)));
        let mut tree = filled(resident);
        for len in PROMPTS {
            let prompt = tokens(len, u64::MAX - len as u64);
            retain(&mut tree, &prompt);
            let cached = prompt.clone();
            group.throughput(Throughput::Elements(len as u64));
            group.bench_function(BenchmarkId::new("memcmp", len), |bencher| {
                bencher.iter(|| black_box(&prompt[..]) == black_box(&cached[..]));
            });
            group.bench_function(BenchmarkId::new("match_prefix", len), |bencher| {
                bencher.iter(|| tree.match_prefix(black_box(&prompt), b""));
            });
        }
        group.finish();
    }
}

struct Inserting {
    tree: PrefixTree,
    seqs: Vec<SeqHandle>,
}

impl Inserting {
    fn remove_all(&mut self) {
        for seq in self.seqs.drain(..).rev() {
            self.tree.remove(seq).unwrap();
        }
    }
}

/// Inserting a prompt that is not cached, and one of which all but the last chunk is.
fn bench_insert(criterion: &mut Criterion) {
    for resident in RESIDENT {
        let mut group = criterion.benchmark_group(format!("insert/{}", label(resident)));
        let mut state = Inserting { tree: filled(resident), seqs: Vec::new() };
        for len in [128, 512, 4_096, 32_768] {
            let prompts: Vec<_> =
                (0..BATCH).map(|i| tokens(len, u64::MAX - (len * BATCH + i) as u64)).collect();
            group.throughput(Throughput::Elements(len as u64));
            for name in ["new", "cached"] {
                group.bench_function(BenchmarkId::new(name, len), |bencher| {
                    bencher.iter_custom(|iterations| {
                        let insert = |state: &mut Inserting, i: usize| {
                            let inserted = state.tree.insert(&prompts[i], b"").unwrap();
                            state.seqs.push(inserted.seq);
                        };
                        let remove = |state: &mut Inserting, _: usize| state.remove_all();
                        timed(iterations, BATCH, &mut state, insert, remove)
                    });
                });
                for prompt in &prompts {
                    retain(&mut state.tree, &prompt[..len - CHUNK]);
                }
            }
        }
        group.finish();
    }
}

/// Appending one token to each of 256 sequences, no chunk filling; in one batch and one by one.
fn bench_append(criterion: &mut Criterion) {
    const SEQUENCES: usize = 256;
    for resident in RESIDENT {
        let mut group = criterion.benchmark_group(format!("append/{}", label(resident)));
        group.throughput(Throughput::Elements(SEQUENCES as u64));
        let mut tree = filled(resident);
        let seqs: Vec<_> = (0..SEQUENCES as u64)
            .map(|i| tree.insert(&tokens(257, u64::MAX - i), b"").unwrap().seq)
            .collect();
        let next = tokens(SEQUENCES, 7);
        // One token of the last chunk is used at the start, and the last one is never filled.
        let truncate = |tree: &mut PrefixTree, _: usize| {
            for &seq in &seqs {
                tree.truncate(seq, 257).unwrap();
            }
        };
        group.bench_function("batch-of-256", |bencher| {
            bencher.iter_custom(|iterations| {
                let append = |tree: &mut PrefixTree, _: usize| {
                    tree.append_batch(&seqs, &next).unwrap();
                };
                timed(iterations, CHUNK - 2, &mut tree, append, truncate)
            });
        });
        group.bench_function("one-by-one-256", |bencher| {
            bencher.iter_custom(|iterations| {
                let append = |tree: &mut PrefixTree, _: usize| {
                    for (&seq, &token) in seqs.iter().zip(&next) {
                        tree.append(seq, &[token]).unwrap();
                    }
                };
                timed(iterations, CHUNK - 2, &mut tree, append, truncate)
            });
        });
        group.finish();
    }
}

/// Forking a written sequence with a partial chunk, and removing such forks.
fn bench_fork_and_remove(criterion: &mut Criterion) {
    for resident in RESIDENT {
        let mut group = criterion.benchmark_group(format!("fork-remove/{}", label(resident)));
        let mut state = Inserting { tree: filled(resident), seqs: Vec::new() };
        let source = state.tree.insert(&tokens(4_100, u64::MAX), b"").unwrap().seq;
        write(&mut state.tree, source);
        group.bench_function("fork", |bencher| {
            bencher.iter_custom(|iterations| {
                timed(
                    iterations,
                    BATCH,
                    &mut state,
                    |state, _| {
                        let forked = state.tree.fork(source).unwrap();
                        state.seqs.push(forked.seq);
                    },
                    |state, _| state.remove_all(),
                )
            });
        });
        group.bench_function("remove-fork", |bencher| {
            bencher.iter_custom(|iterations| {
                let fork = |state: &mut Inserting, count: usize| {
                    for _ in 0..count {
                        let forked = state.tree.fork(source).unwrap();
                        state.seqs.push(forked.seq);
                    }
                };
                fork(&mut state, BATCH);
                let remove = |state: &mut Inserting, _: usize| {
                    let seq = state.seqs.pop().unwrap();
                    state.tree.remove(seq).unwrap();
                };
                let duration = timed(iterations, BATCH, &mut state, remove, fork);
                state.remove_all();
                duration
            });
        });
        let prompts: Vec<_> = (0..BATCH as u64).map(|i| tokens(4_100, 1 << 40 | i)).collect();
        group.bench_function("remove-written-4100", |bencher| {
            bencher.iter_custom(|iterations| {
                let insert = |state: &mut Inserting, _: usize| {
                    for prompt in prompts.iter().skip(state.seqs.len()) {
                        let seq = state.tree.insert(prompt, b"").unwrap().seq;
                        write(&mut state.tree, seq);
                        state.seqs.push(seq);
                    }
                };
                insert(&mut state, 0);
                let remove = |state: &mut Inserting, _: usize| {
                    let seq = state.seqs.pop().unwrap();
                    state.tree.remove(seq).unwrap();
                };
                let duration = timed(iterations, BATCH, &mut state, remove, insert);
                state.remove_all();
                duration
            });
        });
        group.finish();
    }
}

/// Evicting a chunk, and a prompt's worth of chunks. What was evicted is inserted again untimed.
///
/// The least recently used chunks of a large tree have left the processor's caches, whatever
/// finds them; so all but the prompts that come and go are pinned, and those are as warm in a large
/// tree as in a small one.
fn bench_evict(criterion: &mut Criterion) {
    const PER_PROMPT: usize = FILLER / CHUNK;
    const EVICTABLE: usize = 16;
    for resident in RESIDENT {
        let mut group = criterion.benchmark_group(format!("evict/{}", label(resident)));
        let mut tree = filled(resident);
        let num_prompts = resident.div_ceil(PER_PROMPT);
        let prompt = |i: usize| tokens(FILLER, i as u64 + 1);
        for i in EVICTABLE..num_prompts {
            tree.pin(&prompt(i), b"", None).unwrap();
        }
        let prompts: Vec<_> = (0..EVICTABLE).map(prompt).collect();
        let mut oldest = 0;
        for count in [1, PER_PROMPT] {
            group.throughput(Throughput::Elements(count as u64));
            group.bench_function(BenchmarkId::new("evict", count), |bencher| {
                bencher.iter_custom(|iterations| {
                    let evict = |tree: &mut PrefixTree, _: usize| {
                        black_box(tree.evict(count));
                    };
                    let restore = |tree: &mut PrefixTree, done: usize| {
                        for _ in 0..(done * count).div_ceil(PER_PROMPT) {
                            retain(tree, &prompts[oldest]);
                            oldest = (oldest + 1) % EVICTABLE;
                        }
                    };
                    timed(iterations, EVICTABLE / 2, &mut tree, evict, restore)
                });
            });
        }
        group.finish();
    }
}

fn settings() -> Criterion {
    Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(800))
}

criterion_group! {
    name = benches;
    config = settings();
    targets = bench_match, bench_insert, bench_append, bench_fork_and_remove, bench_evict
}
criterion_main!(benches);
