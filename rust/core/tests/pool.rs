//! The chunk pool and its address arithmetic.

use chunkcache::error::Error;
use chunkcache::pool::{ChunkPool, KvLayout};

#[test]
fn the_chunk_given_back_last_is_handed_out_first() {
    let mut pool = ChunkPool::new(3).unwrap();
    let ids = [(); 3].map(|()| pool.allocate().unwrap());
    pool.free(ids[0]);
    pool.free(ids[2]);
    assert_eq!(
        [pool.allocate(), pool.allocate(), pool.allocate()],
        [Some(ids[2]), Some(ids[0]), None]
    );
}

#[test]
fn ids_are_distinct_and_below_the_capacity() {
    let mut pool = ChunkPool::new(5).unwrap();
    let mut ids = Vec::new();
    pool.allocate_many(2, &mut ids).unwrap();
    pool.free(ids.remove(0));
    pool.allocate_many(4, &mut ids).unwrap();
    ids.sort_unstable();
    assert_eq!(ids, [0, 1, 2, 3, 4]);
    assert_eq!(pool.num_free(), 0);
}

#[test]
fn a_batch_takes_all_its_chunks_or_none() {
    let mut pool = ChunkPool::new(4).unwrap();
    let mut ids = Vec::new();
    pool.allocate_many(3, &mut ids).unwrap();
    let error = pool.allocate_many(2, &mut ids).unwrap_err();
    assert_eq!(error, Error::OutOfChunks { needed: 2, free: 1, evictable: 0, capacity: 4 });
    assert_eq!((ids.len(), pool.num_free()), (3, 1));
}

#[test]
fn a_capacity_that_ids_cannot_name_is_refused() {
    for capacity in [0, u32::MAX as usize, 1 << 40] {
        let error = ChunkPool::new(capacity).unwrap_err();
        assert!(error.to_string().contains(&format!("capacity: got {capacity}")), "{error}");
    }
}

/// One layer's chunks of 8 heads, 64 tokens and 128 values of 2 bytes: 256 KiB each.
fn layout(num_chunks: u32) -> KvLayout {
    KvLayout::arena(0x7f00_0000_0000, 32, num_chunks, 8, 64, 128, 2).unwrap()
}

#[test]
fn addresses_pass_31_and_32_bits() {
    let layout = layout(1 << 20);
    for chunk in [(1 << 13) - 1, 1 << 13, (1 << 14) - 1, 1 << 14, (1 << 20) - 1] {
        let expected = 0x7f00_0000_0000 + u64::from(chunk) * 262_144;
        assert_eq!(layout.key_address(0, chunk, 0, 0), expected);
    }
    assert!(u64::from((1_u32 << 14) - 1) * layout.chunk_stride() < 1 << 32);
    assert_eq!(u64::from(1_u32 << 14) * layout.chunk_stride(), 1 << 32);
}

#[test]
fn chunk_ids_up_to_the_last_address_rightly() {
    let last = u32::MAX - 1;
    let layout = KvLayout::arena(0, 2, u32::MAX, 32, 128, 256, 4).unwrap();
    let chunk_stride = 2 * 32 * 128 * 256 * 4_u64;
    let expected = u128::from(u32::MAX) * u128::from(chunk_stride)
        + u128::from(last) * u128::from(chunk_stride)
        + 31 * 128 * 256 * 4
        + 127 * 256 * 4;
    assert_eq!(u128::from(layout.key_address(1, last, 31, 127)), expected);
}

#[test]
fn every_key_and_value_has_an_address_of_its_own() {
    let layout = KvLayout::arena(1000, 2, 3, 2, 4, 8, 2).unwrap();
    let mut addresses = Vec::new();
    for layer in 0..2 {
        for chunk in 0..3 {
            for head in 0..2 {
                for token in 0..4 {
                    addresses.push(layout.key_address(layer, chunk, head, token));
                    addresses.push(layout.value_address(layer, chunk, head, token));
                }
            }
        }
    }
    addresses.sort_unstable();
    let all: Vec<u64> = (0..addresses.len() as u64).map(|i| 1000 + i * 16).collect();
    assert_eq!(addresses, all);
    assert_eq!(layout.num_bytes(), all.len() as u64 * 16);
}

#[test]
fn an_arena_beyond_64_bits_is_refused() {
    assert!(KvLayout::arena(0, u32::MAX, u32::MAX, u32::MAX, 64, 128, 2).is_err());
    assert!(KvLayout::arena(u64::MAX, 1, 1, 1, 1, 8, 2).is_err());
    assert!(KvLayout::arena(0, 1, 1, 0, 1, 8, 2).is_err());
}
