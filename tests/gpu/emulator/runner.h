// The scheduler of the emulator: one block after the other, its warps in random order. Included once, after the kernel.
Dim3 gridDim, blockDim, blockIdx;
__attribute__((aligned(1024))) unsigned char shared_memory[emu::SHARED_BYTES];

namespace emu {
std::vector<Fiber> fibers;
std::vector<Warp> warps;
Rendezvous block, named[NAMED_BARRIERS];
int current;
ucontext_t scheduler;
static std::function<void()> body;

static void thread_main() {
  body();
  fibers[current].done = true;
  swapcontext(&fibers[current].context, &scheduler);
}

// Resumes a thread; tells whether it got anywhere.
static bool resume(int thread) {
  Fiber& fiber = fibers[thread];
  if (fiber.done || (fiber.waits_for && fiber.waits_for->generation == fiber.generation)) return false;
  fiber.waits_for = nullptr;
  current = thread;
  swapcontext(&scheduler, &fiber.context);
  return true;
}

static void start_block(int threads) {
  std::memset(shared_memory, 0xff, sizeof shared_memory);  // NaN everywhere
  warps.assign((threads + 31) / 32, Warp());
  block = Rendezvous();
  for (Rendezvous& barrier : named) barrier = Rendezvous();
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.tid = {(unsigned)i, 0, 0};
    fiber.done = false;
    fiber.waits_for = nullptr;
    fiber.groups.clear();
    fiber.open.clear();
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, thread_main, 0);
  }
}

// Runs a grid. Returns 0, 2 for a deadlock, 3 for a write past the dynamic shared memory of the launch.
static int run(Dim3 grid, int threads, int shared, int seed, std::function<void()> kernel) {
  body = kernel;
  gridDim = grid;
  blockDim = {(unsigned)threads, 1, 1};
  fibers = std::vector<Fiber>(threads);
  for (Fiber& fiber : fibers) fiber.stack.resize(128 << 10);
  std::mt19937 random(seed);
  std::vector<int> order((threads + 31) / 32);
  for (size_t i = 0; i < order.size(); ++i) order[i] = (int)i;

  for (unsigned at = 0; at < grid.x * grid.y * grid.z; ++at) {
    blockIdx = {at % grid.x, at / grid.x % grid.y, at / grid.x / grid.y};
    start_block(threads);
    for (bool progress = true; progress;) {
      progress = false;
      std::shuffle(order.begin(), order.end(), random);
      for (int warp : order) {  // a warp runs until all its lanes wait for other warps
        for (bool moved = true; moved;) {
          moved = false;
          for (int i = warp * 32; i < std::min(threads, warp * 32 + 32); ++i) moved |= resume(i);
          progress |= moved;
        }
      }
    }
    for (const Fiber& fiber : fibers)
      if (!fiber.done) return 2;
    for (size_t i = shared; i < sizeof shared_memory; ++i)
      if (shared_memory[i] != 0xff) return 3;
  }
  return 0;
}
}  // namespace emu
