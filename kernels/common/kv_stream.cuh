// kv_stream: loads the keys and values that a tile of queries sees into shared memory, tile by tile, contiguous or
// gathered by a list.
// Defines    HEAD_DIM, HEAD_DIM_V, BLOCK_KV keys a tile, NUM_WARPS, NUM_STAGES (2 or more tiles in flight or in use),
//            HAS_BIAS, GATHER, SPARSE
// A ring of NUM_STAGES slots holds K and V (swizzled rows) and, with HAS_BIAS, the keys' delta. With GATHER a second
// ring holds the list entries {key, expire}; they must have arrived before the rows they name can be loaded, so they
// run NUM_STAGES - 1 tiles further ahead. With SPARSE they come from a selector's mask in place of a list.
#pragma once
#include "common/copy_rows.cuh"
#include "common/far_keys.cuh"

#ifndef HEAD_DIM_V
#define HEAD_DIM_V HEAD_DIM
#endif
#ifndef GATHER
#define GATHER 0
#endif
#ifndef SPARSE
#define SPARSE 0  // with 1, include sparse_keys.cuh before
#endif
static_assert(BLOCK_KV % 16 == 0, "P x V takes 16 keys a step");
static_assert(!HAS_FAR || !(GATHER || SPARSE || HAS_BIAS), "keys beyond a window come in one form");
static_assert(NUM_STAGES >= 2, "one tile is used while the next one arrives");

constexpr int K_TILE_BYTES = BLOCK_KV * HEAD_DIM * 2;
constexpr int V_TILE_BYTES = BLOCK_KV * HEAD_DIM_V * 2;
constexpr int KV_STAGE_BYTES = K_TILE_BYTES + V_TILE_BYTES;
// Number of tiles between the copy of list entries and the use of the scores of their rows.
constexpr int ENTRY_LEAD = 2 * (NUM_STAGES - 1);
constexpr int ENTRY_SLOTS = NUM_STAGES == 2 ? 4 : NUM_STAGES <= 4 ? 8 : 16;  // a power of two above ENTRY_LEAD
constexpr int BIAS_BYTES = HAS_BIAS ? NUM_STAGES * BLOCK_KV * 4 : 0;
constexpr int ENTRY_BYTES = GATHER ? ENTRY_SLOTS * BLOCK_KV * 8 : 0;
constexpr int KV_STREAM_BYTES = NUM_STAGES * KV_STAGE_BYTES + BIAS_BYTES + ENTRY_BYTES;
using KTile = SwizzledTile<HEAD_DIM>;
using VTile = SwizzledTile<HEAD_DIM_V>;

// The tensors that a tile of queries streams. Pointers are to the batch row and the KV head.
struct KvStream {
  const bf16* k;
  const bf16* v;
  u32 k_stride, v_stride;  // elements from token to token
  const float* delta;      // [seq_len] of the KV head (HAS_BIAS)
  const int2* list;        // the query tile's window of the list (GATHER)
#if SPARSE
  const SparseKeys* keys;  // in place of the list, in shared memory
#endif
  int num_keys;            // seq_len, or with GATHER the window's length
  int num_tiles;
  int last_tile;           // dense: tiles are visited from this one (by key / BLOCK_KV) downwards
#if HAS_FAR
  const KeyTiles<BLOCK_KV>* tiles;  // in place of all from the last one; in shared memory
#endif
  unsigned char* ring;     // shared memory, KV_STREAM_BYTES
  int slot;                // slot of the tile in use

  DEVICE u32 k_slot(int slot) const { return shared_address(ring) + (u32)slot * KV_STAGE_BYTES; }
  DEVICE u32 v_slot(int slot) const { return k_slot(slot) + K_TILE_BYTES; }
  DEVICE float* bias_slot(int slot) const { return (float*)(ring + NUM_STAGES * KV_STAGE_BYTES) + slot * BLOCK_KV; }
  DEVICE int2* entry_slot(int it) const {
    return (int2*)(ring + NUM_STAGES * KV_STAGE_BYTES + BIAS_BYTES) + (it & (ENTRY_SLOTS - 1)) * BLOCK_KV;
  }
  // Dense: the first key of the it-th tile visited.
  DEVICE int first_key(int it) const {
#if HAS_FAR
    return tiles->tile(it) * BLOCK_KV;
#else
    return (last_tile - it) * BLOCK_KV;
#endif
  }

  // Starts the copies of the entries of tile `it`; entries past the window arrive as {0, 0}, which no query sees.
  DEVICE void load_entries(int it) const {
#if GATHER
    if (it < num_tiles) {
#pragma unroll
      for (int first = 0; first < BLOCK_KV; first += THREADS) {
        const int row = first + (int)opaque(threadIdx.x), at = it * BLOCK_KV + row;
        if (row >= BLOCK_KV) break;
#if SPARSE
        entry_slot(it)[row] = keys->entry(at);
#else
        copy_async_8(shared_address(entry_slot(it) + row), list + at, at < num_keys ? 8 : 0);
#endif
      }
    }
#endif
  }

  // Starts the copies of the rows of tile `it` into `slot`; the tile's entries must have arrived.
  DEVICE void load_rows(int it, int slot) const {
    if (it >= num_tiles) return;
#if GATHER
    const int2* entries = entry_slot(it);
    gather_rows<HEAD_DIM, BLOCK_KV>(k_slot(slot), k, k_stride, entries);
    gather_rows<HEAD_DIM_V, BLOCK_KV>(v_slot(slot), v, v_stride, entries);
#else
    copy_rows<HEAD_DIM, BLOCK_KV>(k_slot(slot), k, k_stride, first_key(it), num_keys);
    copy_rows<HEAD_DIM_V, BLOCK_KV>(v_slot(slot), v, v_stride, first_key(it), num_keys);
#endif
#if HAS_BIAS
#pragma unroll
    for (int first = 0; first < BLOCK_KV; first += THREADS) {
      const int row = first + (int)opaque(threadIdx.x);
      if (row >= BLOCK_KV) break;
#if GATHER
      int2 entry = entries[row];
      copy_async_4(shared_address(bias_slot(slot) + row), delta + entry.x, entry.y > 0 ? 4 : 0);
#else
      int key = first_key(it) + row;
      copy_async_4(shared_address(bias_slot(slot) + row), delta + key, key < num_keys ? 4 : 0);
#endif
    }
#endif
  }

  // Fills the pipeline. The caller's own copies made before join the first group.
  DEVICE void start() {
#if GATHER
    for (int it = 0; it < ENTRY_LEAD; ++it) load_entries(it);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();  // every thread needs entries that others have copied
#endif
#pragma unroll
    for (int it = 0; it < NUM_STAGES - 1; ++it) {
      load_rows(it, it);
      copy_async_commit();
    }
    slot = NUM_STAGES - 1;
  }

  // Waits for tile `it` and starts loading the tile that takes the slot freed by the barrier.
  DEVICE void advance(int it) {
    copy_async_wait<NUM_STAGES - 2>();
    __syncthreads();  // every thread may read tile `it`, and no thread reads tile it - 1 any more
    const int freed = slot;
    slot = slot == NUM_STAGES - 1 ? 0 : slot + 1;
    load_rows(it + NUM_STAGES - 1, freed);
    load_entries(it + ENTRY_LEAD);
    copy_async_commit();
  }
};
