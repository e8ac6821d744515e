#!/bin/bash
# pack.sh DIR: FlashAttention-4 and what it needs (Python 3.12, CUDA 13), as pieces of 24 MB in DIR, for a machine without a network that has torch.
# There: bash DIR/unpack.sh, then PYTHONPATH=DIR/pk:DIR/pk/nvidia_cutlass_dsl/dsl_packages (.pth files are not read).
set -e
dir=$(realpath -m "$1"); mkdir -p "$dir/wheels"; cd "$dir/wheels"
from="--python-version 3.12 --only-binary=:all: --no-deps -q"; for libc in 2_28 2_27 2_24 2_17; do from="$from --platform manylinux_${libc}_x86_64"; done
dsl=4.8.1
pip download $from --pre flash-attn-4==4.0.0b36 nvidia-cutlass-dsl==$dsl nvidia-cutlass-dsl-libs-{base,core,cu13}==$dsl quack-kernels==0.6.5 apache-tvm-ffi torch-c-dlpack-ext
mkdir -p pk; for wheel in *.whl; do unzip -q -o "$wheel" -d pk; done
tar -cf - pk | xz -9e -T0 | split -b 24M - "$dir/piece."
cd "$dir"; rm -rf wheels
echo 'cd "$(dirname "$0")"; cat piece.* | tar -xJf -' > unpack.sh
du -sm piece.*
