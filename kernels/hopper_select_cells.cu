// hopper_select_cells: select_cells for sm_90a; the same mathematics, layout, buffers, params words and results to
// rounding.
// Math       x[h, a, b] = scale * sum_u q[first_query + a * query_step + u'] . k[b * cell + u] over the `cell` places u
//            of a cell, u' = u or, reversed, cell - 1 - u;
//            LSE: block_lse[h, a, j] = log2 sum_b 2^(x log2(e)) over the cells b of block j not after a's own; else the
//            largest x of each pair of blocks
// Layout     q, k as attention_forward, batch 1; queries are the tokens from first_query on that lie in the call's (the
//            last num_queries), others count as zeros;
//            out f32 [heads, query cells (LSE) or query blocks, key blocks] of the heads from first_head on,
//            contiguous; a block has per_block cells. ORDERED: place t of a key cell holds key order[t], i32
//            [num_kv_heads, num_keys]
// Buffers    q, k, order, out
// Defines    HEAD_DIM (a multiple of 64), LSE 0|1, ORDERED 0|1
// Tiling     grid (ceil(key cells / 128), ceil(query cells / 128), heads), tiles after the queries' positions return at
//            once; 256 threads: two warpgroups of 64 x 128 cells; 64 columns a step in a ring of three; dynamic shared
//            bytes = 98304 + 1024
// Numerics   bf16 products, f32 sums (wgmma): operands are exact
// Edges      any number of tokens: what is missing from a cell counts as zeros; a power of two per_block, at most 128.
//            Blocks after the last query of a tile of 128 cells are left as they are. NaN stays NaN
#define WGMMA 1
#include "common/wgmma.cuh"
#include "common/select_cells.cuh"

// A block computes one tile of 128 cells of queries against 128 cells of keys of a head.
extern "C" __global__ void __launch_bounds__(256, 2)
    hopper_select_cells(const bf16* q, const bf16* k, const i32* order, float* out,
                        const __grid_constant__ SelectCellsParams params) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  // Swizzled tiles begin at multiples of 1024 bytes.
  select_cells_tile(q, k, order, out, params, shared_memory + (1024 - shared_address(shared_memory) % 1024) % 1024);
}
