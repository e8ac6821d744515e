//! The pass by key tiles of attention's backward kernels: dk, dv, the gradient of a bias, and the sums of dq.
use crate::KernelError;
use crate::attention::{
    AttentionGradients, AttentionShape, BackwardTiling, Bias, FarWords, KernelFamily, KeySource, PassInputs, Qkv,
    QueryShares, ROW_ALIGNMENT, SinkChunks, convert_sums, dq_sum_shape, padded_len,
};
use crate::runtime::{AttentionParams, CudaTensor, DType, SourceKernel, SumOrder};
use crate::step::{column_sums, empty_zero};

const NAME: &str = "attention_backward";

/// The queries that a pass visits for each tile of keys.
#[derive(Debug, Clone, Copy)]
pub(crate) enum KeySteps<'a> {
    /// The queries that see a key of the tile: from the key on, at most `window` of them, up to the end of the key's
    /// document, i32 `[batch, seq_len]`.
    Neighbours { doc_end: &'a CudaTensor, window: usize },
    /// The same, and the queries that see a key of the tile beyond that window; `documents`: first token and end of
    /// each token's document.
    Bands { documents: [&'a CudaTensor; 2], window: usize, far: FarWords },
    /// Steps of a list. The batch has one row, and there is no bias.
    Listed(TileLists<'a>),
}

/// The steps of each share of a KV head's query heads and tile of keys, as `kernels/common/tile_steps.cuh` describes
/// them.
#[derive(Debug, Clone, Copy)]
pub struct TileLists<'a> {
    /// i32 in a row.
    pub words: &'a CudaTensor,
    /// Shares of a KV head's query heads; divides their number.
    pub head_shares: usize,
}

/// The f32 sums of dq, and the semaphores that order the adds to them, `[batch, num_heads, tiles of 64 queries]`. The
/// portable kernels in a fixed order have neither: a pass by query computes dq.
#[derive(Debug)]
pub(crate) struct DqSums {
    pub(crate) sums: Option<CudaTensor>,
    pub(crate) semaphores: Option<CudaTensor>,
}

impl DqSums {
    /// Room for the sums of a pass, and zeros where its kernel adds to them.
    pub(crate) fn new(pass: &PassInputs<'_>, d_o: &CudaTensor) -> Result<Self, KernelError> {
        let sum_shape = dq_sum_shape(pass.shape, padded_len(pass.shape.seq_len));
        Ok(match (pass.qkv.policy().sums, pass.family()) {
            (SumOrder::Any, _) => Self { sums: Some(empty_zero(d_o, &sum_shape)?), semaphores: None },
            // The first key tile stores instead of adding, so only the semaphores begin at zero.
            (SumOrder::Fixed, KernelFamily::Hopper) => {
                let [batch, num_heads, rows, _] = sum_shape;
                let semaphores = [batch, num_heads, rows / ROW_ALIGNMENT];
                let sums = d_o.empty_contiguous(&sum_shape, DType::F32);
                Self { sums: Some(sums), semaphores: Some(empty_zero(d_o, &semaphores)?) }
            }
            (SumOrder::Fixed, KernelFamily::Portable) => Self { sums: None, semaphores: None },
        })
    }
}

/// The fields that the params structs of both backward kernels by key tiles share: the kernel over consecutive keys,
/// and the kernel over lists of keys.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GradientWords {
    pub(crate) base: AttentionParams,
    /// Offset, token stride and batch stride of the gradient of keys, and of values.
    pub(crate) dk: [usize; 3],
    pub(crate) dv: [usize; 3],
    pub(crate) softmax_scale: f32,
    /// Tokens of the buffers per query.
    pub(crate) padded_len: usize,
}

impl GradientWords {
    /// The fields of a call with heads `qkv`, whose strides kernels take.
    pub(crate) fn new(
        kernel: &'static str,
        call: &AttentionGradients<'_>,
        qkv: &Qkv,
        shape: &AttentionShape,
    ) -> Result<Self, KernelError> {
        let [_, dk, dv] = call.grads.head_words(kernel)?;
        let (base, softmax_scale) = (qkv.params(kernel, shape)?, call.softmax_scale);
        Ok(Self { base, dk, dv, softmax_scale, padded_len: padded_len(shape.seq_len) })
    }
}

/// The params struct of a backward kernel by key tiles: the fields that are in [`GradientWords`], then, behind the `;`,
/// the struct's own.
macro_rules! gradient_params {
    ($name:ident { $words:expr; $($own:tt)* }) => {
        $crate::runtime::params!($name {
            { base, softmax_scale, padded_len }: $words,
            [dk_offset, dk_token_stride, dk_batch_stride]: $words.dk,
            [dv_offset, dv_token_stride, dv_batch_stride]: $words.dv,
            $($own)*
        })
    };
}
pub(crate) use gradient_params;

/// The operands of a pass by key tiles, whose sizes, strides and types are checked.
pub(crate) struct KeyPass<'a> {
    pub(crate) call: &'a AttentionGradients<'a>,
    pub(crate) pass: &'a PassInputs<'a>,
    /// The gradient of the output, contiguous.
    pub(crate) d_o: &'a CudaTensor,
    /// `{log-sum-exp, row sum}` of each query.
    pub(crate) stats: &'a CudaTensor,
    pub(crate) bias: Option<&'a Bias>,
    pub(crate) steps: KeySteps<'a>,
}

impl KeyPass<'_> {
    /// The tensors that the kernels begin with; `bounds` are documents or lists.
    pub(crate) fn inputs<'b>(&'b self, bounds: &'b CudaTensor) -> Vec<&'b CudaTensor> {
        let qkv = self.pass.qkv;
        let inputs = [qkv.q.tensor(), qkv.k.tensor(), qkv.v.tensor(), self.d_o, self.stats, bounds];
        inputs.into_iter().chain(self.bias.iter().flat_map(|bias| bias.tensors())).collect()
    }

    /// Launches the pass; writes every element of dk and dv. Returns the bias's gradient, f32
    /// `[batch, num_kv_heads, seq_len]`, if there is a bias.
    pub(crate) fn launch(&self, dq_sums: &DqSums) -> Result<Option<CudaTensor>, KernelError> {
        let Self { call, pass, d_o, bias, steps, .. } = *self;
        let (shape, qkv) = (pass.shape, pass.qkv);
        let (window, bounds, far) = match steps {
            KeySteps::Neighbours { doc_end, window } => (window, doc_end, FarWords::default()),
            KeySteps::Bands { documents: [_, doc_end], window, far } => (window, doc_end, far),
            KeySteps::Listed(lists) => (shape.seq_len, lists.words, FarWords::default()),
        };
        let chunks = SinkChunks::of(pass, far);
        // The Hopper kernel's blocks of first keys leave sums of theirs.
        let chunk_sums = match (steps, pass.family()) {
            (KeySteps::Bands { .. }, KernelFamily::Hopper) => Some(chunks.buffers(shape, d_o)?),
            _ => None,
        };
        let tiles = pass.key_tiles()?;
        let shares = match (steps, qkv.policy().blocks_per_tile) {
            (KeySteps::Bands { .. }, _) => QueryShares::ONE,
            (KeySteps::Neighbours { .. }, Some(count)) => QueryShares::of_count(count, shape.group_size()),
            (KeySteps::Neighbours { .. }, None) => QueryShares::of_neighbours(shape, window, tiles),
            (KeySteps::Listed(lists), count) => {
                let wait = dq_sums.semaphores.is_some();
                QueryShares::of_tile_lists(lists.head_shares, count, shape, tiles, wait)
            }
        };
        // Thread blocks that share a key tile write partial dk and dv, in the element order of tensor core
        // accumulators. `key_part_bytes` counts these buffers for the memory plan.
        let parts = (shares != QueryShares::ONE).then(|| {
            let rows = shares.count() * padded_len(shape.seq_len);
            let partial_sums = |width| {
                let shape = [shape.batch, shape.num_kv_heads, rows, width];
                d_o.empty_contiguous(&shape, DType::F32)
            };
            [partial_sums(shape.head_dim), partial_sums(shape.head_dim_v)]
        });
        let [dk_to, dv_to] = match &parts {
            Some([dk, dv]) => [dk, dv],
            None => [call.grads.k.tensor(), call.grads.v.tensor()],
        };
        let dbias = bias.map(|bias| match &parts {
            Some(_) => bias.delta.empty_contiguous(&[shares.count(), bias.delta.num_elements()], DType::F32),
            None => bias.delta.empty_contiguous(bias.delta.shape(), DType::F32),
        });
        let words = GradientWords::new(NAME, call, qkv, shape)?;
        for set in BackwardTiling::launches(shape, dq_sums.sums.is_some()) {
            let params = gradient_params!(AttentionBackwardParams {
                words;
                window,
                head_shares: shares.heads,
                query_shares: shares.queries,
                { sink_tokens, first_distance, last_distance, num_bands, first_band }: far,
                { chunk_queries, sink_tiles }: chunks,
            });
            let mut tensors = self.inputs(bounds);
            if let KeySteps::Bands { documents: [doc_start, _], .. } = steps {
                tensors.push(doc_start);
            }
            tensors.extend(dq_sums.sums.as_ref().filter(|_| set.dq));
            tensors.extend(&dq_sums.semaphores);
            tensors.extend(chunk_sums.iter().flatten());
            tensors.extend(set.dk.then_some(dk_to));
            tensors.extend(set.dv.then_some(dv_to));
            tensors.extend(dbias.as_ref().filter(|_| set.dk));
            let is_window = matches!(steps, KeySteps::Neighbours { window, .. } if window < shape.seq_len);
            let head_by_head = pass.source == KeySource::Bands || (pass.source == KeySource::Dense && is_window);
            let (mut kernel, maps) = pass.by_key(set, shares, head_by_head)?;
            let blocks = shape.seq_len.div_ceil(tiles.block_kv) + chunks.num_blocks;
            let mut grid = [blocks, shape.num_kv_heads * shares.count(), shape.batch];
            if matches!(steps, KeySteps::Listed(_)) {
                kernel = by_tile_lists(kernel, pass.family());
                // Semaphores exist for the Hopper kernels in a fixed order alone: blocks go through the lists in the
                // order that these name, and wait for each other's sums.
                if dq_sums.semaphores.is_some() {
                    kernel = kernel.run_together();
                    grid = [tiles.at_once, 1, 1];
                }
            }
            // SAFETY: sizes, strides and types checked by the caller; writes every element of dk, dv and dbias, or of
            // their partial sums, and adds to the sums of dq; the maps read q and d_o, which are among the tensors.
            unsafe { kernel.launch_with_maps(grid, &maps, &tensors, &params) }?;
        }
        let Some([dk_parts, dv_parts]) = &parts else {
            return Ok(dbias);
        };
        let (num_rows, first_row) = (words.padded_len, 0);
        let rows = [num_rows, first_row];
        // The softmax scale is a factor of dk, not of dv.
        convert_sums((dk_parts, None), shares.count(), rows, (&call.grads.k, words.dk), words.softmax_scale)?;
        convert_sums((dv_parts, None), shares.count(), rows, (&call.grads.v, words.dv), 1.0)?;
        let sums = dbias.map(|parts| column_sums(&parts, [&shape.per_key()]));
        Ok(sums.transpose()?.map(|[sum]| sum))
    }
}

/// The form of a backward kernel that takes its steps from lists of query tiles (`tile_steps.cuh`).
fn by_tile_lists(kernel: SourceKernel, family: KernelFamily) -> SourceKernel {
    match family {
        KernelFamily::Hopper => kernel.in_file("hopper_sparse_attention_backward"),
        KernelFamily::Portable => kernel.define("TILE_LISTS", 1),
    }
}
