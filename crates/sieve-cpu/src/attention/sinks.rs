//! A learned logit of each query head in the softmax (a sink, as in gpt-oss, arXiv:2508.10925), joined to attention
//! that ran without it. Its value is zero, so it takes weight from the keys and adds nothing.

use rayon::prelude::*;

/// Joins `sinks` to an attention's output: `lse = log(exp(lse) + exp(sink))`, and o times `exp(old lse - new lse)`. A
/// row without a key (`lse = -inf`) gets the sink as its `lse`, and o = 0. The backward pass of attention reads the
/// joined o and lse like any other.
///
/// # Shapes
/// - sinks: `[num_heads]`
/// - o: `[batch, seq_len, num_heads, head_dim]`
/// - lse: `[batch, num_heads, seq_len]`
///
/// # Panics
/// When lengths do not fit.
pub fn join_sinks(seq_len: usize, sinks: &[f32], o: &mut [f32], lse: &mut [f32]) {
    let num_heads = sinks.len();
    let head_dim = width(seq_len, sinks, o, lse);
    let batches = o.par_chunks_mut(seq_len * num_heads * head_dim).zip(lse.par_chunks_mut(num_heads * seq_len));
    batches.for_each(|(o, lse)| {
        let factors: Vec<f32> = lse.iter().enumerate().map(|(n, lse)| factor(*lse, sinks[n / seq_len])).collect();
        for (n, lse) in lse.iter_mut().enumerate() {
            *lse = joined(*lse, sinks[n / seq_len]);
        }
        o.par_chunks_mut(head_dim).enumerate().for_each(|(n, o)| {
            let (token, head) = (n / num_heads, n % num_heads);
            o.iter_mut().for_each(|o| *o *= factors[head * seq_len + token]);
        });
    });
}

/// Gradient of the sinks, `[num_heads]`: `-sum over rows of exp(sink - lse) (o . d_o)`, from the joined o and lse.
///
/// # Shapes
/// As [`join_sinks`] has them; d_o as o.
///
/// # Panics
/// When lengths do not fit.
pub fn sinks_backward(seq_len: usize, sinks: &[f32], o: &[f32], lse: &[f32], d_o: &[f32]) -> Vec<f32> {
    let num_heads = sinks.len();
    let head_dim = width(seq_len, sinks, o, lse);
    assert_eq!(d_o.len(), o.len(), "sinks_backward: d_o is not as long as o");
    let of_head = |head: usize| {
        let rows = o.chunks_exact(head_dim).zip(d_o.chunks_exact(head_dim)).skip(head).step_by(num_heads);
        let of_row = |(row, (o, d_o)): (usize, (&[f32], &[f32]))| {
            let lse = lse[(row / seq_len * num_heads + head) * seq_len + row % seq_len];
            let dot: f64 = o.iter().zip(d_o).map(|(&o, &d_o)| f64::from(o) * f64::from(d_o)).sum();
            -f64::from(weight(sinks[head], lse)) * dot
        };
        // f64: as many rows as a batch has tokens are added.
        rows.enumerate().map(of_row).sum::<f64>() as f32
    };
    (0..num_heads).into_par_iter().map(of_head).collect()
}

/// The log-sum-exp with one more logit.
pub(crate) fn joined(lse: f32, sink: f32) -> f32 {
    let largest = lse.max(sink);
    if largest == f32::NEG_INFINITY {
        return largest;
    }
    largest + (-(lse - sink).abs()).exp().ln_1p()
}

/// What is left of the keys' share when the sink joins.
pub(crate) fn factor(lse: f32, sink: f32) -> f32 {
    match lse {
        f32::NEG_INFINITY => 0.0,
        lse => (lse - joined(lse, sink)).exp(),
    }
}

/// The sink's weight in a row with this joined log-sum-exp.
fn weight(sink: f32, lse: f32) -> f32 {
    match sink {
        f32::NEG_INFINITY => 0.0,
        sink => (sink - lse).exp(),
    }
}

/// Checks the lengths and returns the width of a head.
fn width(seq_len: usize, sinks: &[f32], o: &[f32], lse: &[f32]) -> usize {
    assert!(seq_len > 0 && !sinks.is_empty() && !lse.is_empty(), "sinks: there are no rows or no heads");
    assert!(lse.len().is_multiple_of(sinks.len() * seq_len), "sinks: lse is not [batch, num_heads, seq_len]");
    assert!(o.len().is_multiple_of(lse.len()), "sinks: o is not [batch, seq_len, num_heads, head_dim]");
    o.len() / lse.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sink_of_minus_infinity_changes_nothing_and_a_large_one_takes_all() {
        let (o, lse) = ([1.5_f32, -2.0, 0.25, 3.0], [0.5_f32, 90.0]);
        let (mut o_same, mut lse_same) = (o, lse);
        join_sinks(2, &[f32::NEG_INFINITY], &mut o_same, &mut lse_same);
        assert_eq!((o_same, lse_same), (o, lse));
        let (mut o_none, mut lse_none) = (o, lse);
        join_sinks(2, &[1e30], &mut o_none, &mut lse_none);
        assert_eq!((o_none, lse_none), ([0.0; 4], [1e30; 2]));
        assert_eq!(sinks_backward(2, &[1e30], &o_none, &lse_none, &[1.0; 4]), [0.0]);
        assert_eq!(sinks_backward(2, &[f32::NEG_INFINITY], &o, &lse, &[1.0; 4]), [0.0]);
    }

    #[test]
    fn a_row_without_keys_reads_the_sink_alone() {
        for (sink, lse_wanted) in [(0.75, 0.75), (f32::NEG_INFINITY, f32::NEG_INFINITY)] {
            let (mut o, mut lse) = ([0.0, 0.0], [f32::NEG_INFINITY]);
            join_sinks(1, &[sink], &mut o, &mut lse);
            assert_eq!((o, lse), ([0.0; 2], [lse_wanted]));
            assert_eq!(sinks_backward(1, &[sink], &o, &lse, &[1.0; 2]), [-0.0]);
        }
    }

    #[test]
    fn an_equal_sink_takes_half() {
        // Two tokens of two heads: log-sum-exp by head, output by token.
        let (mut o, mut lse) = ([2.0, 2.0, 2.0, 2.0], [1.0, 3.0, 0.0, 0.0]);
        join_sinks(2, &[1.0, -50.0], &mut o, &mut lse);
        let shares = [1.0, 2.0, 2.0 / (1.0 + (-2.0_f32).exp()), 2.0];
        for (got, wanted) in o.iter().zip(shares) {
            assert!((got - wanted).abs() < 1e-6, "{o:?}");
        }
        assert!((lse[0] - (1.0 + 2.0_f32.ln())).abs() < 1e-6, "{lse:?}");
    }
}
