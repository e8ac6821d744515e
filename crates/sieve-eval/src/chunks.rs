//! Prompts whole, or in pieces that each see all keys before them.
use crate::EvalError;
use sieve_nn::HostOperands;
use sieve_select::{Call, CallShape, Selector, density};
use std::ops::Range;

/// A layer's attention of one document under a prefill selector, over all its calls.
pub(crate) struct Prefilled {
    /// `[num_tokens, num_heads, head_dim]`.
    pub(crate) o: Vec<f32>,
    /// Of the kept pairs, `[num_heads, num_tokens]`.
    pub(crate) lse: Vec<f32>,
    /// Computed pairs over causal pairs, probe rows included.
    pub(crate) density: f64,
    /// Kept tiles over admissible tiles; of several calls the mean by causal pairs.
    pub(crate) tile_density: f64,
    /// Seconds until the masks were ready.
    pub(crate) select_seconds: f64,
    pub(crate) calls: u64,
    pub(crate) dense_calls: u64,
    pub(crate) nan_lists: u64,
}

/// Runs a prefill selector on a document, in calls of `chunk` tokens or in one. A layer's rows depend on earlier rows of the
/// layer below alone, so that cutting layer by layer is what a model does that reads its prompt piece by piece.
pub(crate) fn prefill(
    selector: &Selector,
    operands: HostOperands<'_>,
    chunk: Option<usize>,
) -> Result<Prefilled, EvalError> {
    let (tokens, heads, d) = (operands.num_tokens, operands.num_heads, operands.head_dim);
    let mut done = Prefilled {
        o: Vec::with_capacity(tokens * heads * d),
        lse: vec![f32::NEG_INFINITY; heads * tokens],
        density: 0.0,
        tile_density: 0.0,
        select_seconds: 0.0,
        calls: 0,
        dense_calls: 0,
        nan_lists: 0,
    };
    let mut causal_pairs = 0.0;
    let step = chunk.unwrap_or(tokens).max(1);
    for first in (0..tokens).step_by(step) {
        let rows = first..(first + step).min(tokens);
        let call = part(operands, rows.clone())?;
        let part = selector.prefill(&call)?;
        let shares = density(&part.mask);
        let pairs = call.shape.causal_pairs() as f64;
        causal_pairs += pairs;
        done.density += (shares.token + shares.probes) * pairs;
        done.tile_density += shares.tile * pairs;
        done.select_seconds += part.mask.stats.select_seconds;
        done.calls += 1;
        done.dense_calls += u64::from(part.mask.stats.dense_call);
        done.nan_lists += part.mask.stats.nan_lists as u64;
        done.o.extend(part.output.o);
        for (head, lse) in part.output.lse.chunks(rows.len()).enumerate() {
            done.lse[head * tokens..][rows.clone()].copy_from_slice(lse);
        }
    }
    done.density /= causal_pairs;
    done.tile_density /= causal_pairs;
    Ok(done)
}

/// A call of consecutive rows of a document, with the keys up to them.
pub(crate) fn part(operands: HostOperands<'_>, rows: Range<usize>) -> Result<Call<'_>, EvalError> {
    let shape = CallShape {
        num_queries: rows.len(),
        num_keys: rows.end,
        num_heads: operands.num_heads,
        num_kv_heads: operands.num_kv_heads,
        head_dim: operands.head_dim,
    };
    let q_width = shape.num_heads * shape.head_dim;
    let keys = rows.end * shape.num_kv_heads * shape.head_dim;
    let call = Call::new(
        shape,
        &operands.q[rows.start * q_width..rows.end * q_width],
        &operands.k[..keys],
        &operands.v[..keys],
    )?;
    Ok(call.in_layer(operands.layer, operands.num_layers))
}
