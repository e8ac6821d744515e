// read_flush: reads an array once, so that the L2 holds it and nothing dirty; for timing only.
extern "C" __global__ void __launch_bounds__(1024) read_flush(const uint4* words, unsigned* out, const unsigned long long num_vectors) {
  unsigned sum = 0;
  for (unsigned long long i = blockIdx.x * 1024ull + threadIdx.x; i < num_vectors; i += gridDim.x * 1024ull) {
    const uint4 four = words[i];
    sum ^= four.x ^ four.y ^ four.z ^ four.w;
  }
  if (sum == 0x12345678u) *out = sum;  // keeps the reads
}
