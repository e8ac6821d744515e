"""Whether `sieve serve` gives a prompt that is read in parts the answer of one that is read whole, and how long streams
wait for the parts.

    serve_parts.py SIEVE CHECKPOINT [--prompt-tokens 30000] [--prompts 4] [--answer-tokens 32] [--streams 1]
        [--device cuda] [--max-texts 8] [more flags of serve]

A GPU reads a prompt whole while no text is open, and in parts beside streams. Each prompt is asked for alone and then
beside streams, with a greedy answer. Prints a line of JSON: tokens of the answers, how many of them were drawn behind
the same tokens, how many of those differ in their log-probability and by how much at most in nats, and how many answers
are other tokens; the median gap of a stream alone; by prompt the longest gap of the streams while the prompt was read,
and the seconds to the end of its answer, alone and beside the streams. The first prompt, for which a GPU compiles
kernels, is not counted.
"""

import json
import random
import threading
import time

from serve_waits import parser_of, pauses, run


def ask(server, prompt, tokens):
    """A greedy answer to a prompt: its tokens, their log-probabilities, and its seconds."""
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
    answer, seconds = server.ask(body)
    choice = answer["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], seconds


def beside(server, streams, stream, work):
    """What `work` returns, and the times at which the pieces of each stream arrived while it ran."""
    begun, times = threading.Barrier(streams + 1), [[] for _ in range(streams)]
    stops = threading.Event()

    def read(number):
        """Reads streams, one after another, until the work is done."""
        begun.wait()
        while not stops.is_set():
            with server.open("/v1/completions", {"temperature": 0, "stream": True, "seed": number, **stream}) as answer:
                for line in answer:
                    if line.startswith(b"data: {"):
                        times[number].append(time.monotonic())
                    if stops.is_set():
                        break

    readers = [threading.Thread(target=read, args=(number,)) for number in range(streams)]
    for reader in readers:
        reader.start()
    begun.wait()
    while not all(len(of) > 20 for of in times):
        time.sleep(0.01)
    first = time.monotonic()
    try:
        done = work()
    finally:
        last = time.monotonic()
        stops.set()
        for reader in readers:
            reader.join()
    return done, [[moment for moment in of if first <= moment <= last] for of in times]


def measure(server, args):
    """Asks the server, and prints what it answered."""
    stream = {"prompt": [100 + 7 * at for at in range(100)], "max_tokens": args.stream_tokens, "logprobs": 0,
              "ignore_eos": True}
    row = {"tokens": 0, "behind_same": 0, "differ": 0, "largest_nats": 0.0, "other_answers": 0, "gap_longest": [],
           "seconds_alone": [], "seconds_beside": []}
    row["gap_median"] = pauses(server.stream({**stream, "max_tokens": 200}))["median"]
    for number in range(args.prompts + 1):
        prompt = random.Random(number).choices(range(100, 1000), k=args.prompt_tokens)
        alone, scores, seconds = ask(server, prompt, args.answer_tokens)
        (parted, parted_scores, parted_seconds), times = beside(
            server, args.streams, stream, lambda prompt=prompt: ask(server, prompt, args.answer_tokens))
        if number == 0:
            continue
        same = next((at for at, pair in enumerate(zip(alone, parted)) if pair[0] != pair[1]), len(alone))
        apart = [abs(a - b) for a, b in zip(scores[:same], parted_scores[:same])]
        row["tokens"] += len(alone)
        row["behind_same"] += same
        row["differ"] += sum(gap > 0 for gap in apart)
        row["largest_nats"] = max([row["largest_nats"], *apart])
        row["other_answers"] += same < len(alone)
        row["gap_longest"].append(round(max(pauses(of)["longest"] for of in times), 4))
        row["seconds_alone"].append(round(seconds, 4))
        row["seconds_beside"].append(round(parted_seconds, 4))
    print(json.dumps({"prompt_tokens": args.prompt_tokens, **row}), flush=True)


def main():
    """Measures a server."""
    words = parser_of(__doc__)
    words.add_argument("--prompt-tokens", type=int, default=30_000)
    words.add_argument("--prompts", type=int, default=4)
    words.add_argument("--answer-tokens", type=int, default=32)
    words.add_argument("--stream-tokens", type=int, default=8000)
    words.add_argument("--streams", type=int, default=1)
    run(words, measure)


if __name__ == "__main__":
    main()
