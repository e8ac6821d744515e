// matrix_vector: a weight matrix times the few rows of a decoding step, with a norm before and an epilogue after it.
// Math       y[r,i] = sum_j w[i,j] h[r,j] (+ residual[r,i]); h = x, or x's RMSNorm (arXiv:1910.07467, eq. 4), rounded
//            to bf16; OUTPUT 1: y[r,i] = silu(g) u (arXiv:2002.05202), where g and u are rows i and n + i of w times
//            h[r], rounded to bf16
// Layout     w bf16 [n, k], with OUTPUT 1 [2 n, k], rows w_stride apart; x bf16 [rows, k], rows x_stride apart; norm
//            bf16 [k]; residual bf16 [rows, n], rows residual_stride apart; y bf16 [rows, n] contiguous; k and strides
//            multiples of 8; 1 to 16 rows
// Buffers    x, w, norm (read with INPUT 1), residual (read with RESIDUAL), y
// Defines    INPUT (0: x, 1: its norm), OUTPUT (0, 1), RESIDUAL (0, 1; 0 with OUTPUT 1), STAGES (of a warp's ring) (set
//            by step/matrix_vector.rs)
// Tiling     grid (one block a multiprocessor at most); 256 threads; a block walks tiles of 16 rows of w, whose columns
//            its warps share: warp i takes columns 64 i .. 64 i + 63 of every 512. These are a stage of its ring in
//            shared memory, with the same columns of x; norms lie in shared memory for the whole kernel. The rows of
//            h are the A operand of m16n8k16 and the rows of w its B operand, so each byte of w is read once
// Numerics   f32 sums in an order that depends on k alone, so a row has the same bits beside any other rows; one
//            rounding at the store; writes every element of y
// Edges      rows of w past n and columns past k are read as zeros; rows of h past `rows` repeat the last, not stored
#include "common/async_copy.cuh"
#include "common/bf16x8.cuh"
#include "common/fixed_sum.cuh"
#include "common/mma.cuh"
#include "common/programmatic_launch.cuh"

constexpr int NUM_WARPS = 8, THREADS = NUM_WARPS * 32, MAX_ROWS = 16;
constexpr int TILE = 16, CHUNKS = 8;             // rows of w, and 16-byte chunks of each, of a stage
constexpr int OUTPUTS = OUTPUT == 1 ? 8 : TILE;  // elements of a row of y for a tile
static_assert(!(OUTPUT && RESIDUAL), "an activation is not added to");
static_assert(MAX_ROWS * TILE <= THREADS, "a thread stores one element of a tile");

struct MatrixVectorParams { u64 rows, n, k, x_stride, w_stride, residual_stride, epsilon; };

// Where a chunk of a row lies in a slot of the ring. Lanes 4 g + t read chunk t or t + 4 of row g; those of even and of
// odd rows lie in different halves of the banks.
DEVICE int place(int row, int chunk) { return row * CHUNKS + (chunk ^ row % 2 * 4); }

// Asks for the columns of a round of `tile`'s rows; past the end it asks for nothing.
DEVICE void copy_weights(uint4* slot, const bf16* w, u64 tile, int round, const MatrixVectorParams& params) {
  const int lane = threadIdx.x % 32, chunk = (round * NUM_WARPS + (int)threadIdx.x / 32) * CHUNKS + lane % 8;
#pragma unroll
  for (int i = 0; i < TILE / 4; i++) {
    const int row = lane / 8 + 4 * i;
    const u64 output = tile + row % OUTPUTS;
    const bool exists = output < params.n && chunk < (int)(params.k / 8);
    const bf16* from = w + (output + row / OUTPUTS * params.n) * params.w_stride + chunk * 8;
    copy_async_16(shared_address(slot + place(row, lane % 8)), exists ? from : w, exists ? 16 : 0);
  }
}

#if INPUT == 0
// Asks for the columns of a round of the rows of x, which lie behind the rows of w.
DEVICE void copy_rows(uint4* slot, const bf16* x, int round, const MatrixVectorParams& params) {
  const int lane = threadIdx.x % 32, chunk = (round * NUM_WARPS + (int)threadIdx.x / 32) * CHUNKS + lane % 8;
  const bool exists = chunk < (int)(params.k / 8);
  for (int row = lane / 8; row < (int)params.rows; row += 4) {
    const bf16* from = x + row * params.x_stride + chunk * 8;
    copy_async_16(shared_address(slot + place(TILE + row, lane % 8)), exists ? from : x, exists ? 16 : 0);
  }
}
#else
// The norms of the rows of x, `pitch` chunks apart in shared memory, and zeros up to a whole stage. `factors`: the
// thread's first chunk of the norm's weight.
DEVICE void prepare_rows(uint4* h, int pitch, const bf16* x, const bf16* norm, const uint4& factors,
                         const MatrixVectorParams& params) {
  constexpr int BATCH = 8;  // rows of x that a thread asks for at once
  __shared__ float sums[MAX_ROWS][NUM_WARPS];
  const int rows = (int)params.rows, num_chunks = (int)(params.k / 8);
  for (int first = 0; first < rows; first += BATCH) {
    float squares[BATCH] = {};
    for (int chunk = threadIdx.x; chunk < num_chunks; chunk += THREADS) {
      uint4 words[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        if (first + i < rows) words[i] = load_16_bytes(x + (first + i) * params.x_stride + chunk * 8);
      }
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        if (first + i >= rows) continue;
        float values[8];
        unpack_bf16x8(words[i], values);
#pragma unroll
        for (int j = 0; j < 8; j++) squares[i] = fmaf(values[j], values[j], squares[i]);
        h[(first + i) * pitch + chunk] = words[i];
      }
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      if (first + i >= rows) continue;
      squares[i] = lanes_sum<32>(squares[i]);
      if (threadIdx.x % 32 == 0) sums[first + i][threadIdx.x / 32] = squares[i];
    }
  }
  __syncthreads();  // the warps' sums are there
  for (int row = 0; row < rows; row++) {
    float squares = 0.f;
#pragma unroll
    for (int warp = 0; warp < NUM_WARPS; warp++) squares += sums[row][warp];
    const float inverse = 1.f / sqrtf(squares / (float)params.k + f32_word(params.epsilon));
    for (int chunk = threadIdx.x; chunk < ceil_div(num_chunks, CHUNKS) * CHUNKS; chunk += THREADS) {
      uint4 words = make_uint4(0, 0, 0, 0);
      if (chunk < num_chunks) {
        float values[8], others[8];
        unpack_bf16x8(h[row * pitch + chunk], values);
        unpack_bf16x8(chunk < THREADS ? factors : load_16_bytes(norm + chunk * 8), others);
#pragma unroll
        for (int i = 0; i < 8; i++) values[i] = values[i] * inverse * others[i];
        words = pack_bf16x8(values);
      }
      h[row * pitch + chunk] = words;
    }
  }
  __syncthreads();  // h is stored
}
#endif

// So few registers that the next kernel's block has room on the multiprocessor too, and its first weights are on their
// way in time. A block without a norm has room beside one of attention.
extern "C" __global__ void __launch_bounds__(THREADS, INPUT == 1 ? 2 : 4)
    matrix_vector(const bf16* x, const bf16* w, const bf16* norm, const bf16* residual, bf16* y,
                  const __grid_constant__ MatrixVectorParams params) {
  extern __shared__ uint4 shared[];
  const int rows = (int)params.rows, held_rows = rows > 8 ? 16 : 8, num_chunks = (int)(params.k / 8);
  const int rounds = ceil_div(num_chunks, NUM_WARPS * CHUNKS), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int slot_words = (TILE + (INPUT == 0 ? rows : 0)) * CHUNKS;
  uint4* ring = shared + warp * STAGES * slot_words;
  float* partials = reinterpret_cast<float*>(shared + NUM_WARPS * STAGES * slot_words);  // [NUM_WARPS, held_rows, TILE]
  const u64 step = (u64)gridDim.x * OUTPUTS;

  // The first weights may be loaded before the last kernel, which writes x or the residual, has ended. The next kernel
  // may ask for its first weights as soon as this one has asked for its last.
  u64 next_tile = (u64)blockIdx.x * OUTPUTS;
  int next_round = 0;
  auto ask_for_weights = [&](uint4* slot) {
    copy_weights(slot, w, next_tile, next_round, params);
    if (++next_round == rounds) next_round = 0, next_tile += step;
    if (next_tile >= params.n) let_next_begin();
  };
  for (int stage = 0; stage < STAGES; stage++) {
    ask_for_weights(ring + stage * slot_words);
    copy_async_commit();
  }
#if INPUT == 1
  uint4* h = reinterpret_cast<uint4*>(partials + NUM_WARPS * held_rows * TILE);
  // Rows of h are 64 bytes and a multiple of 128 apart: two rows lie in different halves of the banks.
  const int pitch = ceil_div(num_chunks, CHUNKS) * CHUNKS + 4;
  uint4 factors = make_uint4(0, 0, 0, 0);
  if ((int)threadIdx.x < num_chunks) factors = load_16_bytes(norm + threadIdx.x * 8);
  wait_for_results();
  prepare_rows(h, pitch, x, norm, factors, params);
#else
  wait_for_results();
  for (int stage = 0; stage < STAGES; stage++) {
    copy_rows(ring + stage * slot_words, x, stage % rounds, params);
    copy_async_commit();
  }
#endif

  // This lane's rows of h, and the element of a tile that this thread stores.
  const int g = lane / 4, t = lane % 4, low = min(g, rows - 1), high = min(g + 8, rows - 1);
  const int text = threadIdx.x / OUTPUTS, column = threadIdx.x % OUTPUTS;
  int stage = 0;
  for (u64 tile = (u64)blockIdx.x * OUTPUTS; tile < params.n; tile += step) {
    const bool stores = text < rows && tile + column < params.n;
#if RESIDUAL
    const float added = stores ? bf16_to_f32(residual[text * params.residual_stride + tile + column]) : 0.f;
#endif
    float sums[2][4] = {};  // rows 0 .. 7 and 8 .. 15 of the tile
    for (int round = 0; round < rounds; round++) {
      uint4* slot = ring + stage * slot_words;
      stage = stage + 1 == STAGES ? 0 : stage + 1;
      copy_async_wait<STAGES - 1>();
      __syncwarp();  // all lanes' copies of this stage are there
      const int first = (round * NUM_WARPS + warp) * CHUNKS;
#pragma unroll
      for (int chunk = t; chunk < t + CHUNKS; chunk += 4) {
        if (first >= num_chunks) continue;
        // The order of columns in a product is free: a lane's chunk of eight is its share of two instructions.
#if INPUT == 1
        const uint4 a = h[low * pitch + first + chunk];
        const uint4 b = rows > 8 ? h[high * pitch + first + chunk] : make_uint4(0, 0, 0, 0);
#else
        const uint4 a = slot[place(TILE + low, chunk)];
        const uint4 b = rows > 8 ? slot[place(TILE + high, chunk)] : make_uint4(0, 0, 0, 0);
#endif
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const uint4 weights = slot[place(half * 8 + g, chunk)];
          mma_bf16(sums[half], {a.x, b.x, a.y, b.y}, weights.x, weights.y);
          mma_bf16(sums[half], {a.z, b.z, a.w, b.w}, weights.z, weights.w);
        }
      }
      __syncwarp();  // the stage has been read before the next one overwrites it
#if INPUT == 0
      if (next_tile < params.n) copy_rows(slot, x, next_round, params);
#endif
      ask_for_weights(slot);
      copy_async_commit();
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int row = g + i / 2 % 2 * 8;
      if (row < held_rows) partials[(warp * held_rows + row) * TILE + i / 4 * 8 + 2 * t + i % 2] = sums[i / 4][i % 4];
    }
    __syncthreads();  // the warps' sums are there
    if (stores) {
      float totals[TILE / OUTPUTS] = {};
      for (int i = 0; i < NUM_WARPS; i++) {
#pragma unroll
        for (int part = 0; part < TILE / OUTPUTS; part++) {
          totals[part] += partials[(i * held_rows + text) * TILE + part * OUTPUTS + column];
        }
      }
      float total = totals[0];
#if OUTPUT == 1
      const float gate = bf16_low(pack_bf16(total, 0.f)), up = bf16_low(pack_bf16(totals[1], 0.f));
      total = gate / (1.f + expf(-gate)) * up;
#endif
#if RESIDUAL
      total += added;
#endif
      y[text * params.n + tile + column].bits = (unsigned short)pack_bf16(total, 0.f);
    }
    __syncthreads();  // the sums are read before the next tile's overwrite them
  }
}
