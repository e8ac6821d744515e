//! Block sizes of native sparse attention (arXiv:2502.11089), and which of them have CUDA kernels.

/// Block sizes of the compressed and the selected branch, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NsaBlocks {
    /// Size of a compressed block (l), in tokens.
    pub compress_block_size: usize,
    /// Tokens between the starts of two compressed blocks (s); divides both block sizes.
    pub compress_stride: usize,
    /// Size of a selected block (l'), in tokens.
    pub select_block_size: usize,
    /// Blocks a query selects per KV head (k).
    pub num_selected_blocks: usize,
}

/// Head widths that the CUDA kernels of NSA take.
const CUDA_HEAD_DIMS: [usize; 2] = [64, 128];
const CUDA_MAX_SELECT_BLOCK: usize = 64;
const CUDA_MAX_GROUP: usize = 64;
/// The most strides in a selected and a compressed block together.
const CUDA_MAX_STRIDES: usize = 34;

impl NsaBlocks {
    /// The block sizes of arXiv:2502.11089, section 4.1.
    pub const PUBLISHED: Self = Self::of([32, 16, 64, 16]);

    /// These sizes, in the order of the fields.
    pub const fn of(sizes: [usize; 4]) -> Self {
        let [compress_block_size, compress_stride, select_block_size, num_selected_blocks] = sizes;
        Self { compress_block_size, compress_stride, select_block_size, num_selected_blocks }
    }

    /// Number of slots for compressed blocks in a row of `seq_len` tokens, enough for any documents in it.
    pub fn num_slots(&self, seq_len: usize) -> usize {
        seq_len.div_ceil(self.compress_stride)
    }

    /// Number of compressed blocks that lie completely in a document of `len` tokens.
    pub fn num_compressed_blocks(&self, len: usize) -> usize {
        match len.checked_sub(self.compress_block_size) {
            Some(rest) => rest / self.compress_stride + 1,
            None => 0,
        }
    }

    /// First slot of the document that begins at token `start` of a row. The slots of two documents do not overlap,
    /// because a block is at least as long as the stride.
    pub fn first_slot(&self, start: usize) -> usize {
        start.div_ceil(self.compress_stride)
    }

    /// Number of (query, pooled key) pairs of one query head in a document of `seq_len` tokens. A query sees the
    /// compressed blocks that end at or before it.
    pub fn compressed_pairs(&self, seq_len: usize) -> f64 {
        // Block c is seen by the queries from its last token on, `seq_len - (c * stride + size - 1)`; summed over c.
        let blocks = self.num_compressed_blocks(seq_len) as f64;
        blocks * (seq_len as f64 - self.compress_block_size as f64 + 1.0)
            - self.compress_stride as f64 * blocks * (blocks - 1.0) / 2.0
    }

    /// Number of (query, key) pairs of one query head in a document of `seq_len` tokens. A query reads its own block up
    /// to itself and `num_selected_blocks - 1` whole earlier blocks.
    pub fn selected_pairs(&self, seq_len: usize) -> f64 {
        let block = self.select_block_size;
        // Queries in the first `num_selected_blocks` blocks see all keys before them.
        let num_dense = seq_len.min(block.saturating_mul(self.num_selected_blocks));
        let num_later = seq_len - num_dense;
        // The later queries fill `whole` blocks and `short` tokens of another. `own` are their pairs with keys of their
        // own block, `others` those with keys of the blocks before it.
        let (whole, short) = ((num_later / block) as f64, (num_later % block) as f64);
        let own = whole * (block as f64 * (block as f64 + 1.0) / 2.0) + short * (short + 1.0) / 2.0;
        let others = num_later as f64 * ((self.num_selected_blocks - 1) * block) as f64;
        num_dense as f64 * (num_dense as f64 + 1.0) / 2.0 + own + others
    }

    /// Panics unless the sizes fit each other.
    pub fn check(&self) {
        let Self { compress_block_size, compress_stride, select_block_size, num_selected_blocks } = *self;
        assert!(compress_stride > 0 && compress_block_size > 0 && select_block_size > 0, "nsa: a block size is 0");
        assert!(
            compress_block_size.is_multiple_of(compress_stride) && select_block_size.is_multiple_of(compress_stride),
            "nsa: compress_stride does not divide both block sizes"
        );
        assert!(num_selected_blocks > 0, "nsa: num_selected_blocks is 0");
    }

    /// Why there are no CUDA kernels for these sizes: the size that does not fit, and the sizes that kernels support.
    /// `None` if there are kernels.
    pub fn cuda_gap(&self, head_dim: usize, group_size: usize) -> Option<(String, &'static str)> {
        selected_gap(self.select_block_size, head_dim, group_size).or_else(|| {
            let strides = (self.compress_block_size + self.select_block_size) / self.compress_stride;
            let got = || format!("{strides} strides in a compressed and a selected block");
            (strides > CUDA_MAX_STRIDES).then(|| (got(), "up to 34 together"))
        })
    }
}

/// Why there are no CUDA kernels of attention over chosen blocks of `block_size` tokens, whatever chose them: the size
/// that does not fit, and the sizes that kernels support. `None` if there are kernels.
pub fn selected_gap(block_size: usize, head_dim: usize, group_size: usize) -> Option<(String, &'static str)> {
    if !CUDA_HEAD_DIMS.contains(&head_dim) {
        return Some((format!("heads of {head_dim}"), "heads of 64 and 128"));
    }
    if block_size > CUDA_MAX_SELECT_BLOCK {
        return Some((format!("select_block_size {block_size}"), "up to 64"));
    }
    (group_size > CUDA_MAX_GROUP).then(|| (format!("{group_size} query heads a KV head"), "up to 64"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_sizes_have_kernels_and_a_size_without_kernels_is_named() {
        let recipe = NsaBlocks::PUBLISHED;
        for (head_dim, group) in [(64, 1), (128, 2), (128, 16)] {
            assert_eq!(recipe.cuda_gap(head_dim, group), None);
        }
        let [large, fine] = [[32, 16, 128, 16], [32, 2, 64, 16]].map(NsaBlocks::of);
        for (blocks, head_dim, group, word) in [
            (recipe, 96, 2, "heads of 96"),
            (large, 128, 2, "select_block_size 128"),
            (fine, 128, 2, "48 strides"),
            (recipe, 128, 65, "65 query heads"),
        ] {
            let (got, _) = blocks.cuda_gap(head_dim, group).expect("no kernel");
            assert!(got.contains(word), "{got}");
        }
    }
}
