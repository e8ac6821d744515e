#!/usr/bin/env bash
# Figure 2 of arXiv:2508.02124: which keys copying, selecting and inducing need. Trains DMA on the three tasks, asks for
# their scores, and draws the weights of every head on one unseen sample of each, with the share of pairs that it reads.
#
#   experiments/figure2.sh SIEVE OUT           150 s on one H200, by prediction
#   DEVICE=cpu TEXTS=300 STEPS=6 experiments/figure2.sh SIEVE OUT     tries it on two cores, in half a minute
#
# A text has 512 to 1023 tokens of checkpoints/tiny's tokenizer; a query keeps 128 keys. `paper` is the published form,
# `slope` this project's. OUT/KIND-ruler.json and OUT/KIND-TASK.{json,svg} are the results.
set -euo pipefail
sieve="$1" out="$2" device="${DEVICE:-cuda}" texts="${TEXTS:-40000}" steps="${STEPS:-4000}"
tasks="copy select induce" tokenizer="$(realpath checkpoints/tiny/tokenizer.json)"
mkdir -p "$out"
# FILE arguments…: writes samples where an earlier call did not.
generate() {
  [ -s "$1" ] || "$sieve" data generate --tokenizer "$tokenizer" --min-length 512 --max-length 1023 --out "$1" "${@:2}"
}
generate "$out/train.jsonl" --tasks "${tasks// /,}" --samples "$texts"
for task in $tasks; do generate "$out/$task.jsonl" --tasks "$task" --samples 1 --seed 77; done
for kind in paper slope; do
  form=(--set attention.keep_window_size=128)
  [ "$kind" = slope ] || form+=(--set attention.preset=paper)
  [ -d "$out/$kind" ] || "$sieve" train --recipe quickstart.toml --out "$out/$kind" --device "$device" "${form[@]}" \
    --set "data.paths=[\"$out/train.jsonl\"]" --set data.format=jsonl --set data.max_bytes=1_000_000_000 \
    --set "tokenizer.path=\"$tokenizer\"" --set training.seq_len=1024 --set model.max_position_embeddings=1024 \
    --set training.local_batch_size=16 --set "training.steps=$steps" --set optimizer.lr=2e-3 \
    --set "lr_scheduler.warmup_steps=$((steps / 40 + 1))" --set "validation.interval=$steps" \
    --set "checkpoint.interval=$steps"
  "$sieve" eval ruler --checkpoint "$out/$kind" --device "$device" --tasks "${tasks// /,}" --lengths 512,1024 \
    --samples "${SAMPLES:-40}" --json > "$out/$kind-ruler.json"
  for task in $tasks; do
    "$sieve" eval attention --checkpoint "$out/$kind" --device "$device" --data "$out/$task.jsonl" --length 512 --json \
      --plot "$out/$kind-$task.svg" > "$out/$kind-$task.json"
  done
done
