// nsa_token_lists: the lists of nsa_lists for rows of one query each, a new token behind a cache: every block that the
// token chose is the one entry of a list.
// Math       attended block p = chosen[p / pieces] * pieces + p % pieces, up to the token's own; entry p = {length, p},
//            item p = {p, 1, attended block p, 0}
// Layout     chosen i32 [batch, choosers, num_chosen], ascending, then -1; length i32 [batch], tokens before this one;
//            attended i32 [members, batch, choosers / members, num_chosen * pieces], blocks of block_size tokens, then
//            -1, where chooser c is member c % members of its KV head; entries int2, items int4 of the same shape;
//            num_items i32 [members, batch * choosers / members + 1], the last of a member 0; doc_start, doc_end i32
//            [capacity], of which the numbers at the lengths are written: a document ends with its token
// Buffers    chosen, length, attended, entries, items, num_items, doc_start, doc_end
// Defines    none
// Tiling     grid (choosers, batch); 128 threads, a thread every 128th attended block; no shared memory
// Numerics   integers
// Edges      rows of one length write the same bounds; length >= capacity counts as capacity - 1: the wrapper refuses
//            it; a chooser without a block has an empty list
#include "common/programmatic_launch.cuh"
#include "common/types.cuh"

constexpr int THREADS = 128;

struct NsaTokenListsParams {
  u64 num_chosen, pieces, block_size, capacity, members;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    nsa_token_lists(const i32* chosen, const i32* length, i32* attended, int2* entries, int4* items, i32* num_items,
                    i32* doc_start, i32* doc_end, const __grid_constant__ NsaTokenListsParams params) {
  wait_for_previous();
  const int pieces = (int)params.pieces, places = (int)params.num_chosen * pieces,
            token = min(length[blockIdx.y], (i32)params.capacity - 1), own = token / (int)params.block_size;
  chosen += ((u64)blockIdx.y * gridDim.x + blockIdx.x) * params.num_chosen;
  const u32 members = (u32)params.members, kv_heads = gridDim.x / members, member = blockIdx.x % members,
            rows = gridDim.y * kv_heads, of_member = blockIdx.y * kv_heads + blockIdx.x / members;
  const u64 row = (u64)member * rows + of_member;
  num_items += (u64)member * (rows + 1);
  // The block at a place; -1 behind the last, which is the token's own.
  const auto block_at = [&](int place) {
    const int block = place < places ? chosen[place / pieces] : -1, piece = block * pieces + place % pieces;
    return block < 0 || piece > own ? -1 : piece;
  };
  for (int place = (int)threadIdx.x; place < places; place += THREADS) {
    const int block = block_at(place);
    const u64 at = row * places + place;
    attended[at] = block;
    entries[at] = {token, place};
    items[at] = {place, 1, block, 0};
    if (block >= 0 ? block_at(place + 1) < 0 : place == 0) num_items[of_member] = block >= 0 ? place + 1 : 0;
  }
  if (threadIdx.x > 0) return;
  if (of_member == 0) num_items[rows] = 0;
  doc_start[token] = 0;
  doc_end[token] = token + 1;
}
