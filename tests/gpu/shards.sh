#!/usr/bin/env bash
# Sharded training and use of a small model on four GPUs beside one GPU, with the same rows. One line a run: losses of
# some steps, how far the worst step's loss is from one GPU's, seconds.
#
#   tests/gpu/shards.sh SIEVE TEXT.jsonl OUT [one|muon|mixed|use]…        about 85 s on four GPUs
#
# one    the runs that the others are compared with, one GPU each, all at once
# muon   Muon under ZeRO-0 to ZeRO-3
# mixed  ZeRO-3 with fp8, with gradients in bf16, with recomputed blocks, with rows in two parts
# use    `eval ppl` and `generate` of the last checkpoint of ZeRO-3, by gathered blocks beside one GPU
#
# GPUS (4). STEPS (20), LIMIT of seconds a run (60), TOLERANCE of a loss (0.02). DEVICE=cpu with SETS="section.key=value
# …", a small shape, tries the script.
set -uo pipefail
sieve="$1" text="$2" out="$3"
shift 3
parts=("$@")
[ "$#" -gt 0 ] || parts=(one muon mixed use)
device="${DEVICE:-cuda}" steps="${STEPS:-20}" gpus="${GPUS:-4}" failed=0
mkdir -p "$out"
trap 'pgrep -f -- "--out $out/" | xargs -r kill -KILL' EXIT
trap 'exit 143' INT TERM
sets=()
for set in training.steps="$steps" lr_scheduler.warmup_steps=5 metrics.log_freq=1 validation.tokens=8192 \
  training.local_batch_size=4 training.global_batch_size=32 data.cache_dir="$out/cache" tokenizer.train.vocab_size=2048 \
  ${SETS:-}; do
  sets+=(--set "$set")
done
recipe=(--recipe "$out/shards.toml" "${sets[@]}")
rm -f "$out/shards.toml"
"$sieve" recipe new --size 80m --kind "${KIND:-mha}" --data "$text" --out "$out/shards.toml" > "$out/text.txt" 2>&1 &&
  "$sieve" data prepare "${recipe[@]}" >> "$out/text.txt" 2>&1 || { echo "FAILED: $(tail -1 "$out/text.txt")"; exit 1; }

fail() { echo "$1: FAILED: $2"; failed=1; }
limited() { timeout -k 5 "${LIMIT:-60}" "$@"; }
# The device of one process: GPU number N.
gpu() { [ "$device" = cpu ] && echo cpu || echo "$device:$1"; }

# run NAME PROCESSES DEVICE key=value…; $took is its seconds.
run() {
  local name="$1" nproc="$2" place="$3" words=() set began="$SECONDS"
  shift 3
  for set in "$@"; do words+=(--set "$set"); done
  rm -rf "${out:?}/$name"
  words=(train "${recipe[@]}" "${words[@]}" --device "$place" --out "$out/$name")
  [ "$nproc" = 1 ] || words=(launch --nproc "$nproc" -- "${words[@]}")
  limited "$sieve" "${words[@]}" > "$out/$name.txt" 2>&1 ||
    { fail "$name" "exit code $?, see $out/$name.txt: $(grep -m1 '^error' "$out/$name.txt" || tail -1 "$out/$name.txt")"; return 1; }
  took=$((SECONDS - began))
}

# beside NAME ONE: the losses of both runs.
beside() {
  python3 - "$out/$1" "$out/$2" "${TOLERANCE:-0.02}" "${took:-0}" << 'PYTHON' || failed=1
import json, math, sys
def steps(run):
    lines = map(json.loads, open(run + "/metrics.jsonl", encoding="utf-8"))
    return {line["step"]: line for line in lines if line["kind"] == "step"}
found, one = steps(sys.argv[1]), steps(sys.argv[2])
both, tolerance = sorted(found.keys() & one.keys()), float(sys.argv[3])
apart = lambda key: max((abs(found[step][key] - one[step][key]) for step in both), default=math.nan)
shown = [step for step in both if step in (1, 2, 5, 10) or step == max(both)]
loss = " ".join(f"{step}: {found[step]['loss']:.5f} ({one[step]['loss']:.5f})" for step in shown)
ok = len(both) >= 2 and apart("loss") <= tolerance
print(f"{sys.argv[1].split('/')[-1]:16} {'ok' if ok else 'FAILED'}: loss (one GPU's) {loss}; "
      f"at most {apart('loss'):.2g} apart, norms {apart('grad_norm'):.2g}; {sys.argv[4]} s", flush=True)
sys.exit(not ok)
PYTHON
}

# The settings of each way, by name.
declare -A ways=(
  [adamw]="" [muon]="optimizer.name=Muon" [fp8]="training.precision=fp8"
  [bf16]="training.gradient_dtype=bf16" [full]="activation_checkpoint.mode=full"
  [parts]="parallelism.context_parallel_degree=2"
)

# sharded WAY STAGE ONE: on all GPUS.
sharded() {
  # shellcheck disable=SC2086 # each word is a setting
  run "$1-zero-$2" "$gpus" "$device" ${ways[$1]} parallelism.zero_stage="$2" || return
  beside "$1-zero-$2" "$3"
  # A checkpoint is 1 GB; `use` reads one.
  [ "$1-$2" = muon-3 ] || rm -rf "$out/$1-zero-$2/checkpoint"
}

# The text that `generate` writes, and the losses of `eval ppl`.
used() {
  local name="$1" began="$SECONDS"
  shift
  limited "$sieve" "$@" generate -q --checkpoint "$out/muon-zero-3" --prompt "static int " --max-new-tokens 48 \
    --temperature 0 --device "$place" > "$out/$name-generate.txt" 2> "$out/$name-generate.err" ||
    fail "$name generate" "see $out/$name-generate.err: $(tail -1 "$out/$name-generate.err")"
  limited "$sieve" "$@" eval ppl --json --checkpoint "$out/muon-zero-3" --data "$text" --max-tokens 65536 \
    --device "$place" > "$out/$name-ppl.json" 2> "$out/$name-ppl.err" ||
    fail "$name eval ppl" "see $out/$name-ppl.err: $(tail -1 "$out/$name-ppl.err")"
  echo "$name: generate and eval ppl took $((SECONDS - began)) s"
}

for part in "${parts[@]}"; do
  case "$part" in
    one)
      number=0 jobs=()
      for way in adamw muon fp8 bf16; do
        # shellcheck disable=SC2086
        run "$way-one" 1 "$(gpu $((number % gpus)))" ${ways[$way]} &
        jobs+=($!) number=$((number + 1))
      done
      for job in "${jobs[@]}"; do wait "$job" || failed=1; done
      echo "one: $SECONDS s so far"
      ;;
    muon) for stage in 0 1 2 3; do sharded muon "$stage" muon-one; done ;;
    mixed)
      sharded fp8 3 fp8-one
      sharded bf16 3 bf16-one
      sharded full 3 adamw-one
      sharded parts 3 adamw-one
      ;;
    use)
      place="$(gpu 0)" used one
      place="$device" used four launch --nproc "$gpus" --
      python3 - "$out" << 'PYTHON' || failed=1
import json, sys
out = sys.argv[1]
texts = [open(f"{out}/{name}-generate.txt", encoding="utf-8").read() for name in ("one", "four")]
losses = [json.load(open(f"{out}/{name}-ppl.json", encoding="utf-8")) for name in ("one", "four")]
same = next((at for at, (a, b) in enumerate(zip(*texts)) if a != b), min(map(len, texts)))
numbers = [{key: value for key, value in found.items() if isinstance(value, float)} for found in losses]
apart = {key: abs(numbers[0][key] - numbers[1][key]) / max(abs(numbers[0][key]), 1e-9) for key in numbers[0]
         if "second" not in key}
print(f"use: texts of {len(texts[0])} and {len(texts[1])} characters, the first {same} equal; "
      f"eval ppl: {numbers[0]}; relative differences {apart}", flush=True)
sys.exit(not (len(texts[1]) > 20 and max(apart.values()) < 2e-3))
PYTHON
      ;;
    *)
      echo "there is no part '$part': one, muon, mixed or use"
      exit 2
      ;;
  esac
done
echo "shards: $SECONDS s, $([ "$failed" = 0 ] && echo ok || echo FAILED)"
exit "$failed"
