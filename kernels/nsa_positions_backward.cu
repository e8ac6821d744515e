// nsa_positions_backward: gradients of the position embeddings that nsa_blocks adds, as partial sums for column_sums.
// Math       partials[p, w, t, c] = sum over the used rows of part p of dy[w, row, t, c]; empty slots do not count
// Layout     dy bf16 [2, batch * num_slots * num_kv_heads, columns], columns = size * width; doc_start, doc_end i32
//            [batch, seq_len]; partials f32 [parts, 2, columns]; contiguous
// Buffers    dy, doc_start, doc_end, partials
// Defines    none
// Tiling     grid (ceil(columns / 1024), 2, parts): a part takes every parts-th slot of the batch; 128 threads, 8
//            columns each; no shared memory
// Numerics   f32 sums in a fixed order; every element written; memory-bound
// Edges      columns a multiple of 8
#include "common/bf16x8.cuh"
#include "common/nsa_blocks.cuh"

struct NsaPositionsBackwardParams {
  u64 batch, seq_len, num_kv_heads, columns, size, stride, num_slots;
};

// A block sums 1024 columns over the slots of its part, for keys (blockIdx.y 0) or values (1); a thread has eight
// columns.
extern "C" __global__ void __launch_bounds__(128)
    nsa_positions_backward(const bf16* dy, const i32* doc_start, const i32* doc_end, float* partials,
                           const __grid_constant__ NsaPositionsBackwardParams params) {
  const u64 column = ((u64)blockIdx.x * 128 + threadIdx.x) * 8, slots = params.batch * params.num_slots;
  if (column >= params.columns) return;
  float sum[8] = {};
  for (u64 slot = blockIdx.z; slot < slots; slot += gridDim.z) {
    const u64 row = slot / params.num_slots * params.seq_len;
    const CompressedBlocks blocks = {doc_start + row, doc_end + row, (int)params.size, (int)params.stride};
    if (blocks.start((int)(slot % params.num_slots)) < 0) continue;
#pragma unroll 4
    for (u64 head = 0; head < params.num_kv_heads; ++head) {
      float part[8];
      unpack_bf16x8(
          load_16_bytes(dy + ((blockIdx.y * slots + slot) * params.num_kv_heads + head) * params.columns + column),
          part);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] += part[i];
    }
  }
  store_f32x8(partials + ((u64)blockIdx.z * 2 + blockIdx.y) * params.columns + column, sum);
}
