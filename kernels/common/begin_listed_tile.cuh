// begin_listed_tile: statements with which the portable entry kernels over DMA's lists begin, as begin_dense_tile.
  constexpr int BLOCK_TILES = ceil_div(SUPER_BLOCK, TILE_QUERIES);
  const int seq_len = (int)params.seq_len, num_heads = (int)params.num_heads, num_kv_heads = (int)params.num_kv_heads;
  const int batch = (int)blockIdx.z, head = (int)blockIdx.y * HEADS_PER_TILE,
            kv_head = head / (num_heads / num_kv_heads);
  const int tile_idx = (int)(gridDim.x - 1 - blockIdx.x), super_block = tile_idx / BLOCK_TILES;

  QueryTile tile;
  tile.first_query = super_block * SUPER_BLOCK + tile_idx % BLOCK_TILES * TILE_QUERIES;
  tile.end_query = min(min(tile.first_query + TILE_QUERIES, (super_block + 1) * SUPER_BLOCK), seq_len);
  if (tile.first_query >= tile.end_query) return;  // past the end of a short last super-block
  tile.q = q + params.q_offset + batch * params.q_batch_stride + (u64)head * HEAD_DIM;
  tile.q_stride = (u32)params.q_token_stride;
  tile.batch = batch;
  tile.head = head;
  tile.num_heads = num_heads;
  tile.seq_len = seq_len;
  tile.scale_log2 = f32_word(params.softmax_scale) * LOG2_E;
  const u64 list_row = (u64)batch * num_kv_heads + kv_head;
  tile.base = base + list_row * ceil_div(seq_len, 64) * 64;
  tile.bias_unit = 1.0f / f32_word(params.softmax_scale);

  // The window's begin falls and its end falls from tile to tile: the last query decides the one, the first query the
  // other.
  const int tile_queries = (int)params.tile_queries, num_windows = ceil_div(seq_len, tile_queries),
            num_super_blocks = ceil_div(seq_len, SUPER_BLOCK);
  const i32* windows = tile_window + list_row * num_windows * 2;
  const int begin = windows[(tile.end_query - 1) / tile_queries * 2],
            end = windows[tile.first_query / tile_queries * 2 + 1];

  KvStream stream;
  stream.k = k + params.k_offset + batch * params.k_batch_stride + (u64)kv_head * HEAD_DIM;
  stream.v = v + params.v_offset + batch * params.v_batch_stride + (u64)kv_head * HEAD_DIM_V;
  stream.k_stride = (u32)params.k_token_stride;
  stream.v_stride = (u32)params.v_token_stride;
  stream.delta = delta + list_row * seq_len;
  stream.list = list + (list_row * num_super_blocks + super_block) * params.list_capacity + begin;
  stream.num_keys = end - begin;
  stream.num_tiles = ceil_div(max(stream.num_keys, 0), BLOCK_KV);
