//! What the layers of a decoding step on CUDA share, and the step as a captured graph.
use crate::Cuda;
use burn::tensor::{Int, Tensor, TensorData};
use sieve_kernels::{AttentionShape, CudaTensor, DecodeScratch, KernelError, StepGraph, device_of, kernel_tensor};

/// Scratch buffers have room for a multiple of this many keys, so that they are replaced only once in so many tokens.
pub(super) const SCRATCH_KEYS: usize = 256;

/// Tensors that all layers of a decode step use, created by the first layer.
#[derive(Clone, Debug, Default)]
pub struct CudaDecodeScratch {
    /// The length of every row, i32, by the number of rows and the length.
    pub(super) lengths: Recent<[usize; 2], CudaTensor>,
    /// For a run of new tokens of one text: the number of tokens before each, i32, then minus each. By the first of
    /// these numbers and how many there are.
    pub(super) runs: Recent<[usize; 2], CudaTensor>,
    pub(super) buffers: KernelScratch,
}

/// Buffers of the decode kernels, by a call's shape and the most keys that it sees. Each launch leaves the counters in
/// them at zero, so that all layers may share them.
pub(super) type KernelScratch = Recent<(AttentionShape, usize), DecodeScratch>;

/// A cache of the last few values created, by key. It holds four: NSA's branches use three in turn.
#[derive(Clone, Debug)]
pub(super) struct Recent<K, V>(Vec<(K, V)>);

impl<K, V> Default for Recent<K, V> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<K: PartialEq, V> Recent<K, V> {
    const MOST: usize = 4;

    /// The value of `key`, created by `new` if it is not among the last ones.
    pub(super) fn get(&mut self, key: K, new: impl FnOnce() -> Result<V, KernelError>) -> Result<&V, KernelError> {
        let found = self.0.iter().position(|(of, _)| *of == key);
        let at = match found {
            Some(at) => at,
            None => {
                let value = new()?;
                self.0.truncate(Self::MOST - 1);
                self.0.insert(0, (key, value));
                0
            }
        };
        Ok(&self.0[at].1)
    }
}

impl KernelScratch {
    /// Buffers on the device of `like` for a call of `shape` that sees at most `keys` keys.
    pub(super) fn for_call(
        &mut self,
        like: &CudaTensor,
        shape: AttentionShape,
        keys: usize,
    ) -> Result<&DecodeScratch, KernelError> {
        let keys = keys.next_multiple_of(SCRATCH_KEYS);
        self.get((shape, keys), || DecodeScratch::new(like, shape, keys))
    }
}

impl CudaDecodeScratch {
    /// A tensor with `length` for every row, and buffers for a call of `shape` that sees at most `keys` keys.
    pub(super) fn for_call(
        &mut self,
        like: &CudaTensor,
        shape: AttentionShape,
        length: usize,
        keys: usize,
    ) -> Result<(&CudaTensor, &DecodeScratch), KernelError> {
        let lengths = self.lengths.get([shape.batch, length], || {
            let data = TensorData::new(vec![length as i32; shape.batch], [shape.batch]);
            let lengths = Tensor::<Cuda, 1, Int>::from_data(data, device_of(like));
            Ok(kernel_tensor(lengths.into_primitive()))
        });
        Ok((lengths?, self.buffers.for_call(like, shape, keys)?))
    }
}

/// The captured step, and for how many more tokens it is valid: until a cache's buffer or a scratch buffer must grow.
#[derive(Debug, Default)]
pub struct CudaStepGraph(pub(super) Option<(StepGraph, usize)>);

/// A clone starts without a captured graph, because its caches lie elsewhere.
impl Clone for CudaStepGraph {
    fn clone(&self) -> Self {
        Self::default()
    }
}
