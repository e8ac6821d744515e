//! Launch of `kernels/index_scores.cu`: a new token joins MSA's caches, and its index queries score blocks.
use super::choose::take_largest;
use super::decode::{PooledStep, require_chosen_decode};
use crate::attention::{AttentionShape, DecodeScratch, DecodeStep, Heads, KvCache, Qkv, one_token, token_params};
use crate::runtime::{CudaTensor, DType, SourceKernel, SumOrder, operands, params, require, require_non_empty};
use crate::step::QkNormRope;
use crate::step::qk_norm_rope_forward::RotaryTables;
use crate::{KernelError, TokenRotation};

const NAME: &str = "index_scores";

const NUM_WARPS: usize = 8;

/// Columns that a joining block of threads stores: eight a lane.
const JOINED_COLUMNS: usize = NUM_WARPS * 32 * 8;

/// Scoring blocks of threads that a multiprocessor is given.
const BLOCKS_PER_MULTIPROCESSOR: usize = 4;

/// A new token of each row of the batch under MSA (arXiv:2606.13392), before norms and rotation.
#[derive(Debug, Clone, Copy)]
pub struct IndexedToken<'a> {
    /// Its heads, `[batch, 1, heads, head_dim]`.
    pub token: &'a Qkv,
    /// The indexer's queries, one for each KV head, and its key.
    pub index: [&'a Heads; 2],
    /// Norm and rotation of the token's own heads; the indexer's are rotated by the same tables.
    pub rotation: TokenRotation<'a>,
    /// Weights of the norms of the indexer's queries and key, bf16 `[head_dim]`, and their epsilon.
    pub index_norm: ([&'a CudaTensor; 2], f32),
}

impl KvCache {
    /// Norms and rotates one new token a row and its indexer's heads, appends the keys and the value to this cache and
    /// to `pooled.pooled`, `[batch, 1, room, head_dim]`, and attends over the tokens of the blocks that the index
    /// queries choose. `length`, `step` and `scratch` are the same as in [`chosen_decode`](Self::chosen_decode). With
    /// sums in a fixed order the token has the bits of a whole row, whose kernels then score blocks and attend. Returns
    /// `[batch, 1, num_heads, head_dim]`.
    ///
    /// # Errors
    /// Types or sizes that do not fit or have no kernel, a full cache.
    pub fn indexed_decode(
        &self,
        call: IndexedToken<'_>,
        length: &CudaTensor,
        step: DecodeStep<'_>,
        pooled: PooledStep<'_>,
        scratch: &DecodeScratch,
    ) -> Result<CudaTensor, KernelError> {
        let (q, chosen) = self.indexed_choice(call, length, step, pooled)?;
        self.attend_chosen(&Heads::all(&q), length, step, (&chosen, pooled.choice.blocks.select_block_size), scratch)
    }

    /// The first half of [`indexed_decode`](Self::indexed_decode): appends the token. Returns its normed and rotated
    /// queries, bf16 `[batch, 1, num_heads, head_dim]`, and the blocks that it chooses, i32
    /// `[batch, 1, num_kv_heads, num_selected_blocks]`: ascending, then -1.
    ///
    /// # Errors
    /// The errors of [`indexed_decode`](Self::indexed_decode).
    pub fn indexed_choice(
        &self,
        call: IndexedToken<'_>,
        length: &CudaTensor,
        step: DecodeStep<'_>,
        pooled: PooledStep<'_>,
    ) -> Result<(CudaTensor, CudaTensor), KernelError> {
        let shape = one_token(NAME, call.token)?;
        let (choice, start) = (pooled.choice, pooled.start);
        require_chosen_decode(choice, [shape.head_dim, shape.head_dim_v], shape.group_size())?;
        require!(choice.has_indexer() && choice.rule.takes_scores(), NAME, "rule": format!("{:?}", choice.rule),
            "an indexer's rule that scores a block by its best token");
        operands!(only NAME, start: I32[shape.batch, 1] contiguous);
        let (q, importance) = call.scores(self, length, step, pooled)?;
        if call.is_in_order() {
            let index_q = Heads::all(&call.rotated_index_q(length)?);
            let capacity = self.capacity(NAME, &shape)?;
            return Ok((q, pooled.choose_in_order(&index_q, capacity, step.softmax_scale)?));
        }
        let blocks = choice.blocks;
        let sizes = [shape.batch, 1, shape.num_kv_heads, blocks.num_selected_blocks];
        let chosen = importance.empty_contiguous(&sizes, DType::I32);
        take_largest(&importance, start, &chosen, blocks.select_block_size, choice.forced, 0..1)?;
        Ok((q, chosen))
    }
}

impl IndexedToken<'_> {
    /// Whether the token takes the kernels of whole rows.
    fn is_in_order(&self) -> bool {
        self.token.policy().sums == SumOrder::Fixed
    }

    /// The indexer's queries, normed and rotated, bf16 `[batch, 1, num_kv_heads, head_dim]`.
    fn rotated_index_q(&self, length: &CudaTensor) -> Result<CudaTensor, KernelError> {
        let queries = self.index[0].with_kernel_strides();
        let ([batch, _, heads, head_dim], [first, token, row]) =
            (queries.sizes(NAME, "index_q")?, queries.require_words(NAME, "index_q")?);
        let (shape, strides) = ([batch, 1, heads, head_dim], [row, token, head_dim, 1]);
        let queries = queries.tensor().view_at(NAME, "index_q", first, &shape, &strides)?;
        let ([q_weight, _], epsilon) = self.index_norm;
        let [cos, sin] = self.rotation.tables;
        let positions = &length.contiguous().reshaped(NAME, "length", &[batch, 1])?;
        let (k_weight, num_kv_heads) = (q_weight, 0);
        let rotation = QkNormRope { q_weight, k_weight, positions, cos, sin, num_kv_heads, epsilon };
        Ok(rotation.qk_norm_rope_forward(&queries)?.under(self.token.policy()))
    }

    /// Appends the token to the caches. Returns its rotated queries, bf16 `[batch, 1, num_heads, head_dim]`, and the
    /// importance of the blocks that a choice compares, f32 `[batch, num_kv_heads, 1, blocks of the cache]`; in order
    /// the importance is not written.
    fn scores(
        &self,
        cache: &KvCache,
        length: &CudaTensor,
        step: DecodeStep<'_>,
        pooled: PooledStep<'_>,
    ) -> Result<(CudaTensor, CudaTensor), KernelError> {
        let token = self.token.with_kernel_strides();
        let shape = one_token(NAME, &token)?;
        let AttentionShape { batch, num_heads, num_kv_heads, head_dim, .. } = shape;
        let [index_q, index_k] = self.index.map(Heads::with_kernel_strides);
        let sizes = [(&index_q, "index_q"), (&index_k, "index_k")].map(|(heads, name)| heads.sizes(NAME, name));
        let [q_sizes, k_sizes] = sizes;
        let (sizes, fitting) = ([q_sizes?, k_sizes?], [[batch, 1, num_kv_heads, head_dim], [batch, 1, 1, head_dim]]);
        require!(sizes == fitting, NAME, "heads of the indexer:": format!("{sizes:?}"), "{fitting:?}");
        let capacity = cache.capacity(NAME, &shape)?;
        let [_, _, index_capacity, _] = pooled.pooled.dims::<4>(NAME, "index_cache")?;
        operands!(only NAME,
            index_cache: BF16[batch, 1, index_capacity, head_dim] contiguous = pooled.pooled,
            length: I32[batch] strided,
        );
        require_non_empty(NAME, "index_cache", index_capacity)?;
        let fits = step.max_length < capacity.min(index_capacity);
        require!(fits, NAME, "length": step.max_length, "below the caches' capacities of {capacity}, {index_capacity}");
        let RotaryTables { cos, sin, max_positions, stride } = RotaryTables::of(NAME, self.rotation.tables, head_dim)?;
        let norms = self.rotation.norm.into_iter().chain([self.index_norm]);
        let mut weights = Vec::new();
        for ([q_weight, k_weight], _) in norms {
            operands!(NAME,
                q_weight: BF16[head_dim] aligned,
                k_weight: BF16[head_dim] aligned,
            );
            weights.extend([q_weight, k_weight]);
        }
        let blocks = pooled.choice.blocks;
        let num_blocks = capacity.div_ceil(blocks.select_block_size);
        let hardware = pooled.pooled.hardware();
        let scorers = (hardware.num_multiprocessors * BLOCKS_PER_MULTIPROCESSOR / batch).clamp(1, num_blocks);
        let scorers = if self.is_in_order() { 0 } else { scorers };
        let joined = num_heads + num_kv_heads + 1;
        let joiners = joined.div_ceil(JOINED_COLUMNS / head_dim);
        let [q_words, k_words] = [index_q.require_words(NAME, "index_q")?, index_k.require_words(NAME, "index_k")?];
        let params = params!(IndexScoresParams {
            base: token_params(&shape, step.softmax_scale, token.head_words(NAME)?),
            index_heads: num_kv_heads,
            index_q_offset: q_words[0],
            index_q_batch_stride: q_words[2],
            index_k_offset: k_words[0],
            index_k_batch_stride: k_words[2],
            capacity,
            index_capacity,
            num_blocks,
            select_size: blocks.select_block_size,
            num_selected: blocks.num_selected_blocks,
            num_first: pooled.choice.forced.first,
            num_local: pooled.choice.forced.local,
            scorers,
            max_positions,
            table_stride: stride,
            epsilon: self.rotation.norm.map_or(0.0, |(_, epsilon)| epsilon),
            index_epsilon: self.index_norm.1,
        });
        let rotated = pooled.pooled.empty_contiguous(&[batch, 1, num_heads, head_dim], DType::BF16);
        let importance = rotated.empty_contiguous(&[batch, num_kv_heads, 1, num_blocks], DType::F32);
        let mut tensors =
            vec![token.q.tensor(), token.k.tensor(), token.v.tensor(), index_q.tensor(), index_k.tensor()];
        tensors.extend(&weights);
        tensors.extend([&cos, &sin, length, &cache.k, &cache.v, pooled.pooled, &rotated, &importance]);
        let kernel = index_scores_kernel(head_dim, self.rotation.norm.is_some(), num_kv_heads);
        // SAFETY: sizes, strides and types checked above; the kernel clamps lengths to the capacity, and the index
        // keys have at least as many rows. It writes one row of each cache, every rotated query, importances.
        unsafe { kernel.launch([scorers + joiners, batch, 1], &tensors, &params) }?;
        Ok((rotated.under(self.token.policy()), importance))
    }
}

/// The kernel for an indexer of `index_heads` queries.
fn index_scores_kernel(head_dim: usize, has_norm: bool, index_heads: usize) -> SourceKernel {
    SourceKernel::new(NAME)
        .define("HEAD_DIM", head_dim)
        .define("QK_NORM", u8::from(has_norm))
        .threads(NUM_WARPS * 32)
        .shared_bytes(index_heads * (head_dim + NUM_WARPS) * DType::F32.size())
        .starts_early()
}
