// embedding_backward: gradient of the embedding table, added to an f32 sum; runs that cross chunks leave partial sums
// for embedding_carry.
// Math       dweight[id] += sum over tokens t of that id, in ascending order, of dy[t]
// Layout     dy bf16 [tokens, width], rows dy_stride apart; order int2 [tokens] from embedding_order; dweight f32
//            [vocab_size, width], rows dweight_stride apart; begun, ended f32 [ceil(tokens / 32), width]; width a
//            multiple of 8, strides of 8 (dweight's of 4)
// Buffers    dy, order, dweight, begun, ended
// Defines    none
// Tiling     grid (ceil(tokens / 32), ceil(width / 2048)); 256 threads; a block takes a chunk of 32 sorted tokens, a
//            lane eight columns
// Numerics   f32 sums in a fixed order, no atomics: a run inside one chunk is added to its row by the only block that
//            has it; memory-bound
// Edges      tokens not a multiple of 32; tokens whose id is outside the table are skipped
#include "common/token_runs.cuh"

struct EmbeddingBackwardParams { u64 tokens, vocab_size, width, dy_stride, dweight_stride; };

constexpr int BATCH = 8;  // rows that a thread loads at once

// A block has a chunk of 32 sorted tokens and 2048 columns of them. Lane l of every warp holds entry l of the chunk,
// and a thread eight columns of each row.
extern "C" __global__ void __launch_bounds__(RUN_WARPS * 32)
embedding_backward(const bf16* dy, const int2* order, float* dweight, float* begun, float* ended,
                   const __grid_constant__ EmbeddingBackwardParams params) {
  const int lane = threadIdx.x & 31, chunk = blockIdx.x;
  const TokenRuns runs = {order, (int)params.tokens, (int)gridDim.x};
  const u64 column = (u64)blockIdx.y * RUN_COLUMNS + threadIdx.x * 8;
  const bool active = column < params.width;
  const int first = chunk * RUN_CHUNK, count = runs.end(chunk) - first;
  const int2 entry = order[first + min(lane, count - 1)];  // {id, token} that the other lanes take from this one
  const bool began_before = runs.began_before(chunk);
  const int vocab_size = (int)params.vocab_size;

  float sum[8] = {};
  bool is_first_run = true;
#pragma unroll 1
  for (int base = 0; base < count; base += BATCH) {
    // Load BATCH rows of dy before the first is added, to overlap their latencies.
    uint4 words[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const i64 token = __shfl_sync(0xffffffffu, entry.y, (base + i) & 31);
      if (active && base + i < count) words[i] = load_16_bytes(dy + token * params.dy_stride + column);
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int at = base + i;
      const int id = __shfl_sync(0xffffffffu, entry.x, at & 31),
                next = __shfl_sync(0xffffffffu, entry.x, (at + 1) & 31);
      if (at < count) {
        if (active) {
          float values[8];
          unpack_bf16x8(words[i], values);
#pragma unroll
          for (int k = 0; k < 8; k++) sum[k] += values[k];
        }
        const bool is_last = at == count - 1;
        if (is_last || next != id) {
          // Store: the end of a run, or of its part in this chunk.
          if (active) {
            if (is_first_run && began_before) store_f32x8(begun + chunk * params.width + column, sum);
            else if (is_last && runs.goes_on(chunk, id)) store_f32x8(ended + chunk * params.width + column, sum);
            else if (id < vocab_size) add_f32x8(dweight + id * params.dweight_stride + column, sum);
          }
#pragma unroll
          for (int k = 0; k < 8; k++) sum[k] = 0.f;
          is_first_run = false;
        }
      }
    }
  }
}
