// nsa_compress_token: one new token per row joins the tail of native sparse attention's compressed branch; where a
// block of tokens ends at it, the compressed key and value of that block join the others.
// Math       count = blocks of `size` tokens, one every `stride`, that have ended with the token; where one ends, with
//            x_t its tokens' keys (which = 0) or values (1): MLP 1: W_2 relu(W_1 flatten(x + positions))
//            (arXiv:2502.11089, eq. 7); MLP 0: the mean of x_t
// Layout     k_new, v_new bf16 [batch, num_kv_heads, width], each with an element offset and a batch stride (multiples
//            of 8); k_tail, v_tail bf16 [batch, num_kv_heads, tail_capacity, width], whose row 0 is token num_dropped;
//            positions bf16 [size, width], up bf16 [hidden, size * width], down bf16 [width, hidden], of keys and of
//            values; k_compressed, v_compressed bf16 [batch, num_kv_heads, capacity, width]; length i32 [batch], tokens
//            before this one; count i32 [batch]; all contiguous
// Buffers    k_new, v_new, k_tail, v_tail, (MLP 1: k_positions, v_positions, k_up, v_up, k_down, v_down,)
//            k_compressed, v_compressed, length, count
// Defines    MLP 0|1
// Tiling     grid (num_kv_heads, 2, batch); 512 threads; a warp takes a hidden number, then a column; dynamic shared
//            bytes = 2 size width + 16 ceil(hidden / 8). Most tokens end no block, and their launch writes one row
// Numerics   f32 sums, of an MLP in the order of lane_product.cuh, of a mean in that of the tokens; x + positions,
//            hidden numbers and the result are rounded to bf16, as the kernels of a whole pass round them
// Edges      width a multiple of 8; the tail holds the last `size` tokens at least; a full tail or cache is refused by
//            the wrapper
#include "common/bf16x8.cuh"
#include "common/lane_product.cuh"
#include "common/pooled_keys.cuh"
#include "common/programmatic_launch.cuh"

constexpr int NUM_WARPS = 16, THREADS = NUM_WARPS * 32;

struct NsaCompressTokenParams {
  u64 num_kv_heads, width, tail_capacity, num_dropped, capacity, size, stride, hidden;
  u64 k_offset, k_batch_stride, v_offset, v_batch_stride;
};

// A block has the keys (blockIdx.y 0) or the values (1) of one KV head of a new token.
extern "C" __global__ void __launch_bounds__(THREADS)
    nsa_compress_token(const bf16* k_new, const bf16* v_new, bf16* k_tail, bf16* v_tail,
#if MLP
                       const bf16* k_positions, const bf16* v_positions, const bf16* k_up, const bf16* v_up,
                       const bf16* k_down, const bf16* v_down,
#endif
                       bf16* k_compressed, bf16* v_compressed, const i32* length, i32* count,
                       const __grid_constant__ NsaCompressTokenParams params) {
  extern __shared__ uint4 block_tokens[];  // [size * width / 8], then the hidden numbers
  wait_for_previous();
  const int kv_head = blockIdx.x, width = (int)params.width, chunks = width / 8, size = (int)params.size;
  const bool is_value = blockIdx.y == 1;
  const i64 batch = blockIdx.z, head = batch * params.num_kv_heads + kv_head;
  const i32 before = length[batch];
  const PooledKeys keys = {before + 1, size, (i32)params.stride};
  const i64 slot = min((i64)before - (i64)params.num_dropped, (i64)params.tail_capacity - 1);
  const bf16* token = is_value ? v_new + params.v_offset + batch * params.v_batch_stride
                               : k_new + params.k_offset + batch * params.k_batch_stride;
  token += kv_head * width;
  bf16* tail = (is_value ? v_tail : k_tail) + head * (i64)params.tail_capacity * width;

  // Store the token in the cache.
  for (int at = threadIdx.x; at < chunks; at += THREADS)
    store_16_bytes(tail + slot * width + at * 8, load_16_bytes(token + at * 8));
  if (threadIdx.x == 0 && kv_head == 0 && !is_value) count[batch] = keys.num();
  if (!keys.one_ends() || slot + 1 < size) return;

  // Compress the block; its last token is read from the input, not from the cache.
  const bf16* before_last = tail + (slot + 1 - size) * width;
  bf16* to = (is_value ? v_compressed : k_compressed) +
             (head * (i64)params.capacity + min((i64)keys.num() - 1, (i64)params.capacity - 1)) * width;
#if MLP
  const int hidden_size = (int)params.hidden, num_words = size * chunks, last = num_words - chunks;
  uint4* hidden = block_tokens + num_words;
  const bf16* positions = is_value ? v_positions : k_positions;
  for (int at = threadIdx.x; at < num_words; at += THREADS) {
    float x[8], position[8];
    unpack_bf16x8(load_16_bytes(at < last ? before_last + at * 8 : token + (at - last) * 8), x);
    unpack_bf16x8(load_16_bytes(positions + at * 8), position);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] += position[i];
    block_tokens[at] = pack_bf16x8(x);
  }
  // The last word of the hidden numbers ends in zeros.
  if (threadIdx.x == 0) hidden[(hidden_size - 1) / 8] = make_uint4(0, 0, 0, 0);
  __syncthreads();  // the block's tokens are stored
  // A pass over whole rows multiplies by linear_in_order.cu, in this order of sums.
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const bf16* up = is_value ? v_up : k_up;
  for (int row = warp; row < hidden_size; row += NUM_WARPS) {
    float sum[1];
    lane_products<true, 1>(sum, up + (i64)row * num_words * 8, block_tokens, num_words, num_words * 8);
    if (lane == 0) ((bf16*)hidden)[row].bits = (unsigned short)pack_bf16(fmaxf(sum[0], 0.f), 0.f);
  }
  __syncthreads();  // every hidden number is stored
  const bf16* down = is_value ? v_down : k_down;
  for (int column = warp; column < width; column += NUM_WARPS) {
    float sum[1];
    lane_products<false, 1>(sum, down + (i64)column * hidden_size, hidden, 0, hidden_size);
    if (lane == 0) to[column].bits = (unsigned short)pack_bf16(sum[0], 0.f);
  }
#else
  for (int column = threadIdx.x; column < width; column += THREADS) {
    float sum = 0.f;
    for (int t = 0; t + 1 < size; ++t) sum += bf16_to_f32(before_last[t * width + column]);
    sum += bf16_to_f32(token[column]);
    to[column].bits = (unsigned short)pack_bf16(sum * (1.0f / (float)size), 0.f);
  }
#endif
}
