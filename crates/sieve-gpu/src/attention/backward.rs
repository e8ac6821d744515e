//! Launches of `kernels/attention_backward*.cu`: gradients of dense causal and sliding-window attention.
use crate::KernelError;
use crate::attention::{
    AttentionResult, AttentionShape, Bias, DqSums, FarWords, Heads, KeyPass, KeySource, KeySteps, PassInputs, Qkv,
    QueryPass, SeenKeys, hopper_attention_backward_prepare_kernel, padded_len, require_scale,
};
use crate::dma::oracle::SUPER_BLOCK;
use crate::runtime::{CudaTensor, DType, SourceKernel, operands, params, require, require_non_empty};
use sieve_core::FarKeys;

const NAME: &str = "attention_backward";

/// Operands of a backward attention call.
#[derive(Debug, Clone, Copy)]
pub struct AttentionGradients<'a> {
    /// q, k and v of the forward call.
    pub qkv: &'a Qkv,
    /// Output and log-sum-exp of the forward call.
    pub result: &'a AttentionResult,
    /// Gradient of the output, bf16 `[batch, seq_len, num_heads, head_dim_v]`.
    pub d_o: &'a CudaTensor,
    /// The heads that receive dq, dk and dv; every element is written. Contiguous tensors, packed or separate.
    pub grads: &'a Qkv,
    /// Factor on `q.k`, as in the forward call.
    pub softmax_scale: f32,
}

impl AttentionGradients<'_> {
    /// Gradients of [`attention_forward`](crate::Qkv::attention_forward) with the same `documents` (`[start, end]`, i32
    /// `[batch, seq_len]`), `window` and `bias`. Returns the bias's gradient, f32 `[batch, num_kv_heads, seq_len]`, if
    /// there is a bias.
    ///
    /// # Errors
    /// Types or sizes that do not fit the forward call; a width whose tiles do not fit the device's shared memory.
    pub fn attention_backward(
        self,
        documents: [&CudaTensor; 2],
        window: Option<usize>,
        bias: Option<&CudaTensor>,
    ) -> Result<Option<CudaTensor>, KernelError> {
        self.backward(documents, (window, None), (bias, None))
    }

    /// [`attention_backward`](Self::attention_backward) of a part of each query's keys, a window of `window` keys at
    /// most. `stats` are [`row_stats`] of all of them.
    pub(crate) fn part_backward(
        self,
        documents: [&CudaTensor; 2],
        window: usize,
        stats: &CudaTensor,
    ) -> Result<(), KernelError> {
        self.backward(documents, (Some(window), None), (None, Some(stats))).map(drop)
    }

    /// Gradients of [`far_attention_forward`](crate::Qkv::far_attention_forward) with the same `documents`, `window`
    /// and `far`.
    ///
    /// # Errors
    /// As [`attention_backward`](Self::attention_backward).
    pub fn far_attention_backward(
        self,
        documents: [&CudaTensor; 2],
        window: usize,
        far: FarKeys,
    ) -> Result<(), KernelError> {
        self.backward(documents, (Some(window), Some(far)), (None, None)).map(drop)
    }

    /// Gradients of attention over a window of consecutive keys, and over keys beyond it or with a bias. Without
    /// [`row_stats`] they are computed.
    fn backward(
        self,
        documents: [&CudaTensor; 2],
        (window, far): (Option<usize>, Option<FarKeys>),
        (bias, stats): (Option<&CudaTensor>, Option<&CudaTensor>),
    ) -> Result<Option<CudaTensor>, KernelError> {
        let shape = self.qkv.shape(NAME)?;
        let qkv = self.qkv.with_kernel_strides();
        require_gradients(NAME, &self, &shape)?;
        let window = window.unwrap_or(shape.seq_len).min(shape.seq_len);
        require_non_empty(NAME, "window", window)?;
        let [doc_start, doc_end] = documents;
        let tokens = [shape.batch, shape.seq_len];
        operands!(NAME, doc_start: I32 tokens, doc_end: I32 tokens);
        let bias = bias
            .map(|bias| {
                operands!(NAME, bias: F32(shape.per_key()));
                let keys = SeenKeys::Neighbours(&doc_start, window);
                Bias::new(bias, self.result.base.as_ref(), keys, &shape)
            })
            .transpose()?;
        let source = KeySource::of_neighbours(bias.is_some(), far.is_some());
        let d_o = self.d_o.contiguous();
        let pass =
            PassInputs { name: NAME, qkv: &qkv, d_o: Some(&d_o), shape: &shape, source, list_queries: SUPER_BLOCK };
        let stats = match stats {
            Some(stats) => stats.clone(),
            None => row_stats(&self, &d_o, &shape)?,
        };
        let far_words = FarWords::new(NAME, far)?;
        let steps = match far {
            Some(_) => KeySteps::Bands { documents: [&doc_start, &doc_end], window, far: far_words },
            None => KeySteps::Neighbours { doc_end: &doc_end, window },
        };
        let by_key = KeyPass { call: &self, pass: &pass, d_o: &d_o, stats: &stats, bias: bias.as_ref(), steps };
        let (base, softmax_scale) = (qkv.params(NAME, &shape)?, self.softmax_scale);
        let base = params!(AttentionForwardParams { base, window, softmax_scale });
        let base = params!(AttentionRowSumsParams { base, padded_len: padded_len(shape.seq_len) });
        if bias.is_some() && self.result.o_low.is_none() {
            // Without `o_low` the row sums are recomputed as sum P dP. Their other form, do . o, has the rounding error
            // of o, which would dominate the gradients where a bias makes the softmax peaked.
            let (kernel, grid, maps) = pass.by_query(QueryPass::RowSums)?;
            // SAFETY: sizes, strides and types checked above; overwrites the row sum of each query in `stats`; the maps
            // read q, k, v and d_o, which are among the tensors.
            unsafe { kernel.launch_with_maps(grid, &maps, &by_key.inputs(&doc_start), &base) }?;
        }
        let dq_sums = DqSums::new(&pass, &d_o)?;
        let dbias = by_key.launch(&dq_sums)?;
        if let Some(sums) = &dq_sums.sums {
            let first_query = 0;
            convert_dq(sums, &self, padded_len(shape.seq_len), first_query)?;
            return Ok(dbias);
        }
        let [[dq_offset, dq_token_stride, dq_batch_stride], _, _] = self.grads.head_words(NAME)?;
        let params = params!(AttentionBackwardQueryParams {
            base,
            dq_offset,
            dq_token_stride,
            dq_batch_stride,
            { sink_tokens, first_distance, last_distance, num_bands, first_band }: far_words,
        });
        let mut tensors = by_key.inputs(&doc_start);
        tensors.push(self.grads.q.tensor());
        let (kernel, grid, maps) = pass.by_query(QueryPass::Gradient)?;
        // SAFETY: sizes, strides and types checked above; writes every element of dq; the maps read q, k, v and d_o,
        // which are among the tensors.
        unsafe { kernel.launch_with_maps(grid, &maps, &tensors, &params) }?;
        Ok(dbias)
    }
}

/// The kernel that computes `stats`, see [`row_stats`].
fn attention_backward_prepare_kernel(head_dim_v: usize) -> SourceKernel {
    SourceKernel::new("attention_backward_prepare").define("HEAD_DIM_V", head_dim_v).threads(256)
}

/// The kernel that converts f32 sums of dq to bf16 rows.
fn attention_backward_convert_kernel(head_dim: usize) -> SourceKernel {
    SourceKernel::new("attention_backward_convert").define("HEAD_DIM", head_dim).threads(256)
}

/// The kernel that converts f32 sums of dq and writes 0 where nothing was added, which the adds' semaphores tell.
fn attention_backward_convert_added_kernel(head_dim: usize) -> SourceKernel {
    attention_backward_convert_kernel(head_dim).define("SEMAPHORES", 1)
}

/// The kernel that adds up partial sums of dk or dv and converts them to bf16.
fn attention_backward_join_kernel(width: usize) -> SourceKernel {
    attention_backward_convert_kernel(width).define("SUM_PARTS", 1)
}

/// Shape of the f32 sums of dq for `rows` queries of every head. Inside a head, elements lie in tiles of 16 rows by 8
/// columns, in the order of tensor core accumulators.
pub(crate) fn dq_sum_shape(shape: &AttentionShape, rows: usize) -> [usize; 4] {
    [shape.batch, shape.num_heads, rows, shape.head_dim]
}

/// Checks a backward call's tensors against the forward call's sizes.
pub(crate) fn require_gradients(
    kernel: &'static str,
    call: &AttentionGradients,
    shape: &AttentionShape,
) -> Result<(), KernelError> {
    require_scale(kernel, call.softmax_scale)?;
    operands!(only kernel,
        o: BF16(shape.output()) contiguous = &call.result.o,
        d_o: BF16(shape.output()) strided = call.d_o,
        lse: F32(shape.lse()) contiguous = &call.result.lse,
    );
    if let Some(o_low) = &call.result.o_low {
        operands!(only kernel, o_low: BF16(shape.output()) contiguous);
    }
    let grads = call.grads.shape(kernel)?;
    require!(grads == *shape, kernel, "shape of the gradients": format!("{grads:?}"), "{shape:?}");
    Ok(())
}

/// `{log-sum-exp in base 2, row sum o . do}` of each query, f32 `[batch, num_heads, padded tokens, 2]`.
pub(crate) fn row_stats(
    call: &AttentionGradients,
    d_o: &CudaTensor,
    shape: &AttentionShape,
) -> Result<CudaTensor, KernelError> {
    let padded = padded_len(shape.seq_len);
    let stats = d_o.empty_contiguous(&[shape.batch, shape.num_heads, padded, 2], DType::F32);
    // Lanes of a warp that share a row: each takes 8 elements (16 bytes); a power of two.
    let row_lanes = (shape.head_dim_v / 8).next_power_of_two().max(2);
    let rows = shape.batch * padded * shape.num_heads;
    let grid = [rows.div_ceil(256 / row_lanes), 1, 1];
    let params = params!(AttentionBackwardPrepareParams {
        { batch, seq_len, num_heads }: shape,
        padded_len: padded,
    });
    let mut tensors = vec![&call.result.o];
    tensors.extend(call.result.o_low.as_ref());
    tensors.extend([d_o, &call.result.lse, &stats]);
    let kernel = match &call.result.o_low {
        Some(_) => hopper_attention_backward_prepare_kernel(shape.head_dim_v),
        None => attention_backward_prepare_kernel(shape.head_dim_v),
    };
    // SAFETY: sizes checked by require_gradients; writes every element of stats.
    unsafe { kernel.launch(grid, &tensors, &params) }?;
    Ok(stats)
}

/// Converts `rows` queries of `dq_sum`, from query `first_query` of a row on, to bf16 dq.
pub(crate) fn convert_dq(
    dq_sum: &CudaTensor,
    call: &AttentionGradients,
    rows: usize,
    first_query: usize,
) -> Result<(), KernelError> {
    let [dq, _, _] = call.grads.head_words(NAME)?;
    let grad = (&call.grads.q, dq);
    let num_parts = 1;
    convert_sums((dq_sum, None), num_parts, [rows, first_query], grad, call.softmax_scale)
}

/// Converts all `rows` queries of `dq_sum` to bf16 dq. A tile of
/// [`ROW_ALIGNMENT`](crate::attention::ROW_ALIGNMENT) queries whose semaphore is 0 gets a dq of 0: nothing was added to
/// its sums.
pub(crate) fn convert_added_dq(
    dq_sum: &CudaTensor,
    semaphores: &CudaTensor,
    call: &AttentionGradients,
    rows: usize,
) -> Result<(), KernelError> {
    let [dq, _, _] = call.grads.head_words(NAME)?;
    let (num_parts, first_row) = (1, 0);
    convert_sums((dq_sum, Some(semaphores)), num_parts, [rows, first_row], (&call.grads.q, dq), call.softmax_scale)
}

/// Converts `sum_len` rows of a gradient, from `first_row` on, times `scale` to bf16. Each head has `num_parts` partial
/// f32 sums in the order of tensor core accumulators, which are added first. `layout` is `{offset, token stride, batch
/// stride}` of the gradient. With semaphores, one for 64 rows, rows whose semaphore is 0 get a gradient of 0.
pub(crate) fn convert_sums(
    (sums, semaphores): (&CudaTensor, Option<&CudaTensor>),
    num_parts: usize,
    [sum_len, first_row]: [usize; 2],
    (grad, layout): (&Heads, [usize; 3]),
    scale: f32,
) -> Result<(), KernelError> {
    let [batch, seq_len, _, width] = grad.tensor().dims(NAME, "gradient")?;
    // A warp converts 16 rows of 32 columns; a block has eight warps.
    let warps = batch * grad.num_heads() * (sum_len / 16) * width.div_ceil(32);
    let params = params!(AttentionBackwardConvertParams {
        batch,
        seq_len,
        num_heads: grad.num_heads(),
        sum_len,
        first_query: first_row,
        [dq_offset, dq_token_stride, dq_batch_stride]: layout,
        scale,
        num_parts,
    });
    let kernel = match num_parts {
        1 => attention_backward_convert_kernel(width),
        _ => attention_backward_join_kernel(width),
    };
    let (kernel, mut tensors) = match semaphores {
        None => (kernel, vec![sums]),
        Some(semaphores) => (attention_backward_convert_added_kernel(width), vec![sums, semaphores]),
    };
    tensors.push(grad.tensor());
    // SAFETY: reads `sum_len` rows of each part of a head's sums, and a semaphore for 64 of them; rows past the
    // sequence are skipped.
    unsafe { kernel.launch([warps.div_ceil(8), 1, 1], &tensors, &params) }
}
