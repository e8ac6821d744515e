#!/usr/bin/env bash
# Decoding as people do it, beside greedy tokens: tokens a second of one text, of 16 and of 64, and of 64 clients of `serve`, each greedily, at
# generate's defaults (0.8, top-p 0.95) and at temperature 1 from all tokens. A line a program, so that two can be compared in one call.
#
#   tests/gpu/sampling.sh CHECKPOINT OUT SIEVE [SIEVE]…
#
# TOKENS (300) a text, DEVICE (cuda), PORT (8123). DEVICE=cpu TOKENS=8 COUNTS="1 2" tries the script. About 90 s a program on an H200.
set -uo pipefail
[ "$#" -ge 3 ] || { sed -n '/^#   tests/s/^# *//p' "$0"; exit 2; }
checkpoint="$1" out="$2"
shift 2
device="${DEVICE:-cuda}" tokens="${TOKENS:-300}" port="${PORT:-8123}"
mkdir -p "$out"
clients() { # ADDRESS COUNT TEMPERATURE TOP_P
  python3 - "$@" "$tokens" <<'PY'
import http.client, json, sys, time
from concurrent.futures import ThreadPoolExecutor
address, count, temperature, top_p, tokens = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
def ask(seed):
    body = {"prompt": "fn main() {", "max_tokens": tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    connection = http.client.HTTPConnection(address, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    return json.loads(connection.getresponse().read())["usage"]["completion_tokens"]
ask(0)
rates = []
for _ in range(2):  # the first round warms up
    begun = time.monotonic()
    with ThreadPoolExecutor(count) as pool:
        done = sum(pool.map(ask, range(count)))
    rates.append(done / (time.monotonic() - begun))
print(f"{rates[-1]:.0f}")
PY
}
for sieve in "$@"; do
  "$sieve" --version
  for draw in "0 1" "0.8 0.95" "1 1"; do
    read -r temperature top_p <<< "$draw"
    for count in ${COUNTS:-1 16 64}; do
      log="$out/$(basename "$sieve")-$temperature-$count.txt"
      "$sieve" generate --checkpoint "$checkpoint" --device "$device" --prompt 'fn main() {' --temperature "$temperature" --top-p "$top_p" \
        --samples "$count" --max-new-tokens "$tokens" > "$log" 2>&1 || { echo "FAILED: see $log"; exit 1; }
      rate=$(grep -oE '[0-9.,]+ (tokens )?a second' "$log" | tail -1)
      printf 'generate, temperature %-4s top-p %-5s %3s texts: %s\n' "$temperature" "$top_p" "$count" "$rate"
    done
  done
  "$sieve" serve --checkpoint "$checkpoint" --device "$device" --port "$port" --max-texts 64 --max-context 512 > "$out/serve.log" 2>&1 &
  server=$!
  for _ in $(seq 240); do (exec 3<> "/dev/tcp/localhost/$port") 2> /dev/null && break; sleep 0.5; done
  for draw in "0 1" "0.8 0.95" "1 1"; do
    read -r temperature top_p <<< "$draw"
    count="${CLIENTS:-64}"
    printf 'serve, temperature %-4s top-p %-5s %3s clients: %s tokens a second\n' "$temperature" "$top_p" "$count" \
      "$(clients "localhost:$port" "$count" "$temperature" "$top_p")"
  done
  kill "$server"
  wait "$server" 2> /dev/null
done
