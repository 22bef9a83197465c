//! Attention of one step over a plan.

use super::kernel::dispatch::{self, Run, run_task};
use super::kernel::scratch::AlignedBuf;
use super::kernel::softmax::ScoreScale;
use super::kernel::task::{Shared, Task};
use super::output::{Output, Partials, Results};
use super::schedule::{Geometry, Schedule, Sharing};
use super::simd::{LANES, Simd};
use super::state::{PartState, merge};
use super::{Isa, Workers};
use crate::error::{Error, Result};
use crate::kv::rows::check_rows;
use crate::kv::{Dtype, HostKv, PagedKv, Rows, RowsMut};
use crate::plan::PlanView;

/// Query tokens of a merging task.
const MERGE_TOKENS: usize = 8;

/// Where K and V are.
#[derive(Debug, Clone, Copy)]
pub enum KvSource<'a> {
    /// One layer of a host storage.
    Host {
        /// The storage.
        kv: &'a HostKv,
        /// The layer.
        layer: usize,
    },
    /// Somebody else's pages.
    Paged(PagedKv<'a>),
}

impl KvSource<'_> {
    /// K/V heads, elements of a row, element type.
    fn shape(&self) -> (usize, usize, Dtype) {
        match self {
            Self::Host { kv, .. } => {
                let config = kv.config();
                (config.num_kv_heads, config.head_dim, config.dtype)
            }
            Self::Paged(paged) => {
                let shape = paged.shape();
                (shape.num_kv_heads, shape.head_dim, shape.dtype)
            }
        }
    }

    fn check_pages(&self, view: &PlanView<'_>, schedule: &Schedule) -> Result<()> {
        let page_size = match self {
            Self::Host { kv, .. } => kv.config().chunk_size,
            Self::Paged(paged) => paged.shape().page_size,
        };
        if view.page_size as usize != page_size {
            let given = format!("page_size {}", view.page_size);
            return Err(Error::invalid("plan", given, format!("{page_size}, as the K/V")));
        }
        match self {
            Self::Host { kv, layer } => {
                kv.check_layer(*layer)?;
                schedule.pages.iter().try_for_each(|page| kv.check_written("plan", page.id))
            }
            Self::Paged(paged) => {
                let num_pages = paged.shape().num_pages;
                match schedule.pages.iter().find(|page| page.id as usize >= num_pages) {
                    Some(page) => Err(Error::invalid(
                        "plan",
                        format!("page {}", page.id),
                        format!("below {num_pages}"),
                    )),
                    None => Ok(()),
                }
            }
        }
    }
}

/// How attention is computed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionParams {
    /// What the products of queries and keys are multiplied with.
    pub sm_scale: f32,
    /// With a cap, scores are `cap * tanh(score / cap)`.
    pub logits_soft_cap: Option<f32>,
    /// A query at position i sees the keys j with `i - window_left <= j <= i`; -1 is infinite.
    pub window_left: i32,
    /// Which segments go through phase one.
    pub sharing: Sharing,
    /// The instruction set.
    pub isa: Isa,
}

impl AttentionParams {
    /// The usual ones: scale 1/sqrt(head_dim), no cap, no window, sharing where it pays, the
    /// fastest instruction set.
    pub fn new(head_dim: usize) -> Self {
        Self {
            sm_scale: 1.0 / (head_dim as f32).sqrt(),
            logits_soft_cap: None,
            window_left: -1,
            sharing: Sharing::Auto,
            isa: Isa::detect(),
        }
    }

    fn check(&self) -> Result<()> {
        if !self.sm_scale.is_finite() {
            return Err(Error::invalid("sm_scale", self.sm_scale, "a finite number"));
        }
        if let Some(cap) = self.logits_soft_cap
            && !(cap.is_finite() && cap > 0.0)
        {
            return Err(Error::invalid("logits_soft_cap", cap, "a finite number above 0, or none"));
        }
        if self.window_left < -1 {
            let allowed = format!("-1 (infinite) to {}", i32::MAX);
            return Err(Error::invalid("window_left", self.window_left, allowed));
        }
        if !self.isa.is_available() {
            return Err(Error::invalid("isa", self.isa, format!("{:?}", Isa::available())));
        }
        Ok(())
    }
}

/// Attention of the query rows of a step: `out[row] = softmax(q[row] K^T) V` over the keys that
/// the plan and the window give each row.
///
/// `q` is `[rows, num_qo_heads, head_dim]` of the K/V's dtype, `num_qo_heads` a multiple of the K/V
/// heads. `out` is of the same shape, of q's dtype or float32. `lse`, `[rows, num_qo_heads]`
/// contiguous, gets the natural logarithm of the sum of exponentials. Rows that no sequence names,
/// or that see no key, get `out` 0 and `lse` -inf.
///
/// Equal inputs give equal bits, whatever the number of threads.
///
/// # Errors
/// [`Error::InvalidConfig`] for arguments that do not fit together, or a plan whose tables
/// contradict themselves or name chunks that were never written. Nothing is written then.
pub fn attend(
    view: &PlanView<'_>,
    source: &KvSource<'_>,
    q: &Rows<'_>,
    params: &AttentionParams,
    out: &mut RowsMut<'_>,
    lse: Option<&mut [f32]>,
    workers: &Workers,
) -> Result<()> {
    params.check()?;
    let (num_kv_heads, head_dim, dtype) = source.shape();
    let num_qo_heads = q.layout().num_heads;
    check_rows("q", q.layout(), q.dtype(), (num_qo_heads, head_dim, dtype))?;
    if num_qo_heads == 0 || !num_qo_heads.is_multiple_of(num_kv_heads) {
        let allowed = format!("a multiple of the {num_kv_heads} K/V heads");
        return Err(Error::invalid("q", format!("{num_qo_heads} heads"), allowed));
    }
    let out_dtype = if out.dtype() == Dtype::F32 { Dtype::F32 } else { dtype };
    check_rows("out", out.layout(), out.dtype(), (num_qo_heads, head_dim, out_dtype))?;
    let num_rows = view.num_qo_rows as usize;
    for (argument, rows) in [("q", q.layout().num_tokens), ("out", out.layout().num_tokens)] {
        if rows != num_rows {
            let allowed = format!("the plan's {num_rows}");
            return Err(Error::invalid(argument, format!("{rows} rows"), allowed));
        }
    }
    if let Some(lse) = &lse
        && lse.len() != num_rows * num_qo_heads
    {
        let allowed = format!("[{num_rows}, {num_qo_heads}]");
        return Err(Error::invalid("lse", format!("{} values", lse.len()), allowed));
    }
    let geometry = Geometry {
        num_kv_heads,
        group: num_qo_heads / num_kv_heads,
        head_dim,
        itemsize: dtype.itemsize(),
        window_left: u32::try_from(params.window_left).ok(),
        sharing: params.sharing,
    };
    let schedule = Schedule::new(view, &geometry)?;
    source.check_pages(view, &schedule)?;

    let mut buffer = workers.take_buffer();
    let partials = partial_states(&mut buffer, schedule.num_slots, num_qo_heads, head_dim);
    let results = Results { out, lse: lse.map(<[f32]>::as_mut_ptr) };
    let shared = Shared {
        source,
        q,
        page_size: view.page_size as usize,
        group: geometry.group,
        scale: ScoreScale::new(params.sm_scale, params.logits_soft_cap),
    };
    workers.for_each(schedule.tasks.len() * num_kv_heads, |index, scratch| {
        let (block, split) = schedule.tasks[index / num_kv_heads];
        let block = &schedule.blocks[block];
        let pages = block.split(split);
        let output = if block.direct {
            Output::Direct(&results)
        } else {
            Output::Partial { partials: &partials, first_slot: block.slot(split, block.tokens.0) }
        };
        let task = Task {
            kv_head: index % num_kv_heads,
            tokens: &schedule.tokens[block.tokens.0..block.tokens.1],
            pages: &schedule.pages[pages.0..pages.1],
            output,
        };
        run_task(params.isa, &shared, &task, scratch);
    });
    let num_tokens = schedule.tokens.len();
    let merged = (0..num_tokens).filter(|&token| schedule.is_merged(token)).collect::<Vec<_>>();
    workers.for_each(merged.len().div_ceil(MERGE_TOKENS), |index, _| {
        let begin = index * MERGE_TOKENS;
        let tokens = &merged[begin..(begin + MERGE_TOKENS).min(merged.len())];
        dispatch::on(
            params.isa,
            MergeTokens { schedule: &schedule, tokens, partials: &partials, results: &results },
        );
    });
    dispatch::on(params.isa, ClearRows { rows: &schedule.padding, results: &results });
    workers.give_buffer(buffer);
    Ok(())
}

fn partial_states(
    buffer: &mut AlignedBuf,
    num_slots: usize,
    num_qo_heads: usize,
    head_dim: usize,
) -> Partials {
    let rows = num_slots * num_qo_heads;
    let o = buffer.get(rows * (head_dim + 1) * size_of::<f32>()).cast::<f32>();
    Partials { o, lse: o.wrapping_add(rows * head_dim), num_qo_heads, head_dim }
}

/// Merges the partial states of some tokens into their results.
struct MergeTokens<'a> {
    schedule: &'a Schedule,
    tokens: &'a [usize],
    partials: &'a Partials,
    results: &'a Results<'a>,
}

impl Run for MergeTokens<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let head_dim = self.partials.head_dim;
        let mut merged = vec![0.0f32; head_dim.next_multiple_of(LANES)];
        let (mut slots, mut parts) = (Vec::new(), Vec::new());
        for &token in self.tokens {
            slots.clear();
            for block in self.schedule.blocks_of(token) {
                slots.extend((0..block.num_splits).map(|split| block.slot(split, token)));
            }
            for head in 0..self.partials.num_qo_heads {
                parts.clear();
                for &slot in &slots {
                    let (o, lse) = self.partials.at(slot, head);
                    // SAFETY: all tasks have ended, and each slot was written by one.
                    parts.push(PartState::new(o, unsafe { lse.read() }));
                }
                let q_row = self.schedule.tokens[token].q_row as usize;
                // SAFETY: as above; the row is this token's alone.
                unsafe {
                    let lse = merge(s, &mut parts, merged.as_mut_ptr(), head_dim);
                    self.results.write(s, q_row, head, merged.as_ptr(), s.splat(1.0), lse);
                }
            }
        }
    }
}

/// Writes the empty state to rows that no sequence names.
struct ClearRows<'a> {
    rows: &'a [u32],
    results: &'a Results<'a>,
}

impl Run for ClearRows<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let layout = self.results.out.layout();
        let zeros = vec![0.0f32; layout.head_dim.next_multiple_of(LANES)];
        for &row in self.rows {
            for head in 0..layout.num_heads {
                // SAFETY: no task writes these rows.
                unsafe {
                    let (zero, lse) = (s.splat(0.0), f32::NEG_INFINITY);
                    self.results.write(s, row as usize, head, zeros.as_ptr(), zero, lse);
                }
            }
        }
    }
}
