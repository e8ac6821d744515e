// mla_decode_join: combines the split-KV partials of mla_decode.
// Math       o = sum_s 2^(m_s - max m) v_s / sum_s 2^(m_s - max m) l_s over the parts {m_s, l_s, v_s} of a row
// Layout     partials f32 [rows, num_splits, VALUE_DIM + 2]: maximum in base 2, sum, weighted columns; o bf16
//            [rows, VALUE_DIM]
// Buffers    partials, o
// Defines    VALUE_DIM (a multiple of 16)
// Tiling     grid (rows, ceil(VALUE_DIM / 128)); 256 threads: four groups take every fourth part, each thread two
//            columns
// Numerics   f32, one rounding at the store; fixed order: two runs are bit-equal
// Edges      num_splits is at most 4096; parts that saw no key have maximum -inf and weight 0
#include "common/block_sums.cuh"
#include "common/mma.cuh"
#include "common/programmatic_launch.cuh"

static_assert(VALUE_DIM % 16 == 0, "columns are stored in pairs");
constexpr int THREADS = 256, GROUPS = 4, COLUMNS = 128, MAX_SPLITS = 4096;

struct MlaDecodeJoinParams { u64 num_splits; };

// A block joins 128 columns of one row (a query head of a token): a thread has two columns of every fourth part.
extern "C" __global__ void __launch_bounds__(THREADS)
    mla_decode_join(const float* __restrict__ partials, bf16* __restrict__ o,
                    const __grid_constant__ MlaDecodeJoinParams params) {
  __shared__ float weights[MAX_SPLITS], reduced[THREADS / 32];
  __shared__ __align__(8) float parts[GROUPS][COLUMNS];
  wait_for_previous();
  constexpr int ROW = VALUE_DIM + 2;
  const int num_splits = (int)params.num_splits;
  const float* row = partials + (i64)blockIdx.x * num_splits * ROW;

  // Compute the weight of each part.
  float largest = -INFINITY_F32, total = 0.f;
  for (int split = threadIdx.x; split < num_splits; split += THREADS) {
    weights[split] = row[(i64)split * ROW];
    largest = fmaxf(largest, weights[split]);
  }
  largest = block_largest<THREADS>(largest, reduced);
  const float base = largest == -INFINITY_F32 ? 0.f : largest;
  for (int split = threadIdx.x; split < num_splits; split += THREADS) {
    weights[split] = exp2_fast(weights[split] - base);
    total += weights[split] * row[(i64)split * ROW + 1];
  }
  total = block_sum<THREADS>(total, reduced);  // its barriers also make the weights known

  // Two columns of every fourth part, then of the four groups.
  const int group = threadIdx.x / (COLUMNS / 2), pair = threadIdx.x % (COLUMNS / 2) * 2,
            column = blockIdx.y * COLUMNS + pair;
  float first = 0.f, second = 0.f;
  if (column < VALUE_DIM) {
#pragma unroll 8
    for (int split = group; split < num_splits; split += GROUPS) {
      const float2 value = *(const float2*)(row + (i64)split * ROW + 2 + column);
      first = fmaf(weights[split], value.x, first);
      second = fmaf(weights[split], value.y, second);
    }
  }
  parts[group][pair] = first, parts[group][pair + 1] = second;
  __syncthreads();  // every group's sums are stored
  if (group > 0 || column >= VALUE_DIM) return;
#pragma unroll
  for (int other = 1; other < GROUPS; other++) first += parts[other][pair], second += parts[other][pair + 1];
  const float inverse = total > 0.f ? 1.f / total : 0.f;
  *(u32*)(o + (i64)blockIdx.x * VALUE_DIM + column) = pack_bf16(first * inverse, second * inverse);
}
