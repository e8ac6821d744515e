//! Launches of `kernels/dma_ordered_lists.cu`, `kernels/dma_token.cu` and `kernels/hopper_dma_attention_token.cu`: DMA
//! whose queries go through their keys in one order, in a whole row and in a decoding step
//! (`kernels/common/epoch_order.cuh`).
use crate::KernelError;
use crate::attention::{
    AttentionShape, HopperTiling, KernelFamily, KeySource, Qkv, QueryPass, ROW_ALIGNMENT, one_token, require_scale,
};
use crate::dma::lists::LIST_ALIGNMENT;
use crate::dma::{DmaSlots, KeyLists, ScoreBias, Selection, require_local_window};
use crate::runtime::{CudaTensor, DType, SourceKernel, operands, params, require};
use sieve_core::{DmaWindow, KeyOrder};

/// Queries that share an ordered list.
const EPOCH: usize = KeyOrder::EPOCH;

/// Most keys that a query may keep where its keys have one order: an epoch's older keys are sorted in shared memory.
pub const MOST_ORDERED: usize = 2048;

const LISTS: &str = "dma_ordered_lists";
const TOKEN: &str = "dma_token";
const ATTENTION: &str = "hopper_dma_attention_token";
const THREADS: usize = 512;

/// Tokens of a row that begins with a cache's keys.
#[derive(Debug, Clone, Copy)]
pub struct AfterCache<'a> {
    /// Positions of the row's keys in their text, rising, i32 `[batch, num_kv_heads, seq_len]`; read for cached keys.
    pub positions: &'a CudaTensor,
    /// The first new token. It differs from its position by a multiple of 128.
    pub first_query: usize,
    /// The first new token's position.
    pub first_position: usize,
}

impl Selection {
    /// The keys of each epoch of 128 queries, in the order that a decoding step has too. `rank`, f32
    /// `[batch, num_kv_heads, seq_len]`, is what the selection of `window` was made of. In a row of new tokens behind a
    /// cache's keys, `after`, epochs are counted in the text, and lists are made for the new tokens alone.
    ///
    /// # Errors
    /// Shapes that do not fit the selection; a window of more than 2048 keys; a new token whose place in the row does
    /// not fit its position.
    pub fn dma_ordered_lists(
        &self,
        rank: &CudaTensor,
        doc_start: &CudaTensor,
        window: DmaWindow,
        after: Option<AfterCache<'_>>,
    ) -> Result<KeyLists, KernelError> {
        let expire = &self.expire;
        let [batch, num_kv_heads, seq_len] = expire.dims(LISTS, "expire")?;
        let per_key = [batch, num_kv_heads, seq_len];
        operands!(LISTS, rank: F32(per_key), doc_start: I32[batch, seq_len]);
        operands!(only LISTS, expire: I32(per_key) contiguous);
        let keep_window_size = self.keep_window_size;
        require_ordered(LISTS, window)?;
        let near_keys = near_keys(window);
        let positions = match after {
            None => None,
            Some(AfterCache { positions, first_query, first_position }) => {
                let fits = first_query % EPOCH == first_position % EPOCH && first_query < seq_len;
                require!(fits, LISTS, "first new token of the row": first_query,
                    "below {seq_len}, and a multiple of {EPOCH} from its position {first_position}");
                operands!(LISTS, positions: I32(per_key));
                Some(positions)
            }
        };
        let [first_query, first_position] = after.map_or([0, 0], |after| [after.first_query, after.first_position]);
        let whole = capacity(DmaWindow { keep_window_size, ..window });
        let capacity = if after.is_some() { whole } else { whole.min(seq_len.next_multiple_of(LIST_ALIGNMENT)) };
        let (epochs, tile_queries) = (seq_len.div_ceil(EPOCH), KeyLists::TILE_QUERIES);
        let new = |shape: &[usize]| expire.empty_contiguous(shape, DType::I32);
        let list = new(&[batch, num_kv_heads, epochs, capacity, 2]);
        let list_len = new(&[batch, num_kv_heads, epochs]);
        let tile_window = new(&[batch, num_kv_heads, seq_len.div_ceil(tile_queries), 2]);
        let mut tensors = vec![&rank, expire, &doc_start, &self.survivors];
        tensors.extend(&positions);
        tensors.extend([&list, &list_len, &tile_window]);
        let params = params!(DmaOrderedListsParams {
            seq_len,
            num_kv_heads,
            keep_window_size,
            near_keys,
            capacity,
            tile_queries,
            first_query,
            first_position,
        });
        let kernel = ordered_lists_kernel(keep_window_size, positions.is_some());
        // SAFETY: reads the selection, ranks, bounds and positions, writes the three new tensors within their shapes;
        // entries past a list's length stay undefined, and no kernel reads them.
        unsafe { kernel.launch([epochs, num_kv_heads, batch], &tensors, &params) }?;
        Ok(KeyLists { list, list_len, tile_window, tile_queries, queries: EPOCH })
    }
}

/// What a step lists for each row and KV head, one query a row.
#[derive(Debug, Clone)]
pub struct TokenKeyLists {
    /// `{slot, 1}` of each key, or `{slot, 0}` where no key lies, i32 `[batch, num_kv_heads, 1, capacity, 2]`.
    pub list: CudaTensor,
    /// `{0, entries in use}`, i32 `[batch, num_kv_heads, 1, 2]`.
    pub tile_window: CudaTensor,
    /// The largest bias of a listed key, first of its row, f32 `[batch, num_kv_heads, 64]`.
    base: CudaTensor,
    /// The bias of each slot, f32 `[batch, num_kv_heads, keep_window_size]`.
    delta: CudaTensor,
}

impl DmaSlots {
    /// Whether a step has the bits of a whole row under the policy of these queries: it asks for this order, on a
    /// Hopper GPU, with heads of 64 or 128 columns and at most 2048 keys a query.
    pub fn has_one_order(&self, token: &Qkv) -> bool {
        let q = token.q.tensor();
        let window = self.kv.k.shape().get(2).copied().unwrap_or(0);
        let shape = token.shape(ATTENTION);
        q.policy().keys == KeyOrder::Epochs
            && window <= MOST_ORDERED
            && shape.is_ok_and(|shape| KernelFamily::of(&shape, KeySource::Gathered, q) == KernelFamily::Hopper)
    }

    /// As [`dma_decode`](DmaSlots::dma_decode), with the bits of a pass over a whole row whose lists are
    /// [ordered](Selection::dma_ordered_lists).
    ///
    /// # Errors
    /// The errors of [`dma_decode`](DmaSlots::dma_decode); a call that is not one of
    /// [`has_one_order`](Self::has_one_order).
    pub fn dma_decode_in_order(
        &self,
        token: &Qkv,
        z: &CudaTensor,
        length: &CudaTensor,
        softmax_scale: f32,
        bias: ScoreBias,
    ) -> Result<CudaTensor, KernelError> {
        require_scale(ATTENTION, softmax_scale)?;
        let fits = self.has_one_order(token);
        require!(fits, ATTENTION, "call": "another", "a step in order on a Hopper GPU, of up to {MOST_ORDERED} keys");
        let token = token.with_kernel_strides();
        let keys = self.join_token(&token, z, length, bias)?;
        let shape = one_token(ATTENTION, &token)?;
        let num_slots = self.kv.capacity(ATTENTION, &shape)?;
        let tiling = HopperTiling::new(QueryPass::Output, &shape, KeySource::Gathered);
        let no_gradient = None;
        let maps = tiling.maps(ATTENTION, &token, no_gradient, &shape)?;
        let AttentionShape { batch, num_heads, num_kv_heads, head_dim, .. } = shape;
        let [q_offset, q_token_stride, q_batch_stride] = token.q.require_words(ATTENTION, "q")?;
        let (k_token_stride, v_token_stride) = (head_dim, head_dim);
        let base = params!(AttentionParams {
            batch,
            seq_len: 1usize,
            num_heads,
            num_kv_heads,
            q_offset,
            k_offset: 0usize,
            v_offset: 0usize,
            q_token_stride,
            k_token_stride,
            v_token_stride,
            q_batch_stride,
            k_batch_stride: num_kv_heads * num_slots * head_dim,
            v_batch_stride: num_kv_heads * num_slots * head_dim,
        });
        let base = params!(DmaAttentionForwardParams {
            base,
            softmax_scale,
            list_capacity: keys.list.shape()[3],
            tile_queries: KeyLists::TILE_QUERIES,
        });
        let params = params!(DmaAttentionTokenParams { base, num_slots });
        let q = token.q.tensor();
        let (o, lse) = (q.empty_contiguous(&shape.output(), DType::BF16), q.empty_contiguous(&shape.lse(), DType::F32));
        let TokenKeyLists { list, tile_window, base, delta } = &keys;
        let tensors = [q, &self.kv.k, &self.kv.v, delta, base, list, tile_window, &o, &lse];
        let kernel = tiling.kernel_named(ATTENTION);
        // SAFETY: sizes, strides and types checked above; the list names slots in use; every element of o is written.
        unsafe { kernel.launch_with_maps(tiling.grid(q), &maps, &tensors, &params) }?;
        Ok(o)
    }

    /// Inserts one new key a row into the slots, as [`dma_decode`](DmaSlots::dma_decode) does, and lists the slots that
    /// the row's query sees.
    ///
    /// # Errors
    /// Types or sizes that do not fit.
    pub fn join_token(
        &self,
        token: &Qkv,
        z: &CudaTensor,
        length: &CudaTensor,
        bias: ScoreBias,
    ) -> Result<TokenKeyLists, KernelError> {
        let (shape, window, z) = self.require_token(TOKEN, token, z, length)?;
        let token = token.with_kernel_strides();
        let AttentionShape { batch, num_kv_heads, head_dim, .. } = shape;
        let DmaWindow { keep_window_size, local_window_size } = window;
        require_ordered(TOKEN, window)?;
        let fits = shape.head_dim_v == head_dim;
        require!(fits, TOKEN, "width of values": shape.head_dim_v, "the keys', {head_dim}");
        let near_keys = near_keys(window);
        let capacity = capacity(window);
        let new = |shape: &[usize], dtype| z.empty_contiguous(shape, dtype);
        let list = new(&[batch, num_kv_heads, 1, capacity, 2], DType::I32);
        let tile_window = new(&[batch, num_kv_heads, 1, 2], DType::I32);
        let base = new(&[batch, num_kv_heads, ROW_ALIGNMENT], DType::F32);
        let delta = match bias {
            ScoreBias::Linear => self.z.clone(),
            ScoreBias::Exp => new(&[batch, num_kv_heads, keep_window_size], DType::F32),
        };
        let [[k_offset, _, k_batch_stride], [v_offset, _, v_batch_stride]] =
            [token.k.require_words(TOKEN, "k")?, token.v.require_words(TOKEN, "v")?];
        let params = params!(DmaTokenParams {
            num_kv_heads,
            head_dim,
            k_offset,
            v_offset,
            k_batch_stride,
            v_batch_stride,
            keep_window_size,
            local_window_size,
            near_keys,
            capacity,
        });
        let mut tensors = vec![token.k.tensor(), token.v.tensor(), &z, &self.kv.k, &self.kv.v];
        tensors.extend([&self.z, &self.positions, length]);
        tensors.extend((bias == ScoreBias::Exp).then_some(&delta));
        tensors.extend([&list, &tile_window, &base]);
        // SAFETY: sizes, strides and types checked above; writes at most one slot a head, and the new tensors within
        // their shapes.
        unsafe { token_kernel(keep_window_size, bias).launch([num_kv_heads, 1, batch], &tensors, &params) }?;
        Ok(TokenKeyLists { list, tile_window, base, delta })
    }
}

/// Places of near keys in a list: an epoch's own, and as many stages before it as the local window may reach into.
fn near_keys(window: DmaWindow) -> usize {
    EPOCH + window.local_window_size.next_multiple_of(EPOCH)
}

/// Entries of a list at most: the near keys' places and the older keys.
fn capacity(window: DmaWindow) -> usize {
    near_keys(window) + window.keep_window_size.next_multiple_of(LIST_ALIGNMENT)
}

/// Refuses windows whose older keys the kernels cannot sort.
fn require_ordered(kernel: &'static str, window: DmaWindow) -> Result<(), KernelError> {
    let kept = window.keep_window_size;
    require!(kept <= MOST_ORDERED, kernel, "keep_window_size": kept, "at most {MOST_ORDERED}");
    require_local_window(kernel, window.local_window_size, kept)
}

/// Room for older keys in the kernels' shared memory.
fn most_old(kept: usize) -> usize {
    if kept <= 1024 { 1024 } else { MOST_ORDERED }
}

/// The kernel that lists the keys of a row, or of new tokens that follow a cache's keys.
fn ordered_lists_kernel(kept: usize, has_cached_keys: bool) -> SourceKernel {
    SourceKernel::new(LISTS)
        .define("PREFIX_BLOCK", super::PREFIX_BLOCK)
        .define("MAX_OLD", most_old(kept))
        .define("CACHED_KEYS", has_cached_keys as u8)
        .threads(THREADS)
}

/// The kernel that inserts a token and lists what its query sees.
fn token_kernel(kept: usize, bias: ScoreBias) -> SourceKernel {
    SourceKernel::new(TOKEN)
        .define("MAX_OLD", most_old(kept))
        .define("EXP_BIAS", (bias == ScoreBias::Exp) as u8)
        .threads(THREADS)
        .starts_early()
}
