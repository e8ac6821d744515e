//! Launches of `kernels/attention_sinks_forward.cu` and `kernels/attention_sinks_backward.cu`: a learned logit of each
//! query head in the softmax, joined to attention that ran without it.
use super::AttentionResult;
use crate::KernelError;
use crate::runtime::{
    CudaTensor, DType, Params, SourceKernel, operands, params, require, require_float, require_non_empty,
};
use crate::step::column_sums::MAX_PARTIALS;
use crate::step::swiglu_forward::THREADS;
use crate::step::{column_sums, require_alignment, vector_width};

const FORWARD: &str = "attention_sinks_forward";
const BACKWARD: &str = "attention_sinks_backward";

/// Rows that a thread block of the backward kernel takes at a time: one a warp.
const BLOCK_ROWS: usize = THREADS / 32;

/// Most query heads: the second dimension of the backward kernel's grid.
const MAX_HEADS: usize = 65_535;

impl AttentionResult {
    /// Joins `sinks`, bf16 or f32 `[num_heads]`, to dense or sliding-window attention: scales o in place and returns
    /// the result with the log-sum-exp that counts the sinks. A backward pass of attention reads it like any other.
    /// Every clone of `o` shares the change.
    ///
    /// # Errors
    /// Types or sizes that do not fit, a result with biases, a tensor with gaps.
    pub fn with_sinks(self, sinks: &CudaTensor) -> Result<Self, KernelError> {
        let sizes = Sizes::of(FORWARD, &self, sinks)?;
        let Self { o, lse, .. } = &self;
        let joined = lse.empty_contiguous(lse.shape(), DType::F32);
        let grid = [(sizes.rows * sizes.num_heads * (sizes.width / sizes.vector)).div_ceil(THREADS), 1, 1];
        let sinks = &sinks.contiguous();
        // SAFETY: types, sizes and layouts checked above; reads and writes each element of o, writes each of joined.
        unsafe { sizes.kernel(FORWARD).launch(grid, &[o, lse, sinks, &joined], &sizes.params()) }?;
        Ok(Self { lse: joined, ..self })
    }

    /// Gradient of `sinks`, f32 `[num_heads]`, for the result of [`with_sinks`](Self::with_sinks) and the gradient of
    /// its o. The sums have a fixed order.
    ///
    /// # Errors
    /// Types or sizes that do not fit.
    pub fn sinks_gradient(&self, sinks: &CudaTensor, d_o: &CudaTensor) -> Result<CudaTensor, KernelError> {
        let sizes = Sizes::of(BACKWARD, self, sinks)?;
        let shape = [self.lse.shape()[0], sizes.seq_len, sizes.num_heads, sizes.width];
        operands!(BACKWARD, d_o: BF16(shape) aligned);
        let (blocks, heads) = (sizes.rows.div_ceil(BLOCK_ROWS).min(MAX_PARTIALS), sizes.num_heads);
        require!(heads <= MAX_HEADS, BACKWARD, "num_heads": heads, "up to {MAX_HEADS}");
        let partials = self.lse.empty_contiguous(&[blocks, heads], DType::F32);
        let tensors = [&self.o, &d_o, &self.lse, &sinks.contiguous(), &partials];
        // SAFETY: types, sizes and layouts checked above; writes each element of the partials.
        unsafe { sizes.kernel(BACKWARD).launch([blocks, heads, 1], &tensors, &sizes.params()) }?;
        let [gradient] = column_sums(&partials, [&[heads]])?;
        Ok(gradient)
    }
}

/// Sizes of a call, and what decides its specialisation.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    rows: usize,
    seq_len: usize,
    num_heads: usize,
    /// Columns of a value.
    width: usize,
    /// Columns that a thread reads at once: 1, or as many as 16 bytes have.
    vector: usize,
    sinks_bf16: bool,
}

impl Sizes {
    /// Checks a result of attention and the sinks.
    fn of(name: &'static str, result: &AttentionResult, sinks: &CudaTensor) -> Result<Self, KernelError> {
        let AttentionResult { o, lse, o_low, base } = result;
        let has_bias = base.is_some() || o_low.is_some();
        require!(!has_bias, name, "biases": "there", "none: sinks are of dense and window attention");
        let [batch, seq_len, num_heads, width] = o.dims(name, "o")?;
        operands!(only name,
            o: BF16[batch, seq_len, num_heads, width] contiguous,
            lse: F32[batch, num_heads, seq_len] contiguous,
        );
        let sinks_bf16 = require_float(name, "the sinks' type", sinks)?;
        sinks.require_shape(name, "sinks", &[num_heads])?;
        require_non_empty(name, "the number of elements", batch * seq_len * num_heads * width)?;
        let vector = vector_width(DType::BF16, &[width]);
        if vector > 1 {
            require_alignment(name, "o", o)?;
        }
        Ok(Self { rows: batch * seq_len, seq_len, num_heads, width, vector, sinks_bf16 })
    }

    fn params(self) -> impl Params {
        params!(AttentionSinksParams { { rows, seq_len, num_heads, width }: self })
    }

    fn kernel(self, name: &'static str) -> SourceKernel {
        sinks_kernel(name, self.vector, self.sinks_bf16)
    }
}

/// The kernel of a pass for values in vectors of this many columns, with bf16 or f32 sinks.
fn sinks_kernel(name: &'static str, vector: usize, sinks_bf16: bool) -> SourceKernel {
    let kernel = SourceKernel::new(name).define("IS_BF16", 1).define("VECTOR", vector);
    kernel.define("SINKS_BF16", sinks_bf16 as u8).threads(THREADS)
}
