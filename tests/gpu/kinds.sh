#!/usr/bin/env bash
# Each kind of attention once on a GPU: STEPS (30) steps of its 80M recipe on a text, then 300 greedy tokens twice, which
# must be equal. One line a kind: training tokens/s, loss, decoding tokens/s, and what failed.
#
#   tests/gpu/kinds.sh SIEVE TEXT.jsonl OUT [kind]…
#
# DEVICE=cpu with SETS="section.key=value …", a small shape, tries the script. About ten seconds a kind on an H200.
set -uo pipefail
sieve="$1" text="$2" out="$3"
shift 3
kinds=("$@")
[ "$#" -gt 0 ] || kinds=(mha swa dma nsa mla infllm_v2 moba msa cowa)
device="${DEVICE:-cuda}" steps="${STEPS:-30}"
here="$(cd "$(dirname "$0")/../.." && pwd)"
mkdir -p "$out"
failed=0
sets=()
for set in ${SETS:-}; do sets+=(--set "$set"); done
for kind in "${kinds[@]}"; do
  run="$out/$kind"
  # An indexer learns under dense attention first, where no token is decoded by its chosen blocks.
  stages=()
  [ "$kind" != msa ] || stages=(--set stage.1.steps=5)
  "$sieve" recipe new --size 80m --kind "$kind" --data "$text" --out "$out/$kind.toml" > "$run.txt" 2>&1
  if ! "$sieve" train --recipe "$out/$kind.toml" --device "$device" --out "$run" --set "data.cache_dir=\"$out/cache\"" \
    --set "tokenizer.train={ vocab_size = 2048, sample_bytes = 4_000_000 }" --set metrics.log_freq=5 "${sets[@]}" "${stages[@]}" \
    --stop-after "$steps" >> "$run.txt" 2>&1; then
    echo "$kind: FAILED to train, see $run.txt"
    failed=1
    continue
  fi
  loss=$(grep -o '"loss":[0-9.]*' "$run/metrics.jsonl" | tail -1)
  speed=$(grep -o '"tokens_per_second":[0-9.]*' "$run/metrics.jsonl" | tail -1 | cut -d: -f2)
  for time in 1 2; do
    "$sieve" generate --checkpoint "$run" --device "$device" --prompt 'fn main() {' --temperature 0 \
      --max-new-tokens "${TOKENS:-300}" > "$run-$time.tokens" 2> "$run-$time.txt" || { echo "$kind: FAILED to generate"; failed=1; }
  done
  same=equal
  cmp -s "$run-1.tokens" "$run-2.tokens" || { same=DIFFERENT; failed=1; }
  rate=$(cat "$run-2.tokens" "$run-2.txt" | grep -o '[0-9.,]* a second' | tail -1)
  printf '%-10s training %9.0f tokens/s, %s; decoding %s; two generations %s\n' "$kind" "$speed" "$loss" "$rate" "$same"
done
exit $failed
