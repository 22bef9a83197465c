//! Times one decode step of attention, with sharing and without, beside the time that reading the
//! K/V takes. For guidance while tuning kernels:
//!
//! `cargo run --release --example attention_timing -- [f32|f16|bf16] [b] [hq] [hkv] [d] [n_p] [threads] [n_s]`

use std::hint::black_box;
use std::time::Instant;

use chunkcache::attention::{AttentionParams, Isa, KvSource, Sharing, Workers, attend};
use chunkcache::kv::{Dtype, Element, HostKv, KvConfig, Rows, RowsLayout, RowsMut};
use chunkcache::plan::{NONE, PlanView, SegmentRow, SequenceRow};
use half::{bf16, f16};

const CHUNK: usize = 64;

struct Shape {
    batch: usize,
    num_qo_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    prompt: usize,
    threads: usize,
    /// One number of shared tokens; `None` for several.
    shared: Option<usize>,
}

/// The median of some runs, in milliseconds, and the least.
fn time(mut run: impl FnMut()) -> (f64, f64) {
    run();
    let mut times = Vec::new();
    let begin = Instant::now();
    while times.len() < 9 || begin.elapsed().as_secs_f64() < 0.5 {
        let start = Instant::now();
        run();
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    (times[times.len() / 2], times[0])
}

/// Gigabytes per second of reading a large array on some threads.
fn read_bandwidth(threads: usize) -> f64 {
    let data = vec![1u64; 48 << 20];
    let (_, least) = time(|| {
        std::thread::scope(|scope| {
            for part in data.chunks(data.len() / threads) {
                scope.spawn(move || {
                    let mut sums = [0u64; 32];
                    for line in part.chunks_exact(32) {
                        for (sum, x) in sums.iter_mut().zip(line) {
                            *sum ^= x;
                        }
                    }
                    black_box(sums)
                });
            }
        });
    });
    (data.len() * 8) as f64 / least / 1e6
}

fn measure<T: Element>(shape: &Shape, from: impl Fn(f32) -> T) {
    let Shape { batch, num_qo_heads, num_kv_heads, head_dim, prompt, threads, .. } = *shape;
    let workers = Workers::new(threads).unwrap();
    let several = vec![0, prompt / 2, prompt * 3 / 4, prompt];
    for shared in shape.shared.map_or(several, |one| vec![one]) {
        let private = (prompt - shared) / CHUNK;
        let num_pages = shared / CHUNK + batch * private;
        let config = KvConfig {
            num_layers: 1,
            num_kv_heads,
            head_dim,
            chunk_size: CHUNK,
            dtype: T::DTYPE,
            capacity: num_pages,
        };
        let mut kv = HostKv::new(config).unwrap();
        let mut seed = 1u32;
        let mut random = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            from((seed >> 8) as f32 / 8_388_608.0 - 1.0)
        };
        let rows = RowsLayout::contiguous(CHUNK, num_kv_heads, head_dim);
        let values = (0..rows.num_tokens * rows.token_stride).map(|_| random()).collect::<Vec<_>>();
        let values = Rows::new(&values, rows).unwrap();
        for page in 0..num_pages {
            let slots = (page * CHUNK..(page + 1) * CHUNK).map(|slot| slot as i64);
            kv.write_kv(0, &values, &values, &slots.collect::<Vec<_>>()).unwrap();
        }
        let segment =
            |parent, begin: usize, end: usize, start: usize, pages: usize, ids: usize| SegmentRow {
                parent,
                seq_begin: begin as u32,
                seq_end: end as u32,
                start_pos: start as u32,
                num_pages: pages as u32,
                ids_begin: ids as u32,
            };
        let mut segments = Vec::new();
        let mut root = NONE;
        if shared > 0 {
            segments.push(segment(NONE, 0, batch, 0, shared / CHUNK, 0));
            root = 0;
        }
        let mut sequences = Vec::new();
        for i in 0..batch {
            let mut leaf = root;
            if private > 0 {
                leaf = segments.len() as u32;
                let ids = shared / CHUNK + i * private;
                segments.push(segment(root, i, i + 1, shared, private, ids));
            }
            sequences.push(SequenceRow {
                leaf,
                qo_begin: i as u32,
                qo_len: 1,
                kv_len: prompt as u32,
                num_cached_rows: 0,
            });
        }
        let order = (0..batch as u32).collect::<Vec<_>>();
        let segment_order = (0..segments.len() as u32).collect::<Vec<_>>();
        let page_ids = (0..num_pages as u32).collect::<Vec<_>>();
        let view = PlanView {
            page_size: CHUNK as u32,
            num_qo_rows: batch as u32,
            order: &order,
            sequences: &sequences,
            segment_order: &segment_order,
            segments: &segments,
            page_ids: &page_ids,
        };
        let rows = RowsLayout::contiguous(batch, num_qo_heads, head_dim);
        let q = (0..batch * rows.token_stride).map(|_| random()).collect::<Vec<_>>();
        let mut out = q.clone();
        let source = KvSource::Host { kv: &kv, layer: 0 };
        let mut run = |sharing, isa| {
            let params = AttentionParams { sharing, isa, ..AttentionParams::new(head_dim) };
            let q = Rows::new(&q, rows).unwrap();
            time(|| {
                let mut out = RowsMut::new(&mut out, rows).unwrap();
                attend(&view, &source, &q, &params, &mut out, None, &workers).unwrap();
            })
        };
        let bytes = 2 * num_pages * CHUNK * num_kv_heads * head_dim * T::DTYPE.itemsize();
        let operations = 4 * batch * num_qo_heads * prompt * head_dim;
        for isa in Isa::available().into_iter().rev().take(2) {
            let (median, least) = run(Sharing::Auto, isa);
            print!(
                "{} n_p {prompt} n_s {shared} {isa}: {median:.3} ms (least {least:.3}), {:.1} GB/s, {:.0} GFLOP/s",
                T::DTYPE,
                bytes as f64 / least / 1e6,
                operations as f64 / least / 1e6,
            );
            if shared == prompt {
                let (_, never) = run(Sharing::Never, isa);
                print!(", without sharing {never:.3} ms");
            }
            println!();
        }
    }
}

fn main() {
    let arguments = std::env::args().skip(1).collect::<Vec<_>>();
    let number = |i: usize, default: usize| {
        arguments.get(i).map_or(default, |x| x.parse().expect("a number"))
    };
    let shape = Shape {
        batch: number(1, 32),
        num_qo_heads: number(2, 32),
        num_kv_heads: number(3, 32),
        head_dim: number(4, 128),
        prompt: number(5, 1024),
        threads: number(6, 2),
        shared: arguments.get(7).map(|x| x.parse().expect("a number")),
    };
    println!("reading: {:.1} GB/s", read_bandwidth(shape.threads));
    match arguments.first().map(String::as_str) {
        None | Some("f32") => measure::<f32>(&shape, |x| x),
        Some("f16") => measure(&shape, f16::from_f32),
        Some("bf16") => measure(&shape, bf16::from_f32),
        Some(other) => panic!("{other} is none of {}, {}, {}", Dtype::F32, Dtype::F16, Dtype::Bf16),
    }
}
