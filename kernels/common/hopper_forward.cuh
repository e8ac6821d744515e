// hopper_forward: attention of a tile of query rows on Hopper (sm_90a), the softmax kept online (arXiv:2407.08608):
// while the softmax of stage k + 1 runs, the tensor cores run the other warpgroup's GEMMs and this one's P V of stage
// k. Used by hopper_attention_forward.cu (dense, sliding window) and hopper_dma_attention_forward.cu (gathered lists),
// which document the interface.
// Defines    as hopper_tiles.cuh; RESIDUAL 0|1: `o_low` (o_f32 - bf16(o)) is stored too
#pragma once
#if GATHER
// kernels/notes/first-stage-of-64-keys.md
#define HALF_STAGES 1
#endif
#include "common/hopper_tiles.cuh"
#include "common/bf16_rest.cuh"
#include "common/block_lse.cuh"
#include "common/online_softmax.cuh"

#ifndef RESIDUAL
#define RESIDUAL 0
#endif

constexpr int O_REGISTERS = HEAD_DIM_V / 2;

// The reference maximum of the online softmax moves only when a row outgrows it by this many powers of two. With
// RESIDUAL it moves at once: the largest weight of a row is then exactly 1, so that o, a sum over bf16 weights, is more
// accurate than bf16 and `o_low` carries information.
constexpr float RESCALE_AT = RESIDUAL ? 0.0f : OUTGROWN_AT;
// The maximum of a row that has seen no key: finite, so that no infinity is subtracted from another. With a bias it
// exceeds the scores of masked keys (about -2^60), whose exponents would else be rounding errors of that magnitude; it
// stays below a row's largest logit, which is at least the q . k of the key with the largest bias.
constexpr float NO_MAXIMUM = HAS_BIAS ? -16777216.0f : NO_KEY_MAXIMUM;
// From this logit on (in powers of two) rounding it shows beside the 16 bits that o and o_low keep together.
constexpr float LARGE_LOGIT = 16.0f;

// The first STEPS of a stage's A operands, which hold the weights of its first 16 STEPS keys, as an array of that
// length.
template <int STEPS>
DEVICE u32 (&first_steps(u32 (&weights)[BLOCK_KV / 16][4]))[STEPS][4] {
  return *reinterpret_cast<u32(*)[STEPS][4]>(&weights);
}

// O += P V: the consumer's 64 rows over the first 16 STEPS keys of a stage whose values are at shared address `v`.
// Starts the GEMM and closes its group; all 128 threads call it.
template <int STEPS>
DEVICE void weigh_stage(float (&output)[O_REGISTERS], const u32 (&weights)[STEPS][4], u32 v) {
  wgmma_weigh<BLOCK_KV>(output, weights, v, true);
  wgmma_commit();
}

// Whether a row's largest logit is computed only where one outgrows the reference maximum, or where the row may see its
// first key. In all other stages this saves half the instructions of the maximum, and its shuffles
// (kernels/notes/maximum-where-outgrown.md). A row's bits do not depend on the rows beside it, and
// hopper_attention_token computes the same (kernels/notes/one-order-of-sums.md).
constexpr bool LAZY_MAXIMUM = !RESIDUAL && !HAS_BIAS && !GATHER && !SPARSE;
static_assert(!LAZY_MAXIMUM || TILE_QUERIES % 64 == 0, "the stage with a row's first key is partial");

// Whether a logit of the warp, relative to its row's reference maximum, exceeds RESCALE_AT. Floats of which one is
// positive have the same largest as integers, and the largest of three integers is one instruction. A NaN counts.
template <int N>
DEVICE bool outgrows(const float (&logit)[N]) {
  int largest[4];
#pragma unroll
  for (int x = 0; x < 4; ++x) largest[x] = __float_as_int(logit[x]);
#pragma unroll
  for (int i = 4; i + 8 <= N; i += 8)
#pragma unroll
    for (int x = 0; x < 4; ++x)
      largest[x] = max(max(largest[x], __float_as_int(logit[i + x])), __float_as_int(logit[i + 4 + x]));
#pragma unroll
  for (int x = 0; x < 4; ++x) largest[x] = max(largest[x], __float_as_int(logit[N - 4 + x]));
  return __any_sync(~0u, max(max(largest[0], largest[1]), max(largest[2], largest[3])) > __float_as_int(RESCALE_AT));
}

// The largest of this thread's scores of its row `r`, 0 or 1, from the FIRST-th eight columns to before the END-th.
template <int FIRST, int END, int N>
DEVICE float lane_maximum(const float (&score)[N], int r) {
  float largest = fmaxf(score[4 * FIRST + 2 * r], score[4 * FIRST + 2 * r + 1]);
#pragma unroll
  for (int n = FIRST + 1; n < END; ++n) largest = fmaxf(largest, fmaxf(score[4 * n + 2 * r], score[4 * n + 2 * r + 1]));
  return largest;
}

// The largest of the scores of row `r`, 0 or 1, over the quad, whose four lanes share it and all call this.
template <int N>
DEVICE float row_maximum(const float (&score)[N], int r) {
  return quad_max(lane_maximum<0, N / 4>(score, r));
}

struct SoftmaxState {
  float maximum[2] = {NO_MAXIMUM, NO_MAXIMUM};  // RESIDUAL: of scores, else of scores times logit_scale
  float total[2] = {0.0f, 0.0f};
#if BLOCK_LSE
  BlockLseRows blocks;
  int first_key;               // of the stage
#endif
};

// A block's log-sum-exp comes from its weights if a logit of each lane is above the reference maximum minus this:
// smaller weights would lose digits, and below 2^-126 they are zero.
[[maybe_unused]] constexpr float FAR_BELOW = 64.0f;

// Replaces the scores of the thread's two rows by weights 2^(S - maximum); `factor` is what earlier sums and outputs of
// each row must be multiplied by. Returns whether any of the warp's factors differs from 1; all 32 lanes call it.
// `logit_scale` makes scores powers of two. `is_partial`: keys are masked, or the stage is the tile's first.
template <int N>
DEVICE bool softmax_stage(float (&score)[N], SoftmaxState& state, float (&factor)[2], float logit_scale,
                          bool is_partial = true) {
  bool outgrown = false;
  factor[0] = factor[1] = 1.0f;
  [[maybe_unused]] bool is_far = BLOCK_LSE != HALF_KV;  // whether weights cannot give the blocks' log-sum-exps
#pragma unroll
  for (int r = 0; r < 2 && (is_partial || !LAZY_MAXIMUM); ++r) {
#if BLOCK_LSE
    const float halves[2] = {lane_maximum<0, N / 8>(score, r), lane_maximum<N / 8, N / 4>(score, r)},
                largest = quad_max(fmaxf(halves[0], halves[1]));
#else
    const float largest = row_maximum(score, r);
#endif
#if RESIDUAL
    const float grown = largest, old = state.maximum[r];
    const bool grows = grown > old;
    factor[r] = grows ? exp2_fast((old - grown) * logit_scale) : 1.0f;
#else
    if (LAZY_MAXIMUM) {
      factor[r] = first_maximum(state.maximum[r], largest, logit_scale);
      continue;
    }
    const float grown = largest * logit_scale, old = state.maximum[r];
    const bool grows = grown > old + RESCALE_AT;
    factor[r] = grows ? exp2_fast(old - grown) : 1.0f;
#endif
    state.maximum[r] = grows ? grown : old;
    outgrown |= grows;
#if BLOCK_LSE
    is_far |= fminf(halves[0], halves[1]) * logit_scale < state.maximum[r] - FAR_BELOW;
#endif
  }
#if BLOCK_LSE
  is_far = __any_sync(~0u, is_far);
  if (is_far) state.blocks.store(score, state.first_key, logit_scale);
#endif
#if RESIDUAL
  // Rounding S - maximum at the magnitude of a large maximum would make the largest weight differ from 1 in the row sum
  // only, and o would lose the accuracy that o_low keeps.
  const bool is_large =
      __any_sync(~0u, fmaxf(fabsf(state.maximum[0]), fabsf(state.maximum[1])) * logit_scale > LARGE_LOGIT);
  if (is_large) {
#pragma unroll
    for (int i = 0; i < N; ++i) score[i] = exp2_fast((score[i] - state.maximum[i % 4 / 2]) * logit_scale);
  } else
#endif
  {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float maximum = RESIDUAL ? state.maximum[r] * logit_scale : state.maximum[r];
#pragma unroll
      for (int n = 0; n < N / 4; ++n)
#pragma unroll
        for (int x = 0; x < 2; ++x)
          score[4 * n + 2 * r + x] = logit_below(score[4 * n + 2 * r + x], logit_scale, maximum);
    }
    if (LAZY_MAXIMUM && outgrows(score)) {
      outgrown = true;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float growth = maximum_growth(row_maximum(score, r));
        factor[r] = exp2_fast(-growth);
        state.maximum[r] += growth;
#pragma unroll
        for (int n = 0; n < N / 4; ++n)
#pragma unroll
          for (int x = 0; x < 2; ++x) score[4 * n + 2 * r + x] -= growth;
      }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) score[i] = exp2_fast(score[i]);
  }
  float sum[2][2] = {};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int n = 0; n < N / 4; ++n)
#pragma unroll
      for (int x = 0; x < 2; ++x) sum[r][BLOCK_LSE ? n / (N / 8) : x] += score[4 * n + 2 * r + x];
    state.total[r] = sum_of_stages(state.total[r], factor[r], sum[r][0] + sum[r][1]);
  }
#if BLOCK_LSE
  if (!is_far) state.blocks.store_sums(sum, state.maximum, state.first_key);
  state.first_key += BLOCK_KV;
#endif
  return __any_sync(~0u, outgrown);
}

struct ForwardOutput {
  bf16* o;       // [batch, seq_len, num_heads, HEAD_DIM_V]
  float* lse;    // [batch, num_heads, seq_len]
  short* o_low;  // RESIDUAL: as o, the bits that o lacks (bf16_rest)
#if BLOCK_LSE
  BlockLse block_lse;
#endif
};

// Divides, rounds and stores the 64 rows of consumer `warpgroup` of the tile described at shared address `tile`; all
// its threads call it.
DEVICE void store_rows(const float (&output)[O_REGISTERS], const SoftmaxState& state,
                       [[maybe_unused]] float logit_scale, const InputTensors& tensors, const ForwardOutput& out,
                       u32 tile, int warpgroup) {
  const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
  [[maybe_unused]] const int batch = load_shared_int(tile), head = load_shared_int(tile + 4),
                             first_query = load_shared_int(tile + 8), end_query = load_shared_int(tile + 12);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = quad_sum(state.total[r]);
    // A row that sees nothing has sum 0: its output is 0 and its log-sum-exp -inf. A NaN stays NaN.
    const float inverse = sum != 0.0f ? 1.0f / sum : 0.0f;
    const int row = warpgroup * 64 + (int)threadIdx.x % 128 / 32 * 16 + g + 8 * r, row_head = head + row / TILE_QUERIES;
#if SPARSE
    const int query = row_position(tile, row);
#else
    const int query = first_query + row % TILE_QUERIES;
#endif
    const bool inside = query < end_query;
    if (inside && t == 0)
      out.lse[((u64)batch * tensors.num_heads + row_head) * tensors.seq_len + query] =
          sum != 0.0f ? state.maximum[r] * (RESIDUAL ? logit_scale * LN_2 : LN_2) + logf(sum) : -INFINITY_F32;
    const u64 at = (((u64)batch * tensors.seq_len + query) * tensors.num_heads + row_head) * HEAD_DIM_V + t * 8;
#pragma unroll
    for (int n = 0; n < HEAD_DIM_V / 32; ++n) {
      u32 x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[i] = pack_bf16(output[(4 * n + i) * 4 + 2 * r] * inverse, output[(4 * n + i) * 4 + 2 * r + 1] * inverse);
#if RESIDUAL
      u32 low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        low[i] =
            bf16_rest(x[i], output[(4 * n + i) * 4 + 2 * r] * inverse, output[(4 * n + i) * 4 + 2 * r + 1] * inverse);
      quad_transpose(low);
      if (inside) *(uint4*)(out.o_low + at + n * 32) = make_uint4(low[0], low[1], low[2], low[3]);
#endif
      quad_transpose(x);
      if (inside) *(uint4*)(out.o + at + n * 32) = make_uint4(x[0], x[1], x[2], x[3]);
    }
  }
}

// The warpgroup's rows of one tile while stages stream past them.
struct RowsInWork {
  const ConsumerRows& rows;
  StagePlaces& places;
  u32 shared, q, bases;
  int warpgroup;
  float logit_scale;
  float (&output)[O_REGISTERS];
  SoftmaxState& state;

  // The shared address of the current stage's keys, in their ring of K_STAGES.
  DEVICE u32 key_tile() const { return shared + K_AT + places.k.slot * STAGE_BYTES; }
  // The shared address of the values that O += P V reads next, in their ring of V_STAGES.
  DEVICE u32 value_tile() const { return shared + V_AT + places.v.slot * V_STAGE_BYTES; }
  // Gives the current stage's keys back to the producer, and after the tile's last stage its queries too.
  DEVICE void release_keys(bool is_last) const {
    release(barrier_at(shared, EMPTY_K + places.k.slot));
    if (is_last) release(barrier_at(shared, EMPTY_Q));
  }
  // Waits for the next stage's values and for O += P V of the last ones, whose slot it releases.
  DEVICE void next_values() {
    RingPlace<V_STAGES> next_v = places.v;
    next_v.advance();
    barrier_wait(barrier_at(shared, FULL_V + next_v.slot), next_v.phase);
    wgmma_wait<0>();
    release(barrier_at(shared, EMPTY_V + places.v.slot));
    places.v = next_v;
  }
  // Multiplies the outputs of the thread's two rows by `factor`, since their reference maximum has moved.
  DEVICE void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < O_REGISTERS; ++i) output[i] *= factor[i % 4 / 2];
  }

  // Computes the weights of the first stage, or of its first half, then waits for its values.
  template <int STEPS>
  DEVICE void first_stage(u32 (&weights)[STEPS][4], bool is_last) {
    float score[8 * STEPS], factor[2];
    barrier_wait(barrier_at(shared, FULL_K + places.k.slot), places.k.phase);
    if (GATHER) fence_async_proxy();
    wgmma_fence();
    multiply_stage<HAS_BIAS>(score, q, key_tile(), bases, key_slot(shared, places.stage));
    const bool partial = stage_is_partial<16 * STEPS>(rows, key_slot(shared, places.stage), 0);
    wgmma_wait<0>();
    release_keys(is_last);
    if (partial) mask_stage(score, rows, key_slot(shared, places.stage), 0, -INFINITY_F32);
    softmax_stage(score, state, factor, logit_scale);
    pack_operand(weights, score);
    barrier_wait(barrier_at(shared, FULL_V + places.v.slot), places.v.phase);
  }

  // Computes the weights of the next stage, number `it` of the tile, while the values of the last one are weighed.
  template <int STEPS>
  DEVICE void next_stage(const u32 (&last_weights)[STEPS][4], u32 (&weights)[BLOCK_KV / 16][4], int it, bool is_last) {
    float score[64], factor[2];
    places.next_keys();
    barrier_wait(barrier_at(shared, FULL_K + places.k.slot), places.k.phase);
    if (GATHER) fence_async_proxy();  // for the keys, and the values awaited before
    take_turn(warpgroup);
    wgmma_fence();
    multiply_stage<HAS_BIAS>(score, q, key_tile(), bases, key_slot(shared, places.stage));
    wgmma_fence();
    weigh_stage(output, last_weights, value_tile());
    if (TAKE_TURNS == 1) pass_turn(warpgroup);
    const bool partial = stage_is_partial(rows, key_slot(shared, places.stage), it);
    wgmma_wait<1>();
    if (TAKE_TURNS == 2) pass_turn(warpgroup);
    release_keys(is_last);
    if (partial) mask_stage(score, rows, key_slot(shared, places.stage), it, -INFINITY_F32);
    const bool outgrown = softmax_stage(score, state, factor, logit_scale, partial);
    // The exponentials must stay before the wait for O += P V, which hides them; this call and the loop inside
    // barrier_wait keep the compiler from moving them after it. kernels/notes/exponentials-before-the-wait.md
    keep_here(score);
    next_values();
    if (outgrown) rescale(factor);
    pack_operand(weights, score);
  }

#if PAIRS
  // What a consumer does with a stage of two boxes of keys, of which its rows may see one or none. Its products are of
  // the 16 STEPS keys that it sees; `k_at` and `v_at` are the bytes from a tile's start to the first of them.

  // Computes the weights of the next stage, while those of the last one, of 16 LAST keys, are multiplied by its values.
  template <int LAST, int STEPS>
  DEVICE void next_part(u32 (&weights)[BLOCK_KV / 16][4], bool is_last, int2 first, u32 k_at, u32 v_at) {
    float score[8 * STEPS], factor[2];
    places.next_keys();
    take_turn(warpgroup);
    wgmma_fence();
    multiply_stage<0>(score, q, key_tile() + k_at, bases, key_slot(shared, places.stage));
    wgmma_fence();
    weigh_stage(output, first_steps<LAST>(weights), value_tile() + v_at);
    if (TAKE_TURNS == 1) pass_turn(warpgroup);
    const bool partial = keys_are_partial<16 * STEPS>(rows, first);
    wgmma_wait<1>();
    if (TAKE_TURNS == 2) pass_turn(warpgroup);
    release_keys(is_last);
    if (partial) mask_keys(score, rows, first, -INFINITY_F32);
    const bool outgrown = softmax_stage(score, state, factor, logit_scale);
    keep_here(score);  // as in next_stage
    next_values();
    if (outgrown) rescale(factor);
    pack_operand(first_steps<STEPS>(weights), score);
  }

  // Computes the weights of a stage where none wait for their values: the tile's first, or one after skipped stages.
  template <int STEPS>
  DEVICE void start_part(u32 (&weights)[BLOCK_KV / 16][4], int it, bool is_last, int2 first, u32 k_at) {
    float score[8 * STEPS], factor[2];
    if (it > 0) take_turn(warpgroup);  // every stage but the first takes turns
    wgmma_fence();
    multiply_stage<0>(score, q, key_tile() + k_at, bases, key_slot(shared, places.stage));
    const bool partial = keys_are_partial<16 * STEPS>(rows, first);
    wgmma_wait<0>();
    if (TAKE_TURNS && it > 0) pass_turn(warpgroup);
    release_keys(is_last);
    if (partial) mask_keys(score, rows, first, -INFINITY_F32);
    if (softmax_stage(score, state, factor, logit_scale)) rescale(factor);
    pack_operand(first_steps<STEPS>(weights), score);
    barrier_wait(barrier_at(shared, FULL_V + places.v.slot), places.v.phase);
  }

  // Adds P V of the last 16 LAST keys, which nothing else runs beside, to the output.
  template <int LAST>
  DEVICE void weigh_part(u32 (&weights)[BLOCK_KV / 16][4], u32 v_at) {
    wgmma_fence();
    weigh_stage(output, first_steps<LAST>(weights), value_tile() + v_at);
    wgmma_wait<0>();
    release(barrier_at(shared, EMPTY_V + places.v.slot));
    places.v.advance();
  }
  // Adds P V of the last stage of which the rows see a key: 16 `steps` keys, of which 0, one half or all are seen.
  DEVICE void weigh_pending(u32 (&weights)[BLOCK_KV / 16][4], int steps, u32 v_at) {
    if (steps == BLOCK_KV / 16) weigh_part<BLOCK_KV / 16>(weights, v_at);
    else if (steps > 0) weigh_part<HALF_KV / 16>(weights, v_at);
  }

  // Skips a stage in which this consumer's rows see no key. The pending P V is finished first, since its V slot is
  // about to be reused.
  DEVICE void let_go_by(u32 (&weights)[BLOCK_KV / 16][4], int pending, u32 v_at, int it, bool is_last) {
    if (TAKE_TURNS && it > 0) {
      take_turn(warpgroup);
      pass_turn(warpgroup);
    }
    release_keys(is_last);
    weigh_pending(weights, pending, v_at);
    barrier_wait(barrier_at(shared, FULL_V + places.v.slot), places.v.phase);
    release(barrier_at(shared, EMPTY_V + places.v.slot));
    places.v.advance();
  }
#endif

  // Adds P V of the last stage to the output.
  template <int STEPS>
  DEVICE void finish(const u32 (&weights)[STEPS][4]) {
    if (GATHER) fence_async_proxy();
    wgmma_fence();
    weigh_stage(output, weights, value_tile());
    wgmma_wait<0>();
    release(barrier_at(shared, EMPTY_V + places.v.slot));
    places.k.advance();
    places.v.advance();
    places.stage += 1;
  }
};

struct ForwardConsumer {
  ForwardOutput out;

  // Computes attention of the 64 rows of consumer `warpgroup` of the block's tile number `done`; false when there was
  // none. All 128 threads of the consumer call it.
  DEVICE bool consume(const InputTensors& tensors, u32 shared, u32 done, int warpgroup, StagePlaces& places) const {
    const u32 tile = tile_base(shared, done);
    barrier_wait(barrier_at(shared, FULL_Q), done & 1);
    if (SPARSE) fence_async_proxy();  // the queries came by cp.async
    const int num_stages = load_shared_int(tile + 16);
    if (num_stages == 0) return false;

    const ConsumerRows rows = consumer_rows(tile, warpgroup);
    float output[O_REGISTERS] = {};
    u32 weights[BLOCK_KV / 16][4];
    SoftmaxState state;
#if BLOCK_LSE
    state.blocks = block_lse_rows(out.block_lse, load_shared_int(tile + 4), rows.query[0], rows.query[1],
                                  load_shared_int(tile + 12));
    state.first_key = 0;
#endif
    RowsInWork work = {rows,
                       places,
                       shared,
                       shared + warpgroup * 64 * 128,
                       tile + BASES_AT + warpgroup * 64 * SPLIT_BYTES,
                       warpgroup,
                       tensors.softmax_scale * LOG2_E,
                       output,
                       state};

    int num_whole = num_stages;
#if HALF_STAGES
    if (load_shared_int(tile + 24)) {
      num_whole -= 1;
      u32 half_weights[HALF_KV / 16][4];
      work.first_stage(half_weights, num_whole == 0);
      if (num_whole > 0) work.next_stage(half_weights, weights, 0, num_whole == 1);
      else work.finish(half_weights);
    } else
#endif
      work.first_stage(weights, num_whole == 1);
    for (int it = 1; it < num_whole; ++it) work.next_stage(weights, weights, it, it == num_whole - 1);
    if (num_whole > 0) work.finish(weights);
    store_rows(output, state, work.logit_scale, tensors, out, tile, warpgroup);
    return true;
  }
};
