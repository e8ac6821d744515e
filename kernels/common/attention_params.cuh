// attention_params: the params of the attention kernels. A portable kernel and its Hopper form take the same struct.
#pragma once
#include "types.cuh"

// Queries that share a list of keys: 1024 in dma_lists.cu, 128 in dma_ordered_lists.cu.
#ifndef LIST_QUERIES
#define LIST_QUERIES 1024
#endif
[[maybe_unused]] constexpr int SUPER_BLOCK = LIST_QUERIES;

// What all begin with; offsets and strides count elements.
struct AttentionParams {
  u64 batch, seq_len, num_heads, num_kv_heads;
  u64 q_offset, k_offset, v_offset;
  u64 q_token_stride, k_token_stride, v_token_stride;
  u64 q_batch_stride, k_batch_stride, v_batch_stride;
};

// Parameters that decoding kernels begin with, where q, k and v are one token a row; elements.
struct TokenParams {
  u64 num_heads, num_kv_heads;
  u64 softmax_scale;  // f32 bits
  u64 q_offset, k_offset, v_offset;
  u64 q_batch_stride, k_batch_stride, v_batch_stride;
};

struct AttentionForwardParams : AttentionParams {
  u64 window;         // keys a query sees at most, itself included; seq_len or more: no window
  u64 softmax_scale;  // f32 bits
};

// With HAS_FAR, the keys beyond the window (far_keys.cuh); else 0.
struct AttentionFarForwardParams : AttentionForwardParams {
  u64 sink_tokens, first_distance, last_distance, num_bands, first_band;
};

struct AttentionRowSumsParams : AttentionForwardParams {
  u64 padded_len;  // rows of row_stats a head
};

struct AttentionBackwardQueryParams : AttentionRowSumsParams {
  u64 dq_offset, dq_token_stride, dq_batch_stride;
  u64 sink_tokens, first_distance, last_distance, num_bands, first_band;  // as in AttentionFarForwardParams
};

struct AttentionBackwardParams : AttentionParams {
  u64 dk_offset, dv_offset;
  u64 dk_token_stride, dv_token_stride;
  u64 dk_batch_stride, dv_batch_stride;
  u64 window;         // as in AttentionForwardParams
  u64 softmax_scale;  // f32 bits
  u64 padded_len;     // rows of row_stats and dq_sum a head
  u64 head_shares, query_shares;  // blocks that share a tile of keys (query_share.cuh)
  u64 sink_tokens, first_distance, last_distance, num_bands, first_band;  // as in AttentionFarForwardParams
  u64 chunk_queries, sink_tiles;  // HAS_FAR on Hopper: queries of a chunk, tiles of its blocks (sink_chunk.cuh)
};

struct AttentionBackwardPrepareParams {
  u64 batch, seq_len, num_heads, padded_len;
};

struct DmaAttentionForwardParams : AttentionParams {
  u64 softmax_scale;  // f32 bits
  u64 list_capacity;  // capacity of a list in entries
  u64 tile_queries;   // queries a row of tile_window stands for; divides SUPER_BLOCK
};

struct DmaAttentionRowSumsParams : AttentionParams {
  u64 softmax_scale;  // f32 bits
  u64 list_capacity;  // capacity of a list in entries
  u64 padded_len;     // rows of row_stats a head
  u64 tile_queries;   // as in DmaAttentionForwardParams
};

struct DmaAttentionBackwardQueryParams : AttentionParams {
  u64 softmax_scale;  // f32 bits
  u64 list_capacity;  // capacity of a list in entries
  u64 padded_len;     // rows of row_stats a head
  u64 dq_offset, dq_token_stride, dq_batch_stride;
  u64 tile_queries;   // as in DmaAttentionForwardParams
};

struct DmaAttentionBackwardParams : AttentionParams {
  u64 dk_offset, dv_offset;
  u64 dk_token_stride, dv_token_stride;
  u64 dk_batch_stride, dv_batch_stride;
  u64 softmax_scale;  // f32 bits
  u64 padded_len;     // rows of row_stats a head
  u64 list_capacity;  // capacity of a list in entries
  u64 first_super_block;
  u64 dq_len;         // queries of the launch: super_blocks * SUPER_BLOCK
  u64 head_shares;    // blocks that share a chunk of a list: each takes some of the KV head's query heads
};

struct SparseAttentionForwardParams : AttentionParams {
  u64 num_queries, first_row, num_slots;
  u64 query_tile, query_offset, key_tile, num_query_tiles;
  u64 heads_per_list, heads_per_order;  // query heads that share a list, an order of keys
  u64 tile_order, row_ptr, tile_idx, col_ptr, col_idx, key_order, query_order, windows;  // elements into mask
  u64 softmax_scale;  // f32 bits
  u64 first_head, launch_heads, launch_kv_heads;  // the launch's query heads, and the KV heads that share their work
  u64 num_blocks, num_probes, gamma;              // BLOCK_LSE (block_lse.cuh)
};

struct SparseAttentionBackwardQueryParams : SparseAttentionForwardParams {
  u64 padded_len;  // rows of row_stats a head
  u64 dq_offset, dq_token_stride, dq_batch_stride;
};

struct NsaSelectedAttentionForwardParams {
  u64 seq_len, num_heads, num_kv_heads;
  u64 q_offset, k_offset, v_offset;  // offsets and strides in elements
  u64 q_token_stride, k_token_stride, v_token_stride;
  u64 q_batch_stride, k_batch_stride, v_batch_stride;
  u64 softmax_scale;  // f32 bits
  u64 select_size, choices, max_items, batch;
};

struct NsaSelectedAttentionBackwardParams : NsaSelectedAttentionForwardParams {
  u64 padded_len;  // rows of row_stats a head
};

// v is the indexer's key head, in the packed tensor of its queries.
struct IndexGradientParams : NsaSelectedAttentionForwardParams {
  u64 index_q_offset;
};

struct NsaImportanceParams {
  u64 seq_len, num_heads, choosers, q_offset, q_token_stride, q_batch_stride;      // elements
  u64 softmax_scale;                                                               // f32 bits
  u64 compress_size, stride, select_size, num_slots, first_query, num_queries, num_blocks;
  u64 key_group;  // heads that choose by one head of pooled keys
};
