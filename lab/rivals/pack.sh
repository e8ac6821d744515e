#!/bin/bash
# pack.sh DIR: FlashAttention-4 and what it needs (Python 3.12, CUDA 13) as pieces of 24 MB in DIR, and extra.tar.xz with
# flash-msa, fla and flash_nsa, for a machine without a network that has torch. FLASH_NSA: another clone of flash_nsa.
# There: bash DIR/unpack.sh, then PYTHONPATH=DIR/pk:DIR/pk/nvidia_cutlass_dsl/dsl_packages (.pth files are not read).
set -e
dir=$(realpath -m "$1"); mkdir -p "$dir/wheels/extra"; cd "$dir/wheels"
from="--python-version 3.12 --only-binary=:all: --no-deps -q"; for libc in 2_28 2_27 2_24 2_17; do from="$from --platform manylinux_${libc}_x86_64"; done
dsl=4.8.1
unpack() { mkdir -p pk; for wheel in *.whl; do unzip -q -o "$wheel" -d pk; done; }
pip download $from --pre flash-attn-4==4.0.0b36 nvidia-cutlass-dsl==$dsl nvidia-cutlass-dsl-libs-{base,core,cu13}==$dsl quack-kernels==0.6.5 apache-tvm-ffi torch-c-dlpack-ext
unpack; tar -cf - pk | xz -9e -T0 | split -b 24M - "$dir/piece."
cd extra
pip download $from flash-msa==0.1.1 fla-core==0.5.2
unpack; git clone -q "${FLASH_NSA:-https://github.com/mdy666/Scalable-Flash-Native-Sparse-Attention}" clone
git -C clone archive fcf117c flash_nsa | tar -x -C pk; cp clone/LICENSE pk/flash_nsa/
sed -i 's/import pkg_resources/from packaging import version/; s/pkg_resources.parse_version/version.parse/g' pk/flash_nsa/utils.py # gone from setuptools 82
tar -cf - pk | xz -9e > "$dir/extra.tar.xz"
cd "$dir"; rm -rf wheels
echo 'cd "$(dirname "$0")"; cat piece.* | tar -xJf - && tar -xJf extra.tar.xz' > unpack.sh
du -sk piece.* extra.tar.xz
