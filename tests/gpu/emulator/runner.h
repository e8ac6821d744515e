Dim3 gridDim, blockDim, blockIdx;
__attribute__((aligned(1024))) unsigned char shared_memory[1 << 18];
namespace emu {
std::vector<Fiber> fibers; std::vector<Warp> warps; int current; ucontext_t scheduler; int block_arrived; unsigned long long block_gen; int named_arrived[16]; unsigned long long named_gen[16];
static std::function<void()> body;
static void entry_point() { body(); fibers[current].done = true; swapcontext(&fibers[current].ctx, &scheduler); }
int run(Dim3 grid, int threads, int shared, int seed, std::function<void()> f) {
  body = f; gridDim = grid; blockDim = {(unsigned)threads, 1, 1}; std::mt19937 rng(seed);
  fibers.clear(); fibers.resize(threads);
  for (auto& x : fibers) x.stack.resize(128 << 10);
  for (unsigned z = 0; z < grid.z; ++z) for (unsigned y = 0; y < grid.y; ++y) for (unsigned x = 0; x < grid.x; ++x) {
    blockIdx = {x, y, z};
    memset(shared_memory, 0xff, sizeof shared_memory);  // NaN everywhere
    warps.assign((threads + 31) / 32, Warp()); block_arrived = 0; block_gen = 0; for (int& x : named_arrived) x = 0;
    for (int i = 0; i < threads; ++i) {
      Fiber& t = fibers[i]; t.tid = {(unsigned)i, 0, 0}; t.done = false; t.wait = 0; t.groups.clear(); t.open.clear();
      getcontext(&t.ctx); t.ctx.uc_stack.ss_sp = t.stack.data(); t.ctx.uc_stack.ss_size = t.stack.size(); t.ctx.uc_link = nullptr;
      makecontext(&t.ctx, entry_point, 0);
    }
    int alive = threads; int idle = 0;
    std::vector<int> order((threads + 31) / 32); for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    while (alive) {
      std::shuffle(order.begin(), order.end(), rng);
      bool progressed = false;
      for (int w : order) {
        // run one warp until all its lanes wait for the block or are done
        for (;;) {
          bool moved = false;
          for (int i = w * 32; i < min(threads, w * 32 + 32); ++i) {
            Fiber& t = fibers[i]; if (t.done) continue;
            if ((t.wait == 2 && t.gen == block_gen) || (t.wait == 1 && t.gen == warps[w].gen)) continue;
            unsigned long long g0 = warps[w].gen, b0 = block_gen, n0 = 0; for (int q = 0; q < 16; ++q) n0 += named_gen[q] * 1000 + named_arrived[q]; int a0 = warps[w].arrived, ba0 = block_arrived;
            current = i; swapcontext(&scheduler, &t.ctx);
            if (t.done) { --alive; moved = true; }
            if (warps[w].gen != g0 || block_gen != b0 || warps[w].arrived != a0 || block_arrived != ba0) moved = true;
            unsigned long long n1 = 0; for (int q = 0; q < 16; ++q) n1 += named_gen[q] * 1000 + named_arrived[q]; if (t.wait == 0 || n1 != n0) moved = true;
          }
          if (!moved) break;
          progressed = true;
        }
      }
      if (!progressed && ++idle > 4) return 2;  // deadlock
      if (progressed) idle = 0;
    }
    for (size_t i = shared; i < sizeof shared_memory; ++i) if (shared_memory[i] != 0xff) return 3;  // wrote past its dynamic shared memory
  }
  return 0;
}
}
