// selected_blocks: a caller's blocks of each query, in any order, as the attention kernels read them.
// Math       the distinct blocks among the first `count` indices that are not below 0 and not after the query's own
//            block; a block of several pieces is replaced by its pieces up to the query's own one
// Layout     indices i32 [batch, seq_len, num_choosers, num_indices], counted from the document's first token; counts
//            i32 [batch, seq_len, num_choosers]; doc_start i32 [batch, seq_len]; block_indices i32
//            [batch, seq_len, num_choosers, num_indices * pieces]: ascending, each once, then -1
// Buffers    indices, (COUNTS 1: counts,) doc_start, block_indices
// Defines    COUNTS 0|1; 0: every query has num_indices
// Method     a bit for each block up to the query's own one; the set bits in their order
// Tiling     grid (ceil(batch * seq_len * num_choosers / 8)); 256 threads, a warp a list; dynamic shared bytes = a
//            multiple of 8 * 4 * ceil(blocks of seq_len tokens / 32)
// Numerics   integers; every element written
// Edges      any index, any count: counts below 0 are 0, above num_indices num_indices
#include "common/block_scan.cuh"

constexpr int WARPS = 8;

struct SelectedBlocksParams {
  u64 lists, seq_len, num_choosers, num_indices;
  u64 block_size, pieces;  // tokens of a block, and its pieces in block_indices
  u64 num_words;           // words of a warp's bits
};

// A warp has one list: the indices of one query and chooser, and in shared memory a bit for each block up to the
// query's own.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    selected_blocks(const i32* indices,
#if COUNTS
                    const i32* counts,
#endif
                    const i32* doc_start, i32* block_indices, const __grid_constant__ SelectedBlocksParams params) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
  const u64 list = (u64)blockIdx.x * WARPS + warp;
  if (list >= params.lists) return;
  u32* bits = (u32*)shared_memory + warp * params.num_words;
  const int num_indices = (int)params.num_indices, size = (int)params.block_size, pieces = (int)params.pieces;
  const u64 token = list / params.num_choosers;
  const int position = (int)(token % params.seq_len) - doc_start[token], own = position / size,
            own_piece = position / (size / pieces), num_words = own / 32 + 1;
  // Set the bit of each block that is listed and not after the query's own.
  for (int word = lane; word < num_words; word += 32) bits[word] = 0;
  __syncwarp();  // the bits are zero
#if COUNTS
  const int count = max(min(counts[list], num_indices), 0);
#else
  const int count = num_indices;
#endif
  const i32* from = indices + list * num_indices;
  for (int at = lane; at < count; at += 32) {
    const int block = from[at];
    if (block >= 0 && block <= own) atomicOr(&bits[block / 32], 1u << block % 32);
  }
  __syncwarp();  // every bit is set

  // Write the blocks of the set bits in their order: a lane has a word of 32 blocks.
  i32* to = block_indices + list * num_indices * pieces;
  int num_blocks = 0;  // written so far
  for (int base = 0; base < num_words; base += 32) {
    u32 left = base + lane < num_words ? bits[base + lane] : 0;
    const u32 up_to = warp_inclusive_sum((u32)__popc(left));
    for (int at = num_blocks + (int)up_to - __popc(left); left != 0; ++at, left &= left - 1) {
      const int block = (base + lane) * 32 + __ffs((int)left) - 1;
      for (int i = 0; i < pieces; ++i) {
        const int piece = block * pieces + i;
        to[at * pieces + i] = piece <= own_piece ? piece : -1;
      }
    }
    num_blocks += (int)__shfl_sync(~0u, up_to, 31);
  }
  for (int at = num_blocks * pieces + lane; at < num_indices * pieces; at += 32) to[at] = -1;
}
