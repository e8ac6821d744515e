// begin_dense_tile: statements with which the portable entry kernels over neighbouring keys begin: they declare `tile`
// and `stream` from the buffers and params by the names these kernels give them. Included inside a kernel, because as a
// function of references the same lines change registers (24 bytes spill at a head_dim of 128).
  const int seq_len = (int)params.seq_len, num_heads = (int)params.num_heads, num_kv_heads = (int)params.num_kv_heads;
  const BlockPlace place = block_place(num_kv_heads, params.seq_len * (HEAD_DIM + HEAD_DIM_V) * 2, SECTION_BYTES);
  const int batch = place.batch, head = place.head * HEADS_PER_TILE, kv_head = head / (num_heads / num_kv_heads);
  const int tile_idx = (int)gridDim.x - 1 - place.tile;  // late tiles see most keys: start them first

  QueryTile tile;
  tile.q = q + params.q_offset + batch * params.q_batch_stride + (u64)head * HEAD_DIM;
  tile.q_stride = (u32)params.q_token_stride;
  tile.batch = batch;
  tile.head = head;
  tile.num_heads = num_heads;
  tile.seq_len = seq_len;
  tile.first_query = tile_idx * TILE_QUERIES;
  tile.end_query = min(tile.first_query + TILE_QUERIES, seq_len);
  tile.doc_start = doc_start + (u64)batch * seq_len;
  tile.window = (int)(params.window < params.seq_len ? params.window : params.seq_len);
  tile.scale_log2 = f32_word(params.softmax_scale) * LOG2_E;
#if HAS_BIAS
  tile.base = base + ((u64)batch * num_kv_heads + kv_head) * ceil_div(seq_len, 64) * 64;
  tile.bias_unit = 1.0f / f32_word(params.softmax_scale);
#endif

  KvStream stream;
  stream.k = k + params.k_offset + batch * params.k_batch_stride + (u64)kv_head * HEAD_DIM;
  stream.v = v + params.v_offset + batch * params.v_batch_stride + (u64)kv_head * HEAD_DIM_V;
  stream.k_stride = (u32)params.k_token_stride;
  stream.v_stride = (u32)params.v_token_stride;
#if HAS_BIAS
  stream.delta = delta + ((u64)batch * num_kv_heads + kv_head) * seq_len;
#endif
  stream.num_keys = seq_len;
  const int lowest = max(tile.doc_start[tile.first_query], tile.first_query - tile.window + 1);
  stream.last_tile = (tile.end_query - 1) / BLOCK_KV;
  stream.num_tiles = stream.last_tile - lowest / BLOCK_KV + 1;
