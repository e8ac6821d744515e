#!/usr/bin/env bash
# First token, density, loss and needles of one dense model under every fast method, from 2K to 128K tokens: a JSON file a
# method and measurement in OUT, read by table.py.
#
#   lab/experiments/long/score.sh SIEVE CHECKPOINT TEXT.jsonl OUT
#
# GPUS (4) devices take the methods in turn; LENGTHS, METHODS, STREAMS, NEEDLES, WINDOWS and LIMIT (seconds a command) may
# be set, and PARTS: of `time`, `needle` and `stream` those that are wanted. DEVICE=cpu with short lengths tries the
# script. A command that fails leaves its words in OUT/NAME.txt, and the others go on; a second call with the same OUT
# repeats nothing that succeeded. Decode methods read a prompt token by token, all but quest on the CPU.
set -uo pipefail
sieve="$1" checkpoint="$2" text="$3" out="$4"
lengths="${LENGTHS:-2048,8192,32768,65536,131072}" limit="${LIMIT:-100}" gpus="${GPUS:-4}" needles="${NEEDLES:-2}"
parts=" ${PARTS:-time needle stream} " windows="${WINDOWS:-2}"
methods=(${METHODS:-bfla momo ba_att pbs xattention meanpool:top_k=64 flexprefill:gamma=0.9 vertical_slash a_shape delta infinitehip})
streams=(${STREAMS:-quest snapkv h2o streamingllm infllm})
mkdir -p "$out"
# one DEVICE NAME arguments…: a command's JSON, its words, its seconds.
one() {
  local device="$1" name="$2" began code
  [[ "$parts" == *" ${name%%-*} "* ]] && [ ! -s "$out/$name.json" ] || return 0
  began=$(date +%s)
  timeout "$limit" "$sieve" "${@:3}" --device "$device" --json > "$out/$name.json" 2> "$out/$name.txt"
  code=$?
  [ $code = 0 ] || rm -f "$out/$name.json"
  printf '{"name":"%s","exit":%s,"seconds":%s}\n' "$name" "$code" $(($(date +%s) - began)) >> "$out/times.jsonl"
}
lane() {
  local at device="${DEVICE:-cuda:$1}" number=0 method plain
  for method in dense "${methods[@]}"; do
    number=$((number + 1))
    [ $((number % gpus)) = "$1" ] || continue
    plain="${method%%:*}"
    if [ "$method" = dense ]; then
      one "$device" needle-dense eval needle --checkpoint "$checkpoint" --data "$text" --lengths "$lengths" \
        --depths 0,25,50,75,100 --needles "$needles"
      continue
    fi
    for at in ${lengths//,/ }; do
      one "$device" "time-$plain-$at" eval selectors --checkpoint "$checkpoint" --data "$text" --lengths "$at" --windows "$windows" \
        --selector "$method"
    done
    one "$device" "needle-$plain" eval needle --checkpoint "$checkpoint" --data "$text" --lengths "$lengths" \
      --depths 0,25,50,75,100 --needles "$needles" --selector "$method"
  done
  number=0
  for method in "${streams[@]}"; do
    number=$((number + 1))
    [ $((number % gpus)) = "$1" ] || continue
    plain="${method%%:*}"
    one "$device" "stream-$plain" eval selectors --checkpoint "$checkpoint" --data "$text" --lengths "${lengths%%,*}" \
      --windows "$windows" --selector "$method"
    one "$device" "needle-$plain" eval needle --checkpoint "$checkpoint" --data "$text" --lengths "$lengths" \
      --depths 0,25,50,75,100 --needles "$needles" --selector "$method"
  done
}
lines=$(wc -l < "$out/times.jsonl" 2> /dev/null || echo 0)
for number in $(seq 0 $((gpus - 1))); do lane "$number" & done
wait
failed=$(tail -n +$((lines + 1)) "$out/times.jsonl" 2> /dev/null | grep -v '"exit":0,' | sed 's/{"name":"\([^"]*\)".*/\1/')
[ -z "$failed" ] || { echo "failed, each with its words in $out/NAME.txt: "$failed; exit 1; }
