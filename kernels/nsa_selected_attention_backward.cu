// nsa_selected_attention_backward: gradients of attention over the chosen blocks, keys outermost: a block of threads
// holds a block's K and V and streams the rows of its list. attention_backward_prepare runs before it,
// nsa_selected_combine (dq) and dma_attention_backward_convert (dk, dv) after it.
// Math       as attention_backward over the pairs of a choice and the block's keys j <= i: each choice's part of dq =
//            sum_j dS_ij k_j (without softmax_scale), dk_sum_j += sum_i dS_ij q_i (without softmax_scale), dv_sum_j +=
//            sum_i P_ij do_i
// Layout     q, k, v, doc_start, doc_end, entries, items, num_items as nsa_selected_attention_forward; do bf16
//            [batch, seq_len, num_heads, HEAD_DIM] contiguous;
//            row_stats f32 pairs [batch, num_heads, padded_len, 2]; dq_parts bf16 as parts; dk_sum, dv_sum f32
//            [batch, num_kv_heads, seq_len, HEAD_DIM] with columns in dma_attention_backward's order, zero before the
//            first launch
// Buffers    q, k, v, do, row_stats, doc_start, doc_end, entries, items, num_items, dq_parts, dk_sum, dv_sum
// Defines    HEAD_DIM 64|128; tiling NUM_WARPS 4 (64 keys), BLOCK_Q 32|64, MIN_BLOCKS
// Tiling     grid (max_items, num_kv_heads, batch), blocks past num_items leave at once; 128 threads; dynamic shared
//            bytes = (64 + 2 * BLOCK_Q) * HEAD_DIM * 4 + 3 * 64 * BLOCK_Q * 2 + 16 * BLOCK_Q + 64 * 8 + 192 +
//            64 * BLOCK_Q
// Numerics   as attention_backward; dk_sum, dv_sum: one f32 add per key and item: in a fixed order where each list is
//            one item; parts rounded to bf16
// Edges      select_size <= 64; any group; keys of a block that no query chose are neither read nor written
#define CHOSEN_ROWS 1
#define DETERMINISTIC 0
#include "common/attention_params.cuh"
#include "common/add_rows.cuh"
static_assert(BLOCK_KV == 64, "a block of threads holds one block of keys");

// A block has one item: a piece of the list of queries that chose a cell's blocks. For each of its documents, whose
// queries all chose one block of keys, it loads that block and walks through the queries.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    nsa_selected_attention_backward(const bf16* q, const bf16* k, const bf16* v, const bf16* d_out,
                                    const float2* row_stats, const i32* doc_start, const i32* doc_end,
                                    const int2* entries, const int4* items, const i32* num_items, bf16* dq_parts,
                                    float* dk_sum, float* dv_sum,
                                    const __grid_constant__ NsaSelectedAttentionBackwardParams params) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const int batch = (int)blockIdx.z, kv_head = (int)blockIdx.y, num_heads = (int)params.num_heads,
            group = num_heads / (int)params.num_kv_heads;
  const u64 list = (u64)batch * params.num_kv_heads + kv_head;
  if ((int)blockIdx.x >= num_items[list]) return;
  const int4 item = items[list * params.max_items + blockIdx.x];
  entries += list * params.choices + item.x;
  const u32 shared = shared_address(shared_memory);

  for (int first = 0, next; first < item.y; first = next) {
    const ChosenRun run = chosen_run(entries, first, item.y, item.z, (int)params.select_size, group,
                                     doc_start + batch * params.seq_len, doc_end + batch * params.seq_len, next);
    __syncthreads();  // no thread reads the last run's keys any more
    copy_rows<HEAD_DIM, BLOCK_KV>(shared, k + params.k_offset + batch * params.k_batch_stride + (u64)kv_head * HEAD_DIM,
                                  (u32)params.k_token_stride, run.first_key, run.end_key);
    copy_rows<HEAD_DIM, BLOCK_KV>(shared + K_BYTES,
                                  v + params.v_offset + batch * params.v_batch_stride + (u64)kv_head * HEAD_DIM,
                                  (u32)params.v_token_stride, run.first_key, run.end_key);
    int2* keys = (int2*)(shared_memory + ENTRIES_AT);
    for (int at = (int)threadIdx.x; at < BLOCK_KV; at += THREADS)
      keys[at] = {run.first_key + at, run.first_key + at < run.end_key ? 0x7fffffff : 0};
    __syncthreads();  // the keys are read by other threads

    BackwardBlock block;
    block.q = q + params.q_offset + batch * params.q_batch_stride;
    block.q_stride = (u32)params.q_token_stride;
    block.d_out = d_out + (u64)batch * params.seq_len * num_heads * HEAD_DIM;
    block.stats = row_stats + (u64)batch * num_heads * params.padded_len;
    block.num_heads = num_heads;
    block.group_size = group;
    block.seq_len = (int)params.seq_len;
    block.padded_len = (int)params.padded_len;
    block.first_tile = 0;
    block.num_tiles = ceil_div(run.num_rows, BLOCK_Q);
    block.scale_log2 = f32_word(params.softmax_scale) * LOG2_E;
    block.kv_head = kv_head;
    block.run = run;
    block.last_token = run.entries[next - first - 1].x;
    block.dq_parts = dq_parts + list * params.choices * group * HEAD_DIM;
    KeyGradients sums;
    attention_backward_block(block, shared_memory, sums);

    // Accumulate: dk and dv of the piece's queries are added to the block's f32 sums.
    keys += (int)threadIdx.x / 64 * 32;
    add_rows<HEAD_DIM, HALF_K_PAIRS>(dk_sum + list * params.seq_len * HEAD_DIM, sums.dk, keys);
    add_rows<HEAD_DIM, HALF_V_PAIRS>(dv_sum + list * params.seq_len * HEAD_DIM, sums.dv, keys);
  }
}
