// nsa_compressed_lists: the compressed blocks that each super-block of 1024 queries sees, in the form of DMA's lists
// (dma_lists.cu): a block is placed at its last token (nsa_place) and expires with its document.
// Math       each compressed block of a row has a slot; a document's blocks have consecutive slots, and a slot in which
//            no block begins (between documents) is empty. Entries {last token, document end} of the slots that a query
//            of the super-block may see, latest first; an empty slot gives {first query of the super-block, 0}, which
//            no query sees. Queries [i0, i1] of a tile need the entries [a, e): a = those with last token > i1, e = up
//            to the first slot of i0's document
// Layout     doc_start, doc_end i32 [batch, seq_len]; list int2 [batch, num_kv_heads, num_super_blocks, capacity],
//            capacity a multiple of 128 and at least num_slots; list_len i32 [batch, num_kv_heads, num_super_blocks];
//            tile_window int2 {a, e} [batch, num_kv_heads, ceil(seq_len / 64)]; contiguous
// Buffers    doc_start, doc_end, list, list_len, tile_window
// Defines    none
// Tiling     grid (num_super_blocks, num_kv_heads, batch); 256 threads; no shared memory
// Numerics   integers only. Entries list_len .. round_up(max(list_len, 1), 128) are written as {first query, 0}; later
//            ones are not written
// Edges      any seq_len >= 1
#include "common/nsa_blocks.cuh"

struct NsaCompressedListsParams {
  u64 seq_len, size, stride, capacity;
};

constexpr int SUPER_BLOCK = 1024, TILE_QUERIES = 64, LIST_ALIGNMENT = 128;

// The last slot, up to `slot`, of a block that ends at `token` or before; may lie below every slot of a document.
DEVICE int last_slot(const CompressedBlocks& blocks, int token) {
  const int document = blocks.doc_start[token];
  return blocks.first_slot(document) + blocks.num_seen(token, document) - 1;
}

// A block writes the list of one super-block and KV head, and the windows of its tiles of queries; a thread has every
// 256th entry.
extern "C" __global__ void __launch_bounds__(256)
    nsa_compressed_lists(const i32* doc_start, const i32* doc_end, int2* list, i32* list_len, int2* tile_window,
                         const __grid_constant__ NsaCompressedListsParams params) {
  const int seq_len = (int)params.seq_len, size = (int)params.size, thread = (int)threadIdx.x;
  const CompressedBlocks blocks = {doc_start + (u64)blockIdx.z * seq_len, doc_end + (u64)blockIdx.z * seq_len, size,
                                   (int)params.stride};
  const u64 row = (u64)blockIdx.z * gridDim.y + blockIdx.y, list_row = row * gridDim.x + blockIdx.x;
  const int first_query = (int)blockIdx.x * SUPER_BLOCK, end_query = min(first_query + SUPER_BLOCK, seq_len);

  // The slots that queries of the super-block may see, both ends included, as entries with the last slot first.
  const int low = blocks.first_slot(blocks.doc_start[first_query]), high = last_slot(blocks, end_query - 1),
            count = max(high - low + 1, 0);
  list += list_row * params.capacity;
  const int padded = ceil_div(max(count, 1), LIST_ALIGNMENT) * LIST_ALIGNMENT;
  for (int at = thread; at < padded; at += 256) {
    int2 entry = {first_query, 0};
    if (at < count) {
      const int start = blocks.start(high - at);
      if (start >= 0) entry = make_int2(start + size - 1, blocks.doc_end[start]);
    }
    list[at] = entry;
  }
  if (thread == 0) list_len[list_row] = count;
  // The window of entries of each tile of 64 queries.
  const int num_tiles = ceil_div(seq_len, TILE_QUERIES), first_tile = first_query / TILE_QUERIES;
  for (int tile = first_tile + thread; tile < min(first_tile + SUPER_BLOCK / TILE_QUERIES, num_tiles); tile += 256) {
    const int last_query = min((tile + 1) * TILE_QUERIES, end_query) - 1;
    // Where the document has no compressed block yet, the range covers slots of earlier documents, which this tile does
    // not see.
    const int begin = min(max(high - last_slot(blocks, last_query), 0), count);
    const int end = min(max(high - blocks.first_slot(blocks.doc_start[tile * TILE_QUERIES]) + 1, 0), count);
    tile_window[row * num_tiles + tile] = make_int2(begin, max(begin, end));
  }
}
