// nsa_choose: the blocks whose tokens a query of native sparse attention reads: its own, the one before, its document's first, then the most important; of
// equally important ones the later (arXiv:2502.11089, eq. 11).
// Math       the num_selected largest by (importance, number of the block), the forced ones first; a query whose own block is b has b + 1 to choose from
// Layout     importance f32 [batch, num_kv_heads, num_queries, num_blocks] of the queries from first_query on, as nsa_importance writes it; doc_start i32 [batch,
//            seq_len]; block_indices i32 [batch, seq_len, num_kv_heads, num_selected]: ascending, counted from the document's first token, then -1
// Buffers    importance, doc_start, block_indices
// Defines    none
// Tiling     grid (ceil(num_queries / 8), num_kv_heads, batch); 256 threads, a warp a query; no shared memory
// Numerics   exact: the least importance taken is found bit by bit; every element of these queries written
// Edges      any num_selected >= 1; NaN counts as most important
#include "common/types.cuh"

constexpr int HELD = 16;  // importances a lane keeps in registers; more are read again

struct NsaChooseParams {
  u64 seq_len, num_kv_heads, select_size, num_selected, first_query, num_queries, num_blocks;
};

// Numbers in the order of f32::total_cmp.
DEVICE u32 order_of(float x) {
  const u32 bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Importances of the blocks 1 .. count of a query; lane l has the blocks l + 1, l + 33, ...
struct Candidates {
  const float* from;
  int count;
  u32 held[HELD];
  DEVICE void load() {
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      const int at = i * 32 + (int)threadIdx.x % 32;
      held[i] = at < count ? order_of(from[at]) : 0;
    }
  }
  DEVICE u32 later(int at) const { return at < count ? order_of(from[at]) : 0; }
  // How many are `least` (above 0) or more.
  DEVICE u32 at_least(u32 least) const {
    u32 sum = 0;
#pragma unroll
    for (int i = 0; i < HELD; ++i) sum += held[i] >= least;
    for (int at = HELD * 32 + (int)threadIdx.x % 32; at < count; at += 32) sum += later(at) >= least;
    return __reduce_add_sync(~0u, sum);
  }
};

extern "C" __global__ void __launch_bounds__(256) nsa_choose(const float* importance, const i32* doc_start, i32* block_indices,
                                                            const __grid_constant__ NsaChooseParams params) {
  const int batch = (int)blockIdx.z, kv_head = (int)blockIdx.y, lane = (int)threadIdx.x % 32, in_range = (int)blockIdx.x * 8 + (int)threadIdx.x / 32;
  const int query = (int)params.first_query + in_range;
  if (in_range >= (int)params.num_queries || query >= (int)params.seq_len) return;
  const int own = (query - doc_start[(u64)batch * params.seq_len + query]) / (int)params.select_size, num_selected = (int)params.num_selected;
  i32* chosen = block_indices + (((u64)batch * params.seq_len + query) * params.num_kv_heads + kv_head) * num_selected;
  const int count = min(num_selected, own + 1), last = min(count, 2), first = count > 2;  // own and the one before end the list, the document's first begins it
  const int needed = count - last - first;

  if (needed > 0) {
    Candidates candidates;
    candidates.from = importance + (((u64)batch * params.num_kv_heads + kv_head) * params.num_queries + in_range) * params.num_blocks + 1;
    candidates.count = own - 2;
    candidates.load();
    // The largest number that `needed` of them reach.
    u32 least = 0, reached = (u32)candidates.count;
    for (int bit = 31; bit >= 0 && reached > (u32)needed; --bit) {
      const u32 tried = least | 1u << bit, num = candidates.at_least(tried);
      if (num >= (u32)needed) least = tried, reached = num;
    }
    // Of those that just reach it the earliest stay out.
    int surplus = (int)reached - needed, place = first;
    for (int at = 0; at < candidates.count; at += 32) {
      const u32 value = candidates.later(at + lane), below = (1u << lane) - 1;
      const u32 equal = __ballot_sync(~0u, at + lane < candidates.count && value == least);
      const bool taken = at + lane < candidates.count && (value > least || (value == least && __popc(equal & below) >= surplus));
      const u32 takers = __ballot_sync(~0u, taken);
      if (taken) chosen[place + __popc(takers & below)] = at + lane + 1;
      surplus = max(surplus - __popc(equal), 0);
      place += __popc(takers);
    }
  }
  if (lane == 0) {
    if (first) chosen[0] = 0;
    for (int i = 0; i < last; ++i) chosen[count - 1 - i] = own - i;
  }
  for (int i = count + lane; i < num_selected; i += 32) chosen[i] = -1;
}
