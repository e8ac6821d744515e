//! Prompts whole, or in pieces that each see all keys before them.
use crate::EvalError;
use sieve_nn::HostOperands;
use sieve_select::{Call, CallShape, Selector, density};

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
    let call = call(operands)?;
    let (tokens, heads) = (operands.num_tokens, operands.num_heads);
    let mut done = Prefilled {
        o: Vec::with_capacity(operands.q.len()),
        lse: vec![f32::NEG_INFINITY; heads * tokens],
        density: 0.0,
        tile_density: 0.0,
        select_seconds: 0.0,
        calls: 0,
        dense_calls: 0,
        nan_lists: 0,
    };
    let parts = match chunk {
        Some(chunk) => selector.prefill_in_chunks(&call, chunk)?,
        None => vec![selector.prefill(&call)?],
    };
    let (mut causal_pairs, mut first) = (0.0, 0);
    for part in parts {
        let shares = density(&part.mask);
        let pairs = part.mask.shape.causal_pairs() as f64;
        causal_pairs += pairs;
        done.density += (shares.token + shares.probes) * pairs;
        done.tile_density += shares.tile * pairs;
        done.select_seconds += part.mask.stats.select_seconds;
        done.calls += 1;
        done.dense_calls += u64::from(part.mask.stats.dense_call);
        done.nan_lists += part.mask.stats.nan_lists as u64;
        done.o.extend(part.output.o);
        let rows = part.mask.shape.num_queries;
        for (head, lse) in part.output.lse.chunks(rows.max(1)).enumerate() {
            done.lse[head * tokens + first..][..rows].copy_from_slice(lse);
        }
        first += rows;
    }
    done.density /= causal_pairs;
    done.tile_density /= causal_pairs;
    Ok(done)
}

/// A document in one layer as one call.
pub(crate) fn call(operands: HostOperands<'_>) -> Result<Call<'_>, EvalError> {
    let shape = CallShape {
        num_queries: operands.num_tokens,
        num_keys: operands.num_tokens,
        num_heads: operands.num_heads,
        num_kv_heads: operands.num_kv_heads,
        head_dim: operands.head_dim,
    };
    let call = Call::new(shape, operands.q, operands.k, operands.v)?;
    Ok(call.in_layer(operands.layer, operands.num_layers))
}
