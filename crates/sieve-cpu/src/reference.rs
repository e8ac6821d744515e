//! Attention of one query by its definition, in f64: what every fast path of the CPU is tested against.

/// Result of one query.
#[derive(Clone, Debug, PartialEq)]
pub struct Attended {
    /// `sum p_j v_j`, `[head_dim]`.
    pub o: Vec<f64>,
    /// Log-sum-exp of the logits, -inf without keys.
    pub lse: f64,
    /// Probability of each key, in the order given.
    pub p: Vec<f64>,
}

/// The query over the keys it sees, each as (logit, value); without keys its output is 0.
pub fn attend<V: Copy + Into<f64>>(keys: &[(f64, &[V])], head_dim: usize) -> Attended {
    let max = keys.iter().fold(f64::NEG_INFINITY, |max, x| max.max(x.0));
    let sum: f64 = keys.iter().map(|x| (x.0 - max).exp()).sum();
    let p: Vec<f64> = keys.iter().map(|x| (x.0 - max).exp() / sum).collect();
    let mut o = vec![0.0; head_dim];
    for (p, (_, v)) in p.iter().zip(keys) {
        for (o, &v) in o.iter_mut().zip(*v) {
            *o += p * v.into();
        }
    }
    let lse = match keys {
        [] => f64::NEG_INFINITY,
        _ => max + sum.ln(),
    };
    Attended { o, lse, p }
}

/// `sum a_i b_i` in f64.
pub fn dot<T: Copy + Into<f64>>(a: &[T], b: &[T]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| a.into() * b.into()).sum()
}
