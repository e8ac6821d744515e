// begin_hopper_tile: statements with which the Hopper entry kernels that keep queries in place begin, as begin_tile:
// they declare `shared`, `tensors`, `work` and `maps` from the buffers, maps and params by the names these kernels give
// them.
// Defines    GATHER: keys by DMA's lists, else consecutive keys; HAS_BIAS, ROW_SUMS as hopper_tiles.cuh
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = start_block(shared_memory);
  InputTensors tensors = input_tensors(q, k, v, params);
#if HAS_BIAS
  tensors.delta = delta;
  tensors.base = base;
#endif
#if ROW_SUMS
  tensors.d_out = d_out;
#endif
#if GATHER
  const GatherWork work(list, tile_window, params);
#else
  const DenseWork work(doc_start, params);
#endif
  const TensorMap* maps[4] = {&q_map,
#if GATHER
                              nullptr, nullptr,
#else
                              &k_map, &v_map,
#endif
#if ROW_SUMS
                              &do_map
#endif
  };
  __syncthreads();  // the barriers are set up
