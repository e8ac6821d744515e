/* Sieve's CUDA kernels as plans: see docs/pytorch.md. Link with libsieve_capi.so; needs no header of CUDA.
 *
 * Functions that return int return 0, or -1 with a text behind sieve_error(). Every function may be called from any
 * thread; a plan may be run by several threads at once after it was loaded. */
#ifndef SIEVE_H
#define SIEVE_H
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sieve_plan sieve_plan_t;

/* Version of this interface: what this header describes is 2. */
uint32_t sieve_abi(void);

/* Why the last call of this thread failed, UTF-8; valid until the thread's next call. */
const char *sieve_error(void);

/* Makes the plan of a request (JSON; docs/pytorch.md has an example). Touches no GPU. */
int sieve_plan(const char *request_json, sieve_plan_t **plan);

/* JSON: inputs and outputs {name, shape, strides, dtype} in the order of sieve_plan_run's pointers, workspace_bytes,
 * launches {kernel, grid, threads, shared_bytes}, and capacity_of: null, or the index of an input [batch, KV heads,
 * keys, width] that may have another number of keys in each run, up to the number given rounded up to a multiple of
 * 256. Valid as long as the plan. */
const char *sieve_plan_describe(const sieve_plan_t *plan);

/* Puts the plan's kernels on a GPU, once: reads them from `cache_folder`, or compiles them with NVRTC and writes them
 * there. `nvrtc_path` names libnvrtc; NULL takes the one that the dynamic linker finds. NULL for `cache_folder` keeps
 * no files. Waits until all is loaded. */
int sieve_plan_load(sieve_plan_t *plan, int device, const char *nvrtc_path, const char *cache_folder);

/* Queues the plan's launches on a CUstream. `pointers`: inputs, then outputs, then workspace_bytes of scratch memory,
 * all device addresses that are multiples of 16; behind them, where capacity_of is not null, the number of keys of
 * that input and of the one after it. Compiles nothing and waits for nothing. The fourth run of three or more launches
 * at the same addresses records a CUDA graph (at most 512 are kept), which later runs launch; a stream that is being
 * captured gets plain launches. */
int sieve_plan_run(const sieve_plan_t *plan, const uint64_t *pointers, size_t num_pointers, void *stream);

/* Frees a plan; NULL is fine. Kernels stay loaded. */
void sieve_plan_free(sieve_plan_t *plan);

#ifdef __cplusplus
}
#endif
#endif
