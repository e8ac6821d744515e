#!/usr/bin/env bash
# Texts of different lengths, and decode selectors, on a GPU: seconds of each program, and how many of its greedy
# answers are those of the first program.
#
#   tests/gpu/together.sh CHECKPOINT TEXT OUT PROGRAM…
#
# PROMPTS (64) pieces of TEXT, of up to LONGEST (2000) bytes, are answered with TOKENS (200) tokens by `sieve eval
# tasks`, all together and under each of SELECTORS. DEVICE=cpu tries the script.
set -uo pipefail
checkpoint="$1" text="$2" out="$3"
shift 3
device="${DEVICE:-cuda}" prompts="${PROMPTS:-64}" longest="${LONGEST:-2000}" tokens="${TOKENS:-200}"
selectors="${SELECTORS-snapkv:capacity=64,window=8 h2o:heavy=32,recent=32}"
mkdir -p "$out"
printf 'measure = "generation"\nprompt = "{q}"\nanswers = "a"\nmax_new_tokens = %d\n' "$tokens" > "$out/mine.toml"
# Letters and spaces alone, so that a piece needs no escapes. Lengths go up and down.
tr -c 'A-Za-z .,' ' ' < "$text" | tr -s ' ' | head -c $((prompts * longest)) |
  awk -v n="$prompts" -v most="$longest" '{ for (i = 0; i < n; i++) {
    length_of = 1 + (i * 37 + 11) % n * most / n
    printf "{\"q\": \"%s\", \"a\": [\"x\"]}\n", substr($0, i * most + 1, length_of) } }' > "$out/mine.jsonl"
failed=0
# Answers the prompts of FILE by every program; further arguments go to the command.
answers() {
  local name="$1" file="$2" number=0
  shift 2
  for program in "${programs[@]}"; do
    number=$((number + 1))
    local said="$out/$name-$number" began
    began=$(date +%s.%N)
    if ! "$program" eval tasks --checkpoint "$checkpoint" --device "$device" --data "$out/mine.toml=$file" \
      --samples "$said.jsonl" "$@" > "$said.txt" 2>&1; then
      echo "$name: $program FAILED, see $said.txt"
      failed=1
      continue
    fi
    local same
    same=$(paste -d '\n' "$out/$name-1.jsonl" "$said.jsonl" |
      awk 'NR % 2 { first = $0; next } first == $0 { n++ } END { print n + 0 }')
    printf '%-32s program %d: %6.2f s, %d of %d answers as the first program\n' "$name" "$number" \
      "$(awk "BEGIN { print $(date +%s.%N) - $began }")" "$same" "$(wc -l < "$said.jsonl")"
  done
}
programs=("$@")
answers together "$out/mine.jsonl"
# A selector's texts are decoded one after another.
head -n 4 "$out/mine.jsonl" > "$out/few.jsonl"
for selector in $selectors; do answers "${selector%%:*}" "$out/few.jsonl" --selector "$selector"; done
exit $failed
