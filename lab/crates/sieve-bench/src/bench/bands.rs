//! Times of attention over a window, first keys and bands beside dense attention.
use super::rows::{BACKWARD, HEADS, ORDERS, dense, passes};
use crate::error::Result;
use crate::timed::{Bench, NO_WINDOW};
use sieve_core::{CowaShape, FarKeys};
use sieve_kernels::AttentionShape;

/// Times both passes of dense attention, then of bands that reach over the whole row, as arXiv:2609.32704 times its
/// kernels, and of bands to a distance of 8128, at which a row's length no longer counts.
pub(super) fn rows(bench: &mut Bench<'_>) -> Result<()> {
    for shape in bench.settings.shapes(&[HEADS], &[32768, 131072], 128) {
        dense(bench, shape, NO_WINDOW)?;
        for far_reach in [shape.seq_len - SINKS, NEAR_REACH] {
            bands(bench, shape, far_reach)?;
        }
    }
    Ok(())
}

const SINKS: usize = 64;
const NEAR_REACH: usize = 8128;

/// Times both passes; a row's name has the share of the causal pairs that are seen.
fn bands(bench: &mut Bench<'_>, shape: AttentionShape, far_reach: usize) -> Result<()> {
    let sizes = CowaShape { sink_tokens: SINKS, near_window: 1024, far_reach, num_bands: shape.num_kv_heads };
    let (far, seq_len): (FarKeys, _) = (sizes.far_keys(), shape.seq_len);
    let Some(inputs) = bench.inputs_or_skip(shape)? else {
        return Ok(());
    };
    let pairs = sieve_core::kinds::Kind::pairs(&sizes, seq_len);
    let share = pairs / (seq_len as f64 * (seq_len + 1) as f64 / 2.0);
    let flops = 2.0 * (shape.head_dim + shape.head_dim_v) as f64 * (shape.num_heads * shape.batch) as f64 * pairs;
    let name = format!("bands to {far_reach}, {:.1} % of the pairs, ", 100.0 * share);
    passes(
        bench,
        (&name, shape),
        [flops, BACKWARD * flops],
        &ORDERS,
        || inputs.far_forward(sizes.near_window, far),
        |result, order| inputs.far_backward(result, sizes.near_window, far, order),
    )
}
