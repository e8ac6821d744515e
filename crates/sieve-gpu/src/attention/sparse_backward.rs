//! Gradients of attention under a mask of tiles: `kernels/*attention_backward.cu` with TILE_LISTS, and
//! `kernels/sparse_attention_backward_query.cu`.
use crate::KernelError;
use crate::attention::{
    AttentionGradients, AttentionShape, BLOCK_KV, DqSums, KeyPass, KeySource, KeySteps, LaunchRows, PassInputs,
    QueryPass, QueryTiling, TileLists, convert_added_dq, convert_dq, launch_rows_params, list_entries_in_flight,
    padded_len, require_gradients, row_stats, tiling_beside_entries,
};
use crate::dma::oracle::SUPER_BLOCK;
use crate::runtime::{CudaTensor, SourceKernel, operands, params, require};
use sieve_core::KeyMask;

const NAME: &str = "sparse_attention_backward_query";

impl AttentionGradients<'_> {
    /// Gradients of [`sparse_attention_forward`](crate::Qkv::sparse_attention_forward) with the same mask, of query and
    /// key tiles of 64 or 128, without permutations, single keys, windows and dense rows. `lists` name for each key
    /// tile the query tiles that see it. A query that sees no key gets dq = 0.
    ///
    /// # Errors
    /// Types or sizes that do not fit the forward call; another mask; a width whose tiles do not fit the device's
    /// shared memory.
    pub fn sparse_attention_backward(
        self,
        mask: &KeyMask<CudaTensor>,
        lists: TileLists<'_>,
    ) -> Result<(), KernelError> {
        let shape = self.qkv.shape(NAME)?;
        let qkv = self.qkv.with_kernel_strides();
        require_gradients(NAME, &self, &shape)?;
        require_tiles(mask, &shape)?;
        require_tile_lists(lists, &shape)?;
        let d_o = self.d_o.contiguous();
        let pass = PassInputs {
            name: NAME,
            qkv: &qkv,
            d_o: Some(&d_o),
            shape: &shape,
            source: KeySource::Dense,
            list_queries: SUPER_BLOCK,
        };
        let stats = row_stats(&self, &d_o, &shape)?;
        let steps = KeySteps::Listed(lists);
        let by_key = KeyPass { call: &self, pass: &pass, d_o: &d_o, stats: &stats, bias: None, steps };
        let dq_sums = DqSums::new(&pass, &d_o)?;
        by_key.launch(&dq_sums)?;
        let padded_len = padded_len(shape.seq_len);
        let first_query = 0;
        match (&dq_sums.sums, &dq_sums.semaphores) {
            (Some(sums), Some(semaphores)) => convert_added_dq(sums, semaphores, &self, padded_len),
            (Some(sums), None) => convert_dq(sums, &self, padded_len, first_query),
            (None, _) => self.dq_by_query(mask, &pass, [&d_o, &stats]),
        }
    }

    /// Computes dq query tile by query tile, where the pass over tiles of keys did not add it up.
    fn dq_by_query(
        &self,
        mask: &KeyMask<CudaTensor>,
        pass: &PassInputs<'_>,
        [d_o, stats]: [&CudaTensor; 2],
    ) -> Result<(), KernelError> {
        let (shape, qkv) = (pass.shape, pass.qkv);
        let rows = LaunchRows::of(mask);
        let [[dq_offset, dq_token_stride, dq_batch_stride], _, _] = self.grads.head_words(NAME)?;
        let params = params!(SparseAttentionBackwardQueryParams {
            base: launch_rows_params(qkv, mask, &rows, self.softmax_scale)?,
            padded_len: padded_len(shape.seq_len),
            dq_offset,
            dq_token_stride,
            dq_batch_stride,
        });
        let tiling = sparse_backward_query_tiling(shape, d_o.hardware().max_shared_bytes)?;
        let parts = mask.tiles.query_tile.div_ceil(tiling.block_rows());
        let grid = [mask.tiles.num_query_tiles() * parts, shape.num_heads, 1];
        let tensors = [qkv.q.tensor(), qkv.k.tensor(), qkv.v.tensor(), d_o, stats, &mask.words, self.grads.q.tensor()];
        let kernel = sparse_attention_backward_query_kernel(shape, &tiling);
        // SAFETY: the caller checked sizes, strides and types; every index was checked when the mask was built; the
        // mask's query tiles cover every query, so all of dq is written.
        unsafe { kernel.launch(grid, &tensors, &params) }
    }
}

/// Refuses masks of a different shape, and masks of more than tiles: the backward kernels know tiles alone.
fn require_tiles(mask: &KeyMask<CudaTensor>, shape: &AttentionShape) -> Result<(), KernelError> {
    let of_mask = [mask.shape.num_heads, mask.shape.num_kv_heads];
    let expected = AttentionShape::new(1, mask.shape.num_keys, of_mask, [shape.head_dim; 2]);
    require!(*shape == expected, NAME, "shape": format!("{shape:?}"), "the mask's {expected:?}");
    let places = &mask.places;
    let beside_tiles = [&places.col_ptr, &places.key_order, &places.query_order, &places.windows];
    let is_plain = beside_tiles.iter().all(|words| words.is_empty());
    let is_plain = is_plain && mask.dense_rows.is_empty() && mask.heads_per_list == 1;
    require!(is_plain, NAME, "mask": "with more than tiles", "only tiles, a list for each query head");
    let num_words = mask.places.num_words();
    operands!(only NAME, mask: I32[num_words] contiguous = &mask.words);
    Ok(())
}

/// Refuses lists that cannot name the query tiles of every key tile.
fn require_tile_lists(lists: TileLists<'_>, shape: &AttentionShape) -> Result<(), KernelError> {
    let TileLists { words: tile_lists, head_shares } = lists;
    let is_divisor = head_shares > 0 && shape.group_size().is_multiple_of(head_shares);
    require!(is_divisor, NAME, "head_shares": head_shares, "a divisor of {}", shape.group_size());
    let num_lists = shape.num_kv_heads * head_shares * shape.seq_len.div_ceil(BLOCK_KV);
    let [num_words] = tile_lists.dims(NAME, "tile_lists")?;
    // A number of blocks, where each list begins and the last ends, and the order of the lists.
    let least = 2 + 2 * num_lists;
    require!(num_words >= least, NAME, "number of words of tile_lists": num_words, "at least {least}");
    operands!(only NAME, tile_lists: I32[num_words] contiguous);
    Ok(())
}

/// The tiling of the pass by query: dense attention's, in the shared memory that the list entries leave.
///
/// # Errors
/// [`KernelError::Refused`] when no tiling fits the device.
fn sparse_backward_query_tiling(shape: &AttentionShape, max_shared_bytes: usize) -> Result<QueryTiling, KernelError> {
    tiling_beside_entries(NAME, QueryPass::Gradient, shape, max_shared_bytes)
}

/// The specialisation of the pass by query for a shape and tiling.
fn sparse_attention_backward_query_kernel(shape: &AttentionShape, tiling: &QueryTiling) -> SourceKernel {
    let entries = tiling.block_kv * 8 * list_entries_in_flight(tiling.num_stages);
    tiling
        .apply(SourceKernel::new(NAME), shape, KeySource::Dense)
        .shared_bytes(tiling.shared_bytes(shape, KeySource::Dense) + entries)
}
