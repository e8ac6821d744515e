//! Launches of a training step except attention: embedding, norms, rotary position embedding, SwiGLU, loss, optimizer,
//! and sums over tensors. Each has a line here for its file, one for its public names, and a call on a recording GPU,
//! which finds the specialisations to ship.
pub(crate) mod adamw;
pub(crate) mod column_sums;
pub(crate) mod cross_entropy;
pub(crate) mod draw;
pub(crate) mod embedding_backward;
pub(crate) mod embedding_forward;
pub(crate) mod fill_zero;
pub(crate) mod fp8_quantise;
pub(crate) mod likeliest;
pub(crate) mod linear_in_order;
pub(crate) mod matrix_vector;
pub(crate) mod qk_norm_rope_backward;
pub(crate) mod qk_norm_rope_forward;
pub(crate) mod residual_add;
pub(crate) mod rms_norm_backward;
pub(crate) mod rms_norm_forward;
pub(crate) mod rows;
pub(crate) mod scale;
pub(crate) mod split_master;
pub(crate) mod sum_of_squares;
pub(crate) mod swiglu_backward;
pub(crate) mod swiglu_forward;

pub use adamw::AdamwTensors;
pub use cross_entropy::{LogitRows, cross_entropy, cross_entropy_with_gradients, padded_width};
pub use draw::draw;
pub use embedding_backward::embedding_backward;
pub use embedding_forward::embedding_forward;
pub use fill_zero::fill_zero;
pub use fp8_quantise::{Fp8Matrix, Fp8Pair, fp8_quantise, require_fp8};
pub use likeliest::likeliest;
pub use linear_in_order::linear_in_order;
pub use matrix_vector::{Epilogue, MAX_VECTORS, Vectors, matrix_vector};
pub use qk_norm_rope_forward::{QkNormRope, Reuse, rope};
pub use residual_add::residual_add;
pub use rms_norm_backward::{rms_norm_backward, rms_norm_backward_with_output};
pub use rms_norm_forward::rms_norm_forward;
pub use rows::Rows;
pub use scale::scale;
pub use sieve_core::Fp8Format;
pub use split_master::{join_master, split_master};
pub use sum_of_squares::{FixedSum, Term};
pub use swiglu_backward::{swiglu_backward, swiglu_backward_with_amax, swiglu_backward_with_output};
pub use swiglu_forward::{swiglu_forward, swiglu_forward_with_amax};

pub(crate) use column_sums::column_sums;
pub(crate) use fill_zero::empty_zero;
pub(crate) use fp8_quantise::{AMAX_PARTIALS, with_amax};
pub(crate) use rows::{WORD_ELEMENTS, require_alignment, require_words, vector_width, with_width};

use crate::specialisations::{Calls, EPSILON, ROW};
use sieve_core::{AdamWStep, Draw};

/// Tokens of a vocabulary.
const VOCAB: usize = 1024;

/// The kernels that depend on no width: embedding, loss, optimizer, sums.
pub(crate) fn call_with_any_width(calls: &mut Calls) {
    let width = 1024;
    let (ids, weight, dy) = (calls.i32(&[1, ROW]), calls.bf16(&[VOCAB, width]), calls.bf16(&[1, ROW, width]));
    calls.note(embedding_forward(&weight, &ids));
    calls.note(embedding_backward(&dy, &ids, VOCAB));
    let logits = calls.bf16(&[1, VOCAB]);
    calls.note(likeliest(&logits, VOCAB));
    calls.note(draw(&logits, &calls.i32(&[1, Draw::WORDS]), VOCAB));
    let (labels, losses) = (calls.i32(&[ROW]), calls.f32(&[ROW]));
    let logits = LogitRows::new(&labels, ROW, VOCAB);
    calls.note(cross_entropy(&logits, &labels, &losses));
    calls.note(cross_entropy_with_gradients(&logits, &labels, &losses));
    call_optimizer(calls, &[width]);
    let x = calls.bf16(&[ROW, width]);
    calls.note(residual_add(&x, &x));
    let (master, factor) = (calls.f32(&[width]), calls.f32(&[1]));
    calls.note(scale(&x, &factor));
    calls.note(scale(&master, &factor));
    calls.note(fill_zero(&master));
    calls.note(FixedSum::of(&master, Term::Value));
    let mut norm = FixedSum::new(&master, Term::Square, [width]);
    if calls.note(norm.add(&master)).is_some() {
        calls.note(norm.root());
    }
    if has_fp8(calls) {
        for format in [Fp8Format::E4m3, Fp8Format::E5m2] {
            calls.note(fp8_quantise(&x, format, None));
        }
    }
}

fn has_fp8(calls: &Calls) -> bool {
    require_fp8(calls.hardware().compute_capability).is_ok()
}

/// AdamW on an f32 master weight alone, beside its leaf (the bf16 weight that the model computes with), and split into
/// the leaf and the low bits that the leaf lacks.
fn call_optimizer(calls: &mut Calls, sizes: &[usize]) {
    let (param, leaf, factor) = (calls.f32(sizes), calls.bf16(sizes), calls.f32(&[1]));
    let step = AdamWStep::usual(1e-3, 1);
    for (param, leaf) in [(&param, None), (&param, Some(&leaf)), (&leaf, Some(&leaf))] {
        let moment = &calls.f32(sizes);
        let tensors =
            AdamwTensors { param, exp_avg: moment, exp_avg_sq: moment, grad: moment, grad_scale: &factor, leaf };
        calls.note(tensors.adamw(step));
    }
    if let Some((leaf, rest)) = calls.note(split_master(&param)) {
        calls.note(join_master(&leaf, &rest));
    }
}

/// Norms and the GEMVs of decoding `num_tokens` tokens at once, for a residual stream of `d_model` columns.
pub(crate) fn call_on_residual_stream(calls: &mut Calls, d_model: usize, num_tokens: &[usize]) {
    let (x, weight) = (calls.bf16(&[1, ROW, d_model]), calls.bf16(&[d_model]));
    calls.note(rms_norm_forward(&x, &weight, EPSILON));
    for d_residual in [None, Some(&x)] {
        calls.note(rms_norm_backward(&x, &weight, EPSILON, &x, d_residual));
    }
    calls.note(rms_norm_backward_with_output(&x, &weight, EPSILON, &x, &x));
    for &num_tokens in num_tokens {
        let x = calls.bf16(&[num_tokens, 1, d_model]);
        // The fewer rows a matrix has, the more warps share a row.
        for rows in (8..18).map(|bits| 1 << bits) {
            let w = calls.bf16(&[rows, d_model]);
            let residual = calls.bf16(&[num_tokens, 1, rows]);
            calls.note(matrix_vector(Vectors::Plain(&x), &w, Epilogue::Stored));
            calls.note(matrix_vector(Vectors::Plain(&x), &w, Epilogue::Added(&residual)));
            let normed = Vectors::Normed(&x, &weight, EPSILON);
            calls.note(matrix_vector(normed, &w, Epilogue::Stored));
            calls.note(matrix_vector(normed, &w, Epilogue::SwiGlu));
        }
    }
}

/// The gated activation of `d_ff` columns, and its gradient.
pub(crate) fn call_swiglu(calls: &mut Calls, d_ff: usize) {
    let (gate_up, dy) = (calls.bf16(&[1, ROW, 2 * d_ff]), calls.bf16(&[1, ROW, d_ff]));
    calls.note(swiglu_forward(&gate_up));
    calls.note(swiglu_backward(&gate_up, &dy, Reuse::Copy));
    calls.note(swiglu_backward_with_output(&gate_up, &dy, Reuse::Copy));
}

/// The gated activation and its gradient with the largest magnitudes that fp8 scales need, where the device has fp8.
pub(crate) fn call_swiglu_for_fp8(calls: &mut Calls, d_ff: usize) {
    let (gate_up, dy) = (calls.bf16(&[1, ROW, 2 * d_ff]), calls.bf16(&[1, ROW, d_ff]));
    if has_fp8(calls) {
        calls.note(swiglu_forward_with_amax(&gate_up));
        calls.note(swiglu_backward_with_amax(&gate_up, &dy, Reuse::Copy));
    }
}

/// Norm and rotary position embedding of heads of `head_dim` columns, and its gradients.
pub(crate) fn call_rotation(calls: &mut Calls, head_dim: usize) {
    let (num_heads, num_kv_heads) = (2, 1);
    let qkv = calls.bf16(&[1, ROW, num_heads + 2 * num_kv_heads, head_dim]);
    let (positions, table) = (calls.i32(&[1, ROW]), calls.f32(&[ROW, head_dim / 2]));
    let weight = calls.bf16(&[head_dim]);
    let call = QkNormRope {
        q_weight: &weight,
        k_weight: &weight,
        positions: &positions,
        cos: &table,
        sin: &table,
        num_kv_heads,
        epsilon: EPSILON,
    };
    calls.note(call.qk_norm_rope_forward(&qkv));
    calls.note(rope(&qkv, &positions, [&table; 2], num_kv_heads));
    for reuse in [Reuse::Copy, Reuse::InPlace] {
        calls.note(call.qk_norm_rope_backward(&qkv, &qkv, reuse));
    }
}
