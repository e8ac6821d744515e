#!/usr/bin/env bash
# The race of layouts on one host, with nothing but Python: speeds, rates, runs and their scores, a line each in
# OUT/layouts.jsonl (layouts.py says what is in it).
#
#   lab/experiments/layouts/run.sh SIEVE TEXT.jsonl OUT
#
# TEXT.jsonl may be there as TEXT.jsonl.bz3.00, .01 … alone; BZIP3 (bzip3) unpacks them. Beside it lie heldout.jsonl
# and tokenizer.json (HELDOUT, TOKENIZER). Four GPUs take one run each at a time: DEVICES="cuda:0 cuda:1 cuda:2 cuda:3".
#
#   LIMIT=1000        seconds of all, from this script's start on; nothing begins that would end later
#   SECONDS_RUN=125   of training, each run; RATE_SECONDS=25 each run that tries a rate
#   MORE="..."        further words for layouts.py
#
# Called again with the same OUT, it does what is missing. DEVICE=cpu with SETS="section.key=value …", a small shape,
# tries it. OUT/done holds the exit code.
set -uo pipefail
[ "$#" = 3 ] || { sed -n 2,17p "$0"; exit 2; }
began=$SECONDS
sieve="$(realpath "$(command -v "$1" || echo "$1")")" text="$(realpath -m "$2")" out="$(realpath -m "$3")"
here="$(cd "$(dirname "$0")/../../.." && pwd)"
device="${DEVICE:-cuda}"
if [ "$device" = cuda ]; then
  devices="${DEVICES:-cuda:0 cuda:1 cuda:2 cuda:3}"
  export CUDA_PATH="${CUDA_PATH:-/usr/local/cuda}" LD_LIBRARY_PATH="/usr/local/cuda/lib64:${LD_LIBRARY_PATH:-}"
else
  devices="${DEVICES:-$device}"
fi
mkdir -p "$out"
rm -f "$out/done"
finish() { echo "$1" > "$out/done"; echo "exit code $1 after $((SECONDS - began)) s"; exit "$1"; }
if [ ! -e "$text" ]; then
  # Eight blocks of 64 MiB at once take 3 GiB of memory.
  cat "$text".bz3.* | "${BZIP3:-bzip3}" -d -c -j 8 > "$text.part" || finish 4
  mv "$text.part" "$text"
fi
echo "text: $(stat -c %s "$text") bytes after $((SECONDS - began)) s"
cd "$here" || finish 5
sets=()
for set in ${SETS:-}; do sets+=("$set"); done
[ "${#sets[@]}" = 0 ] || sets=(--set "${sets[@]}")
# shellcheck disable=SC2086
PYTHONUNBUFFERED=1 python3 lab/experiments/layouts/layouts.py --sieve "$sieve" --text "$text" --out "$out" \
  --heldout "${HELDOUT:-${text%/*}/heldout.jsonl}" --tokenizer "${TOKENIZER:-${text%/*}/tokenizer.json}" \
  --devices $devices --seconds $((${LIMIT:-1000} - SECONDS + began)) --run-seconds "${SECONDS_RUN:-125}" \
  --rate-seconds "${RATE_SECONDS:-25}" ${MORE:-} "${sets[@]}"
finish $?
