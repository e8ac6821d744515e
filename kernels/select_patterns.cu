// select_patterns: for each head, whether it keeps the block map, and how many blocks of columns and of diagonals it
// keeps (FlexPrefill, arXiv:2502.20766). The map is the attention of blocks by products of their means. A head keeps
// the map's largest entries where the estimate, such products of the last queries, agrees with the probe, the exact
// attention of these queries.
// Math       column_blocks, diagonal_blocks: the probe's columns and diagonals, summed over each block; e = softmax of
//            the estimate; distance = sqrt((KL(e | m) + KL(c | m)) / 2) from the column blocks c, m their midpoint.
//            Below tau: `least` blocks of columns and of diagonals beside the map. Else no map, and one block more than
//            the kept tokens fill
// Layout     column, diagonal f32 [heads, num_keys], means over the probe's queries; estimate f32 [heads, blocks];
//            column_tokens, diagonal_tokens u32 [heads, ceil(num_keys / 32)], a bit a token that is kept;
//            column_blocks, diagonal_blocks f32 [heads, blocks]; tops i32 [3, heads]: numbers
//            of columns and of diagonals, both in blocks, and 0 where the map is kept, else -1
// Buffers    column, diagonal, estimate, column_tokens, diagonal_tokens, column_blocks, diagonal_blocks, tops, nan
// Defines    none
// Tiling     grid (heads, 1, 1); 256 threads; no dynamic shared memory
// Numerics   f32 softmax and sums of blocks by rising key, f64 distance
// Edges      an estimate that is NaN: nan of the head grows. At least `least` blocks, at most `most`, in any case
//            one
#include "common/block_sums.cuh"

struct SelectPatternsParams {
  u64 num_heads, num_keys, block, least, most;
  u64 tau;  // f64 bits
};

// x log(x / m); 0 log 0 = 0.
DEVICE double divergence(double x, double m) { return x > 0.0 ? x * log(x / m) : 0.0; }

// A block decides for one head; its blocks of keys and its words of tokens are spread over the threads.
extern "C" __global__ void __launch_bounds__(256)
    select_patterns(const float* column, const float* diagonal, const float* estimate, const u32* column_tokens,
                    const u32* diagonal_tokens, float* column_blocks, float* diagonal_blocks, i32* tops, i32* nan,
                    const __grid_constant__ SelectPatternsParams params) {
  __shared__ float places[8];
  __shared__ double halves[256];
  const int head = (int)blockIdx.x, heads = (int)params.num_heads, num_keys = (int)params.num_keys,
            block = (int)params.block, thread = (int)threadIdx.x;
  const int blocks = ceil_div(num_keys, block), words = ceil_div(num_keys, 32);
  estimate += (u64)head * blocks;
  // The softmax of the estimate over blocks of keys.
  float largest = -INFINITY_F32, bad = 0.0f, sum = 0.0f;
  for (int j = thread; j < blocks; j += 256) {
    const float x = estimate[j];
    if (x != x || x == INFINITY_F32) bad = 1.0f;
    largest = fmaxf(largest, x);
  }
  largest = block_largest<256>(largest, places);
  if (largest == -INFINITY_F32) largest = 0.0f;
  if (block_sum<256>(bad, places) > 0.0f && thread == 0) atomicAdd(nan + head, 1);
  for (int j = thread; j < blocks; j += 256) sum += exp2f((estimate[j] - largest) * LOG2_E);
  sum = block_sum<256>(sum, places);
  const float factor = sum > 0.0f ? 1.0f / sum : 0.0f;
  // The sums of the probe's columns and diagonals over each block, and the block's part of the distance.
  double distance = 0.0;
  for (int j = thread; j < blocks; j += 256) {
    float of_column = 0.0f, of_diagonal = 0.0f;
    for (int key = j * block; key < min((j + 1) * block, num_keys); ++key) {
      of_column += column[(u64)head * num_keys + key];
      of_diagonal += diagonal[(u64)head * num_keys + key];
    }
    column_blocks[(u64)head * blocks + j] = of_column;
    diagonal_blocks[(u64)head * blocks + j] = of_diagonal;
    const double e = exp2f((estimate[j] - largest) * LOG2_E) * factor, middle = (e + of_column) / 2.0;
    distance += divergence(e, middle) + divergence(of_column, middle);
  }
  halves[thread] = distance;
  // The kept tokens of columns and of diagonals.
  float kept[2] = {};
  for (int word = thread; word < words; word += 256) {
    kept[0] += (float)__popc(column_tokens[(u64)head * words + word]);
    kept[1] += (float)__popc(diagonal_tokens[(u64)head * words + word]);
  }
  for (int i = 0; i < 2; ++i) kept[i] = block_sum<256>(kept[i], places);
  if (thread != 0) return;
  distance = 0.0;
  for (int i = 0; i < 256; ++i) distance += halves[i];  // stored before the barriers of the last sum
  const bool has_map = sqrt(fmax(distance / 2.0, 0.0)) < __longlong_as_double((i64)params.tau);
  for (int i = 0; i < 2; ++i) {
    const int needed = min(max((int)kept[i] / block + 1, (int)params.least), (int)params.most);
    tops[i * heads + head] = max(has_map ? (int)params.least : needed, 1);
  }
  tops[2 * heads + head] = has_map ? 0 : -1;
}
