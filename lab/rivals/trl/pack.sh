#!/usr/bin/env bash
# What twenty steps of TRL need on a GPU machine without a network that has torch, transformers, accelerate, pandas and
# pyarrow: TRL, datasets, dill and multiprocess (1.8 MB of wheels without machine code), the package of kernels and an
# export, in one folder.
#
#   lab/rivals/trl/pack.sh DIR [MODEL] [PYTHON_VERSION]        # here; SIEVE names the program (target/release/sieve)
#   bash DIR/run.sh                                           # there: losses by the kernels and by plain PyTorch
#
# MODEL is a checkpoint, or an export (checkpoints/tiny); PYTHON_VERSION (3.12) is the one of the GPU machine.
set -euo pipefail
root="$(cd "$(dirname "$0")/../../.." && pwd)"
dir="$(realpath -m "$1")" model="${2:-$root/checkpoints/tiny}" version="${3:-3.12}"
sieve="${SIEVE:-$root/target/release/sieve}"
mkdir -p "$dir/site"
python3 -m pip download -q --no-deps --only-binary=:all: --python-version "$version" -d "$dir/wheels" \
  trl==1.16.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19
for wheel in "$dir"/wheels/*.whl; do unzip -q -o "$wheel" -d "$dir/site"; done
rm -r "$dir/wheels"
cp -r "$root/python/sieve_attention" "$dir/site/"
cp "$root/target/release/libsieve_capi.so" "$dir/site/sieve_attention/"
if [ -f "$model/config.json" ]; then
  mkdir -p "$dir/exported"
  cp "$model"/* "$root/crates/sieve-hf/src/export/modeling_sieve.py" "$root/python/sieve_attention/definitions.py" \
    "$dir/exported/"
else
  "$sieve" export --checkpoint "$model" --out "$dir/exported" -q
fi
cp "$root/lab/rivals/trl/steps.py" "$dir/"
cat > "$dir/run.sh" <<'RUN'
cd "$(dirname "$0")"
PYTHONPATH="$PWD/site" python3 steps.py exported "$@"
RUN
du -sm "$dir"
