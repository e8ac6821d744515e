// sparse_keys: which keys and which queries a tile has under a selector's mask: lists of key tiles per query tile,
// single keys beside them, both sequences possibly permuted, a window per list. Shared by sparse_attention_forward.cu
// and hopper_sparse_attention_forward.cu, which document the mask.
// Slots are places in the permuted sequences; positions are tokens of the tensors. Keys 0 .. num_keys - 1, the queries
// are the last of them. A query tile lists a slot once: no tile or column twice, no column inside a listed tile, and an
// order names each token once; a key that is listed twice weighs twice (PackedMask of sieve-core checks host-made
// masks).
#pragma once
#include "common/types.cuh"

constexpr int NEVER = 0x7fffffff;

// The keys of one tile of queries, in the order in which they are read: key tiles as listed, then single keys.
struct SparseKeys {
  const i32* tiles;      // key tiles of the query tile; null: all keys up to the last query
  const i32* columns;    // single slots
  const i32* order;      // the key in each slot; null: in order
  int num_tile_keys;     // slots of the tiles, those past the last key included
  int num_columns, key_tile, num_keys;
  int first_query, last_query;  // positions; with permuted queries of the whole call
  int init, local;              // a key from `init` on is seen by the `local` queries from its own position on

  DEVICE int count() const { return num_tile_keys + num_columns; }

  // The key at a place and the first position that does not see it any more; {0, 0} where no query of the tile sees a
  // key: nothing is read there.
  DEVICE int2 entry(int at) const {
    int slot;
    if (at < num_tile_keys) {
      const int tile = at / key_tile;
      slot = (tiles ? tiles[tile] : tile) * key_tile + at % key_tile;
    } else {
      if (at >= count()) return make_int2(0, 0);
      slot = columns[at - num_tile_keys];
    }
    if (slot >= num_keys) return make_int2(0, 0);
    const int key = order ? order[slot] : slot, expire = key < init || key > NEVER - local ? NEVER : key + local;
    if (key > last_query || expire <= first_query) return make_int2(0, 0);
    return make_int2(key, expire);
  }
};

// The query rows of one tile, in the order of the call or permuted.
struct SparseQueries {
  const i32* order;        // from the tile's first slot on: the row of the call in each slot; null: in order
  int context;             // position of the call's first row
  int first, end;          // in order: positions of the tile. Permuted: 0 and one past the last key
  int num_slots;           // slots of the tile; 0 or less: the tile does not exist

  // The position of a row of the tile; `none` past its last slot.
  DEVICE int position(int row, int none) const {
    if (row >= num_slots) return none;
    return order ? context + order[row] : first + row;
  }
};

// The mask of a launch. All arrays lie in one buffer of i32; the place of one that is absent is 0.
struct SparseMask {
  const i32* data;
  int num_heads, num_kv_heads, num_keys, num_queries;
  int first_head, launch_heads, launch_kv_heads;  // the heads of this launch
  int first_row, num_slots;               // rows of the call that this launch computes: all, or some
  int order_stride;                       // of heads in query_order: an order of some rows only is shared by all heads
  int query_tile, query_offset, key_tile, num_query_tiles;
  int heads_per_list, heads_per_order;
  u64 tile_order, row_ptr, tile_idx, col_ptr, col_idx, key_order, query_order, windows;

  // Takes the members that the params structs of these kernels have in common; their seq_len counts keys, and `data` is
  // the launch's mask.
  template <class Params>
  DEVICE SparseMask(const i32* data, const Params& params)
      : data(data),
        num_heads((int)params.num_heads),
        num_kv_heads((int)params.num_kv_heads),
        num_keys((int)params.seq_len),
        num_queries((int)params.num_queries),
        first_head((int)params.first_head),
        launch_heads((int)params.launch_heads),
        launch_kv_heads((int)params.launch_kv_heads),
        first_row((int)params.first_row),
        num_slots((int)params.num_slots),
        order_stride(num_slots == num_queries ? num_queries : 0),
        query_tile((int)params.query_tile),
        query_offset((int)params.query_offset),
        key_tile((int)params.key_tile),
        num_query_tiles((int)params.num_query_tiles),
        heads_per_list((int)params.heads_per_list),
        heads_per_order((int)params.heads_per_order),
        tile_order(params.tile_order),
        row_ptr(params.row_ptr),
        tile_idx(params.tile_idx),
        col_ptr(params.col_ptr),
        col_idx(params.col_idx),
        key_order(params.key_order),
        query_order(params.query_order),
        windows(params.windows) {}

  // The query tile that is `rank`-th by its number of keys, most first.
  DEVICE int tile_of_rank(int head, int rank) const {
    return tile_order ? data[tile_order + (u64)(head / heads_per_list) * num_query_tiles + rank]
                      : num_query_tiles - 1 - rank;
  }

  // Query slots [part * rows, (part + 1) * rows) of a tile.
  DEVICE SparseQueries queries(int head, int tile, int part, int rows) const {
    const int tile_end = (tile + 1) * query_tile - query_offset,
              first_slot = max(tile_end - query_tile, 0) + part * rows;
    SparseQueries queries;
    queries.context = num_keys - num_queries;
    queries.num_slots = min(min(tile_end, num_slots) - first_slot, rows);
    queries.order = query_order ? data + query_order + (u64)head * order_stride + first_slot : nullptr;
    queries.first = query_order ? 0 : queries.context + first_row + first_slot;
    queries.end = query_order ? num_keys : queries.first + max(queries.num_slots, 0);
    return queries;
  }

  // The keys that the mask shows to these queries.
  DEVICE SparseKeys keys(int head, int tile, const SparseQueries& queries) const {
    const int list = head / heads_per_list;
    const u64 row = (u64)list * num_query_tiles + tile;
    SparseKeys keys;
    keys.key_tile = key_tile;
    keys.num_keys = num_keys;
    keys.first_query = queries.order ? queries.context : queries.first;
    keys.last_query = queries.end - 1;
    // Heads that share a list share the order of the first of them.
    keys.order = key_order ? data + key_order + (u64)(list * heads_per_list / heads_per_order) * num_keys : nullptr;
    keys.tiles = nullptr;
    keys.num_tile_keys = queries.end;
    if (row_ptr) {
      const int begin = data[row_ptr + row];
      keys.tiles = data + tile_idx + begin;
      keys.num_tile_keys = (data[row_ptr + row + 1] - begin) * key_tile;
    }
    keys.columns = nullptr;
    keys.num_columns = 0;
    if (col_ptr) {
      const int begin = data[col_ptr + row];
      keys.columns = data + col_idx + begin;
      keys.num_columns = data[col_ptr + row + 1] - begin;
    }
    keys.init = windows ? data[windows + 2 * list] : NEVER;
    keys.local = windows ? data[windows + 2 * list + 1] : NEVER;
    return keys;
  }
};
