// nsa_choose: the blocks whose tokens a query reads: the last ones up to its own, its document's first ones, then the
// most important; of equally important ones the later (arXiv:2502.11089, eq. 11, with two last ones and a first one).
// Math       the num_selected largest by (importance, number of the block), the forced ones first; a query whose own
//            block is b has b + 1 to choose from
// Layout     importance f32 [batch, choosers, num_queries, num_blocks] of the queries from first_query on,
//            as nsa_importance writes it; doc_start i32 [batch, seq_len]; block_indices i32
//            [batch, seq_len, choosers, num_selected]: ascending, counted from the document's first token, then -1
// Buffers    importance, doc_start, block_indices
// Defines    QUERY_THREADS (32: a warp a query; 1024: a block a query, for few queries with long rows)
// Method     a warp: of each lane's importances the largest; the needed-th largest of those 32 is a bound that the
//            chosen reach. If at most 32 importances reach it, each goes to a lane, which counts the larger ones.
//            Otherwise the least importance taken is found bit by bit. A block: radix_select.cuh finds the least taken
//            (importance, number); each warp then writes what its blocks have taken, behind the warps before
// Tiling     32: grid (ceil(num_queries / 8), choosers, batch), 256 threads; 1024: grid (num_queries,
//            choosers, batch), 1024 threads
// Numerics   exact; every element of these queries written
// Edges      any num_selected >= 1, num_local >= 1; forced blocks beyond num_selected stay out, first ones before last
//            ones; NaN counts as most important; 1024: num_blocks at most 2^22 (radix_select.cuh)
#include "common/block_stream.cuh"
#include "common/order_key.cuh"
#include "common/programmatic_launch.cuh"
#include "common/radix_select.cuh"

#ifndef QUERY_THREADS
#define QUERY_THREADS 32
#endif
constexpr int QUERIES = QUERY_THREADS == 32 ? 8 : 1;  // of a thread block
static_assert(QUERY_THREADS == 32 || QUERY_THREADS == SELECT_THREADS, "a query has a warp or a block");

constexpr int HELD = 32;  // importances that a lane keeps in registers; further ones are read again

struct NsaChooseParams {
  u64 seq_len, choosers, select_size, num_selected, first_query, num_queries, num_blocks;
  u64 num_first, num_local;  // forced blocks
};

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
    const u32 value = inside ? order_of_score(choice.from[at + lane]) : 0,
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
  u32 held[NUM], most = 0;  // 0: no block
#pragma unroll
  for (int i = 0; i < NUM; ++i) {
    held[i] = i * 32 + lane < choice.count ? order_of_score(choice.from[i * 32 + lane]) : 0;
    most = max(most, held[i]);
  }
  if (NUM == HELD) {
    for (int at = HELD * 32 + lane; at < choice.count; at += 32) most = max(most, order_of_score(choice.from[at]));
  }

  // A lower bound of the result: the largest number that the largest importances of `needed` lanes reach. It need not
  // be exact: lower bits are left out.
  constexpr int BOUND_BIT = 12;
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
      for (int at = HELD * 32 + lane; at < choice.count; at += 32) sum += order_of_score(choice.from[at]) >= tried;
    }
    const int num = (int)__reduce_add_sync(~0u, sum);
    if (num >= choice.needed) least = tried, reached = num;
  }
  take_reaching(choice, least, reached);
}

// The blocks of a choice as keys of radix_select, and none: structs, since NVRTC takes a generic lambda for host code.
struct BlockKeys {
  const Choice& choice;
  template <class Visit>
  DEVICE void operator()(Visit visit) const {
    for_each_word<SELECT_THREADS, 4>((const u32*)choice.from, 0, choice.count,
                                     [&](u32 bits, i32 at) { visit(order_of_bits(bits), (u32)at); });
  }
};
struct NoKeys {
  template <class Visit>
  DEVICE void operator()(Visit) const {}
};

// Every thread of the block calls.
DEVICE void choose_by_block(const Choice& choice) {
  __shared__ RadixSelect<1> select;
  radix_begin<1>(select, 0, (u32)choice.needed);
  radix_select<1>(select, 0, BlockKeys{choice}, NoKeys{});
  const u64 least = select.threshold[0];
  // Consecutive blocks of a warp, a multiple of 32; they are counted, then written.
  const int lane = (int)threadIdx.x % 32, span = ceil_div(choice.count, SELECT_THREADS) * 32,
            begin = (int)threadIdx.x / 32 * span, end = min(begin + span, choice.count);
  auto taken = [&](int at) { return at < end && order_key(order_of_score(choice.from[at]), (u32)at) >= least; };
  u32 mine = 0, all;
#pragma unroll 4
  for (int at = begin; at < end; at += 32) mine += taken(at + lane);
  u32 place = __shfl_sync(~0u, block_exclusive_sum<SELECT_THREADS>(mine, select.warp_sums, all), 0);
  for (int at = begin; at < end; at += 128) {
    bool takes[4];  // four loads before the stores
#pragma unroll
    for (int i = 0; i < 4; ++i) takes[i] = taken(at + i * 32 + lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 takers = __ballot_sync(~0u, takes[i]), below = (1u << lane) - 1;
      if (takes[i]) choice.to[place + __popc(takers & below)] = at + i * 32 + lane + choice.first;
      place += __popc(takers);
    }
  }
}

// A warp, or with QUERY_THREADS 1024 a block, writes the list of one query and chooser: forced blocks at both ends, and
// between them the most important of the others.
extern "C" __global__ void __launch_bounds__(QUERY_THREADS * QUERIES)
    nsa_choose(const float* importance, const i32* doc_start, i32* block_indices,
               const __grid_constant__ NsaChooseParams params) {
  wait_for_previous();
  const int batch = (int)blockIdx.z, kv_head = (int)blockIdx.y, thread = (int)threadIdx.x % QUERY_THREADS,
            in_range = (int)blockIdx.x * QUERIES + __shfl_sync(~0u, (int)threadIdx.x / QUERY_THREADS, 0);
  const int query = (int)params.first_query + in_range;
  if (in_range >= (int)params.num_queries || query >= (int)params.seq_len) return;
  const int own =
                __shfl_sync(~0u, (query - doc_start[(u64)batch * params.seq_len + query]) / (int)params.select_size, 0),
            num_selected = (int)params.num_selected;
  i32* chosen = block_indices + (((u64)batch * params.seq_len + query) * params.choosers + kv_head) * num_selected;
  // The list begins with the document's first blocks and ends with the last ones up to the query's own.
  const int count = min(num_selected, own + 1), last = min(count, (int)params.num_local),
            first = min(count - last, (int)params.num_first);
  const int needed = count - last - first;

  if (needed > 0) {
    const u64 row = ((u64)batch * params.choosers + kv_head) * params.num_queries + in_range;
    const Choice choice = {importance + row * params.num_blocks + first, own + 1 - last - first, needed, chosen + first,
                           first};
    if (choice.count <= needed) {
      for (int at = thread; at < choice.count; at += QUERY_THREADS) choice.to[at] = at + first;
    } else if constexpr (QUERY_THREADS == SELECT_THREADS) {
      choose_by_block(choice);
    } else {
      __shared__ uint2 rooms[QUERIES][32];
      uint2* room = rooms[threadIdx.x / 32];
      if (needed > 32 || choice.count > HELD * 16) choose<HELD>(choice, room);
      else if (choice.count > HELD * 8) choose<HELD / 2>(choice, room);
      else if (choice.count > HELD * 4) choose<HELD / 4>(choice, room);
      else choose<HELD / 8>(choice, room);
    }
  }
  for (int i = thread; i < first; i += QUERY_THREADS) chosen[i] = i;
  for (int i = thread; i < last; i += QUERY_THREADS) chosen[count - 1 - i] = own - i;
  for (int i = count + thread; i < num_selected; i += QUERY_THREADS) chosen[i] = -1;
}
