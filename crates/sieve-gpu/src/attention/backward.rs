//! Launches of `kernels/attention_backward*.cu`: gradients of dense causal and sliding-window attention.
use crate::KernelError;
use crate::attention::{
    AttentionResult, AttentionShape, BackwardTiling, Bias, Heads, KernelFamily, KeySource, PassInputs, Qkv, QueryPass,
    QueryShares, SeenKeys, hopper_attention_backward_prepare_kernel, require_per_key, require_scale,
};
use crate::runtime::{
    CudaTensor, DType, SourceKernel, SumOrder, operands, params, require, require_non_empty, require_tokens,
};
use crate::step::{column_sums, empty_zero};

const NAME: &str = "attention_backward";

/// The f32 buffers beside q (log-sum-exps, row sums, sums of dq) have a multiple of this many tokens, so that a step of
/// the backward kernels never reads past their end.
const ROW_ALIGNMENT: usize = 64;

/// What a backward attention call is given.
#[derive(Debug, Clone, Copy)]
pub struct AttentionGradients<'a> {
    /// The inputs of the forward call.
    pub qkv: &'a Qkv,
    /// What the forward call returned.
    pub result: &'a AttentionResult,
    /// Gradient of the output, bf16 `[batch, seq_len, num_heads, head_dim_v]`.
    pub d_o: &'a CudaTensor,
    /// Where dq, dk and dv are written: every element of these heads. Contiguous tensors, packed or separate.
    pub grads: &'a Qkv,
    /// The scale of the forward call.
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
        let shape = self.qkv.shape(NAME)?;
        let qkv = self.qkv.with_kernel_strides();
        require_gradients(NAME, &self, &shape)?;
        let window = window.unwrap_or(shape.seq_len).min(shape.seq_len);
        require_non_empty(NAME, "window", window)?;
        let [doc_start, doc_end] = documents;
        let tokens = [shape.batch, shape.seq_len];
        let doc_start = require_tokens(NAME, "doc_start", doc_start, tokens)?;
        let doc_end = require_tokens(NAME, "doc_end", doc_end, tokens)?;
        let bias = bias
            .map(|bias| {
                let bias = require_per_key(NAME, "bias", bias, &shape)?;
                let keys = SeenKeys::Neighbours(&doc_start, window);
                Bias::with_base(bias, self.result.base.as_ref(), keys, &shape)
            })
            .transpose()?;
        let source = if bias.is_some() {
            KeySource::Biased
        } else {
            KeySource::Dense
        };
        let d_o = self.d_o.contiguous();
        let pass = PassInputs {
            name: NAME,
            qkv: &qkv,
            d_o: Some(&d_o),
            shape: &shape,
            source,
        };
        let stats = row_stats(&self, &d_o, &shape)?;
        let sum_shape = dq_sum_shape(&shape, padded_len(shape.seq_len));
        let [dq_sum, dq_semaphores] = match (self.qkv.policy().sums, pass.family()) {
            (SumOrder::Any, _) => [Some(empty_zero(&d_o, &sum_shape)?), None],
            // The first tile of keys stores, so the sums need no zeros. A semaphore holds the key tile that adds next.
            (SumOrder::Fixed, KernelFamily::Hopper) => {
                let semaphores = [shape.batch, shape.num_heads, sum_shape[2] / ROW_ALIGNMENT];
                [
                    Some(d_o.empty_contiguous(&sum_shape, DType::F32)),
                    Some(empty_zero(&d_o, &semaphores)?),
                ]
            }
            (SumOrder::Fixed, KernelFamily::Portable) => [None, None],
        };
        let tiles = pass.key_tiles()?;
        let shares = match qkv.policy().blocks_per_tile {
            Some(count) => QueryShares::of_count(count, shape.group_size()),
            None => QueryShares::of_neighbours(&shape, window, tiles),
        };
        // Of dk and dv as their sums lie in registers; of the bias's gradient, row after row.
        let parts = (shares != QueryShares::ONE).then(|| {
            // As `AttentionShape::key_part_bytes` counts them.
            let rows = shares.count() * padded_len(shape.seq_len);
            let of = |width| d_o.empty_contiguous(&[shape.batch, shape.num_kv_heads, rows, width], DType::F32);
            [of(shape.head_dim), of(shape.head_dim_v)]
        });
        let [dk_to, dv_to] = match &parts {
            Some([dk, dv]) => [dk, dv],
            None => [self.grads.k.tensor(), self.grads.v.tensor()],
        };
        let dbias = bias.as_ref().map(|bias| match &parts {
            Some(_) => bias
                .delta
                .empty_contiguous(&[shares.count(), bias.delta.num_elements()], DType::F32),
            None => bias.delta.empty_contiguous(bias.delta.shape(), DType::F32),
        });
        let inputs = [qkv.q.tensor(), qkv.k.tensor(), qkv.v.tensor(), &d_o, &stats];
        let (base, softmax_scale) = (qkv.params(NAME, &shape)?, self.softmax_scale);
        let padded_len = padded_len(shape.seq_len);
        let by_query = params!(AttentionRowSumsParams {
            base: params!(AttentionForwardParams {
                base,
                window,
                softmax_scale
            }),
            padded_len,
        });
        let [dq, dk, dv] = self.grads.head_words(NAME)?;

        if let (Some(bias), None) = (&bias, &self.result.o_low) {
            // do . o from a rounded o would dominate the gradients where a bias peaks the softmax.
            let mut tensors = inputs.to_vec();
            tensors.push(&doc_start);
            tensors.extend(bias.tensors());
            let (kernel, grid, maps) = pass.by_query(QueryPass::RowSums)?;
            // SAFETY: sizes, strides and types checked above; replaces the second number of each query's stats; the
            // maps are of q, k, v and d_o, which are among the tensors.
            unsafe { kernel.launch_with_maps(grid, &maps, &tensors, &by_query) }?;
        }
        for set in BackwardTiling::launches(&shape, dq_sum.is_some()) {
            let params = params!(AttentionBackwardParams {
                base,
                [dk_offset, dk_token_stride, dk_batch_stride]: dk,
                [dv_offset, dv_token_stride, dv_batch_stride]: dv,
                window,
                softmax_scale,
                padded_len,
                head_shares: shares.heads,
                query_shares: shares.queries,
            });
            let mut tensors = inputs.to_vec();
            tensors.push(&doc_end);
            tensors.extend(bias.iter().flat_map(Bias::tensors));
            tensors.extend(dq_sum.as_ref().filter(|_| set.dq));
            tensors.extend(&dq_semaphores);
            tensors.extend(set.dk.then_some(dk_to));
            tensors.extend(set.dv.then_some(dv_to));
            tensors.extend(dbias.as_ref().filter(|_| set.dk));
            let (mut kernel, maps) = pass.by_key(set, shares)?;
            if dq_semaphores.is_some() && source == KeySource::Dense && window < shape.seq_len {
                kernel = head_by_head(kernel);
            }
            let blocks = shape.seq_len.div_ceil(tiles.block_kv);
            let grid = [blocks, shape.num_kv_heads * shares.count(), shape.batch];
            // SAFETY: sizes, strides and types checked above; writes every element of dk, dv and dbias, or of their
            // partial sums, adds to dq_sum; the maps are of q and d_o, which are among the tensors.
            unsafe { kernel.launch_with_maps(grid, &maps, &tensors, &params) }?;
        }
        let dbias = match (&parts, dbias) {
            (None, dbias) => dbias,
            (Some([dk_parts, dv_parts]), dbias_parts) => {
                let rows = [padded_len, 0];
                convert_sums(dk_parts, shares.count(), rows, (&self.grads.k, dk), softmax_scale)?;
                convert_sums(dv_parts, shares.count(), rows, (&self.grads.v, dv), 1.0)?;
                let sums = dbias_parts.map(|parts| column_sums(&parts, [&shape.per_key()]));
                sums.transpose()?.map(|[sum]| sum)
            }
        };
        if let Some(dq_sum) = &dq_sum {
            convert_dq(dq_sum, &self, padded_len, 0)?;
            return Ok(dbias);
        }
        let params = params!(AttentionBackwardQueryParams {
            base: by_query,
            [dq_offset, dq_token_stride, dq_batch_stride]: dq,
        });
        let mut tensors = inputs.to_vec();
        tensors.push(&doc_start);
        tensors.extend(bias.iter().flat_map(Bias::tensors));
        tensors.push(self.grads.q.tensor());
        let (kernel, grid, maps) = pass.by_query(QueryPass::Gradient)?;
        // SAFETY: sizes, strides and types checked above; writes every element of dq; the maps are of q, k, v and d_o,
        // which are among the tensors.
        unsafe { kernel.launch_with_maps(grid, &maps, &tensors, &params) }?;
        Ok(dbias)
    }
}

/// The kernel that prepares each row's statistics.
pub(crate) fn attention_backward_prepare_kernel(head_dim_v: usize) -> SourceKernel {
    SourceKernel::new("attention_backward_prepare")
        .define("HEAD_DIM_V", head_dim_v)
        .threads(256)
}

/// The kernel that turns sums of dq into bf16 rows.
pub(crate) fn attention_backward_convert_kernel(head_dim: usize) -> SourceKernel {
    SourceKernel::new("attention_backward_convert")
        .define("HEAD_DIM", head_dim)
        .threads(256)
}

/// The form of a Hopper kernel in a fixed order for windows.
pub(crate) fn head_by_head(kernel: SourceKernel) -> SourceKernel {
    kernel.define("HEAD_BY_HEAD", 1)
}

/// The kernel that adds up parts of dk or dv.
pub(crate) fn attention_backward_join_kernel(width: usize) -> SourceKernel {
    attention_backward_convert_kernel(width).define("SUM_PARTS", 1)
}

/// Tokens of those buffers.
pub(crate) fn padded_len(seq_len: usize) -> usize {
    seq_len.next_multiple_of(ROW_ALIGNMENT)
}

/// Shape of the f32 sums of dq for some rows of every head: tiles of 16 rows by 8 columns as tensor cores hold them.
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

/// `{lse in base 2, sum_c o_c do_c}` of each query row, padded.
pub(crate) fn row_stats(
    call: &AttentionGradients,
    d_o: &CudaTensor,
    shape: &AttentionShape,
) -> Result<CudaTensor, KernelError> {
    let padded = padded_len(shape.seq_len);
    let stats = d_o.empty_contiguous(&[shape.batch, shape.num_heads, padded, 2], DType::F32);
    // Lanes that share a row: 16 bytes each, in powers of two.
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

/// Writes the bf16 rows of dq from `rows` rows of sums that begin at `first_query`.
pub(crate) fn convert_dq(
    dq_sum: &CudaTensor,
    call: &AttentionGradients,
    rows: usize,
    first_query: usize,
) -> Result<(), KernelError> {
    let [dq, _, _] = call.grads.head_words(NAME)?;
    let grad = (&call.grads.q, dq);
    convert_sums(dq_sum, 1, [rows, first_query], grad, call.softmax_scale)
}

/// Converts `rows` rows of a gradient, from `first_row` on, to bf16; the f32 sums are in the column order of tensor
/// core accumulators, `num_parts` partial sums for each head.
fn convert_sums(
    sums: &CudaTensor,
    num_parts: usize,
    [rows, first_row]: [usize; 2],
    (grad, layout): (&Heads, [u64; 3]),
    scale: f32,
) -> Result<(), KernelError> {
    let [batch, seq_len, _, width] = grad.tensor().dims(NAME, "gradient")?;
    // A warp turns 16 rows of 32 columns; a block has eight warps.
    let warps = batch * grad.num_heads() * (rows / 16) * width.div_ceil(32);
    let params = params!(AttentionBackwardConvertParams {
        batch,
        seq_len,
        num_heads: grad.num_heads(),
        sum_len: rows,
        first_query: first_row,
        [dq_offset, dq_token_stride, dq_batch_stride]: layout,
        scale,
        num_parts,
    });
    let kernel = match num_parts {
        1 => attention_backward_convert_kernel(width),
        _ => attention_backward_join_kernel(width),
    };
    // SAFETY: reads `rows` rows of each part of a head's sums; rows past the sequence are skipped.
    unsafe { kernel.launch([warps.div_ceil(8), 1, 1], &[sums, grad.tensor()], &params) }
}
