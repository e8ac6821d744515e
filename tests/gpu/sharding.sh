#!/usr/bin/env bash
# ZeRO-1 beside ZeRO-2 on the same rows, the memory of 8.2B parameters under ZeRO-2, and rows of 65,536 tokens in two parts
# beside whole ones: three steps each, on two GPUs. One line a run: losses, norms, tokens/s, and memory beside `sieve plan`'s.
#
#   tests/gpu/sharding.sh SIEVE TEXT.jsonl OUT [zero|memory|rows]…
#
# KINDS of the last part (infllm_v2 moba msa). DEVICE=cpu with SETS="section.key=value …", a small shape, tries the script.
# About 40, 90 and 100 seconds.
set -uo pipefail
sieve="$1" text="$2" out="$3"
shift 3
parts=("$@")
[ "$#" -gt 0 ] || parts=(zero memory rows)
device="${DEVICE:-cuda}" steps="${STEPS:-3}"
mkdir -p "$out"
failed=0

# run NAME KIND PROCESSES GPU key=value…
run() {
  local name="$1" kind="$2" nproc="$3" gpu="$4" sets=() set
  shift 4
  for set in training.steps=1000 lr_scheduler.warmup_steps=100 metrics.log_freq=1 validation.tokens=8192 "$@" ${SETS:-}; do
    sets+=(--set "$set")
  done
  # Without stages, whose steps would not add up.
  "$sieve" recipe new --size 1p7b --kind "$kind" --data "$text" 2> /dev/null | sed '/^\[\[stage\]\]/,$d' > "$out/$name.toml"
  local all=(--recipe "$out/$name.toml" --set "data.cache_dir=\"$out/cache\""
    --set "tokenizer.train={ vocab_size = 2048, sample_bytes = 4_000_000 }" "${sets[@]}")
  "$sieve" plan "${all[@]}" --gpu h200 --nproc "$nproc" > "$out/$name.plan" 2>&1
  local train=(train "${all[@]}" --out "$out/$name")
  if [ "$nproc" = 1 ]; then
    [ "$device" = cpu ] && gpu="$device" || gpu="$device:$gpu"
    setsid "$sieve" "${train[@]}" --device "$gpu" > "$out/$name.txt" 2>&1 &
  else
    setsid "$sieve" launch --nproc "$nproc" -- "${train[@]}" --device "$device" > "$out/$name.txt" 2>&1 &
  fi
  # Killed behind the last step: a checkpoint of 8.2B parameters is 98 GB.
  local job=$!
  while kill -0 "$job" 2> /dev/null && [ "$(cat "$out/$name/metrics.jsonl" 2> /dev/null | grep -c '"kind":"step"')" -lt "$steps" ]; do
    sleep 0.2
  done
  local code=0
  kill -0 "$job" 2> /dev/null || { code=1; echo "$name: FAILED, see $out/$name.txt: $(tail -1 "$out/$name.txt")"; }
  # Each rank has a process group of its own, all have the session of `setsid`.
  while pkill -KILL -s "$job"; do sleep 0.2; done
  wait "$job" 2> /dev/null
  python3 - "$out/$name" "$steps" << 'PYTHON' || code=1
import json, re, sys
name, count = sys.argv[1], int(sys.argv[2])
lines = [json.loads(line) for line in open(name + "/metrics.jsonl", encoding="utf-8")]
steps = [line for line in lines if line["kind"] == "step"][:count]
memory = [line for line in lines if line["kind"] == "memory"]
of = lambda key, digits: ", ".join(f"{line[key]:.{digits}f}" for line in steps)
gib = lambda key: f"{max(line[key] for line in memory) / 2**30:.2f} GiB" if memory else "not known"
plan = re.search(r"^memory +([0-9.]+ GiB)", open(name + ".plan", encoding="utf-8").read(), re.M)
print(f"{name.split('/')[-1]:12} loss {of('loss', 5)}; norm {of('grad_norm', 4)}; tokens/s {of('tokens_per_second', 0)}; "
      f"tensors {gib('in_use_bytes')}, reserved {gib('reserved_bytes')}, plan with the program {plan and plan[1]}", flush=True)
PYTHON
  return "$code"
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
    rows) # whole rows, two kinds at a time, then in two parts
      shape=(model.num_hidden_layers=12 model.max_position_embeddings=65536 training.seq_len=65536
        training.local_batch_size=1 training.global_batch_size=2)
      "$sieve" recipe new --size 1p7b --data "$text" --out "$out/text.toml" > "$out/text.txt" 2>&1
      "$sieve" data prepare --recipe "$out/text.toml" --set "data.cache_dir=\"$out/cache\"" \
        --set "tokenizer.train={ vocab_size = 2048, sample_bytes = 4_000_000 }" >> "$out/text.txt" 2>&1 || failed=1
      jobs=()
      for kind in ${KINDS:-infllm_v2 moba msa}; do
        run "$kind-1" "$kind" 1 "${#jobs[@]}" "${shape[@]}" &
        jobs+=($!)
        [ "${#jobs[@]}" -lt 2 ] || { for job in "${jobs[@]}"; do wait "$job" || failed=1; done; jobs=(); }
      done
      for job in "${jobs[@]}"; do wait "$job" || failed=1; done
      for kind in ${KINDS:-infllm_v2 moba msa}; do
        run "$kind-2" "$kind" 2 - "${shape[@]}" parallelism.context_parallel_degree=2 || failed=1
      done
      ;;
    *)
      echo "there is no part '$part': zero, memory or rows"
      exit 2
      ;;
  esac
done
exit "$failed"
