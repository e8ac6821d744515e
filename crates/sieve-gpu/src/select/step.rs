//! Choices of one query, while a model writes: the largest logits, and pages by bounds of their products.
use super::{Call, Choice, KeptBits, LongChoice, NAME};
use crate::KernelError;
use crate::runtime::{CudaTensor, SourceKernel, operands, params};
use sieve_core::KeepBlocks;

/// Pages of a block of threads.
const PAGES_AT_ONCE: usize = 8;

impl Call<'_> {
    /// Marks the keys with the largest logits of each head.
    pub(super) fn largest_logits(&self, [kept, nan_rows]: KeptBits<'_>) -> Result<(), KernelError> {
        let s = self.selection;
        let KeepBlocks::Top(top) = s.keep.by else {
            return Err(self.not_one_query());
        };
        if s.shape.num_queries != 1 || s.scores.block != 1 {
            return Err(self.not_one_query());
        }
        let scores = self.logits(s.shape.num_keys - 1..s.shape.num_keys, 0..s.shape.num_heads)?;
        let tensors = [&scores, kept, nan_rows];
        let all = LongChoice::new(tensors, [0, s.shape.num_heads], s.shape.num_keys);
        LongChoice { top, ..all }.choose()
    }

    /// Marks the pages with the largest bounds; those before `known` have bounds already.
    pub(super) fn pages(
        &self,
        bits: KeptBits<'_>,
        known: usize,
        bounds: Option<&CudaTensor>,
    ) -> Result<(), KernelError> {
        let s = self.selection;
        let [_, pages] = s.blocks();
        let d = self.shape.head_dim;
        let Some(bounds) = bounds.filter(|_| s.shape.num_queries == 1 && d.is_multiple_of(32)) else {
            return Err(self.not_one_query());
        };
        let [kv_heads, room, two, width] = bounds.dims(NAME, "bounds")?;
        operands!(only NAME, bounds: F32[kv_heads, room, two, width] contiguous);
        if [kv_heads, two, width] != [s.shape.num_kv_heads, 2, d] || room < pages {
            return Err(self.not_one_query());
        }
        let scores = self.new_f32(&[s.shape.num_heads, 1, pages]);
        let params = params!(SelectPagesParams {
            num_keys: s.shape.num_keys,
            page: s.scores.block,
            room,
            first_new: known,
            head_dim: d,
            group: s.shape.num_heads / s.shape.num_kv_heads,
            [q_offset, q_token_stride]: self.q,
            [k_offset, k_token_stride]: self.k,
        });
        let grid = [pages.div_ceil(PAGES_AT_ONCE), s.shape.num_kv_heads, 1];
        let tensors = [self.qkv.q.tensor(), self.qkv.k.tensor(), bounds, &scores];
        // SAFETY: bounds have room for every page, checked above; every score is written.
        unsafe { SELECT_PAGES.launch(grid, &tensors, &params) }?;
        self.choose(&Choice {
            scores: &scores,
            bits,
            first_head: 0,
            num_heads: s.shape.num_heads,
            keep: s.keep.by,
            is_mass: false,
            forced: false,
            drops_absent: true,
        })
    }

    fn not_one_query(&self) -> KernelError {
        KernelError::unsupported(
            NAME,
            "selection",
            format!("{:?}", self.selection),
            "one query; blocks of one key, or bounds of every page of heads of 32, 64, ... 256 \
                columns",
        )
    }
}

pub(super) const SELECT_PAGES: SourceKernel = SourceKernel::new("select_pages").threads(32 * PAGES_AT_ONCE);
