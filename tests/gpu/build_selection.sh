#!/bin/sh
# Compiles the specialisations tests/gpu/selection_check.py loads: build_selection.sh NVCC OUT_DIR [ARCH], ARCH 90a unless given.
set -e
nvcc=$1 out=$2 arch=${3:-90a}
kernels=$(cd "$(dirname "$0")/../../kernels" && pwd)
mkdir -p "$out"
build() { # ENTRY NAME DEFINES...
  entry=$1 name=$2; shift 2
  "$nvcc" -gencode=arch=compute_$arch,code=sm_$arch -cubin -O3 -std=c++17 -I "$kernels" "$@" -Xptxas -v -o "$out/$entry$name.cubin" "$kernels/$entry.cu" \
    2>&1 | awk -v name="$entry$name" '/stack frame/ { spill = $0 } /Used/ { print name ": " $5 " registers," spill } /error|warning/ { print }'
}
for block in 1024 4096 8192 16384; do
  for entry in dma_select_prefix dma_select dma_lists_prefix dma_lists; do build $entry -PREFIX_BLOCK=$block -DPREFIX_BLOCK=$block; done
done
for entry in dma_select dma_lists; do build $entry -PREFIX_BLOCK=8192-MIN_BLOCKS=1 -DPREFIX_BLOCK=8192 -DMIN_BLOCKS=1; done
"$nvcc" -gencode=arch=compute_$arch,code=sm_$arch -cubin -O3 -o "$out/read_flush.cubin" "$(dirname "$0")/read_flush.cu"
for heads in 1 2 3 4 8 16 32; do build dma_scores -NUM_KV_HEADS=$heads -DNUM_KV_HEADS=$heads; done
for entry in attention_decode dma_decode; do
  for dims in "16 16" "32 32" "64 64" "96 96" "128 128" "192 128" "256 256"; do
    set -- $dims
    build $entry -HEAD_DIM=$1-HEAD_DIM_V=$2 -DHEAD_DIM=$1 -DHEAD_DIM_V=$2
  done
  build $entry -HEAD_DIM=128-HEAD_DIM_V=128-NUM_STAGES=3 -DHEAD_DIM=128 -DHEAD_DIM_V=128 -DNUM_STAGES=3
done
