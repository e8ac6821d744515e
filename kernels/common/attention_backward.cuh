// attention_backward: the gradients of a block of keys, from every query that sees one of them (arXiv:2307.08691,
// algorithm 2, keys outermost).
// Used by attention_backward.cu (dense, sliding window, masks of tiles) and, through add_rows.cuh, by
// dma_attention_backward.cu (gathered lists) and nsa_selected_attention_backward.cu (chosen rows), which document the
// interface.
// Defines    HEAD_DIM, HEAD_DIM_V; NUM_WARPS (even; a pair of warps owns 32 keys), BLOCK_Q queries a step (32 or 64);
//            HAS_BIAS; CHOSEN_ROWS: the query rows come from a list (nsa_rows.cuh) instead of all queries of
//            all heads, and each row has a partial dQ of its own; TILE_LISTS: steps come from a list (tile_steps.cuh)
//            of tiles of 64 queries, each of which is two steps where BLOCK_Q is 32; COMPUTE_DQ, COMPUTE_DK,
//            COMPUTE_DV: which gradients this launch computes (large heads need two launches to fit into registers)
// Scores are kept transposed, S^T = K Q^T, so that P^T and dS^T in registers are A fragments of dV += P^T dO and dK +=
// dS^T Q. Shared memory bandwidth limits this kernel, so a warp works on 32 keys: each fragment of Q or dO then serves
// two MMAs. Each warp of a pair scores half the queries of a step and keeps half the columns of dK and dV. After
// multiplying with its own half of P^T and dS^T, it takes the other warp's half from shared memory. dQ = dS K sums over
// all keys: it is computed from the dS^T in shared memory one step later, so that the block needs one barrier a step.
#pragma once
#include "common/copy_rows.cuh"
#include "common/far_keys.cuh"
#include "common/key_range.cuh"
#include "common/nsa_copy_rows.cuh"
#include "common/quad.cuh"
#include "common/reduce_add.cuh"
#include "common/tile_steps.cuh"

#ifndef HEAD_DIM_V
#define HEAD_DIM_V HEAD_DIM
#endif
#ifndef HAS_BIAS
#define HAS_BIAS 0
#endif
#ifndef CHOSEN_ROWS
#define CHOSEN_ROWS 0
#endif
#ifndef COMPUTE_DQ
#define COMPUTE_DQ 1
#endif
#ifndef COMPUTE_DK
#define COMPUTE_DK 1
#endif
#ifndef COMPUTE_DV
#define COMPUTE_DV 1
#endif
#define COMPUTE_DS (COMPUTE_DQ || COMPUTE_DK)

constexpr int BLOCK_KV = NUM_WARPS * 16;
constexpr int HALF_QUERY_TILES = BLOCK_Q / 16;  // tiles of 8 queries that a warp scores
// Groups of 16 columns of dK and of dV that a warp keeps; the second warp of a pair may have one less.
constexpr int HALF_K_PAIRS = ceil_div(HEAD_DIM / 16, 2);
constexpr int HALF_V_PAIRS = ceil_div(HEAD_DIM_V / 16, 2);
static_assert(NUM_WARPS % 2 == 0, "warps work in pairs");
static_assert(BLOCK_Q == 32 || BLOCK_Q == 64, "a row of dS^T is one swizzled line of queries");

using KTile = SwizzledTile<HEAD_DIM>;
using VTile = SwizzledTile<HEAD_DIM_V>;
using DsTile = SwizzledTile<BLOCK_Q>;

// Shared memory, in order.
constexpr int K_BYTES = BLOCK_KV * HEAD_DIM * 2;
constexpr int V_BYTES = BLOCK_KV * HEAD_DIM_V * 2;
constexpr int Q_BYTES = BLOCK_Q * HEAD_DIM * 2;       // two slots of these, and of DO_BYTES
constexpr int DO_BYTES = BLOCK_Q * HEAD_DIM_V * 2;
constexpr int DS_BYTES = BLOCK_KV * BLOCK_Q * 2;
constexpr int P_BYTES = COMPUTE_DV ? BLOCK_KV * BLOCK_Q * 2 : 0;
// Bytes for dS^T: two slots if dQ reads it a step later, else one for the swap inside a pair of warps.
constexpr int SWAP_BYTES = COMPUTE_DQ ? 2 * DS_BYTES : COMPUTE_DK ? BLOCK_KV * BLOCK_Q * 2 : 0;
constexpr int STATS_BYTES = BLOCK_Q * (HAS_BIAS ? 12 : 8);  // two slots: {lse, D} of each query, then its base
constexpr int Q_AT = K_BYTES + V_BYTES;
constexpr int DO_AT = Q_AT + 2 * Q_BYTES;
constexpr int DS_AT = DO_AT + 2 * DO_BYTES;
constexpr int P_AT = DS_AT + SWAP_BYTES;
constexpr int STATS_AT = P_AT + P_BYTES;
constexpr int ENTRIES_AT = STATS_AT + 2 * STATS_BYTES;
constexpr int BIAS_AT = ENTRIES_AT + BLOCK_KV * 8;
constexpr int BLOCK_AT = BIAS_AT + (HAS_BIAS ? BLOCK_KV * 4 : 0);
constexpr int BLOCK_BYTES = CHOSEN_ROWS ? 192 : 128;
// With CHOSEN_ROWS memory holds the descriptions of the rows of four steps, from the last step to the one after next.
constexpr int ROWS_AT = BLOCK_AT + BLOCK_BYTES;
constexpr int ROWS_BYTES = CHOSEN_ROWS ? 4 * BLOCK_Q * 16 : 0;
// HAS_FAR: of each key {first query that has it in its band, first one that no longer does}, or {0, 0}.
constexpr int BANDS_AT = ROWS_AT + ROWS_BYTES;
constexpr int BANDS_BYTES = HAS_FAR ? BLOCK_KV * 8 : 0;
static_assert(!HAS_FAR || !(HAS_BIAS || CHOSEN_ROWS || TILE_LISTS), "keys beyond a window come in one form");
static_assert(BANDS_AT + BANDS_BYTES <= 227 * 1024,
              "no device gives a block more shared memory; the caller checks its own limit");

// DQ_COLUMN_WARPS x DQ_ROW_WARPS warps compute a dQ tile of BLOCK_Q x HEAD_DIM; the other warps do not take part.
constexpr int DQ_COLUMN_WARPS = HEAD_DIM % 64 == 0 && NUM_WARPS >= 8 ? 4 : HEAD_DIM % 32 == 0 ? 2 : 1;
constexpr int DQ_ROW_WARPS = min_int(NUM_WARPS / DQ_COLUMN_WARPS, BLOCK_Q / 16);
constexpr int DQ_ROW_TILES = BLOCK_Q / DQ_ROW_WARPS / 16;
constexpr int DQ_COLUMN_TILES = HEAD_DIM / DQ_COLUMN_WARPS / 8;
static_assert(DQ_COLUMN_TILES % 2 == 0 && DQ_ROW_TILES >= 1,
              "fragments are loaded for 16 rows and 16 columns at a time");

// The tensors that a thread block reads and adds to. Kept in shared memory: these pointers are used once a step and
// would cost the main loop ten registers.
struct BackwardBlock {
  const bf16* q;         // at the batch row and the KV head's first query head
  u32 q_stride;          // elements from token to token
  const bf16* d_out;     // as q; [seq_len, num_heads, HEAD_DIM_V]
  const float2* stats;   // as q: [heads, padded_len] {lse * log2(e), or +inf if it sees no key; rowsum(do * o)}
  const float* base;     // HAS_BIAS: [padded_len] of the KV head, the largest bias that each query sees
  float* dq_sum;         // as q: [heads, dq_len, HEAD_DIM], each 16 x 8 tile in the order of an accumulator fragment
  int num_heads, group_size, seq_len, padded_len;  // group_size: TILE_LISTS: steps of a place in `steps`
  int dq_first, dq_len;  // dq_sum holds the queries dq_first .. dq_first + dq_len
  // query tiles (of BLOCK_Q positions) that see a key of the block; TILE_LISTS: places of its steps in `steps`
  int first_tile, num_tiles;
#if TILE_LISTS
  const int2* steps;
#endif
#if HAS_FAR
  int num_near, left_out;  // tiles before the band's, and tiles between them that see no key
#endif
  float scale_log2, bias_unit;  // bias_unit: 1 / softmax_scale
  int batch, kv_head, share, first_key;  // dense: for the stores at the end
#if CHOSEN_ROWS
  ChosenRun run;
  int last_token;  // the run's last
  bf16* dq_parts;  // [parts, HEAD_DIM], by ChosenRow::part; q, d_out and stats then point at the whole batch row
#endif
};
static_assert(sizeof(BackwardBlock) <= BLOCK_BYTES, "the description fits its place in shared memory");

// The query tile of a head's step number `at`, with lists or chosen rows that number itself.
DEVICE int query_tile(const BackwardBlock& block, int at) {
#if HAS_FAR
  if (at >= block.num_near) at += block.left_out;
#endif
  return block.first_tile + at;
}

#if TILE_LISTS
// A step of a block: the query tile (of BLOCK_Q positions) of a head, and which halves of the list's 128 keys it sees.
struct ListedStep {
  static constexpr int PARTS = STEP_QUERIES / BLOCK_Q;
  int head, tile;
  u32 halves;
  DEVICE ListedStep(const BackwardBlock& block, int step) {
    const TileStep listed(block.steps[block.first_tile + step / PARTS]);
    head = listed.head;
    tile = listed.tile * PARTS + step % PARTS;
    halves = listed.halves;
  }
  // Whether the step sees the half in which the block's key number `at` lies.
  DEVICE bool sees(const BackwardBlock& block, int at) const {
    return halves >> ((block.first_key + at) % STEP_KEYS / (STEP_KEYS / 2)) & 1;
  }
};
#endif

// The entries {position, expire} of a block's keys in shared memory.
struct BlockKeys {
  const int2* entries;
  DEVICE int2 entry(int at) const { return entries[at]; }
};
// In shared memory one 16-byte access loads it.
struct alignas(16) AlignedRange : KeyRange {};
DEVICE KeyRange key_range(const int2* entries, int count) { return key_range(BlockKeys{entries}, 0, count); }

#if CHOSEN_ROWS
// The descriptions of a step's rows in shared memory.
DEVICE ChosenRow* step_rows(unsigned char* memory, int step) {
  return (ChosenRow*)(memory + ROWS_AT) + step % 4 * BLOCK_Q;
}
// Writes the descriptions of a step's rows.
DEVICE void describe_rows(const BackwardBlock& block, unsigned char* memory, int step) {
  if (threadIdx.x < BLOCK_Q)
    step_rows(memory, step)[threadIdx.x] =
        chosen_row(block.run, step * BLOCK_Q + (int)threadIdx.x, block.group_size, block.kv_head * block.group_size);
}
#endif

// Starts the copies of a step's queries, output gradients and row statistics.
DEVICE void load_queries(const BackwardBlock& block, unsigned char* memory, u32 shared, int slot, int head,
                         int query_tile) {
#if CHOSEN_ROWS
  const ChosenRow* rows = step_rows(memory, query_tile);
  copy_chosen_rows<HEAD_DIM, BLOCK_Q>(shared + Q_AT + slot * Q_BYTES, block.q, block.q_stride, rows);
  copy_chosen_rows<HEAD_DIM_V, BLOCK_Q>(shared + DO_AT + slot * DO_BYTES, block.d_out,
                                        (u32)block.num_heads * HEAD_DIM_V, rows);
  if (threadIdx.x < BLOCK_Q) {
    const ChosenRow row = rows[threadIdx.x];
    copy_async_8(shared + STATS_AT + slot * STATS_BYTES + threadIdx.x * 8,
                 block.stats + (u64)(u32)row.head * block.padded_len + max(row.token, 0), row.token >= 0 ? 8 : 0);
  }
#else
  copy_rows<HEAD_DIM, BLOCK_Q>(shared + Q_AT + slot * Q_BYTES, block.q + head * HEAD_DIM, block.q_stride,
                               query_tile * BLOCK_Q, block.seq_len);
  copy_rows<HEAD_DIM_V, BLOCK_Q>(shared + DO_AT + slot * DO_BYTES, block.d_out + head * HEAD_DIM_V,
                                 (u32)block.num_heads * HEAD_DIM_V, query_tile * BLOCK_Q, block.seq_len);
  if (threadIdx.x < BLOCK_Q / 2)
    copy_async_16(shared + STATS_AT + slot * STATS_BYTES + threadIdx.x * 16,
                  block.stats + (u64)head * block.padded_len + query_tile * BLOCK_Q + threadIdx.x * 2, 16);
#if HAS_BIAS
  if (threadIdx.x < BLOCK_Q / 4)
    copy_async_16(shared + STATS_AT + slot * STATS_BYTES + BLOCK_Q * 8 + threadIdx.x * 16,
                  block.base + query_tile * BLOCK_Q + threadIdx.x * 4, 16);
#endif
#endif
}

#if COMPUTE_DQ
// Computes dQ = dS K of one step from dS^T in shared memory. It is added to the f32 sums as 16 x 8 fragments of 512
// contiguous bytes; with CHOSEN_ROWS it is rounded to bf16 and stored as the rows' partial dQ.
#if TILE_LISTS
// Of the step `listed`; `slot` is that of dS^T, 0 or 1, and `shared` the shared address of `memory`.
DEVICE void add_dq(const BackwardBlock& block, unsigned char* memory, u32 shared, int slot, const ListedStep& listed) {
  const int head = listed.head, query_tile = listed.tile;
#else
// Of query head `head` of the block and tile `query_tile` of BLOCK_Q queries, or with CHOSEN_ROWS step `query_tile` of
// its rows; `slot` is that of dS^T, 0 or 1, and `shared` the shared address of `memory`.
DEVICE void add_dq(const BackwardBlock& block, unsigned char* memory, u32 shared, int slot, int head, int query_tile) {
#endif
  const int thread = (int)opaque(threadIdx.x), lane = thread % 32, warp = thread / 32;
  if (warp >= DQ_COLUMN_WARPS * DQ_ROW_WARPS) return;
  // the warp's first row in units of 16, its first column in units of 8
  const int row = warp / DQ_COLUMN_WARPS * DQ_ROW_TILES, column = warp % DQ_COLUMN_WARPS * DQ_COLUMN_TILES;
  const u32 ds_at =
      opaque(shared + DS_AT + slot * DS_BYTES + DsTile::offset(lane % 8 + lane / 16 * 8, row * 2 + lane / 8 % 2));
  float dq[DQ_ROW_TILES][DQ_COLUMN_TILES][4] = {};
  // A warp's first column need not be a power of two, so each pair of column tiles needs an address of its own.
  u32 k_at[DQ_COLUMN_TILES / 2];
#pragma unroll
  for (int n = 0; n < DQ_COLUMN_TILES / 2; ++n)
    k_at[n] = opaque(shared + KTile::offset(lane % 16, column + n * 2 + lane / 16));
#pragma unroll
  for (int step = 0; step < BLOCK_KV / 16; ++step) {
#if TILE_LISTS
    if (!listed.sees(block, step * 16)) continue;  // dS is 0 there, and the keys need not be finite
#endif
    u32 a[DQ_ROW_TILES][4];
#pragma unroll
    for (int m = 0; m < DQ_ROW_TILES; ++m) load_matrix_x4_transposed(a[m], DsTile::step(ds_at, step * 16, m * 2));
#pragma unroll
    for (int n = 0; n < DQ_COLUMN_TILES / 2; ++n) {
      u32 b[4];
      load_matrix_x4_transposed(b, k_at[n] + step * 16 * KTile::ROW_BYTES);
      mma_columns(dq, a, 2 * n, b);
    }
  }
#if CHOSEN_ROWS
  static_assert(DQ_COLUMN_TILES % 4 == 0, "a quad stores 64 bytes of a row");
  const ChosenRow* rows = step_rows(memory, query_tile) + row * 16 + lane / 4;
#pragma unroll
  for (int r = 0; r < 2 * DQ_ROW_TILES; ++r) {
    const ChosenRow to = rows[r * 8];
#pragma unroll
    for (int n = 0; n < DQ_COLUMN_TILES; n += 4) {
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = pack_bf16(dq[r / 2][n + i][r % 2 * 2], dq[r / 2][n + i][r % 2 * 2 + 1]);
      quad_transpose(words);
      if (to.token >= 0)
        *(uint4*)(block.dq_parts + (u64)(u32)to.part * HEAD_DIM + (column + n + lane % 4) * 8) =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
#else
  const int first_row = (query_tile * BLOCK_Q - block.dq_first) / 16 + row;
  float* to = block.dq_sum + (((u64)head * (block.dq_len / 16) + first_row) * (HEAD_DIM / 8) + column) * 128 + lane * 4;
#pragma unroll
  for (int m = 0; m < DQ_ROW_TILES; ++m)
#pragma unroll
    for (int n = 0; n < DQ_COLUMN_TILES; ++n)
      reduce_add_f32x4(to + (m * (HEAD_DIM / 8) + n) * 128, dq[m][n][0], dq[m][n][1], dq[m][n][2], dq[m][n][3]);
#endif
}
#endif

// Loads A fragments of 32 keys x 16 queries from the other warp's half of P^T or dS^T in shared memory.
DEVICE void load_swapped(u32 (&a)[2][4], u32 at, int step) {
#pragma unroll
  for (int m = 0; m < 2; ++m) load_matrix_x4(a[m], DsTile::step(at, m * 16, step * 2));
}

// Rounds C fragments of 32 keys x 16 queries to A fragments.
DEVICE void pack_fragments(u32 (&a)[2][4], const float (&c)[2][HALF_QUERY_TILES][4], int step) {
#pragma unroll
  for (int m = 0; m < 2; ++m) pack_fragment(a[m], c[m][2 * step], c[m][2 * step + 1]);
}

// Addresses, in the first 16 rows of a tile of Q or dO, of the groups of 16 columns that the warp keeps.
template <class Tile, int HALF_PAIRS>
struct HalfColumns {
  // With a power of two of groups, each one's address is the first's with an xor.
  static constexpr bool ALIGNED = (HALF_PAIRS & (HALF_PAIRS - 1)) == 0;
  u32 first[ALIGNED ? 1 : HALF_PAIRS];
  DEVICE HalfColumns(u32 tile, int half) {
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < (ALIGNED ? 1 : HALF_PAIRS); ++n)
      first[n] = opaque(tile + Tile::offset(lane % 16, (half * HALF_PAIRS + n) * 2 + lane / 16));
  }
  DEVICE u32 at(int n) const { return ALIGNED ? Tile::step(first[0], 0, n * 2) : first[n]; }
};

// sums += a b over the 16 queries from `first_row` on; b has the groups of 16 columns that the warp keeps.
template <class Tile, int HALF_PAIRS>
DEVICE void accumulate_columns(float (&sums)[2][2 * HALF_PAIRS][4], const u32 (&a)[2][4],
                               const HalfColumns<Tile, HALF_PAIRS>& columns, int first_row, int num_pairs) {
#pragma unroll
  for (int n = 0; n < HALF_PAIRS; ++n) {
    if (Tile::CHUNKS / 2 % 2 != 0 && n >= num_pairs) break;  // of an odd number of groups the second warp has one less
    u32 b[4];
    load_matrix_x4_transposed(b, columns.at(n) + first_row * Tile::ROW_BYTES);
    mma_columns(sums, a, 2 * n, b);
  }
}

// Gradients of the warp pair's 32 keys (this warp's half of the columns), summed over heads and queries; dk is not yet
// multiplied by the softmax scale.
struct KeyGradients {
#if COMPUTE_DK
  float dk[2][2 * HALF_K_PAIRS][4];
#endif
#if COMPUTE_DV
  float dv[2][2 * HALF_V_PAIRS][4];
#endif
#if HAS_BIAS
  float ddelta[2][2];  // [m][h]: key 16 m + 8 h + g, where lane = 4 g + t
#endif
};

// Computes the gradients of a block of keys. The caller has started the copies of K and V to shared memory; it has
// stored the keys' entries {position, expire} and, with a bias, delta / softmax_scale there, and a barrier after that.
DEVICE void attention_backward_block(const BackwardBlock& description, unsigned char* memory, KeyGradients& sums) {
  if (threadIdx.x == 0) *(BackwardBlock*)(memory + BLOCK_AT) = description;
  __syncthreads();  // every thread reads the description
  const BackwardBlock& block = *(const BackwardBlock*)(memory + BLOCK_AT);
  const u32 shared = shared_address(memory);
  __shared__ AlignedRange pair_keys[NUM_WARPS / 2];
  {
    const KeyRange range = key_range((const int2*)(memory + ENTRIES_AT) + threadIdx.x / 64 * 32, 32);
    if (threadIdx.x % 64 == 0) pair_keys[threadIdx.x / 64] = {range};  // read after the first step's barrier
  }
#if HAS_FAR
  __shared__ AlignedRange pair_bands[NUM_WARPS / 2];
  {
    const KeyRange range = key_range((const int2*)(memory + BANDS_AT) + threadIdx.x / 64 * 32, 32);
    if (threadIdx.x % 64 == 0) pair_bands[threadIdx.x / 64] = {range};
  }
#endif

#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int x = 0; x < 4; ++x) {
#if COMPUTE_DK
#pragma unroll
      for (int n = 0; n < 2 * HALF_K_PAIRS; ++n) sums.dk[m][n][x] = 0.0f;
#endif
#if COMPUTE_DV
#pragma unroll
      for (int n = 0; n < 2 * HALF_V_PAIRS; ++n) sums.dv[m][n][x] = 0.0f;
#endif
    }
#if HAS_BIAS
    sums.ddelta[m][0] = sums.ddelta[m][1] = 0.0f;
#endif
  }

  // Steps go through the query tiles of one head after the other, or through a list.
#if TILE_LISTS
  int step = 0;
  auto load_step = [&](int step, int slot) {
    const ListedStep of(block, step);
    load_queries(block, memory, shared, slot, of.head, of.tile);
  };
  if (block.num_tiles > 0) load_step(0, 0);
#else
  int step = 0, head = 0, tile = 0;
#endif
#if CHOSEN_ROWS
  describe_rows(block, memory, 0);
  describe_rows(block, memory, 1);
  __syncthreads();  // every thread copies rows that others described
#endif
#if !TILE_LISTS
  if (block.num_tiles > 0) load_queries(block, memory, shared, 0, 0, query_tile(block, 0));
#endif
  copy_async_commit();

  for (; step < block.num_tiles * (CHOSEN_ROWS ? 1 : block.group_size); ++step) {
    const int slot = step & 1;
#if TILE_LISTS
    const ListedStep now(block, step);
    const int first_query = now.tile * BLOCK_Q;
#if COMPUTE_DQ
    const ListedStep last(block, max(step - 1, 0));
#define LAST_STEP last
#endif
#else
#if COMPUTE_DQ
    // head and query tile of the last step
    const int dq_head = tile == 0 ? head - 1 : head,
#if HAS_FAR
              dq_tile = query_tile(block, (tile == 0 ? block.num_tiles : tile) - 1);
#else
              dq_tile = block.first_tile + (tile == 0 ? block.num_tiles : tile) - 1;
#endif
#define LAST_STEP dq_head, dq_tile
#endif
#if !CHOSEN_ROWS
    const int first_query = query_tile(block, tile) * BLOCK_Q;
#endif
    if (++tile == block.num_tiles) tile = 0, ++head;
#endif

    copy_async_wait<0>();
    // after it every thread may read this step's rows and the last step's dS^T, and no thread reads the other slot
    __syncthreads();
#if CHOSEN_ROWS
    const ChosenRow* rows = step_rows(memory, step);
    // Tokens of a list ascend. The last step may have rows past the list's end; it ends with the list's last token.
    const int first_query = rows[0].token,
              end_query = (rows[BLOCK_Q - 1].token < 0 ? block.last_token : rows[BLOCK_Q - 1].token) + 1;
    describe_rows(block, memory, step + 2);
#else
    const int end_query = first_query + BLOCK_Q;
#endif
#if TILE_LISTS
    if (step + 1 < block.num_tiles * block.group_size) load_step(step + 1, slot ^ 1);
#else
    if (head < (CHOSEN_ROWS ? 1 : block.group_size))
      load_queries(block, memory, shared, slot ^ 1, head, query_tile(block, tile));
#endif
    copy_async_commit();
#if COMPUTE_DQ
    // Of two warps on one scheduler, one computes dQ at the beginning of a step and the other at its end, so that MMAs
    // of one overlap exponentials of the other: 11 % of the kernel's time at head_dim 128 on an H200.
    const bool early = threadIdx.x < THREADS / 2;
    if (step > 0 && early) add_dq(block, memory, shared, slot ^ 1, LAST_STEP);
#endif

    // Values derived from the thread index are recomputed each step: held in registers they would spill.
    const int thread = (int)opaque(threadIdx.x), lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4,
              pair = warp / 2, half = warp % 2;
    // Offsets of this lane in the fragments' addresses: *_at for A operands, *_columns for B operands.
    const u32 k_columns = KTile::offset(half * BLOCK_Q / 2 + lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const u32 k_at = shared + pair * 32 * KTile::ROW_BYTES + KTile::offset(lane % 16, lane / 16);
#if COMPUTE_DS
    const u32 v_columns = VTile::offset(half * BLOCK_Q / 2 + lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const u32 v_at = shared + K_BYTES + pair * 32 * VTile::ROW_BYTES + VTile::offset(lane % 16, lane / 16);
#endif
    // Offsets in P^T and dS^T in shared memory: the warp pair's rows, this lane's first word in the half of its own
    // warp, and this lane's first row in the half of the other warp.
    const u32 swap_rows = pair * 32 * DsTile::ROW_BYTES, own_word = DsTile::offset(g, half * HALF_QUERY_TILES) + t * 4;
    const u32 other_rows = DsTile::offset(lane % 16, (half ^ 1) * HALF_QUERY_TILES + lane / 16);
    const int num_k_pairs = half ? HEAD_DIM / 16 - HALF_K_PAIRS : HALF_K_PAIRS,
              num_v_pairs = half ? HEAD_DIM_V / 16 - HALF_V_PAIRS : HALF_V_PAIRS;
#if COMPUTE_DS
    const u32 ds_tile = shared + DS_AT + (COMPUTE_DQ ? slot * DS_BYTES : 0) + swap_rows;
    const u32 ds_word = opaque(ds_tile + own_word);
#endif
    const AlignedRange keys = pair_keys[pair];
#if TILE_LISTS
    const bool is_listed = now.sees(block, pair * 32);
#else
    constexpr bool is_listed = true;
#endif
#if HAS_FAR
    const AlignedRange bands = pair_bands[pair];
    const bool no_band = end_query <= bands.lowest || first_query >= bands.last_expire,
               whole_band = first_query >= bands.highest && end_query <= bands.first_expire;
#else
    constexpr bool no_band = true, whole_band = false;
#endif
    // no query of the step sees a key of the pair
    if (((end_query <= keys.lowest || first_query >= keys.last_expire) && no_band) || !is_listed) {
#if COMPUTE_DQ
#pragma unroll
      for (int n = 0; n < HALF_QUERY_TILES; ++n)
#pragma unroll
        for (int r = 0; r < 4; ++r) store_shared_32(DsTile::step(ds_word, r * 8, n), 0);
      if (step > 0 && !early) add_dq(block, memory, shared, slot ^ 1, LAST_STEP);
#endif
      // Nothing is swapped, but race checkers expect every pair to pass its barrier once a step.
      barrier_sync(1 + pair, 64);
      continue;
    }
    const u32 q_tile = shared + Q_AT + slot * Q_BYTES, do_tile = shared + DO_AT + slot * DO_BYTES;
    // {lse, D} of queries 2t and 2t + 1
    const float4* stats = (const float4*)(memory + STATS_AT + slot * STATS_BYTES) + half * BLOCK_Q / 4 + t;

    // Score: S^T = K Q^T, then P^T = 2^(S^T - lse). Scores begin with (delta - base) / softmax_scale (query_tile.cuh).
    float p[2][HALF_QUERY_TILES][4] = {};
#if HAS_BIAS
    {
      const float* bias = (const float*)(memory + BIAS_AT) + pair * 32 + g;
      const float* bases =
          (const float*)(memory + STATS_AT + slot * STATS_BYTES + BLOCK_Q * 8) + half * BLOCK_Q / 2 + 2 * t;
      const float unit = block.bias_unit;
      float row_bias[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) row_bias[r] = bias[r * 8];
#pragma unroll
      for (int n = 0; n < HALF_QUERY_TILES; ++n) {
        const float2 two = *(const float2*)(bases + n * 8);
        const float base[2] = {in_scores(two.x, unit), in_scores(two.y, unit)};
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
          for (int x = 0; x < 4; ++x) p[m][n][x] = row_bias[2 * m + x / 2] - base[x % 2];
      }
    }
#endif
    // Written out: as a call of multiply_rows, nvcc 13.0 orders the sparse kernel's code differently.
    const u32 q_at = opaque(q_tile + k_columns);
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k) {
      u32 a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) load_matrix_x4(a[m], KTile::step(k_at, m * 16, k * 2));
#pragma unroll
      for (int n = 0; n < HALF_QUERY_TILES; n += 2) {
        u32 b[4];
        load_matrix_x4(b, KTile::step(q_at, n * 8, k * 2));
        mma_columns(p, a, n, b);
      }
    }
    {
      const float scale_log2 = block.scale_log2;
#pragma unroll
      for (int n = 0; n < HALF_QUERY_TILES; ++n) {
        const float4 stat = stats[n * 4];
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
          for (int x = 0; x < 4; ++x) p[m][n][x] = exp2_fast(p[m][n][x] * scale_log2 - (x % 2 ? stat.z : stat.x));
      }
    }
    // Mask: needed only if some query of the step does not see some key of the pair.
    if ((first_query < keys.highest || end_query > keys.first_expire) && !whole_band) {
      const int2* entries = (const int2*)(memory + ENTRIES_AT) + pair * 32 + g;
#if HAS_FAR
      const int2* band_entries = (const int2*)(memory + BANDS_AT) + pair * 32 + g;
#endif
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int2 entry = entries[r * 8];
#if HAS_FAR
        const int2 band = band_entries[r * 8];
#endif
#pragma unroll
        for (int n = 0; n < HALF_QUERY_TILES; ++n)
#pragma unroll
          for (int x = 0; x < 2; ++x) {
#if CHOSEN_ROWS
            const int i = rows[half * BLOCK_Q / 2 + n * 8 + 2 * t + x].token;
#else
            const int i = first_query + half * BLOCK_Q / 2 + n * 8 + 2 * t + x;
#endif
            bool sees = entry.x <= i && i < entry.y;
#if HAS_FAR
            sees |= band.x <= i && i < band.y;
#endif
            if (!sees) p[r / 2][n][r % 2 * 2 + x] = 0.0f;
          }
      }
    }

#if COMPUTE_DV
    // Store P^T in shared memory for the other warp; dV += P^T dO over this warp's half of the queries.
    const u32 p_tile = shared + P_AT + swap_rows, p_word = opaque(p_tile + own_word);
    const HalfColumns<VTile, HALF_V_PAIRS> do_transposed(do_tile, half);
#pragma unroll
    for (int k = 0; k < HALF_QUERY_TILES / 2; ++k) {
      u32 a[2][4];
      pack_fragments(a, p, k);
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int x = 0; x < 4; ++x) store_shared_32(DsTile::step(p_word, m * 16 + x % 2 * 8, 2 * k + x / 2), a[m][x]);
      accumulate_columns(sums.dv, a, do_transposed, half * BLOCK_Q / 2 + k * 16, num_v_pairs);
    }
#endif

#if COMPUTE_DS
    // dP^T = V dO^T, then dS^T = P^T (dP^T - rowsum(do * o)).
    float ds[2][HALF_QUERY_TILES][4] = {};
    multiply_rows<VTile>(ds, v_at, opaque(do_tile + v_columns));
#pragma unroll
    for (int n = 0; n < HALF_QUERY_TILES; ++n) {
      const float4 stat = stats[n * 4];
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          ds[m][n][x] = p[m][n][x] * (ds[m][n][x] - (x % 2 ? stat.w : stat.y));
#if HAS_BIAS
          sums.ddelta[m][x / 2] += ds[m][n][x];
#endif
        }
    }

    // Store dS^T in shared memory for the other warp and for dQ; dK += dS^T Q over this warp's half of the queries.
#if COMPUTE_DK
    const HalfColumns<KTile, HALF_K_PAIRS> q_transposed(q_tile, half);
#endif
#pragma unroll
    for (int k = 0; k < HALF_QUERY_TILES / 2; ++k) {
      u32 a[2][4];
      pack_fragments(a, ds, k);
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int x = 0; x < 4; ++x) store_shared_32(DsTile::step(ds_word, m * 16 + x % 2 * 8, 2 * k + x / 2), a[m][x]);
#if COMPUTE_DK
      accumulate_columns(sums.dk, a, q_transposed, half * BLOCK_Q / 2 + k * 16, num_k_pairs);
#endif
    }
#endif

    // dV and dK over the other half of the queries, with the other warp's P^T and dS^T.
    barrier_sync(1 + pair, 64);
#pragma unroll
    for (int k = 0; k < HALF_QUERY_TILES / 2; ++k) {
      u32 a[2][4];
#if COMPUTE_DV
      load_swapped(a, p_tile + other_rows, k);
      accumulate_columns(sums.dv, a, do_transposed, (half ^ 1) * BLOCK_Q / 2 + k * 16, num_v_pairs);
#endif
#if COMPUTE_DK
      load_swapped(a, ds_tile + other_rows, k);
      accumulate_columns(sums.dk, a, q_transposed, (half ^ 1) * BLOCK_Q / 2 + k * 16, num_k_pairs);
#endif
    }
#if COMPUTE_DQ
    if (step > 0 && !early) add_dq(block, memory, shared, slot ^ 1, LAST_STEP);
#endif
  }
  copy_async_wait<0>();
  __syncthreads();  // the last dS^T is complete
#if COMPUTE_DQ
#if TILE_LISTS
  if (step > 0) add_dq(block, memory, shared, (step - 1) & 1, ListedStep(block, step - 1));
#elif HAS_FAR
  if (step > 0) add_dq(block, memory, shared, (step - 1) & 1, head - 1, query_tile(block, block.num_tiles - 1));
#else
  if (step > 0) add_dq(block, memory, shared, (step - 1) & 1, head - 1, block.first_tile + block.num_tiles - 1);
#endif
#endif
#if HAS_BIAS
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    float& sum = sums.ddelta[r / 2][r % 2];
    sum = quad_sum(sum);
  }
  const int lane = (int)threadIdx.x % 32, pair = (int)threadIdx.x / 64, half = (int)threadIdx.x / 32 % 2;
  // After the barrier no thread reads the statistics: their memory takes ddelta of the second warp of each pair.
  float* swapped = (float*)(memory + STATS_AT) + pair * 32 + lane / 4;
  if (half == 1 && lane % 4 == 0) {
#pragma unroll
    for (int r = 0; r < 4; ++r) swapped[r * 8] = sums.ddelta[r / 2][r % 2];
  }
  __syncthreads();  // the second warps have stored ddelta, and no thread reads K and V any more
  if (half == 0) {
#pragma unroll
    for (int r = 0; r < 4; ++r) sums.ddelta[r / 2][r % 2] += swapped[r * 8];
  }
#else
  __syncthreads();  // no thread reads K and V any more
#endif
}
