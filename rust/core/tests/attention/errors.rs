//! Arguments that do not fit together are refused before anything is written.

use chunkcache::attention::{AttentionParams, KvSource, Workers, attend};
use chunkcache::error::Error;
use chunkcache::kv::{Dtype, HostKv, KvConfig, Rows, RowsLayout, RowsMut};

use crate::support::{Tables, Tree};

const DIM: usize = 8;

struct Call {
    tables: Tables,
    params: AttentionParams,
    q: RowsLayout,
    out: RowsLayout,
    lse_len: usize,
    layer: usize,
    written: bool,
}

impl Call {
    fn new() -> Self {
        let mut tree = Tree::new(16);
        let root = tree.segment(None, 1);
        tree.leaf(Some(root), 3, 1);
        tree.leaf(Some(root), 4, 1);
        Self {
            tables: tree.tables(),
            params: AttentionParams::new(DIM),
            q: RowsLayout::contiguous(2, 4, DIM),
            out: RowsLayout::contiguous(2, 4, DIM),
            lse_len: 8,
            layer: 0,
            written: true,
        }
    }

    /// The argument that is refused.
    fn refused(&self) -> String {
        let mut kv = HostKv::new(KvConfig {
            num_layers: 1,
            num_kv_heads: 2,
            head_dim: DIM,
            chunk_size: 16,
            dtype: Dtype::F32,
            capacity: 3,
        })
        .unwrap();
        if self.written {
            let row = RowsLayout::contiguous(1, 2, DIM);
            let zeros = [0.0f32; 2 * DIM];
            let rows = Rows::new(&zeros, row).unwrap();
            kv.write_kv(0, &rows, &rows, &[0]).unwrap();
        }
        let q = vec![0.0f32; 1000];
        let mut out = vec![7.0f32; 1000];
        let mut lse = vec![7.0f32; self.lse_len];
        let result = attend(
            &self.tables.view(),
            &KvSource::Host { kv: &kv, layer: self.layer },
            &Rows::new(&q, self.q).unwrap(),
            &self.params,
            &mut RowsMut::new(&mut out, self.out).unwrap(),
            Some(&mut lse),
            &Workers::new(1).unwrap(),
        );
        assert!(out.iter().chain(&lse).all(|&x| x == 7.0), "nothing is written");
        match result {
            Err(Error::InvalidConfig { argument, .. }) => argument,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn heads_that_do_not_divide_are_refused() {
    let mut call = Call::new();
    call.q = RowsLayout::contiguous(2, 3, DIM);
    assert_eq!(call.refused(), "q");
}

#[test]
fn queries_of_another_head_dim_are_refused() {
    let mut call = Call::new();
    call.q = RowsLayout::contiguous(2, 4, 16);
    assert_eq!(call.refused(), "q");
}

#[test]
fn too_few_rows_are_refused() {
    let mut call = Call::new();
    call.q = RowsLayout::contiguous(1, 4, DIM);
    assert_eq!(call.refused(), "q");
    let mut call = Call::new();
    call.out = RowsLayout::contiguous(3, 4, DIM);
    assert_eq!(call.refused(), "out");
}

#[test]
fn an_lse_of_another_size_is_refused() {
    let mut call = Call::new();
    call.lse_len = 7;
    assert_eq!(call.refused(), "lse");
}

#[test]
fn parameters_out_of_range_are_refused() {
    for cap in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let mut call = Call::new();
        call.params.logits_soft_cap = Some(cap);
        assert_eq!(call.refused(), "logits_soft_cap");
    }
    let mut call = Call::new();
    call.params.window_left = -2;
    assert_eq!(call.refused(), "window_left");
    let mut call = Call::new();
    call.params.sm_scale = f32::NAN;
    assert_eq!(call.refused(), "sm_scale");
}

#[test]
fn a_layer_that_does_not_exist_is_refused() {
    let mut call = Call::new();
    call.layer = 1;
    assert_eq!(call.refused(), "layer");
}

#[test]
fn chunks_that_were_never_written_are_refused() {
    let mut call = Call::new();
    call.written = false;
    assert_eq!(call.refused(), "plan");
}

#[test]
fn tables_that_contradict_themselves_are_refused() {
    let breakages: [fn(&mut Tables); 9] = [
        |t| t.order[0] = 99,
        |t| t.page_ids[0] = 99,
        |t| t.segments[1].parent = 2,
        |t| t.segments[1].start_pos = 17,
        |t| t.segments[1].num_pages = 9,
        |t| t.segments[0].seq_end = 3,
        |t| t.segments[0].seq_end = 1,
        |t| t.sequences.iter_mut().for_each(|s| s.qo_begin = 1),
        |t| t.sequences.iter_mut().for_each(|s| s.kv_len = 99),
    ];
    for (i, breakage) in breakages.into_iter().enumerate() {
        let mut call = Call::new();
        breakage(&mut call.tables);
        assert_eq!(call.refused(), "plan", "breakage {i}");
    }
}
