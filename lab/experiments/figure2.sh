#!/usr/bin/env bash
# Figure 2 of arXiv:2508.02124: which keys copying, selecting and inducing need. Trains DMA on the three tasks, asks for
# their scores, and draws the weights of every head on one unseen sample of each, with the share of pairs that it reads.
#
#   lab/experiments/figure2.sh SIEVE OUT           at most 200 s on one H100, of which LIMIT (150) for training
#   DEVICE=cpu TEXTS=300 STEPS=6 SAMPLES=1 lab/experiments/figure2.sh SIEVE OUT     tries it on two cores, in a minute
#   python3 lab/experiments/papers_rows.py OUT     then: the rows behind lab/docs/papers.md
#
# A text has 512 to 1023 tokens of checkpoints/tiny's tokenizer; a query keeps 128 keys. The loss is of the answers
# alone, a small part of a text. `paper` is the published form, `slope` this project's; `dense` shows what the same
# steps teach without a choice of keys. They train side by side; KINDS names some. Training that LIMIT ends writes its
# checkpoint, undecayed, and is scored as it is. OUT/KIND-ruler.json and OUT/KIND-TASK.{json,svg} are results; a second
# call makes what is missing.
set -euo pipefail
[ $# -eq 2 ] || { echo "usage: $0 SIEVE OUT"; exit 1; }
sieve="$(realpath "$(command -v "$1" || echo "$1")")" device="${DEVICE:-cuda}" texts="${TEXTS:-80000}" steps="${STEPS:-8000}" limit="${LIMIT:-150}"
mkdir -p "$2" && out="$(realpath "$2")"
cd "$(dirname "$0")/../.."
tasks="copy select induce" tokenizer="$PWD/checkpoints/tiny/tokenizer.json"
"$sieve" --version > "$out/program.txt"
date -u +%F >> "$out/program.txt"
# RUN FILE COMMAND…: what the command prints, where an earlier call has not got it whole of the run's last checkpoint.
into() {
  [ "$2" -nt "$1/checkpoint" ] || { "${@:3}" > "$2.partial" && mv "$2.partial" "$2"; }
}
# FILE arguments…: writes samples where an earlier call did not.
generate() {
  [ -s "$1" ] || { "$sieve" data generate --tokenizer "$tokenizer" --min-length 512 --max-length 1023 \
    --out "${1%.jsonl}.partial.jsonl" "${@:2}" > /dev/null && mv "${1%.jsonl}.partial.jsonl" "$1"; }
}
kind() {
  local kind="$1" run="$out/$1" form=(--set attention.keep_window_size=128) resume=()
  case "$kind" in
    paper) form+=(--set attention.preset=paper) ;;
    dense) form=(--set attention.kind=mha) ;;
  esac
  [ ! -d "$run" ] || resume=(--resume)
  timeout --foreground --signal=TERM "$limit" "$sieve" train --recipe quickstart.toml --out "$run" \
    --device "$device" "${form[@]}" "${resume[@]}" --set "data.paths=[\"$out/train-?.jsonl\"]" --set data.format=jsonl \
    --set 'data.prompt_column="prompt"' --set 'data.text_column="answer"' \
    --set data.max_bytes=1_000_000_000 --set "data.cache_dir=\"$out/tokens\"" \
    --set "tokenizer.path=\"$tokenizer\"" --set training.seq_len=1024 --set model.max_position_embeddings=1024 \
    --set training.local_batch_size=16 --set "training.steps=$steps" --set optimizer.lr=2e-3 \
    --set "lr_scheduler.warmup_steps=$((steps / 40 + 1))" --set "validation.interval=$steps" \
    --set "checkpoint.interval=$steps" > "$run.txt" 2>&1 || echo "$kind: training ended with $?, see $run.txt"
  into "$run" "$run-ruler.json" "$sieve" eval ruler --checkpoint "$run" --device "$device" --tasks "${tasks// /,}" \
    --lengths 512,1024 --samples "${SAMPLES:-40}" --json
  for task in $tasks; do
    into "$run" "$run-$task.json" "$sieve" eval attention --checkpoint "$run" --device "$device" \
      --data "$out/$task.jsonl" --length 512 --json --plot "$run-$task.svg"
  done
  echo "$kind: done after $SECONDS s"
}
# Eight files side by side: one would take two minutes.
for part in 1 2 3 4 5 6 7 8; do
  generate "$out/train-$part.jsonl" --tasks "${tasks// /,}" --samples $((texts / 8)) --seed "$part" &
done
wait
for task in $tasks; do generate "$out/$task.jsonl" --tasks "$task" --samples 1 --seed 77; done
failed=0 trained=()
for one in ${KINDS:-paper slope dense}; do
  kind "$one" &
  trained+=($!)
done
for one in "${trained[@]}"; do wait "$one" || failed=1; done
exit "$failed"
