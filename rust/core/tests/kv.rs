//! Host storage of K and V.

use chunkcache::error::Error;
use chunkcache::kv::{
    Dtype, Element, HostKv, KvConfig, KvLayout, Reserve, Rows, RowsLayout, RowsMut,
};
use half::{bf16, f16};

const HEADS: usize = 3;

fn config(head_dim: usize, chunk_size: usize, dtype: Dtype) -> KvConfig {
    KvConfig { num_layers: 2, num_kv_heads: HEADS, head_dim, chunk_size, dtype, capacity: 5 }
}

fn numbers<T: Element>(len: usize, first: usize, from: impl Fn(f32) -> T) -> Vec<T> {
    (0..len).map(|i| from(((first + i) % 251) as f32)).collect()
}

/// Rows as bits, to compare NaN with NaN.
fn read<T: Element>(kv: &HostKv, layer: usize, slots: &[i64], zero: T) -> (Vec<T>, Vec<T>) {
    let head_dim = kv.config().head_dim;
    let layout = RowsLayout::contiguous(slots.len(), HEADS, head_dim);
    let mut k = vec![zero; slots.len() * HEADS * head_dim];
    let mut v = k.clone();
    kv.read_kv(
        layer,
        slots,
        &mut RowsMut::new(&mut k, layout).unwrap(),
        &mut RowsMut::new(&mut v, layout).unwrap(),
    )
    .unwrap();
    (k, v)
}

fn write<T: Element>(kv: &mut HostKv, layer: usize, k: &[T], v: &[T], slots: &[i64]) {
    let layout = RowsLayout::contiguous(slots.len(), HEADS, kv.config().head_dim);
    let (k, v) = (Rows::new(k, layout).unwrap(), Rows::new(v, layout).unwrap());
    kv.write_kv(layer, &k, &v, slots).unwrap();
}

fn refused(result: Result<(), Error>) -> String {
    match result {
        Err(Error::InvalidConfig { argument, .. }) => argument,
        other => panic!("{other:?}"),
    }
}

fn round_trip<T: Element + PartialEq + std::fmt::Debug>(from: impl Fn(f32) -> T + Copy) {
    for head_dim in [8, 24, 64, 80] {
        for chunk_size in [16, 48, 128] {
            let mut kv = HostKv::new(config(head_dim, chunk_size, T::DTYPE)).unwrap();
            let slots = (0..3 * chunk_size as i64).rev().step_by(3).collect::<Vec<_>>();
            let k = numbers(slots.len() * HEADS * head_dim, 1, from);
            let v = numbers(slots.len() * HEADS * head_dim, 7, from);
            write(&mut kv, 1, &k, &v, &slots);
            assert_eq!(read(&kv, 1, &slots, from(0.0)), (k, v));
            let others = (0..3 * chunk_size as i64).rev().skip(1).step_by(3).collect::<Vec<_>>();
            let zeros = vec![from(0.0); others.len() * HEADS * head_dim];
            assert_eq!(read(&kv, 1, &others, from(1.0)), (zeros.clone(), zeros));
        }
    }
}

#[test]
fn what_was_written_is_read_back() {
    round_trip::<f32>(|x| x);
    round_trip(f16::from_f32);
    round_trip(bf16::from_f32);
}

#[test]
fn layers_are_apart() {
    let mut kv = HostKv::new(config(8, 16, Dtype::F32)).unwrap();
    let (a, b) = (numbers(HEADS * 8, 1, |x| x), numbers(HEADS * 8, 100, |x| x));
    write(&mut kv, 0, &a, &b, &[5]);
    write(&mut kv, 1, &b, &a, &[5]);
    assert_eq!(read(&kv, 0, &[5], 0.0), (a.clone(), b.clone()));
    assert_eq!(read(&kv, 1, &[5], 0.0), (b, a));
}

#[test]
fn rows_of_slot_minus_one_are_skipped() {
    let mut kv = HostKv::new(config(8, 16, Dtype::F32)).unwrap();
    let rows = numbers(3 * HEADS * 8, 1, |x| x);
    write(&mut kv, 0, &rows, &rows, &[3, -1, 4]);
    let row = HEADS * 8;
    assert_eq!(read(&kv, 0, &[3], 0.0).0, rows[..row]);
    assert_eq!(read(&kv, 0, &[4], 0.0).0, rows[2 * row..]);
}

#[test]
fn strided_rows_are_written_as_they_lie() {
    let mut kv = HostKv::new(config(8, 16, Dtype::F32)).unwrap();
    let data = numbers(200, 0, |x| x);
    let layout = RowsLayout {
        num_tokens: 2,
        num_heads: HEADS,
        head_dim: 8,
        token_stride: 10,
        head_stride: 30,
    };
    let rows = Rows::new(&data, layout).unwrap();
    kv.write_kv(0, &rows, &rows, &[0, 1]).unwrap();
    let (k, _) = read(&kv, 0, &[1], 0.0);
    assert_eq!(k[8..16], data[40..48]);
}

#[test]
fn the_head_of_a_chunk_is_copied_in_all_layers() {
    for num_tokens in [0, 1, 15, 16, 17, 31, 32] {
        let mut kv = HostKv::new(config(24, 32, Dtype::Bf16)).unwrap();
        let slots = (0..32).collect::<Vec<i64>>();
        let len = 32 * HEADS * 24;
        for layer in 0..2 {
            let k = numbers(len, 3 + layer, bf16::from_f32);
            write(&mut kv, layer, &k, &k, &slots);
            let old = vec![bf16::from_f32(500.0); len];
            let other = (32..64).collect::<Vec<i64>>();
            write(&mut kv, layer, &old, &old, &other);
        }
        kv.copy_chunk_head(0, 1, num_tokens).unwrap();
        for layer in 0..2 {
            let copied = (32..32 + num_tokens as i64).collect::<Vec<_>>();
            let (k, v) = read(&kv, layer, &copied, bf16::ZERO);
            let expected = numbers(num_tokens * HEADS * 24, 3 + layer, bf16::from_f32);
            assert_eq!((k, v), (expected.clone(), expected), "{num_tokens} tokens");
            let kept = (32 + num_tokens as i64..64).collect::<Vec<_>>();
            let (k, _) = read(&kv, layer, &kept, bf16::ZERO);
            assert!(k.iter().all(|&x| x == bf16::from_f32(500.0)), "{num_tokens} tokens");
        }
    }
}

#[test]
fn memory_is_taken_when_chunks_are_written() {
    let mut kv = HostKv::new(KvConfig {
        num_layers: 32,
        num_kv_heads: HEADS,
        head_dim: 128,
        chunk_size: 128,
        dtype: Dtype::F32,
        capacity: 1 << 20,
    })
    .unwrap();
    assert_eq!(kv.allocated_bytes(), 0);
    let row = vec![1.0f32; HEADS * 128];
    write(&mut kv, 31, &row, &row, &[100 * 128]);
    let one_slab = kv.layout().slab_bytes();
    assert_eq!(kv.allocated_bytes(), one_slab);
    write(&mut kv, 0, &row, &row, &[100 * 128 + 5]);
    assert_eq!(kv.allocated_bytes(), one_slab);
    write(&mut kv, 0, &row, &row, &[100_000 * 128]);
    assert_eq!(kv.allocated_bytes(), 2 * one_slab);
}

#[test]
fn addresses_past_four_gigabytes_are_right() {
    let layout = KvLayout::new(KvConfig {
        num_layers: 80,
        num_kv_heads: 64,
        head_dim: 256,
        chunk_size: 128,
        dtype: Dtype::F32,
        capacity: u32::MAX as usize - 1,
    })
    .unwrap();
    // 80 layers of 64 heads of 2 * 128 KiB: 1.25 GiB a chunk.
    assert_eq!(layout.chunk_bytes(), 80 * 64 * (256 << 10));
    assert_eq!(layout.chunks_per_slab(), 1);
    let last = u32::MAX - 2;
    assert_eq!(layout.locate(79, last, 63), (last as usize, (79 * 64 + 63) * (256 << 10)));
    let total = layout.num_slabs() as u128 * layout.slab_bytes() as u128;
    assert_eq!(total, u128::from(u32::MAX - 1) * 80 * 64 * (256 << 10));
}

#[test]
fn chunks_of_a_slab_do_not_overlap() {
    let layout = KvLayout::new(config(24, 48, Dtype::F16)).unwrap();
    let plane = layout.plane_bytes();
    let mut begins = Vec::new();
    for layer in 0..2 {
        for chunk in 0..5 {
            for head in 0..HEADS {
                let (slab, offset) = layout.locate(layer, chunk, head);
                assert!(offset + 2 * plane <= layout.slab_bytes());
                begins.push((slab, offset));
            }
        }
    }
    begins.sort_unstable();
    for pair in begins.windows(2) {
        assert!(pair[0].0 < pair[1].0 || pair[0].1 + 2 * plane <= pair[1].1);
    }
}

#[test]
fn sizes_that_are_not_allowed_are_refused() {
    let good = config(8, 16, Dtype::F32);
    let cases = [
        ("num_layers", KvConfig { num_layers: 0, ..good }),
        ("num_layers", KvConfig { num_layers: usize::MAX, ..good }),
        ("num_kv_heads", KvConfig { num_kv_heads: 0, ..good }),
        ("num_kv_heads", KvConfig { num_kv_heads: 1 << 40, ..good }),
        ("head_dim", KvConfig { head_dim: usize::MAX - 7, ..good }),
        ("capacity", KvConfig { capacity: 0, ..good }),
        ("capacity", KvConfig { capacity: usize::MAX, ..good }),
        ("head_dim", KvConfig { head_dim: 6, ..good }),
        ("head_dim", KvConfig { head_dim: 12, dtype: Dtype::Bf16, ..good }),
        ("head_dim", KvConfig { head_dim: 0, ..good }),
        ("chunk_size", KvConfig { chunk_size: 0, ..good }),
        ("chunk_size", KvConfig { chunk_size: 24, ..good }),
        ("chunk_size", KvConfig { chunk_size: 144, ..good }),
    ];
    for (argument, config) in cases {
        assert_eq!(refused(HostKv::new(config).map(drop)), argument, "{config:?}");
    }
}

#[test]
fn a_capacity_beyond_all_memory_costs_none() {
    let kv =
        HostKv::new(KvConfig { capacity: u32::MAX as usize - 1, ..config(8, 128, Dtype::F32) });
    assert_eq!(kv.unwrap().allocated_bytes(), 0);
}

#[test]
fn a_reserve_backs_one_slab() {
    let mut kv = HostKv::new(KvConfig { capacity: 100_000, ..config(8, 128, Dtype::F32) }).unwrap();
    let mut reserve = Reserve::new(kv.layout());
    reserve.fill().unwrap();
    assert_eq!(kv.allocated_bytes(), 0);
    kv.back(7, &mut reserve).unwrap();
    assert!(kv.has_memory(7) && !kv.has_memory(99_999));
    assert_eq!(kv.allocated_bytes(), kv.layout().slab_bytes());
    assert_eq!(refused(kv.back(100_000, &mut reserve)), "chunk");
}

#[test]
fn writes_that_do_not_fit_are_refused_whole() {
    let mut kv = HostKv::new(config(8, 16, Dtype::F32)).unwrap();
    let data = vec![1.0f32; 2 * HEADS * 8];
    let halves = vec![f16::ONE; 2 * HEADS * 8];
    let layout = RowsLayout::contiguous(2, HEADS, 8);
    let rows = Rows::new(&data, layout).unwrap();
    let other_dtype = Rows::new(&halves, layout).unwrap();
    let other_shape = Rows::new(&data, RowsLayout::contiguous(2, HEADS - 1, 8)).unwrap();
    write(&mut kv, 0, &[2.0; HEADS * 8], &[2.0; HEADS * 8], &[0]);
    assert_eq!(refused(kv.write_kv(2, &rows, &rows, &[0, 1])), "layer");
    assert_eq!(refused(kv.write_kv(0, &other_dtype, &rows, &[0, 1])), "k");
    assert_eq!(refused(kv.write_kv(0, &rows, &other_shape, &[0, 1])), "v");
    assert_eq!(refused(kv.write_kv(0, &rows, &rows, &[0])), "k");
    assert_eq!(refused(kv.write_kv(0, &rows, &rows, &[0, -2])), "slot_mapping");
    assert_eq!(refused(kv.write_kv(0, &rows, &rows, &[0, 5 * 16])), "slot_mapping");
    assert_eq!(read(&kv, 0, &[0], 0.0).0, [2.0; HEADS * 8]);
}

#[test]
fn chunks_never_written_are_not_read() {
    let kv = HostKv::new(config(8, 16, Dtype::F32)).unwrap();
    let layout = RowsLayout::contiguous(1, HEADS, 8);
    let (mut k, mut v) = ([0.0f32; HEADS * 8], [0.0f32; HEADS * 8]);
    let result = kv.read_kv(
        0,
        &[3],
        &mut RowsMut::new(&mut k, layout).unwrap(),
        &mut RowsMut::new(&mut v, layout).unwrap(),
    );
    assert_eq!(refused(result), "slots");
}

#[test]
fn copies_that_do_not_fit_are_refused() {
    let mut kv = HostKv::new(config(8, 16, Dtype::F32)).unwrap();
    assert_eq!(refused(kv.copy_chunk_head(0, 1, 3)), "src");
    write(&mut kv, 0, &[2.0; HEADS * 8], &[2.0; HEADS * 8], &[0]);
    assert_eq!(refused(kv.copy_chunk_head(5, 1, 3)), "src");
    assert_eq!(refused(kv.copy_chunk_head(0, 5, 3)), "dst");
    assert_eq!(refused(kv.copy_chunk_head(0, 1, 17)), "num_tokens");
}

#[test]
fn rows_that_overlap_are_not_written_to() {
    let mut data = [0.0f32; 100];
    let layout =
        RowsLayout { num_tokens: 2, num_heads: 2, head_dim: 8, token_stride: 8, head_stride: 8 };
    assert_eq!(refused(RowsMut::new(&mut data, layout).map(drop)), "out");
}

#[test]
fn rows_past_the_end_of_a_slice_are_refused() {
    let data = [0.0f32; 31];
    assert_eq!(refused(Rows::new(&data, RowsLayout::contiguous(2, 2, 8)).map(drop)), "rows");
}
