//! Decoding under selectors that evict nothing: one new token a row reads some keys of its cache, which the device
//! chooses. Launches of `kernels/select_pages.cu`, and of the decoding kernels of models that are trained to choose
//! blocks.
//!
//! Dense decoding kernels walk the chosen pages or keys. Launched one by one instead of as a graph, the same
//! kernels read a text as a stream.
use crate::KernelError;
use crate::attention::{AttentionShape, DecodeScratch, DecodeStep, KvCache, Qkv, one_token};
use crate::nsa::{key_logits, take_largest};
use crate::runtime::{CudaTensor, DType, SourceKernel, operands, params, require};
use sieve_core::{ForcedBlocks, TokenKeys};

const NAME: &str = "select_pages";

/// Pages of keys that a thread block scores at a time.
const PAGES_AT_ONCE: usize = 8;

/// How the new token of each row chooses the keys that it reads.
#[derive(Debug, Clone, Copy)]
pub struct SelectorStep<'a> {
    /// Tokens before the new one, i32 `[batch]`.
    pub length: &'a CudaTensor,
    /// Where each row's document begins, counted from the new token: minus the number of tokens before it, i32
    /// `[batch, 1]`.
    pub start: &'a CudaTensor,
    /// Which keys are read.
    pub keys: TokenKeys,
    /// Smallest and largest keys of each page, f32 `[batch, num_kv_heads, room, 2 * head_dim]`, written in place; for
    /// [`TokenKeys::Pages`] alone.
    pub bounds: Option<&'a CudaTensor>,
}

impl SelectorStep<'_> {
    /// The arguments of [`DecodeScratch::new`], a shape and the most keys, for a call of `shape` where a row has
    /// `num_keys` keys, the token's own included.
    pub fn scratch(keys: TokenKeys, shape: AttentionShape, num_keys: usize) -> (AttentionShape, usize) {
        match keys {
            TokenKeys::Ends { first, last } => (shape, num_keys.min(first + last)),
            TokenKeys::Pages { page, count } => (shape, num_keys.min(page.saturating_mul(count))),
            TokenKeys::Largest(count) => {
                let num_kv_heads = shape.num_heads;
                (AttentionShape { num_kv_heads, ..shape }, num_keys.min(count))
            }
        }
    }
}

impl KvCache {
    /// Appends one new token a row to the cache and attends over the keys that it reads under a selector. `token` and
    /// `step` are the same as in [`attention_decode`](Self::attention_decode), without a window; `scratch` must be made
    /// for the sizes of [`SelectorStep::scratch`]. Returns `[batch, 1, num_heads, head_dim]`.
    ///
    /// # Errors
    /// Types or sizes that do not fit or have no kernel, a full cache.
    pub fn selector_decode(
        &self,
        token: &Qkv,
        step: DecodeStep<'_>,
        choice: SelectorStep<'_>,
        scratch: &DecodeScratch,
    ) -> Result<CudaTensor, KernelError> {
        let (chosen, size) = match choice.keys {
            TokenKeys::Ends { first, last } => {
                let step = DecodeStep { window: Some(last), num_first: first, ..step };
                return self.attention_decode(token, choice.length, step, scratch);
            }
            TokenKeys::Pages { page, .. } => (self.selected_blocks(token, step, choice)?, page),
            TokenKeys::Largest(_) => (self.selected_blocks(token, step, choice)?, 1),
        };
        self.attention_decode_chosen(&token.q, choice.length, step, scratch, &chosen, size)
    }

    /// Appends the token as [`selector_decode`](Self::selector_decode) does, and returns the blocks that it chooses:
    /// pages for each KV head, or keys for each query head; i32 `[batch, heads, count]`, ascending, then -1.
    ///
    /// # Errors
    /// The errors of [`selector_decode`](Self::selector_decode); [`TokenKeys::Ends`], which chooses nothing.
    pub fn selected_blocks(
        &self,
        token: &Qkv,
        step: DecodeStep<'_>,
        choice: SelectorStep<'_>,
    ) -> Result<CudaTensor, KernelError> {
        // A token always reads its own page, which no scores compare with the others.
        let forced = |local| ForcedBlocks { first: false, local };
        let (scores, size, forced, count) = match (choice.keys, choice.bounds) {
            (TokenKeys::Pages { page, count }, Some(bounds)) => {
                let scores = self.page_scores(token, step, choice.length, bounds, page)?;
                (scores, page, forced(1), count)
            }
            (TokenKeys::Largest(count), _) => (key_logits(self, token, choice.length, step)?, 1, forced(0), count),
            (keys, bounds) => {
                let got = format!("{keys:?}, bounds: {}", bounds.is_some());
                let supported = "the largest keys, or pages with bounds";
                return Err(KernelError::unsupported(NAME, "choice", got, supported));
            }
        };
        let [batch, heads, num_blocks] = scores.dims(NAME, "scores")?;
        operands!(only NAME, start: I32[batch, 1] contiguous = choice.start);
        let count = count.min(num_blocks);
        let importance = scores.reshaped(NAME, "scores", &[batch, heads, 1, num_blocks])?;
        let chosen = scores.empty_contiguous(&[batch, 1, heads, count], DType::I32);
        take_largest(&importance, choice.start, &chosen, size, forced, 0..1)?;
        chosen.reshaped(NAME, "chosen", &[batch, heads, count])
    }

    /// Appends the token to the cache and to its page's bounds. Returns the upper bounds of its products with the keys
    /// of the pages before its own, f32 `[batch, num_kv_heads, room]`.
    fn page_scores(
        &self,
        token: &Qkv,
        step: DecodeStep<'_>,
        length: &CudaTensor,
        bounds: &CudaTensor,
        page: usize,
    ) -> Result<CudaTensor, KernelError> {
        let token = token.with_kernel_strides();
        let shape = one_token(NAME, &token)?;
        let (batch, num_kv_heads, head_dim) = (shape.batch, shape.num_kv_heads, shape.head_dim);
        let capacity = self.capacity(NAME, &shape)?;
        let [_, _, room, _] = bounds.dims::<4>(NAME, "bounds")?;
        operands!(only NAME,
            bounds: F32[batch, num_kv_heads, room, 2 * head_dim] contiguous,
            length: I32[batch] strided,
        );
        let before = step.max_length;
        require!(before < capacity && before / page < room, NAME, "length": before,
            "below the cache's capacity of {capacity}, in one of {room} pages of {page} keys");
        let fits = head_dim.is_multiple_of(32) && shape.head_dim_v == head_dim;
        require!(fits, NAME, "head_dim": head_dim, "multiples of 32, the same for keys and values");
        let scores = bounds.empty_contiguous(&[batch, num_kv_heads, room], DType::F32);
        let params = params!(SelectPagesParams {
            base: token.token_params(NAME, &shape, step.softmax_scale)?,
            capacity,
            room,
            page,
            head_dim,
        });
        let multiprocessors = bounds.hardware().num_multiprocessors;
        let splits = (multiprocessors / (batch * num_kv_heads)).clamp(1, room.div_ceil(PAGES_AT_ONCE));
        let tensors = [token.q.tensor(), token.k.tensor(), token.v.tensor(), &self.k, &self.v];
        let tensors = [&tensors[..], &[bounds, length, &scores]].concat();
        // SAFETY: sizes and types checked above; the kernel clamps lengths to the capacity and pages to the room, and
        // writes one row of each cache, the bounds of one page and the scores of the pages before it.
        unsafe { SELECT_PAGES.launch([splits, num_kv_heads, batch], &tensors, &params) }?;
        Ok(scores)
    }
}

const SELECT_PAGES: SourceKernel = SourceKernel::new(NAME).threads(32 * PAGES_AT_ONCE).starts_early();

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Hardware, Recorder, Step};
    use sieve_core::{BlockScores, BlockSelection, CallShape, HeavyKeys, KeepBlocks, KeyScores, SlotOrder};

    fn choose(selection: &BlockSelection) -> Result<(), KernelError> {
        let (gpu, shape) = (Recorder::new(Hardware::HOPPER), selection.shape);
        let heads = shape.num_heads + 2 * shape.num_kv_heads;
        let packed = gpu.tensor(&[1, shape.num_keys, heads, shape.head_dim], DType::BF16);
        let qkv = Qkv::packed(&packed, shape.num_heads, shape.num_kv_heads);
        qkv.select_blocks(selection).map(drop)
    }

    /// Decodes one token with 40 before it over caches of 64 keys. Returns the names of the launched kernels.
    fn decode(keys: TokenKeys, head_dim: usize) -> Result<Vec<&'static str>, KernelError> {
        let gpu = Recorder::new(Hardware::HOPPER);
        let bf16 = |heads: usize, tokens: usize| gpu.tensor(&[1, heads, tokens, head_dim], DType::BF16);
        let cache = KvCache { k: bf16(2, 64), v: bf16(2, 64) };
        let packed = gpu.tensor(&[1, 1, 8, head_dim], DType::BF16);
        let token = Qkv::packed(&packed, 4, 2);
        let (shape, most) = SelectorStep::scratch(keys, token.shape("test")?, 64);
        let scratch = DecodeScratch::new(&packed, shape, most)?;
        gpu.take_steps();
        let choice = SelectorStep {
            length: &gpu.tensor(&[1], DType::I32),
            start: &gpu.tensor(&[1, 1], DType::I32),
            keys,
            bounds: Some(&gpu.tensor(&[1, 2, 4, 2 * head_dim], DType::F32)),
        };
        let step = DecodeStep::new(40, 1.0);
        cache.selector_decode(&token, step, choice, &scratch)?;
        let name = |step: &Step| match step {
            Step::Launch(launch) => Some(launch.kernel.name()),
            _ => None,
        };
        Ok(gpu.take_steps().iter().filter_map(name).collect())
    }

    #[test]
    fn a_token_launches_what_its_selector_needs_and_a_width_without_kernels_is_refused() {
        let names = |keys, head_dim| decode(keys, head_dim).map_err(|error| error.to_string());
        let ends = TokenKeys::Ends { first: 4, last: 20 };
        assert_eq!(names(ends, 48).expect("any width"), ["attention_decode"]);
        let pages = TokenKeys::Pages { page: 16, count: 3 };
        let chosen = ["select_pages", "nsa_choose", "attention_decode"];
        assert_eq!(names(pages, 96).expect("a multiple of 32"), chosen);
        assert!(names(pages, 48).is_err_and(|text| text.contains("multiples of 32")));
        let short = TokenKeys::Pages { page: 8, count: 3 };
        assert!(names(short, 64).is_err_and(|text| text.contains("one of 4 pages")));
        let largest = ["pooled_scores", "nsa_choose", "attention_decode"];
        assert_eq!(names(TokenKeys::Largest(7), 64).expect("a width of 64"), largest);
        assert!(names(TokenKeys::Largest(7), 96).is_err_and(|text| text.contains("64 or 128")));
    }

    #[test]
    fn keys_of_a_long_prompt_are_kept_though_no_mask_of_them_has_room() {
        let shape = CallShape::new([126_334, 126_334], [6, 3], 64);
        let cells = BlockScores::Cells { stride: 1, reversed: false, norm: 1.0 };
        let selection = BlockSelection::new(shape, 1, cells, KeepBlocks::Top(1_000));
        let refused = choose(&selection).map_err(|error| error.to_string());
        assert!(refused.is_err_and(|text| text.contains("2^31")));
        // The 1,000 best keys and the 1,000 last ones need no mask.
        let gpu = Recorder::new(Hardware::HOPPER);
        let packed = gpu.tensor(&[1, shape.num_keys, 12, 64], DType::BF16);
        let lse = gpu.tensor(&[1, 6, shape.num_keys], DType::F32);
        let heavy = HeavyKeys { selection, last: 1_000, width: 1, by_largest: false, slots: None };
        let kept = Qkv::packed(&packed, 6, 3).keep_heavy_keys(&heavy, &lse).expect("kept");
        assert_eq!(kept.k.shape(), [1, 3, 2_000, 64]);
    }

    #[test]
    fn keys_are_ordered_by_attention_in_heads_that_its_kernel_takes() {
        for (head_dim, by_attention, fits) in [(64, true, true), (80, true, false), (80, false, true)] {
            let shape = CallShape::new([256, 256], [4, 2], head_dim);
            let means = BlockScores::Means { variances: 0.0 };
            let mut selection = BlockSelection::new(shape, 64, means, KeepBlocks::Mass(0.9));
            selection.order = Some(SlotOrder {
                segment: 128,
                keys: Some(if by_attention { KeyScores::Attention(64) } else { KeyScores::Length }),
                moves_queries: false,
                keeps_first: false,
            });
            let chosen = choose(&selection).map_err(|error| error.to_string());
            assert_eq!(chosen.is_ok(), fits, "{head_dim} {by_attention}: {chosen:?}");
            assert!(fits || chosen.is_err_and(|text| text.contains("head_dim 80")), "{head_dim}");
        }
    }
}
