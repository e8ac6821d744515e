#!/usr/bin/env bash
# Runs of a few steps on one and two GPUs. One line a run: losses, norms, tokens/s and memory beside `sieve plan`'s, and
# how many times as fast as one GPU.
#
#   tests/gpu/sharding.sh SIEVE TEXT.jsonl OUT [zero|memory|weights|large|rows|long|scale]…
#
# zero     1.7B under ZeRO-1, ZeRO-2 and ZeRO-2 with bf16 gradients on the same rows; about 40 s
# memory   8.2B under ZeRO-2; about 90 s
# weights  1.7B, rows of 2048, four micro-batches, under ZeRO-2 and ZeRO-3 on all GPUS, with and without recomputation;
#          WAYS (2:none 3:none 2:full 3:full)
# large    14.8B, rows of 4096, under ZERO (3) on all GPUS (4 or more), two micro-batches of each of ROWS (2, or 3:6 for
#          six steps of three rows) one after the other; MODE (full) of recomputation; LIMIT=400
# rows     KINDS (infllm_v2 moba msa), 12 layers, rows of 65,536 whole (but WHOLE=no) and in two parts; about 100 s
# long     KINDS (all eight), SIZES (80m 1p7b), rows of LENGTH (524288) tokens in PARTS (GPUS) parts, all blocks recomputed,
#          one step of dense and latent attention and two of the others; on four H100s by plan about 150 s for 80m and
#          430 s for 1p7b, of them the longest 85 s each for mha and mla; LIMIT=200
# scale    CELLS (mha:2048:1 dma:2048:1 nsa:2048:1), KIND:TOKENS OF A ROW:MICRO-BATCHES, 1.7B on one GPU and on all GPUS
#          (2); COUNTS ("1 GPUS") of GPUs, SIDE (2) runs of one GPU at a time; about 30 s a cell
#
# STEPS (3), LIMIT of seconds a run (150), FLAGS of train ("--profile 3"). DEVICE=cpu with SETS="section.key=value …", a
# small shape, tries the script.
set -uo pipefail
sieve="$1" text="$2" out="$3"
shift 3
parts=("$@")
[ "$#" -gt 0 ] || parts=(zero memory rows)
device="${DEVICE:-cuda}" steps="${STEPS:-3}" gpus="${GPUS:-2}"
mkdir -p "$out"
failed=0 size=1p7b left_out='stage' jobs=() stages=() sessions="$out/sessions"
# A script that is stopped leaves no run behind.
: > "$sessions"
trap 'while read -r job; do pkill -KILL -s "$job"; done < "$sessions"' EXIT
trap 'exit 143' INT TERM
cached=(--set "data.cache_dir=\"$out/cache\"" --set "tokenizer.train={ vocab_size = 2048, sample_bytes = 4_000_000 }")

# A text of any length will do for the steps that are taken: 1.7B asks for more.
any_text() { [ "$size" = 80m ] || echo --set stage.1.steps=10; }

# run NAME KIND PROCESSES GPU key=value…; with stages of ROWS:STEPS each takes two micro-batches of so many rows.
run() {
  local name="$1" kind="$2" nproc="$3" gpu="$4" sets=() set stage rows steps="$steps" planners=()
  shift 4
  for set in training.steps=1000 lr_scheduler.warmup_steps=100 metrics.log_freq=1 "$@" ${SETS:-}; do
    sets+=(--set "$set")
  done
  # Without stages, whose steps would not add up.
  # shellcheck disable=SC2046 # two words
  "$sieve" recipe new --size "$size" --kind "$kind" --data "$text" $(any_text) 2> "$out/$name.txt" |
    awk -v left_out="$left_out" '/^\[/ { is_out = $1 ~ left_out } !is_out' > "$out/$name.toml"
  grep -q '^\[validation\]' "$out/$name.toml" && sets+=(--set validation.tokens=8192)
  local all=(--recipe "$out/$name.toml" "${cached[@]}" "${sets[@]}")
  rm -rf "${out:?}/$name"
  local plan=("$sieve" plan "${all[@]}" --gpu h200 --nproc "$nproc")
  if [ "${#stages[@]}" = 0 ]; then
    "${plan[@]}" > "$out/$name.plan" 2>&1 &
    planners+=($!)
  else
    steps=0
    cp "$out/$name.toml" "$out/$name-stages.toml"
    for stage in "${stages[@]}"; do
      rows="${stage%:*}" steps=$((steps + ${stage#*:}))
      "${plan[@]}" --set training.local_batch_size="$rows" --set training.global_batch_size=$((2 * rows * nproc)) \
        > "$out/$name-$rows.plan" 2>&1 &
      planners+=($!)
      printf '\n[[stage]]\nsteps = %s\nlocal_batch_size = %s\nglobal_batch_size = %s\n' "${stage#*:}" "$rows" \
        $((2 * rows * nproc)) >> "$out/$name-stages.toml"
    done
    # More steps than are taken: the last one would write a checkpoint.
    printf '\n[[stage]]\nsteps = %s\nlocal_batch_size = %s\nglobal_batch_size = %s\n' $((1000 - steps)) "$rows" \
      $((2 * rows * nproc)) >> "$out/$name-stages.toml"
    all=(--recipe "$out/$name-stages.toml" "${all[@]:2}")
  fi
  local train=(train "${all[@]}" --out "$out/$name" ${FLAGS:-})
  if [ "$nproc" = 1 ]; then
    [ "$device" = cpu ] && gpu="$device" || gpu="$device:$gpu"
    setsid "$sieve" "${train[@]}" --device "$gpu" > "$out/$name.txt" 2>&1 &
  else
    setsid "$sieve" launch --nproc "$nproc" -- "${train[@]}" --device "$device" > "$out/$name.txt" 2>&1 &
  fi
  # Killed behind the last step: a checkpoint of 8.2B parameters is 98 GB.
  local job=$! code=1 end=$((SECONDS + ${LIMIT:-150})) metrics="$out/$name/metrics.jsonl"
  echo "$job" >> "$sessions"
  disown "$job"
  while kill -0 "$job" 2> /dev/null && [ "$SECONDS" -lt "$end" ]; do
    if [ "$(grep -c '"kind":"step"' "$metrics" 2> /dev/null)" -ge "$steps" ] 2> /dev/null; then
      code=0
      break
    fi
    sleep 0.1
  done
  [ "$code" = 0 ] || echo "$name: FAILED, see $out/$name.txt: $(tail -1 "$out/$name.txt")"
  # Each rank has a process group of its own, all have the session of `setsid`. The next run needs their memory.
  while ps -o stat= -s "$job" | grep -qv '^Z'; do
    pkill -KILL -s "$job"
    sleep 0.1
  done
  for set in "${planners[@]}"; do
    wait "$set" || { code=1; echo "$name: FAILED to plan: $(tail -qn1 "$out/$name"*.plan)"; }
  done
  python3 - "$out/$name" "$steps" "${stages[@]}" << 'PYTHON' || code=1
import json, math, os, re, sys
from statistics import median
name, count, stages = sys.argv[1], int(sys.argv[2]), sys.argv[3:]

def read(name):
    lines = [json.loads(line) for line in open(name + "/metrics.jsonl", encoding="utf-8")]
    return [[line for line in lines if line["kind"] == kind] for kind in ("step", "memory")]

all_steps, all_memory = read(name)
# The first step compiles kernels.
speed = lambda steps: median(line["tokens_per_second"] for line in steps[1:] or steps)
gib = lambda memory, key: f"{max(line[key] for line in memory) / 2**30:.2f} GiB" if memory else "not known"

def show(label, plan, steps, memory):
    of = lambda key, digits: ", ".join(f"{line[key]:.{digits}f}" for line in steps)
    plan = open(plan, encoding="utf-8").read()
    planned = lambda pattern: float(found[1].replace(",", "")) if (found := re.search(pattern, plan, re.M)) else math.nan
    tensors = planned(r"^memory +([0-9.]+) GiB") - planned(r"^  program +([0-9.]+) GiB")
    parts, times = re.fullmatch(r"(.*)-([0-9]+)", name), ""
    if parts and parts[2] != "1" and os.path.exists(parts[1] + "-1/metrics.jsonl"):
        ratio = speed(steps) / speed(read(parts[1] + "-1")[0])
        times = f" ({ratio:.2f} times one GPU, {100 * ratio / int(parts[2]):.1f} %)"
    print(f"{label:12} loss {of('loss', 5)}; norm {of('grad_norm', 4)}; "
          f"tokens/s {of('tokens_per_second', 0)}{times}, plan {planned(r'about ([0-9,]+) tokens/s'):.0f}; "
          f"tensors {gib(memory, 'in_use_bytes')}, plan {tensors:.2f} GiB; "
          f"reserved {gib(memory, 'reserved_bytes')}", flush=True)

label, first = name.split("/")[-1], 1
for stage in stages or [f"all:{count}"]:
    rows, last = stage.split(":")[0], first + int(stage.split(":")[1])
    within = lambda lines: [line for line in lines if first <= line["step"] < last]
    if within(all_steps):
        words = (f"{label}, {rows} rows", f"{name}-{rows}.plan") if stages else (label, f"{name}.plan")
        show(*words, within(all_steps), within(all_memory))
    first = last
sys.exit(not all_steps)
PYTHON
  return "$code"
}

# alone NAME KIND key=value…: on a GPU of its own, SIDE such runs at a time
alone() {
  run "$1" "$2" 1 "${#jobs[@]}" "${@:3}" &
  jobs+=($!)
  [ "${#jobs[@]}" -lt "${SIDE:-2}" ] || settle
}

settle() {
  local job
  for job in "${jobs[@]}"; do wait "$job" || failed=1; done
  jobs=()
}

# Before two runs would prepare the text at once.
prepare() {
  rm -f "$out/text.toml"
  # shellcheck disable=SC2046
  "$sieve" recipe new --size "$size" --data "$text" $(any_text) --out "$out/text.toml" > "$out/text.txt" 2>&1 &&
    "$sieve" data prepare --recipe "$out/text.toml" "${cached[@]}" >> "$out/text.txt" 2>&1 ||
    { echo "FAILED to prepare the text: $(tail -1 "$out/text.txt")"; exit 1; }
}

for part in "${parts[@]}"; do
  case "$part" in
    zero) # four micro-batches a process
      for way in 1:f32 2:f32 2:bf16; do
        run "zero-${way/:/-}" mha 2 - parallelism.zero_stage="${way%:*}" training.gradient_dtype="${way#*:}" \
          training.global_batch_size=32 || failed=1
      done
      ;;
    memory)
      run 8b-zero-2 mha 2 - parallelism.zero_stage=2 training.global_batch_size=32 model.num_hidden_layers=36 \
        model.hidden_size=4096 model.num_attention_heads=32 model.num_key_value_heads=8 model.intermediate_size=12288 \
        model.vocab_size=151936 model.tie_word_embeddings=false activation_checkpoint.mode=full ||
        failed=1
      ;;
    weights)
      prepare
      for way in ${WAYS:-2:none 3:none 2:full 3:full}; do
        run "weights-${way/:/-}" mha "$gpus" - model.vocab_size=50304 training.seq_len=2048 \
          training.local_batch_size=8 training.global_batch_size=$((32 * gpus)) \
          parallelism.zero_stage="${way%:*}" activation_checkpoint.mode="${way#*:}" || failed=1
      done
      ;;
    large)
      prepare
      for rows in ${ROWS:-2}; do
        [[ "$rows" = *:* ]] || rows="$rows:$steps"
        stages+=("$rows")
      done
      run "large-zero-${ZERO:-3}-${MODE:-full}" mha "$gpus" - parallelism.zero_stage="${ZERO:-3}" training.seq_len=4096 \
        model.num_hidden_layers=40 model.hidden_size=5120 model.num_attention_heads=40 model.num_key_value_heads=8 \
        model.intermediate_size=17408 model.vocab_size=151936 model.tie_word_embeddings=false \
        activation_checkpoint.mode="${MODE:-full}" || failed=1
      stages=()
      ;;
    rows) # whole rows, two kinds at a time, then in two parts
      shape=(model.num_hidden_layers=12 model.max_position_embeddings=65536 training.seq_len=65536
        training.local_batch_size=1 training.global_batch_size=2)
      prepare
      for kind in ${KINDS:-infllm_v2 moba msa}; do
        [ "${WHOLE:-yes}" = no ] || alone "$kind-1" "$kind" "${shape[@]}"
      done
      settle
      for kind in ${KINDS:-infllm_v2 moba msa}; do
        run "$kind-2" "$kind" 2 - "${shape[@]}" parallelism.context_parallel_degree=2 || failed=1
      done
      ;;
    long)
      prepare
      length="${LENGTH:-524288}" all="$steps"
      # A validation computes whole rows in each process.
      left_out='stage|validation'
      for size in ${SIZES:-80m 1p7b}; do
        for kind in ${KINDS:-swa moba infllm_v2 msa nsa dma mha mla}; do
          # Kinds that share out KV heads need a multiple of the parts; 80M has three.
          case "$size-$kind" in
            80m-mla) heads=(model.num_attention_heads=8 model.num_key_value_heads=8) ;;
            80m-msa) heads=(model.num_attention_heads=16 model.num_key_value_heads=4) ;;
            80m-*) heads=(model.num_attention_heads=12 model.num_key_value_heads=4) ;;
            *) heads=() ;;
          esac
          case "$kind" in mha | mla) steps=1 ;; *) steps=2 ;; esac
          run "long-$size-$kind-$gpus" "$kind" "$gpus" - training.seq_len="$length" \
            model.max_position_embeddings="$length" training.local_batch_size=1 training.global_batch_size=1 \
            parallelism.context_parallel_degree="${PARTS:-$gpus}" activation_checkpoint.mode=full "${heads[@]}" ||
            failed=1
        done
      done
      size=1p7b left_out='stage' steps="$all"
      ;;
    scale) # 16,384 tokens a micro-batch and the vocabulary of lab/rivals/ranks.py
      prepare
      cells=(${CELLS:-mha:2048:1 dma:2048:1 nsa:2048:1})
      for count in ${COUNTS:-1 $gpus}; do
        for cell in "${cells[@]}"; do
          IFS=: read -r kind len micro <<< "$cell"
          rows=$((16384 / len))
          shape=(model.vocab_size=50304 training.seq_len="$len" model.max_position_embeddings=8192
            training.local_batch_size="$rows" training.global_batch_size=$((rows * micro * count)))
          if [ "$count" = 1 ]; then
            alone "${cell//:/-}-1" "$kind" "${shape[@]}"
          else
            run "${cell//:/-}-$count" "$kind" "$count" - "${shape[@]}" || failed=1
          fi
        done
        settle
      done
      ;;
    *)
      echo "there is no part '$part': zero, memory, weights, large, rows, long or scale"
      exit 2
      ;;
  esac
done
exit "$failed"
