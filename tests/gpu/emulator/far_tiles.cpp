// far_tiles: the tiles that kernels/common/far_keys.cuh and sink_chunk.cuh name, beside the definition of which pairs are
// seen. The test in lab/crates/sieve-bench/src/bands.rs puts the text of both headers in place of the next line.
// HEADERS
#include <random>

static std::mt19937 generator(1);
static int below(int count) { return (int)(generator() % (unsigned)count); }
static int one_of(std::vector<int> choices) { return choices[below((int)choices.size())]; }
static void require(bool holds, const char* what) {
  if (!holds) std::printf("wrong: %s\n", what), std::exit(1);
}

struct Sizes {
  u64 seq_len, window, sink_tokens, first_distance, last_distance, num_bands, first_band, chunk_queries, sink_tiles;
};

// A row, its documents, and which queries of a KV head see which keys.
struct Row {
  Sizes sizes;
  std::vector<int> start, end;
  int kv_head, seq_len;

  bool sees(int i, int j) const {
    if (j > i || j < start[i]) return false;
    const u64 band = (sizes.first_band + kv_head) % sizes.num_bands, distance = i - j,
              width = sizes.last_distance > sizes.first_distance ? sizes.last_distance - sizes.first_distance : 0;
    const bool in_band = distance >= sizes.first_distance + width * band / sizes.num_bands &&
                         distance < sizes.first_distance + width * (band + 1) / sizes.num_bands;
    return distance < sizes.window || in_band || (u64)(j - start[i]) < sizes.sink_tokens;
  }
};

// What a thread block of the backward kernel does: a tile of keys, its query tiles in the order of their steps, and the
// blocks of chunks whose sums it waits for.
struct Block {
  int tile, flag;
  std::vector<int> steps, waits;
};

template <int KEYS, int QUERIES>
static void check(const Row& row) {
  const FarKeys far(row.sizes, row.kv_head);
  const int n = row.seq_len, key_tiles = ceil_div(n, KEYS), query_tiles = ceil_div(n, QUERIES);
  std::vector<std::vector<int>> seen(query_tiles, std::vector<int>(key_tiles)), visited = seen;
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < n; ++j) {
      require(row.sees(i, j) == far.sees(i, row.start[i], j), "a pair");
      seen[i / QUERIES][j / KEYS] |= row.sees(i, j);
    }
  auto keys_of = [&](int tile) {
    const int first = tile * QUERIES, last = std::min(first + QUERIES, n) - 1;
    int same = first;
    while (same < last && row.start[same + 1] == row.start[first]) ++same;
    return KeyTiles<KEYS>(far, row.start[first], first, same, last);
  };
  for (int tile = 0; tile < query_tiles; ++tile) {
    const KeyTiles<KEYS> keys = keys_of(tile);
    int rank = 0, before = key_tiles;
    for (int at = 0; at < key_tiles; ++at)
      if (seen[tile][at]) require(keys.rank(at) == rank++, "a rank");
    require(rank == keys.count, "a number of tiles of keys");
    for (int at = 0; at < keys.count; ++at) {
      const int key_tile = keys.tile(at), key = key_tile * KEYS, first = tile * QUERIES;
      require(key_tile < before && seen[tile][key_tile], "a tile of keys");
      before = key_tile;
      for (int some = first; some < std::min(first + QUERIES, n); some += 16) {
        const int last = std::min(some + 16, n) - 1;
        bool all = true, any = false;
        for (int i = some; i <= last; ++i)
          for (int j = key; j < key + KEYS; ++j) all &= row.sees(i, j), any |= row.sees(i, j);
        require(all || !far.all_see(some, last, row.start[last], key, key + KEYS), "all see");
        require(!any || far.may_see(some, last, row.start[some], row.start[last], key, key + KEYS), "some see");
      }
      for (int i = first; i < std::min(first + QUERIES, n); ++i)
        for (int lane = 0; lane < 4; ++lane) {
          const int column = key + 2 * lane, query = i - column, start = row.start[i] - column;
          const u32 bits = columns_from(start) & ~columns_from(query + 1) &
                           (columns_from(query - far.window + 1) | ~columns_from(start + far.sinks) |
                            (columns_from(query - far.band_end + 1) & ~columns_from(query - far.band + 1)));
          for (int x = 0; x < KEYS / 4; ++x)
            require((bits >> x & 1) == row.sees(i, column + x / 2 * 8 + x % 2), "a column");
        }
    }
  }
  const SinkChunks chunks(row.sizes);
  std::vector<Block> blocks;
  auto add_block = [&](int tile, const QueryTiles<QUERIES>& of, int flag) {
    Block block = {tile, flag, {}, {}};
    int at = of.end - 1;
    for (int step = 0; step < of.count(); ++step) {
      require(!visited[at][tile]++ && seen[at][tile], "a step");
      block.steps.push_back(at);
      if (--at == of.band_first - 1) at = of.near_end - 1;
    }
    require(at == of.first - 1, "a number of steps");
    blocks.push_back(block);
  };
  for (int at = 0; at < chunks.num_blocks; ++at) {
    int tile;
    QueryTiles<QUERIES> of;
    if (chunks.find<KEYS, QUERIES>(far, row.start.data(), row.end.data(), at, tile, of)) add_block(tile, of, at);
  }
  std::vector<int> flags(chunks.num_blocks + 1);
  for (int tile = 0; tile < key_tiles; ++tile) {
    const int key = tile * KEYS, last = std::min(key + KEYS, n) - 1;
    QueryTiles<QUERIES> of(far, row.start[last], row.end[last], key, last);
    chunks.keep_own(far, row.start[last], key, of);
    add_block(tile, of, -1);
    int at, end;
    chunks.blocks_of<KEYS>(far, row.start[last], row.end[last], key, at, end);
    for (; at < end; at += chunks.tiles) blocks.back().waits.push_back(at);
  }
  require(visited == seen, "every tile once");
  // Blocks start in this order on a few multiprocessors. A block that waits for its turn or for a flag stays there.
  std::vector<int> turns(query_tiles), running, done(blocks.size());
  size_t next = 0, ended = 0;
  const int at_once = 1 + below(4);
  while (ended < blocks.size()) {
    while (running.size() < (size_t)at_once && next < blocks.size()) running.push_back((int)next++);
    bool moved = false;
    for (size_t at = 0; at < running.size();) {
      const Block& block = blocks[running[at]];
      int& step = done[running[at]];
      bool has_ended = false;
      if ((size_t)step < block.steps.size()) {
        int& turn = turns[block.steps[step]];
        if (turn == keys_of(block.steps[step]).rank(block.tile)) ++turn, ++step, moved = true;
      } else {
        has_ended = true;
        for (int wait : block.waits) has_ended &= flags[wait];
      }
      if (has_ended) {
        if (block.flag >= 0) flags[block.flag] = 1;
        running.erase(running.begin() + at);
        ++ended, moved = true;
      } else {
        ++at;
      }
    }
    require(moved, "blocks wait for each other");
  }
}

int main() {
  for (int round = 0; round < 600; ++round) {
    Row row;
    const int n = row.seq_len = 1 + below(round % 3 ? 700 : 300), documents = below(4);
    for (int begin = 0; begin < n;) {
      const int length =
          documents == 0 ? n : documents == 1 ? 1 + below(n) : documents == 2 ? 1 + below(60) : one_of({1, 200});
      const int end = std::min(begin + length, n);
      row.start.insert(row.start.end(), end - begin, begin);
      row.end.insert(row.end.end(), end - begin, end);
      begin = end;
    }
    const int window = one_of({1, 2, 7, 33, 64, 100, n / 2 + 1, n, 5 * n}),
              sinks = one_of({0, 1, 4, 64, 100, 130, 300, n, 3 * n}),
              first = one_of({window, window, below(n + 1), window + below(50)}),
              last = one_of({first, first + 1, n, 2 * n, first + below(n), first / 2}), bands = 1 + below(5);
    row.kv_head = below(7);
    row.sizes = {(u64)n, (u64)window, (u64)sinks, (u64)first, (u64)last, (u64)bands, (u64)below(bands),
                 (u64)(128 * (1 + below(3))), (u64)(sinks ? (std::min(sinks, n) + 126) / 128 + 1 : 0)};
    check<128, 64>(row);
    row.sizes.sink_tiles = 0, row.sizes.chunk_queries = 6144;  // one chunk
    check<128, 128>(row);
    check<64, 32>(row);
    check<48, 128>(row);
  }
  std::printf("good\n");
}
