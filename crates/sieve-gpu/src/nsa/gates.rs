//! Launches of `kernels/nsa_gates*.cu`: the gated sum of NSA's three branches (arXiv:2502.11089, eq. 5).
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, SourceKernel, operand, operands, params, require, require_non_empty};
use crate::step::{column_sums, require_words};

const NAME: &str = "nsa_gates";

const BRANCHES: usize = 3;

/// Most threads that share a column in the sum of the bias's gradient; a power of two.
const MOST_SHARERS: usize = 256;

/// The widest heads: a warp sums a row.
const MAX_WIDTH: usize = 256;

/// Gradients that the backward pass of [`nsa_gates`] returns.
#[derive(Debug, Clone)]
pub struct GateGradients {
    /// Gradients of the three branches' outputs, bf16.
    pub branches: [CudaTensor; BRANCHES],
    /// Gradient of the gate logits, bf16.
    pub logits: CudaTensor,
    /// Gradient of the gate bias, f32.
    pub bias: CudaTensor,
}

/// Inputs of the forward and the backward kernel, made contiguous.
struct Inputs {
    branches: [CudaTensor; BRANCHES],
    logits: CudaTensor,
    bias: CudaTensor,
    /// Sizes of a branch's output, `[batch, seq_len, num_heads, head_dim]`.
    dims: [usize; 4],
}

impl Inputs {
    /// Checks the inputs, and copies those with gaps.
    fn new(branches: [&CudaTensor; BRANCHES], logits: &CudaTensor, bias: &CudaTensor) -> Result<Self, KernelError> {
        let dims: [usize; 4] = branches[0].dims(NAME, "a branch")?;
        let [batch, seq_len, heads, width] = dims;
        for branch in branches {
            operand(NAME, "a branch", branch, DType::BF16, &dims)?;
        }
        operands!(NAME,
            logits: BF16[batch, seq_len, heads * BRANCHES],
            bias: F32[heads * BRANCHES],
        );
        require_words(NAME, width)?;
        require!(width <= MAX_WIDTH, NAME, "head_dim": width, "up to {MAX_WIDTH}");
        require_non_empty(NAME, "the number of rows", batch * seq_len * heads)?;
        Ok(Self { branches: branches.map(CudaTensor::contiguous), logits, bias, dims })
    }

    fn rows(&self) -> usize {
        self.dims[..3].iter().product()
    }
}

/// `o = sum_c sigmoid(logits_c + bias_c) o_c` over the branches c: compressed, selected, window. Branches and o are
/// bf16 `[batch, seq_len, num_heads, head_dim]`, logits bf16 `[batch, seq_len, num_heads * 3]` and bias f32 `[num_heads
/// * 3]`, both with the branch as the fastest index.
///
/// # Errors
/// Other types or sizes.
pub fn nsa_gates(
    branches: [&CudaTensor; BRANCHES],
    logits: &CudaTensor,
    bias: &CudaTensor,
) -> Result<CudaTensor, KernelError> {
    let inputs = Inputs::new(branches, logits, bias)?;
    let [a, b, c] = &inputs.branches;
    let o = a.empty_contiguous(&inputs.dims, DType::BF16);
    let tensors = [a, b, c, &inputs.logits, &inputs.bias, &o];
    let words = o.num_elements() / 8;
    let [_, _, num_heads, width] = inputs.dims;
    let params = params!(NsaGatesParams { rows: inputs.rows(), num_heads, width });
    // SAFETY: sizes and types checked above; writes every element of o.
    unsafe { NSA_GATES.launch([words.div_ceil(256), 1, 1], &tensors, &params) }?;
    Ok(o)
}

/// Gradients of [`nsa_gates`].
///
/// # Errors
/// The errors of [`nsa_gates`].
pub fn nsa_gates_backward(
    branches: [&CudaTensor; BRANCHES],
    logits: &CudaTensor,
    bias: &CudaTensor,
    d_o: &CudaTensor,
) -> Result<GateGradients, KernelError> {
    let inputs = Inputs::new(branches, logits, bias)?;
    operands!(NAME, d_o: BF16(inputs.dims));
    let [batch, seq_len, heads, width] = inputs.dims;
    let new = || d_o.empty_contiguous(&inputs.dims, DType::BF16);
    let gradients = [new(), new(), new()];
    let num_gates = heads * BRANCHES;
    let d_logits = d_o.empty_contiguous(&[batch, seq_len, num_gates], DType::BF16);
    // The gradient of the bias is the sum of the logits' gradients before their rounding to bf16.
    let exact = d_o.empty_contiguous(&[batch * seq_len, num_gates], DType::F32);
    let lanes = (width / 8).next_power_of_two();
    let params = params!(NsaGatesBackwardParams { rows: inputs.rows(), num_heads: heads, width, lanes });
    let [a, b, c] = &inputs.branches;
    let [da, db, dc] = &gradients;
    let tensors = [a, b, c, &inputs.logits, &inputs.bias, &d_o, da, db, dc, &d_logits, &exact];
    let grid = [inputs.rows().div_ceil(256 / lanes), 1, 1];
    // SAFETY: sizes and types checked above; writes every element of the outputs.
    unsafe { NSA_GATES_BACKWARD.launch(grid, &tensors, &params) }?;
    let bias = sum_rows(&exact, num_gates)?;
    Ok(GateGradients { branches: gradients, logits: d_logits, bias })
}

/// Column sums of f32 `[rows, width]`. A thread sums a column, so a launch over few columns would have few threads: the
/// first launch sums the rows in up to [`MOST_SHARERS`] shares, the second adds the shares.
fn sum_rows(values: &CudaTensor, width: usize) -> Result<CudaTensor, KernelError> {
    let rows = values.num_elements() / width;
    // The largest power of two that divides the number of rows: this many rows become one wide row.
    let sharers = 1 << rows.trailing_zeros().min(MOST_SHARERS.trailing_zeros());
    let wide = values.reshaped(NAME, "gradients", &[rows / sharers, sharers * width])?;
    let [shares] = column_sums(&wide, [&[sharers, width]])?;
    let [sums] = column_sums(&shares, [&[width]])?;
    Ok(sums)
}

/// The kernel of the forward pass.
const NSA_GATES: SourceKernel = SourceKernel::new(NAME).threads(256);

/// The kernel of the backward pass.
const NSA_GATES_BACKWARD: SourceKernel = SourceKernel::new("nsa_gates_backward").threads(256);
