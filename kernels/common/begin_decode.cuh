// begin_decode: statements with which the decoding entry kernels begin, as begin_tile: the head, the rows and the split
// of the keys that a block serves.
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  __shared__ u32 last_flag;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int group_size = (int)(params.num_heads / params.num_kv_heads),
            row_blocks = (group_size + DECODE_ROWS - 1) / DECODE_ROWS;
  const int kv_head = blockIdx.y / row_blocks, first_row = blockIdx.y % row_blocks * DECODE_ROWS;
  const int num_rows = min(group_size - first_row, DECODE_ROWS), split = blockIdx.x,
            num_splits = (int)params.num_splits;
