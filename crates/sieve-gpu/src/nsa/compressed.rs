//! The compressed branch: `kernels/nsa_place.cu` and `kernels/nsa_compressed_lists.cu` prepare compressed keys and
//! their lists for DMA's attention kernels.
use super::choose::{attention_of_rows, log_sums_of_rows, nsa_choose};
use super::{Bounds, no_gap, require_bounds, require_row};
use crate::KernelError;
use crate::attention::{AttentionGradients, AttentionResult, AttentionShape, Heads, Qkv};
use crate::dma::oracle::SUPER_BLOCK;
use crate::dma::{KeyLists, LIST_ALIGNMENT, SumRows, listed_attention_forward, listed_key_sums};
use crate::runtime::{CudaTensor, DType, NsaPlaceParams, SourceKernel, operands, params, require};
use sieve_core::{BlockChoice, KeyOrder, NsaBlocks};

const NAME: &str = "nsa_compressed_attention";

/// The inputs of DMA's kernels: compressed keys and values, each at the position of its block's last token, and the
/// lists of these positions.
struct Placed {
    qkv: Qkv,
    lists: KeyLists,
}

impl Placed {
    /// Places keys and makes their lists. `sums`: f32 sums of dk and dv in a backward pass; listed rows are cleared.
    fn new(
        queries: &Heads,
        shape: &AttentionShape,
        documents: &[CudaTensor; 2],
        compressed: &CudaTensor,
        blocks: NsaBlocks,
        sums: Option<[&CudaTensor; 2]>,
    ) -> Result<Self, KernelError> {
        let tokens = [shape.batch, shape.seq_len, shape.num_kv_heads, shape.head_dim];
        let new = || compressed.empty_contiguous(&tokens, DType::BF16);
        let (k, v) = (new(), new());
        let [start, end] = documents;
        let mut tensors = vec![compressed, start, end, &k, &v];
        tensors.extend(sums.iter().flatten());
        let thread_blocks = blocks.num_slots(shape.seq_len) + shape.seq_len.div_ceil(SUPER_BLOCK);
        let grid = [thread_blocks, shape.batch, 1];
        let (take, scale) = (false, 1.0);
        let kernel = nsa_place_kernel(take, sums.is_some());
        let params = place_params(shape, blocks, scale);
        // SAFETY: the caller checked the sizes; writes the rows of k, v and the sums that the lists name. No other rows
        // are read later.
        unsafe { kernel.launch(grid, &tensors, &params) }?;
        Ok(Self {
            qkv: Qkv { q: queries.clone(), k: Heads::all(&k), v: Heads::all(&v) },
            lists: compressed_lists(shape, documents, blocks)?,
        })
    }
}

/// The params of [`nsa_place_kernel`]; `scale` is a factor on the gradients of keys.
fn place_params(shape: &AttentionShape, blocks: NsaBlocks, scale: f32) -> NsaPlaceParams {
    params!(NsaPlaceParams {
        { seq_len, num_heads, num_kv_heads }: shape,
        width: shape.head_dim,
        size: blocks.compress_block_size,
        stride: blocks.compress_stride,
        num_slots: blocks.num_slots(shape.seq_len),
        scale,
    })
}

/// The key lists of the compressed branch: of each super-block of 1024 queries, the blocks that they may see.
fn compressed_lists(
    shape: &AttentionShape,
    [start, end]: &[CudaTensor; 2],
    blocks: NsaBlocks,
) -> Result<KeyLists, KernelError> {
    let (batch, heads, seq_len) = (shape.batch, shape.num_kv_heads, shape.seq_len);
    let super_blocks = seq_len.div_ceil(SUPER_BLOCK);
    let capacity = blocks.num_slots(seq_len).next_multiple_of(LIST_ALIGNMENT);
    let new = |sizes: &[usize]| start.empty_contiguous(sizes, DType::I32);
    let list = new(&[batch, heads, super_blocks, capacity, 2]);
    let list_len = new(&[batch, heads, super_blocks]);
    let tile_window = new(&[batch, heads, seq_len.div_ceil(KeyLists::TILE_QUERIES), 2]);
    let params = params!(NsaCompressedListsParams {
        seq_len,
        size: blocks.compress_block_size,
        stride: blocks.compress_stride,
        capacity,
    });
    let tensors = [start, end, &list, &list_len, &tile_window];
    let grid = [super_blocks, heads, batch];
    // SAFETY: reads the bounds, writes the new tensors within their shapes; entries past a list's padding stay
    // undefined and are never read.
    unsafe { NSA_COMPRESSED_LISTS.launch(grid, &tensors, &params) }?;
    Ok(KeyLists { list, list_len, tile_window, tile_queries: KeyLists::TILE_QUERIES, queries: SUPER_BLOCK })
}

/// Checks queries, documents and pooled keys and values; returns their sizes, and the documents' bounds made
/// contiguous. There is a row of pooled keys for each slot and KV head, so that their number says how many KV heads
/// there are.
fn require_pooled(
    kernel: &'static str,
    queries: &Heads,
    documents: Bounds,
    pooled: &CudaTensor,
    blocks: NsaBlocks,
) -> Result<(AttentionShape, [CudaTensor; 2]), KernelError> {
    blocks.check();
    let [batch, seq_len, _, head_dim] = queries.sizes(kernel, "q")?;
    let [_, rows, _] = pooled.dims(kernel, "pooled keys and values")?;
    let slots = batch * blocks.num_slots(seq_len);
    require!(rows.is_multiple_of(slots), kernel, "number of pooled keys": rows, "multiples of the {slots} slots");
    let shape = queries.as_queries(kernel, rows / slots, head_dim)?;
    operands!(only kernel, pooled: BF16[2, rows, head_dim] strided);
    require_row(kernel, &shape, &[queries])?;
    let documents = require_bounds(kernel, documents, [batch, seq_len])?;
    Ok((shape, documents))
}

/// [`require_pooled`] for the compressed branch, which not all sizes of blocks have kernels for.
fn require_compressed(
    queries: &Heads,
    documents: Bounds,
    compressed: &CudaTensor,
    blocks: NsaBlocks,
) -> Result<(AttentionShape, [CudaTensor; 2]), KernelError> {
    let (shape, documents) = require_pooled(NAME, queries, documents, compressed, blocks)?;
    no_gap(NAME, blocks.cuda_gap(shape.head_dim, shape.group_size()))?;
    Ok((shape, documents))
}

impl Heads {
    /// Attention of these queries over the compressed keys and values, `compressed` bf16
    /// `[2, batch * num_slots * num_kv_heads, head_dim]`. A query that sees no compressed block gets `o = 0`,
    /// `lse = -inf`.
    ///
    /// Returns the attention's result, and the blocks that the selected branch chooses, i32
    /// `[batch, seq_len, num_kv_heads, num_selected_blocks]`: indices of blocks from the document's first token on,
    /// ascending, then -1. With [`KeyOrder::Epochs`] nothing of a query depends on later tokens: it has the bits of
    /// [`NsaToken::decode`](crate::NsaToken::decode) with sums in a fixed order.
    ///
    /// # Errors
    /// Another type than bf16, sizes that do not fit or have no kernel.
    pub fn nsa_compressed_attention_forward(
        &self,
        documents: Bounds,
        compressed: &CudaTensor,
        blocks: NsaBlocks,
        softmax_scale: f32,
    ) -> Result<(AttentionResult, CudaTensor), KernelError> {
        let first = 0;
        self.nsa_compressed_attention_of_last(documents, compressed, blocks, softmax_scale, first)
    }

    /// As [`nsa_compressed_attention_forward`](Self::nsa_compressed_attention_forward), where only the tokens from
    /// `first` on choose blocks; what the others choose is left undefined, and with [`KeyOrder::Epochs`] their result.
    ///
    /// # Errors
    /// As [`nsa_compressed_attention_forward`](Self::nsa_compressed_attention_forward), and no token from `first` on.
    pub fn nsa_compressed_attention_of_last(
        &self,
        documents: Bounds,
        compressed: &CudaTensor,
        blocks: NsaBlocks,
        softmax_scale: f32,
        first: usize,
    ) -> Result<(AttentionResult, CudaTensor), KernelError> {
        let (shape, documents) = require_compressed(self, documents, compressed, blocks)?;
        require!(first < shape.seq_len, NAME, "first token": first, "one of the {} of a row", shape.seq_len);
        let compressed = compressed.contiguous();
        let (bounds, choice) = (documents.each_ref(), BlockChoice::nsa(blocks));
        let result = if self.tensor().policy().keys == KeyOrder::Epochs {
            attention_of_rows(self, &shape, &compressed, bounds, (choice, first), softmax_scale)?
        } else {
            let (sums, delta) = (None, None);
            let placed = Placed::new(self, &shape, &documents, &compressed, blocks, sums)?;
            listed_attention_forward(&placed.qkv, delta, &placed.lists, softmax_scale)?
        };
        let indices = nsa_choose(self, &shape, [&compressed, &result.lse], bounds, (choice, first), softmax_scale)?;
        Ok((result, indices))
    }

    /// The blocks that each of these queries chooses by pooled keys, which are the first half of `pooled`, bf16
    /// `[2, batch * num_slots * num_kv_heads, head_dim]`. Returns i32
    /// `[batch, seq_len, choosers, num_selected_blocks]`: indices of blocks from the document's first token on,
    /// ascending, then -1. See [`BlockChoice`]. With [`KeyOrder::Epochs`] no probability depends on later tokens.
    ///
    /// # Errors
    /// Another type than bf16, sizes that do not fit or have no kernel.
    pub fn choose_key_blocks(
        &self,
        documents: Bounds,
        pooled: &CudaTensor,
        choice: BlockChoice,
        softmax_scale: f32,
    ) -> Result<CudaTensor, KernelError> {
        let first = 0;
        self.choose_key_blocks_of_last(documents, pooled, choice, softmax_scale, first)
    }

    /// As [`choose_key_blocks`](Self::choose_key_blocks) for the tokens from `first` on; what the others choose is left
    /// undefined.
    ///
    /// # Errors
    /// As [`choose_key_blocks`](Self::choose_key_blocks), and no token from `first` on.
    pub fn choose_key_blocks_of_last(
        &self,
        documents: Bounds,
        pooled: &CudaTensor,
        choice: BlockChoice,
        softmax_scale: f32,
        first: usize,
    ) -> Result<CudaTensor, KernelError> {
        const NAME: &str = "choose_key_blocks";
        let blocks = choice.blocks;
        let (shape, documents) = require_pooled(NAME, self, documents, pooled, blocks)?;
        no_gap(NAME, choice.cuda_gap(shape.head_dim, shape.group_size()))?;
        require!(first < shape.seq_len, NAME, "first token": first, "one of the {} of a row", shape.seq_len);
        let pooled = pooled.contiguous();
        let lse = if choice.rule.takes_scores() {
            // Rules that compare scores read no log-sum-exp: this tensor stands in for it.
            pooled.empty_contiguous(&[1], DType::F32)
        } else if self.tensor().policy().keys == KeyOrder::Epochs {
            let bounds = documents.each_ref();
            log_sums_of_rows(self, &shape, &pooled, bounds, (choice, first), softmax_scale)?
        } else {
            let (sums, delta) = (None, None);
            let placed = Placed::new(self, &shape, &documents, &pooled, blocks, sums)?;
            listed_attention_forward(&placed.qkv, delta, &placed.lists, softmax_scale)?.lse
        };
        nsa_choose(self, &shape, [&pooled, &lse], documents.each_ref(), (choice, first), softmax_scale)
    }

    /// The log-sum-exps of these queries over the pooled keys that they see, f32 `[batch, num_heads, seq_len]`, from
    /// which [`choose_key_blocks`](Self::choose_key_blocks) has probabilities with [`KeyOrder::Epochs`]. `pooled` and
    /// `choice` are as there.
    ///
    /// # Errors
    /// As [`choose_key_blocks`](Self::choose_key_blocks).
    pub fn pooled_log_sums(
        &self,
        documents: Bounds,
        pooled: &CudaTensor,
        choice: BlockChoice,
        softmax_scale: f32,
    ) -> Result<CudaTensor, KernelError> {
        const NAME: &str = "pooled_log_sums";
        let (shape, documents) = require_pooled(NAME, self, documents, pooled, choice.blocks)?;
        no_gap(NAME, choice.cuda_gap(shape.head_dim, shape.group_size()))?;
        let (pooled, first) = (pooled.contiguous(), 0);
        log_sums_of_rows(self, &shape, &pooled, documents.each_ref(), (choice, first), softmax_scale)
    }

    /// Gradients `[dqkv, dcompressed]` of the output of [`Self::nsa_compressed_attention_forward`]; the choice of
    /// blocks has no gradient. dqkv is packed, `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`, and zero for
    /// keys and values.
    ///
    /// # Errors
    /// The errors of the forward pass.
    pub fn nsa_compressed_attention_backward(
        &self,
        documents: Bounds,
        compressed: &CudaTensor,
        blocks: NsaBlocks,
        softmax_scale: f32,
        result: &AttentionResult,
        d_o: &CudaTensor,
    ) -> Result<[CudaTensor; 2], KernelError> {
        let (shape, documents) = require_compressed(self, documents, compressed, blocks)?;
        let compressed = compressed.contiguous();
        let (batch, seq_len, d) = (shape.batch, shape.seq_len, shape.head_dim);
        let (heads, kv_heads) = (shape.num_heads, shape.num_kv_heads);
        let new = |sizes: &[usize]| compressed.empty_contiguous(sizes, DType::BF16);
        let dqkv = new(&[batch, seq_len, heads + 2 * kv_heads, d]);
        let sums = || compressed.empty_contiguous(&[batch, kv_heads, seq_len, d], DType::F32);
        let sums = [&sums(), &sums()];
        let placed = Placed::new(self, &shape, &documents, &compressed, blocks, Some(sums))?;
        let grads = Qkv::packed(&dqkv, heads, kv_heads);
        let call = AttentionGradients { qkv: &placed.qkv, result, d_o, grads: &grads, softmax_scale };
        let delta = None;
        listed_key_sums(&call, delta, &placed.lists, sums, SumRows::Cleared)?;
        let d_compressed = new(compressed.shape());
        let [start, end] = &documents;
        let tensors = [sums[0], sums[1], start, end, &d_compressed, &dqkv];
        let (take, clears_sums) = (true, false);
        let kernel = nsa_place_kernel(take, clears_sums);
        let params = place_params(&shape, blocks, softmax_scale);
        // SAFETY: reads sums that were cleared, writes every element of d_compressed and the keys and values of dqkv.
        unsafe { kernel.launch([seq_len, batch, 1], &tensors, &params) }?;
        Ok([dqkv, d_compressed])
    }
}

/// The kernel between compressed blocks and the positions of their last tokens. Without `take` it copies compressed
/// keys and values to these positions, and with `sums` clears the gradient sums there; with `take` it copies gradients
/// back.
fn nsa_place_kernel(take: bool, sums: bool) -> SourceKernel {
    SourceKernel::new("nsa_place").define("TAKE", u8::from(take)).define("SUMS", u8::from(sums)).threads(128)
}

/// The kernel that builds the compressed branch's key lists.
const NSA_COMPRESSED_LISTS: SourceKernel = SourceKernel::new("nsa_compressed_lists").threads(256);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Hardware, Recorder};

    #[test]
    fn the_number_of_pooled_keys_says_how_many_kv_heads_there_are() {
        let gpu = Recorder::new(Hardware::HOPPER);
        let queries = Heads::all(&gpu.tensor(&[1, 160, 8, 64], DType::BF16));
        let bound = gpu.tensor(&[1, 160], DType::I32);
        // A row of 160 tokens has 10 slots of 16 tokens.
        let choose = |rows: usize, width: usize| {
            let pooled = gpu.tensor(&[2, rows, width], DType::BF16);
            queries.nsa_compressed_attention_forward([&bound; 2], &pooled, NsaBlocks::PUBLISHED, 0.125)
        };
        let (_, chosen) = choose(20, 64).expect("two KV heads");
        assert_eq!(chosen.shape(), [1, 160, 2, 16]);
        for (rows, width, sentence) in
            [(25, 64, "number of pooled keys 25"), (30, 64, "number of KV heads 3"), (20, 128, "expected [2, 20, 64]")]
        {
            let error = choose(rows, width).map(drop).expect_err("another size").to_string();
            assert!(error.contains(sentence), "{error}");
        }
    }
}
