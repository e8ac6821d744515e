// nsa_choose: the blocks whose tokens a query reads: the last ones up to its own, its document's first ones, then the
// most important; of equally important ones the later (arXiv:2502.11089, eq. 11, with two last ones and a first one).
// Math       the num_selected largest by (importance, number of the block), the forced ones first; a query whose own
//            block is b has b + 1 to choose from
// Layout     importance f32 [batch, num_kv_heads, num_queries, num_blocks] of the queries from first_query on,
//            as nsa_importance writes it; doc_start i32 [batch, seq_len]; block_indices i32
//            [batch, seq_len, num_kv_heads, num_selected]: ascending, counted from the document's first token, then -1
// Buffers    importance, doc_start, block_indices
// Defines    none
// Method     of each lane's importances the largest; the needed-th largest of those 32 is a bound that the chosen
//            reach. If at most 32 importances reach it, each goes to a lane, which counts the larger ones. Otherwise
//            the least importance taken is found bit by bit
// Tiling     grid (ceil(num_queries / 8), num_kv_heads, batch); 256 threads, a warp a query
// Numerics   exact; every element of these queries written
// Edges      any num_selected >= 1, num_local >= 1; forced blocks beyond num_selected stay out, first ones before last
//            ones; NaN counts as most important
#include "common/order_key.cuh"
#include "common/programmatic_launch.cuh"

constexpr int HELD = 32, WARPS = 8;  // importances that a lane keeps in registers; further ones are read again
constexpr int BOUND_BIT = 12;        // the bound need not be exact: lower bits are left out

struct NsaChooseParams {
  u64 seq_len, num_kv_heads, select_size, num_selected, first_query, num_queries, num_blocks;
  u64 num_first, num_local;  // forced blocks
};

// An integer that sorts as the importance does. It is above 0 for every importance; 0 stands for no block.
DEVICE u32 order_of(float x) { return order_of_score(x); }

// The choice of a query, and the address of its list.
struct Choice {
  const float* from;  // importance of block `first`
  int count, needed;  // blocks to choose from, from `first` on, and how many to choose (fewer)
  i32* to;
  int first;
};

// Takes exactly `needed` of the `reached` blocks whose importance is at least `least`: of those equal to `least` the
// earliest are left out.
DEVICE void take_reaching(const Choice& choice, u32 least, int reached) {
  const int lane = (int)threadIdx.x % 32;
  const u32 below = (1u << lane) - 1;
  int surplus = reached - choice.needed, place = 0;
  for (int at = 0; at < choice.count; at += 32) {
    const bool inside = at + lane < choice.count;
    const u32 value = inside ? order_of(choice.from[at + lane]) : 0,
              equal = __ballot_sync(~0u, inside && value == least);
    const bool taken = inside && (value > least || (value == least && __popc(equal & below) >= surplus));
    const u32 takers = __ballot_sync(~0u, taken);
    if (taken) choice.to[place + __popc(takers & below)] = at + lane + choice.first;
    surplus = max(surplus - __popc(equal), 0);
    place += __popc(takers);
  }
}

// Lane l has the blocks first + l, first + l + 32, ... `room`: 32 places of the warp in shared memory.
template <int NUM>
DEVICE void choose(const Choice& choice, uint2* room) {
  const int lane = (int)threadIdx.x % 32;
  const u32 below = (1u << lane) - 1;
  u32 held[NUM], most = 0;
#pragma unroll
  for (int i = 0; i < NUM; ++i) {
    held[i] = i * 32 + lane < choice.count ? order_of(choice.from[i * 32 + lane]) : 0;
    most = max(most, held[i]);
  }
  if (NUM == HELD) {
    for (int at = HELD * 32 + lane; at < choice.count; at += 32) most = max(most, order_of(choice.from[at]));
  }

  // A lower bound of the result: the largest number that the largest importances of `needed` lanes reach.
  u32 bound = 0;
  for (int bit = 31; bit >= BOUND_BIT; --bit) {
    const u32 tried = bound | 1u << bit;
    if (__popc(__ballot_sync(~0u, most >= tried)) >= choice.needed) bound = tried;
  }
  int reached = 0;
#pragma unroll
  for (int i = 0; i < NUM; ++i) {
    const bool reaches = bound > 0 && held[i] >= bound;
    const u32 all = __ballot_sync(~0u, reaches);
    const int place = reached + __popc(all & below);
    if (reaches && place < 32) room[place] = make_uint2(held[i], i * 32 + lane + choice.first);
    reached += __popc(all);
  }
  if (bound > 0 && reached <= 32 && choice.count <= NUM * 32) {
    __syncwarp();  // a lane reads what another lane wrote
    const uint2 mine = lane < reached ? room[lane] : make_uint2(0, 0);
    int ahead = 0;
    for (int other = 0; other < reached; ++other) {
      const u32 value = __shfl_sync(~0u, mine.x, other);
      ahead += value > mine.x || (value == mine.x && other > lane);
    }
    const u32 takers = __ballot_sync(~0u, lane < reached && ahead < choice.needed);
    if (takers >> lane & 1) choice.to[__popc(takers & below)] = (int)mine.y;
    return;
  }
  // Finds the largest integer that at least `needed` importances reach, bit by bit from the top.
  u32 least = 0;
  reached = choice.count;
  for (int bit = 31; bit >= 0 && reached > choice.needed; --bit) {
    const u32 tried = least | 1u << bit;
    u32 sum = 0;
#pragma unroll
    for (int i = 0; i < NUM; ++i) sum += held[i] >= tried;
    if (NUM == HELD) {
      for (int at = HELD * 32 + lane; at < choice.count; at += 32) sum += order_of(choice.from[at]) >= tried;
    }
    const int num = (int)__reduce_add_sync(~0u, sum);
    if (num >= choice.needed) least = tried, reached = num;
  }
  take_reaching(choice, least, reached);
}

extern "C" __global__ void __launch_bounds__(256)
    nsa_choose(const float* importance, const i32* doc_start, i32* block_indices,
               const __grid_constant__ NsaChooseParams params) {
  wait_for_previous();
  const int batch = (int)blockIdx.z, kv_head = (int)blockIdx.y, lane = (int)threadIdx.x % 32,
            in_range = (int)blockIdx.x * 8 + __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
  const int query = (int)params.first_query + in_range;
  if (in_range >= (int)params.num_queries || query >= (int)params.seq_len) return;
  const int own =
                __shfl_sync(~0u, (query - doc_start[(u64)batch * params.seq_len + query]) / (int)params.select_size, 0),
            num_selected = (int)params.num_selected;
  i32* chosen = block_indices + (((u64)batch * params.seq_len + query) * params.num_kv_heads + kv_head) * num_selected;
  // The list begins with the document's first blocks and ends with the last ones up to the query's own.
  const int count = min(num_selected, own + 1), last = min(count, (int)params.num_local),
            first = min(count - last, (int)params.num_first);
  const int needed = count - last - first;

  if (needed > 0) {
    const u64 row = ((u64)batch * params.num_kv_heads + kv_head) * params.num_queries + in_range;
    const Choice choice = {importance + row * params.num_blocks + first, own + 1 - last - first, needed, chosen + first,
                           first};
    if (choice.count <= needed) {
      for (int at = lane; at < choice.count; at += 32) choice.to[at] = at + first;
    } else {
      __shared__ uint2 rooms[WARPS][32];
      uint2* room = rooms[threadIdx.x / 32];
      if (needed > 32 || choice.count > HELD * 16) choose<HELD>(choice, room);
      else if (choice.count > HELD * 8) choose<HELD / 2>(choice, room);
      else if (choice.count > HELD * 4) choose<HELD / 4>(choice, room);
      else choose<HELD / 8>(choice, room);
    }
  }
  for (int i = lane; i < first; i += 32) chosen[i] = i;
  for (int i = lane; i < last; i += 32) chosen[count - 1 - i] = own - i;
  for (int i = count + lane; i < num_selected; i += 32) chosen[i] = -1;
}
