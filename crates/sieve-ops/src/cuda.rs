//! The CUDA path: Burn's CUDA tensors handed to the kernels of `sieve-kernels`.
//!
//! An op whose kernel refuses a call (another dtype, a width it is not compiled for) takes the plain-Burn reference on the
//! GPU; [`op_paths`](crate::op_paths) tells which way every op went and why. Ops without a kernel yet are not overridden.
mod attention;
mod decode;
mod dma;
mod embedding;
mod linear;
mod loss;
mod norm;
mod optimizer;

use crate::decode::{DmaCache, DmaToken, dma_decode_reference};
use crate::device::paths::{kernel_or, kernel_or_scores, scores};
use crate::snapshot::Snapshot;
use crate::{
    AdamWStep, AdamWTensors, AttentionOutput, AttentionSpec, DmaBias, DmaSelection, DocumentBounds,
    RopeTables, SieveBackend, reference,
};
use burn::tensor::ops::FloatTensorOps;
use burn::tensor::{DType, FloatDType};
use sieve_kernels::{CudaPrimitive, CudaTensor, HostCopy, Reuse};

/// Burn's CUDA backend, without fusion.
pub type Cuda = burn_cuda::Cuda<f32, i32>;

impl SieveBackend for Cuda {
    fn linear_nt(x: CudaPrimitive, weight: CudaPrimitive) -> CudaPrimitive {
        kernel_or("linear", linear::forward(&x, &weight), || {
            reference::linear::<Self>(x, weight)
        })
    }

    fn linear_nt_add(
        x: CudaPrimitive,
        weight: CudaPrimitive,
        residual: CudaPrimitive,
    ) -> CudaPrimitive {
        kernel_or(
            "linear_add",
            linear::forward_add(&x, &weight, &residual),
            || Self::float_add(residual, reference::linear::<Self>(x, weight)),
        )
    }

    fn linear_nt_input_gradient(weight: CudaPrimitive, dy: CudaPrimitive) -> CudaPrimitive {
        let attempt = linear::input_gradient(&weight, &dy);
        kernel_or("linear_input_gradient", attempt, || {
            reference::linear_input_gradient::<Self>(weight, dy)
        })
    }

    fn linear_nt_weight_gradient(x: CudaPrimitive, dy: CudaPrimitive) -> CudaPrimitive {
        let attempt = linear::weight_gradient(&x, &dy);
        kernel_or("linear_weight_gradient", attempt, || {
            reference::linear_weight_gradient::<Self>(x, dy)
        })
    }

    fn embedding_rows(weight: CudaPrimitive, ids: CudaPrimitive) -> CudaPrimitive {
        kernel_or("embedding", embedding::forward(&weight, &ids), || {
            reference::embedding::<Self>(weight, ids)
        })
    }

    fn embedding_rows_backward(
        dy: CudaPrimitive,
        ids: CudaPrimitive,
        vocab_size: usize,
    ) -> CudaPrimitive {
        let attempt = embedding::backward(&dy, &ids, vocab_size);
        kernel_or("embedding_backward", attempt, || {
            embedding::reference_backward(dy, ids, vocab_size)
        })
    }

    fn rms_norm(x: CudaPrimitive, weight: CudaPrimitive, epsilon: f64) -> CudaPrimitive {
        kernel_or("rms_norm", norm::rms(&x, &weight, epsilon), || {
            reference::rms_norm::<Self>(x, weight, epsilon)
        })
    }

    fn rms_norm_backward(
        x: CudaPrimitive,
        weight: CudaPrimitive,
        epsilon: f64,
        dy: CudaPrimitive,
    ) -> (CudaPrimitive, CudaPrimitive) {
        let attempt = norm::rms_backward(&x, &weight, epsilon, &dy);
        kernel_or("rms_norm_backward", attempt, || {
            reference::rms_norm_backward::<Self>(x, weight, epsilon, dy)
        })
    }

    fn rms_norm_backward_with_output(
        x: CudaPrimitive,
        weight: CudaPrimitive,
        epsilon: f64,
        dy: CudaPrimitive,
        d_residual: CudaPrimitive,
    ) -> (CudaPrimitive, CudaPrimitive, CudaPrimitive) {
        let attempt = norm::rms_backward_with_output(&x, &weight, epsilon, &dy, &d_residual);
        kernel_or("rms_norm_backward", attempt, || {
            let y = reference::rms_norm::<Self>(x.clone(), weight.clone(), epsilon);
            let (dx, dweight) = reference::rms_norm_backward::<Self>(x, weight, epsilon, dy);
            (Self::float_add(dx, d_residual), dweight, y)
        })
    }

    fn qk_norm_rope(
        qkv: CudaPrimitive,
        q_weight: CudaPrimitive,
        k_weight: CudaPrimitive,
        positions: CudaPrimitive,
        rope: &RopeTables<Self>,
        num_kv_heads: usize,
        epsilon: f64,
    ) -> CudaPrimitive {
        let weights = [&q_weight, &k_weight];
        let rotation = norm::Rotation::new(weights, &positions, rope, num_kv_heads, epsilon);
        kernel_or("qk_norm_rope", rotation.forward(&qkv), || {
            let args = reference::QkNormRope {
                q_weight,
                k_weight,
                positions,
                num_kv_heads,
                epsilon,
            };
            reference::qk_norm_rope::<Self>(qkv, args, rope)
        })
    }

    fn qk_norm_rope_backward(
        qkv: CudaPrimitive,
        q_weight: CudaPrimitive,
        k_weight: CudaPrimitive,
        positions: CudaPrimitive,
        rope: &RopeTables<Self>,
        num_kv_heads: usize,
        epsilon: f64,
        dy: CudaPrimitive,
    ) -> (CudaPrimitive, CudaPrimitive, CudaPrimitive) {
        let weights = [&q_weight, &k_weight];
        let rotation = norm::Rotation::new(weights, &positions, rope, num_kv_heads, epsilon);
        let is_free = dy.can_mut();
        let attempt = rotation.backward(&qkv, &dy, is_free);
        kernel_or("qk_norm_rope_backward", attempt, || {
            let args = reference::QkNormRope {
                q_weight,
                k_weight,
                positions,
                num_kv_heads,
                epsilon,
            };
            reference::qk_norm_rope_backward::<Self>(qkv, args, rope, dy)
        })
    }

    fn swiglu(gate_up: CudaPrimitive) -> CudaPrimitive {
        let attempt = sieve_kernels::swiglu_forward(&CudaTensor::from(gate_up.clone()));
        kernel_or("swiglu", attempt.map(Into::into), || {
            reference::swiglu::<Self>(gate_up)
        })
    }

    fn swiglu_backward(gate_up: CudaPrimitive, dy: CudaPrimitive) -> CudaPrimitive {
        let [x, d] = tensors([&gate_up, &dy]);
        let attempt = sieve_kernels::swiglu_backward(&x, &d);
        kernel_or("swiglu_backward", attempt.map(Into::into), || {
            reference::swiglu_backward::<Self>(gate_up, dy)
        })
    }

    fn swiglu_backward_with_output(
        gate_up: CudaPrimitive,
        dy: CudaPrimitive,
    ) -> (CudaPrimitive, CudaPrimitive) {
        let is_free = gate_up.can_mut() && dy.can_mut();
        let [x, d] = tensors([&gate_up, &dy]);
        let reuse = if is_free && x.is_contiguous() && d.is_contiguous() {
            Reuse::InPlace
        } else {
            Reuse::Copy
        };
        let attempt = sieve_kernels::swiglu_backward_with_output(&x, &d, reuse);
        let attempt = attempt.map(|(dx, y)| (dx.into(), y.into()));
        kernel_or("swiglu_backward", attempt, || {
            let y = reference::swiglu::<Self>(gate_up.clone());
            (reference::swiglu_backward::<Self>(gate_up, dy), y)
        })
    }

    fn packed_attention(
        qkv: CudaPrimitive,
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
    ) -> AttentionOutput<Self> {
        let attempt = attention::forward(&qkv, documents, spec, None);
        kernel_or_scores("attention", attempt, scores(&qkv, spec.num_heads), || {
            reference::attention::<Self>(qkv, documents, spec)
        })
    }

    fn packed_attention_backward(
        qkv: CudaPrimitive,
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        output: AttentionOutput<Self>,
        d_o: CudaPrimitive,
    ) -> CudaPrimitive {
        let attempt = attention::backward(&qkv, documents, spec, None, &output, &d_o);
        let attempt = attempt.map(|(dqkv, _)| dqkv);
        let scores = scores(&qkv, spec.num_heads);
        kernel_or_scores("attention_backward", attempt, scores, || {
            reference::attention_backward::<Self>(qkv, documents, spec, output, d_o)
        })
    }

    fn dma_scores(
        qkv: CudaPrimitive,
        w_dt: CudaPrimitive,
        a: CudaPrimitive,
        spec: AttentionSpec,
    ) -> CudaPrimitive {
        let attempt = dma::scores(&qkv, &w_dt, &a, spec);
        kernel_or("dma_scores", attempt, || {
            reference::dma_scores::<Self>(qkv, w_dt, a, spec)
        })
    }

    fn dma_scores_backward(
        qkv: CudaPrimitive,
        w_dt: CudaPrimitive,
        a: CudaPrimitive,
        spec: AttentionSpec,
        dz: CudaPrimitive,
        dqkv: CudaPrimitive,
    ) -> (CudaPrimitive, CudaPrimitive, CudaPrimitive) {
        // The kernel adds to dqkv in place, so it must be nobody else's.
        let dqkv = if dqkv.can_mut() { dqkv } else { dqkv.copy() };
        let attempt = dma::scores_backward(&qkv, [&w_dt, &a], spec, &dz, &dqkv);
        kernel_or(
            "dma_scores_backward",
            attempt.map(|(dw_dt, da)| (dqkv.clone(), dw_dt, da)),
            || reference::dma_scores_backward::<Self>(qkv, w_dt, a, spec, dz, dqkv),
        )
    }

    fn dma_select(
        z: CudaPrimitive,
        documents: &DocumentBounds<Self>,
        keep_window_size: usize,
    ) -> DmaSelection<Self> {
        let attempt = dma::select(&z, documents, keep_window_size);
        kernel_or("dma_select", attempt, || {
            reference::dma_select::<Self>(z, documents, keep_window_size)
        })
    }

    fn dma_attention(
        qkv: CudaPrimitive,
        delta: CudaPrimitive,
        documents: &DocumentBounds<Self>,
        selection: &DmaSelection<Self>,
        spec: AttentionSpec,
    ) -> AttentionOutput<Self> {
        let attempt = dma::forward(&qkv, &delta, documents, selection, spec);
        kernel_or_scores(
            "dma_attention",
            attempt,
            scores(&qkv, spec.num_heads),
            || reference::dma_attention::<Self>(qkv, delta, documents, selection, spec),
        )
    }

    fn dma_attention_backward(
        qkv: CudaPrimitive,
        delta: CudaPrimitive,
        documents: &DocumentBounds<Self>,
        selection: &DmaSelection<Self>,
        spec: AttentionSpec,
        output: AttentionOutput<Self>,
        d_o: CudaPrimitive,
    ) -> (CudaPrimitive, CudaPrimitive) {
        let attempt = dma::backward(&qkv, &delta, documents, selection, spec, &output, &d_o);
        let scores = scores(&qkv, spec.num_heads);
        kernel_or_scores("dma_attention_backward", attempt, scores, || {
            reference::dma_attention_backward::<Self>(
                qkv, delta, documents, selection, spec, output, d_o,
            )
        })
    }

    fn decode_attention(
        q: CudaPrimitive,
        k: CudaPrimitive,
        v: CudaPrimitive,
        delta: Option<CudaPrimitive>,
        softmax_scale: f64,
    ) -> CudaPrimitive {
        let attempt = decode::attention(&q, &k, &v, delta.as_ref(), softmax_scale);
        kernel_or("decode_attention", attempt, || {
            reference::decode_attention::<Self>(q, k, v, delta, softmax_scale)
        })
    }

    fn dma_decode_step(
        cache: DmaCache<Self>,
        token: DmaToken<Self>,
        softmax_scale: f64,
        bias: DmaBias,
    ) -> (DmaCache<Self>, CudaPrimitive) {
        let attempt = decode::dma_step(&cache, &token, softmax_scale, bias);
        kernel_or("dma_decode", attempt, || {
            dma_decode_reference::<Self>(cache, token, softmax_scale, bias)
        })
    }

    fn token_losses(
        h: CudaPrimitive,
        weight: CudaPrimitive,
        labels: CudaPrimitive,
    ) -> CudaPrimitive {
        let attempt = loss::token_losses(&h, &weight, &labels);
        kernel_or("token_losses", attempt, || {
            reference::token_losses::<Self>(h, weight, labels)
        })
    }

    fn linear_cross_entropy(
        h: CudaPrimitive,
        weight: CudaPrimitive,
        labels: CudaPrimitive,
        z_loss: f64,
    ) -> CudaPrimitive {
        let attempt = loss::summed(&h, &weight, &labels, z_loss);
        kernel_or("linear_cross_entropy", attempt, || {
            reference::linear_cross_entropy::<Self>(h, weight, labels, z_loss)
        })
    }

    fn linear_cross_entropy_with_gradients(
        h: CudaPrimitive,
        weight: CudaPrimitive,
        labels: CudaPrimitive,
        z_loss: f64,
    ) -> (CudaPrimitive, CudaPrimitive, CudaPrimitive) {
        let attempt = loss::with_gradients(&h, &weight, &labels, z_loss);
        kernel_or("linear_cross_entropy_with_gradients", attempt, || {
            reference::linear_cross_entropy_with_gradients::<Self>(h, weight, labels, z_loss)
        })
    }

    fn scaled(x: CudaPrimitive, factor: CudaPrimitive) -> CudaPrimitive {
        let (x, outcome) = optimizer::scaled(x, &factor);
        match outcome {
            Ok(()) => kernel_or("scaled", Ok(x), unused),
            Err(error) => kernel_or("scaled", Err(error), || {
                reference::scaled::<Self>(x, factor)
            }),
        }
    }

    fn sum_of_squares(x: CudaPrimitive) -> CudaPrimitive {
        let attempt = optimizer::sum_of_squares(&x);
        kernel_or("sum_of_squares", attempt, || {
            reference::sum_of_squares::<Self>(x)
        })
    }

    fn global_norm(tensors: Vec<CudaPrimitive>) -> CudaPrimitive {
        let attempt = optimizer::global_norm(&tensors);
        kernel_or("global_norm", attempt, || {
            reference::global_norm::<Self>(tensors)
        })
    }

    fn split_master(master: CudaPrimitive) -> (CudaPrimitive, CudaPrimitive) {
        let attempt = optimizer::split_master(&master);
        kernel_or("split_master", attempt, || {
            (Self::float_cast(master.clone(), FloatDType::BF16), master)
        })
    }

    fn join_master(leaf: CudaPrimitive, rest: CudaPrimitive) -> CudaPrimitive {
        if rest.dtype != DType::BF16 {
            // The kernel refused to split it: the rest is the master.
            return rest;
        }
        let joined = optimizer::join_master(&leaf, &rest);
        // No other way reads a rest.
        joined.unwrap_or_else(|error| panic!("{error}"))
    }

    fn snapshot(tensor: CudaPrimitive) -> Snapshot {
        match HostCopy::new(&CudaTensor::from(tensor.clone())) {
            Ok(copy) => Snapshot::of_cuda(copy),
            // Slower, and right.
            Err(_) => Snapshot::read_now::<Self>(tensor),
        }
    }

    fn snapshot_room(device: &Self::Device) -> u64 {
        sieve_kernels::memory_bytes(device.index).map_or(0, |(free, _)| free)
    }

    fn adamw_step(
        tensors: AdamWTensors<Self>,
        grad: CudaPrimitive,
        grad_scale: CudaPrimitive,
        step: AdamWStep,
    ) -> AdamWTensors<Self> {
        let (tensors, outcome) = optimizer::adamw(tensors, &grad, &grad_scale, step);
        match outcome {
            Ok(()) => kernel_or("adamw", Ok(tensors), unused),
            Err(error) => kernel_or("adamw", Err(error), || {
                let AdamWTensors { param, leaf, .. } = &tensors;
                let Some(leaf) = leaf.clone().filter(|_| param.dtype == DType::BF16) else {
                    return reference::adamw_step::<Self>(tensors, grad, grad_scale, step);
                };
                let param = Self::join_master(leaf, param.clone());
                let whole = AdamWTensors { param, ..tensors };
                let next = reference::adamw_step::<Self>(whole, grad, grad_scale, step);
                let (leaf, param) = Self::split_master(next.param);
                AdamWTensors {
                    param,
                    leaf: Some(leaf),
                    ..next
                }
            }),
        }
    }
}

/// The other way of an op that has already succeeded.
fn unused<T>() -> T {
    unreachable!("the kernel's result is taken")
}

/// The kernels' view of some tensors; no copy.
fn tensors<const N: usize>(primitives: [&CudaPrimitive; N]) -> [CudaTensor; N] {
    primitives.map(|primitive| CudaTensor::from(primitive.clone()))
}

/// The tensor in another float type, itself when it has that type.
fn cast(x: &CudaPrimitive, dtype: DType) -> CudaTensor {
    if x.dtype == dtype {
        return CudaTensor::from(x.clone());
    }
    CudaTensor::from(burn_cubecl::kernel::cast(x.clone(), dtype))
}
