//! Launches of `kernels/pooled_scores.cu` and `kernels/block_scores.cu`: one new token a row against the blocks that
//! its queries choose by pooled keys.
use super::choose::{rule_number, take_important};
use crate::attention::decode::{DecodeStep, KvCache, one_token};
use crate::attention::decode_scratch::{DecodeScratch, WARP_KEYS};
use crate::attention::forward::require_scale;
use crate::attention::heads::Qkv;
use crate::error::KernelError;
use crate::runtime::cuda_tensor::CudaTensor;
use crate::runtime::dtype::DType;
use crate::runtime::operands::operands;
use crate::runtime::params::params;
use crate::runtime::source_kernel::SourceKernel;
use sieve_core::{BlockChoice, ChoiceRule};

const NAME: &str = "pooled_scores";

/// Pooled keys that a block of threads takes at least.
const MIN_POOLED: usize = 16;

/// The pooled keys of a cache, and how blocks are chosen by them.
#[derive(Debug, Clone, Copy)]
pub struct PooledStep<'a> {
    /// bf16 `[batch, num_kv_heads, room, head_dim]`: means of keys, written in place as they end.
    pub pooled: &'a CudaTensor,
    /// Minus the number of keys before the token, i32 `[batch, 1]`: where its text begins, counted from it.
    pub start: &'a CudaTensor,
    /// Pooled keys, blocks and the rule.
    pub choice: BlockChoice,
}

impl KvCache {
    /// Appends one new token a row, with the pooled key that ends at it, and attends over the tokens of the blocks that
    /// its queries choose (arXiv:2509.24663; arXiv:2502.13189). `token`, `length` and `step` as in
    /// [`attention_decode`](Self::attention_decode), without a window; `scratch` is made for as many KV heads
    /// as there are choosers. Returns `[batch, 1, num_heads, head_dim]`.
    ///
    /// # Errors
    /// Types or sizes that do not fit or have no kernel, a full cache.
    pub fn chosen_decode(
        &self,
        token: &Qkv,
        length: &CudaTensor,
        step: DecodeStep,
        pooled: PooledStep<'_>,
        scratch: &DecodeScratch,
    ) -> Result<CudaTensor, KernelError> {
        let shape = one_token(NAME, token)?;
        let PooledStep { pooled, start, choice } = pooled;
        let (batch, num_heads, num_kv_heads) = (shape.batch, shape.num_heads, shape.num_kv_heads);
        let (blocks, head_dim) = (choice.blocks, shape.head_dim);
        require_chosen_decode(choice, [head_dim, shape.head_dim_v], shape.group_size())?;
        require_scale(NAME, step.softmax_scale)?;
        let capacity = self.capacity(NAME, &shape)?;
        let [_, _, room, _] = pooled.dims::<4>(NAME, "pooled")?;
        operands!(only NAME,
            pooled: BF16[batch, num_kv_heads, room, head_dim] contiguous,
            start: I32[batch, 1] contiguous,
            length: I32[batch] strided,
        );
        let ended = blocks.num_compressed_blocks(step.max_length + 1);
        if step.max_length >= capacity || ended > room {
            let got = format!("{} with {ended} pooled keys", step.max_length);
            let supported = format!("below the cache's capacity of {capacity}, {room} pooled keys");
            return Err(KernelError::unsupported(NAME, "length", got, supported));
        }
        let token = token.walkable();
        let choosers = choice.num_choosers(num_heads, num_kv_heads);
        let num_blocks = capacity.div_ceil(blocks.select_block_size);
        let new = |shape: &[usize], dtype| self.k.empty_contiguous(shape, dtype);
        let scores = new(&[batch, num_heads, room], DType::F32);
        let [q, k, v] = token.head_words(NAME)?;
        let params = params!(PooledScoresParams {
            num_heads,
            num_kv_heads,
            capacity,
            pooled_capacity: room,
            size: blocks.compress_block_size,
            stride: blocks.compress_stride,
            softmax_scale: match choice.rule {
                ChoiceRule::MeanKey => 1.0,
                _ => step.softmax_scale,
            },
            q_offset: q[0],
            q_batch_stride: q[2],
            k_offset: k[0],
            k_batch_stride: k[2],
            v_offset: v[0],
            v_batch_stride: v[2],
        });
        let multiprocessors = self.k.hardware().num_multiprocessors;
        let splits = (multiprocessors / (batch * num_kv_heads)).clamp(1, room.div_ceil(MIN_POOLED));
        let kernel = pooled_scores_kernel(head_dim, shape.group_size());
        let tensors = [token.q.tensor(), token.k.tensor(), token.v.tensor(), &self.k, &self.v];
        let tensors = [&tensors[..], &[pooled, length, &scores]].concat();
        // SAFETY: sizes and types checked above; the kernel clamps lengths to the capacity and writes one row of each
        // cache, at most one pooled key and the scores of those that have ended.
        unsafe { kernel.launch([splits, num_kv_heads, batch], &tensors, &params) }?;
        let importance = new(&[batch, choosers, 1, num_blocks], DType::F32);
        let params = params!(BlockScoresParams {
            num_heads,
            choosers,
            pooled_capacity: room,
            num_blocks,
            size: blocks.compress_block_size,
            stride: blocks.compress_stride,
            select_size: blocks.select_block_size,
        });
        let tensors = [&scores, length, &importance];
        // SAFETY: reads the scores that were written, writes the importance of the blocks up to each token's own.
        unsafe { block_scores_kernel(choice.rule).launch([choosers, batch, 1], &tensors, &params) }?;
        let chosen = new(&[batch, 1, choosers, blocks.num_selected_blocks], DType::I32);
        take_important(&importance, start, &chosen, choice, 0, 1)?;
        let chosen = chosen.reshaped(NAME, "chosen", &[batch, choosers, blocks.num_selected_blocks])?;
        self.attention_decode_chosen(&token, length, step, scratch, &chosen, blocks.select_block_size)
    }
}

/// Refuses what [`KvCache::chosen_decode`] has no kernels for: `head_dims` of keys and values, `group_size` query heads
/// a KV head.
///
/// # Errors
/// [`KernelError::Unsupported`].
pub fn require_chosen_decode(choice: BlockChoice, head_dims: [usize; 2], group_size: usize) -> Result<(), KernelError> {
    choice.blocks.check();
    let [head_dim, head_dim_v] = head_dims;
    if head_dim_v != head_dim {
        return Err(KernelError::unsupported(
            NAME,
            "width of values",
            head_dim_v,
            "the width of keys",
        ));
    }
    if !choice.blocks.select_block_size.is_multiple_of(WARP_KEYS) {
        let (got, supported) = (choice.blocks.select_block_size, format!("multiples of {WARP_KEYS}"));
        return Err(KernelError::unsupported(NAME, "select_block_size", got, supported));
    }
    match choice.cuda_gap(head_dim, group_size) {
        None => Ok(()),
        Some((got, supported)) => Err(KernelError::unsupported(NAME, "call:", got, supported)),
    }
}

/// The kernel that scores pooled keys for groups of so many query heads.
pub(super) fn pooled_scores_kernel(head_dim: usize, group_size: usize) -> SourceKernel {
    SourceKernel::new(NAME)
        .define("HEAD_DIM", head_dim)
        .threads(256)
        .shared_bytes(group_size * head_dim * DType::F32.size())
        .starts_early()
}

/// The kernel that scores blocks by pooled keys.
pub(super) fn block_scores_kernel(rule: ChoiceRule) -> SourceKernel {
    SourceKernel::new("block_scores")
        .define("RULE", rule_number(rule))
        .threads(512)
        .starts_early()
}
