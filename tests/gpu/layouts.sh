#!/usr/bin/env bash
# Layers of several kinds, without positions, and kinds that change on the way, on a GPU beside the CPU: a model of 2M
# parameters trains STEPS (40) steps on both, is stopped and resumed on the GPU, and generates. One line a part.
#
#   tests/gpu/layouts.sh SIEVE TEXT.jsonl OUT [nope|stages|drop]…
#
# nope    three windows to one dense layer, which does not rotate queries and keys (NoPE)
# stages  sparse_then_dense_80m.toml, shrunk: InfLLM-V2, and dense in the last tenth
# drop    the same with MSA, whose indexer is dropped at the change
#
# Losses on the GPU (bf16) are those of the CPU (f32) within NEAR (0.05) in the mean of the steps' differences and within
# FAR (0.2) in each; a run that was stopped has the same losses to the last digit; two generations are equal.
# DEVICE=cpu tries the script. Parts run side by side: about 30 s on an H100, not yet run there.
set -uo pipefail
sieve="$1" text="$2" out="$3"
shift 3
parts=("$@")
[ "$#" -gt 0 ] || parts=(nope stages drop)
device="${DEVICE:-cuda}" steps="${STEPS:-40}" failed=0
end=$((steps / 10)) stop=$((steps * 2 / 3))
mkdir -p "$out"
cd "$(dirname "$0")/../.." || exit 2
[ -e "$out/tokenizer.json" ] || "$sieve" -q tokenizer train --data "$text" --vocab-size 2048 --sample-bytes 4000000 \
  --out "$out/tokenizer.json" || exit 1
common=(data.paths="[\"$text\"]" data.validation_fraction=0.02 data.cache_dir="\"$out/cache\""
  tokenizer.path="\"$out/tokenizer.json\"" model.vocab_size=2048 model.hidden_size=192 model.intermediate_size=512
  model.num_hidden_layers=4 model.num_attention_heads=4 model.num_key_value_heads=2 model.head_dim=64
  model.max_position_embeddings=512 model.initializer_range=0.06 training.seq_len=512 training.local_batch_size=4
  training.global_batch_size=4 training.steps="$steps" lr_scheduler.warmup_steps=5 metrics.log_freq=1
  metrics.enable_tensorboard=false validation.tokens=2048 "generation.prompts=[]" checkpoint.interval=1000)
blocks=(attention.select_block_size=64 attention.num_selected_blocks=4 attention.num_local_blocks=2
  stage.1.steps=$((steps - end)) stage.2.steps="$end")

# sets NAME: the recipe and the keys of a part, in `words`.
sets() {
  local recipe=sparse_then_dense_80m.toml keys=() key
  case "$1" in
    nope) recipe=mha_80m.toml keys=(attention.kind=swa attention.sliding_window=64 'model.layer_types=["3 sparse","mha"]'
      "model.rope_layers=[true,true,true,false]") ;;
    stages) keys=("${blocks[@]}") ;;
    drop) keys=(attention.kind=msa "${blocks[@]}") ;;
    *) echo "$1: no such part"; exit 2 ;;
  esac
  words=(--recipe "$recipe")
  for key in "${common[@]}" "${keys[@]}"; do words+=(--set "$key"); done
}

fail() { echo "$1: FAILED, see $2: $(tail -1 "$2")"; failed=1; }

# train NAME DEVICE words…: one run, from nothing unless --resume is among the words.
train() {
  local log="$out/$1.txt"
  "$sieve" -q train "${words[@]}" --device "$2" --out "$out/$1" "${@:3}" >> "$log" 2>&1 ||
    { fail "$1" "$log"; return 1; }
}

part() {
  local name="$1" run time
  sets "$name"
  for run in "$name" "$name-stopped" "$name-cpu"; do rm -rf "${out:?}/$run" "$out/$run.txt"; done
  train "$name" "$device" && train "$name-stopped" "$device" --stop-after "$stop" &&
    train "$name-stopped" "$device" --resume && train "$name-cpu" cpu ||
    { failed=1; return; }
  for time in 1 2; do
    "$sieve" -q generate --checkpoint "$out/$name" --device "$device" --prompt 'fn main() {' --temperature 0 \
      --max-new-tokens 64 > "$out/$name-$time.tokens" 2> "$out/$name-generate.txt" ||
      { fail "$name" "$out/$name-generate.txt"; return; }
  done
  cmp -s "$out/$name-1.tokens" "$out/$name-2.tokens" || { echo "$name: FAILED: two generations differ"; failed=1; }
  python3 - "$out/$name" "$steps" "${NEAR:-0.05}" "${FAR:-0.2}" << 'PYTHON' || failed=1
import json, statistics, sys

run, steps, near, far = sys.argv[1], *map(float, sys.argv[2:])
def losses(name):
    lines = map(json.loads, open(f"{name}/metrics.jsonl", encoding="utf-8"))
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}
here, stopped, cpu = losses(run), losses(f"{run}-stopped"), losses(f"{run}-cpu")
apart = [abs(here[step] - cpu[step]) for step in cpu]
ok = len(here) == len(cpu) == steps and here == stopped and statistics.mean(apart) <= near and max(apart) <= far
print(f"{run.split('/')[-1]}: {'ok' if ok else 'FAILED'}: {len(here)} steps, loss {here[max(here)]:.4f}; from the CPU's "
      f"{statistics.mean(apart):.2g} in the mean, {max(apart):.2g} at most; stopped and resumed "
      f"{'equal' if here == stopped else 'DIFFERENT'}")
sys.exit(not ok)
PYTHON
}

# Text is prepared once; then the parts share the device.
sets nope
"$sieve" -q data prepare "${words[@]}" > "$out/text.txt" 2>&1 || { fail text "$out/text.txt"; exit 1; }
running=()
for name in "${parts[@]}"; do
  (part "$name"; exit "$failed") &
  running+=("$!")
done
for job in "${running[@]}"; do wait "$job" || failed=1; done
exit $failed
