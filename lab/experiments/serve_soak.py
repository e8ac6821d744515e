"""Whether `sieve serve` holds out: many mixed requests, clients that vanish, a frozen process, and stops at any moment.

    serve_soak.py SIEVE CHECKPOINT [--seconds 300] [--clients 12] [--stops 5] [--seed 1] [more flags of serve]

Clients ask for texts of all lengths, streams (a third of which they leave), several samples, scores, structures and
chats of several turns, and make mistakes: broken JSON, unknown keys, prompts that are too long, half a request. At
random moments the process is frozen (SIGSTOP) for up to three seconds. Then the server is started --stops times more,
and stopped (SIGTERM) at a random moment while streams are read
and one is not.

Prints a line of JSON: requests by answer, the longest one of each kind in seconds, allocated memory in MiB (RssAnon, the median of each third
of the time), and seconds and exit code of each stop. Exits with 1 if an answer was not the expected one or took over
--stuck seconds, if the last third's memory is over 1.02 times that of the second, if a stop took over 33 seconds, or if
a stream ended without a last event.
"""

import collections
import json
import random
import signal
import socket
import statistics
import sys
import threading
import time
import urllib.error

from serve_structures import FORMATS
from serve_waits import Server, parser_of

WORDS = "the sea fn main let a ship loop sky match of and stone return a bird struct over".split()
STOP_SECONDS = 33  # a stopping server gives its readers 30, and 2 more for the last event


class Count:
    """What the clients saw, from any thread."""

    def __init__(self):
        self.lock = threading.Lock()
        self.answers = collections.Counter()
        self.wrong = []
        self.longest = {}

    def add(self, kind, answer, seconds, expected):
        """Counts an answer; one that is not among the expected ones is kept with its kind."""
        with self.lock:
            self.answers[f"{kind}: {answer}"] += 1
            self.longest[kind] = max(self.longest.get(kind, 0.0), round(seconds, 1))
            if answer not in expected and len(self.wrong) < 20:
                self.wrong.append(f"{kind}: {answer}")


def prompt(draw, words):
    """A prompt of up to so many words; a third of the prompts begin alike."""
    begin = "once upon a time the " if draw.random() < 0.34 else ""
    return begin + " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, words)))


def leave_early(server, body, pieces):
    """Reads some pieces of a stream, and closes the connection."""
    with server.open("/v1/completions", {"stream": True, **body}) as answer:
        for at, _ in enumerate(answer):
            if at >= pieces:
                return "left"
    return "left"


def sent(server, body, length=None):
    """A connection over which a completion was asked for, whose body is said to have so many bytes."""
    host, port = server.address.split(":")
    connection = socket.create_connection((host, int(port)), timeout=120)
    head = (f"POST /v1/completions HTTP/1.1\r\nHost: {server.address}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {length or len(body)}\r\nConnection: close\r\n\r\n")
    connection.sendall(f"{head}{body}".encode())
    return connection


def half_a_request(server):
    """Sends the head of a request and half of its body, and goes."""
    sent(server, '{"prompt": "a', length=400).close()
    return "left"


def conversation(server, draw):
    """Two turns of a chat; a model without a template refuses both."""
    turns = [{"role": "user", "content": prompt(draw, 20)}]
    answer, _ = server.ask({"messages": turns, "max_tokens": 12, "temperature": 1, "seed": draw.randrange(1000)})
    turns += [answer["choices"][0]["message"], {"role": "user", "content": prompt(draw, 5)}]
    server.ask({"messages": turns, "max_tokens": 12})
    return "200"


def whole(server, body):
    """A completion that is awaited: its text must be there."""
    answer, _ = server.ask(body)
    return "200" if all("text" in choice for choice in answer["choices"]) else "no text"


def streamed(server, body):
    """A stream that is read to its end: the mark of the end, or the error of a server that stops."""
    with server.open("/v1/completions", {"stream": True, **body}) as answer:
        lines = [line for line in answer if line.strip()]
    return "200" if lines and lines[-1].startswith((b"data: [DONE]", b'data: {"error"')) else "cut"


def raw(server, text):
    """The answer to a body that may be no JSON."""
    with sent(server, text) as connection:
        return connection.makefile("rb").readline().split()[1].decode()


# Kind: how often among the requests, what it asks, and the answers that are expected.
KINDS = {
    "text": (6, lambda s, d: whole(s, {"prompt": prompt(d, 60), "max_tokens": d.randint(1, 60), "temperature": 1,
                                       "seed": d.randrange(99)}), {"200"}),
    "stream": (6, lambda s, d: streamed(s, {"prompt": prompt(d, 30), "max_tokens": d.randint(1, 80)}), {"200"}),
    "left stream": (3, lambda s, d: leave_early(s, {"prompt": prompt(d, 30), "max_tokens": 200}, d.randint(0, 12)), {"left"}),
    "samples": (2, lambda s, d: whole(s, {"prompt": prompt(d, 20), "n": 3, "max_tokens": 10, "temperature": 0.8}), {"200"}),
    "echo": (2, lambda s, d: whole(s, {"prompt": prompt(d, 80), "max_tokens": 0, "echo": True, "logprobs": 5}), {"200"}),
    "scores": (1, lambda s, d: whole(s, {"prompt": prompt(d, 9), "max_tokens": 20, "logprobs": 20}), {"200"}),
    "structure": (2, lambda s, d: whole(s, {"prompt": prompt(d, 9), "max_tokens": 30, "temperature": 1,
                                            **FORMATS["json_object"]}), {"200"}),
    "chat": (2, conversation, {"200", "400"}),
    "half a request": (1, lambda s, d: half_a_request(s), {"left"}),
    "broken JSON": (1, lambda s, d: raw(s, '{"prompt": "a", '), {"400"}),
    "unknown key": (1, lambda s, d: whole(s, {"prompt": "a", "max_tokns": 3}), {"400"}),
    "too long": (1, lambda s, d: whole(s, {"prompt": "the sea " * 60_000, "max_tokens": 1}), {"400", "413"}),
}


def client(server, count, seed, until):
    """Asks until the time is over."""
    draw = random.Random(seed)
    kinds = [kind for kind, (often, *_) in KINDS.items() for _ in range(often)]
    while time.monotonic() < until:
        kind = draw.choice(kinds)
        _, ask, expected = KINDS[kind]
        begun = time.monotonic()
        try:
            answer = ask(server, draw)
        except urllib.error.HTTPError as error:
            answer = str(error.code)
        except OSError as error:
            answer = repr(error)
        count.add(kind, answer, time.monotonic() - begun, expected)


def freezes(server, draw, until):
    """Freezes the process at random moments for up to three seconds."""
    while time.monotonic() < until:
        time.sleep(draw.uniform(5, 15))
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(draw.uniform(0.1, 3))
        server.process.send_signal(signal.SIGCONT)


def soak(server, words):
    """The answers, and allocated memory in MiB by thirds of the time."""
    count, until = Count(), time.monotonic() + words.seconds
    threads = [threading.Thread(target=client, args=(server, count, words.seed * 1000 + at, until)) for at in range(words.clients)]
    threads.append(threading.Thread(target=freezes, args=(server, random.Random(words.seed), until)))
    for thread in threads:
        thread.start()
    memory = []
    while time.monotonic() < until:
        memory.append(server.resident("RssAnon"))
        time.sleep(0.5)
    for thread in threads:
        thread.join()
    third = max(len(memory) // 3, 1)
    return count, [round(statistics.median(memory[at:at + third]), 1) for at in (0, third, len(memory) - third)]


def stopped(words, flags, draw):
    """Starts a server, stops it while streams are read: the seconds of the stop, the exit code, and streams that ended
    without a last event."""
    server, cut = Server(words.sieve, words.checkpoint, flags), []

    def read():
        """Reads a stream; one that begins too late is refused with 503, or finds nobody."""
        try:
            if streamed(server, {"prompt": "the sea", "max_tokens": 900}) == "cut":
                cut.append(1)
        except urllib.error.HTTPError as error:
            if error.code != 503:
                cut.append(error.code)
        except (ConnectionError, urllib.error.URLError):
            pass

    readers = [threading.Thread(target=read) for _ in range(6)]
    for reader in readers:
        reader.start()
    # One that asks and never reads: its connection is full after some pieces.
    deaf = sent(server, json.dumps({"prompt": "the sea", "max_tokens": 900, "n": 8, "stream": True, "logprobs": 20}))
    time.sleep(draw.uniform(0, 2))
    begun = time.monotonic()
    server.process.terminate()
    code = server.process.wait(timeout=120)
    seconds = time.monotonic() - begun
    deaf.close()
    for reader in readers:
        reader.join()
    return [round(seconds, 2), code, len(cut)]


def main():
    """Prints the line; returns 1 where something was not as it should be."""
    words = parser_of(__doc__)
    words.add_argument("--seconds", type=float, default=300)
    words.add_argument("--clients", type=int, default=12)
    words.add_argument("--stops", type=int, default=5)
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--stuck", type=float, default=120)
    words, flags = words.parse_known_args()
    server = Server(words.sieve, words.checkpoint, flags)
    try:
        count, memory = soak(server, words)
    finally:
        server.process.terminate()
        server.process.wait()
    draw = random.Random(words.seed)
    stops = [stopped(words, flags, draw) for _ in range(words.stops)]
    print(json.dumps({"requests": sum(count.answers.values()), "answers": dict(sorted(count.answers.items())),
                      "wrong": count.wrong, "longest": dict(sorted(count.longest.items())), "allocated_mib": memory, "stops": stops}))
    is_flat = memory[2] <= 1.02 * memory[1]
    stop_well = all(seconds <= STOP_SECONDS and code == 0 and cut == 0 for seconds, code, cut in stops)
    return int(bool(count.wrong) or max(count.longest.values()) > words.stuck or not is_flat or not stop_well)


if __name__ == "__main__":
    sys.exit(main())
