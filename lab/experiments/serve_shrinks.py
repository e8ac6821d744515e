"""How long a stream pauses when the common cache of a GPU's texts grows, and when it shrinks behind them.

    serve_shrinks.py SIEVE CHECKPOINT [--texts 10] [--prompt-tokens 12000] [--stream-tokens 30000] [more flags of serve]

One client streams. The others ask at once for a short answer to a long prompt, and leave; some seconds later the server
gives the memory back that they took. `/metrics` says for how many tokens there is room. Prints a line of JSON: the
stream's median gap, and for each change of the room when it was seen, in seconds behind the others' end, the room
before and after, and the stream's longest gap within 0.1 s of it. A CPU has no common cache, and a line says so.
"""

import json
import re
import sys
import threading
import time
import urllib.request

from serve_waits import parser_of, pauses, run

ROOM = re.compile(r"^sieve_common_cache_tokens (\d+)$", re.MULTILINE)
NEAR = 0.1  # seconds between a change and a gap that belongs to it: /metrics is asked some times in this time
WAIT = 12  # seconds behind the last text, of which the server waits for five


def room_of(server):
    """Tokens for which the common cache has room."""
    with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=60) as answer:
        return int(ROOM.search(answer.read().decode())[1])


def measure(server, args):
    """Streams, lets the others come and go, and prints the pauses."""
    prompt = list(range(100, 200))
    server.ask({"prompt": prompt, "max_tokens": 8, "ignore_eos": True})  # compiles kernels
    times, changes, ended = [], [], threading.Event()

    def stream():
        """Reads one long stream and notes when each of its tokens comes."""
        body = {"prompt": prompt, "max_tokens": args.stream_tokens, "temperature": 0, "ignore_eos": True, "logprobs": 0,
                "stream": True}
        with server.open("/v1/completions", body) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    times.append(time.monotonic())
                if ended.is_set():
                    return

    def watch():
        """Notes when the common cache's room changes, and from what to what."""
        before = room_of(server)
        while not ended.is_set():
            now = room_of(server)
            if now != before:
                changes.append((time.monotonic(), before, now))
            before = now
            time.sleep(0.01)

    def ask(number):
        server.ask({"prompt": [100 + (37 * number + at) % 800 for at in range(args.prompt_tokens)], "max_tokens": 8,
                    "ignore_eos": True})

    threads = [threading.Thread(target=work) for work in (stream, watch)]
    for thread in threads:
        thread.start()
    time.sleep(1)
    others = [threading.Thread(target=ask, args=(number,)) for number in range(args.texts)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    end = time.monotonic()
    time.sleep(WAIT)
    is_streaming = threads[0].is_alive()
    ended.set()
    for thread in threads:
        thread.join()
    if not is_streaming:
        sys.exit(f"the stream of {args.stream_tokens} tokens ended before the measurement: add --stream-tokens")
    if not changes:
        print("no change of the room: a CPU has no common cache, nor has a model whose texts have a cache each")
        return
    gaps = list(zip(times, times[1:]))
    near = lambda at: [later - earlier for earlier, later in gaps if earlier - NEAR <= at <= later + NEAR]  # noqa: E731
    seen = [{"at": round(at - end, 2), "room": [before, now], "gap_longest": round(max(near(at), default=0.0), 4)}
            for at, before, now in changes]
    print(json.dumps({"gap_median": pauses(times)["median"], "changes": seen}))


def main():
    """Measures a server."""
    words = parser_of(__doc__)
    words.add_argument("--texts", type=int, default=10)
    words.add_argument("--prompt-tokens", type=int, default=12_000)
    words.add_argument("--stream-tokens", type=int, default=30_000)
    run(words, measure)


if __name__ == "__main__":
    main()
