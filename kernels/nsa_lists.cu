// nsa_lists: the queries that chose each block of keys, ascending, and the pieces of those lists that attention works
// on.
// Math       the entries of a cell are the queries with a choice there, in their order; an item is a piece of one
//            cell's list
// Layout     block_indices, doc_start, counts as nsa_list_counts; entries int2 {query, its choice's number: (query -
//            first_query) * num_selected + place} [batch, num_kv_heads, num_queries * num_selected], cell after cell;
//            items int4 {first entry, entries, cell, number in its cell} [batch, num_kv_heads, max_items], of at most
//            item_queries entries each: of 16 cells together, all first items, then all second ones, so that items of
//            one cell, which add to the same keys, start apart; num_items i32 [batch * num_kv_heads + 1], the last 0:
//            items already taken
// Buffers    block_indices, doc_start, counts, entries, items, num_items
// Defines    none
// Method     a counting sort: 32 queries at a time set their bit in a word of each cell they chose; a query's place is
//            the number of lower bits
// Tiling     grid (parts, num_kv_heads, batch), a part is 256 queries; 512 threads; dynamic shared bytes =
//            num_cells * 8
// Numerics   integers; the same lists in every run
// Edges      a query chooses a block once at most; max_items >= num_queries * num_selected / item_queries + num_cells
#include "common/block_scan.cuh"
#include "common/nsa_cells.cuh"

constexpr int LIST_THREADS = 512, SLOTS = LIST_THREADS / 32;

// A block enters one part, 256 queries, into the lists of one KV head; the block of part 0 also writes the items.
extern "C" __global__ void __launch_bounds__(LIST_THREADS, 3)
    nsa_lists(const i32* block_indices, const i32* doc_start, const i32* counts, int2* entries, int4* items,
              i32* num_items, const __grid_constant__ NsaCellsParams params) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ u32 warp_sums[2][32];
  const Choices choices(block_indices, doc_start, params);
  const int num_cells = (int)params.num_cells, thread = (int)threadIdx.x, lane = thread % 32, parts = (int)gridDim.x;
  u32 *cursor = (u32*)shared_memory, *bits = cursor + num_cells;
  counts += choices.row() * parts * num_cells;
  entries += choices.row() * params.num_queries * params.num_selected;
  items += choices.row() * params.max_items;

  // Where each cell's list begins, this part's piece of it, and its items.
  u32 first_entry = 0, first_item = 0;
  const u32 most = (u32)params.item_queries;
  for (int base = 0; base < num_cells; base += LIST_THREADS) {
    const int cell = base + thread;
    u32 all = 0, before = 0;
    if (cell < num_cells) {
      for (int part = 0; part < parts; ++part) {
        const u32 count = (u32)counts[(u64)part * num_cells + cell];
        if (part < (int)blockIdx.x) before += count;
        all += count;
      }
    }
    const u32 pieces = (all + most - 1) / most;  // items of the cell
    u32 total_entries, total_items;
    const u32 entry = first_entry + block_exclusive_sum<LIST_THREADS>(all, warp_sums[0], total_entries);
    const u32 item = first_item + block_exclusive_sum<LIST_THREADS>(pieces, warp_sums[1], total_items);
    if (cell < num_cells) {
      cursor[cell] = entry + before;
      bits[cell] = 0;
    }
    // The items of 16 neighbouring cells lie together: the first item of each of them, then the second ones, and so on.
    if (blockIdx.x == 0) {
      const u32 first = __shfl_sync(~0u, item, lane & 16);
      u32 neighbours[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) neighbours[i] = __shfl_sync(~0u, pieces, (lane & 16) + i);
      for (u32 piece = 0; piece < pieces; ++piece) {
        u32 at = first;  // then the items that precede it: of cells before this one also their item number `piece`
#pragma unroll
        for (int i = 0; i < 16; ++i) at += min(neighbours[i], piece + (i < lane % 16));
        items[at] = {(int)(entry + piece * most), (int)min(all - piece * most, most), cell, (int)piece};
      }
    }
    first_entry += total_entries;
    first_item += total_items;
    __syncthreads();  // the sums of this round have been read; after the last round the cursors are stored
  }
  if (blockIdx.x == 0 && thread == 0) {
    num_items[choices.row()] = (i32)first_item;
    if (choices.row() == 0) num_items[(u64)gridDim.y * gridDim.z] = 0;
  }

  // Place: lane = query. The cell of a thread's first slot stays in a register; with more slots than warps the others
  // are recomputed.
  for (int base = 0; base < choices.num_queries; base += 32) {
    const int query = base + lane, token = choices.first_query + query, own = thread / 32;
    const int end = query < choices.num_queries ? choices.num_selected : 0,
              own_cell = own < end ? choices.cell(query, own) : -1;
    for (int slot = own; slot < end; slot += SLOTS) {
      const int cell = slot == own ? own_cell : choices.cell(query, slot);
      if (cell >= 0) atomicOr(&bits[cell], 1u << lane);
    }
    __syncthreads();  // all bits of these queries are set
    for (int slot = own; slot < end; slot += SLOTS) {
      const int cell = slot == own ? own_cell : choices.cell(query, slot);
      if (cell >= 0)
        entries[cursor[cell] + __popc(bits[cell] & ((1u << lane) - 1))] = {
            token, (token - choices.range_first) * choices.num_selected + slot};
    }
    __syncthreads();  // every place has been read
    for (int slot = own; slot < end; slot += SLOTS) {
      const int cell = slot == own ? own_cell : choices.cell(query, slot);
      // The first query of a cell adds the number of all its queries and clears the bits after all others have read
      // them.
      const u32 all = cell >= 0 ? bits[cell] : 0;
      if (all != 0 && lane == __ffs((int)all) - 1) cursor[cell] += __popc(all);
    }
    __syncthreads();  // the cursors are advanced
    for (int slot = own; slot < end; slot += SLOTS) {
      const int cell = slot == own ? own_cell : choices.cell(query, slot);
      if (cell >= 0) bits[cell] = 0;
    }
    __syncthreads();  // the bits are cleared
  }
}
