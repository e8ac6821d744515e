#!/bin/sh
# Compiles the specialisations tests/gpu/step_check.py loads: build_step.sh NVCC OUT_DIR [ARCH], ARCH 90a unless given.
set -e
nvcc=$1 out=$2 arch=${3:-90a}
kernels=$(cd "$(dirname "$0")/../../kernels" && pwd)
mkdir -p "$out"
build() { # ENTRY [NAME=VALUE...]
  entry=$1 name=$1 defines=; shift
  for define in "$@"; do name=$name-$define defines="$defines -D$define"; done
  "$nvcc" -gencode=arch=compute_$arch,code=sm_$arch -cubin -O3 -std=c++17 -I "$kernels" $defines -Xptxas -v -o "$out/$name.cubin" "$kernels/$entry.cu" \
    2>&1 | awk -v name="$name" '/stack frame/ { spill = $0 } /Used/ { print name ": " $5 " registers," spill } /error|warning/ { print }'
}
for residual in 0 1; do
  for warps in 1 4; do build rms_norm_forward HAS_RESIDUAL=$residual WARPS_PER_ROW=$warps; done
  for warps in 1 2 4 8 16; do build rms_norm_backward HAS_RESIDUAL=$residual WARPS_PER_ROW=$warps; done
done
for warps in 1 2 4 8 16; do build rms_norm_backward HAS_RESIDUAL=1 WARPS_PER_ROW=$warps HAS_OUTPUT=1; done
build swiglu_backward IS_BF16=1 VECTOR=8 HAS_OUTPUT=1
build column_sums
for head_dim in 16 64 96 128; do
  for copy in 0 1; do
    for pass in forward backward; do build qk_norm_rope_$pass HEAD_DIM=$head_dim COPY_V=$copy; done
  done
done
for type in 0 1; do
  for gradient in 0 1; do build cross_entropy IS_BF16=$type GRADIENT=$gradient; done
  for square in 0 1; do build sum_partials SQUARE=$square IS_BF16=$type; done
done
for clip in 0 1; do build finish_sum CLIP=$clip; done
for leaf in 0 1; do build adamw HAS_LEAF=$leaf; done
build adamw HAS_LEAF=1 SPLIT_MASTER=1
for join in 0 1; do build split_master JOIN=$join; done
for part in forward order backward carry; do build embedding_$part; done
build residual_add IS_BF16=1 VECTOR=8
build residual_add IS_BF16=0 VECTOR=4
for heads in 3 4 8 32; do build dma_scores_backward NUM_KV_HEADS=$heads; done
"$nvcc" -gencode=arch=compute_$arch,code=sm_$arch -cubin -O3 -o "$out/read_flush.cubin" "$(dirname "$0")/read_flush.cu"
