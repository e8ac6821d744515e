//! GEMM with a weight stored as `[out, in]`, the layout of PyTorch and of safetensors checkpoints: the op and its
//! gradients on every device. Calls that the kernels of `cpu` or `cuda` refuse run `reference`.
use crate::SieveBackend;
use crate::backend::DeviceBackend;
use crate::device::flex::{self, contiguous, floats, from_vec, last_dim, unless_f32, with_columns};
use crate::tensors::{Float, flatten, primitive, tensor, unflatten};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorMetadata};
use burn_flex::{Flex, FlexTensor};
use sieve_core::GemmKind;

/// `y = x Wᵀ`.
///
/// # Shapes
/// - x: `[.., in]`
/// - weight: `[out, in]`
/// - returns: `[.., out]`
pub fn linear<B: SieveBackend, const D: usize>(x: Tensor<B, D>, weight: Tensor<B, 2>) -> Tensor<B, D> {
    let (x, weight) = (primitive(x), primitive(weight));
    let (a, w) = (B::value(x.clone()), B::value(weight.clone()));
    let residual = None;
    let y = <B::Inner as DeviceBackend>::linear(a.clone(), w.clone(), residual);
    tensor(B::node([&x, &weight], y, move |dy| backward::<B::Inner>(a, w, dy)))
}

/// As [`linear`], whose gradients it has, in an order of sums that depends on the number of columns alone: for weights
/// that no GEMM of one order takes, and for those that a decoding step multiplies by in a kernel of its own.
pub fn linear_in_order<B: SieveBackend, const D: usize>(x: Tensor<B, D>, weight: Tensor<B, 2>) -> Tensor<B, D> {
    let (x, weight) = (primitive(x), primitive(weight));
    let (a, w) = (B::value(x.clone()), B::value(weight.clone()));
    let y = B::Inner::linear_in_order(a.clone(), w.clone());
    tensor(B::node([&x, &weight], y, move |dy| backward::<B::Inner>(a, w, dy)))
}

/// `y = residual + x Wᵀ`; shapes as [`linear`], residual `[.., out]`.
pub fn linear_add<B: SieveBackend, const D: usize>(
    x: Tensor<B, D>,
    weight: Tensor<B, 2>,
    residual: Tensor<B, D>,
) -> Tensor<B, D> {
    let (x, weight, residual) = (primitive(x), primitive(weight), primitive(residual));
    let (a, w) = (B::value(x.clone()), B::value(weight.clone()));
    let added = Some(B::value(residual.clone()));
    let y = <B::Inner as DeviceBackend>::linear(a.clone(), w.clone(), added);
    tensor(B::node([&x, &weight, &residual], y, move |dy| {
        let [dx, dweight] = backward::<B::Inner>(a, w, dy.clone());
        [dx, dweight, dy]
    }))
}

/// `x + bias`.
///
/// The bias's gradient is a GEMM with ones: Burn's sum over the leading dimensions of `[2, 8192, 1152]` takes 1.26
/// ms on an H200, 17 % of a training step of Qwen2.5-0.5B's sizes.
///
/// # Shapes
/// - x: `[.., out]`
/// - bias: `[out]`
/// - returns: `[.., out]`
pub fn add_bias<B: SieveBackend, const D: usize>(x: Tensor<B, D>, bias: Tensor<B, 1>) -> Tensor<B, D> {
    /// Columns of the ones: 16 bytes of bf16, as cuBLASLt's kernels load them.
    const COLUMNS: usize = 8;
    let (x, bias) = (primitive(x), primitive(bias));
    let values = tensor::<B::Inner, D>(B::value(x.clone()));
    let y = primitive(values + tensor::<B::Inner, 1>(B::value(bias.clone())).unsqueeze());
    tensor(B::node([&x, &bias], y, |dy| {
        let gradient = tensor::<B::Inner, D>(dy.clone());
        let width = gradient.dims()[D - 1];
        let rows: Tensor<B::Inner, 2> = gradient.reshape([-1, width as i32]);
        let ones = Tensor::<B::Inner, 2>::ones([rows.dims()[0], COLUMNS], (&rows.device(), rows.dtype()));
        let earlier_sum = None;
        let sums = B::Inner::linear_weight_gradient(primitive(ones), primitive(rows), earlier_sum);
        let sum: Tensor<B::Inner, 1> = tensor::<B::Inner, 2>(sums).narrow(1, 0, 1).reshape([width]);
        [dy, primitive(sum)]
    }))
}

/// Gradients `[dx, dweight]` of `y = x Wᵀ`.
fn backward<D: DeviceBackend>(x: Float<D>, weight: Float<D>, dy: Float<D>) -> [Float<D>; 2] {
    let dx = D::linear_input_gradient(weight, dy.clone());
    let earlier_sum = None;
    [dx, D::linear_weight_gradient(x, dy, earlier_sum)]
}

/// `sum + gradient`; the gradient alone where there is no sum.
pub(crate) fn added<B: Backend>(sum: Option<Float<B>>, gradient: Float<B>) -> Float<B> {
    match sum {
        Some(sum) => B::float_add(sum, gradient),
        None => gradient,
    }
}

pub(crate) mod reference {
    //! GEMMs with a `[out, in]` weight in plain Burn operations.
    use super::*;

    /// `y = x Wᵀ` for `x [.., in]`, `weight [out, in]`.
    pub fn linear<B: Backend>(x: Float<B>, weight: Float<B>) -> Float<B> {
        let (x, shape) = flatten::<B>(x);
        unflatten(x.matmul(tensor::<B, 2>(weight).transpose()), shape)
    }

    /// Input gradient `dx = dy W` of [`linear`].
    pub fn linear_input_gradient<B: Backend>(weight: Float<B>, dy: Float<B>) -> Float<B> {
        let (dy, shape) = flatten::<B>(dy);
        unflatten(dy.matmul(tensor::<B, 2>(weight)), shape)
    }

    /// Weight gradient `dW = dyᵀ x` of [`linear`].
    pub fn linear_weight_gradient<B: Backend>(x: Float<B>, dy: Float<B>) -> Float<B> {
        let (x, _) = flatten::<B>(x);
        let (dy, _) = flatten::<B>(dy);
        primitive(dy.transpose().matmul(x))
    }

    /// `a b`; with `([alpha, beta], c)` `alpha a b + beta c`.
    pub fn gemm<B: Backend>(kind: GemmKind, x: Float<B>, w: Float<B>, sum: Option<([f64; 2], Float<B>)>) -> Float<B> {
        let (x, w) = (tensor::<B, 2>(x), tensor::<B, 2>(w));
        let y = match kind {
            GemmKind::Nt => x.matmul(w.transpose()),
            GemmKind::Nn => x.matmul(w),
            GemmKind::Tn => x.transpose().matmul(w),
        };
        primitive(match sum {
            Some(([alpha, beta], c)) => y * alpha + tensor::<B, 2>(c) * beta,
            None => y,
        })
    }
}

pub(crate) mod cpu {
    //! The GEMMs of linear layers on the CPU: methods of `DeviceBackend`.
    use super::*;
    use sieve_cpu::{Matrix, MatrixMut, Threads, matmul, zeros};

    /// The weight may be f32 or bf16.
    pub(crate) fn linear(x: FlexTensor, weight: FlexTensor, residual: Option<FlexTensor>) -> FlexTensor {
        unless_f32!(&x, "linear": added::<Flex>(residual, reference::linear::<Flex>(x, weight)));
        let (x, weight) = (contiguous(x), contiguous(weight));
        let (tokens, inner, out) = (num_rows(&x), last_dim(&x), weight.shape()[0]);
        let mut y = zeros(tokens * out);
        sieve_cpu::linear(floats(&x), flex::weight(&weight), [tokens, inner, out], &mut y);
        added::<Flex>(residual, with_columns(&x, out, y))
    }

    /// A host's sums have one order anyway.
    pub(crate) fn linear_in_order(x: FlexTensor, weight: FlexTensor) -> FlexTensor {
        let residual = None;
        linear(x, weight, residual)
    }

    pub(crate) fn linear_input_gradient(weight: FlexTensor, dy: FlexTensor) -> FlexTensor {
        unless_f32!(&dy, "linear_input_gradient": reference::linear_input_gradient::<Flex>(weight, dy));
        let (weight, dy) = (contiguous(weight), contiguous(dy));
        with_columns(&dy, last_dim(&weight), gemm_to_vec(rows(&dy), rows(&weight)))
    }

    pub(crate) fn linear_weight_gradient(x: FlexTensor, dy: FlexTensor, sum: Option<FlexTensor>) -> FlexTensor {
        unless_f32!(&x, "linear_weight_gradient":
            added::<Flex>(sum, reference::linear_weight_gradient::<Flex>(x, dy)));
        let (x, dy) = (contiguous(x), contiguous(dy));
        let gradient = gemm_to_vec(rows(&dy).t(), rows(&x));
        added::<Flex>(sum, from_vec(gradient, [last_dim(&dy), last_dim(&x)]))
    }

    /// `kind` says which of `x` and `w` is transposed; with `([alpha, beta], c)` returns `alpha a b + beta c`.
    pub(crate) fn gemm(
        kind: GemmKind,
        x: FlexTensor,
        w: FlexTensor,
        sum: Option<([f64; 2], FlexTensor)>,
    ) -> FlexTensor {
        unless_f32!(&x, "gemm": reference::gemm::<Flex>(kind, x, w, sum));
        let (x, w) = (contiguous(x), contiguous(w));
        let (a, b) = match kind {
            GemmKind::Nt => (rows(&x), rows(&w).t()),
            GemmKind::Nn => (rows(&x), rows(&w)),
            GemmKind::Tn => (rows(&x).t(), rows(&w)),
        };
        let sizes = [a.num_rows(), b.num_columns()];
        let y = match sum {
            Some((factors, c)) => gemm_plus_c(factors, a, b, floats(&contiguous(c)).to_vec()),
            None => gemm_to_vec(a, b),
        };
        from_vec(y, sizes)
    }

    /// Rows of a contiguous tensor whose leading dimensions are folded.
    fn num_rows(x: &FlexTensor) -> usize {
        x.shape().num_elements() / last_dim(x).max(1)
    }

    /// The contiguous f32 tensor `x [.., columns]` as a matrix; its strides are `columns` and 1.
    fn rows(x: &FlexTensor) -> Matrix<'_> {
        Matrix::strided(floats(x), num_rows(x), last_dim(x), last_dim(x), 1)
    }

    /// The GEMM `a b` as a row-major vector.
    fn gemm_to_vec(a: Matrix<'_>, b: Matrix<'_>) -> Vec<f32> {
        gemm_plus_c([1.0, 0.0], a, b, zeros(a.num_rows() * b.num_columns()))
    }

    /// `alpha a b + beta c`, row-major.
    fn gemm_plus_c(factors: [f64; 2], a: Matrix<'_>, b: Matrix<'_>, mut c: Vec<f32>) -> Vec<f32> {
        let ([alpha, beta], m, n) = (factors.map(|factor| factor as f32), a.num_rows(), b.num_columns());
        matmul(Threads::of_gemm(a, b), alpha, a, b, beta, MatrixMut::new(&mut c, m, n));
        c
    }
}

#[cfg(feature = "cuda")]
pub(crate) mod cuda {
    //! The GEMMs of linear layers, by cuBLASLt.
    use super::*;
    use crate::device::cuda::{Cuda, CudaPrimitive, tensors};
    use crate::device::kernel_or;
    use sieve_kernels::DType::{BF16, F32};
    use sieve_kernels::step::residual_add;
    use sieve_kernels::{CudaTensor, KernelError, MatmulOutput, ToBurn, kernel_tensor, matmul};

    /// `x Wᵀ`, plus the residual if there is one; the GEMM itself adds it where that takes no longer.
    pub(crate) fn linear(x: CudaPrimitive, weight: CudaPrimitive, residual: Option<CudaPrimitive>) -> CudaPrimitive {
        let [a, b] = tensors([&x, &weight]);
        let (op, attempt) = match residual.clone().map(kernel_tensor) {
            None => ("linear", matmul(GemmKind::Nt, &a, &b, MatmulOutput::New(BF16))),
            Some(residual) => ("linear_add", gemm_plus_residual([a, b, residual])),
        };
        kernel_or(op, attempt.map(ToBurn::burn), || added::<Cuda>(residual, reference::linear::<Cuda>(x, weight)))
    }

    pub(crate) fn linear_in_order(x: CudaPrimitive, weight: CudaPrimitive) -> CudaPrimitive {
        let [a, b] = tensors([&x, &weight]);
        let attempt = sieve_kernels::step::linear_in_order(&a, &b);
        kernel_or("linear_in_order", attempt.map(ToBurn::burn), || reference::linear::<Cuda>(x, weight))
    }

    pub(crate) fn linear_input_gradient(weight: CudaPrimitive, dy: CudaPrimitive) -> CudaPrimitive {
        let [a, b] = tensors([&dy, &weight]);
        let attempt = matmul(GemmKind::Nn, &a, &b, MatmulOutput::New(BF16));
        kernel_or("linear_input_gradient", attempt.map(ToBurn::burn), || {
            reference::linear_input_gradient::<Cuda>(weight, dy)
        })
    }

    /// The result is f32, as the optimizer's master weights are.
    pub(crate) fn linear_weight_gradient(
        x: CudaPrimitive,
        dy: CudaPrimitive,
        sum: Option<CudaPrimitive>,
    ) -> CudaPrimitive {
        let [a, b] = tensors([&dy, &x]);
        let total = sum.clone().map(kernel_tensor);
        let output = total.as_ref().map_or(MatmulOutput::New(F32), MatmulOutput::AddTo);
        let attempt = matmul(GemmKind::Tn, &a, &b, output);
        kernel_or("linear_weight_gradient", attempt.map(ToBurn::burn), || {
            added::<Cuda>(sum, reference::linear_weight_gradient::<Cuda>(x, dy))
        })
    }

    /// `kind` says which of `x` and `w` is transposed; with `([alpha, beta], c)` one GEMM computes
    /// `alpha a b + beta c`.
    pub(crate) fn gemm(
        kind: GemmKind,
        x: CudaPrimitive,
        w: CudaPrimitive,
        sum: Option<([f64; 2], CudaPrimitive)>,
    ) -> CudaPrimitive {
        let [a, b] = tensors([&x, &w]);
        let c = sum.clone().map(|(factors, c)| (factors.map(|factor| factor as f32), kernel_tensor(c)));
        let output = c.as_ref().map_or(MatmulOutput::New(BF16), |(factors, c)| MatmulOutput::AlphaBeta(*factors, c));
        kernel_or("gemm", matmul(kind, &a, &b, output).map(ToBurn::burn), || reference::gemm::<Cuda>(kind, x, w, sum))
    }

    /// `residual + x Wᵀ`; the GEMM adds the residual where that takes no longer.
    pub(crate) fn gemm_plus_residual([x, weight, residual]: [CudaTensor; 3]) -> Result<CudaTensor, KernelError> {
        let [out, inner] = weight.dims("linear_add", "weight")?;
        // Measured on an H200 at 16384 x 2048 x 6144: a GEMM that also adds a residual takes 0.1 ms longer, twice the
        // cost of a separate addition; a square one takes no longer.
        if inner > out {
            let y = matmul(GemmKind::Nt, &x, &weight, MatmulOutput::New(BF16))?;
            return residual_add(&residual, &y);
        }
        matmul(GemmKind::Nt, &x, &weight, MatmulOutput::PlusC(&residual))
    }
}

#[cfg(test)]
mod tests;
