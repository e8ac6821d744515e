#!/usr/bin/env bash
# Files of models that one GPU or one host's memory barely holds: what is written, read and exported, in seconds, with the
# most memory of a process. One line a step.
#
#   tests/gpu/sizes.sh SIEVE TEXT.jsonl OUT [checkpoint|import|divided]…
#
# checkpoint  14.8B on all GPUS under ZeRO-3: a checkpoint of step 2 (178 GB) is written while steps go on, the run is
#             killed, continued from it with the same losses, and the checkpoint is exported (30 GB). By plan and 1.5 GB/s
#             of the disk about 330 s; OUT needs 212 GB, and is emptied
# import      a folder of random weights in Qwen3-8B's layout, made a shard at a time (16 GB); its import (33 GB), eval
#             ppl and generate on one GPU. About 150 s; OUT needs 50 GB, and keeps the import
# divided     eval ppl and generate of that import on all GPUS, beside the one; about 50 s; OUT is emptied
#
# GPUS (4), LIMIT of seconds a step (300), PYTHON (python3): one that has numpy, for import. DEVICE=cpu with SETS="section.key=value …", a small shape, and LAYERS=4
# WIDTH=256 VOCABULARY=4096 tries the script.
set -uo pipefail
sieve="$1" text="$2" out="$3"
shift 3
parts=("$@")
[ "$#" -gt 0 ] || parts=(checkpoint import divided)
device="${DEVICE:-cuda}" gpus="${GPUS:-4}" limit="${LIMIT:-300}" failed=0
mkdir -p "$out"
trap 'pgrep -f -- "$out/" | grep -vx "$$" | xargs -r kill -KILL' EXIT
trap 'exit 143' INT TERM
fail() { echo "$1: FAILED: $2"; failed=1; }
[ "$device" = cpu ] && one=cpu || one="$device:0"

# step NAME COMMAND…: a line with its seconds, and the most memory of one of its processes that no file backs.
step() {
  local name="$1" began="$SECONDS" pid most=0 now
  shift
  timeout -k 5 "$limit" "$@" > "$out/$name.txt" 2> "$out/$name.err" &
  pid=$!
  while kill -0 "$pid" 2> /dev/null; do
    now="$(pgrep -f -- "^$sieve .*$out/" | xargs -I{} grep -hs '^RssAnon' /proc/{}/status | awk '{ print $2 }' | sort -n | tail -1)"
    [ "${now:-0}" -le "$most" ] || most="$now"
    sleep 0.2
  done
  if wait "$pid"; then
    echo "$name: $((SECONDS - began)) s, at most $((most / 1048576)).$((most % 1048576 * 10 / 1048576)) GiB of a process's own"
  else
    fail "$name" "see $out/$name.err: $(tail -1 "$out/$name.err")"
    return 1
  fi
}

# The steps of a run beside those that it took before it was killed.
same_losses() {
  python3 - "$1" "$2" << 'PYTHON' || failed=1
import json, sys
def steps(path):
    lines = map(json.loads, open(path, encoding="utf-8"))
    return {line["step"]: line for line in lines if line["kind"] == "step"}
before, after = map(steps, sys.argv[1:])
both = sorted(step for step in before.keys() & after.keys() if step > 2)
apart = max((abs(before[step]["loss"] - after[step]["loss"]) for step in both), default=1)
speed = {step: round(line["tokens_per_second"]) for step, line in before.items()}
print(f"resumed: steps {both} have losses at most {apart:.3g} apart from those before the kill: "
      f"{[after[step]['loss'] for step in both]}; tokens/s {speed} before, a checkpoint on its way from step 3 on", flush=True)
sys.exit(not (both and apart < 1e-3))
PYTHON
}

# until_there PATTERN PID: waits for a file or folder.
until_there() {
  local end=$((SECONDS + limit))
  until compgen -G "$1" > /dev/null || ! kill -0 "$2" 2> /dev/null || [ "$SECONDS" -ge "$end" ]; do sleep 0.1; done
  compgen -G "$1" > /dev/null
}

# Ends a launched run, which has a session of its own, and waits for its processes.
end() {
  while ps -o stat= -s "$1" | grep -qv '^Z'; do
    pkill -KILL -s "$1"
    sleep 0.1
  done
}

checkpoint() {
  local sets=() set words job began
  "$sieve" recipe new --size 1p7b --kind mha --data "$text" --set stage.1.steps=10 2> "$out/recipe.err" |
    sed '/^\[\[stage\]\]/,$d' > "$out/large.toml"
  for set in training.steps=1000 lr_scheduler.warmup_steps=100 metrics.log_freq=1 validation.tokens=8192 \
    training.seq_len=4096 training.local_batch_size=2 training.global_batch_size=$((4 * gpus)) \
    model.num_hidden_layers=40 model.hidden_size=5120 model.num_attention_heads=40 model.num_key_value_heads=8 \
    model.intermediate_size=17408 model.vocab_size=151936 model.tie_word_embeddings=false \
    activation_checkpoint.mode=full parallelism.zero_stage=3 checkpoint.interval=2 data.cache_dir="$out/cache" \
    tokenizer.train.vocab_size=2048 ${SETS:-}; do
    sets+=(--set "$set")
  done
  words=(train --recipe "$out/large.toml" "${sets[@]}" --device "$device" --out "$out/large")
  step prepare "$sieve" data prepare --recipe "$out/large.toml" "${sets[@]}" || return
  setsid "$sieve" launch --nproc "$gpus" -- "${words[@]}" > "$out/large.txt" 2>&1 &
  job=$!
  disown "$job"
  until_there "$out"'/large/checkpoint/step-2*' "$job"
  began="$SECONDS"
  until_there "$out/large/checkpoint/step-2" "$job" || fail checkpoint "$(tail -1 "$out/large.txt")"
  echo "checkpoint: written $((SECONDS - began)) s after it began, $(du -sh "$out/large/checkpoint/step-2" | cut -f1)"
  cp "$out/large/metrics.jsonl" "$out/before.jsonl"
  end "$job"
  began="$SECONDS"
  setsid "$sieve" launch --nproc "$gpus" -- "${words[@]}" --resume > "$out/resumed.txt" 2>&1 &
  job=$!
  disown "$job"
  # The second step behind the checkpoint begins the next one.
  until grep -q '"step":4,' "$out/large/metrics.jsonl" 2> /dev/null || ! kill -0 "$job" 2> /dev/null ||
    [ "$SECONDS" -ge $((began + limit)) ]; do sleep 0.1; done
  cp "$out/large/metrics.jsonl" "$out/after.jsonl"
  end "$job"
  echo "resumed: two steps within $((SECONDS - began)) s of the start"
  same_losses "$out/before.jsonl" "$out/after.jsonl"
  rm -rf "$out"/large/checkpoint/*.tmp
  step export "$sieve" export --checkpoint "$out/large" --out "$out/exported" || return
  du -sh "$out/exported" | cut -f1 | sed 's/^/export: /'
  rm -rf "${out:?}/large" "$out/exported"
}

# A folder as transformers writes it, with random weights.
folder() {
  "${PYTHON:-python3}" - "$1" "${LAYERS:-36}" "${WIDTH:-4096}" "${VOCABULARY:-151936}" << 'PYTHON'
import json, os, struct, sys
import numpy
folder, layers, width, vocabulary = sys.argv[1], *map(int, sys.argv[2:])
os.makedirs(folder, exist_ok=True)
heads, kv_heads, head, inner = width // 128, max(width // 512, 1), 128, 3 * width
json.dump(dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=width, intermediate_size=inner,
               num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head,
               vocab_size=vocabulary, rope_theta=1000000, rms_norm_eps=1e-6, tie_word_embeddings=False,
               max_position_embeddings=40960, attention_bias=False, hidden_act="silu", torch_dtype="bfloat16"),
          open(f"{folder}/config.json", "w"))
shapes = {"model.embed_tokens.weight": [vocabulary, width]}
for layer in range(layers):
    own = {"self_attn.q_proj": [heads * head, width], "self_attn.k_proj": [kv_heads * head, width],
           "self_attn.v_proj": [kv_heads * head, width], "self_attn.o_proj": [width, heads * head],
           "self_attn.q_norm": [head], "self_attn.k_norm": [head], "mlp.gate_proj": [inner, width],
           "mlp.up_proj": [inner, width], "mlp.down_proj": [width, inner], "input_layernorm": [width],
           "post_attention_layernorm": [width]}
    shapes.update({f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()})
shapes.update({"model.norm.weight": [width], "lm_head.weight": [vocabulary, width]})
# One draw, cut at another place for each tensor: bf16 is the upper half of f32.
normal = numpy.random.default_rng(0).standard_normal(1 << 24, dtype=numpy.float32) * numpy.float32(0.02)
drawn = (normal.view(numpy.uint32) >> 16).astype(numpy.uint16)
ones = numpy.uint16(0x3F80)
size = lambda shape: 2 * int(numpy.prod(shape))
shards, held = [{}], 0
for name, shape in shapes.items():
    if held and held + size(shape) > 4 << 30:
        shards, held = [*shards, {}], 0
    shards[-1][name] = shape
    held += size(shape)
index = {}
for number, shard in enumerate(shards, 1):
    file = f"model-{number:05}-of-{len(shards):05}.safetensors"
    at, header = 0, {}
    for name, shape in shard.items():
        header[name] = dict(dtype="BF16", shape=shape, data_offsets=[at, at + size(shape)])
        at += size(shape)
        index[name] = file
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(f"{folder}/{file}", "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for place, shape in enumerate(shard.values()):
            left = size(shape) // 2
            if len(shape) == 1:
                numpy.full(left, ones).tofile(out)
                continue
            start = 7919 * (place + 100 * number) % drawn.size
            while left:
                some = drawn[start:start + left]
                some.tofile(out)
                left, start = left - some.size, 0
json.dump(dict(metadata={}, weight_map=index), open(f"{folder}/model.safetensors.index.json", "w"))
print(f"folder: {len(shards)} shards, {sum(map(size, shapes.values())) / 1e9:.1f} GB")
PYTHON
}

use=(--checkpoint "$out/imported" --prompt "static int " --temperature 0 --max-new-tokens 32 -q)
ppl=(--checkpoint "$out/imported" --data "$text" --max-tokens 8192 --context 4096 --json)

imported() {
  folder "$out/folder" || { fail folder "see above"; return; }
  "$sieve" tokenizer train --data "$text" --vocab-size 2048 --out "$out/folder/tokenizer.json" > "$out/tokenizer.txt" 2>&1 ||
    { fail tokenizer "$(tail -1 "$out/tokenizer.txt")"; return; }
  step import "$sieve" import --from "$out/folder" --out "$out/imported" || return
  rm -rf "$out/folder"
  step generate-one "$sieve" generate "${use[@]}" --device "$one"
  step ppl-one "$sieve" eval ppl "${ppl[@]}" --device "$one"
}

divided() {
  step generate-all "$sieve" launch --nproc "$gpus" -- generate "${use[@]}" --device "$device"
  step ppl-all "$sieve" launch --nproc "$gpus" -- eval ppl "${ppl[@]}" --device "$device"
  python3 - "$out" << 'PYTHON' || failed=1
import json, sys
out = sys.argv[1]
read = lambda name: open(f"{out}/{name}.txt", encoding="utf-8").read()
one, all_gpus = read("generate-one"), read("generate-all")
loss = [json.loads(read(name))["loss"] for name in ("ppl-one", "ppl-all")]
same = next((at for at, (a, b) in enumerate(zip(one, all_gpus)) if a != b), min(len(one), len(all_gpus)))
print(f"divided: the first {same} of {len(one)} characters of the texts are equal; losses {loss}", flush=True)
sys.exit(not (len(all_gpus) > 10 and abs(loss[0] - loss[1]) < 2e-3))
PYTHON
  rm -rf "$out/imported"
}

# room PART GB: whether the disk has so much, or DEVICE=cpu tries a small shape.
room() {
  local free
  free="$(df -B1000000000 --output=avail "$out" | tail -1 | tr -d ' ')"
  echo "$1: $free GB of disk are free, $2 are needed"
  [ "$free" -ge "$2" ] || [ "$device" = cpu ] || { fail "$1" "too little disk"; return 1; }
}

for part in "${parts[@]}"; do
  case "$part" in
    # The checkpoint is 177.2 GB, the export 29.5; the next checkpoint is refused, since it does not fit beside it.
    checkpoint) room checkpoint 212 && checkpoint ;;
    # Folder and checkpoint are 16.4 and 32.8 GB.
    import) room import 50 && imported ;;
    divided) divided ;;
    *)
      echo "there is no part '$part': checkpoint, import or divided"
      exit 2
      ;;
  esac
done
exit "$failed"
