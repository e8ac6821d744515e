// probe_mask: the mask of dense probe rows: the call's first row and every position that is a multiple of gamma are
// probes (Delta Attention, arXiv:2505.11254).
// Math       tile t: the probes 128 t .. 128 t + 127 and all tiles of 128 keys that begin no later than the last of
//            them; probe p is row max(p * gamma - offset, 0)
// Layout     mask i32: row_ptr [tiles + 1], tile_idx, query_order [probes] from the words row_ptr_at, tile_idx_at and
//            query_order_at on
// Buffers    mask
// Defines    none
// Tiling     grid (tiles, 1, 1); 128 threads; no dynamic shared memory
// Numerics   integers
// Edges      a last tile with fewer probes
#include "common/types.cuh"

// context: keys before the first query; offset: context % gamma.
struct ProbeMaskParams {
  u64 num_probes, context, gamma, offset;
  u64 row_ptr_at, tile_idx_at, query_order_at;
};

// A block writes the lists of one tile of 128 probes: thread t has probe t, and every 128th tile of keys.
extern "C" __global__ void __launch_bounds__(128)
    probe_mask(i32* mask, const __grid_constant__ ProbeMaskParams params) {
  const int probes = (int)params.num_probes, gamma = (int)params.gamma, offset = (int)params.offset,
            tile = (int)blockIdx.x, thread = (int)threadIdx.x;
  const auto row_of = [&](int probe) { return max(probe * gamma - offset, 0); };
  const auto count_of = [&](int tile) {
    return ((int)params.context + row_of(min((tile + 1) * 128, probes) - 1)) / 128 + 1;
  };
  int at = 0;
  for (int before = 0; before < tile; ++before) at += count_of(before);
  const int count = count_of(tile), probe = tile * 128 + thread;
  if (thread == 0) {
    mask[params.row_ptr_at + tile] = at;
    if (tile + 1 == (int)gridDim.x) mask[params.row_ptr_at + tile + 1] = at + count;
  }
  for (int j = thread; j < count; j += 128) mask[params.tile_idx_at + at + j] = j;
  if (probe < probes) mask[params.query_order_at + probe] = row_of(probe);
}
