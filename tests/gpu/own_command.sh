#!/usr/bin/env bash
# A person's own command, once, whole: a recipe of two stages (dma_1p7b.toml) on four folders of text, both stages with the switch between
# them, a SIGTERM in the first and a kill -9 in the second, continued on one GPU and again on all; then perplexity, MQAR,
# a needle, the export and transformers' logits of it beside Sieve's. Prints tokens/s and memory beside `sieve plan`'s.
#
#   tests/gpu/own_command.sh SIEVE TEXT.jsonl OUT [--set section.key=value]…
#
# NPROC processes (2), DEVICE (cuda), RECIPE (dma_1p7b.toml), STEPS of the two stages ("3 2"). `DEVICE=cpu` with a small
# shape by --set, and by SHRINK, a sed script for the recipe's stages, tries the script. About 190 s on two H200s.
set -uo pipefail
sieve="$1" text="$2" out="$3"
shift 3
sets=("$@")
device="${DEVICE:-cuda}" nproc="${NPROC:-2}" gpu="${GPU:-h200}" name="${RECIPE:-dma_1p7b.toml}"
read -r first second <<< "${STEPS:-3 2}"
here="$(cd "$(dirname "$0")/../.." && pwd)"
began=$SECONDS
mkdir -p "$out"
report="$out/report.txt"
say() { printf '%4d s  %s\n' $((SECONDS - began)) "$*" | tee -a "$report"; }
failed=0
fail() { say "FAILED: $*"; failed=1; }

# Four folders of text for the four of the recipe.
folders=(web textbooks code mathematics)
for folder in "${folders[@]}"; do mkdir -p "$out/data/$folder"; done
head -c "${TEXT_BYTES:-40000000}" "$text" | sed '$d' | awk -v out="$out/data" \
  'BEGIN { split("web web web textbooks code mathematics", f, " ") } { print > (out "/" f[NR % 6 + 1] "/part.jsonl") }'

# The recipe with steps, and with what follows from there being few; its tokenizer is not in this repository.
recipe="$out/$name"
sed -E -e "/^paths/ s#\"data/#\"$out/data/#g" \
  -e 's|^path = .*|train = { vocab_size = 16384, sample_bytes = 4_000_000 }|' \
  -e 's|^steps = 32000.*|steps = '$first'|; s|^steps = 8000.*|steps = '$second'|; s|^warmup_steps = .*|warmup_steps = 1|' \
  -e 's|^log_freq = .*|log_freq = 1|' -e "${SHRINK:-}" "$here/recipes/$name" > "$recipe"
grep -q "^steps = $first$" "$recipe" && grep -q "^steps = $second$" "$recipe" && [ "$(grep -c '^\[\[stage' "$recipe")" = 2 ] ||
  { fail "$name has not the two stages of 32000 and 8000 steps that this script shortens"; exit 2; }
"$sieve" plan --recipe "$recipe" --gpu "$gpu" "${sets[@]}" > "$out/plan-1.txt" 2>&1 || fail "plan"
"$sieve" plan --recipe "$recipe" --gpu "$gpu" --nproc "$nproc" "${sets[@]}" > "$out/plan-$nproc.txt" 2>&1 || fail "plan --nproc $nproc"

run="$out/run"
train=(train --recipe "$recipe" --device "$device" --out "$run" --resume=auto "${sets[@]}")
logged() { cat "$run/log" 2> /dev/null; }
# Waits until the run's log has a line of this pattern, or the job has ended.
wait_for() {
  while ! logged | grep -q "$1"; do
    kill -0 "$2" 2> /dev/null || { fail "the job ended before '$1'"; return; }
    sleep 0.2
  done
}
ended() {
  wait "$1"
  local code=$?
  [ "$code" = "$2" ] && say "$3: exit code $code" || fail "$3: exit code $code, not $2"
}
memory() { [ "$device" = cpu ] || nvidia-smi --query-gpu=memory.used --format=csv,noheader | tr '\n' ' '; }

say "stage 1 on $nproc, SIGTERM after the first step"
"$sieve" launch --nproc "$nproc" -- "${train[@]}" > "$out/train-1.txt" 2>&1 &
job=$!
wait_for '^step: *1 ' "$job"
say "memory in use: $(memory)"
kill -TERM "$job"
ended "$job" 75 "stopped"

say "the same run on one, kill -9 in the first step of stage 2"
"$sieve" "${train[@]}" > "$out/train-2.txt" 2>&1 &
job=$!
wait_for '^stage 2 of 2' "$job"
sleep "${KILL_AFTER:-5}"
say "memory in use: $(memory)"
kill -KILL "$job"
ended "$job" 137 "killed"

say "the same run on $nproc, to its end"
"$sieve" launch --nproc "$nproc" -- "${train[@]}" > "$out/train-3.txt" 2>&1 &
ended $! 0 "finished"

say "evaluations and export"
ask() {
  local name="$1"
  shift
  timeout "${LIMIT:-60}" "$sieve" "$@" > "$out/$name.txt" 2>&1 && say "$name: $(tail -1 "$out/$name.txt" | cut -c1-300)" || fail "$name: $(tail -3 "$out/$name.txt" | cut -c1-300)"
}
other="$device"
[ "$device" = cuda ] && [ "$nproc" -gt 1 ] && other=cuda:1
tokens="$(seq -s, 2 97)"
(
  ask ppl eval ppl --checkpoint "$run" --recipe-validation --device "$device" --json
  ask mqar eval mqar --checkpoint "$run" --kinds 256:4 --samples 20 --device "$device" --json
) &
first=$!
(
  ask needle eval needle --checkpoint "$run" --lengths 2048 --depths 50 --device "$other" --json
  ask logits logits --checkpoint "$run" --tokens "$tokens" --out "$out/logits.safetensors" --device "$other"
) &
second=$!
ask export export --checkpoint "$run" --out "$out/exported"
wait "$first" "$second"
for name in ppl mqar needle logits; do [ -s "$out/$name.txt" ] || fail "$name"; done
timeout "${LIMIT:-60}" python3 - "$out" "$device" "$tokens" > "$out/transformers.txt" 2>&1 << 'PYTHON' || fail "transformers: $(tail -3 "$out/transformers.txt")"
import sys, torch, transformers
from safetensors.torch import load_file
out, device, tokens = sys.argv[1:]
ids = torch.tensor([[int(token) for token in tokens.split(",")]], device=device)
model = transformers.AutoModelForCausalLM.from_pretrained(out + "/exported", dtype=torch.float32, trust_remote_code=True).to(device)
with torch.no_grad():
    logits = model(ids).logits.float().cpu()
own = load_file(out + "/logits.safetensors")["logits"][..., : logits.shape[-1]]
error = (own - logits).norm() / logits.norm()
same = (own.argmax(-1) == logits.argmax(-1)).float().mean()
print(f"{type(model).__name__} of transformers {transformers.__version__} in f32: relative difference {error:.2e}, same likeliest token {100 * same:.1f} %")
# Sieve's logits are bf16's on a GPU.
assert torch.isfinite(own).all() and error < (0.05 if device != "cpu" else 1e-4), error
PYTHON
say "transformers: $(tail -1 "$out/transformers.txt")"

say "steps"
grep -E '^(health|peak memory|slow|warning|step|stage|continuing|memory|validate)' "$run/log" | cut -c1-200 | tee -a "$report"
say "plan"
grep -hiE 'tokens/s|memory|fits|GiB' "$out/plan-1.txt" "$out/plan-$nproc.txt" | tee -a "$report"
[ "$failed" = 0 ] && say "own command: all green" || say "own command: FAILED"
exit "$failed"
