//! How processes that share rows exchange tensors.
use crate::tensors::Float;
use burn::tensor::backend::Backend;
#[cfg(feature = "cuda")]
use sieve_kernels::NcclGroup;
use std::fmt;
use std::ops::Range;

/// The processes that hold the parts of one row.
pub trait RankGroup: Send + Sync + fmt::Debug {
    /// Which part of every row this process holds.
    fn part(&self) -> usize;
    /// Parts of a row.
    fn num_parts(&self) -> usize;
    /// Sends each part's process its values, and returns the values received, `counts` of them part by part. All
    /// processes call it in the same order.
    ///
    /// A lost process is not reported here: zeros replace its values, and the next collective fails.
    fn exchange(&self, values: Vec<Vec<f32>>, counts: &[usize]) -> Vec<Vec<f32>>;
    /// The NCCL group of these processes, in the order of the parts, if their GPUs have one: tensors then move between
    /// GPUs without passing through host memory.
    #[cfg(feature = "cuda")]
    fn nccl(&self) -> Option<&NcclGroup> {
        None
    }
}

/// The GPUs that hold the parts of the same rows.
#[cfg(feature = "cuda")]
impl RankGroup for NcclGroup {
    fn part(&self) -> usize {
        self.place()[0]
    }

    fn num_parts(&self) -> usize {
        self.place()[1]
    }

    fn exchange(&self, _: Vec<Vec<f32>>, _: &[usize]) -> Vec<Vec<f32>> {
        unreachable!("tensors of a GPU travel by NCCL")
    }

    fn nccl(&self) -> Option<&NcclGroup> {
        Some(self)
    }
}

/// What this process sends to other parts' processes, and what it receives from them: tensors of one shape.
pub struct SendRecv<B: Backend> {
    /// Parts to send to, and what each gets.
    pub given: Vec<(usize, Float<B>)>,
    /// Parts that send a tensor to this process.
    pub from: Range<usize>,
    /// Shape of every tensor.
    pub shape: Vec<usize>,
    /// A tensor on this process's device with the dtype of all.
    pub like: Float<B>,
}
