#!/usr/bin/env bash
# Sieve's ZeRO-3 beside torch's FSDP2 on the GPUs of one host, in one go: 14.8B in rows of 4096, then 1.7B in rows of 2048.
#
#   lab/experiments/fsdp2/run.sh SIEVE TEXT.jsonl OUT            about 450 s on four GPUs
#
# GPUS (4). SECONDS_14B (200) and SECONDS_1B (40): no measurement of FSDP2 begins later than this after its start. LIMIT
# (150) of seconds of a run of Sieve's, STEPS (3). PARTS (large half whole weights): what is run, with all blocks of 14.8B
# recomputed (ROWS), every second (HALF_ROWS), with weights that every GPU has whole (ZeRO-2), and 1.7B. RUNS_14B:
# FSDP2's, see fsdp2.py. PYTHON (python3): one that has torch. DEVICE=cpu SIZES="tiny tiny-tied" SETS="section.key=value
# …", a small shape, tries the script without a GPU.
set -uo pipefail
sieve="$1" text="$2" out="$3"
here="$(dirname "$0")" gpus="${GPUS:-4}" failed=0
read -r large small <<< "${SIZES:-14.8B 1.7B}"
mkdir -p "$out"

rival() {
  timeout "$(($2 + 120))" "${PYTHON:-python3}" -m torch.distributed.run --nproc-per-node "$gpus" "$here/fsdp2.py" --size "$1" \
    --seconds "$2" --micro "${@:3}" > "$out/fsdp2-$1.txt" 2> "$out/fsdp2-$1.err" ||
    { failed=1; echo "fsdp2 $1: FAILED, see $out/fsdp2-$1.err: $(tail -1 "$out/fsdp2-$1.err")"; }
  grep '^fsdp2' "$out/fsdp2-$1.txt"
  grep '^{' "$out/fsdp2-$1.txt" >> "$out/fsdp2.jsonl"
}

ours() {
  env GPUS="$gpus" LIMIT="${LIMIT:-150}" WAYS="3:none" STEPS="${STEPS:-3}" "${@:2}" "$here/../../../tests/gpu/sharding.sh" "$sieve" \
    "$text" "$out" "$1" || failed=1
}

: > "$out/fsdp2.jsonl"
command -v nvidia-smi > /dev/null && nvidia-smi --query-gpu=name,clocks.sm,memory.total --format=csv,noheader
for part in ${PARTS:-large half whole weights}; do
  case "$part" in
    large)
      # The same two micro-batches a step. FSDP2 with every second layer recomputed is among its runs.
      ours large ROWS="${ROWS:-3 6 3}"
      # shellcheck disable=SC2086 # each word is a run
      rival "$large" "${SECONDS_14B:-200}" 2 ${RUNS_14B:-}
      ;;
    half) ours large MODE=selective FLAGS= ROWS="${HALF_ROWS:-3 4}" ;;
    whole) ours large ZERO=2 ROWS="${WHOLE_ROWS:-3:4}" FLAGS= ;;
    weights)
      ours weights
      rival "$small" "${SECONDS_1B:-40}" 4
      ;;
    *)
      echo "PARTS: large, half, whole or weights, not $part"
      exit 2
      ;;
  esac
done
python3 - "$out/fsdp2.jsonl" << 'PYTHON'
import json, sys
best = {}
for found in map(json.loads, open(sys.argv[1], encoding="utf-8")):
    key = (found["size"], found["mode"], found["recomputed"])
    best[key] = max(best.get(key, found), found, key=lambda one: one["tokens_per_second"])
for (size, mode, recomputed), found in best.items():
    print(f"best of fsdp2 {size} {mode}, recomputed {recomputed}: {found['tokens_per_second']} tokens/s with {found['rows']} rows, {found['gib']} GiB")
PYTHON
exit "$failed"
