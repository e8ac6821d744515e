//! Fixed-size caches of decode selectors: the keys of a prompt that received the most attention (SnapKV, H2O), and
//! decoding, where a new key evicts the key with the least accumulated attention.
//!
//! `received_attention.cu` sums the attention that each key receives from all queries, given the log-sum-exps of a
//! dense pass. Decoding over the kept keys is dense, or uses the slots of DMA's cache, ranked by that attention and
//! without a bias.
use super::call::Call;
use super::choose::{Amount, LongChoice};
use super::lines::ProbeSums;
use crate::KernelError;
use crate::attention::{DecodeScratch, Qkv};
use crate::dma::{DmaSlots, slots_decode};
use crate::runtime::{CudaTensor, DType, SourceKernel, operands, params, require};
use crate::step::empty_zero;
use sieve_core::{HeavyKeys, KeepBlocks};

const NAME: &str = "keep_heavy_keys";

/// Queries whose logits are in memory at a time: the rows of a tile of select_cells.
const ROWS_AT_ONCE: usize = 128;

/// Tokens of a thread block of select_gather and select_smooth.
const TOKENS_AT_ONCE: usize = 256;
/// Slots of a thread block of slot_logits.
const SLOTS_AT_ONCE: usize = 32;

/// The kept keys of a prompt: for each KV head its own keys, by ascending position.
#[derive(Debug, Clone)]
pub struct KeptKeys {
    /// Kept keys, bf16 `[1, num_kv_heads, kept, head_dim]`.
    pub k: CudaTensor,
    /// Values of the kept keys, bf16 `[1, num_kv_heads, kept, head_dim]`.
    pub v: CudaTensor,
    /// The attention that each key received, f32 `[1, num_kv_heads, kept]`.
    pub received: CudaTensor,
    /// The position of each key, i32 `[1, num_kv_heads, kept]`.
    pub positions: CudaTensor,
}

impl Qkv {
    /// Chooses and copies the keys of a prompt that later tokens read. The host does not wait for the result.
    ///
    /// # Shapes
    /// - q, k, v: bf16 `[1, num_keys, heads, head_dim]`
    /// - lse: log-sum-exp of the prompt's dense attention, f32 `[1, num_heads, num_keys]`
    ///
    /// # Errors
    /// Sizes that do not fit the selection; heads whose width is not a multiple of 64.
    pub fn keep_heavy_keys(&self, heavy: &HeavyKeys, lse: &CudaTensor) -> Result<KeptKeys, KernelError> {
        let s = &heavy.selection;
        let call = Call::new(self, s)?;
        let (num_heads, num_keys) = (s.shape.num_heads, s.shape.num_keys);
        operands!(NAME, lse: F32[1, num_heads, num_keys]);
        let (KeepBlocks::Top(top), true, true) = (s.keep.by, s.scores.block == 1, heavy.last < num_keys) else {
            let supported = "a top of blocks of one key, fewer last keys than there are";
            let got = format!("{heavy:?}");
            return Err(KernelError::unsupported(NAME, "selection", got, supported));
        };
        // The last keys are always kept; the others compete.
        let count = num_keys - heavy.last;
        let like = call.qkv.q.tensor();
        let nan_rows = like.zeros_contiguous(&[num_heads], DType::I32);
        let received = call.received(&lse, &nan_rows)?;
        let score = call.smoothed(&received, heavy, count)?;
        let words = count.div_ceil(u32::BITS as usize);
        let marks = like.empty_contiguous(&[s.shape.num_kv_heads, words], DType::I32);
        let amount = Amount::Count { top, num_first: 0 };
        LongChoice::new([&score, &marks, &nan_rows], [0, s.shape.num_kv_heads], count, amount).choose()?;
        call.gathered(&marks, &received, [count, top.min(count) + heavy.last])
    }
}

impl Call<'_> {
    /// The attention that each of the first `count` keys received, smoothed over its neighbours, f32
    /// `[num_kv_heads, count]`.
    fn smoothed(&self, received: &CudaTensor, heavy: &HeavyKeys, count: usize) -> Result<CudaTensor, KernelError> {
        let shape = self.selection.shape;
        let score = self.new_f32(&[shape.num_kv_heads, count]);
        let params = params!(SelectSmoothParams {
            num_keys: shape.num_keys,
            count,
            { width, by_largest }: heavy,
        });
        let grid = [count.div_ceil(TOKENS_AT_ONCE), shape.num_kv_heads, 1];
        // SAFETY: `received` and `score` have a row for each KV head; every score is written.
        unsafe { SELECT_SMOOTH.launch(grid, &[received, &score], &params) }?;
        Ok(score)
    }

    /// Copies the keys whose bit is set in `marks`, which has bits for the first `count` keys, and all later keys into
    /// `slots` slots.
    fn gathered(
        &self,
        marks: &CudaTensor,
        received: &CudaTensor,
        [count, slots]: [usize; 2],
    ) -> Result<KeptKeys, KernelError> {
        let (shape, head_dim, like) = (self.selection.shape, self.shape.head_dim, self.qkv.q.tensor());
        let per_slot = [1, shape.num_kv_heads, slots];
        let rows = [1, shape.num_kv_heads, slots, head_dim];
        // Zeros, as a head with NaN scores marks no key, and its slots are not written.
        let kept_keys = KeptKeys {
            k: like.zeros_contiguous(&rows, DType::BF16),
            v: like.zeros_contiguous(&rows, DType::BF16),
            received: like.zeros_contiguous(&per_slot, DType::F32),
            positions: like.zeros_contiguous(&per_slot, DType::I32),
        };
        let [_, k, v] = self.qkv.head_words(NAME)?;
        let params = params!(SelectGatherParams {
            num_keys: shape.num_keys,
            count,
            slots,
            head_dim,
            [k_offset, k_token_stride]: k,
            [v_offset, v_token_stride]: v,
        });
        let tensors = [
            marks,
            self.qkv.k.tensor(),
            self.qkv.v.tensor(),
            received,
            &kept_keys.k,
            &kept_keys.v,
            &kept_keys.received,
            &kept_keys.positions,
        ];
        let grid = [shape.num_keys.div_ceil(TOKENS_AT_ONCE), shape.num_kv_heads, 1];
        // SAFETY: tokens and strides are the tensors' own; writes within the slots.
        unsafe { SELECT_GATHER.launch(grid, &tensors, &params) }?;
        Ok(kept_keys)
    }

    /// The attention that each key received from the selection's queries, summed over the query heads of a KV head, f32
    /// `[num_kv_heads, num_keys]`.
    fn received(&self, lse: &CudaTensor, nan_rows: &CudaTensor) -> Result<CudaTensor, KernelError> {
        let s = self.selection;
        let all = self.new_f32(&[s.shape.num_kv_heads, s.shape.num_keys]);
        let first = s.shape.context();
        if s.shape.num_keys - first > ROWS_AT_ONCE && self.shape.head_dim <= WIDEST_RECEIVING {
            self.received_of_all(first, lse, &all, nan_rows)?;
            return Ok(all);
        }
        for start in (first..s.shape.num_keys).step_by(ROWS_AT_ONCE) {
            let positions = start..(start + ROWS_AT_ONCE).min(s.shape.num_keys);
            let adds = start > first;
            self.add_attention(positions, adds, &all, nan_rows)?;
        }
        Ok(all)
    }

    /// The attention that each key received from all queries from `first` on, from each query's log-sum-exp, without
    /// storing logits.
    fn received_of_all(
        &self,
        first: usize,
        lse: &CudaTensor,
        all: &CudaTensor,
        nan_rows: &CudaTensor,
    ) -> Result<(), KernelError> {
        let s = self.selection;
        let num_keys = s.shape.num_keys;
        let params = params!(ReceivedAttentionParams {
            num_keys,
            { num_heads, num_kv_heads }: s.shape,
            first_query: first,
            softmax_scale: s.scores.softmax_scale,
            [q_offset, q_token_stride]: self.q,
            [k_offset, k_token_stride]: self.k,
        });
        let tensors = [self.qkv.q.tensor(), self.qkv.k.tensor(), lse, all, nan_rows];
        let grid = [num_keys.div_ceil(RECEIVING_KEYS), s.shape.num_kv_heads, 1];
        // SAFETY: tokens and strides are the tensors' own; writes every sum and adds to nan_rows.
        unsafe { received_attention_kernel(self.shape.head_dim).launch(grid, &tensors, &params) }
    }
}

impl DmaSlots {
    /// Adds one new token to a fixed-size cache and attends over all slots. In a full cache the new key evicts the key
    /// with the least accumulated attention `z`, except the last `local_window_size` keys. Then the attention that each
    /// slot received is added to its `z`. `tokens` is the number of tokens before the new one. Returns
    /// `[1, 1, num_heads, head_dim]`.
    ///
    /// # Errors
    /// Types or sizes that do not fit; more than one sequence; heads whose width is not a multiple of 32.
    pub fn heavy_decode(
        &self,
        token: &Qkv,
        length: &CudaTensor,
        tokens: usize,
        softmax_scale: f32,
        scratch: &DecodeScratch,
    ) -> Result<CudaTensor, KernelError> {
        let shape = token.shape(NAME)?;
        let [batch, num_kv_heads, slots] = self.z.dims(NAME, "slots")?;
        let group = shape.group_size();
        let fits = batch == 1 && shape.head_dim.is_multiple_of(32);
        require!(fits, NAME, "shape": format!("{shape:?}"), "one sequence, heads of a multiple of 32 columns");
        let token = token.with_kernel_strides();
        // The new key has accumulated no attention yet.
        let z = empty_zero(&self.z, &[1, num_kv_heads])?;
        let bias = None;
        let o = slots_decode(&token, &z, self, length, softmax_scale, bias, scratch)?;
        // The softmax of the token's logits with all slots is added to z.
        let count = (tokens + 1).min(slots);
        let logits = z.empty_contiguous(&[shape.num_heads, 1, slots], DType::F32);
        let [[q_offset, ..], ..] = token.head_words(NAME)?;
        let params =
            params!(SlotLogitsParams { slots, count, head_dim: shape.head_dim, group, q_offset, softmax_scale });
        let grid = [count.div_ceil(SLOTS_AT_ONCE), num_kv_heads, 1];
        let tensors = [token.q.tensor(), &self.kv.k, &logits];
        // SAFETY: slots_decode checked the slots against the token; writes logits of the slots in use.
        unsafe { SLOT_LOGITS.launch(grid, &tensors, &params) }?;
        // The kernel counts in 32-bit integers; an f32 of 0 has the same bits.
        let nan_rows = empty_zero(&z, &[shape.num_heads])?;
        let columns = self.z.reshaped(NAME, "received", &[num_kv_heads, slots])?;
        let sums = ProbeSums { group, factor: 1.0, adds: true, columns: &columns, diagonals: None };
        // As the last of `count` positions, the query sees all slots in use.
        let (position, first_head) = (count - 1, 0);
        sums.add(&logits, position, first_head, &nan_rows)?;
        Ok(o)
    }
}

/// Keys of a thread block of received_attention.
const RECEIVING_KEYS: usize = 128;
/// Queries of one loop iteration of received_attention.
const RECEIVING_QUERIES: usize = 64;
/// The widest heads of received_attention, which holds its keys in registers.
const WIDEST_RECEIVING: usize = 128;

/// The kernel for heads of one width. Its shared memory holds two tiles of bf16 queries with their f32 log-sum-exps,
/// and room to align them.
fn received_attention_kernel(head_dim: usize) -> SourceKernel {
    SourceKernel::new("received_attention")
        .define("HEAD_DIM", head_dim)
        .threads(RECEIVING_KEYS)
        .shared_bytes(2 * RECEIVING_QUERIES * (2 * head_dim + 4) + 128)
}

const SELECT_SMOOTH: SourceKernel = SourceKernel::new("select_smooth").threads(TOKENS_AT_ONCE);
const SELECT_GATHER: SourceKernel = SourceKernel::new("select_gather").threads(TOKENS_AT_ONCE);
const SLOT_LOGITS: SourceKernel = SourceKernel::new("slot_logits").threads(256);
