//! Launches of `kernels/sum_partials.cu` and `finish_sum.cu`: sums over one or many tensors, in an order that depends
//! on the tensors' sizes alone.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, SourceKernel, params, require_float, require_non_empty};
use crate::step::require_alignment;

const NAME: &str = "sum_partials";
const FINISH: &str = "finish_sum";

/// Elements of a thread block, which writes one partial sum.
const BLOCK_ELEMENTS: usize = 65536;

/// The term that is summed over all elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Term {
    /// The elements themselves.
    Value,
    /// The squares of the elements.
    Square,
}

/// A sum over tensors that are added one by one: one launch for each tensor, and one for the total.
#[derive(Debug)]
pub struct FixedSum {
    term: Term,
    partials: CudaTensor,
    /// Partial sums written so far.
    num_partials: usize,
}

impl FixedSum {
    /// An empty sum with room for tensors of `sizes` elements, on the device of `like`.
    pub fn new(like: &CudaTensor, term: Term, sizes: impl IntoIterator<Item = usize>) -> Self {
        let room: usize = sizes.into_iter().map(num_partials).sum();
        Self { term, partials: like.empty_contiguous(&[room.max(1)], DType::F32), num_partials: 0 }
    }

    /// Adds a tensor, f32 or bf16, of any shape.
    ///
    /// # Errors
    /// Another type, no elements, more partial sums than [`new`](Self::new) made room for.
    pub fn add(&mut self, x: &CudaTensor) -> Result<(), KernelError> {
        let is_bf16 = require_float(NAME, "the tensor's type", x)?;
        let num_elements = x.num_elements();
        require_non_empty(NAME, "the number of elements", num_elements)?;
        let x = x.contiguous();
        require_alignment(NAME, "the tensor", &x)?;
        let (count, room) = (num_partials(num_elements), self.partials.num_elements());
        if self.num_partials + count > room {
            return Err(KernelError::over_limit(NAME, "number of partial sums", self.num_partials + count, room));
        }
        let params = params!(SumPartialsParams { num_elements, first_partial: self.num_partials });
        // SAFETY: reads the tensor, writes `count` partial sums, for which there is room.
        unsafe { sum_partials_kernel(self.term, is_bf16).launch([count, 1, 1], &[&x, &self.partials], &params) }?;
        self.num_partials += count;
        Ok(())
    }

    /// The sum, f32 `[1]`.
    ///
    /// # Errors
    /// [`KernelError::Refused`] when nothing was added.
    pub fn total(self) -> Result<CudaTensor, KernelError> {
        let root = false;
        self.finish(root)
    }

    /// The root of the sum, f32 `[1]`; of a sum of squares this is the norm.
    ///
    /// # Errors
    /// The errors of [`total`](Self::total).
    pub fn root(self) -> Result<CudaTensor, KernelError> {
        let root = true;
        self.finish(root)
    }

    /// Launches the sum of the partial sums, and takes its root if `root`.
    fn finish(self, root: bool) -> Result<CudaTensor, KernelError> {
        require_non_empty(FINISH, "the number of tensors", self.num_partials)?;
        let out = self.partials.empty_contiguous(&[1], DType::F32);
        let params = params!(FinishSumParams { num_partials: self.num_partials });
        // SAFETY: reads the partial sums that were written, writes one element.
        unsafe { finish_sum_kernel(root).launch([1, 1, 1], &[&self.partials, &out], &params) }?;
        Ok(out)
    }

    /// Sum over one tensor, f32 or bf16; returns f32 `[1]`.
    ///
    /// # Errors
    /// The errors of [`FixedSum::add`].
    pub fn of(x: &CudaTensor, term: Term) -> Result<CudaTensor, KernelError> {
        let mut sum = Self::new(x, term, [x.num_elements()]);
        sum.add(x)?;
        sum.total()
    }
}

/// The specialisation for a term and an element type.
fn sum_partials_kernel(term: Term, is_bf16: bool) -> SourceKernel {
    SourceKernel::new(NAME).define("SQUARE", (term == Term::Square) as u8).define("IS_BF16", is_bf16 as u8).threads(256)
}

/// The specialisation for a sum or its root.
fn finish_sum_kernel(root: bool) -> SourceKernel {
    SourceKernel::new(FINISH).define("ROOT", u8::from(root)).threads(1024)
}

/// Partial sums of a tensor of `size` elements.
fn num_partials(size: usize) -> usize {
    size.div_ceil(BLOCK_ELEMENTS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_partial_sums_depends_on_the_size_alone() {
        assert_eq!(num_partials(1), 1);
        assert_eq!(num_partials(65536), 1);
        assert_eq!(num_partials(65537), 2);
        assert_eq!(num_partials(50280 * 2048), 1572);
    }
}
