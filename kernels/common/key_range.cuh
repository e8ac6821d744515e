// key_range: which queries see a set of keys: by it kernels that keep keys in place skip query tiles, or their mask.
#pragma once
#include "common/types.cuh"

struct KeyRange {
  int lowest, highest, first_expire, last_expire;  // smallest and largest position, smallest and largest expire
};

// The range of the entries first .. first + count, computed by a warp; keys.entry(at) is {position, expire}. Of
// padding, whose expire is 0, only the smallest expire and the largest position count.
template <class Keys>
DEVICE KeyRange key_range(const Keys& keys, int first, int count) {
  KeyRange range = {0x7fffffff, -1, 0x7fffffff, 0};
  for (int at = (int)threadIdx.x % 32; at < count; at += 32) {
    const int2 entry = keys.entry(first + at);
    if (entry.y > 0) range.lowest = min(range.lowest, entry.x);
    range.highest = max(range.highest, entry.x);
    range.first_expire = min(range.first_expire, entry.y);
    range.last_expire = max(range.last_expire, entry.y);
  }
  range.lowest = __reduce_min_sync(~0u, range.lowest);
  range.highest = __reduce_max_sync(~0u, range.highest);
  range.first_expire = __reduce_min_sync(~0u, range.first_expire);
  range.last_expire = __reduce_max_sync(~0u, range.last_expire);
  return range;
}
