//! One call of `attend`: a tree, random K/V of a shape and type, parameters; and its check.

use chunkcache::attention::{AttentionParams, KvSource, Sharing, Workers, attend};
use chunkcache::kv::{
    Dtype, Element, HostKv, KvConfig, PageStrides, PagedKv, PagedShape, Rows, RowsLayout, RowsMut,
};
use half::{bf16, f16};

use super::tree::Sequence;
use super::{Random, Scores, Tree, assert_close, attention};

/// Where K and V lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    Host,
    Nhd,
    Hnd,
}

/// What a call gave, as float64.
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    pub out: Vec<f64>,
    pub lse: Vec<f32>,
}

/// A call.
#[derive(Debug, Clone)]
pub struct Case {
    pub tree: Tree,
    pub dtype: Dtype,
    pub head_dim: usize,
    pub num_kv_heads: usize,
    pub group: usize,
    pub layout: Layout,
    pub params: AttentionParams,
    pub num_threads: usize,
    /// What queries and keys are multiplied with, and what is added to them then.
    pub scale: f32,
    pub offsets: (f32, f32),
    /// The error that is allowed beyond that of the type, as a multiple of it.
    pub slack: f64,
    /// What stands in every slot that no query sees.
    pub poison: f32,
    /// Elements between rows of q.
    pub q_gap: usize,
    pub seed: u64,
}

/// K and V of every slot, `[slots, num_kv_heads, head_dim]`.
struct Data {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Case {
    /// A call on float32 in host memory, with the usual parameters but sharing wherever it can be.
    pub fn new(tree: Tree, head_dim: usize, num_kv_heads: usize, group: usize) -> Self {
        Self {
            tree,
            dtype: Dtype::F32,
            head_dim,
            num_kv_heads,
            group,
            layout: Layout::Host,
            params: AttentionParams { sharing: Sharing::Always, ..AttentionParams::new(head_dim) },
            num_threads: 1,
            scale: 1.0,
            offsets: (0.0, 0.0),
            slack: 1.0,
            poison: f32::NAN,
            q_gap: 0,
            seed: 1,
        }
    }

    /// The error that is allowed.
    fn tolerance(&self) -> f64 {
        self.slack
            * match self.dtype {
                Dtype::F32 => 1e-5,
                Dtype::F16 | Dtype::Bf16 => 1e-2,
            }
    }

    /// Runs the call.
    pub fn run(&self) -> Output {
        match self.dtype {
            Dtype::F32 => self.run_as(|x: f32| x, f64::from),
            Dtype::F16 => self.run_as(f16::from_f32, f16::to_f64),
            Dtype::Bf16 => self.run_as(bf16::from_f32, bf16::to_f64),
        }
    }

    /// Runs the call and compares with plain attention in float64.
    pub fn check(&self) {
        let output = self.run();
        let expected = self.reference();
        let heads = self.num_kv_heads * self.group;
        for row in 0..self.tree.num_qo_rows as usize {
            for head in 0..heads {
                let at = row * heads + head;
                let what = format!("row {row} head {head} of {self:?}");
                let elements = at * self.head_dim..(at + 1) * self.head_dim;
                let (x, y) = (&output.out[elements.clone()], &expected.out[elements]);
                assert_close(x, y, self.tolerance(), &what);
                let (x, y) = (output.lse[at], expected.lse[at]);
                let close = x == y || (x - y).abs() <= 1e-5 * y.abs().max(1.0);
                assert!(close, "lse {x}, not {y}: {what}");
            }
        }
    }

    /// Plain attention in float64, row by row, on the rounded inputs.
    pub fn reference(&self) -> Output {
        let data = self.data();
        let round = |x: &f32| match self.dtype {
            Dtype::F32 => f64::from(*x),
            Dtype::F16 => f16::from_f32(*x).to_f64(),
            Dtype::Bf16 => bf16::from_f32(*x).to_f64(),
        };
        let [q, k, v] =
            [&data.q, &data.k, &data.v].map(|rows| rows.iter().map(round).collect::<Vec<_>>());
        let heads = self.num_kv_heads * self.group;
        let rows = self.tree.num_qo_rows as usize;
        let mut out = vec![0.0; rows * heads * self.head_dim];
        let mut lse = vec![f32::NEG_INFINITY; rows * heads];
        let scores = Scores {
            sm_scale: f64::from(self.params.sm_scale),
            soft_cap: self.params.logits_soft_cap.map(f64::from),
        };
        for sequence in &self.tree.sequences {
            for t in 0..sequence.qo_len {
                let row = (sequence.qo_begin + t) as usize;
                let slots = self.slots(sequence, t);
                for head in 0..heads {
                    let at = |slot: &usize| {
                        let first = (slot * self.num_kv_heads + head / self.group) * self.head_dim;
                        first..first + self.head_dim
                    };
                    let keys = slots.iter().map(|slot| &k[at(slot)]).collect::<Vec<_>>();
                    let values = slots.iter().map(|slot| &v[at(slot)]).collect::<Vec<_>>();
                    let at = row * heads + head;
                    let elements = at * self.head_dim..(at + 1) * self.head_dim;
                    let (o, l) = attention(&q[elements.clone()], &keys, &values, scores);
                    out[elements].copy_from_slice(&o);
                    lse[at] = l as f32;
                }
            }
        }
        Output { out, lse }
    }

    fn data(&self) -> Data {
        let mut random = Random(self.seed);
        let heads = self.num_kv_heads * self.group;
        let q = random.normals(self.tree.num_qo_rows as usize * heads * self.head_dim);
        let slots = (self.tree.num_pages * self.tree.page_size) as usize;
        let row = self.num_kv_heads * self.head_dim;
        let mut k = random.normals(slots * row);
        let mut v = random.normals(slots * row);
        let mut used = vec![false; slots];
        for sequence in &self.tree.sequences {
            for t in 0..sequence.qo_len {
                for slot in self.slots(sequence, t) {
                    used[slot] = true;
                }
            }
        }
        for slot in (0..slots).filter(|&slot| !used[slot]) {
            k[slot * row..(slot + 1) * row].fill(self.poison);
            v[slot * row..(slot + 1) * row].fill(self.poison);
        }
        let scaled = |x: Vec<f32>, offset| {
            x.into_iter().map(|x| x * self.scale + offset).collect::<Vec<_>>()
        };
        Data { q: scaled(q, self.offsets.0), k: scaled(k, self.offsets.1), v }
    }

    /// The slots of the keys that query `t` of a sequence sees.
    fn slots(&self, sequence: &Sequence, t: u32) -> Vec<usize> {
        let end = (sequence.kv_len + t + 1).saturating_sub(sequence.qo_len);
        let begin = u32::try_from(self.params.window_left)
            .map_or(0, |window| end.saturating_sub(window.saturating_add(1)));
        let page_size = self.tree.page_size;
        let slot = |position: u32| {
            let page = sequence.pages[(position / page_size) as usize];
            (page * page_size + position % page_size) as usize
        };
        (begin..end).map(slot).collect()
    }

    fn run_as<T: Element + Default>(
        &self,
        from: impl Fn(f32) -> T,
        to: impl Fn(T) -> f64,
    ) -> Output {
        let data = self.data();
        let convert = |x: &[f32]| x.iter().map(|&x| from(x)).collect::<Vec<_>>();
        let (k, v) = (convert(&data.k), convert(&data.v));
        let page_size = self.tree.page_size as usize;
        let num_pages = self.tree.num_pages as usize;
        let slots = num_pages * page_size;
        let rows = RowsLayout::contiguous(slots, self.num_kv_heads, self.head_dim);
        if self.layout == Layout::Host {
            let mut kv = HostKv::new(KvConfig {
                num_layers: 2,
                num_kv_heads: self.num_kv_heads,
                head_dim: self.head_dim,
                chunk_size: page_size,
                dtype: self.dtype,
                capacity: num_pages.max(1),
            })
            .unwrap();
            let mapping = (0..slots as i64).collect::<Vec<_>>();
            let (k, v) = (Rows::new(&k, rows).unwrap(), Rows::new(&v, rows).unwrap());
            kv.write_kv(1, &k, &v, &mapping).unwrap();
            return self.attend(&KvSource::Host { kv: &kv, layer: 1 }, &data.q, from, to);
        }
        let strides = match self.layout {
            Layout::Nhd => PageStrides::nhd(page_size, self.num_kv_heads, self.head_dim),
            _ => PageStrides::hnd(page_size, self.num_kv_heads, self.head_dim),
        };
        let arrange = |x: &[T]| {
            let mut pages = vec![T::default(); x.len()];
            for slot in 0..slots {
                for head in 0..self.num_kv_heads {
                    let first = (slot * self.num_kv_heads + head) * self.head_dim;
                    let at = slot / page_size * strides.page
                        + head * strides.head
                        + slot % page_size * strides.token;
                    pages[at..at + self.head_dim].copy_from_slice(&x[first..first + self.head_dim]);
                }
            }
            pages
        };
        let (k, v) = (arrange(&k), arrange(&v));
        let shape = PagedShape {
            num_pages,
            page_size,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            dtype: self.dtype,
        };
        // SAFETY: the arrays hold all pages of the shape.
        let paged = unsafe {
            PagedKv::from_raw(k.as_ptr().cast(), v.as_ptr().cast(), shape, strides, strides)
        };
        self.attend(&KvSource::Paged(paged.unwrap()), &data.q, from, to)
    }

    fn attend<T: Element + Default>(
        &self,
        source: &KvSource<'_>,
        q: &[f32],
        from: impl Fn(f32) -> T,
        to: impl Fn(T) -> f64,
    ) -> Output {
        let heads = self.num_kv_heads * self.group;
        let rows = self.tree.num_qo_rows as usize;
        let layout = RowsLayout {
            num_tokens: rows,
            num_heads: heads,
            head_dim: self.head_dim,
            token_stride: heads * (self.head_dim + self.q_gap) + self.q_gap,
            head_stride: self.head_dim + self.q_gap,
        };
        let mut strided = vec![from(f32::NAN); rows * layout.token_stride];
        for (i, row) in q.chunks(self.head_dim).enumerate() {
            let at = i / heads * layout.token_stride + i % heads * layout.head_stride;
            for (x, &y) in strided[at..].iter_mut().zip(row) {
                *x = from(y);
            }
        }
        let mut out = vec![from(7.0); q.len()];
        let mut lse = vec![7.0; rows * heads];
        let tables = self.tree.tables();
        attend(
            &tables.view(),
            source,
            &Rows::new(&strided, layout).unwrap(),
            &self.params,
            &mut RowsMut::new(&mut out, RowsLayout::contiguous(rows, heads, self.head_dim))
                .unwrap(),
            Some(&mut lse),
            &Workers::new(self.num_threads).unwrap(),
        )
        .unwrap();
        Output { out: out.into_iter().map(to).collect(), lse }
    }
}
