// begin_tile: statements with which the portable entry kernels that keep queries in place begin: they declare `tile`
// and `stream` from the buffers and params by the names these kernels give them. Included inside a kernel, because as a
// function of references the same lines change registers (24 bytes spill at a head_dim of 128).
// Defines    GATHER: keys by DMA's lists, and a tile stays inside one super-block; else consecutive keys; RING_AT:
//            where the stream's stages begin in shared memory
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const int seq_len = (int)params.seq_len, num_heads = (int)params.num_heads, num_kv_heads = (int)params.num_kv_heads;
#if GATHER
  constexpr int BLOCK_TILES = ceil_div(SUPER_BLOCK, TILE_QUERIES);
  const int batch = (int)blockIdx.z, head = (int)blockIdx.y * HEADS_PER_TILE,
            kv_head = head / (num_heads / num_kv_heads);
  const int tile_idx = (int)(gridDim.x - 1 - blockIdx.x), super_block = tile_idx / BLOCK_TILES;
#else
  constexpr u64 SECTION_BYTES = 32 << 20;  // keys and values of the heads in work at a time: half of an L2 cache
  const BlockPlace place = block_place(num_kv_heads, params.seq_len * (HEAD_DIM + HEAD_DIM_V) * 2, SECTION_BYTES);
  const int batch = place.batch, head = place.head * HEADS_PER_TILE, kv_head = head / (num_heads / num_kv_heads);
  const int tile_idx = (int)gridDim.x - 1 - place.tile;  // late tiles see most keys: start them first
#endif

  QueryTile tile;
#if GATHER
  tile.first_query = super_block * SUPER_BLOCK + tile_idx % BLOCK_TILES * TILE_QUERIES;
  tile.end_query = min(min(tile.first_query + TILE_QUERIES, (super_block + 1) * SUPER_BLOCK), seq_len);
  if (tile.first_query >= tile.end_query) return;  // past the end of a short last super-block
#endif
  tile.q = q + params.q_offset + batch * params.q_batch_stride + (u64)head * HEAD_DIM;
  tile.q_stride = (u32)params.q_token_stride;
  tile.batch = batch;
  tile.head = head;
  tile.num_heads = num_heads;
  tile.seq_len = seq_len;
#if !GATHER
  tile.first_query = tile_idx * TILE_QUERIES;
  tile.end_query = min(tile.first_query + TILE_QUERIES, seq_len);
  tile.doc_start = doc_start + (u64)batch * seq_len;
  tile.window = (int)(params.window < params.seq_len ? params.window : params.seq_len);
#endif
  tile.scale_log2 = f32_word(params.softmax_scale) * LOG2_E;
  [[maybe_unused]] const u64 kv_row = (u64)batch * num_kv_heads + kv_head;
#if HAS_BIAS
  tile.base = base + kv_row * ceil_div(seq_len, 64) * 64;
  tile.bias_unit = 1.0f / f32_word(params.softmax_scale);
#endif

#if GATHER
  // A list has the super-block's own keys first, from the newest on, then older keys, those that expire last first. So
  // a later query's window lies nearer to the list's begin: the tile's keys begin where its last query's window begins,
  // and end where its first query's window ends.
  const int tile_queries = (int)params.tile_queries, num_windows = ceil_div(seq_len, tile_queries),
            num_super_blocks = ceil_div(seq_len, SUPER_BLOCK);
  const i32* windows = tile_window + kv_row * num_windows * 2;
  const int begin = windows[(tile.end_query - 1) / tile_queries * 2],
            end = windows[tile.first_query / tile_queries * 2 + 1];
#endif
  KvStream stream;
  stream.k = k + params.k_offset + batch * params.k_batch_stride + (u64)kv_head * HEAD_DIM;
  stream.v = v + params.v_offset + batch * params.v_batch_stride + (u64)kv_head * HEAD_DIM_V;
  stream.k_stride = (u32)params.k_token_stride;
  stream.v_stride = (u32)params.v_token_stride;
#if HAS_BIAS
  stream.delta = delta + kv_row * seq_len;
#endif
#if GATHER
  stream.list = list + (kv_row * num_super_blocks + super_block) * params.list_capacity + begin;
  stream.num_keys = end - begin;
  stream.num_tiles = ceil_div(max(stream.num_keys, 0), BLOCK_KV);
#else
  stream.num_keys = seq_len;
#if HAS_FAR
  const int start = tile.doc_start[tile.first_query],
            same = count_of_document(tile.doc_start, start, tile.first_query, tile.end_query - tile.first_query);
  tile.far = FarKeys(params, kv_head);
  const KeyTiles<BLOCK_KV> tiles(tile.far, start, tile.first_query, tile.first_query + same - 1, tile.end_query - 1);
  __shared__ KeyTiles<BLOCK_KV> shared_tiles;  // the loop lacks registers for it
  if (threadIdx.x == 0) shared_tiles = tiles;  // read behind the barrier of shared_copy
  stream.tiles = &shared_tiles;
  stream.num_tiles = tiles.count;
#else
  const int lowest = max(tile.doc_start[tile.first_query], tile.first_query - tile.window + 1);
  stream.last_tile = (tile.end_query - 1) / BLOCK_KV;
  stream.num_tiles = stream.last_tile - lowest / BLOCK_KV + 1;
#endif
#endif
  stream.ring = shared_memory + RING_AT;
