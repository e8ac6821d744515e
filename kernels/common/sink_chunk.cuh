// sink_chunk: a document's first keys are seen by all its queries, so one block of them would take much longer than all
// others. In the backward pass over far keys it takes the queries of its own chunk of the row alone; each later chunk
// has blocks of its own, which leave f32 sums of dk and dv that the first block adds to its own.
#pragma once
#include "common/far_keys.cuh"
#include "common/semaphores.cuh"

// Chunks of `queries` queries, a multiple of a tile of keys. At most one document reaches into a chunk from an earlier
// one, so each chunk but the first has blocks for the `tiles` tiles of keys that its first keys may lie in.
struct SinkChunks {
  int queries, tiles, num_blocks;  // num_blocks: of a KV head of a batch row

  template <class Params>
  DEVICE explicit SinkChunks(const Params& params)
      : queries((int)params.chunk_queries),
        tiles((int)params.sink_tiles),
        num_blocks((ceil_div((int)params.seq_len, queries) - 1) * tiles) {}

  // Cuts the query tiles of the keys from `key` on, whose last document begins at `start`, down to those of the chunk
  // of the keys, where all queries of the document see one of them.
  template <int TILE>
  DEVICE void keep_own(const FarKeys& far, int start, int key, QueryTiles<TILE>& of) const {
    if (max(key, start) >= start + far.sinks) return;
    of.near_end = min(of.near_end, (key / queries + 1) * queries / TILE);
    of.band_first = of.end = of.near_end;
  }
  // Finds the tile of KEYS keys of block `at` of a KV head, and its query tiles; false where it has nothing to do.
  template <int KEYS, int TILE>
  DEVICE bool find(const FarKeys& far, const i32* doc_start, const i32* doc_end, int at, int& key_tile,
                   QueryTiles<TILE>& of) const {
    const int first = (at / tiles + 1) * queries, start = doc_start[first];
    key_tile = start / KEYS + at % tiles;
    if (key_tile * KEYS >= min(start + far.sinks, first)) return false;
    of.first = first / TILE;
    of.near_end = of.band_first = of.end = ceil_div(min(doc_end[first], first + queries), TILE);
    return true;
  }
  // The numbers of the blocks that have the queries of later chunks for the keys from `key` on, whose last document is
  // `start` .. `document_end`: `first`, and every `tiles`-th one from it on, before `end`.
  template <int KEYS>
  DEVICE void blocks_of(const FarKeys& far, int start, int document_end, int key, int& first, int& end) const {
    const bool has_sinks = max(key, start) < start + far.sinks;
    first = key / queries * tiles + key / KEYS - start / KEYS;
    end = has_sinks ? (ceil_div(document_end, queries) - 1) * tiles : first;
  }
};
