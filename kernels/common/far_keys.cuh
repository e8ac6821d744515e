// far_keys: which keys a query sees beside its window: the first tokens of its document, and a band of distances that
// each KV head has for itself (CoWindow, arXiv:2609.32704); and which tiles of keys or queries hold a seen pair.
// Defines    HAS_FAR (0): 1 where kernels read such keys; doc_start is then an operand of the backward kernels, too
#pragma once
#include "common/types.cuh"

#ifndef HAS_FAR
#define HAS_FAR 0
#endif

// What the queries of a KV head see of their document: the keys at distances below `window`, those at distances from
// `band` to before `band_end`, and the first `sinks` keys. A distance is 0 for the query's own key. The band begins
// behind the window, or is empty.
struct FarKeys {
  int window, band, band_end, sinks;

  FarKeys() = default;
  // Of KV head `kv_head` of the launch. The bands divide the distances of the launch evenly, to a token.
  template <class Params>
  DEVICE FarKeys(const Params& params, int kv_head) : FarKeys(params, kv_head, params.window, params.seq_len) {}
  // Of a launch with this window, whose rows have up to `seq_len` tokens.
  template <class Params>
  DEVICE FarKeys(const Params& params, int kv_head, u64 window_size, u64 seq_len) {
    const u64 at = (params.first_band + kv_head) % params.num_bands;
    const u64 width = params.last_distance > params.first_distance ? params.last_distance - params.first_distance : 0;
    auto border = [&](u64 at) { return (int)min(params.first_distance + width * at / params.num_bands, seq_len); };
    window = (int)min(window_size, seq_len);
    sinks = (int)min(params.sink_tokens, seq_len);
    band = border(at);
    band_end = border(at + 1);
    if (band <= window) {
      if (band < band_end) window = max(window, band_end);
      band = band_end = window;
    }
  }

  // Whether query `query` of a document that begins at `start` sees `key`.
  DEVICE bool sees(int query, int start, int key) const {
    const bool is_near = key > query - window, is_in_band = key > query - band_end && key <= query - band;
    return key <= query && key >= start && (is_near || is_in_band || key < start + sinks);
  }
  // Whether the queries `first` .. `last` all see the keys from `key` to before `end`, the last query's document
  // beginning at `start`. False also where each key is seen for another reason.
  DEVICE bool all_see(int first, int last, int start, int key, int end) const {
    if (end > first + 1 || key < start) return false;  // else the queries are of one document
    return key > last - window || (key > last - band_end && end <= first - band + 1) || end <= start + sinks;
  }
  // Whether some of the queries `first` .. `last` may see one of the keys from `key` to before `end`; their documents
  // begin at `first_start` .. `last_start`.
  DEVICE bool may_see(int first, int last, int first_start, int last_start, int key, int end) const {
    if (key > last || end <= first_start) return false;
    return end > first - window + 1 || (end > first - band_end + 1 && key <= last - band) || key < last_start + sinks;
  }
};

// How many of the `count` queries from `first` on are of the document that begins at `start`, which is the first
// query's: of one after the other. All 32 lanes of a warp call it.
DEVICE int count_of_document(const i32* doc_start, int start, int first, int count) {
  int same = 0;
  for (int at = 0; at < count; at += 32) {
    const int query = at + (int)threadIdx.x % 32;
    same += __popc(__ballot_sync(~0u, query < count && doc_start[first + min(query, count - 1)] == start));
  }
  return same;
}

// The tiles of TILE keys in which some query of a range sees a key, and no others, from the last tile to the first: up
// to three runs, of the window, the band and the document's first keys. Keys of the documents that begin in the range
// are all in the first run, since the first query's own key is.
template <int TILE>
struct KeyTiles {
  int last, count;             // the last tile, and the number of all
  int near, gap;               // tiles of the first run, and tiles that are left out behind it
  int nearer, next_gap;        // tiles of the first two runs, and tiles left out behind them

  KeyTiles() = default;
  // Of the queries `first` .. `last_query`; those up to `last_of_document` are of the first one's document, which
  // begins at `start`.
  DEVICE KeyTiles(const FarKeys& far, int start, int first, int last_of_document, int last_query) {
    const int lowest = max(start, first - far.window + 1) / TILE, first_sink = start / TILE,
              last_sink = far.sinks > 0 ? min(min(start + far.sinks - 1, first) / TILE, lowest - 1) : first_sink - 1;
    last = last_query / TILE;
    near = last - lowest + 1;
    nearer = near;
    gap = 0;
    int last_before = lowest - 1;  // the last tile before the runs so far
    const int band_first = max(start, first - far.band_end + 1), band_last = last_of_document - far.band;
    if (far.band < far.band_end && band_first <= band_last) {
      const int first_tile = max(band_first / TILE, last_sink + 1), last_tile = min(band_last / TILE, last_before);
      if (first_tile <= last_tile) {
        nearer += last_tile - first_tile + 1;
        gap = last_before - last_tile;
        last_before = first_tile - 1;
      }
    }
    const int of_sinks = max(last_sink - first_sink + 1, 0);
    count = nearer + of_sinks;
    next_gap = of_sinks > 0 ? last_before - last_sink : 0;
  }
  // The tile visited as number `at`, from 0 on.
  DEVICE int tile(int at) const { return last - at - (at >= near ? gap : 0) - (at >= nearer ? next_gap : 0); }
  // How many tiles before `tile`, which is one of them, hold a key that is seen.
  DEVICE int rank(int tile) const {
    const int lowest_near = last - near + 1, lowest_band = lowest_near - gap - (nearer - near);
    const int left_out = tile >= lowest_near ? 0 : tile >= lowest_band ? gap : gap + next_gap;
    return count - 1 - (last - left_out - tile);
  }
};

// The tiles of TILE queries in which some query sees one of a tile's keys, and no others: a run of those that see it in
// their window, or among their document's first keys, and a run of those that have it in their band.
template <int TILE>
struct QueryTiles {
  int first, near_end;  // the first run
  int band_first, end;  // the second run, behind it; empty: both are near_end

  QueryTiles() = default;
  // Of the keys from `key` to `last`, the last key's document being `start` .. `document_end`. Queries that see a key
  // of an earlier document are in the tiles of the keys themselves.
  DEVICE QueryTiles(const FarKeys& far, int start, int document_end, int key, int last) {
    const int first_key = max(key, start);
    const bool has_sinks = first_key < start + far.sinks;
    first = key / TILE;
    near_end = band_first = end = ceil_div(has_sinks ? document_end : min(document_end, last + far.window), TILE);
    const int band_query = first_key + far.band, band_end = min(document_end, last + far.band_end);
    if (!has_sinks && far.band < far.band_end && band_query < band_end) {
      end = max(near_end, ceil_div(band_end, TILE));
      band_first = min(max(near_end, band_query / TILE), end);
    }
  }
  DEVICE int count() const { return near_end - first + end - band_first; }
};

// Bits of the columns from `first` on, of a thread's columns 8 n + x of an accumulator, x 0 or 1: bit 2 n + x.
DEVICE u32 columns_from(int first) {
  const int at = min(max(first, 0), 128);
  return (u32)(0xffffffffull << (at / 8 * 2 + min(at % 8, 2)));
}
