//! Launch of `kernels/adamw.cu`: the AdamW update.
use crate::KernelError;
use crate::runtime::{AdamwParams, CudaTensor, DType, SourceKernel, operands, params, require_non_empty};
use crate::step::require_alignment;
use sieve_core::AdamWStep;

const NAME: &str = "adamw";

/// Parameter elements of a thread block.
const BLOCK_ELEMENTS: usize = 1024;

/// One parameter's tensors in an update, all contiguous and of one size.
#[derive(Debug, Clone, Copy)]
pub struct AdamwTensors<'a> {
    /// The f32 master weights, updated in place; or with a split master their low 16 bits as bf16 (see
    /// [`split_master`](crate::step::split_master())).
    pub param: &'a CudaTensor,
    /// First moment, f32, updated in place.
    pub exp_avg: &'a CudaTensor,
    /// Second moment, f32, updated in place.
    pub exp_avg_sq: &'a CudaTensor,
    /// Gradient, f32.
    pub grad: &'a CudaTensor,
    /// Factor on the gradient, f32 `[1]`. If it is 0 or not finite, the update is skipped.
    pub grad_scale: &'a CudaTensor,
    /// bf16 weights of the model, overwritten by the rounded master weights; `None` without a bf16 copy.
    pub leaf: Option<&'a CudaTensor>,
}

impl AdamwTensors<'_> {
    /// One AdamW update in place (arXiv:1711.05101, algorithm 2). Every clone of the tensors shares the change.
    ///
    /// # Errors
    /// Another type, sizes that differ, gaps, no elements.
    pub fn adamw(self, step: AdamWStep) -> Result<(), KernelError> {
        let num_elements = self.param.num_elements();
        require_non_empty(NAME, "the number of elements", num_elements)?;
        let (master, param_type) = match (self.leaf, self.param.dtype()) {
            (Some(_), DType::BF16) => (Master::Split, DType::BF16),
            (Some(_), _) => (Master::BesideLeaf, DType::F32),
            (None, _) => (Master::Alone, DType::F32),
        };
        let mut operands = vec![
            ("param", self.param, param_type),
            ("exp_avg", self.exp_avg, DType::F32),
            ("exp_avg_sq", self.exp_avg_sq, DType::F32),
            ("grad", self.grad, DType::F32),
        ];
        operands.extend(self.leaf.map(|leaf| ("leaf", leaf, DType::BF16)));
        for (name, tensor, dtype) in operands {
            tensor.require_dtype(NAME, name, dtype)?;
            tensor.require_contiguous(NAME, name)?;
            require_alignment(NAME, name, tensor)?;
            if tensor.num_elements() != num_elements {
                return Err(KernelError::shape(NAME, name, tensor.shape(), self.param.shape()));
            }
        }
        operands!(only NAME, grad_scale: F32[1] strided = self.grad_scale);
        let mut buffers = vec![self.param, self.exp_avg, self.exp_avg_sq, self.grad, self.grad_scale];
        buffers.extend(self.leaf);
        let grid = [num_elements.div_ceil(BLOCK_ELEMENTS), 1, 1];
        let kernel = adamw_kernel(master);
        // SAFETY: reads and writes `num_elements` elements of each tensor; sizes, types and layouts checked above.
        unsafe { kernel.launch(grid, &buffers, &params(&step, num_elements)) }
    }
}

/// The kernel's params struct. Factors are combined in f64 before they are rounded to f32.
fn params(step: &AdamWStep, num_elements: usize) -> AdamwParams {
    params!(AdamwParams {
        num_elements,
        beta1: step.beta1 as f32,
        beta2: step.beta2 as f32,
        eps: step.eps as f32,
        decay: (1.0 - step.lr * step.weight_decay) as f32,
        step_size: (step.lr / step.bias_correction1) as f32,
        inverse_c2: (1.0 / step.bias_correction2) as f32,
    })
}

/// How the master weights are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Master {
    /// f32 master weights, without a bf16 copy.
    Alone,
    /// f32 master weights beside separate bf16 weights.
    BesideLeaf,
    /// Split into bf16 weights and the masters' low 16 bits.
    Split,
}

/// The AdamW kernel for a form of master weights.
fn adamw_kernel(master: Master) -> SourceKernel {
    let kernel = SourceKernel::new(NAME).define("HAS_LEAF", (master != Master::Alone) as u8);
    match master {
        Master::Split => kernel.define("SPLIT_MASTER", 1),
        Master::Alone | Master::BesideLeaf => kernel,
    }
    .threads(256)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::words_for;

    #[test]
    fn params_hold_the_combined_factors() {
        let step = AdamWStep {
            lr: 0.5,
            beta1: 0.75,
            beta2: 0.5,
            eps: 0.25,
            weight_decay: 0.5,
            bias_correction1: 0.25,
            bias_correction2: 0.5,
        };
        // beta1, beta2, eps, 1 - lr * weight_decay, lr / bias_correction1, 1 / bias_correction2.
        let expected = [0.75f32, 0.5, 0.25, 0.75, 2.0, 2.0].map(|value| u64::from(value.to_bits()));
        let words = words_for(NAME, &params(&step, 12)).expect("its own struct");
        assert_eq!(words[0], 12);
        assert_eq!(words[1..], expected);
    }
}
