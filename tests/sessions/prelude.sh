# Functions for the commands of sessions; `sieve` is the built program.
set -e
STAGES='[[stage]]\nsteps = 13\n[[stage]]\nsteps = 14\nseq_len = 64\nrope_theta = 50000.0\nlocal_batch_size = 2\n'
STAGES="$STAGES"'global_batch_size = 4\n[[stage]]\nsteps = 13\nwindow = 16'
train() { o=$1; shift; sieve train --recipe tiny.toml --device cpu --out "$o" "$@"; }
launch() { n=$1 o=$2; shift 2; sieve launch --nproc "$n" -- train --recipe tiny.toml --device cpu --out "$o" "$@"; }
# $R0 and $R1 COMMAND: as torchrun starts one of two ranks
OF="env WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$PORT"
R0="$OF RANK=0 LOCAL_RANK=0" R1="$OF RANK=1 LOCAL_RANK=1"
# metric KIND OUT STEP: a line of metrics.jsonl
metric() { grep "\"kind\":\"$1\",\"step\":$3," "$2/metrics.jsonl"; }
# count FILE TEXT: how often it is there
count() { grep -oF -- "$2" "$1" | wc -l; }
# repeat COUNT TEXT, where `\n` is the end of a line
repeat() { seq "$1" | while read -r _; do printf %b "$2"; done; }
# tensor FILE NAME TYPE: values of a safetensors file, one a line, as `od` prints 32 bits of this type: f4, d4
tensor() {
  header=$(($(od -An -td8 -N 8 "$1") + 8))
  place=$(head -c $header "$1" | grep -ao "\"$2\":{[^}]*" | sed 's/.*\[//; s/\].*//')
  tail -c +$((header + ${place%,*} + 1)) "$1" | head -c $((${place#*,} - ${place%,*})) | od -An -v -w4 -t$3
}
# put FILE TEXT
put() { printf %b "$2" > "$1"; }
# fails CODE COMMAND
fails() { w=$1 c=0; shift; "$@" || c=$?; [ "$c" = "$w" ]; }
# refused COMMAND: it fails with any code
refused() { c=0; "$@" || c=$?; [ "$c" != 0 ]; }
# each_line_in FILE OTHER: every line of one file is in the other
each_line_in() { while IFS= read -r l; do grep -qF -- "$l" "$2" || { echo "$l is not in $2"; exit 1; }; done < "$1"; }
# once COMMAND: its error, which must be one
once() {
  c=0; "$@" 2> .error || c=$?; cat .error >&2
  n=$(count .error error:); rm .error; [ "$n" = 1 ] && return "$c"
}
# mends COMMAND: its error says how to mend it; a value of the wrong kind is mended by what it is said to be
mends() {
  c=0; "$@" 2> .error || c=$?; cat .error >&2
  grep -q '^error: ' .error && grep -qE 'hint:|--help|tip:|wanted |, outside |expected |it must be |not a finite number' \
    .error || c=99
  rm .error; return "$c"
}
# flip FILE BYTE BIT: changes a bit
flip() {
  byte=$(od -An -tu1 -j "$2" -N 1 "$1")
  printf "\\$(printf %o $((byte ^ (1 << $3))))" | dd of="$1" bs=1 seek="$2" conv=notrunc 2> /dev/null
}
# sums: all files that are not hidden, with what they hold
sums() { find . -type f ! -path './.*' -exec sha256sum {} + | sort; }
# kill_at OUT STEP COMMAND: kills it when the checkpoint of that step is there
kill_at() { d=$1/checkpoint/step-$2; shift 2; "$@" > killed.log & p=$!; while [ ! -d "$d" ]; do kill -0 $p; sleep 0.01;
done; kill -9 $p; wait $p || true; }
# shown FILE WORDS: waits until a file has a line of these words, a pattern
shown() { until grep -q -- "$2" "$1" 2> /dev/null; do kill -0 $p; sleep 0.01; done; }
# started LOG WORDS COMMAND: starts it as process $p, its output in LOG and LOG.err, and waits until LOG has these words
started() { log=$1 words=$2; shift 2; rm -f "$log"; "$@" > "$log" 2> "$log.err" & p=$!; shown "$log" "$words"; }
# ended CODE: the process ends, by itself, with this exit code
ended() { fails "$1" wait $p; }
# ranks LAUNCHER: the processes of the ranks that it has started, in their order
ranks() {
  for id in $(cat "/proc/$1/task/$1/children"); do
    rank=$(tr '\0' '\n' < "/proc/$id/environ" 2> /dev/null | sed -n 's/^RANK=//p'); [ -z "$rank" ] || echo "$rank $id"
  done | sort -n | cut -d' ' -f2
}
# gone PROCESS..: they have ended; one that was not waited for has no command line
gone() { for id; do [ -z "$(tr -d '\0' 2> /dev/null < "/proc/$id/cmdline")" ] || return 1; done; }
# follow FILE: types each line under `next:` in it, and each that those suggest, once; `typed` has them all. A line of
# Python where it can be run.
suggested() { awk '/^next:$/ { on = 1; next } on && /^  / { sub(/^ */, ""); print; next } { on = 0 }' "$1"; }
follow() {
  : > typed; suggested "$1" > open; [ -s open ]
  while [ -s open ]; do
    line=$(head -n 1 open); sed -i 1d open
    case $line in python3*) "${SIEVE_PYTHON:-python3}" -c 'import torch, transformers' 2> /dev/null || continue; esac
    grep -qxF -- "$line" typed && continue
    echo "$line" | tee -a typed >&2; sh -c "$line" > printed 2> .error || { cat .error >&2; exit 1; }
    cat .error >> printed; suggested printed >> open
  done
}
# staged FILE STAGES: the recipe with these lines for its steps
staged() { awk -v s="$2" '/^steps = 40/ { next } /^\[optimizer\]/ { print s } { print }' tiny.toml > "$1"; }
