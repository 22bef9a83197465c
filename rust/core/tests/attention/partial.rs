//! Partial attention over plain arrays, and merging of states.

use chunkcache::attention::{
    AttentionParams, Workers, merge_state, merge_states, partial_attention,
};
use chunkcache::kv::{Rows, RowsLayout, RowsMut};

use crate::support::{Random, Scores, assert_close, attention};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 24;

struct Inputs {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    tokens: usize,
    keys: usize,
}

impl Inputs {
    fn new(tokens: usize, keys: usize) -> Self {
        let mut random = Random(keys as u64);
        Self {
            q: random.normals(tokens * HEADS * DIM),
            k: random.normals(keys * KV_HEADS * DIM),
            v: random.normals(keys * KV_HEADS * DIM),
            tokens,
            keys,
        }
    }

    /// The state over keys `begin..end`.
    fn state(&self, begin: usize, end: usize) -> (Vec<f32>, Vec<f32>) {
        let q = RowsLayout::contiguous(self.tokens, HEADS, DIM);
        let kv = RowsLayout::contiguous(end - begin, KV_HEADS, DIM);
        let elements = begin * KV_HEADS * DIM..end * KV_HEADS * DIM;
        let mut out = vec![7.0; self.q.len()];
        let mut lse = vec![7.0; self.tokens * HEADS];
        partial_attention(
            &Rows::new(&self.q, q).unwrap(),
            &Rows::new(&self.k[elements.clone()], kv).unwrap(),
            &Rows::new(&self.v[elements], kv).unwrap(),
            &AttentionParams::new(DIM),
            &mut RowsMut::new(&mut out, q).unwrap(),
            Some(&mut lse),
            &Workers::new(2).unwrap(),
        )
        .unwrap();
        (out, lse)
    }

    fn check(&self, (out, lse): &(Vec<f32>, Vec<f32>)) {
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let (q, k, v) = (wide(&self.q), wide(&self.k), wide(&self.v));
        let scores = Scores { sm_scale: 1.0 / (DIM as f64).sqrt(), soft_cap: None };
        for (row, &row_lse) in lse.iter().enumerate() {
            let kv_head = row % HEADS / (HEADS / KV_HEADS);
            let at = |key: usize| {
                let first = (key * KV_HEADS + kv_head) * DIM;
                first..first + DIM
            };
            let keys = (0..self.keys).map(|key| &k[at(key)]).collect::<Vec<_>>();
            let values = (0..self.keys).map(|key| &v[at(key)]).collect::<Vec<_>>();
            let row_elements = row * DIM..(row + 1) * DIM;
            let (o, l) = attention(&q[row_elements.clone()], &keys, &values, scores);
            assert_close(&wide(&out[row_elements]), &o, 1e-5, &format!("row {row}"));
            assert!((f64::from(row_lse) - l).abs() <= 1e-5, "lse of row {row}");
        }
    }
}

fn merge(a: &(Vec<f32>, Vec<f32>), b: &(Vec<f32>, Vec<f32>)) -> (Vec<f32>, Vec<f32>) {
    let layout = RowsLayout::contiguous(a.1.len() / HEADS, HEADS, DIM);
    let mut out = vec![7.0; a.0.len()];
    let mut lse = vec![7.0; a.1.len()];
    merge_state(
        &Rows::new(&a.0, layout).unwrap(),
        &a.1,
        &Rows::new(&b.0, layout).unwrap(),
        &b.1,
        &mut RowsMut::new(&mut out, layout).unwrap(),
        &mut lse,
    )
    .unwrap();
    (out, lse)
}

#[test]
fn partial_attention_sees_all_keys() {
    for (tokens, keys) in [(1, 1), (1, 100), (5, 63), (5, 64), (40, 1100)] {
        let inputs = Inputs::new(tokens, keys);
        inputs.check(&inputs.state(0, keys));
    }
}

#[test]
fn partial_attention_without_keys_is_empty() {
    let (out, lse) = Inputs::new(3, 10).state(4, 4);
    assert!(out.iter().all(|&x| x == 0.0));
    assert!(lse.iter().all(|&x| x == f32::NEG_INFINITY));
}

#[test]
fn merged_states_are_the_state_of_all_keys() {
    let inputs = Inputs::new(5, 100);
    inputs.check(&merge(&inputs.state(0, 37), &inputs.state(37, 100)));
}

#[test]
fn the_empty_state_changes_nothing() {
    let inputs = Inputs::new(5, 100);
    let state = inputs.state(0, 100);
    let mut empty = inputs.state(0, 0);
    // Its o is not read.
    empty.0.fill(f32::NAN);
    assert_eq!(merge(&state, &empty), state);
    assert_eq!(merge(&empty, &state), state);
}

#[test]
fn two_empty_states_merge_to_the_empty_state() {
    let inputs = Inputs::new(5, 100);
    let empty = inputs.state(0, 0);
    assert_eq!(merge(&empty, &empty), empty);
}

#[test]
fn many_states_merge_at_once() {
    let inputs = Inputs::new(5, 100);
    let parts = [0, 1, 20, 20, 60, 100].windows(2).map(|w| inputs.state(w[0], w[1]));
    let parts = parts.collect::<Vec<_>>();
    let layout = RowsLayout::contiguous(5, HEADS, DIM);
    let states = parts.iter().map(|(o, lse)| (Rows::new(o, layout).unwrap(), &lse[..]));
    let mut out = vec![7.0; inputs.q.len()];
    let mut lse = vec![7.0; 5 * HEADS];
    merge_states(
        &states.collect::<Vec<_>>(),
        &mut RowsMut::new(&mut out, layout).unwrap(),
        &mut lse,
    )
    .unwrap();
    inputs.check(&(out, lse));
}

#[test]
fn states_far_apart_merge_without_overflow() {
    let layout = RowsLayout::contiguous(1, 1, 4);
    let (a, b) = ([1.0f32; 4], [2.0f32; 4]);
    let mut out = [0.0f32; 4];
    let mut lse = [0.0];
    merge_state(
        &Rows::new(&a, layout).unwrap(),
        &[-1e4],
        &Rows::new(&b, layout).unwrap(),
        &[1e4],
        &mut RowsMut::new(&mut out, layout).unwrap(),
        &mut lse,
    )
    .unwrap();
    assert_eq!((out, lse), (b, [1e4]));
}

#[test]
fn states_of_different_shapes_are_refused() {
    let layout = RowsLayout::contiguous(1, 1, 4);
    let other = RowsLayout::contiguous(1, 2, 4);
    let (a, b) = ([1.0f32; 4], [2.0f32; 8]);
    let mut out = [0.0f32; 4];
    let result = merge_state(
        &Rows::new(&a, layout).unwrap(),
        &[0.0],
        &Rows::new(&b, other).unwrap(),
        &[0.0, 0.0],
        &mut RowsMut::new(&mut out, layout).unwrap(),
        &mut [0.0],
    );
    assert!(result.is_err());
}
