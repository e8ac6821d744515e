// embedding_carry: completes the runs of embedding_backward that cross chunks.
// Math       dweight[id] += ended[c] + begun[c + 1] + ... + begun[e], for each run that begins in chunk c and ends in
//            chunk e > c
// Layout     as in embedding_backward
// Buffers    order, begun, ended, dweight
// Defines    none
// Tiling     grid (ceil(tokens / 32), ceil(width / 2048)); 256 threads, eight columns each; blocks whose chunk begins
//            no such run end at once
// Numerics   f32 sums in a fixed order
// Edges      a run may cover any number of chunks
#include "common/token_runs.cuh"

struct EmbeddingCarryParams { u64 tokens, vocab_size, width, dweight_stride; };

// A block completes the run, if there is one, that begins in its chunk of tokens and goes on past it; a thread has
// eight columns.
extern "C" __global__ void __launch_bounds__(RUN_WARPS * 32)
embedding_carry(const int2* order, const float* begun, const float* ended, float* dweight,
                const __grid_constant__ EmbeddingCarryParams params) {
  const int lane = threadIdx.x & 31, chunk = blockIdx.x;
  const TokenRuns runs = {order, (int)params.tokens, (int)gridDim.x};
  const int id = order[runs.end(chunk) - 1].x;
  const bool whole_chunk_is_older = order[chunk * RUN_CHUNK].x == id && runs.began_before(chunk);
  if (id >= (int)params.vocab_size || !runs.goes_on(chunk, id) || whole_chunk_is_older) return;

  // The run's last chunk: 32 chunks looked at together.
  int last = chunk + 1;
#pragma unroll 1
  for (;;) {
    const int next = last + 1 + lane;
    const u32 same = __ballot_sync(0xffffffffu, next < runs.num_chunks && order[(i64)next * RUN_CHUNK].x == id);
    const int more = same == 0xffffffffu ? 32 : __ffs((int)~same) - 1;
    last += more;
    if (more < 32) break;
  }

  const u64 column = (u64)blockIdx.y * RUN_COLUMNS + threadIdx.x * 8;
  if (column >= params.width) return;
  float sum[8];
  load_f32x8(ended + chunk * params.width + column, sum);
#pragma unroll 4
  for (int c = chunk + 1; c <= last; c++) {
    float part[8];
    load_f32x8(begun + c * params.width + column, part);
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] += part[i];
  }
  add_f32x8(dweight + id * params.dweight_stride + column, sum);
}
