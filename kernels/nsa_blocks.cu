// nsa_blocks: the keys and values of every compressed block of native sparse attention (arXiv:2502.11089, eq. 7): side
// by side with a learned vector added for each place in the block, or their mean.
// Math       MEAN 0: y[w, row, t, c] = x_w[start + t, head, c] + position_w[t, c]; MEAN 1: y[w, row, c] = sum over t of
//            x_w[start + t, head, c] / size;
//            w = 0 keys, 1 values; row = (batch * num_slots + slot) * num_kv_heads + head; an empty slot
//            (nsa_blocks.cuh) gives zeros
// Layout     k, v bf16 [batch, seq_len, num_kv_heads, width]: any token and batch stride and an element offset, all
//            multiples of 8; doc_start, doc_end i32 [batch, seq_len]; k_positions, v_positions bf16 [size, width]; y
//            bf16 [2, rows, size * width] or [2, rows, width]; contiguous
// Buffers    k, v, doc_start, doc_end, (MEAN 0: k_positions, v_positions,) y
// Defines    MEAN 0|1
// Tiling     grid (num_slots, 2, batch); 256 threads, 8 columns of a row each; no shared memory
// Numerics   f32 sums in the order of the tokens, one rounding; every element written; memory-bound
// Edges      width a multiple of 8; seq_len shorter than a block: zeros only
#include "common/bf16x8.cuh"
#include "common/nsa_blocks.cuh"

struct NsaBlocksParams {
  u64 seq_len, num_kv_heads, width, size, stride;
  u64 k_offset, v_offset, k_token_stride, v_token_stride, k_batch_stride, v_batch_stride;  // elements
};

// A block writes one slot of compressed keys (blockIdx.y 0) or values (1) for all KV heads; a thread has eight columns
// of a token, or of the mean.
extern "C" __global__ void __launch_bounds__(256)
    nsa_blocks(const bf16* k, const bf16* v, const i32* doc_start, const i32* doc_end,
#if !MEAN
               const bf16* k_positions, const bf16* v_positions,
#endif
               bf16* y, const __grid_constant__ NsaBlocksParams params) {
  const int slot = (int)blockIdx.x, which = (int)blockIdx.y, batch = (int)blockIdx.z, size = (int)params.size,
            heads = (int)params.num_kv_heads;
  const int chunks = (int)params.width / 8;
  const CompressedBlocks blocks = {doc_start + (u64)batch * params.seq_len, doc_end + (u64)batch * params.seq_len, size,
                                   (int)params.stride};
  const int start = blocks.start(slot);
  const u64 stride = which ? params.v_token_stride : params.k_token_stride;
  const bf16* x =
      which ? v + params.v_offset + batch * params.v_batch_stride : k + params.k_offset + batch * params.k_batch_stride;
  x += (u64)(start < 0 ? 0 : start) * stride;
  const u64 first_row = (((u64)which * gridDim.z + batch) * gridDim.x + slot) * heads;
#if MEAN
  for (int at = (int)threadIdx.x; at < heads * chunks; at += 256) {
    float sum[8] = {};
    if (start >= 0) {
#pragma unroll 4
      for (int token = 0; token < size; ++token) {
        float row[8];
        unpack_bf16x8(load_16_bytes(x + (u64)token * stride + at * 8), row);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] += row[i];
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] *= 1.0f / (float)size;
    store_16_bytes(y + (first_row * chunks + at) * 8, pack_bf16x8(sum));
  }
#else
  const bf16* positions = which ? v_positions : k_positions;
#pragma unroll 4
  for (int at = (int)threadIdx.x; at < heads * size * chunks; at += 256) {
    const int in_head = at % (size * chunks), token = in_head / chunks;
    float row[8] = {}, position[8];
    if (start >= 0) {
      unpack_bf16x8(
          load_16_bytes(x + (u64)token * stride + ((u64)(at / (size * chunks)) * chunks + in_head % chunks) * 8), row);
      unpack_bf16x8(load_16_bytes(positions + in_head * 8), position);
#pragma unroll
      for (int i = 0; i < 8; ++i) row[i] += position[i];
    }
    store_16_bytes(y + (first_row * size * chunks + at) * 8, pack_bf16x8(row));
  }
#endif
}
