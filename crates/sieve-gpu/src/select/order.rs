//! Permutations of tokens inside segments (runs of a fixed number of tokens), which permuted block-sparse attention
//! (PBS) computes before it chooses blocks.
use super::call::{Call, MOST_IN_SEGMENT, NAME};
use crate::KernelError;
use crate::attention::Heads;
use crate::runtime::{CudaTensor, SourceKernel, params};
use sieve_core::{KeyMask, KeyScores};

/// The permutations of a selection, views of the mask's buffer: the token of each slot; `None` where slots hold the
/// tokens in order.
#[derive(Default)]
pub(super) struct Orders {
    /// Token of each key slot, `[num_kv_heads, num_keys]`.
    pub(super) keys: Option<CudaTensor>,
    /// Token of each query slot, `[num_heads, num_queries]`.
    pub(super) queries: Option<CudaTensor>,
}

/// Operands of a sort: `sets` rows (heads) of `num_tokens` tokens, sorted by descending score in each segment.
struct Sorted<'a> {
    /// Scores to sort by, f32 `[sets, num_tokens]`.
    score: CudaTensor,
    nan_rows: &'a CudaTensor,
    sets: usize,
    /// Position of the first sorted token.
    first: usize,
    num_tokens: usize,
    /// Whether a last segment that is not full keeps its order.
    whole_only: bool,
    /// Query heads of a row: the row keeps its order if one of them has NaN scores. 0 if none are counted.
    heads_per_set: usize,
}

impl Call<'_> {
    /// Writes the permutations of the tokens that move into the mask.
    pub(super) fn orders(&self, mask: &KeyMask<CudaTensor>, nan_rows: &CudaTensor) -> Result<Orders, KernelError> {
        let Some(order) = self.selection.order else {
            return Ok(Orders::default());
        };
        let keys = order.keys.map(|by| self.key_order(mask, by, order.segment, nan_rows));
        let queries = order.moves_queries.then(|| self.query_order(mask, order.segment, nan_rows));
        Ok(Orders { keys: keys.transpose()?, queries: queries.transpose()? })
    }

    /// Sorts the keys of each whole segment, for each KV head, by the attention that they received or by length.
    fn key_order(
        &self,
        mask: &KeyMask<CudaTensor>,
        by: KeyScores,
        segment: usize,
        nan_rows: &CudaTensor,
    ) -> Result<CudaTensor, KernelError> {
        let s = self.selection;
        let (sets, num_tokens) = (s.shape.num_kv_heads, s.shape.num_keys);
        let order =
            mask.words.view_at(NAME, "order", mask.places.key_order.start, &[sets, num_tokens], &[num_tokens, 1])?;
        let (score, heads_per_set) = match by {
            KeyScores::Attention(rows) => {
                (self.attention_of_last(rows.min(s.shape.num_queries), nan_rows)?, s.shape.group_size())
            }
            KeyScores::Length => (self.negated_norms(&self.qkv.k, self.k, sets, [0, num_tokens])?, 0),
        };
        let sorted = Sorted { score, nan_rows, sets, first: 0, num_tokens, whole_only: true, heads_per_set };
        self.sort(&sorted, segment, &order)?;
        Ok(order)
    }

    /// Sorts the queries of each segment, for each head, by length.
    fn query_order(
        &self,
        mask: &KeyMask<CudaTensor>,
        segment: usize,
        nan_rows: &CudaTensor,
    ) -> Result<CudaTensor, KernelError> {
        let s = self.selection;
        let (sets, num_tokens, first) = (s.shape.num_heads, s.shape.num_queries, s.shape.context());
        let place = mask.places.query_order.start;
        let order = mask.words.view_at(NAME, "order", place, &[sets, num_tokens], &[num_tokens, 1])?;
        let score = self.negated_norms(&self.qkv.q, self.q, sets, [first, num_tokens])?;
        let sorted = Sorted { score, nan_rows, sets, first, num_tokens, whole_only: false, heads_per_set: 0 };
        self.sort(&sorted, segment, &order)?;
        Ok(order)
    }

    /// The attention that each key received from the last `rows` queries, f32 `[num_kv_heads, num_keys]`.
    fn attention_of_last(&self, rows: usize, nan_rows: &CudaTensor) -> Result<CudaTensor, KernelError> {
        let s = self.selection;
        let all = self.new_f32(&[s.shape.num_kv_heads, s.shape.num_keys]);
        let adds = false;
        self.add_attention(s.shape.num_keys - rows..s.shape.num_keys, adds, &all, nan_rows)?;
        Ok(all)
    }

    /// Negated vector norms of some tokens, so that the sort puts the shortest first, f32 `[heads, tokens]`.
    fn negated_norms(
        &self,
        x: &Heads,
        at: [usize; 3],
        num_heads: usize,
        [first_token, num_tokens]: [usize; 2],
    ) -> Result<CudaTensor, KernelError> {
        let score = self.new_f32(&[num_heads, num_tokens]);
        let params = params!(SelectNormsParams {
            [x_offset, token_stride]: at,
            head_dim: self.shape.head_dim,
            first_token,
            num_tokens,
        });
        let grid = [num_tokens.div_ceil(128), num_heads, 1];
        // SAFETY: tokens, heads and strides are the tensor's own; every score is written.
        unsafe { SELECT_NORMS.launch(grid, &[x.tensor(), &score], &params) }?;
        Ok(score)
    }

    /// Writes the sorted tokens of each segment into `order`.
    fn sort(&self, sorted: &Sorted<'_>, segment: usize, order: &CudaTensor) -> Result<(), KernelError> {
        let params = params!(SelectOrderParams {
            num_tokens: sorted.num_tokens,
            first_position: sorted.first,
            segment,
            { whole_only, heads_per_set }: sorted,
        });
        let segments = (sorted.first + sorted.num_tokens).div_ceil(segment) - sorted.first / segment;
        let tensors = [&sorted.score, sorted.nan_rows, order];
        // SAFETY: `require_order` checked that a segment has at most as many tokens as a thread block has threads;
        // every slot is written.
        unsafe { SELECT_ORDER.launch([segments, sorted.sets, 1], &tensors, &params) }
    }
}

const SELECT_NORMS: SourceKernel = SourceKernel::new("select_norms").threads(128);
const SELECT_ORDER: SourceKernel = SourceKernel::new("select_order").threads(MOST_IN_SEGMENT);
