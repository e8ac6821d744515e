#!/usr/bin/env bash
# Attention under masks of tiles and its gradients, and what calls cost the host, on one Hopper GPU in about 90 s.
#
#   tests/gpu/tiles.sh SIEVE PYTHON OUT [rows|wheel|race|host]…
#
# rows: `kernels check` of masks, with the rows of sparse_attention_backward. wheel: the package's tests of block_sparse and
# selected_attention on the GPU's kernels. race: the task "tiles" of lab/experiments/race. host: microseconds of a forward and
# a backward pass, and milliseconds of long rows. PYTHON has torch and pytest, for the race also the rivals; the package
# is taken from this folder, its library from SIEVE_ATTENTION_LIBRARY or target/release. DEVICE=cpu tries the script.
# CASES, DRAWS, RACE_SECONDS and RACE_CHECKS (seconds of the race's checks) make the parts longer.
set -uo pipefail
sieve="$1" python="$2" out="$3"
shift 3
parts=("$@")
[ "$#" -gt 0 ] || parts=(rows wheel race host)
device="${DEVICE:-cuda}"
here="$(cd "$(dirname "$0")/../.." && pwd)"
export PYTHONPATH="$here/python${PYTHONPATH:+:$PYTHONPATH}"
export SIEVE_ATTENTION_LIBRARY="${SIEVE_ATTENTION_LIBRARY:-$here/target/release/libsieve_capi.so}"
mkdir -p "$out"
failed=0
part() {
  local name="$1" start=$SECONDS
  shift
  if "$@" > "$out/$name.txt" 2>&1; then echo "$name: ok, $((SECONDS - start)) s"; else
    echo "$name: FAILED, see $out/$name.txt"
    tail -5 "$out/$name.txt"
    failed=1
  fi
}
for name in "${parts[@]}"; do
  case "$name" in
    rows)
      part rows "$sieve" kernels check --sparse --cases "${CASES:-60}"
      grep -E "sparse_attention" "$out/rows.txt"
      ;;
    wheel)
      part wheel env SIEVE_TEST_DEVICE="$device" SIEVE_TEST_DRAWS="${DRAWS:-40}" "$python" -m pytest -q \
        -p no:cacheprovider "$here/python/tests/test_tiles.py" "$here/python/tests/test_selected.py"
      tail -1 "$out/wheel.txt"
      ;;
    race)
      shrink=1
      [ "$device" = cuda ] || shrink=256
      part race "$python" "$here/experiments/race/race.py" --out "$out/rows.jsonl" --only tiles \
        --seconds "${RACE_SECONDS:-50}" --prepare "${RACE_CHECKS:-20}" --odd 5 --device "$device" --shrink "$shrink"
      grep -h '"both_ms"' "$out/rows.jsonl"
      ;;
    host)
      part host env DEVICE="$device" "$python" "$here/python/tests/on_gpu.py" tiles
      cat "$out/host.txt"
      ;;
    *)
      echo "no part $name: rows, wheel, race, host"
      failed=1
      ;;
  esac
done
exit $failed
