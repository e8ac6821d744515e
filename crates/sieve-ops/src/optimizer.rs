//! AdamW (arXiv:1711.05101) with f32 master weights, Muon's orthogonalisation, norms of gradients, and snapshots, on
//! every device. None of these ops has a gradient. Calls that the kernels of `cpu` or `cuda` refuse run `reference`.
mod call;
mod snapshot;
#[cfg(test)]
mod tests;

pub use call::AdamWTensors;
pub use sieve_core::AdamWStep;
pub use snapshot::{Snapshot, SnapshotError, SnapshotReader};

use crate::DeviceBackend;
use crate::device::{contiguous, floats, from_vec, is_f32, plain, unless_f32};
use crate::tensors::{Float, primitive, rows, tensor};
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensorOps;
use burn::tensor::{DType, FloatDType, Shape, Tensor, TensorData, TensorMetadata};
use burn_flex::{Flex, FlexDevice, FlexTensor};
use sieve_core::GemmKind;

/// One update of one parameter, in the order of PyTorch's AdamW: decay, moments, step.
///
/// `grad` has the parameter's shape; `grad_scale` is `[1]` and multiplies it.
pub fn adamw<B: DeviceBackend, const D: usize>(
    tensors: AdamWTensors<B>,
    grad: Tensor<B, D>,
    grad_scale: Tensor<B, 1>,
    step: AdamWStep,
) -> AdamWTensors<B> {
    B::adamw(tensors, primitive(grad), primitive(grad_scale), step)
}

/// `(leaf, rest)`: the bf16 weights of an f32 `master`, and the low bits that [`adamw`] needs in addition, as an opaque
/// primitive.
pub fn split_master<B: DeviceBackend, const D: usize>(master: Tensor<B, D>) -> (Tensor<B, D>, Float<B>) {
    let (leaf, rest) = B::split_master(primitive(master));
    (tensor(leaf), rest)
}

/// The f32 master of bf16 weights and its low bits, exactly.
pub fn join_master<B: DeviceBackend, const D: usize>(leaf: Tensor<B, D>, rest: Float<B>) -> Tensor<B, D> {
    tensor(B::join_master(primitive(leaf), rest))
}

/// Coefficients of `f(x) = a x + b x³ + c x⁵`. Five applications of f map x in [0.01, 1] to between 0.68 and 1.13.
const QUINTIC: [f64; 3] = [3.4445, -4.775, 2.0315];

/// Approximates `U Vᵀ` of the singular value decomposition `x = U S Vᵀ` by five Newton-Schulz steps in the dtype of x
/// (arXiv:2502.16982, eq. 2): singular values of at least 0.01 of the Frobenius norm become 0.68 to 1.13. Zero stays
/// zero.
///
/// # Shapes
/// - x: `[out, in]`
/// - returns: `[out, in]`
pub fn orthogonalised<B: DeviceBackend>(x: Tensor<B, 2>) -> Tensor<B, 2> {
    let ([rows, columns], dtype) = (x.dims(), x.dtype());
    // The small number keeps x = 0 from becoming NaN.
    let norm = sum_of_squares(x.clone()).sqrt() + 1e-12;
    let mut x = x / norm.cast(dtype).reshape([1, 1]);
    let [a, b, c] = QUINTIC;
    for _ in 0..5 {
        // Computes the smaller of x xᵀ and xᵀ x; `None`: nothing is added to it. It is symmetric, so that gram gramᵀ is
        // its square.
        let (old, is_wide) = (primitive(x), rows <= columns);
        let kind = if is_wide { GemmKind::Nt } else { GemmKind::Tn };
        let gram = B::gemm(kind, old.clone(), old.clone(), None);
        let polynomial = B::gemm(GemmKind::Nt, gram.clone(), gram.clone(), Some(([c, b], gram)));
        let sum = Some(([1.0, a], old.clone()));
        x = tensor(if is_wide {
            B::gemm(GemmKind::Nn, polynomial, old, sum)
        } else {
            B::gemm(GemmKind::Nt, old, polynomial, sum)
        });
    }
    x
}

/// Sum of squares, `[1]`. The order of the sum does not depend on the number of threads.
pub fn sum_of_squares<B: DeviceBackend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, 1> {
    tensor(B::sum_of_squares(primitive(x)))
}

pub(crate) mod reference {
    //! AdamW and norms in plain Burn operations.
    use super::*;

    /// `p -= lr wd p; m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g²; p -= lr / c1 * m / (sqrt(v / c2) + eps)`, unless
    /// `grad_scale` is zero or not finite, in which case nothing changes. The leaf is p rounded to the leaf's dtype.
    pub fn adamw<B: Backend>(
        tensors: AdamWTensors<B>,
        grad: Float<B>,
        grad_scale: Float<B>,
        step: AdamWStep,
    ) -> AdamWTensors<B> {
        let shape: Vec<usize> = tensors.param.shape().to_vec();
        let flat = |x: Float<B>| {
            let count = x.shape().num_elements();
            tensor::<B, 1>(B::float_reshape(x, Shape::new([count])))
        };
        let old = [tensors.param, tensors.exp_avg, tensors.exp_avg_sq].map(flat);
        let [param, exp_avg, exp_avg_sq] = old.clone();
        let compute = param.dtype();
        let scale = tensor::<B, 1>(grad_scale).cast(compute);
        let grad = flat(grad).cast(compute) * scale.clone();
        let exp_avg = exp_avg * step.beta1 + grad.clone() * (1.0 - step.beta1);
        let exp_avg_sq = exp_avg_sq * step.beta2 + grad.clone() * grad * (1.0 - step.beta2);
        let denominator = (exp_avg_sq.clone() / step.bias_correction2).sqrt() + step.eps;
        let update = exp_avg.clone() / denominator * (step.lr / step.bias_correction1);
        let param = param * (1.0 - step.lr * step.weight_decay) - update;

        let skipped = scale.clone().equal_elem(0.0).bool_or(scale.is_finite().bool_not());
        let [old_param, old_avg, old_avg_sq] = old;
        let unless_skipped = |next: Tensor<B, 1>, old: Tensor<B, 1>| {
            let skipped = skipped.clone().expand(old.dims());
            next.mask_where(skipped, old)
        };
        let unflattened = |x: Tensor<B, 1>| B::float_reshape(primitive(x), shape.clone().into());
        let param = unless_skipped(param, old_param);
        let leaf = tensors.leaf.map(|leaf| unflattened(param.clone().cast(leaf.dtype())));
        AdamWTensors {
            param: unflattened(param),
            leaf,
            exp_avg: unflattened(unless_skipped(exp_avg, old_avg)),
            exp_avg_sq: unflattened(unless_skipped(exp_avg_sq, old_avg_sq)),
        }
    }

    /// `sum(x²)`, `[1]`.
    pub fn sum_of_squares<B: Backend>(x: Float<B>) -> Float<B> {
        let (x, _, _) = rows::<B>(x);
        primitive(x.powi_scalar(2).sum())
    }

    /// `sqrt(sum over tensors of sum(x²))`, `[1]`.
    pub fn global_norm<B: DeviceBackend>(tensors: Vec<Float<B>>) -> Float<B> {
        let squares = tensors.into_iter().map(|x| tensor::<B, 1>(B::sum_of_squares(x)));
        let sum = squares.reduce(|sum, square| sum + square);
        primitive(sum.expect("at least one tensor").sqrt())
    }
}

pub(crate) mod cpu {
    //! AdamW and norms on the CPU. Here `split_master` returns the whole f32 master as the rest.
    use super::*;

    /// Updates f32 weights without a leaf, in place where nothing else holds them; with a leaf, or in another dtype,
    /// the reference runs. A bf16 gradient is widened first.
    pub(crate) fn adamw(
        tensors: AdamWTensors<Flex>,
        grad: FlexTensor,
        grad_scale: FlexTensor,
        step: AdamWStep,
    ) -> AdamWTensors<Flex> {
        // The kernel updates f32 weights without a leaf.
        if !is_f32(&tensors.param) || tensors.leaf.is_some() {
            return plain("adamw", || reference::adamw::<Flex>(tensors, grad, grad_scale, step));
        }
        let grad = contiguous(widened(grad));
        let grad_scale = floats(&contiguous(grad_scale))[0];
        if grad_scale == 0.0 || !grad_scale.is_finite() {
            return tensors;
        }
        let AdamWTensors { param, exp_avg, exp_avg_sq, .. } = tensors;
        let [mut param, mut exp_avg, mut exp_avg_sq] = [param, exp_avg, exp_avg_sq].map(contiguous);
        // The update is in place if the tensor has no other owner; otherwise `storage_mut` copies.
        sieve_cpu::adamw(
            param.storage_mut::<f32>(),
            floats(&grad),
            exp_avg.storage_mut::<f32>(),
            exp_avg_sq.storage_mut::<f32>(),
            grad_scale,
            &step,
        );
        AdamWTensors { param, leaf: None, exp_avg, exp_avg_sq }
    }

    pub(crate) fn split_master(master: FlexTensor) -> (FlexTensor, FlexTensor) {
        let leaf = Flex::float_cast(master.clone(), FloatDType::BF16);
        (leaf, master)
    }

    pub(crate) fn join_master(_leaf: FlexTensor, rest: FlexTensor) -> FlexTensor {
        rest
    }

    /// A bf16 gradient in f32; other tensors unchanged.
    fn widened(x: FlexTensor) -> FlexTensor {
        match x.dtype() {
            DType::BF16 => Flex::float_cast(x, FloatDType::F32),
            _ => x,
        }
    }

    pub(crate) fn sum_of_squares(x: FlexTensor) -> FlexTensor {
        let x = widened(x);
        unless_f32!(&x, "sum_of_squares": reference::sum_of_squares::<Flex>(x));
        let x = contiguous(x);
        from_vec(vec![sieve_cpu::sum_of_squares(floats(&x)) as f32], [1])
    }

    pub(crate) fn global_norm(tensors: Vec<FlexTensor>) -> FlexTensor {
        reference::global_norm::<Flex>(tensors)
    }

    /// Copies an f32 tensor once, now; other dtypes are read by Burn.
    pub(crate) fn snapshot(tensor: FlexTensor) -> Snapshot {
        if !is_f32(&tensor) {
            return Snapshot::read_now::<Flex>(tensor);
        }
        // One copy, where Burn's `into_data` makes two of a tensor with another owner.
        let tensor = contiguous(tensor);
        Snapshot::of_data(TensorData::new(floats(&tensor).to_vec(), tensor.shape()))
    }

    pub(crate) fn free_memory(_device: &FlexDevice) -> u64 {
        0
    }
}

#[cfg(feature = "cuda")]
pub(crate) mod cuda {
    //! AdamW and norms of gradients on CUDA.
    use super::*;
    use crate::Cuda;
    use crate::device::{CudaPrimitive, cast, kernel_on, kernel_or, tensors, writable};
    use sieve_cuda::CudaDevice;
    use sieve_kernels::step::{AdamwTensors, FixedSum, Term};
    use sieve_kernels::{CudaTensor, HostCopy, KernelError, ToBurn, kernel_tensor};

    /// Updates the tensors in place where nothing else holds them. The reference, if the kernel refuses, takes a split
    /// master joined and splits it again.
    pub(crate) fn adamw(
        tensors: AdamWTensors<Cuda>,
        grad: CudaPrimitive,
        grad_scale: CudaPrimitive,
        step: AdamWStep,
    ) -> AdamWTensors<Cuda> {
        let (tensors, outcome) = launch_update(tensors, &grad, &grad_scale, step);
        kernel_on("adamw", tensors, outcome, |tensors| {
            let AdamWTensors { param, leaf, .. } = &tensors;
            let Some(leaf) = leaf.clone().filter(|_| param.dtype == DType::BF16) else {
                return reference::adamw::<Cuda>(tensors, grad, grad_scale, step);
            };
            // The reference takes a whole master: leaf and rest are joined before it, and split again after it.
            let param = join_master(leaf, param.clone());
            let whole = AdamWTensors { param, ..tensors };
            let next = reference::adamw::<Cuda>(whole, grad, grad_scale, step);
            let (leaf, param) = split_master(next.param);
            AdamWTensors { param, leaf: Some(leaf), ..next }
        })
    }

    pub(crate) fn split_master(master: CudaPrimitive) -> (CudaPrimitive, CudaPrimitive) {
        let attempt = sieve_kernels::step::split_master(&kernel_tensor(master.clone()).contiguous());
        let attempt = attempt.map(|(leaf, rest)| (leaf.burn(), rest.burn()));
        kernel_or("split_master", attempt, || (Cuda::float_cast(master.clone(), FloatDType::BF16), master))
    }

    /// The f32 master of the bf16 weights `leaf` and the `rest`, which is the whole master where the kernel did not
    /// split it.
    pub(crate) fn join_master(leaf: CudaPrimitive, rest: CudaPrimitive) -> CudaPrimitive {
        if rest.dtype != DType::BF16 {
            // The kernel has refused to split the master, so that the rest is the whole master.
            return rest;
        }
        let [leaf, rest] = tensors([&leaf, &rest]);
        let joined = sieve_kernels::step::join_master(&leaf.contiguous(), &rest);
        // Only this kernel can read a rest.
        joined.unwrap_or_else(|error| panic!("{error}")).burn()
    }

    pub(crate) fn sum_of_squares(x: CudaPrimitive) -> CudaPrimitive {
        let attempt = FixedSum::of(&kernel_tensor(x.clone()), Term::Square);
        kernel_or("sum_of_squares", attempt.map(ToBurn::burn), || reference::sum_of_squares::<Cuda>(x))
    }

    pub(crate) fn global_norm(tensors: Vec<CudaPrimitive>) -> CudaPrimitive {
        let attempt = norm_of(&tensors);
        kernel_or("global_norm", attempt, || reference::global_norm::<Cuda>(tensors))
    }

    pub(crate) fn snapshot(tensor: CudaPrimitive) -> Snapshot {
        match HostCopy::new(&kernel_tensor(tensor.clone())) {
            Ok(copy) => Snapshot::of_cuda(copy),
            // Where no asynchronous copy is possible, this thread copies now.
            Err(_) => Snapshot::read_now::<Cuda>(tensor),
        }
    }

    pub(crate) fn free_memory(device: &CudaDevice) -> u64 {
        sieve_kernels::DeviceReport::memory_bytes(device.index).map_or(0, |(free, _)| free)
    }

    /// One update, in place where a tensor has no other owner; with the model's bf16 weights, the leaf, `param` is the
    /// bits that they lack. Returns the tensors after a refusal too: with clones for that case every update would copy.
    fn launch_update(
        tensors: AdamWTensors<Cuda>,
        grad: &CudaPrimitive,
        grad_scale: &CudaPrimitive,
        step: AdamWStep,
    ) -> (AdamWTensors<Cuda>, Result<(), KernelError>) {
        let [param, exp_avg, exp_avg_sq] = [tensors.param, tensors.exp_avg, tensors.exp_avg_sq].map(writable);
        let model_weights = tensors.leaf.map(writable);
        let grad = cast(grad, DType::F32).contiguous();
        let grad_scale = cast(grad_scale, DType::F32);
        let update = AdamwTensors {
            param: &param,
            exp_avg: &exp_avg,
            exp_avg_sq: &exp_avg_sq,
            grad: &grad,
            grad_scale: &grad_scale,
            leaf: model_weights.as_ref(),
        };
        let outcome = update.adamw(step);
        let tensors = AdamWTensors {
            param: param.burn(),
            leaf: model_weights.map(ToBurn::burn),
            exp_avg: exp_avg.burn(),
            exp_avg_sq: exp_avg_sq.burn(),
        };
        (tensors, outcome)
    }

    /// The norm over all tensors, with one launch per tensor.
    fn norm_of(tensors: &[CudaPrimitive]) -> Result<CudaPrimitive, KernelError> {
        let tensors: Vec<CudaTensor> = tensors.iter().map(|tensor| kernel_tensor(tensor.clone())).collect();
        let sizes = tensors.iter().map(CudaTensor::num_elements);
        let mut sum = FixedSum::new(&tensors[0], Term::Square, sizes);
        for tensor in &tensors {
            sum.add(tensor)?;
        }
        sum.root().map(ToBurn::burn)
    }
}
