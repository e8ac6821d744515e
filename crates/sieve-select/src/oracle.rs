//! The definition that tests compare with: dense attention under the expanded mask, row by row in f64.

use crate::attention::{AttentionOutput, probe_window};
use crate::call::Call;
use crate::mask::{Correction, CorrectionMode, Selected, kept_keys};
use sieve_core::KeyMask;
use sieve_cpu::reference::{Attended, Key, Rounding, attend};

/// Which keys (by original position) a row of the call sees: `[num_keys]`.
pub fn expanded_row(mask: &KeyMask, head: usize, row: usize) -> Vec<bool> {
    let (num_keys, position) = (mask.shape.num_keys, mask.shape.context() + row);
    if mask.is_dense_row(row) {
        return (0..num_keys).map(|j| !mask.causal || j <= position).collect();
    }
    let list = mask.list_of(head);
    // The slot that holds the row; only permuted queries move.
    let slot = (0..mask.shape.num_queries).find(|&slot| mask.query_row(head, slot) == row).unwrap_or(row);
    let i = mask.tiles.tile_of_row(slot);
    let mut shown = vec![false; num_keys];
    for key in kept_keys(mask, list, i) {
        shown[key] = mask.visible(list, position, key);
    }
    shown
}

/// Attention of one row over the keys with a true `shown`: the output `[head_dim]` and the log-sum-exp.
pub fn oracle_row(call: &Call<'_>, head: usize, row: usize, shown: &[bool]) -> (Vec<f64>, f64) {
    rounded_row(call, head, row, shown, Rounding::None)
}

/// [`oracle_row`] with its intermediate results rounded.
pub fn rounded_row(call: &Call<'_>, head: usize, row: usize, shown: &[bool], rounding: Rounding) -> (Vec<f64>, f64) {
    let (kv_head, d) = (call.kv_head(head), call.shape.head_dim);
    let scale = 1.0 / (d as f64).sqrt();
    let q = call.query(head, row);
    let keys: Vec<Key<'_, f32>> = (0..call.shape.num_keys)
        .filter(|&j| shown[j])
        .map(|j| Key { k: call.key(kv_head, j), v: call.value(kv_head, j), bias: 0.0 })
        .collect();
    let mut o = vec![0.0; d];
    let Attended { lse, .. } = attend(q, &keys, scale, rounding, &mut o);
    (o, lse)
}

/// Attention under a selection, with its dense rows and its correction.
pub fn oracle_attention(call: &Call<'_>, selected: &Selected) -> AttentionOutput<f64> {
    let (shape, mask) = (call.shape, &selected.mask);
    let d = shape.head_dim;
    let mut output = AttentionOutput {
        o: vec![0.0; call.q.len()],
        lse: vec![f64::NEG_INFINITY; shape.num_heads * shape.num_queries],
    };
    for head in 0..shape.num_heads {
        for row in 0..shape.num_queries {
            let (o, lse) = oracle_row(call, head, row, &expanded_row(mask, head, row));
            let at = call.query_at(head, row);
            output.o[at..at + d].copy_from_slice(&o);
            output.lse[head * shape.num_queries + row] = lse;
        }
    }
    let Some(correction) = selected.correction.as_ref().filter(|c| c.mode != CorrectionMode::SparseOnly) else {
        return output;
    };
    correct(call, mask, correction, &mut output.o);
    output
}

/// Gives probes their dense outputs, and with [`CorrectionMode::Correct`] adds to the other rows of a probe's window
/// how far the probe's dense output is from its sparse one. Rows that are dense already stay.
fn correct(call: &Call<'_>, mask: &KeyMask, correction: &Correction, o: &mut [f64]) {
    let (shape, d) = (call.shape, call.shape.head_dim);
    let sparse = o.to_vec();
    for index in 0..correction.probe_rows.len() {
        let window = probe_window(correction, index, shape.num_queries);
        let probe = window.start;
        let position = shape.context() + probe;
        let causal: Vec<bool> = (0..shape.num_keys).map(|key| key <= position).collect();
        for head in 0..shape.num_heads {
            // Computed here again, to check `probe_o` too.
            let (dense, _) = oracle_row(call, head, probe, &causal);
            let at_probe = call.query_at(head, probe);
            for row in window.clone() {
                let at = call.query_at(head, row);
                let is_corrected =
                    correction.mode == CorrectionMode::Correct && !mask.is_dense_row(row) && !mask.is_dense_row(probe);
                for c in 0..d {
                    if row == probe {
                        o[at + c] = dense[c];
                    } else if is_corrected {
                        o[at + c] = sparse[at + c] + dense[c] - sparse[at_probe + c];
                    }
                }
            }
        }
    }
}

/// Dense causal attention in f64.
pub fn oracle_dense(call: &Call<'_>) -> AttentionOutput<f64> {
    oracle_attention(call, &Selected::dense(call.shape))
}
