#!/usr/bin/env bash
# Tokens a second of `sieve serve` and of transformers' continuous batching (`generate_batch`) on the same dense export,
# with 1, 16 and 64 clients, side by side; and whether the greedy texts are the same.
#
#   lab/rivals/serve_rivals.sh SIEVE EXPORT OUT
#
# EXPORT is a folder that transformers opens (dense: `sieve export`). DEVICE (cuda), PYTHON (python3 with torch and
# transformers), CLIENTS ("1 16 64"), NEW tokens of a text, a number for each of CLIENTS and the same for both sides
# ("128 128 64": 64 texts of 128 take transformers too long), PROMPT tokens (128), MAX_TEXTS for a second server (empty:
# none; the first one has `serve`'s default), LIMIT seconds for each program (50). Predicted on one H100: 20 s a server,
# 45 s for transformers. What a program measured before its limit is kept. `DEVICE=cpu NEW="8 8 8"` with a small export
# tries it.
set -uo pipefail
sieve="$1" export="$2" out="$3"
device="${DEVICE:-cuda}" python="${PYTHON:-python3}" clients="${CLIENTS:-1 16 64}"
prompt="${PROMPT:-128}" new="${NEW:-128 128 64}" limit="${LIMIT:-50}"
here="$(cd "$(dirname "$0")" && pwd)"
mkdir -p "$out"
failed=0

# Serves with these flags and asks; the numbers go to OUT/NAME.json.
serve() {
  local name="$1" log="$out/$1.log"
  shift
  : > "$log"
  "$sieve" serve --checkpoint "$export" --device "$device" --port 0 "$@" > "$log" 2> "$log.err" &
  local server=$!
  until grep -q '/v1:' "$log"; do
    kill -0 $server 2> /dev/null || { echo "FAILED: the server ended"; cat "$log.err"; failed=1; return; }
    sleep 0.1
  done
  grep '/v1:' "$log"
  local address
  address="$(sed -n 's|.*http://\([^/]*\)/v1.*|\1|p' "$log")"
  timeout "$limit" "$python" "$here/serve/clients.py" "$address" "$export" "$prompt" "$new" "$out/$name.json" \
    "$clients" || { echo "FAILED: $name"; failed=1; }
  kill -TERM $server
  wait $server || { echo "FAILED: the server's exit code"; failed=1; }
}

serve sieve
[ -z "${MAX_TEXTS:-}" ] || serve "sieve_$MAX_TEXTS" --max-texts "$MAX_TEXTS"
timeout "$limit" "$python" "$here/serve/batching.py" "$export" "$device" "$prompt" "$new" "$out/transformers.json" \
  "$clients" 2> "$out/transformers.err" || { echo "FAILED: transformers"; tail -5 "$out/transformers.err"; failed=1; }
"$python" "$here/serve/table.py" "$out"/*.json
exit $failed
