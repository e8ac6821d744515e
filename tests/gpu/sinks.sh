#!/usr/bin/env bash
# Sinks (model.attention_sinks = true) on a GPU: one line a part, and what failed.
#
#   tests/gpu/sinks.sh SIEVE TEXT.jsonl OUT [check|wheel|train]…
#
# check  `kernels check --sinks`: the kernels of sinks, decoding, models of both kinds beside f64
# wheel  the package's tests of sinks; PYTHON (python3) has torch, pytest and, for gpt-oss, transformers
# train  20 steps of an 80M model of windows and dense layers, then greedy tokens from the cache beside the logits of one
#        pass over the same tokens
#
# DEVICE=cpu with SETS="section.key=value …", a small shape, tries the script; the package's kernels then run on the
# emulator. About 60 s on an H100.
set -uo pipefail
sieve="$1" text="$2" out="$3"
shift 3
parts=("$@")
[ "$#" -gt 0 ] || parts=(check wheel train)
device="${DEVICE:-cuda}" python="${PYTHON:-python3}" failed=0
here="$(cd "$(dirname "$0")/../.." && pwd)"
mkdir -p "$out"

fail() { echo "$1: FAILED, see $2"; tail -3 "$2"; failed=1; }

check() {
  "$sieve" kernels check --sinks --cases "${CASES:-30}" --longest 300 --device "$device" > "$out/check.txt" 2>&1 ||
    { fail check "$out/check.txt"; return; }
  echo "check: $(tail -1 "$out/check.txt")"
}

wheel() {
  (cd "$here" && SIEVE_TEST_DEVICE="$device" "$python" -m pytest -q python/tests/test_kernels.py \
    python/tests/test_transformers.py -k "sinks or test_decode" > "$out/wheel.txt" 2>&1) ||
    { fail wheel "$out/wheel.txt"; return; }
  echo "wheel: $(tail -1 "$out/wheel.txt")"
}

train() {
  local sets=() set run="$out/sinks" prompt='let mut sum'
  for set in model.attention_sinks=true 'model.layer_types=["swa","mha"]' data.cache_dir="$out/cache" \
    tokenizer.train.vocab_size=258 metrics.log_freq=5 ${SETS:-}; do
    sets+=(--set "$set")
  done
  rm -rf "$out/sinks.toml" "$run"
  # Tokens are bytes, so that a text has one list of tokens.
  if ! { "$sieve" recipe new --size 80m --kind swa --data "$text" --out "$out/sinks.toml" &&
    "$sieve" train --recipe "$out/sinks.toml" --device "$device" --out "$run" --stop-after 20 "${sets[@]}" &&
    "$sieve" generate --checkpoint "$run" --device "$device" --prompt "$prompt" --temperature 0 --json \
      --max-new-tokens "${TOKENS:-200}" > "$out/generated.json"; } > "$out/train.txt" 2>&1; then
    fail train "$out/train.txt"
    return
  fi
  "$python" - "$sieve" "$run" "$device" "$out" > "$out/cached.txt" 2>&1 <<'PYTHON' || { fail train "$out/cached.txt"; return; }
import array, json, pathlib, struct, subprocess, sys

sieve, run, device, out = sys.argv[1:]
said = json.loads(pathlib.Path(out, "generated.json").read_text().splitlines()[-1])
checkpoint = sorted(pathlib.Path(run, "checkpoint").glob("step-*"))[-1]
vocab = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["vocab"]
# The letter of each byte, as byte-level tokenizers write it.
plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
letters = {byte: chr(byte) for byte in plain}
letters |= {byte: chr(256 + n) for n, byte in enumerate(sorted(set(range(256)) - set(plain)))}
whole_text = said["text"].split("\ufffd")[0]
ids = [[vocab[letters[byte]] for byte in x.encode()] for x in (said["prompt"], whole_text)]
assert len(ids[0]) == said["prompt_tokens"], "the prompt has other tokens"
tokens = ",".join(map(str, ids[0] + ids[1]))
file = f"{out}/whole.safetensors"
given = ["--checkpoint", run, "--device", device, "--tokens", tokens, "--out", file]
subprocess.run([sieve, "logits", *given], check=True, stdout=subprocess.DEVNULL)
data = pathlib.Path(file).read_bytes()
(length,) = struct.unpack("<Q", data[:8])
_, count, width = json.loads(data[8 : 8 + length])["logits"]["shape"]
logits = array.array("f", data[8 + length :])
short, same = 0.0, 0
for at, token in enumerate(ids[1], len(ids[0]) - 1):
    row = logits[at * width : (at + 1) * width]
    short, same = max(short, max(row) - row[token]), same + (row[token] == max(row))
loss = json.loads(pathlib.Path(run, "metrics.jsonl").read_text().splitlines()[-1]).get("loss")
print(f"loss {loss}; {same} of {len(ids[1])} cached tokens are the likeliest of one pass, the others by {short:.3g} less")
# bf16 has eight digits of two, and logits are below 16.
sys.exit(not ids[1] or short > 0.125)
PYTHON
  echo "train: $(tail -1 "$out/cached.txt")"
}

for part in "${parts[@]}"; do "$part"; done
exit $failed
