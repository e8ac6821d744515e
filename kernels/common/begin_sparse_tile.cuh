// begin_sparse_tile: statements with which the portable entry kernels under a selector's mask begin: they declare
// `shared_tile`, `queries` and `stream` from the buffers and params by the names these kernels give them, and return
// where a tile has no query. Included inside a kernel, as begin_tile.cuh is.
// Defines    RING_AT: where the stream's stages begin in shared memory
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const SparseMask sparse(mask, params);
  const int head = sparse.first_head + (int)blockIdx.y, kv_head = head / (sparse.num_heads / sparse.num_kv_heads);
  const int parts = ceil_div(sparse.query_tile, BLOCK_Q), tile_idx = sparse.tile_of_rank(head, (int)blockIdx.x / parts);
  __shared__ QueryTile shared_tile;  // in shared memory, because the loop, which does not use it, lacks registers
  __shared__ SparseKeys shared_keys;
  const SparseQueries queries = sparse.queries(head, tile_idx, (int)blockIdx.x % parts, BLOCK_Q);
  if (queries.num_slots <= 0) return;
  const SparseKeys keys = sparse.keys(head, tile_idx, queries);

  QueryTile tile;
  tile.q = q + params.q_offset + (u64)head * HEAD_DIM;
  tile.q_stride = (u32)params.q_token_stride;
  tile.batch = 0;
  tile.head = head;
  tile.num_heads = sparse.num_heads;
  tile.seq_len = sparse.num_queries;
  tile.first_query = queries.first;
  tile.end_query = queries.end;
  tile.queries = queries;
  tile.scale_log2 = f32_word(params.softmax_scale) * LOG2_E;

  KvStream stream;
  stream.k = k + params.k_offset + (u64)kv_head * HEAD_DIM;
  stream.v = v + params.v_offset + (u64)kv_head * HEAD_DIM;
  stream.k_stride = (u32)params.k_token_stride;
  stream.v_stride = (u32)params.v_token_stride;
  stream.keys = &shared_keys;
  stream.num_keys = keys.count();
  stream.num_tiles = ceil_div(stream.num_keys, BLOCK_KV);
  stream.ring = shared_memory + RING_AT;
  if (threadIdx.x == 0) {
    shared_tile = tile;
    shared_keys = keys;
  }
  __syncthreads();  // every thread reads what others stored
