//! Plain attention in float64.

/// How scores are made from products.
#[derive(Debug, Clone, Copy)]
pub struct Scores {
    pub sm_scale: f64,
    pub soft_cap: Option<f64>,
}

/// The output and the log-sum-exp of one query over keys and values, all in float64.
pub fn attention(q: &[f64], keys: &[&[f64]], values: &[&[f64]], scores: Scores) -> (Vec<f64>, f64) {
    let mut out = vec![0.0; q.len()];
    let logits = keys
        .iter()
        .map(|k| {
            let score = q.iter().zip(*k).map(|(x, y)| x * y).sum::<f64>() * scores.sm_scale;
            scores.soft_cap.map_or(score, |cap| cap * (score / cap).tanh())
        })
        .collect::<Vec<_>>();
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if largest == f64::NEG_INFINITY {
        return (out, largest);
    }
    let sum: f64 = logits.iter().map(|x| (x - largest).exp()).sum();
    for (logit, value) in logits.iter().zip(values) {
        let weight = (logit - largest).exp() / sum;
        for (o, v) in out.iter_mut().zip(*value) {
            *o += weight * v;
        }
    }
    (out, largest + sum.ln())
}

/// Fails unless `max|x - reference| / max|reference|` is within `tolerance`.
pub fn assert_close(x: &[f64], reference: &[f64], tolerance: f64, what: &str) {
    let size = reference.iter().fold(0.0f64, |m, y| m.max(y.abs()));
    for (i, (x, y)) in x.iter().zip(reference).enumerate() {
        let error = (x - y).abs();
        let close = error <= tolerance * size;
        assert!(close, "{what}: element {i} is {x}, not {y} (error {error:e} of {size:e})");
    }
}
