// epoch_order: the order in which a query's sums go through the keys that DMA shows it, the same for a query among the
// rows of a tile and for one that is decoded alone. It depends on earlier tokens only. An epoch is 128 queries from a
// multiple of 128 on, its first query at q0.
// Near keys come first, in stages of 128 whose columns are positions modulo 128, the last stage first: those of the
// epoch and of the `near_keys` - 128 positions before it, where a local window may show any key. Behind them older keys
// lie by falling (score, position). All of these compete from q0 on, and the smallest leaves first, so those that are
// left begin the order. While q0 is at most the number of keys that a query keeps, all keys are near: dense attention
// goes through the same stages.
#pragma once
#include "common/order_key.cuh"

constexpr int EPOCH = 128;  // queries of an epoch, keys of a stage

// Where the keys of an epoch's queries lie, positions counted from the row's or the text's first token.
struct EpochOrder {
  i32 q0;          // the epoch's first position
  i32 near_first;  // the first position whose key is near
  i32 near_total;  // places of near keys, a multiple of 128

  // For a text that begins at position `start` and keeps `window` keys.
  DEVICE EpochOrder(i32 q0, i32 start, i32 window, i32 near_keys) : q0(q0) {
    const bool all_near = q0 - start <= window;
    near_first = all_near ? start / EPOCH * EPOCH : q0 - (near_keys - EPOCH);
    near_total = q0 - near_first + EPOCH;
  }
  DEVICE bool is_near(i32 position) const { return position >= near_first; }
  // The place of a near key; below 0 if it is after the epoch.
  DEVICE i32 place(i32 position) const {
    return (q0 / EPOCH - position / EPOCH) * EPOCH + position % EPOCH;
  }
};

// Sorts `size` different keys in shared memory, a power of two of at least 2, by falling value, and `with` beside them
// unless it is null. All threads of the block call it, behind a barrier; the keys are in order when it returns.
template <int NUM_THREADS>
DEVICE void sort_falling(u64* keys, unsigned short* with, int size) {
#pragma unroll 1
  for (int run = 2; run <= size; run *= 2)
#pragma unroll 1
    for (int distance = run / 2; distance > 0; distance /= 2) {
      for (int pair = threadIdx.x; pair < size / 2; pair += NUM_THREADS) {
        const int first = 2 * pair - (pair & (distance - 1)), second = first + distance;
        const u64 a = keys[first], b = keys[second];
        const bool falls = (first & run) == 0;
        if (falls != (a < b)) continue;
        keys[first] = b;
        keys[second] = a;
        if (with) {
          const unsigned short of_first = with[first];
          with[first] = with[second];
          with[second] = of_first;
        }
      }
      __syncthreads();  // the pairs are in order
    }
}

// The least power of two of at least 2 and `count`.
DEVICE int sorted_size(int count) {
  int size = 2;
  while (size < count) size *= 2;
  return size;
}
