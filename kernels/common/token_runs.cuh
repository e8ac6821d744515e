// token_runs: how the embedding's gradient divides the sorted tokens. A chunk is RUN_CHUNK of them; the tokens of one
// id are a run, which may begin in one chunk and end in another.
#pragma once
#include "common/bf16x8.cuh"

// columns a block of RUN_WARPS warps holds
constexpr int RUN_CHUNK = 32, RUN_WARPS = 8, RUN_COLUMNS = RUN_WARPS * 32 * 8;

struct TokenRuns {
  const int2* order;  // {id, token}, ascending
  int tokens, num_chunks;

  DEVICE int end(int chunk) const { return min((chunk + 1) * RUN_CHUNK, tokens); }
  // Does the run of `id` continue after this chunk?
  DEVICE bool goes_on(int chunk, int id) const {
    return chunk + 1 < num_chunks && order[(chunk + 1) * RUN_CHUNK].x == id;
  }
  // Did the run of this chunk's first token begin before it?
  DEVICE bool began_before(int chunk) const {
    return chunk > 0 && order[chunk * RUN_CHUNK - 1].x == order[chunk * RUN_CHUNK].x;
  }
};

DEVICE void add_f32x8(float* to, const float (&values)[8]) {
  float sum[8];
  load_f32x8(to, sum);
#pragma unroll
  for (int i = 0; i < 8; i++) sum[i] += values[i];
  store_f32x8(to, sum);
}
