//! Prompts whole, or in pieces that each see all keys before them; on the host, or with the attention on the device.
use crate::EvalError;
use burn::tensor::Tensor;
use sieve_nn::{HostOperands, LayerOperands};
use sieve_ops::{SieveBackend, sparse_attention};
use sieve_select::{Call, CallShape, Selector, SparseMask, density};

/// A layer's attention of one document under a prefill selector, over all its calls.
pub(crate) struct Prefilled {
    /// `[num_tokens, num_heads, head_dim]`.
    pub(crate) o: Vec<f32>,
    /// Of the kept pairs, `[num_heads, num_tokens]`.
    pub(crate) lse: Vec<f32>,
    pub(crate) cost: Cost,
}

/// What the calls of one document in one layer kept and took.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cost {
    /// Computed pairs over causal pairs, probe rows included.
    pub(crate) density: f64,
    /// Kept tiles over admissible tiles; of several calls the mean by causal pairs.
    pub(crate) tile_density: f64,
    /// Seconds until the masks were ready.
    pub(crate) select_seconds: f64,
    pub(crate) calls: u64,
    pub(crate) dense_calls: u64,
    pub(crate) nan_lists: u64,
    causal_pairs: f64,
}

impl Cost {
    fn add(&mut self, mask: &SparseMask) {
        let shares = density(mask);
        let pairs = mask.shape.causal_pairs() as f64;
        let share = pairs / (self.causal_pairs + pairs);
        self.causal_pairs += pairs;
        self.density += (shares.token + shares.probes - self.density) * share;
        self.tile_density += (shares.tile - self.tile_density) * share;
        self.select_seconds += mask.stats.select_seconds;
        self.calls += 1;
        self.dense_calls += u64::from(mask.stats.dense_call);
        self.nan_lists += mask.stats.nan_lists as u64;
    }
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
        cost: Cost::default(),
    };
    let parts = match chunk {
        Some(chunk) => selector.prefill_in_chunks(&call, chunk)?,
        None => vec![selector.prefill(&call)?],
    };
    let mut first = 0;
    for part in parts {
        done.cost.add(&part.mask);
        done.o.extend(part.output.o);
        let rows = part.mask.shape.num_queries;
        for (head, lse) in part.output.lse.chunks(rows.max(1)).enumerate() {
            done.lse[head * tokens + first..][..rows].copy_from_slice(lse);
        }
        first += rows;
    }
    Ok(done)
}

/// The same with the attention on the device, for a selector that reads no values: `[1, num_tokens, num_heads, head_dim]`.
/// Queries and keys go to the host, the masks come back.
pub(crate) fn prefill_on_device<B: SieveBackend>(
    selector: &Selector,
    operands: &LayerOperands<B>,
    chunk: Option<usize>,
) -> Result<(Tensor<B, 4>, Cost), EvalError> {
    let [_, tokens, _, head_dim] = operands.qkv.dims();
    let shape = CallShape {
        num_queries: tokens,
        num_keys: tokens,
        num_heads: operands.num_heads,
        num_kv_heads: operands.num_kv_heads,
        head_dim,
    };
    let (q, k) = (operands.queries(), operands.keys());
    let call = Call::without_values(shape, &q, &k)?;
    let call = call.in_layer(operands.layer, operands.num_layers);
    let (mut cost, mut parts) = (Cost::default(), Vec::new());
    for first in (0..tokens).step_by(chunk.unwrap_or(tokens).max(1)) {
        let end = chunk.map_or(tokens, |chunk| (first + chunk).min(tokens));
        let mut mask = selector.select(&call.chunk(first..end))?;
        mask.stats.dense_call |= mask.keeps_everything();
        cost.add(&mask);
        let keys = operands.qkv.clone().narrow(1, 0, end);
        let o = sparse_attention(keys, &mask.packed()?, f64::from(shape.softmax_scale()));
        parts.push(o.map_err(|reason| EvalError::Kernel {
            selector: selector.name(),
            reason,
        })?);
    }
    let o = match parts.len() {
        1 => parts.remove(0),
        _ => Tensor::cat(parts, 1),
    };
    Ok((o, cost))
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
