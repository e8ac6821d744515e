// select_order: tokens of each segment by falling score, equal scores in token order (PBS-Attn, arXiv:2510.21270;
// BA-Att, arXiv:2605.19726).
// Math       segment g holds the positions g * segment .. (g + 1) * segment; order[s] of its slots: its tokens in order
//            of score
// Layout     score f32 [sets, num_tokens] of the tokens from position first_position on; order i32 [sets, num_tokens],
//            counted from first_position
// Buffers    score, nan, order
// Defines    none
// Tiling     grid (segments that the tokens meet, sets, 1); 512 threads; no dynamic shared memory
// Numerics   exact order of f32; NaN last
// Edges      at most 512 tokens a segment. whole_only: an incomplete segment keeps its order. heads_per_set > 0: a set
//            keeps its order if nan > 0 for one of its heads
#include "common/block_sort.cuh"
#include "common/order_key.cuh"

struct SelectOrderParams {
  u64 num_tokens, first_position, segment, whole_only, heads_per_set;
};

// A block sorts the tokens of one segment, one a thread, by falling score.
extern "C" __global__ void __launch_bounds__(512)
    select_order(const float* score, const i32* nan, i32* order, const __grid_constant__ SelectOrderParams params) {
  __shared__ u64 front[512], back[512];
  const int segment = (int)params.segment, first = (int)params.first_position, num_tokens = (int)params.num_tokens,
            set = (int)blockIdx.y, per_set = (int)params.heads_per_set;
  const int number = first / segment + (int)blockIdx.x, begin = max(number * segment - first, 0),
            end = min((number + 1) * segment - first, num_tokens);
  score += (u64)set * num_tokens;
  order += (u64)set * num_tokens;
  bool stays = params.whole_only && (number + 1) * segment - first > num_tokens;
  for (int head = set * per_set; head < (set + 1) * per_set; ++head) stays |= nan[head] != 0;
  const int slot = begin + (int)threadIdx.x;
  if (stays) {
    if (slot < end) order[slot] = slot;
    return;
  }
  int size = 32;
  while (size < end - begin) size *= 2;
  u64 key = ~0ull;
  if (slot < end) {
    const float x = score[slot];
    key = order_key(x != x ? ~0u : ~order_of_score(x), (u32)slot);
  }
  key = block_sort(key, front, back, size);
  if (slot < end) order[slot] = (i32)(u32)key;
}
