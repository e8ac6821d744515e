// query_share: which of the queries that see a key tile a thread block takes. Several blocks may share a key tile where
// few KV heads or short rows would leave multiprocessors idle: the KV head's query heads are divided among them first,
// then the queries of a head.
// Defines    SHARES (0): 1 where blocks share tiles
#pragma once
#include "common/types.cuh"

#ifndef SHARES
#define SHARES 0
#endif

struct QueryShare {
  int kv_head, place;         // place: index of the block among the blocks of its tile and KV head
  int first_head, num_heads;  // this block's part of the KV head's query heads
  int part, num_parts;        // this block's part of the query tiles that see a key

  // `at` counts KV heads and in each the blocks of a tile; head_shares <= group_size.
  DEVICE QueryShare(int at, int group_size, int head_shares, int query_shares) : num_parts(query_shares) {
    kv_head = at / (head_shares * query_shares);
    place = at % (head_shares * query_shares);
    const int head_share = place / query_shares;
    part = place % query_shares;
    first_head = head_share * group_size / head_shares;
    num_heads = (head_share + 1) * group_size / head_shares - first_head;
  }

  // Cuts a range of query tiles down to the block's part.
  template <class Block>
  DEVICE void take_part(Block& block) const {
    const int begin = block.num_tiles * part / num_parts, end = block.num_tiles * (part + 1) / num_parts;
    block.first_tile += begin;
    block.num_tiles = end - begin;
  }
};

// Bytes that the blocks of one share of a KV head's query heads stream, `row_bytes` a query.
DEVICE u64 share_bytes(u64 seq_len, int group_size, int head_shares, int row_bytes) {
  return seq_len * ceil_div(group_size, head_shares) * row_bytes;
}

// Address of a part of a sum over queries, for a warp's keys: f32
// [batch, num_kv_heads, blocks of a tile, padded_len / 16, WIDTH / 8, 32, 4], 16 x 8 tiles in the order of tensor core
// accumulators.
template <int WIDTH>
DEVICE float* sum_tile(float* sums, u64 head_row, int num_places, int place, u64 padded_len, int first_key) {
  return sums + ((head_row * num_places + place) * padded_len + first_key) * WIDTH + threadIdx.x % 32 * 4;
}
