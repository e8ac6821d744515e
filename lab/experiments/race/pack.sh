#!/bin/bash
# pack.sh DIR: all rivals of the race and what they need (Python 3.12, CUDA 13), for a machine without a network that
# has torch: the pieces of lab/rivals/pack.sh, and race.tar.xz with the others.
# There: bash DIR/unpack.sh && . DIR/paths.sh
set -e
dir=$(realpath -m "$1"); here=$(cd "$(dirname "$0")" && pwd)
bash "$here/../../rivals/pack.sh" "$dir"
mkdir -p "$dir/wheels"; cd "$dir/wheels"
from="--python-version 3.12 --only-binary=:all: --no-deps -q"
for libc in 2_28 2_27 2_24 2_17; do from="$from --platform manylinux_${libc}_x86_64"; done
pip download $from flash-sparse-attn==2.0.6 attn-gym==0.0.17 nvidia-cudnn-frontend==1.32.0 fla-core==0.6.0
mkdir pk; for wheel in *.whl; do unzip -q -o "$wheel" -d pk; done
tar -cf - pk | xz -9e > "$dir/race.tar.xz"
cd "$dir"; rm -rf wheels
# fla of the other script is an older one.
echo 'rm -rf pk/fla pk/fla_core-*; tar -xJf race.tar.xz' >> unpack.sh
cat > paths.sh <<'END'
at=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export CUDA_PATH=${CUDA_PATH:-/usr/local/cuda} CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
export LD_LIBRARY_PATH=$CUDA_PATH/lib64:$LD_LIBRARY_PATH
export PYTHONPATH=$at/pk:$at/pk/nvidia_cutlass_dsl/dsl_packages:$PYTHONPATH
END
du -sk race.tar.xz
