//! The CPU path: Burn's `Flex` tensors handed to the slice kernels of `sieve-cpu`.
//!
//! f32 takes the fast path; any other dtype (f64 in gradient checks) takes the reference.
pub(crate) mod attention;
mod qk_norm_rope;

use crate::device::paths::{self, Memory, Place, scores};
use crate::{
    AdamWStep, AdamWTensors, AttentionOutput, AttentionSpec, DmaSelection, DocumentBounds,
    RopeTables, SieveBackend, reference,
};
use attention::{
    attention_backward, attention_forward, attention_shape, contiguous_bounds, documents, window,
};
use burn::tensor::{DType, Shape, TensorData, TensorMetadata};
use burn_flex::{Flex, FlexTensor};
use qk_norm_rope::QkNormRope;
use sieve_core::ScoreMatrix;

/// A contiguous tensor starting at the beginning of its storage.
pub(crate) fn contiguous(x: FlexTensor) -> FlexTensor {
    x.to_contiguous()
}

pub(crate) fn is_f32(x: &FlexTensor) -> bool {
    x.dtype() == DType::F32
}

const NOT_F32: &str = "the kernels of the CPU take f32";

/// The counted reference of an op on a dtype without kernels.
pub(crate) fn plain<T>(op: &'static str, run: impl FnOnce() -> T) -> T {
    paths::reference((Place::Cpu, op), NOT_F32, Memory::Linear, run)
}

/// As [`plain`] for an op whose reference holds `scores`.
pub(crate) fn plain_scores<T>(op: &'static str, scores: ScoreMatrix, run: impl FnOnce() -> T) -> T {
    paths::reference((Place::Cpu, op), NOT_F32, Memory::Quadratic(scores), run)
}

pub(crate) fn floats(x: &FlexTensor) -> &[f32] {
    x.storage::<f32>()
}

pub(crate) fn ints(x: &FlexTensor) -> &[i32] {
    x.storage::<i32>()
}

pub(crate) fn from_vec(values: Vec<f32>, shape: impl Into<Shape>) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(values, shape.into()))
}

pub(crate) fn zeros_like(x: &FlexTensor) -> Vec<f32> {
    vec![0.0; x.shape().num_elements()]
}

/// Rows and width of a tensor whose leading dimensions are folded.
fn last_dim(x: &FlexTensor) -> usize {
    let shape = x.shape();
    shape[shape.num_dims() - 1]
}

/// Rows below which the product library takes other code, with another order of its sums.
const MIN_PRODUCT_ROWS: usize = 8;

/// `x` with rows of zeros up to [`MIN_PRODUCT_ROWS`], and how many rows it had.
fn padded_rows(x: FlexTensor, d_in: usize) -> (FlexTensor, usize) {
    let x = contiguous(x);
    let rows = x.shape().num_elements() / d_in;
    let mut values = floats(&x).to_vec();
    values.resize(MIN_PRODUCT_ROWS * d_in, 0.0);
    (from_vec(values, [MIN_PRODUCT_ROWS, d_in]), rows)
}

impl SieveBackend for Flex {
    /// A row's result must not depend on how many rows there are: when a prompt and a single decoded token round
    /// differently, equal tokens get unequal scores, and DMA's ties fall otherwise than in the full pass.
    fn linear_nt(x: FlexTensor, weight: FlexTensor) -> FlexTensor {
        let mut shape = x.shape().to_vec();
        let d_in = last_dim(&x);
        let few_rows = x.shape().num_elements() < MIN_PRODUCT_ROWS * d_in;
        if !is_f32(&x) {
            return plain("linear", || reference::linear::<Self>(x, weight));
        }
        if !few_rows || d_in == 0 {
            return reference::linear::<Self>(x, weight);
        }
        let (padded, rows) = padded_rows(x, d_in);
        let y = contiguous(reference::linear::<Self>(padded, weight));
        let d_out = last_dim(&y);
        let last = shape.len() - 1;
        shape[last] = d_out;
        from_vec(floats(&y)[..rows * d_out].to_vec(), shape)
    }

    fn embedding_rows(weight: FlexTensor, ids: FlexTensor) -> FlexTensor {
        if !is_f32(&weight) {
            return plain("embedding", || reference::embedding::<Self>(weight, ids));
        }
        let (weight, ids) = (contiguous(weight), contiguous(ids));
        let d_model = last_dim(&weight);
        let shape = ids.shape();
        let mut y = vec![0.0; shape.num_elements() * d_model];
        sieve_cpu::embedding_forward(ints(&ids), floats(&weight), d_model, &mut y);
        from_vec(y, [shape[0], shape[1], d_model])
    }

    fn embedding_rows_backward(dy: FlexTensor, ids: FlexTensor, vocab_size: usize) -> FlexTensor {
        if !is_f32(&dy) {
            return plain("embedding_backward", || {
                reference::embedding_backward::<Self>(dy, ids, vocab_size)
            });
        }
        let (dy, ids) = (contiguous(dy), contiguous(ids));
        let d_model = last_dim(&dy);
        let mut dweight = vec![0.0; vocab_size * d_model];
        sieve_cpu::embedding_backward(floats(&dy), ints(&ids), d_model, &mut dweight);
        from_vec(dweight, [vocab_size, d_model])
    }

    fn rms_norm(x: FlexTensor, weight: FlexTensor, epsilon: f64) -> FlexTensor {
        if !is_f32(&x) {
            return plain("rms_norm", || {
                reference::rms_norm::<Self>(x, weight, epsilon)
            });
        }
        let (x, weight) = (contiguous(x), contiguous(weight));
        let mut y = zeros_like(&x);
        sieve_cpu::rms_norm_forward(floats(&x), floats(&weight), epsilon as f32, &mut y);
        from_vec(y, x.shape())
    }

    fn rms_norm_backward(
        x: FlexTensor,
        weight: FlexTensor,
        epsilon: f64,
        dy: FlexTensor,
    ) -> (FlexTensor, FlexTensor) {
        if !is_f32(&x) {
            return plain("rms_norm_backward", || {
                reference::rms_norm_backward::<Self>(x, weight, epsilon, dy)
            });
        }
        let [x, weight, dy] = [x, weight, dy].map(contiguous);
        let (mut dx, mut dweight) = (zeros_like(&x), zeros_like(&weight));
        sieve_cpu::rms_norm_backward(
            floats(&x),
            floats(&weight),
            epsilon as f32,
            floats(&dy),
            &mut dx,
            &mut dweight,
        );
        (from_vec(dx, x.shape()), from_vec(dweight, weight.shape()))
    }

    fn qk_norm_rope(
        qkv: FlexTensor,
        q_weight: FlexTensor,
        k_weight: FlexTensor,
        positions: FlexTensor,
        rope: &RopeTables<Self>,
        num_kv_heads: usize,
        epsilon: f64,
    ) -> FlexTensor {
        if !is_f32(&qkv) {
            let args = reference::QkNormRope {
                q_weight,
                k_weight,
                positions,
                num_kv_heads,
                epsilon,
            };
            return plain("qk_norm_rope", || {
                reference::qk_norm_rope::<Self>(qkv, args, rope)
            });
        }
        let qkv = contiguous(qkv);
        let args = QkNormRope::new([q_weight, k_weight, positions], rope, num_kv_heads, epsilon);
        let mut y = zeros_like(&qkv);
        let op = args.op(&qkv);
        sieve_cpu::qk_norm_rope_forward(&op, floats(&qkv), args.documents(), &mut y);
        from_vec(y, qkv.shape())
    }

    fn qk_norm_rope_backward(
        qkv: FlexTensor,
        q_weight: FlexTensor,
        k_weight: FlexTensor,
        positions: FlexTensor,
        rope: &RopeTables<Self>,
        num_kv_heads: usize,
        epsilon: f64,
        dy: FlexTensor,
    ) -> (FlexTensor, FlexTensor, FlexTensor) {
        if !is_f32(&qkv) {
            let args = reference::QkNormRope {
                q_weight,
                k_weight,
                positions,
                num_kv_heads,
                epsilon,
            };
            return plain("qk_norm_rope_backward", || {
                reference::qk_norm_rope_backward::<Self>(qkv, args, rope, dy)
            });
        }
        let (qkv, dy) = (contiguous(qkv), contiguous(dy));
        let args = QkNormRope::new([q_weight, k_weight, positions], rope, num_kv_heads, epsilon);
        let mut dqkv = zeros_like(&qkv);
        let (mut dq, mut dk) = (zeros_like(&args.q_weight), zeros_like(&args.k_weight));
        sieve_cpu::qk_norm_rope_backward(
            &args.op(&qkv),
            floats(&qkv),
            args.documents(),
            floats(&dy),
            &mut dqkv,
            &mut dq,
            &mut dk,
        );
        let weight_shape = args.q_weight.shape();
        (
            from_vec(dqkv, qkv.shape()),
            from_vec(dq, weight_shape.clone()),
            from_vec(dk, weight_shape),
        )
    }

    fn swiglu(gate_up: FlexTensor) -> FlexTensor {
        if !is_f32(&gate_up) {
            return plain("swiglu", || reference::swiglu::<Self>(gate_up));
        }
        let gate_up = contiguous(gate_up);
        let mut shape = gate_up.shape().to_vec();
        let d_ff = last_dim(&gate_up) / 2;
        let last = shape.len() - 1;
        shape[last] = d_ff;
        let mut y = vec![0.0; shape.iter().product()];
        sieve_cpu::swiglu_forward(floats(&gate_up), d_ff, &mut y);
        from_vec(y, shape)
    }

    fn swiglu_backward(gate_up: FlexTensor, dy: FlexTensor) -> FlexTensor {
        if !is_f32(&gate_up) {
            return plain("swiglu_backward", || {
                reference::swiglu_backward::<Self>(gate_up, dy)
            });
        }
        let (gate_up, dy) = (contiguous(gate_up), contiguous(dy));
        let mut d_gate_up = zeros_like(&gate_up);
        let d_ff = last_dim(&gate_up) / 2;
        sieve_cpu::swiglu_backward(floats(&gate_up), d_ff, floats(&dy), &mut d_gate_up);
        from_vec(d_gate_up, gate_up.shape())
    }

    fn packed_attention(
        qkv: FlexTensor,
        bounds: &DocumentBounds<Self>,
        spec: AttentionSpec,
    ) -> AttentionOutput<Self> {
        if !is_f32(&qkv) {
            return plain_scores("attention", scores(&qkv, spec.num_heads), || {
                reference::attention::<Self>(qkv, bounds, spec)
            });
        }
        attention_forward(
            &contiguous(qkv),
            &contiguous_bounds(bounds),
            window(spec),
            spec,
        )
    }

    fn packed_attention_backward(
        qkv: FlexTensor,
        bounds: &DocumentBounds<Self>,
        spec: AttentionSpec,
        output: AttentionOutput<Self>,
        d_o: FlexTensor,
    ) -> FlexTensor {
        if !is_f32(&qkv) {
            return plain_scores("attention_backward", scores(&qkv, spec.num_heads), || {
                reference::attention_backward::<Self>(qkv, bounds, spec, output, d_o)
            });
        }
        let (qkv, bounds) = (contiguous(qkv), contiguous_bounds(bounds));
        let operands = [output.o, output.lse, d_o];
        attention_backward(&qkv, &bounds, window(spec), spec, operands, None)
    }

    fn dma_scores(
        qkv: FlexTensor,
        w_dt: FlexTensor,
        a: FlexTensor,
        spec: AttentionSpec,
    ) -> FlexTensor {
        if !is_f32(&qkv) {
            return plain("dma_scores", || {
                reference::dma_scores::<Self>(qkv, w_dt, a, spec)
            });
        }
        // The kernel reads W_dt by KV head; a layer stores it so, and hands over a transposed view.
        let [qkv, w, a] = [qkv, w_dt.transpose(0, 1), a].map(contiguous);
        let shape = attention_shape(&qkv, spec);
        let mut z = vec![0.0; shape.batch * shape.num_kv_heads * shape.seq_len];
        sieve_cpu::dma_scores_forward(shape, floats(&qkv), floats(&w), floats(&a), &mut z);
        from_vec(z, [shape.batch, shape.num_kv_heads, shape.seq_len])
    }

    fn dma_scores_backward(
        qkv: FlexTensor,
        w_dt: FlexTensor,
        a: FlexTensor,
        spec: AttentionSpec,
        dz: FlexTensor,
        dqkv: FlexTensor,
    ) -> (FlexTensor, FlexTensor, FlexTensor) {
        if !is_f32(&qkv) {
            return plain("dma_scores_backward", || {
                reference::dma_scores_backward::<Self>(qkv, w_dt, a, spec, dz, dqkv)
            });
        }
        let [qkv, w, a] = [qkv, w_dt.transpose(0, 1), a].map(contiguous);
        let [dz, mut dqkv] = [dz, dqkv].map(contiguous);
        let (mut dw, mut da) = (zeros_like(&w), zeros_like(&a));
        sieve_cpu::dma_scores_backward(
            attention_shape(&qkv, spec),
            floats(&qkv),
            floats(&w),
            floats(&a),
            floats(&dz),
            dqkv.storage_mut(),
            &mut dw,
            &mut da,
        );
        let dw = from_vec(dw, w.shape()).transpose(0, 1);
        (dqkv, dw, from_vec(da, a.shape()))
    }

    fn dma_select(
        z: FlexTensor,
        bounds: &DocumentBounds<Self>,
        keep_window_size: usize,
    ) -> DmaSelection<Self> {
        if !is_f32(&z) {
            return plain("dma_select", || {
                reference::dma_select::<Self>(z, bounds, keep_window_size)
            });
        }
        let (z, bounds) = (contiguous(z), contiguous_bounds(bounds));
        let shape = z.shape();
        let mut expire = vec![0i32; shape.num_elements()];
        sieve_cpu::dma_expire(
            floats(&z),
            documents(&bounds),
            shape[0],
            shape[1],
            shape[2],
            keep_window_size,
            &mut expire,
        );
        let expire = FlexTensor::from_data(TensorData::new(expire, shape));
        DmaSelection {
            expire,
            lists: Vec::new(),
        }
    }

    fn dma_attention(
        qkv: FlexTensor,
        delta: FlexTensor,
        bounds: &DocumentBounds<Self>,
        selection: &DmaSelection<Self>,
        spec: AttentionSpec,
    ) -> AttentionOutput<Self> {
        if !is_f32(&qkv) {
            return plain_scores("dma_attention", scores(&qkv, spec.num_heads), || {
                reference::dma_attention::<Self>(qkv, delta, bounds, selection, spec)
            });
        }
        let [qkv, delta, expire] = [qkv, delta, selection.expire.clone()].map(contiguous);
        let mask = sieve_cpu::Mask::Expire {
            expire: ints(&expire),
            delta: floats(&delta),
        };
        attention_forward(&qkv, &contiguous_bounds(bounds), mask, spec)
    }

    fn dma_attention_backward(
        qkv: FlexTensor,
        delta: FlexTensor,
        bounds: &DocumentBounds<Self>,
        selection: &DmaSelection<Self>,
        spec: AttentionSpec,
        output: AttentionOutput<Self>,
        d_o: FlexTensor,
    ) -> (FlexTensor, FlexTensor) {
        if !is_f32(&qkv) {
            return plain_scores(
                "dma_attention_backward",
                scores(&qkv, spec.num_heads),
                || {
                    reference::dma_attention_backward::<Self>(
                        qkv, delta, bounds, selection, spec, output, d_o,
                    )
                },
            );
        }
        let [qkv, delta, expire] = [qkv, delta, selection.expire.clone()].map(contiguous);
        let mask = sieve_cpu::Mask::Expire {
            expire: ints(&expire),
            delta: floats(&delta),
        };
        let mut d_delta = zeros_like(&delta);
        let operands = [output.o, output.lse, d_o];
        let bounds = contiguous_bounds(bounds);
        let dqkv = attention_backward(&qkv, &bounds, mask, spec, operands, Some(&mut d_delta));
        (dqkv, from_vec(d_delta, delta.shape()))
    }

    fn decode_attention(
        q: FlexTensor,
        k: FlexTensor,
        v: FlexTensor,
        delta: Option<FlexTensor>,
        softmax_scale: f64,
    ) -> FlexTensor {
        if !is_f32(&q) {
            return plain("decode_attention", || {
                reference::decode_attention::<Self>(q, k, v, delta, softmax_scale)
            });
        }
        let [q, k, v] = [q, k, v].map(contiguous);
        let delta = delta.map(contiguous);
        let (q_shape, k_shape) = (q.shape(), k.shape());
        let kv_len = vec![k_shape[1]; k_shape[0]];
        let shape = sieve_cpu::DecodeShape {
            num_heads: q_shape[1],
            num_kv_heads: k_shape[2],
            head_dim: k_shape[3],
            capacity: k_shape[1],
            slot_stride: k_shape[2] * k_shape[3],
            kv_len: &kv_len,
            softmax_scale: softmax_scale as f32,
        };
        let mut o = zeros_like(&q);
        let delta = delta.as_ref().map(floats);
        sieve_cpu::decode_attention(&shape, floats(&q), floats(&k), floats(&v), delta, &mut o);
        from_vec(o, q_shape)
    }

    fn token_losses(h: FlexTensor, weight: FlexTensor, labels: FlexTensor) -> FlexTensor {
        if !is_f32(&h) {
            return plain("token_losses", || {
                reference::token_losses::<Self>(h, weight, labels)
            });
        }
        let [h, weight, labels] = [h, weight, labels].map(contiguous);
        let mut losses = vec![0.0; labels.shape().num_elements()];
        let d_model = last_dim(&h);
        sieve_cpu::linear_cross_entropy_per_row(
            floats(&h),
            floats(&weight),
            ints(&labels),
            d_model,
            &mut losses,
        );
        let count = losses.len();
        from_vec(losses, [count])
    }

    fn linear_cross_entropy(
        h: FlexTensor,
        weight: FlexTensor,
        labels: FlexTensor,
        z_loss: f64,
    ) -> FlexTensor {
        if !is_f32(&h) {
            return plain("linear_cross_entropy", || {
                reference::linear_cross_entropy::<Self>(h, weight, labels, z_loss)
            });
        }
        let [h, weight, labels] = [h, weight, labels].map(contiguous);
        let d_model = last_dim(&h);
        let loss = sieve_cpu::linear_cross_entropy(
            floats(&h),
            floats(&weight),
            ints(&labels),
            d_model,
            z_loss as f32,
        );
        from_vec(vec![(loss.loss_sum + loss.z_loss_sum) as f32], [1])
    }

    fn linear_cross_entropy_with_gradients(
        h: FlexTensor,
        weight: FlexTensor,
        labels: FlexTensor,
        z_loss: f64,
    ) -> (FlexTensor, FlexTensor, FlexTensor) {
        if !is_f32(&h) {
            return plain("linear_cross_entropy_with_gradients", || {
                reference::linear_cross_entropy_with_gradients::<Self>(h, weight, labels, z_loss)
            });
        }
        let [h, weight, labels] = [h, weight, labels].map(contiguous);
        let d_model = last_dim(&h);
        let (mut dh, mut dweight) = (zeros_like(&h), zeros_like(&weight));
        let loss = sieve_cpu::linear_cross_entropy_with_grad(
            floats(&h),
            floats(&weight),
            ints(&labels),
            d_model,
            z_loss as f32,
            &mut dh,
            &mut dweight,
        );
        (
            from_vec(vec![(loss.loss_sum + loss.z_loss_sum) as f32], [1]),
            from_vec(dh, h.shape()),
            from_vec(dweight, weight.shape()),
        )
    }

    fn scaled(x: FlexTensor, factor: FlexTensor) -> FlexTensor {
        if !is_f32(&x) || !is_f32(&factor) {
            return plain("scaled", || reference::scaled::<Self>(x, factor));
        }
        let factor = floats(&contiguous(factor))[0];
        let mut x = contiguous(x);
        if factor != 1.0 {
            x.storage_mut::<f32>().iter_mut().for_each(|x| *x *= factor);
        }
        x
    }

    fn sum_of_squares(x: FlexTensor) -> FlexTensor {
        if !is_f32(&x) {
            return plain("sum_of_squares", || reference::sum_of_squares::<Self>(x));
        }
        let x = contiguous(x);
        from_vec(vec![sieve_cpu::sum_of_squares(floats(&x)) as f32], [1])
    }

    fn adamw_step(
        tensors: AdamWTensors<Self>,
        grad: FlexTensor,
        grad_scale: FlexTensor,
        step: AdamWStep,
    ) -> AdamWTensors<Self> {
        if !is_f32(&tensors.param) || tensors.leaf.is_some() {
            return plain("adamw_step", || {
                reference::adamw_step::<Self>(tensors, grad, grad_scale, step)
            });
        }
        let grad = contiguous(grad);
        let grad_scale = floats(&contiguous(grad_scale))[0];
        if grad_scale == 0.0 || !grad_scale.is_finite() {
            return tensors;
        }
        let AdamWTensors {
            param,
            exp_avg,
            exp_avg_sq,
            ..
        } = tensors;
        let [mut param, mut exp_avg, mut exp_avg_sq] = [param, exp_avg, exp_avg_sq].map(contiguous);
        let step = sieve_cpu::AdamWStep {
            lr: step.lr,
            beta1: step.beta1,
            beta2: step.beta2,
            eps: step.eps,
            weight_decay: step.weight_decay,
            bias_correction1: step.bias_correction1,
            bias_correction2: step.bias_correction2,
            grad_scale,
        };
        // In place where nobody else holds the tensor; `storage_mut` copies where somebody does.
        sieve_cpu::adamw_step(
            param.storage_mut::<f32>(),
            floats(&grad),
            exp_avg.storage_mut::<f32>(),
            exp_avg_sq.storage_mut::<f32>(),
            &step,
        );
        AdamWTensors {
            param,
            leaf: None,
            exp_avg,
            exp_avg_sq,
        }
    }
}
