// The scheduler of the emulator (one block after the other, its warps in random order) and the program around a kernel.
Dim3 gridDim, blockDim, blockIdx;

namespace emu {
__attribute__((aligned(1024))) unsigned char dynamic_shared[SHARED_BYTES];
std::vector<Fiber> fibers;
std::vector<Warp> warps;
Rendezvous block, named[NAMED_BARRIERS];
int current;
jmp_buf scheduler;
static std::function<void()> body;
constexpr size_t STACK_BYTES = 128 << 10;

static void thread_main() {
  body();
  fibers[current].done = true;
  _longjmp(scheduler, 1);
}

// Resumes a thread; tells whether it got anywhere.
static bool resume(int thread) {
  Fiber& fiber = fibers[thread];
  if (fiber.done || (fiber.waits_for && fiber.waits_for->generation == fiber.generation)) return false;
  fiber.waits_for = nullptr;
  current = thread;
  if (!_setjmp(scheduler)) {
    if (fiber.started) _longjmp(fiber.place, 1);
    fiber.started = true;
    setcontext(&fiber.context);
  }
  return true;
}

static void start_block(int threads) {
  std::memset(dynamic_shared, 0xff, sizeof dynamic_shared);  // NaN everywhere
  warps.assign((threads + 31) / 32, Warp());
  block = Rendezvous();
  for (Rendezvous& barrier : named) barrier = Rendezvous();
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.tid = {(unsigned)i, 0, 0};
    fiber.done = false;
    fiber.started = false;
    fiber.waits_for = nullptr;
    fiber.groups.clear();
    fiber.open.clear();
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK_BYTES;
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
  for (Fiber& fiber : fibers) fiber.stack.reset(new char[STACK_BYTES]);  // not zeroed: most of it is never touched
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
    for (size_t i = shared; i < sizeof dynamic_shared; ++i)
      if (dynamic_shared[i] != 0xff) return 3;
  }
  return 0;
}

// A file's bytes at the end of their pages, with a page after them that nobody may touch. `place` is PATH:BYTES:OFFSET.
static void* map_buffer(const std::string& place) {
  const size_t last = place.rfind(':'), middle = place.rfind(':', last - 1);
  const size_t bytes = std::stoull(place.substr(middle + 1)), offset = std::stoull(place.substr(last + 1));
  const size_t page = 4096, padded = (bytes + 15) / 16 * 16, pages = (padded + page - 1) / page * page;
  const int file = open(place.substr(0, middle).c_str(), O_RDWR);
  char* memory = (char*)mmap(nullptr, pages + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (file < 0 || memory == MAP_FAILED || mmap(memory, pages, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) {
    std::perror(place.c_str());
    std::exit(1);
  }
  return memory + pages - padded + offset;
}

// The arguments of a kernel: pointers in order, then the params struct.
struct Arguments {
  std::vector<void*> pointers;
  std::vector<unsigned long long> words;
  size_t next = 0, params_bytes = 0;
};
template <class T>
struct Argument {
  static T get(Arguments& from) {
    T params;
    from.params_bytes = sizeof(T);
    if (sizeof(T) == 8 * from.words.size()) std::memcpy(&params, from.words.data(), sizeof(T));
    return params;
  }
};
template <class T>
struct Argument<T*> {
  static T* get(Arguments& from) { return from.next < from.pointers.size() ? (T*)from.pointers[from.next++] : (++from.next, nullptr); }
};

// PROGRAM GRID_X GRID_Y GRID_Z THREADS SHARED_BYTES SEED NUM_WORDS WORD... BUFFER...
template <class... Types>
int run_program(int count, char** text, void (*kernel)(Types...)) {
  std::vector<unsigned long long> numbers;
  for (int i = 1; i < 8; ++i) numbers.push_back(std::stoull(text[i]));
  const int first_buffer = 8 + (int)numbers[6];
  Arguments from;
  for (int i = 8; i < first_buffer; ++i) from.words.push_back(std::stoull(text[i]));
  for (int i = first_buffer; i < count; ++i) from.pointers.push_back(map_buffer(text[i]));
  std::tuple<Types...> arguments{Argument<Types>::get(from)...};
  if (from.next != from.pointers.size() || from.params_bytes != 8 * from.words.size()) {
    std::fprintf(stderr, "the kernel takes %zu pointers and %zu words, the launch has %zu and %zu\n", from.next, from.params_bytes / 8,
                 from.pointers.size(), from.words.size());
    return 4;
  }
  const Dim3 grid = {(unsigned)numbers[0], (unsigned)numbers[1], (unsigned)numbers[2]};
  return run(grid, (int)numbers[3], (int)numbers[4], (int)numbers[5], [&] { std::apply(kernel, arguments); });
}
}  // namespace emu
