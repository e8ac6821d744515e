// hopper_sparse_attention_forward: sparse_attention_forward for sm_90a; the same mathematics, layout, buffers, params
// words and results to rounding.
// Math       o_i = sum_j softmax_j(softmax_scale * q_i . k_j) v_j over the keys of i's query tile with
//            j <= i < expire_j; lse_i = log sum_j exp(softmax_scale * q_i . k_j);
//            a query that sees nothing gets o = 0, lse = -inf; BLOCK_LSE: block_lse of probe rows
// Layout     as sparse_attention_forward
// Buffers    (GATHER 0: k_map, v_map by value,) q, k, v, mask, o, lse(, BLOCK_LSE: block_lse)
// Defines    as hopper_attention_forward; HEAD_DIM 64 or 128, NUM_CONSUMERS 2, HEADS_PER_TILE 1; GATHER 1: keys one by
//            one, for any mask; 0: tiles of keys by TMA, for masks without single keys and order of keys whose key
//            tiles are multiples of KEY_BOX (64, 128), PAIRS 1: whose query tiles have 64 rows, with KEY_BOX 64; maps
//            of bf16 [1, seq_len, num_kv_heads * HEAD_DIM], box 1 x KEY_BOX x 64, 128-byte swizzle; BLOCK_LSE as
//            sparse_attention_forward, with GATHER 0, PAIRS 0, KEY_BOX 128
// Tiling     a tile is 128 rows of one query tile, or with PAIRS two consecutive ones.
//            Persistent: grid (multiprocessors, 1, 1);
//            384 threads; dynamic shared bytes = 256 * HEAD_DIM + (K_STAGES + V_STAGES) * 256 * HEAD_DIM + (GATHER
//            ? 4096 : 128) + 2 * (32 + 512)
//              + (2 * K_STAGES + 2 * V_STAGES + 2) * 8 + 1024
// Numerics   as hopper_attention_forward; the order of a row's sums follows the list
// Edges      as sparse_attention_forward, but with GATHER 0 listed tiles are read whole: keys that no query sees
//            must be finite there
#define SPARSE 1
#define HAS_BIAS 0
#include "common/attention_params.cuh"
#include "common/sparse_keys.cuh"
#include "common/hopper_forward.cuh"
#include "common/hopper_blocks.cuh"
#include "common/hopper_sparse.cuh"

// A block computes tiles of 128 query rows until none is left: warpgroup 0 loads, warpgroups 1 and 2 have 64 rows each.
extern "C" __global__ void __launch_bounds__(THREADS, 1) hopper_sparse_attention_forward(
#if !GATHER
    const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
#endif
    const bf16* q, const bf16* k, const bf16* v, const i32* mask, bf16* o, float* lse,
#if BLOCK_LSE
    float* block_lse,
#endif
    const __grid_constant__ SparseAttentionForwardParams params) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = start_block(shared_memory);
  InputTensors tensors = input_tensors(q, k, v, params);
  const SparseMask sparse(mask, params);
  // Outputs are the call's rows; positions count from the first key.
  const u64 context = params.seq_len - params.num_queries;
  tensors.seq_len = (int)params.num_queries;
  ForwardOutput out = {o - context * params.num_heads * HEAD_DIM, lse - context, nullptr};
#if BLOCK_LSE
  out.block_lse = block_lse_of(block_lse, params);
#endif
  __syncthreads();  // the barriers are set up
#if !GATHER
  const TensorMap* maps[2] = {&k_map, &v_map};
#if PAIRS
  const PairConsumer consumer = {out};
#else
  const ForwardConsumer consumer = {out};
#endif
  run_block(tensors, BlockWork(sparse), consumer, maps, shared);
#else
  run_block(tensors, SparseWork(sparse), ForwardConsumer{out}, nullptr, shared);
#endif
}
