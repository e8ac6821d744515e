//! Keys that queries see beyond their window, as the kernels take them (`kernels/common/far_keys.cuh`).
use crate::KernelError;
use crate::attention::{AttentionShape, BLOCK_KV, KernelFamily, PassInputs};
use crate::runtime::{CudaTensor, DType, require};
use crate::step::empty_zero;
use sieve_core::FarKeys;

/// The fields of [`FarKeys`] in params structs; zeros where queries see a window alone.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct FarWords {
    pub(crate) sink_tokens: usize,
    pub(crate) first_distance: usize,
    pub(crate) last_distance: usize,
    pub(crate) num_bands: usize,
    pub(crate) first_band: usize,
}

impl FarWords {
    /// # Errors
    /// [`KernelError::Refused`] where there is no band.
    pub(crate) fn new(kernel: &'static str, far: Option<FarKeys>) -> Result<Self, KernelError> {
        let Some(FarKeys { sink_tokens, distances: [first_distance, last_distance], num_bands, first_band }) = far
        else {
            return Ok(Self::default());
        };
        require!(num_bands > 0, kernel, "number of bands": num_bands, "at least 1");
        Ok(Self { sink_tokens, first_distance, last_distance, num_bands, first_band })
    }
}

/// How the Hopper backward kernel divides the queries of a document's first keys, which all its queries see, among
/// thread blocks (`kernels/common/sink_chunk.cuh`).
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SinkChunks {
    /// Queries of a chunk of the row.
    pub(crate) chunk_queries: usize,
    /// Tiles of keys in which the first keys of a document may lie.
    pub(crate) sink_tiles: usize,
    /// Thread blocks of a KV head, beside one for each tile of keys.
    pub(crate) num_blocks: usize,
}

/// A block of 2048 queries takes about as long as a block of a tile of keys at usual sizes, whose other blocks wait for
/// its sums of dq. It leaves 128 KiB of sums at a head_dim of 128.
const CHUNK_QUERIES: usize = 2048;

impl SinkChunks {
    /// The chunks of a pass by key tiles; none where the portable kernels run.
    pub(crate) fn of(pass: &PassInputs<'_>, far: FarWords) -> Self {
        match pass.family() {
            KernelFamily::Hopper => Self::new(pass.shape.seq_len, far.sink_tokens),
            KernelFamily::Portable => Self::default(),
        }
    }

    /// The chunks of a row, for a document that begins anywhere.
    fn new(seq_len: usize, sink_tokens: usize) -> Self {
        // A document may begin at the last token of a tile.
        let sink_tiles = match sink_tokens.min(seq_len) {
            0 => 0,
            sinks => (sinks + BLOCK_KV - 2) / BLOCK_KV + 1,
        };
        let num_blocks = (seq_len.div_ceil(CHUNK_QUERIES) - 1) * sink_tiles;
        Self { chunk_queries: CHUNK_QUERIES, sink_tiles, num_blocks }
    }

    /// f32 of the sums of all blocks of a call.
    fn num_sums(self, shape: &AttentionShape) -> usize {
        shape.batch * shape.num_kv_heads * self.num_blocks * BLOCK_KV * (shape.head_dim + shape.head_dim_v)
    }

    /// Room for the blocks' sums, and their flags, which are 0.
    pub(crate) fn buffers(self, shape: &AttentionShape, like: &CudaTensor) -> Result<[CudaTensor; 2], KernelError> {
        let flags = shape.batch * shape.num_kv_heads * self.num_blocks;
        let sums = like.empty_contiguous(&[self.num_sums(shape).max(1)], DType::F32);
        Ok([sums, empty_zero(like, &[flags.max(1)])?])
    }
}

/// Bytes of the sums of dk and dv that the blocks of a document's first `sink_tokens` keys leave in a backward pass on
/// a Hopper GPU.
pub fn sink_sum_bytes(shape: &AttentionShape, sink_tokens: usize) -> usize {
    SinkChunks::new(shape.seq_len, sink_tokens).num_sums(shape) * DType::F32.size()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_keys_get_blocks_for_each_chunk_but_the_first() {
        let blocks = |seq_len, sinks| SinkChunks::new(seq_len, sinks).num_blocks;
        assert_eq!([(1, 64), (4096, 64), (4097, 64), (32768, 64)].map(|(n, sinks)| blocks(n, sinks)), [0, 2, 4, 30]);
        assert_eq!([0, 1, 2, 129, 130].map(|sinks| blocks(5000, sinks)), [0, 2, 4, 4, 6]);
        let shape = AttentionShape::new(2, 32768, [16, 8], [128; 2]);
        assert_eq!(sink_sum_bytes(&shape, 64), 2 * 8 * 30 * 128 * 256 * 4);
    }
}
