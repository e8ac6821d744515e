// hopper_sparse_attention_forward: sparse_attention_forward for sm_90a; the same mathematics, layout, buffers, params words and results to rounding.
// Math       o_i = sum_j softmax_j(softmax_scale * q_i . k_j) v_j over the keys of i's query tile with j <= i < expire_j; lse_i = log sum_j exp(softmax_scale * q_i . k_j);
//            a query that sees nothing gets o = 0, lse = -inf
// Layout     as sparse_attention_forward
// Buffers    q, k, v, mask, o, lse
// Defines    as hopper_attention_forward; HEAD_DIM 64 or 128, NUM_CONSUMERS 2, TENSOR_MAPS 0, HEADS_PER_TILE 1
// Tiling     a tile is 128 rows of one query tile. Persistent: grid (multiprocessors, 1, 1); 384 threads; dynamic shared bytes = 256 * HEAD_DIM
//              + (K_STAGES + V_STAGES) * 256 * HEAD_DIM + 4096 + 2 * (32 + 512) + (2 * K_STAGES + 2 * V_STAGES + 2) * 8 + 1024
// Numerics   as hopper_attention_forward; the order of a row's sums follows the list
// Edges      as sparse_attention_forward
#define GATHER 1
#define SPARSE 1
#define HAS_BIAS 0
#include "common/attention_params.cuh"
#include "common/hopper_forward.cuh"
#include "common/hopper_sparse.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) hopper_sparse_attention_forward(
    const bf16* q, const bf16* k, const bf16* v, const i32* mask, bf16* o, float* lse, const __grid_constant__ SparseAttentionForwardParams params) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = start_block(shared_memory);
  InputTensors tensors = input_tensors(q, k, v, params);
  const SparseWork work(SparseMask(mask, params));
  // Outputs are the call's rows; positions count from the first key.
  const u64 context = params.seq_len - params.num_queries;
  tensors.seq_len = (int)params.num_queries;
  const ForwardConsumer consumer = {{o - context * params.num_heads * HEAD_DIM, lse - context, nullptr}};
  __syncthreads();  // the barriers are set up
  run_block(tensors, work, consumer, nullptr, shared);
}
