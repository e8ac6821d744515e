"""How long a stream pauses when the common cache of a GPU's texts grows, and when it shrinks behind them.

    serve_shrinks.py SIEVE CHECKPOINT [--texts 10] [--prompt-tokens 12000] [--stream-tokens 1800] [more flags of serve]

One client streams, one short text after another. The others ask at once for a short answer to a long prompt, and leave.
The server gives the memory back that they took once open and kept texts have needed a quarter of it or less for five
seconds, so the streamed texts must stay short, and the prompts shorter than those that a GPU keeps (docs/serving.md).
`/metrics` says for how many tokens there is room. Prints a line of JSON: the stream's median gap, and for each change
of the room when it was seen, in seconds behind the others' end, the room before and after, and the stream's longest gap
within 0.1 s of it, which is also the time between two streamed texts where one ends just then. A CPU has no common
cache, and a line says so.
"""

import json
import re
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from serve_parts import beside
from serve_waits import parser_of, pauses, run

ROOM = re.compile(r"^sieve_common_cache_tokens (\d+)$", re.MULTILINE)
NEAR = 0.1  # seconds between a change and a gap that belongs to it: /metrics is asked some times in this time
WAIT = 12  # seconds behind the last text, of which the server waits for five


def room_of(server):
    """Tokens for which the common cache has room."""
    with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=60) as answer:
        return int(ROOM.search(answer.read().decode())[1])


def others(server, args):
    """Lets the others come and go. Returns when the last one had its answer, and the changes of the room."""
    ended = threading.Event()

    def watch():
        """When the room changes, and from what to what."""
        changes, before = [], room_of(server)
        while not ended.wait(0.01):
            now = room_of(server)
            if now != before:
                changes.append((time.monotonic(), before, now))
            before = now
        return changes

    def ask(number):
        server.ask({"prompt": [100 + (37 * number + at) % 800 for at in range(args.prompt_tokens)], "max_tokens": 8,
                    "ignore_eos": True})

    with ThreadPoolExecutor(args.texts + 1) as pool:
        watching = pool.submit(watch)
        try:
            list(pool.map(ask, range(args.texts)))
            end = time.monotonic()
            time.sleep(WAIT)
        finally:
            ended.set()
        return end, watching.result()


def measure(server, args):
    """Streams, lets the others come and go, and prints the pauses."""
    stream = {"prompt": list(range(100, 200)), "max_tokens": args.stream_tokens, "ignore_eos": True, "logprobs": 0}
    server.ask({**stream, "max_tokens": 8})  # compiles kernels
    (end, changes), [times] = beside(server, 1, stream, lambda: others(server, args))
    if not changes:
        print("no change of the room: a CPU has no common cache, nor has a model whose texts have a cache each")
        return
    gaps = list(zip(times, times[1:]))
    near = lambda at: [later - earlier for earlier, later in gaps if earlier - NEAR <= at <= later + NEAR]  # noqa: E731
    seen = [{"at": round(at - end, 2), "room": [before, now], "gap_longest": round(max(near(at), default=0.0), 4)}
            for at, before, now in changes]
    print(json.dumps({"gap_median": pauses(times)["median"], "changes": seen}))
    if all(before < now for _, before, now in changes):
        sys.exit("the room did not shrink: open and kept texts need more than a quarter of it; use longer prompts that "
                 "are not kept, or fewer --stream-tokens")


def main():
    """Measures a server."""
    words = parser_of(__doc__)
    words.add_argument("--texts", type=int, default=10)
    words.add_argument("--prompt-tokens", type=int, default=12_000)
    words.add_argument("--stream-tokens", type=int, default=1800)
    run(words, measure)


if __name__ == "__main__":
    main()
