"""`sieve serve` under load: prompts and answers of published lengths, from 64 clients or at random moments.

    serve_load.py SIEVE CHECKPOINT [--cells lone full half texts parts] [--samplings greedy default] [--seconds 12] [--warm 4]
        [--clients 64] [--shares 0.5] [--longest 32000] [--out FILE] [--label KEY=VALUE…]
        [--device cuda] [--max-texts 64] [more flags of serve]

Lengths are drawn from those of two published sets of requests, see `MIX`. The cells, in this order:

lone    a prompt alone: seconds to its first token by length, of the first such prompt, the faster of two later ones, and
        the faster of the first two of one and two tokens more
full    --clients clients, each of which asks again when it has its answer: the most tokens a second
half    requests at random moments (Poisson), at each of --shares of the request rate at which `full` gave its tokens
texts   --texts samples of one prompt of --longest tokens, greedy: tokens a second of decoding
parts   three prompts of --longest tokens beside one stream: their parts in seconds, as the stream sees them; then
        so many new tokens behind a quarter of it that is kept, where the server keeps so few

Each prints a line of JSON, and a table of the load follows. Random moments end after --seconds; requests that have no
first token --grace seconds later count with the time until then. A request's time is also divided by that of a prompt
of its length alone, where `lone` was measured. Of `full` the first third of the time is not counted.
"""

import dataclasses
import heapq
import itertools
import json
import random
import selectors
import socket
import statistics
import time
import urllib.request

from serve_waits import ids, parser_of, pauses, run

# Every twentieth part of the lengths of prompts and answers, from the shortest to the longest, in tokens: conversations
# of Azure's trace of 2023 (arXiv:2311.18677, 19,366 requests; AzureLLMInferenceTrace_conv.csv of
# github.com/Azure/AzurePublicDataset) and of Mooncake's (arXiv:2407.00079, 12,031 requests; conversation_trace.jsonl of
# github.com/kvcache-ai/Mooncake, FAST25-release). Half of the requests are of each. Between two of these numbers every
# length is as likely; prompt and answer are drawn apart.
MIX = [
    ([2, 181, 207, 372, 387, 396, 403, 414, 703, 984, 1020, 1045, 1071, 1097, 1130, 1189, 1315, 1877, 2735, 4083, 14050],
     [7, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384, 395, 400, 411, 424, 451, 1000]),
    ([891, 901, 964, 1261, 1662, 2306, 3263, 4250, 4993, 5870, 6909, 8187, 9570, 11239, 13196, 15368, 17869, 21467, 27367,
      39552, 126195],
     [1, 10, 24, 46, 100, 156, 213, 256, 291, 322, 350, 375, 399, 423, 447, 472, 504, 543, 597, 698, 2000]),
]
SHORTEST, LONGEST_ANSWER = 100, 768
SAMPLINGS = {"greedy": {"temperature": 0}, "default": {}}
LONE = [100, 500, 1000, 2000, 4000, 8000, 16000, 32000]
# Tokens are numbers of three digits, so that a prompt is a part of one text.
DIGITS = ",".join(map(str, random.Random(3).choices(range(100, 1000), k=100_000)))
TOKEN = b'"finish_reason":null'


def length(quantiles, draw):
    """A length between two neighbouring quantiles."""
    at = draw.randrange(len(quantiles) - 1)
    return round(draw.uniform(quantiles[at], quantiles[at + 1]))


def sizes(draw, longest):
    """Tokens of a prompt and of its answer."""
    prompts, answers = draw.choice(MIX)
    prompt, answer = length(prompts, draw), length(answers, draw)
    return min(max(prompt, SHORTEST), longest), min(max(answer, 1), LONGEST_ANSWER)


def mean_answer(longest):
    """Mean tokens of an answer."""
    draw = random.Random(11)
    return statistics.mean(sizes(draw, longest)[1] for _ in range(20_000))


def prompt_of(tokens, number):
    """The JSON of a prompt that shares no beginning with that of another number."""
    first = number * 7919 % (100_000 - tokens)
    return f"[{DIGITS[4 * first:4 * (first + tokens) - 1]}]"


@dataclasses.dataclass
class Asked:
    """A request: tokens of its prompt and its answer, when it was to be sent, and when each token came."""
    prompt: int
    answer: int
    begun: float
    times: list = dataclasses.field(default_factory=list)

    def first(self, until):
        """Seconds to the first token, or until a moment without one."""
        return (self.times[0] if self.times else until) - self.begun


class Client:
    """A connection over which a stream is asked for and read."""

    def __init__(self, server, asked, number, sampling, more):
        """Connects; the prompt is the one of this number."""
        fields = {"max_tokens": asked.answer, "stream": True, "ignore_eos": True, "seed": number, **sampling, **more}
        body = f'{{"prompt":{prompt_of(asked.prompt, number)},{json.dumps(fields)[1:]}'
        self.asked, self.tail, self.has_ended = asked, b"", False
        self.left = (f"POST /v1/completions HTTP/1.1\r\nHost: {server.address}\r\nContent-Type: application/json\r\n"
                     f"Content-Length: {len(body)}\r\n\r\n{body}").encode()
        host, port = server.address.split(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.setblocking(False)

    def write(self):
        """Sends more of the request; returns whether something is left."""
        self.left = self.left[self.socket.send(self.left):]
        return bool(self.left)

    def read(self, now):
        """Takes what has come."""
        got = self.socket.recv(1 << 16)
        text = self.tail + got
        if not self.asked.times and text.startswith(b"HTTP/1.1 ") and not text.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"the server refused a request: {text.decode()}")
        # What is kept may hold an event's beginning, but no whole mark again.
        self.asked.times += [now] * text.count(TOKEN)
        self.tail = text[max(text.rfind(TOKEN) + len(TOKEN), len(text) - len(TOKEN) + 1):] if len(text) > 20 else text
        self.has_ended = not got or b"[DONE]" in text


def play(server, requests, goes_on, sampling, again=None, more=None):
    """Sends requests at their moments and reads their answers while `goes_on(sent)` says so, which gets those that were
    sent; returns these. `again(now)` is asked for a further request whenever an answer has ended."""
    order = itertools.count()
    waiting = [(asked.begun, next(order), asked) for asked in requests]
    heapq.heapify(waiting)
    sent, watched = [], selectors.DefaultSelector()
    try:
        while goes_on(sent) and (waiting or watched.get_map()):
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                asked = heapq.heappop(waiting)[2]
                client = Client(server, asked, play.number, sampling, more or {})
                play.number += 1
                watched.register(client.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, client)
                sent.append(asked)
            wait = min(waiting[0][0] - now if waiting else 0.1, 0.1)
            for key, events in watched.select(max(wait, 0)):
                client = key.data
                if events & selectors.EVENT_WRITE and not client.write():
                    watched.modify(client.socket, selectors.EVENT_READ, client)
                if events & selectors.EVENT_READ:
                    now = time.monotonic()
                    client.read(now)
                    if client.has_ended:
                        watched.unregister(client.socket)
                        client.socket.close()
                        if again:
                            heapq.heappush(waiting, (now, next(order), again(now)))
    finally:
        for key in list(watched.get_map().values()):
            key.fileobj.close()
        watched.close()
    return sent


play.number = 1  # of the next prompt


def idle(server):
    """Waits until the server has let all texts go."""
    for _ in range(100):
        with urllib.request.urlopen(f"http://{server.address}/metrics") as answer:
            counts = dict(line.rsplit(b" ", 1) for line in answer if b" " in line and not line.startswith(b"#"))
        if all(int(counts[name]) == 0 for name in (b"sieve_open_texts", b"sieve_waiting_texts")):
            return
        time.sleep(0.05)


def quantile(values, share):
    """The value below which a share of the values is; None without one."""
    values = sorted(values)
    return values[min(int(share * len(values)), len(values) - 1)] if values else None


def rounded(value):
    return None if value is None else float(f"{value:.4g}")


def alone(lone, tokens):
    """Seconds to the first token of a prompt alone, between those of two lengths."""
    points = sorted((int(tokens), seconds) for tokens, seconds in lone.items())
    at = next((at for at, (more, _) in enumerate(points[1:], 1) if more >= tokens), len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return max(y0 + (y1 - y0) * (tokens - x0) / (x1 - x0), min(y0, y1))


def summary(sent, begin, end, lone):
    """What was seen between two moments: times to the first token of requests that began then, gaps, tokens a second."""
    begun = [asked for asked in sent if begin <= asked.begun < end]
    first = [asked.first(end) for asked in begun]
    gaps = [later - earlier for asked in sent for earlier, later in zip(asked.times, asked.times[1:])
            if begin <= later < end]
    tokens = sum(begin <= moment < end for asked in sent for moment in asked.times)
    ratios = [seconds / alone(lone, asked.prompt) for asked, seconds in zip(begun, first)] if lone else []
    row = {"requests": len(begun), "without_first": sum(not asked.times for asked in begun),
           "first_median": quantile(first, 0.5), "first_99": quantile(first, 0.99),
           "over_alone_median": quantile(ratios, 0.5), "over_alone_99": quantile(ratios, 0.99),
           "gap_median": quantile(gaps, 0.5), "gap_99": quantile(gaps, 0.99), "gap_longest": max(gaps, default=None),
           "tokens_per_second": tokens / (end - begin)}
    return {key: value if isinstance(value, int) else rounded(value) for key, value in row.items()}


def until(moment):
    """A condition for `play` that holds until a moment."""
    return lambda _: time.monotonic() < moment


def full(play, words, lone):
    """The row of clients that ask again and again. Their first answers are cut at random, so that they do not end
    together. `play` as the function above, for a server and a sampling."""
    draw, begun = random.Random(1), time.monotonic()
    cut = lambda prompt, answer: (prompt, max(round(answer * draw.random()), 1))
    first = [Asked(*cut(*sizes(draw, words.longest)), begun) for _ in range(words.clients)]
    again = lambda now: Asked(*sizes(draw, words.longest), now)
    sent = play(first, until(begun + words.seconds), again)
    return summary(sent, begun + words.seconds / 3, begun + words.seconds, lone)


def at_random(play, words, lone, rate):
    """The row of requests that come at random moments, `rate` a second."""
    draw, begun = random.Random(2), time.monotonic()
    moments, moment, last = [], begun, begun + words.seconds
    while (moment := moment + draw.expovariate(rate)) < last:
        moments.append(moment)
    requests = [Asked(*sizes(draw, words.longest), moment) for moment in moments]
    # All that came in time have their first token, or their time is over.
    goes_on = lambda _: (now := time.monotonic()) < last or (
        now < last + words.grace and not all(asked.times for asked in requests))
    sent = play(requests, goes_on)
    row = summary(sent, begun, time.monotonic(), lone)
    # Tokens are counted while requests come.
    row["tokens_per_second"] = summary(sent, begun + words.seconds / 3, last, {})["tokens_per_second"]
    return {"requests_per_second": rounded(rate), **row}


def lone_times(play, words):
    """Seconds to the first token by length: of a first prompt of this length, of the faster of two more, and of the
    faster of two prompts of lengths that were not read before, one and two tokens longer."""
    def first(tokens):
        asked = Asked(tokens, 1, time.monotonic())
        play([asked], until(asked.begun + 60))
        return asked.first(asked.begun + 60)

    lengths = [tokens for tokens in LONE if tokens < words.longest] + [words.longest]
    times = {str(tokens): [first(tokens + more) for more in (0, 0, 0, 1, 2)] for tokens in lengths}
    fastest = lambda part: {tokens: rounded(min(of[part])) for tokens, of in times.items()}
    return {"first_time": fastest(slice(1)), "again": fastest(slice(1, 3)), "other_length": fastest(slice(3, 5))}


def texts_together(server, words):
    """Tokens a second of samples of one prompt, from the moment at which each of them has some tokens."""
    asked = Asked(words.longest, words.text_tokens, time.monotonic())
    skipped = 8 * words.texts
    limit = asked.begun + words.seconds
    def goes_on(_):
        return (now := time.monotonic()) < limit and (len(asked.times) <= skipped or now < asked.times[skipped] + 4)
    play(server, [asked], goes_on, SAMPLINGS["greedy"], more={"n": words.texts})
    times = asked.times[skipped:]
    rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None
    return {"texts": words.texts, "prompt": words.longest, "first": rounded(asked.first(limit)), "tokens": len(times),
            "tokens_per_second": rounded(rate)}


def parts(server, words):
    """A prompt beside a stream, twice, as the stream sees it; then new tokens behind kept ones, each the second time."""
    row = {"beside_stream": []}
    for number in range(3):
        begun = time.monotonic()
        # The stream lasts longer than the prompt is read.
        stream, prompt = Asked(100, words.longest // 4, begun), Asked(words.longest - number, 1, begun + 0.3)
        sent = play(server, [stream, prompt], lambda sent: not prompt.times and time.monotonic() < begun + 8,
                    SAMPLINGS["greedy"])
        before = [moment for moment in sent[0].times if moment < prompt.begun]
        during = [moment for moment in sent[0].times if moment >= prompt.begun]
        step = pauses(before)["median"] if len(before) > 2 else 0
        gaps = [later - earlier - step for earlier, later in zip([*before[-1:], *during], during)]
        long = [rounded(gap) for gap in gaps if gap > step + 0.001]
        row["beside_stream"].append({"step": step, "parts": len(long), "seconds_of_parts": long,
                                     "prompt_seconds": rounded(prompt.first(time.monotonic()))})
        idle(server)
    row["behind_kept"] = {}
    num_kept = words.longest // 4
    for new in (size for size in (16, 512, 2048, 8192) if num_kept + size < words.longest):
        for number in range(2):
            kept = ids(num_kept, number)
            server.ask({"prompt": kept, "max_tokens": 1})
            answer, seconds = server.ask({"prompt": kept + ids(new, 7 + number), "max_tokens": 1})
        found = answer["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)
        row["behind_kept"][str(new)] = {"kept": found, "seconds": rounded(seconds)}
    return row


COLUMNS = ["cell", "sampling", "requests_per_second", "first_median", "first_99", "over_alone_median", "gap_median", "gap_99",
           "gap_longest", "tokens_per_second"]


def table(rows):
    """The rows of the load as Markdown."""
    lines = [" | ".join(COLUMNS), " | ".join("---" for _ in COLUMNS)]
    lines += [" | ".join(str(row.get(column, "")) for column in COLUMNS) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


class Report:
    """Rows as they are measured, and the words that say what is measured."""

    def __init__(self, words):
        self.words, self.rows, self.lone, self.is_warm = words, [], {}, False
        self.label = dict(pair.split("=", 1) for pair in words.label)

    def add(self, cell, row):
        """Prints and keeps a row."""
        self.rows.append({**self.label, "cell": cell, **row})
        print(json.dumps(self.rows[-1]), flush=True)
        if self.words.out:
            with open(self.words.out, "a") as file:
                file.write(json.dumps(self.rows[-1]) + "\n")

    def measure(self, play, sampling="greedy"):
        """The cells `lone`, once, `full` and `half` for a sampling. `play(requests, goes_on, sampling, again)` as the
        function above."""
        words, rate = self.words, self.words.rate
        of_sampling = lambda requests, goes_on, again=None: play(requests, goes_on, sampling, again)
        if "lone" in words.cells and not self.lone:
            self.add("lone", lone_times(of_sampling, words))
            self.lone = self.rows[-1]["again"]
        if words.warm and not self.is_warm:
            # Some seconds that are not counted, in which kernels are compiled and caches grow.
            begun, self.is_warm = time.monotonic(), True
            draw = random.Random(4)
            again = lambda now: Asked(*sizes(draw, words.longest), now)
            of_sampling([again(begun) for _ in range(words.clients)], until(begun + words.warm), again)
        if "full" in words.cells:
            row = full(of_sampling, words, self.lone)
            self.add("full", {"sampling": sampling, "clients": words.clients, **row})
            rate = row["tokens_per_second"] / mean_answer(words.longest)
        for share in words.shares if "half" in words.cells and rate else []:
            row = at_random(of_sampling, words, self.lone, share * rate)
            self.add(f"{share:g} of full", {"sampling": sampling, **row})


def measure(server, words):
    """Measures the cells, and prints a line for each and the table."""
    report = Report(words)

    def played(requests, goes_on, sampling, again=None):
        idle(server)
        return play(server, requests, goes_on, SAMPLINGS[sampling], again)

    for sampling in words.samplings:
        report.measure(played, sampling)
    if "texts" in words.cells:
        idle(server)
        report.add("texts", texts_together(server, words))
    if "parts" in words.cells:
        idle(server)
        report.add("parts", parts(server, words))
    print(table([row for row in report.rows if "gap_median" in row]))


def load_words(words):
    """Adds the words of the load to a parser."""
    words.add_argument("--cells", nargs="+", default=["lone", "full", "half", "texts", "parts"])
    words.add_argument("--seconds", type=float, default=12)
    words.add_argument("--warm", type=float, default=4)
    words.add_argument("--grace", type=float, default=4)
    words.add_argument("--clients", type=int, default=64)
    words.add_argument("--shares", type=float, nargs="+", default=[0.5])
    words.add_argument("--rate", type=float, help="requests a second that are taken for those of `full`")
    words.add_argument("--longest", type=int, default=32_000)
    words.add_argument("--label", nargs="+", default=[])
    words.add_argument("--out")
    return words


def main():
    """Measures a server."""
    words = load_words(parser_of(__doc__))
    words.add_argument("--samplings", nargs="+", choices=SAMPLINGS, default=list(SAMPLINGS))
    words.add_argument("--texts", type=int, default=16)
    words.add_argument("--text-tokens", type=int, default=LONGEST_ANSWER)
    run(words, measure)


if __name__ == "__main__":
    main()
