//! Launch of `kernels/bias_base.cu`: the largest bias that each query sees. Attention subtracts it from all biases of
//! that query, so that logits keep their digits when biases are large.
use crate::KernelError;
use crate::attention::{AttentionShape, KeySource, define_list_queries, padded_len};
use crate::dma::KeyLists;
use crate::dma::oracle::SUPER_BLOCK;
use crate::runtime::{CudaTensor, DType, SourceKernel, operands, params};

/// The keys that queries see, of which the largest bias is taken.
#[derive(Debug, Clone, Copy)]
pub(crate) enum SeenKeys<'a> {
    /// Keys of the query's document (by `doc_start`) and of a window of this many tokens.
    Neighbours(&'a CudaTensor, usize),
    /// Keys in DMA's key lists.
    Listed(&'a KeyLists),
}

/// A bias per key and KV head (f32 `[batch, num_kv_heads, seq_len]`), and the largest of them that each query sees.
#[derive(Debug, Clone)]
pub(crate) struct Bias {
    /// The biases.
    pub(crate) delta: CudaTensor,
    /// The largest bias that each query sees, f32 `[batch, num_kv_heads, seq_len rounded up to 64]`.
    pub(crate) base: CudaTensor,
}

impl Bias {
    /// A bias with the base that a forward pass kept; without one the base is computed. `delta` and the tensors of
    /// `keys` must have the sizes of `shape`.
    pub(crate) fn new(
        delta: CudaTensor,
        base: Option<&CudaTensor>,
        keys: SeenKeys,
        shape: &AttentionShape,
    ) -> Result<Self, KernelError> {
        let (batch, heads, seq_len) = (shape.batch, shape.num_kv_heads, shape.seq_len);
        let padded = padded_len(seq_len);
        if let Some(base) = base {
            operands!("bias_base", base: F32[batch, heads, padded]);
            return Ok(Self { delta, base });
        }
        let base = delta.empty_contiguous(&[batch, heads, padded], DType::F32);
        // `reach` is the number of keys that a query looks back, or of entries in a list.
        let (kernel, mut tensors, reach) = match keys {
            SeenKeys::Neighbours(doc_start, window) => {
                (bias_base_kernel(KeySource::Biased, SUPER_BLOCK), vec![&delta, doc_start], window)
            }
            SeenKeys::Listed(lists) => {
                let kernel = bias_base_kernel(KeySource::Gathered, lists.queries);
                (kernel, vec![&delta, &lists.list, &lists.list_len], lists.capacity())
            }
        };
        tensors.push(&base);
        let queries = if let SeenKeys::Listed(lists) = keys { lists.queries } else { SUPER_BLOCK };
        let grid = [seq_len.div_ceil(queries), heads, batch];
        let params = params!(BiasBaseParams { seq_len, padded_len: padded, reach });
        // SAFETY: the caller checked sizes and types; lists name positions below seq_len; writes every element of base.
        unsafe { kernel.launch(grid, &tensors, &params) }?;
        Ok(Self { delta, base })
    }

    /// Delta and base, in the order of the kernels' arguments.
    pub(crate) fn tensors(&self) -> [&CudaTensor; 2] {
        [&self.delta, &self.base]
    }
}

/// The specialisation for a source of keys with a bias, with a thread for each of so many queries.
fn bias_base_kernel(source: KeySource, queries: usize) -> SourceKernel {
    let kernel = SourceKernel::new("bias_base").define("GATHER", (source == KeySource::Gathered) as u8);
    define_list_queries(kernel, queries).threads(queries)
}
