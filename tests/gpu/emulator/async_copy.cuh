// common/async_copy.cuh on the CPU: a copy lands when its group is waited for, not before. Shared addresses are offsets into shared_memory.
#include "types.cuh"

DEVICE u32 shared_address(const void* pointer) { return (u32)((const unsigned char*)pointer - shared_memory); }
inline void emulate_copy(u32 shared, const void* global, int size, u32 bytes) {
  if (shared + size > (u32)emu::SHARED_BYTES || shared % size || (u64)global % size) {
    std::fprintf(stderr, "copy of %d bytes from %p to shared %u\n", size, global, shared);
    std::abort();
  }
  emu::fibers[emu::current].open.push_back({shared_memory + shared, global, size, (int)bytes});
}
DEVICE void copy_async_16(u32 shared, const void* global, u32 bytes) { emulate_copy(shared, global, 16, bytes); }
DEVICE void copy_async_8(u32 shared, const void* global, u32 bytes) { emulate_copy(shared, global, 8, bytes); }
DEVICE void copy_async_4(u32 shared, const void* global, u32 bytes) { emulate_copy(shared, global, 4, bytes); }
DEVICE void copy_async_commit() {
  emu::Fiber& fiber = emu::fibers[emu::current];
  fiber.groups.push_back(fiber.open);
  fiber.open.clear();
}
template <int PENDING>
DEVICE void copy_async_wait() {
  std::vector<std::vector<emu::Copy>>& groups = emu::fibers[emu::current].groups;
  for (; (int)groups.size() > PENDING; groups.erase(groups.begin()))
    for (const emu::Copy& copy : groups[0]) {
      std::memset(copy.to, 0, copy.size);
      if (copy.bytes) std::memcpy(copy.to, copy.from, copy.bytes);
    }
}
DEVICE const void* opaque(const void* pointer) { return pointer; }
DEVICE u32 opaque(u32 address) { return address; }
DEVICE void barrier_sync(int number, int threads) { emu::named_barrier(number, threads); }
