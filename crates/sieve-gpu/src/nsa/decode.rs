//! Launches of `kernels/pooled_scores.cu`, `kernels/block_scores.cu` and `kernels/nsa_compress_token.cu`: decoding over
//! the blocks that the queries of the new token choose by pooled keys or NSA's compressed keys.
use super::choose::take_largest;
use super::{no_gap, rule_number};
use crate::attention::{DecodeScratch, DecodeStep, Heads, KvCache, Qkv, WARP_KEYS, one_token, require_scale};
use crate::runtime::{CudaTensor, DType, SourceKernel, SumOrder, operands, params, require};
use crate::step::qk_norm_rope_forward::RotaryTables;
use crate::step::require_words;
use crate::{KernelError, TokenRotation};
use sieve_core::{BlockChoice, ChoiceRule, KernelPolicy, NsaBlocks};

const NAME: &str = "pooled_scores";
const COMPRESS: &str = "nsa_compress_token";

/// The fewest pooled keys of a thread block.
const MIN_POOLED: usize = 16;

/// Thread blocks that a multiprocessor is given: reads wait for memory, so several share one.
const BLOCKS_PER_MULTIPROCESSOR: usize = 4;

/// The pooled keys of a cache, and the rule that chooses blocks by them.
#[derive(Debug, Clone, Copy)]
pub struct PooledStep<'a> {
    /// bf16 `[batch, num_kv_heads, room, head_dim]`: means of keys, or an indexer's keys, which have one KV head. Each
    /// is written in place when its block is complete.
    pub pooled: &'a CudaTensor,
    /// Position of the sequence's first token relative to the new token, i32 `[batch, 1]`: minus the number of tokens
    /// before the new one.
    pub start: &'a CudaTensor,
    /// Sizes of blocks, how many are chosen, and the rule.
    pub choice: BlockChoice,
}

/// One new token for each row of the batch under native sparse attention (arXiv:2502.11089): the heads and caches of
/// its three branches.
#[derive(Debug, Clone, Copy)]
pub struct NsaToken<'a> {
    /// Queries, keys and values of the compressed, the selected and the window branch, `[batch, 1, heads, head_dim]`.
    pub branches: [&'a Qkv; 3],
    /// Caches of the compressed, the selected and the window branch; the first holds compressed keys and values.
    pub caches: [&'a KvCache; 3],
    /// The last tokens' keys and values of the compressed branch, at least a compressed block of them, and how many
    /// first tokens of the sequence this cache has dropped.
    pub tail: (&'a KvCache, usize),
    /// The compression MLPs of keys and of values: position embeddings bf16 `[size, head_dim]`, first weight bf16
    /// `[hidden, size * head_dim]`, second weight bf16 `[head_dim, hidden]`. `None` compresses by the mean.
    pub mlp: Option<[[&'a CudaTensor; 3]; 2]>,
    /// Position of the sequence's first token relative to the new token, i32 `[batch, 1]`: never positive.
    pub start: &'a CudaTensor,
    /// Block sizes of the compressed and the selected branch.
    pub blocks: NsaBlocks,
}

impl NsaToken<'_> {
    /// Appends the token to the caches, and the compressed key whose block ends at it, and attends. `length`, i32
    /// `[batch]`, is the number of tokens before the new one. `step` is the step of the selected branch, whose cache
    /// holds all tokens; `window` is the step of the window branch. `scratch` has the buffers of each branch. With sums
    /// in a fixed order, as the window branch's queries ask for it, the token has the bits of a whole row with
    /// [`KeyOrder::Epochs`](sieve_core::KeyOrder::Epochs), in the window branch on Hopper. Returns the outputs of the
    /// branches, each `[batch, 1, num_heads, head_dim]`.
    ///
    /// # Errors
    /// Types or sizes that do not fit or have no kernel, a full cache.
    pub fn decode(
        &self,
        length: &CudaTensor,
        [step, window]: [DecodeStep<'_>; 2],
        scratch: [&DecodeScratch; 3],
    ) -> Result<[CudaTensor; 3], KernelError> {
        let near = self.branches[2];
        let [_, selected, recent] = self.caches;
        let (q, [by_blocks, chosen]) = self.choice(length, step, scratch[0])?;
        let of_choice = (&chosen, self.blocks.select_block_size);
        let by_choice = selected.attend_chosen(&q, length, step, of_choice, scratch[1])?;
        let by_window = recent.attention_decode(near, length, window, scratch[2])?;
        Ok([by_blocks, by_choice, by_window])
    }

    /// The first half of [`decode`](Self::decode): appends the token to the caches of the compressed and the selected
    /// branch. Returns the selected branch's queries, and the compressed branch's output, bf16
    /// `[batch, 1, num_heads, head_dim]`, with the blocks that it chooses, i32
    /// `[batch, 1, num_kv_heads, num_selected_blocks]`: ascending, then -1.
    ///
    /// # Errors
    /// The errors of [`decode`](Self::decode).
    pub fn choice(
        &self,
        length: &CudaTensor,
        step: DecodeStep<'_>,
        scratch: &DecodeScratch,
    ) -> Result<(Heads, [CudaTensor; 2]), KernelError> {
        let [coarse, fine, _] = self.branches;
        let [compressed, selected, _] = self.caches;
        let choice = BlockChoice::nsa(self.blocks);
        let shape = one_token(COMPRESS, coarse)?;
        require_chosen_decode(choice, [shape.head_dim, shape.head_dim_v], shape.group_size())?;
        let count = self.compress(length, step.max_length)?;
        let capacity = selected.capacity(NAME, &shape)?;
        let pooled = Pooled {
            keys: &compressed.k,
            size: self.blocks.compress_block_size,
            stride: self.blocks.compress_stride,
            is_written: false,
            is_scored: !self.in_order(),
            stores_queries: self.in_order(),
        };
        if self.in_order() {
            // The launch that appends the selected branch's key and value copies its queries side by side.
            let (q, _) = pooled.scores(fine, None, selected, length, step)?;
            let queries = coarse.under(self.policy()).q;
            let keys = PooledStep { pooled: &compressed.k, start: self.start, choice };
            let found = keys.attend_in_order(&queries, &compressed.v, capacity, step.softmax_scale)?;
            return Ok((Heads::all(&q.tensor().clone().under(self.policy())), found));
        }
        let in_compressed = DecodeStep { max_length: compressed.capacity(COMPRESS, &shape)?, ..step };
        let by_blocks = compressed.attention_decode_cached(&coarse.q, &count, in_compressed, scratch)?;
        // One launch appends the selected branch's key and value, and scores compressed keys by the compressed queries.
        let joined = Qkv { q: coarse.q.clone(), k: fine.k.clone(), v: fine.v.clone() };
        let (_, scores) = pooled.scores(&joined, None, selected, length, step)?;
        let chosen = choose(&scores, shape.num_kv_heads, [length, self.start], choice, capacity)?;
        Ok((fine.q.clone(), [by_blocks, chosen]))
    }

    /// The kernel policy of all three branches, which the queries of the window branch carry.
    fn policy(&self) -> KernelPolicy {
        self.branches[2].policy()
    }

    /// Whether the token has the bits of its whole row.
    fn in_order(&self) -> bool {
        self.policy().sums == SumOrder::Fixed
    }

    /// Appends the token to the tail. Where a compressed block ends at the token, appends its key and value to the
    /// cache of compressed blocks. Returns the number of compressed blocks, i32 `[batch]`.
    fn compress(&self, length: &CudaTensor, max_length: usize) -> Result<CudaTensor, KernelError> {
        let (token, compressed) = (self.branches[0], self.caches[0]);
        let (tail, num_dropped) = self.tail;
        let token = token.with_kernel_strides();
        let shape = one_token(COMPRESS, &token)?;
        let (blocks, width) = (self.blocks, shape.head_dim);
        require_words(COMPRESS, width)?;
        let (tail_capacity, capacity) = (tail.capacity(COMPRESS, &shape)?, compressed.capacity(COMPRESS, &shape)?);
        let (size, ended) = (blocks.compress_block_size, blocks.num_compressed_blocks(max_length + 1));
        let fits = (num_dropped..num_dropped + tail_capacity).contains(&max_length) && ended <= capacity;
        require!(fits, COMPRESS, "length": format!("{max_length} with {ended} compressed keys"),
            "from {num_dropped} on, below a tail of {tail_capacity}, {capacity} compressed keys");
        let mut hidden = 0;
        let mut weights = Vec::new();
        if let Some(mlp) = self.mlp {
            [hidden, _] = mlp[0][1].dims(COMPRESS, "up")?;
            for [positions, up, down] in mlp {
                operands!(only COMPRESS,
                    positions: BF16[size, width] contiguous,
                    up: BF16[hidden, size * width] contiguous,
                    down: BF16[width, hidden] contiguous,
                );
            }
            // The kernel takes positions of keys and of values, then both first and both second weights.
            weights = (0..3).flat_map(|which| mlp.map(|weights| weights[which])).collect();
        }
        operands!(only COMPRESS, length: I32[shape.batch] strided);
        let count = length.empty_contiguous(&[shape.batch], DType::I32);
        let [_, k, v] = token.head_words(COMPRESS)?;
        let params = params!(NsaCompressTokenParams {
            num_kv_heads: shape.num_kv_heads,
            width,
            tail_capacity,
            num_dropped,
            capacity,
            size,
            stride: blocks.compress_stride,
            hidden,
            k_offset: k[0],
            k_batch_stride: k[2],
            v_offset: v[0],
            v_batch_stride: v[2],
        });
        let kernel = nsa_compress_token_kernel(self.mlp.is_some());
        let kernel = kernel.shared_bytes(size * width * DType::BF16.size() + hidden.div_ceil(8) * 16);
        let tensors = [token.k.tensor(), token.v.tensor(), &tail.k, &tail.v];
        let joined = [&compressed.k, &compressed.v, length, &count];
        let tensors = [&tensors[..], &weights, &joined].concat();
        // SAFETY: sizes and types checked above; the kernel clamps lengths to the caches and writes one row of the
        // tail, at most one compressed key and value, and every count.
        unsafe { kernel.launch([shape.num_kv_heads, 2, shape.batch], &tensors, &params) }?;
        Ok(count)
    }
}

/// The pooled keys by which blocks are scored.
#[derive(Clone, Copy)]
struct Pooled<'a> {
    /// Pooled keys, `[batch, num_kv_heads, room, head_dim]`.
    keys: &'a CudaTensor,
    /// Tokens that a pooled key stands for.
    size: usize,
    /// Tokens between the first tokens of two pooled keys.
    stride: usize,
    /// Whether the launch writes the mean of the block that ends at the token.
    is_written: bool,
    /// Whether the launch writes scores.
    is_scored: bool,
    /// Whether the launch writes queries that it does not rotate, side by side.
    stores_queries: bool,
}

impl Pooled<'_> {
    /// Appends the key and value of `token` to a cache, and with `is_written` the mean of a block that ends there to
    /// the pooled keys. With a `rotation` its queries and key are rotated first. Returns its queries and their logits
    /// with all pooled keys, f32 `[batch, num_heads, room]`.
    fn scores(
        &self,
        token: &Qkv,
        rotation: Option<TokenRotation<'_>>,
        cache: &KvCache,
        length: &CudaTensor,
        step: DecodeStep<'_>,
    ) -> Result<(Heads, CudaTensor), KernelError> {
        let token = token.with_kernel_strides();
        let shape = one_token(NAME, &token)?;
        let (batch, num_heads, num_kv_heads, head_dim) =
            (shape.batch, shape.num_heads, shape.num_kv_heads, shape.head_dim);
        require_scale(NAME, step.softmax_scale)?;
        let capacity = cache.capacity(NAME, &shape)?;
        let [_, _, pooled_capacity, _] = self.keys.dims::<4>(NAME, "pooled")?;
        operands!(only NAME,
            pooled: BF16[batch, num_kv_heads, pooled_capacity, head_dim] contiguous = self.keys,
            length: I32[batch] strided,
        );
        let ended = (step.max_length + 1).checked_sub(self.size).map_or(0, |left| left / self.stride + 1);
        let fits = step.max_length < capacity && ended <= pooled_capacity;
        require!(fits, NAME, "length": format!("{} with {ended} pooled keys", step.max_length),
            "below the cache's capacity of {capacity}, {pooled_capacity} pooled keys");
        let scores = self.keys.empty_contiguous(&[batch, num_heads, pooled_capacity], DType::F32);
        let tables = rotation.map(|rotation| RotaryTables::of(NAME, rotation.tables, head_dim)).transpose()?;
        let norm = rotation.and_then(|rotation| rotation.norm);
        let mut operands = vec![token.q.tensor(), token.k.tensor(), token.v.tensor(), &cache.k, &cache.v, self.keys];
        let weights = norm.map(|([q_weight, k_weight], _)| {
            operands!(NAME,
                q_weight: BF16[head_dim] aligned,
                k_weight: BF16[head_dim] aligned,
            );
            Ok([q_weight, k_weight])
        });
        let weights = weights.transpose()?;
        operands.extend(weights.iter().flatten());
        let queries = self.keys.empty_contiguous(&[batch, 1, num_heads, head_dim], DType::BF16);
        if let Some(tables) = &tables {
            operands.extend([&tables.cos, &tables.sin]);
        }
        let are_stored = tables.is_some() || self.stores_queries;
        if are_stored {
            operands.push(&queries);
        }
        operands.extend([length, &scores]);
        let params = params!(PooledScoresParams {
            base: token.token_params(NAME, &shape, step.softmax_scale)?,
            capacity,
            pooled_capacity,
            { size, stride }: self,
            scored: usize::from(self.is_scored),
            max_positions: tables.as_ref().map_or(0, |tables| tables.max_positions),
            table_stride: tables.as_ref().map_or(0, |tables| tables.stride),
            epsilon: norm.map_or(0.0, |(_, epsilon)| epsilon),
        });
        let blocks = self.keys.hardware().num_multiprocessors * BLOCKS_PER_MULTIPROCESSOR;
        let most = if self.is_scored { pooled_capacity.div_ceil(MIN_POOLED) } else { 1 };
        let splits = (blocks / (batch * num_kv_heads)).clamp(1, most);
        let kernel = pooled_scores_kernel(head_dim, shape.group_size());
        let kernel = if self.is_written { kernel } else { kernel.define("POOLS", 0) };
        let kernel = match (&tables, &weights) {
            (None, _) if are_stored => kernel.define("STORES_Q", 1),
            (None, _) => kernel,
            (Some(_), None) => kernel.define("ROTATE", 1),
            (Some(_), Some(_)) => kernel.define("ROTATE", 2),
        };
        // SAFETY: sizes and types checked above; the kernel clamps lengths to the capacity and writes one row of each
        // cache, at most one pooled key, the rotated queries, and the scores of complete pooled keys.
        unsafe { kernel.launch([splits, num_kv_heads, batch], &operands, &params) }?;
        let queries = if are_stored { Heads::all(&queries) } else { token.q.clone() };
        Ok((queries, scores))
    }
}

/// Appends the key and value of `token` to a cache. Returns the products of its queries with all keys, the token's own
/// included, f32 `[batch, num_heads, capacity]`.
pub(crate) fn key_logits(
    cache: &KvCache,
    token: &Qkv,
    length: &CudaTensor,
    step: DecodeStep<'_>,
) -> Result<CudaTensor, KernelError> {
    let head_dim = one_token(NAME, token)?.head_dim;
    require!([64, 128].contains(&head_dim), NAME, "head_dim": head_dim, "64 or 128");
    // Each key is its own pooled key. The launch writes the token's key to the same place twice, with equal bits.
    let keys = Pooled { keys: &cache.k, size: 1, stride: 1, is_written: true, is_scored: true, stores_queries: false };
    let unscaled = DecodeStep { softmax_scale: 1.0, ..step };
    let (_, logits) = keys.scores(token, None, cache, length, unscaled)?;
    Ok(logits)
}

/// Chooses blocks of a cache of `capacity` keys by `scores`, for each of `choosers` groups of heads. Returns i32
/// `[batch, 1, choosers, num_selected_blocks]`. `length` counts the tokens before the new one. `start` is
/// `-length`: the launch has one query, of index 0, whose position in its document is 0 - start.
fn choose(
    scores: &CudaTensor,
    choosers: usize,
    [length, start]: [&CudaTensor; 2],
    choice: BlockChoice,
    capacity: usize,
) -> Result<CudaTensor, KernelError> {
    let [batch, num_heads, pooled_capacity] = scores.dims(NAME, "scores")?;
    operands!(only NAME, start: I32[batch, 1] contiguous);
    let blocks = choice.blocks;
    let num_blocks = capacity.div_ceil(blocks.select_block_size);
    let importance = scores.empty_contiguous(&[batch, choosers, 1, num_blocks], DType::F32);
    let params = params!(BlockScoresParams {
        num_heads,
        choosers,
        pooled_capacity,
        num_blocks,
        size: blocks.compress_block_size,
        stride: blocks.compress_stride,
        select_size: blocks.select_block_size,
    });
    let tensors = [scores, length, &importance];
    // SAFETY: reads the scores that were written, writes the importance of the blocks up to each token's own.
    unsafe { block_scores_kernel(choice.rule).launch([choosers, batch, 1], &tensors, &params) }?;
    let chosen = scores.empty_contiguous(&[batch, 1, choosers, blocks.num_selected_blocks], DType::I32);
    take_largest(&importance, start, &chosen, blocks.select_block_size, choice.forced, 0..1)?;
    Ok(chosen)
}

impl KvCache {
    /// Rotates one new token a row, as [`attention_decode_rotated`](Self::attention_decode_rotated), and appends it to
    /// the cache, with the pooled key whose block ends at it. Attends over the tokens of the blocks that the token's
    /// queries choose (arXiv:2509.24663; arXiv:2502.13189). `token`, `rotation`, `length` and `step` are as there,
    /// without a window; `scratch` must be made with one KV head for each chooser, a group of query heads with a choice
    /// of its own. With sums in a fixed order the token has the bits of a whole row, by probabilities of one with
    /// [`KeyOrder::Epochs`](sieve_core::KeyOrder::Epochs). Returns `[batch, 1, num_heads, head_dim]`.
    ///
    /// # Errors
    /// Types or sizes that do not fit or have no kernel, a full cache.
    pub fn chosen_decode(
        &self,
        token: &Qkv,
        rotation: TokenRotation<'_>,
        length: &CudaTensor,
        step: DecodeStep<'_>,
        pooled: PooledStep<'_>,
        scratch: &DecodeScratch,
    ) -> Result<CudaTensor, KernelError> {
        let (q, chosen) = self.chosen_choice(token, rotation, length, step, pooled)?;
        self.attend_chosen(&Heads::all(&q), length, step, (&chosen, pooled.choice.blocks.select_block_size), scratch)
    }

    /// The first half of [`chosen_decode`](Self::chosen_decode): appends the token. Returns its rotated queries, bf16
    /// `[batch, 1, num_heads, head_dim]`, and the blocks that they choose, i32
    /// `[batch, 1, choosers, num_selected_blocks]`: ascending, then -1.
    ///
    /// # Errors
    /// The errors of [`chosen_decode`](Self::chosen_decode).
    pub fn chosen_choice(
        &self,
        token: &Qkv,
        rotation: TokenRotation<'_>,
        length: &CudaTensor,
        step: DecodeStep<'_>,
        pooled: PooledStep<'_>,
    ) -> Result<(CudaTensor, CudaTensor), KernelError> {
        let shape = one_token(NAME, token)?;
        let (choice, start) = (pooled.choice, pooled.start);
        require_chosen_decode(choice, [shape.head_dim, shape.head_dim_v], shape.group_size())?;
        require!(!choice.has_indexer(), NAME, "rule": format!("{:?}", choice.rule), "one without an indexer");
        let (blocks, policy) = (choice.blocks, token.policy());
        let in_order = policy.sums == SumOrder::Fixed;
        let keys = Pooled {
            keys: pooled.pooled,
            size: blocks.compress_block_size,
            stride: blocks.compress_stride,
            is_written: true,
            is_scored: !in_order,
            stores_queries: false,
        };
        // Rules that compare scores instead of probabilities compare unscaled dot products.
        let scored = if choice.rule.takes_scores() { DecodeStep { softmax_scale: 1.0, ..step } } else { step };
        let (q, scores) = keys.scores(token, Some(rotation), self, length, scored)?;
        let choosers = choice.choices_per_token([shape.num_heads, shape.num_kv_heads]);
        let capacity = self.capacity(NAME, &shape)?;
        if in_order {
            let q = q.tensor().clone().under(policy);
            let chosen = pooled.choose_in_order(&Heads::all(&q), capacity, step.softmax_scale)?;
            return Ok((q, chosen));
        }
        Ok((q.tensor().clone(), choose(&scores, choosers, [length, start], choice, capacity)?))
    }
}

/// Refuses calls for which [`KvCache::chosen_decode`] has no kernels. `head_dims` are the widths of keys and values,
/// `group_size` the query heads of a KV head.
///
/// # Errors
/// [`KernelError::Refused`].
pub fn require_chosen_decode(choice: BlockChoice, head_dims: [usize; 2], group_size: usize) -> Result<(), KernelError> {
    choice.blocks.check();
    let [head_dim, head_dim_v] = head_dims;
    require!(head_dim_v == head_dim, NAME, "width of values": head_dim_v, "the width of keys");
    let size = choice.blocks.select_block_size;
    require!(size.is_multiple_of(WARP_KEYS), NAME, "select_block_size": size, "multiples of {WARP_KEYS}");
    no_gap(NAME, choice.cuda_gap(head_dim, group_size))
}

/// The kernel that scores pooled keys, for `group_size` query heads per KV head.
fn pooled_scores_kernel(head_dim: usize, group_size: usize) -> SourceKernel {
    SourceKernel::new(NAME)
        .define("HEAD_DIM", head_dim)
        .threads(256)
        .shared_bytes(group_size * head_dim * DType::F32.size())
        .starts_early()
}

/// The kernel that scores blocks by pooled keys.
fn block_scores_kernel(rule: ChoiceRule) -> SourceKernel {
    SourceKernel::new("block_scores").define("RULE", rule_number(rule)).threads(512).starts_early()
}

/// The kernel that appends a token to the compressed branch and compresses a block by an MLP or by its mean.
fn nsa_compress_token_kernel(mlp: bool) -> SourceKernel {
    SourceKernel::new(COMPRESS).define("MLP", u8::from(mlp)).threads(512).starts_early()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Hardware, Recorder, Step};

    #[test]
    fn a_token_of_three_branches_in_order_takes_the_kernels_of_whole_rows() {
        let gpu = Recorder::new(Hardware::HOPPER);
        let (capacity, packed) = (512, gpu.tensor(&[2, 1, 8, 64], DType::BF16));
        let launched = |sums: SumOrder| {
            let token = Qkv::packed(&packed, 4, 2).in_order(sums);
            let shape = one_token(NAME, &token).expect("one token");
            let cache = |room| KvCache::new(&packed, &shape, room);
            let (compressed, all) = (cache(NsaBlocks::PUBLISHED.num_slots(capacity)), cache(capacity));
            let scratch = DecodeScratch::new(&packed, shape, capacity).expect("sizes fit");
            let [length, start] = [[2].as_slice(), &[2, 1]].map(|sizes| gpu.tensor(sizes, DType::I32));
            let call = NsaToken {
                branches: [&token; 3],
                caches: [&compressed, &all, &all],
                tail: (&all, 0),
                mlp: None,
                start: &start,
                blocks: NsaBlocks::PUBLISHED,
            };
            gpu.take_steps();
            let step = DecodeStep::new(capacity - 1, 0.125);
            let window = DecodeStep { window: Some(64), ..step };
            call.decode(&length, [step, window], [&scratch; 3]).expect("sizes fit");
            let steps = gpu.take_steps().into_iter();
            steps
                .filter_map(|step| if let Step::Launch(launch) = step { Some(launch.kernel.name()) } else { None })
                .collect::<Vec<_>>()
        };
        let in_order = launched(SumOrder::Fixed);
        let expected = [
            "nsa_compress_token",
            "pooled_scores",
            "hopper_nsa_importance",
            "nsa_compressed_output",
            "hopper_nsa_importance",
            "nsa_choose",
            "nsa_token_lists",
            "hopper_nsa_selected_attention_forward",
            "nsa_selected_combine",
            "hopper_attention_token",
        ];
        assert_eq!(in_order, expected);
        assert!(!launched(SumOrder::Any).contains(&"nsa_compressed_output"));
    }
}
