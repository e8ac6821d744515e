#!/usr/bin/env bash
# Time and density of what score.sh left out: a_shape, delta and infinitehip in the longest prompts, under a model of the
# long one's shape with random weights. Which keys these three read does not hang on what a model has learned (infinitehip's
# blocks do, but not their number), so no loss and no needle is asked for: those need the trained model and score.sh.
#
#   lab/experiments/long/rest.sh SIEVE TEXT.jsonl OUT         200 s on one GPU, by prediction
#   python3 lab/experiments/long/table.py rows OUT/scores CARD COMMIT random >> lab/experiments/long/rows.jsonl
#
# DEVICE (cuda); LONG ("65536 131072") and SLOW ("32768 65536 131072", infinitehip) lengths; SETS: words of `--set` for a
# try on the CPU. TEXT has 300,000 tokens or more. A second call with the same OUT repeats nothing that succeeded.
set -uo pipefail
sieve="$1" text="$(realpath "$2")" out="$3"
here="$(cd "$(dirname "$0")" && pwd)"
mkdir -p "$out"
[ -d "$out/model/checkpoint" ] || "$sieve" train --recipe "$here/long_80m.toml" --out "$out/model" --stop-after 1 \
  --device "${DEVICE:-cuda}" --set "data.paths=[\"$text\"]" --set "data.cache_dir=\"$out/cache\"" \
  --set "tokenizer.path=\"$here/../../../checkpoints/tiny/tokenizer.json\"" --set validation.tokens=8192 \
  --set training.local_batch_size=1 --set training.global_batch_size=1 ${SETS:-} > "$out/model.txt" 2>&1 ||
  { tail -5 "$out/model.txt"; exit 1; }
export GPUS=1 PARTS=time WINDOWS=1 DEVICE="${DEVICE:-cuda}"
score() { METHODS="$1" LENGTHS="$2" "$here/score.sh" "$sieve" "$out/model" "$text" "$out/scores"; }
long="${LONG:-65536 131072}" slow="${SLOW:-32768 65536 131072}"
score "a_shape delta" "${long// /,}"
for length in $slow; do score infinitehip "$length"; done
cat "$out/scores/times.jsonl"
