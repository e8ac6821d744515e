// nsa_selected_combine: combines the partial outputs of a query's chosen blocks by their LSEs, or sums the parts of its
// dq, in the order of the blocks.
// Math       GRADIENT 0: o = sum_s w_s part_s / sum_s w_s, w_s = 2^part_lse_s, lse = log sum_s w_s; a query that chose
//            nothing gets o = 0, lse = -inf; LSE_ONLY 1: lse alone;
//            GRADIENT 1: dq = softmax_scale * sum_s part_s; ONTO 1: o and its lse, or dq, hold a first part already
// Layout     block_indices i32 [batch, seq_len, num_kv_heads, num_selected * per_part], none below 0 and behind the
//            others, a part for each (per_part 1) or for each pair (2); parts bf16 [batch, num_kv_heads, num_queries *
//            num_selected, group, HEAD_DIM], part_lse f32 without HEAD_DIM, of the queries from first_query on; o bf16
//            [batch, seq_len, num_heads, HEAD_DIM], any token and batch stride and an element offset, all multiples of
//            8; lse f32 [batch, num_heads, seq_len]; num_items i32 [num_lists + 1]: the last number, behind the lists',
//            is set to 0: no piece of a list is taken any more, so that another pass can walk the lists
// Buffers    block_indices, num_items, (LSE_ONLY 0: parts,) (GRADIENT 0: part_lse,) (LSE_ONLY 0: o or dq,)
//            (GRADIENT 0: lse)
// Defines    HEAD_DIM 64|128, GRADIENT 0|1, LSE_ONLY (0) 0|1, ONTO (0) 0|1
// Tiling     grid (ceil(num_queries * num_heads / (2048 / HEAD_DIM)), batch); 256 threads, a lane 8 columns of a row;
//            no shared memory
// Numerics   f32 sums in a fixed order, the part of ONTO first, one rounding; every element of these queries written;
//            memory-bound
// Edges      any num_selected
#include "common/bf16x8.cuh"

#ifndef LSE_ONLY
#define LSE_ONLY 0
#endif
#ifndef ONTO
#define ONTO 0
#endif
static_assert(!LSE_ONLY || (!GRADIENT && !ONTO), "log-sum-exps alone are those of the parts");
constexpr u32 LANES = HEAD_DIM / 8, BLOCK_ROWS = 256 / LANES;

struct NsaSelectedCombineParams {
  u64 seq_len, num_heads, num_kv_heads, num_selected, first_query, num_queries;  // num_selected: parts of a query
  u64 offset, token_stride, batch_stride;  // of the output, elements
  u64 softmax_scale;                       // f32 bits
  u64 num_lists;
  u64 per_part;  // block_indices of a part
};

// A group of LANES lanes has one row, a query head of a token; a lane has eight of its columns.
extern "C" __global__ void __launch_bounds__(256)
    nsa_selected_combine(const i32* block_indices, i32* num_items,
#if !LSE_ONLY
                         const bf16* parts,
#endif
#if !GRADIENT
                         const float* part_lse,
#endif
#if !LSE_ONLY
                         bf16* output,
#endif
#if !GRADIENT
                         float* lse,
#endif
                         const __grid_constant__ NsaSelectedCombineParams params) {
  const u32 row = blockIdx.x * BLOCK_ROWS + threadIdx.x / LANES, lane = threadIdx.x % LANES,
            num_heads = (u32)params.num_heads;
  const u32 in_range = row / num_heads, head = row % num_heads, group = num_heads / (u32)params.num_kv_heads,
            kv_head = head / group;
  const u64 query = params.first_query + in_range;
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) num_items[params.num_lists] = 0;
  const bool inside = in_range < (u32)params.num_queries && query < params.seq_len;
  const int most = inside ? (int)params.num_selected : 0;
  const int per_part = (int)params.per_part;
  const i32* chosen = block_indices + ((blockIdx.y * params.seq_len + query) * params.num_kv_heads + kv_head) *
                                          params.num_selected * params.per_part;
  const u64 choice =
      (((u64)blockIdx.y * params.num_kv_heads + kv_head) * params.num_queries + in_range) * params.num_selected;
  const u64 first = choice * group + head % group;  // index of the first part; the next part is `group` further

  // The number of the query's parts and the largest of their log-sum-exps; a lane reads every LANES-th.
  int count = 0;
  [[maybe_unused]] float largest = -INFINITY_F32, total = 0.0f;
#if !GRADIENT
  float* const result_lse = lse + (blockIdx.y * params.num_heads + head) * params.seq_len + query;
#if ONTO
  // Every lane of the row reads it here, before the lanes join `largest`, because lane 0 overwrites it.
  const float before = inside ? *result_lse * LOG2_E : -INFINITY_F32;
  largest = before;
#endif
#endif
  for (int s = (int)lane; s < most; s += LANES) {
    if (chosen[s * per_part] < 0) break;
    ++count;
#if !GRADIENT
    largest = fmaxf(largest, part_lse[first + (u64)s * group]);
#endif
  }
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2) {
    count += __shfl_xor_sync(~0u, count, distance);
#if !GRADIENT
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
#endif
  }
  if (!inside) return;
#if !LSE_ONLY
  bf16* const result = output + params.offset + blockIdx.y * params.batch_stride + query * params.token_stride +
                       (u64)head * HEAD_DIM + lane * 8;
#endif

  // Sum the parts of the row's chosen blocks, in the order of the blocks.
  [[maybe_unused]] float sum[8] = {};
#if ONTO
  unpack_bf16x8(load_16_bytes(result), sum);
#if !GRADIENT
  total = exp2f(before - largest);
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] *= total;
#endif
#endif
#pragma unroll 4
  for (int s = 0; s < count; ++s) {
    const u64 at = first + (u64)s * group;
#if GRADIENT
    const float weight = ONTO ? f32_word(params.softmax_scale) : 1.0f;
#else
    const float weight = exp2f(part_lse[at] - largest);
    total += weight;
#endif
#if !LSE_ONLY
    float part[8];
    unpack_bf16x8(load_16_bytes(parts + at * HEAD_DIM + lane * 8), part);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += weight * part[i];
#endif
  }
#if !GRADIENT
  const bool reads = ONTO || count > 0;  // a key at least
  [[maybe_unused]] const float factor = reads ? 1.0f / total : 0.0f;
  if (lane == 0) *result_lse = reads ? (largest + log2f(total)) * LN_2 : -INFINITY_F32;
#elif !ONTO
  const float factor = f32_word(params.softmax_scale);
#else
  const float factor = 1.0f;
#endif
#if !LSE_ONLY
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] *= factor;
  store_16_bytes(result, pack_bf16x8(sum));
#endif
}
