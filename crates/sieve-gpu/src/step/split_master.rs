//! Launches of `kernels/split_master.cu`: an f32 master weight as the model's bf16 leaf and the low 16 bits that the
//! leaf lacks (the rest).
//!
//! Leaf and rest represent the master exactly in 4 bytes, where an f32 master and a bf16 leaf take 6. The rest is
//! stored as a bf16 tensor whose values mean nothing as numbers.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, SourceKernel, params, require_non_empty};
use crate::step::require_alignment;

const NAME: &str = "split_master";

/// Parameter elements of a thread block.
const BLOCK_ELEMENTS: usize = 1024;

/// `(leaf, rest)` of a contiguous f32 `master`, both bf16 in its shape. The leaf is the master rounded to bf16, ties
/// away from zero; the 16 bits of the rest are what it lacks, so that [`join_master`] gives the master to the bit.
///
/// # Errors
/// Another type, gaps, no elements.
pub fn split_master(master: &CudaTensor) -> Result<(CudaTensor, CudaTensor), KernelError> {
    let num_elements = checked("master", master, DType::F32)?;
    let new = || master.empty_contiguous(master.shape(), DType::BF16);
    let (leaf, rest) = (new(), new());
    // SAFETY: reads `num_elements` elements, writes every element of leaf and rest; checked above.
    unsafe {
        split_master_kernel(Direction::Split).launch(
            grid(num_elements),
            &[master, &leaf, &rest],
            &params!(SplitMasterParams { num_elements }),
        )
    }?;
    Ok((leaf, rest))
}

/// The f32 master of a leaf and its rest.
///
/// # Errors
/// Other types, shapes that differ, gaps, no elements.
pub fn join_master(leaf: &CudaTensor, rest: &CudaTensor) -> Result<CudaTensor, KernelError> {
    let num_elements = checked("leaf", leaf, DType::BF16)?;
    checked("rest", rest, DType::BF16)?;
    rest.require_shape(NAME, "rest", leaf.shape())?;
    let master = leaf.empty_contiguous(leaf.shape(), DType::F32);
    // SAFETY: reads `num_elements` elements of both, writes every element of master; checked above.
    unsafe {
        split_master_kernel(Direction::Join).launch(
            grid(num_elements),
            &[leaf, rest, &master],
            &params!(SplitMasterParams { num_elements }),
        )
    }?;
    Ok(master)
}

/// Whether master weights are split into leaf and rest, or joined from them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// f32 master to bf16 leaf and low bits.
    Split,
    /// bf16 leaf and low bits to f32 master.
    Join,
}

/// The kernel that converts in one direction.
fn split_master_kernel(direction: Direction) -> SourceKernel {
    SourceKernel::new(NAME).define("JOIN", (direction == Direction::Join) as u8).threads(256)
}

/// Checks a tensor, and returns its number of elements.
fn checked(name: &'static str, tensor: &CudaTensor, dtype: DType) -> Result<usize, KernelError> {
    tensor.require_dtype(NAME, name, dtype)?;
    tensor.require_contiguous(NAME, name)?;
    require_alignment(NAME, name, tensor)?;
    let num_elements = tensor.num_elements();
    require_non_empty(NAME, "the number of elements", num_elements)?;
    Ok(num_elements)
}

fn grid(num_elements: usize) -> [usize; 3] {
    [num_elements.div_ceil(BLOCK_ELEMENTS), 1, 1]
}
