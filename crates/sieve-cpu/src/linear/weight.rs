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

/// Most products of a sum that are added before their sum is added to the result. The `gemm` crate takes as many at
/// once on every CPU, and on some CPUs more (`kc` in its `cache.rs`, which depends on the first cache's associativity).
const MAX_DEPTH: usize = 512;

/// The size of the blocks that an inner length of at least 1 is divided into: equal ones of at most [`MAX_DEPTH`], the
/// last one shorter. All kernels add block by block, so that a row gets the same bits from each.
pub(super) fn depth_of(d_in: usize) -> usize {
    d_in.div_ceil(d_in.div_ceil(MAX_DEPTH))
}

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
