// nsa_blocks_backward: gradients of nsa_blocks to keys and values.
// Math       dx_w[token, head, c] = sum over the blocks that hold the token, first to last, of
//            dy[w, row, place in the block, c] (MEAN 0), or of dy[w, row, c] / size (MEAN 1); w = 0 keys, 1 values;
//            row = (batch * num_slots + slot) * num_kv_heads + head, slot as in common/nsa_blocks.cuh; queries get 0
// Layout     dy bf16 [2, rows, size, width] (MEAN 0) or [2, rows, width] (MEAN 1); dqkv bf16 [batch, seq_len,
//            num_heads + 2 * num_kv_heads, width]; doc_start, doc_end i32 [batch, seq_len]; contiguous
// Buffers    dy, doc_start, doc_end, dqkv
// Defines    MEAN 0|1
// Tiling     grid (seq_len, batch): a block writes a token; 128 threads, 8 columns each; no shared memory
// Numerics   f32 sums in a fixed order, one rounding; every element written; memory-bound
// Edges      width a multiple of 8
#include "common/bf16x8.cuh"
#include "common/nsa_blocks.cuh"

struct NsaBlocksBackwardParams {
  u64 seq_len, num_heads, num_kv_heads, width, size, stride, num_slots;
};

// A block writes the gradient of one token of the packed tensor; a thread has eight of its columns at a time.
extern "C" __global__ void __launch_bounds__(128)
    nsa_blocks_backward(const bf16* dy, const i32* doc_start, const i32* doc_end, bf16* dqkv,
                        const __grid_constant__ NsaBlocksBackwardParams params) {
  const int token = (int)blockIdx.x, batch = (int)blockIdx.y, size = (int)params.size, stride = (int)params.stride,
            heads = (int)params.num_kv_heads;
  const int chunks = (int)params.width / 8, q_words = (int)params.num_heads * chunks,
            words = q_words + 2 * heads * chunks;
  const CompressedBlocks blocks = {doc_start + (u64)batch * params.seq_len, doc_end + (u64)batch * params.seq_len, size,
                                   stride};
  const int document = blocks.doc_start[token], offset = token - document;
  const int first = max(0, ceil_div(offset - size + 1, stride));
  const int count = min(offset / stride + 1, blocks.num_seen(blocks.doc_end[token] - 1, document));
  const u64 slot = (u64)batch * params.num_slots + blocks.first_slot(document);
  for (int at = (int)threadIdx.x; at < words; at += 128) {
    float sum[8] = {};
    if (at >= q_words) {
      const int which = (at - q_words) / (heads * chunks), head = (at - q_words) / chunks % heads, chunk = at % chunks;
      for (int c = first; c < count; ++c) {
        const u64 row = ((u64)which * gridDim.y * params.num_slots + slot + c) * heads + head;
        float part[8];
#if MEAN
        unpack_bf16x8(load_16_bytes(dy + (row * chunks + chunk) * 8), part);
#else
        unpack_bf16x8(load_16_bytes(dy + ((row * size + offset - c * stride) * chunks + chunk) * 8), part);
#endif
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] += part[i];
      }
#if MEAN
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] *= 1.0f / (float)size;
#endif
    }
    store_16_bytes(dqkv + (((u64)batch * params.seq_len + token) * words + at) * 8, pack_bf16x8(sum));
  }
}
