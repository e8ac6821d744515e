// shared_count: counters in shared memory, without a branch around them.
#pragma once
#include "common/types.cuh"

// Adds 1 to the counter `byte_offset` bytes behind `counters` if `difference` is 0. A predicate instead of a branch: in
// a histogram loop branches cost more than the atomics. The hardware combines lanes that hit the same counter.
DEVICE void count_if_zero(u32* counters, u32 byte_offset, u32 difference) {
  const u32 address = (u32)__cvta_generic_to_shared(counters) + byte_offset;
  asm volatile("{\n.reg .pred same;\nsetp.eq.u32 same, %1, 0;\n@same red.shared.add.u32 [%0], 1;\n}" ::"r"(address),
               "r"(difference));
}
