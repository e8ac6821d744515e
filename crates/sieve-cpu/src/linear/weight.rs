//! A weight, and how its products are divided.

use half::bf16;

/// Weight of a linear layer, `[out, in]`, row-major.
#[derive(Clone, Copy, Debug)]
pub enum Weight<'a> {
    /// A weight stored in f32.
    F32(&'a [f32]),
    /// A weight stored in bf16, whose elements are multiplied by x rounded to bf16, or, on CPUs without `vdpbf16ps`,
    /// widened to f32 where they are multiplied by x.
    Bf16(&'a [bf16]),
}

/// Columns of the output that one task computes.
pub(super) const TASK_OUTPUTS: usize = 128;

/// The `gemm` crate splits the inner length into equal blocks of at most this size (`kc` in its `cache.rs`) and adds
/// each block's sum to the result. `few_rows` does the same, to get the same bits.
pub(super) const MAX_DEPTH: usize = 512;

impl Weight<'_> {
    /// Number of elements of the weight.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(weight) => weight.len(),
            Self::Bf16(weight) => weight.len(),
        }
    }

    /// Whether the weight has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
