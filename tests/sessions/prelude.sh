# Functions for the commands of sessions; `sieve` is the built program.
set -e
STAGES='[[stage]]\nsteps = 13\n[[stage]]\nsteps = 14\nseq_len = 64\nrope_theta = 50000.0\nlocal_batch_size = 2\n'
STAGES="$STAGES"'global_batch_size = 4\n[[stage]]\nsteps = 13\nwindow = 16'
train() { o=$1; shift; sieve train --recipe tiny.toml --device cpu --out "$o" "$@"; }
launch() { n=$1 o=$2; shift 2; sieve launch --nproc "$n" -- train --recipe tiny.toml --device cpu --out "$o" "$@"; }
# metric KIND OUT STEP: a line of metrics.jsonl
metric() { grep "\"kind\":\"$1\",\"step\":$3," "$2/metrics.jsonl"; }
# count FILE TEXT: how often it is there
count() { grep -oF -- "$2" "$1" | wc -l; }
# repeat COUNT TEXT, where `\n` is the end of a line
repeat() { seq "$1" | while read -r _; do printf %b "$2"; done; }
# put FILE TEXT
put() { printf %b "$2" > "$1"; }
# fails CODE COMMAND
fails() { w=$1 c=0; shift; "$@" || c=$?; [ "$c" = "$w" ]; }
# each_line_in FILE OTHER: every line of one file is in the other
each_line_in() { while IFS= read -r l; do grep -qF -- "$l" "$2" || { echo "$l is not in $2"; exit 1; }; done < "$1"; }
# once COMMAND: its error, which must be one
once() {
  c=0; "$@" 2> .error || c=$?; cat .error >&2
  n=$(count .error error:); rm .error; [ "$n" = 1 ] && return "$c"
}
# kill_at OUT STEP COMMAND: kills it when the checkpoint of that step is there
kill_at() { d=$1/checkpoint/step-$2; shift 2; "$@" > killed.log & p=$!; while [ ! -d "$d" ]; do kill -0 $p; sleep 0.01;
done; kill -9 $p; wait $p || true; }
# staged FILE STAGES: the recipe with these lines for its steps
staged() { awk -v s="$2" '/^steps = 40/ { next } /^\[optimizer\]/ { print s } { print }' tiny.toml > "$1"; }
