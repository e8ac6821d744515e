// dma_attention_backward_query: dq of exact dynamic mask attention, queries in place: the deterministic partner of
// dma_attention_backward with COMPUTE_DQ 0.
// Math       as attention_backward_query over the pairs j <= i < expire_j
// Layout     q, k, v, delta, base, list, tile_window as dma_attention_forward; do, row_stats, dq
//            as attention_backward_query
// Buffers    q, k, v, do, row_stats, delta, base, list, tile_window, dq
// Defines    as attention_backward_query, HAS_BIAS is always 1; HEADS_PER_TILE as dma_attention_forward; SUPER_BLOCK
//            (1024)
// Tiling     grid as dma_attention_forward with BLOCK_Q = 16 * NUM_WARPS; NUM_WARPS * 32 threads; dynamic shared
//            bytes = (BLOCK_Q + NUM_STAGES * BLOCK_KV) * (HEAD_DIM + HEAD_DIM_V) * 2 + NUM_STAGES * BLOCK_KV * 4 +
//            BLOCK_KV * 8 * (NUM_STAGES == 2 ? 4 : NUM_STAGES <= 4 ? 8 : 16)
// Numerics   as attention_backward_query; the order of sums follows the list
// Edges      any seq_len >= 1; queries that see nothing get 0
#define GATHER 1
#define HAS_BIAS 1
#include "common/attention_params.cuh"
#include "common/attention_backward_query.cuh"

#ifndef SUPER_BLOCK
#define SUPER_BLOCK 1024
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    dma_attention_backward_query(const bf16* q, const bf16* k, const bf16* v, const bf16* d_out,
                                 const float2* row_stats, const float* delta, const float* base, const int2* list,
                                 const i32* tile_window, bf16* dq,
                                 const __grid_constant__ DmaAttentionBackwardQueryParams params) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  constexpr int BLOCK_TILES = ceil_div(SUPER_BLOCK, TILE_QUERIES);
  const int seq_len = (int)params.seq_len, num_heads = (int)params.num_heads, num_kv_heads = (int)params.num_kv_heads;
  const int batch = (int)blockIdx.z, head = (int)blockIdx.y * HEADS_PER_TILE,
            kv_head = head / (num_heads / num_kv_heads);
  const int tile_idx = (int)(gridDim.x - 1 - blockIdx.x), super_block = tile_idx / BLOCK_TILES;

  QueryTile tile;
  tile.first_query = super_block * SUPER_BLOCK + tile_idx % BLOCK_TILES * TILE_QUERIES;
  tile.end_query = min(min(tile.first_query + TILE_QUERIES, (super_block + 1) * SUPER_BLOCK), seq_len);
  if (tile.first_query >= tile.end_query) return;  // past the end of a short last super-block
  tile.q = q + params.q_offset + batch * params.q_batch_stride + (u64)head * HEAD_DIM;
  tile.q_stride = (u32)params.q_token_stride;
  tile.batch = batch;
  tile.head = head;
  tile.num_heads = num_heads;
  tile.seq_len = seq_len;
  tile.scale_log2 = f32_word(params.softmax_scale) * LOG2_E;
  const u64 list_row = (u64)batch * num_kv_heads + kv_head;
  tile.base = base + list_row * ceil_div(seq_len, 64) * 64;
  tile.bias_unit = 1.0f / f32_word(params.softmax_scale);

  // The window's begin falls and its end falls from tile to tile: the last query decides the one, the first query the
  // other.
  const int tile_queries = (int)params.tile_queries, num_windows = ceil_div(seq_len, tile_queries),
            num_super_blocks = ceil_div(seq_len, SUPER_BLOCK);
  const i32* windows = tile_window + list_row * num_windows * 2;
  const int begin = windows[(tile.end_query - 1) / tile_queries * 2],
            end = windows[tile.first_query / tile_queries * 2 + 1];

  KvStream stream;
  stream.k = k + params.k_offset + batch * params.k_batch_stride + (u64)kv_head * HEAD_DIM;
  stream.v = v + params.v_offset + batch * params.v_batch_stride + (u64)kv_head * HEAD_DIM_V;
  stream.k_stride = (u32)params.k_token_stride;
  stream.v_stride = (u32)params.v_token_stride;
  stream.delta = delta + list_row * seq_len;
  stream.list = list + (list_row * num_super_blocks + super_block) * params.list_capacity + begin;
  stream.num_keys = end - begin;
  stream.num_tiles = ceil_div(max(stream.num_keys, 0), BLOCK_KV);
  stream.ring = shared_memory + BLOCK_Q * (HEAD_DIM + HEAD_DIM_V) * 2;

  BackwardQueries back;
  back.d_out = d_out;
  back.stats = row_stats;
  back.dq = dq + params.dq_offset + batch * params.dq_batch_stride + (u64)head * HEAD_DIM;
  back.dq_stride = params.dq_token_stride;
  back.padded_len = (int)params.padded_len;
  back.softmax_scale = f32_word(params.softmax_scale);
  __shared__ QueryTile shared_tile;  // what is needed at the ends of the loop only would cost it registers
  if (threadIdx.x == 0) shared_tile = tile;
  __syncthreads();  // every thread reads it
  attention_backward_query_tile(shared_tile, back, stream, shared_memory);
}
