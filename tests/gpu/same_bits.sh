#!/usr/bin/env bash
# Whether a token has one log-probability with --same-bits on an H100 or H200: 85M models of each kind that has, and
# 1.7B of three, among 1 to 64 texts behind 1 to 32,000 tokens, some 100,000 tokens in all. Each is sampled by a server
# and scored by `echo` (lab/experiments/same_bits.py), three texts of a model by `eval ppl` too. A line of JSON a model
# and kind of texts; ends with 1 where a number differs. Last comes the control without the flag, where most differ.
#
#   tests/gpu/same_bits.sh SIEVE OUT [80m|1p7b|long|control]…
#
# 80m      mha, swa, dma, cowa, nsa, msa, moba, infllm_v2: 1, 4, 16 and 64 texts behind up to 2,000 tokens
# 1p7b     mha, swa, dma: 1 and 16 texts behind up to 2,000 tokens
# long     all models of 80m: 4 texts behind up to 32,000 tokens
# control  mha and dma of 85M without the flag: 4 texts behind up to 6,000 tokens
#
# TOKENS (48) a text. Models have random weights (lab/experiments/serve_models.py). DEVICE=cpu with a short CONTEXT
# (32768) and fewer TEXTS tries the script; there the control finds nothing.
set -uo pipefail
sieve="$1" out="$2"
shift 2
parts=("$@")
[ "$#" -gt 0 ] || parts=(80m 1p7b long control)
device="${DEVICE:-cuda}" tokens="${TOKENS:-48}" context="${CONTEXT:-32768}" failed=0
here="$(cd "$(dirname "$0")/../.." && pwd)/lab/experiments"
where=(--device "$device" --context "$context")
small="80m-mha 80m-swa 80m-dma 80m-cowa 80m-nsa 80m-msa 80m-moba 80m-infllm_v2" large="1p7b-mha 1p7b-swa 1p7b-dma"
mkdir -p "$out"

# MODELS TEXTS LONGEST [FLAGS…]: makes the models that are not there, and compares each model's tokens.
compare() {
  local models=$1 texts="${TEXTS:-$2}" longest=$3 model
  shift 3
  [ "$longest" -lt "$((context - tokens))" ] || longest=$((context - tokens - 1))
  for model in $models; do
    [ -d "$out/$model" ] ||
      python3 "$here/serve_models.py" "$sieve" "$out" "${where[@]}" --models "$model" > "$out/$model.txt" 2>&1 ||
      { echo "$model: FAILED: $(tail -1 "$out/$model.txt")"; failed=1; continue; }
    # shellcheck disable=SC2086
    python3 "$here/same_bits.py" "$sieve" "$out/$model" "${where[@]}" --texts $texts --tokens "$tokens" \
      --longest "$longest" "$@" || failed=1
  done
}

for part in "${parts[@]}"; do
  case "$part" in
    80m) compare "$small" "1 4 16 64" 2000 --eval 3 --same-bits ;;
    1p7b) compare "$large" "1 16" 2000 --eval 3 --same-bits ;;
    long) compare "$small" 4 32000 --same-bits ;;
    control)
      before=$failed
      compare "80m-mha 80m-dma" 4 6000
      # A control that finds nothing is no control.
      case "$before$failed" in
        01) failed=0 ;;
        00) echo "control: FAILED: no token differs without the flag" && failed=1 ;;
      esac
      ;;
    *) echo "$part is none of 80m, 1p7b, long, control"; exit 2 ;;
  esac
done
exit "$failed"
