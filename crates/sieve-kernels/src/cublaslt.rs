//! GEMMs by NVIDIA's cuBLASLt, queued on Burn's own stream, in order with Burn's operations.
//!
//! A GEMM is a closure for CubeCL's device thread: it runs there between the launches before and after it, resolves the
//! buffers' addresses and calls cuBLASLt on *the same stream*, so no synchronisation is needed and a buffer that is
//! freed afterwards may be reused at once. `lane.rs` says how that stream is found, and what happens where it is not.
//! Algorithms are chosen once per shape and cached, the workspace is kept, the library is loaded at the first GEMM.
mod library;
mod plan;
mod problem;

use crate::burn_memory::{binding_of, burn_memory, device_of};
use crate::device_thread::{DEVICE_THREAD_GONE, late_error, report_late};
use crate::lane::{self, device_queue};
use crate::locked::lock;
use crate::probe::version_text;
use cubecl::stream_id::StreamId;
use library::Call;
use plan::Refusal;
use problem::{NAME, OperandTypes, Problem, operand_rows, result_shape};
pub use sieve_core::GemmKind;
use sieve_gpu::step::{Fp8Matrix, Rows};
use sieve_gpu::{CudaTensor, DType, KernelError};
use std::collections::HashSet;
use std::sync::{LazyLock, Mutex, OnceLock};

/// Where the result of a GEMM is stored.
#[derive(Debug, Clone, Copy)]
pub enum MatmulOutput<'a> {
    /// A new contiguous tensor, bf16 or f32.
    New(DType),
    /// A new contiguous tensor of this tensor's type: the GEMM's result plus this tensor. It adds to the residual
    /// stream without another launch.
    PlusC(&'a CudaTensor),
    /// A new contiguous tensor of this tensor's type, with the factors `[alpha, beta]`: `alpha * result + beta * this`.
    AlphaBeta([f32; 2], &'a CudaTensor),
    /// Overwrites this tensor in place; all its clones see the result, also one in a [`HostCopy`](crate::HostCopy).
    /// bf16 or f32, with the same stride between all rows.
    Into(&'a CudaTensor),
    /// Adds to this tensor in place, which all its clones see: f32 sums of weight gradients over micro-batches.
    AddTo(&'a CudaTensor),
}

/// The library cuBLASLt, loaded at its first use.
#[derive(Debug)]
pub struct Cublaslt;

/// GEMM of two bf16 tensors with f32 accumulation, rounded once at the store. Leading dimensions count as rows; rows
/// may be pitched. Returns the output tensor: the new one, or the one that was written.
///
/// # Errors
/// [`KernelError::Installation`] when the library is missing; another type, sizes that do not fit, an output whose rows
/// are not one stride apart, a GEMM that cuBLASLt has no algorithm for. A GEMM that fails after it was queued is
/// reported by a later call.
pub fn matmul(
    kind: GemmKind,
    x: &CudaTensor,
    w: &CudaTensor,
    output: MatmulOutput<'_>,
) -> Result<CudaTensor, KernelError> {
    x.require_dtype(NAME, "x", DType::BF16)?;
    w.require_dtype(NAME, "w", DType::BF16)?;
    queue_gemm((kind, OperandTypes::Bf16), [x, w], &[], output)
}

/// `x [m, k]` times the transpose of `w [n, k]`, times their scales, with f32 accumulation; at most one of the two
/// holds gradients. Sizes are multiples of 16.
///
/// # Errors
/// The errors of [`matmul`].
pub fn fp8_matmul(x: &Fp8Matrix, w: &Fp8Matrix, output: MatmulOutput<'_>) -> Result<CudaTensor, KernelError> {
    let operands = OperandTypes::Fp8 { x: x.format, w: w.format };
    let (values, scales) = ([&x.values, &w.values], [&x.scale, &w.scale]);
    queue_gemm((GemmKind::Nt, operands), values, &scales, output)
}

/// Checks the sizes, queues the GEMM and returns its output tensor. `scales` belongs to fp8 operands.
fn queue_gemm(
    (kind, operands): (GemmKind, OperandTypes),
    [x, w]: [&CudaTensor; 2],
    scales: &[&CudaTensor],
    output: MatmulOutput<'_>,
) -> Result<CudaTensor, KernelError> {
    Cublaslt::require()?;
    let (x_rows, w_rows) = (Rows::of(x), Rows::of(w));
    let sizes = operand_rows(kind, [x_rows.rows, x_rows.width], [w_rows.rows, w_rows.width])?;
    let (x, w) = (&x_rows.tensor, &w_rows.tensor);
    let shape = result_shape(kind, x.shape(), sizes);
    let target = Target::of(output, x, &shape, sizes)?;
    let problem = Problem {
        kind,
        operands,
        sizes,
        x_stride: x_rows.stride,
        w_stride: w_rows.stride,
        c_stride: target.c_stride,
        d_stride: target.d_stride,
        is_f32: target.d.dtype() == DType::F32,
    };
    let call = Call {
        problem,
        is_hopper: x.hardware().compute_capability == (9, 0),
        bindings: [x, w, &target.c, &target.d].iter().chain(scales).map(|tensor| binding_of(tensor)).collect(),
        factors: target.factors,
        stream: StreamId::current(),
    };
    let noted = burn_memory(x).tape.as_ref().map(|tape| (tape, Box::new(call.clone())));
    submit(x, call)?;
    if let Some((tape, work)) = noted {
        tape.note(work);
    }
    Ok(target.d)
}

impl Cublaslt {
    /// Checks that the library can be loaded; tried once per process.
    ///
    /// # Errors
    /// [`KernelError::Installation`] when it cannot.
    pub fn require() -> Result<(), KernelError> {
        static PRESENT: OnceLock<bool> = OnceLock::new();
        // SAFETY: only tries to open the library.
        let present = *PRESENT.get_or_init(|| unsafe { cudarc::cublaslt::sys::is_culib_present() });
        if present { Ok(()) } else { Err(KernelError::no_cublaslt()) }
    }

    /// The version of cuBLASLt; `None` if it cannot be loaded.
    pub fn version() -> Option<String> {
        Cublaslt::require().ok()?;
        // SAFETY: the library is loaded, and the call has no arguments.
        Some(version_text(unsafe { cudarc::cublaslt::sys::cublasLtGetVersion() }))
    }
}

/// C and D of cuBLASLt's `D = alpha A B + beta C`: C is read if beta is not 0, D is written.
struct Target {
    c: CudaTensor,
    d: CudaTensor,
    c_stride: usize,
    d_stride: usize,
    /// The factors `[alpha, beta]`.
    factors: [f32; 2],
}

impl Target {
    /// C and D for a GEMM's result of shape `shape`, `[m, n]` as a matrix. Without an addend D is C, too.
    fn of(
        output: MatmulOutput<'_>,
        x: &CudaTensor,
        shape: &[usize],
        [m, n, _k]: [usize; 3],
    ) -> Result<Self, KernelError> {
        let in_place = |tensor: &CudaTensor, beta| {
            require_output_type(tensor.dtype())?;
            let rows = sieve_gpu::uniform_rows(tensor.shape(), tensor.strides());
            let (rows, stride) =
                rows.ok_or_else(|| tensor.layout_error(NAME, "the output", "rows one stride apart are needed"))?;
            require_matrix("the output", tensor, rows, [m, n])?;
            Ok(Self { c: tensor.clone(), d: tensor.clone(), c_stride: stride, d_stride: stride, factors: [1.0, beta] })
        };
        // With a beta of 0 the result overwrites D, with 1 it is added to D.
        let (factors, addend) = match output {
            MatmulOutput::New(dtype) => {
                require_output_type(dtype)?;
                return in_place(&x.empty_contiguous(shape, dtype), 0.0);
            }
            MatmulOutput::Into(tensor) => return in_place(tensor, 0.0),
            MatmulOutput::AddTo(tensor) => return in_place(tensor, 1.0),
            MatmulOutput::PlusC(addend) => ([1.0, 1.0], addend),
            MatmulOutput::AlphaBeta(factors, addend) => (factors, addend),
        };
        require_output_type(addend.dtype())?;
        let Rows { tensor: c, rows, stride: c_stride, .. } = Rows::of(addend);
        require_matrix("the addend", &c, rows, [m, n])?;
        let d = x.empty_contiguous(shape, c.dtype());
        Ok(Self { c, d, c_stride, d_stride: n, factors })
    }
}

fn require_output_type(dtype: DType) -> Result<(), KernelError> {
    if matches!(dtype, DType::BF16 | DType::F32) {
        return Ok(());
    }
    Err(KernelError::unsupported(NAME, "output type", dtype.name(), "bf16, f32"))
}

/// Refuses a tensor that as `rows` rows is not a matrix of the shape `expected`.
fn require_matrix(
    name: &'static str,
    tensor: &CudaTensor,
    rows: usize,
    expected: [usize; 2],
) -> Result<(), KernelError> {
    let columns = tensor.shape().last().copied().unwrap_or(0);
    if [rows, columns] == expected {
        return Ok(());
    }
    Err(KernelError::shape(NAME, name, tensor.shape(), &expected))
}

/// Problems that have an algorithm, with the index of their device. Process-wide, because Burn's backend methods have
/// no place for state.
static PLANNED: LazyLock<Mutex<HashSet<(usize, Problem)>>> = LazyLock::new(Mutex::default);

/// Queues a GEMM on the device of `like`. The first GEMM of a problem waits until cuBLASLt has chosen its algorithm, so
/// that this call returns the error if there is none.
fn submit(like: &CudaTensor, call: Call) -> Result<(), KernelError> {
    late_error()?;
    lane::open(like)?;
    let queue = device_queue(like);
    let key = (device_of(like).index, call.problem);
    if lock(&PLANNED).contains(&key) {
        queue.submit(move |server| {
            if let Err(refusal) = call.run(server) {
                let reason = refusal.to_string();
                report_late(KernelError::Launch { kernel: NAME, reason });
            }
        });
        return Ok(());
    }
    let described = call.problem.to_string();
    let outcome = queue.submit_blocking(move |server| call.run(server));
    match outcome {
        Ok(Ok(())) => {
            lock(&PLANNED).insert(key);
            Ok(())
        }
        Ok(Err(Refusal::NoAlgorithm(reason))) => Err(KernelError::unsupported(
            NAME,
            "GEMM",
            described,
            format!("what cuBLASLt has an algorithm for ({reason})"),
        )),
        Ok(Err(failure)) => Err(KernelError::Launch { kernel: NAME, reason: format!("{described}: {failure}") }),
        Err(_) => Err(KernelError::Launch { kernel: NAME, reason: format!("{described}: {DEVICE_THREAD_GONE}") }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_names_a_missing_library_and_has_a_hint() {
        let text = KernelError::no_cublaslt().to_string();
        assert!(text.contains("libcublasLt") && text.contains("hint"), "{text}");
    }

    #[test]
    fn outputs_are_bf16_or_f32() {
        assert!(require_output_type(DType::BF16).is_ok());
        assert!(require_output_type(DType::F32).is_ok());
        let error = require_output_type(DType::Other("f16", 2)).expect_err("no f16").to_string();
        assert!(error.contains("f16"), "{error}");
    }
}
