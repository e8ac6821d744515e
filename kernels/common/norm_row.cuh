// norm_row: how the RMSNorm kernels lay rows over warps. A row belongs to WARPS_PER_ROW consecutive warps; a lane
// holds up to CHUNKS groups of eight consecutive columns of it.
// Defines    WARPS_PER_ROW (a power of two), CHUNKS_PER_LANE (8)
#pragma once
#include "common/types.cuh"

#ifndef CHUNKS_PER_LANE
#define CHUNKS_PER_LANE 8
#endif

constexpr int CHUNKS = CHUNKS_PER_LANE;
constexpr int CHUNK_STEP = 32 * WARPS_PER_ROW;  // between a lane's chunks
[[maybe_unused]] constexpr int MAX_WIDTH = CHUNKS * CHUNK_STEP * 8;

// The lane's first chunk of its row.
DEVICE int first_chunk() { return (int)(threadIdx.x % CHUNK_STEP); }
