// embedding_forward: rows of the embedding table, by token id.
// Math       y[t] = weight[ids[t]]
// Layout     weight [vocab_size, width] of any type whose rows are whole 16-byte words, row_words words apart; y
//            [tokens, width] contiguous; ids i32 [tokens]; all sizes below in 16-byte words
// Buffers    weight, ids, y
// Defines    none
// Tiling     grid (ceil(tokens * width_words / 256)); 256 threads, one word each
// Numerics   a copy; memory-bound. An id outside the table gives a row of NaN instead of a read outside it
// Edges      tokens * width_words not a multiple of 256
#include "common/bf16x8.cuh"

struct EmbeddingForwardParams { u64 tokens, vocab_size, width_words, row_words; };

// A thread copies one 16-byte word; consecutive threads have consecutive words of y.
extern "C" __global__ void __launch_bounds__(256)
    embedding_forward(const uint4* weight, const i32* ids, uint4* y,
                      const __grid_constant__ EmbeddingForwardParams params) {
  const u64 at = (u64)blockIdx.x * 256 + threadIdx.x;
  const u64 token = at / params.width_words, word = at - token * params.width_words;
  if (token >= params.tokens) return;
  const i64 id = ids[token];
  uint4 words = make_uint4(~0u, ~0u, ~0u, ~0u);  // a NaN of every float type
  if (id >= 0 && id < (i64)params.vocab_size) words = load_16_bytes(weight + id * params.row_words + word);
  store_16_bytes(y + at, words);
}
