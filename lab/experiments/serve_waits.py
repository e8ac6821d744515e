"""How long people wait for `sieve serve`: the first answer after a start, a stream beside another's prompt, a second turn.

    serve_waits.py SIEVE CHECKPOINT [--device cpu] [--prompt-tokens 1500] [--streams 1] [--turn-tokens 0] [--clients 0]
        [--client-tokens 128] [more flags of serve]

Starts the server, and prints a line of JSON: seconds until the first and the second token after a start and in the next
request; resident memory at the start and after them, in MiB, and the memory of the first GPU in use; the median and the
longest pause between the pieces of streams, alone and while another client's prompt is read, and that prompt's seconds
alone and beside the streams; the seconds of a chat's second turn and of the same messages sent as a first one, with the
tokens that were not read again. With --turn-tokens the turns are prompts of token ids, the first of so many. With
--clients so many clients ask at once for --client-tokens greedy tokens each; printed are their tokens a second.
"""

import argparse
import io
import json
import os
import pathlib
import statistics
import subprocess
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor


class Server:
    """A running `sieve serve`."""

    def __init__(self, program, checkpoint, flags):
        """Starts the server on a free port and waits for its address; a server that ends first ends this program."""
        command = [program, "serve", "--checkpoint", checkpoint, "--port", "0", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        line = ""
        while "/v1:" not in line:
            line = self.process.stdout.readline()
            if not line:
                raise SystemExit(f"{' '.join(map(str, command))}: the server ended")
        self.address = line.split("http://")[1].split("/v1")[0]
        # "serving NAME at ADDRESS: 4 sequences of 32,768 tokens at once, …"
        self.texts = int(line.split("/v1: ")[1].split()[0].replace(",", ""))

    def resident(self, part="VmRSS"):
        """Resident memory in MiB, or a part of it: `RssAnon` is what the program allocated, without files in memory."""
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split(f"{part}:")[1].split()[0]) / 1024

    def open(self, path, body):
        """The answer to a request, to be read; an error says what the server said."""
        request = urllib.request.Request(f"http://{self.address}{path}", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        try:
            return urllib.request.urlopen(request, timeout=600)
        except urllib.error.HTTPError as error:
            error.msg += ": " + (text := error.read().decode())
            error.fp = io.BytesIO(text.encode())
            raise

    def ask(self, body):
        """The answer to a completion or a chat, and its seconds."""
        begun = time.monotonic()
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        with self.open(path, {"temperature": 0, **body}) as answer:
            return json.load(answer), time.monotonic() - begun

    def stream(self, body):
        """The times at which the pieces of a stream arrived."""
        times = []
        with self.open("/v1/completions", {"temperature": 0, "stream": True, **body}) as answer:
            times.extend(time.monotonic() for line in answer if line.startswith(b"data: {"))
        return times


def gpu_mib():
    """The memory of the first GPU that programs see which is in use, in MiB; None without a GPU."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    try:
        asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={first}"]
        return int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None


def ids(count, number):
    """A prompt of token ids; another number gives another prompt from its first token on."""
    return [100 + (7 * at + 13 * number) % 900 for at in range(count)]


def token_turns(server, count):
    """A text of `count` tokens with an answer and more tokens behind it: the seconds until its first token, those
    of a prompt as long that no text begins, and how many tokens were not read again."""
    first = ids(count, 3)
    answer, _ = server.ask({"prompt": first, "max_tokens": 32, "logprobs": 0, "return_token_ids": True, "ignore_eos": True})
    second = first + answer["choices"][0]["token_ids"] + ids(100, 4)
    turn, seconds = server.ask({"prompt": second, "max_tokens": 1})
    _, whole = server.ask({"prompt": ids(len(second), 5), "max_tokens": 1})
    usage = turn["usage"]
    return {"seconds": round(seconds, 4), "seconds_without": round(whole, 4), "tokens": usage["prompt_tokens"],
            "kept": usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)}


def together(server, clients, tokens):
    """Tokens a second of clients that ask at once, the second time."""
    def ask(number):
        body = {"prompt": ids(128, 20 + number), "max_tokens": tokens, "ignore_eos": True}
        return server.ask(body)[0]["usage"]["completion_tokens"]
    rates = []
    with ThreadPoolExecutor(clients) as pool:
        for begin in (0, clients, 2 * clients):
            begun = time.monotonic()
            got = sum(pool.map(ask, range(begin, begin + clients)))
            rates.append(round(got / (time.monotonic() - begun)))
    return rates


def pauses(times):
    """The median and the longest pause between moments, in seconds."""
    between = [later - earlier for earlier, later in zip(times, times[1:])]
    return {"median": round(statistics.median(between), 4), "longest": round(max(between), 4)}


def parser_of(description):
    """The words of a script that measures a server: the program, the checkpoint, and what the script adds."""
    words = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("sieve")
    words.add_argument("checkpoint")
    return words


def run(words, measure):
    """Starts a server with the flags that `words` does not know, calls `measure(server, args)` and stops the server."""
    args, flags = words.parse_known_args()
    server = Server(args.sieve, args.checkpoint, flags)
    try:
        if server.texts <= getattr(args, "streams", 0):
            raise SystemExit(f"{server.texts} texts at once, so that a prompt beside {args.streams} streams waits until one "
                             f"has ended: add --max-texts {args.streams + 1} or more")
        measure(server, args)
    finally:
        server.process.terminate()
        server.process.wait()


def main():
    """Measures a server."""
    words = parser_of(__doc__)
    words.add_argument("--prompt-tokens", type=int, default=1500)
    words.add_argument("--stream-tokens", type=int, default=300)
    words.add_argument("--streams", type=int, default=1)
    words.add_argument("--turn-tokens", type=int, default=0)
    words.add_argument("--clients", type=int, default=0)
    words.add_argument("--client-tokens", type=int, default=128)
    run(words, measure)


def measure(server, args):
    """Asks the server, and prints what it took."""
    resident, gpu = [round(server.resident())], [gpu_mib()]
    # With its score each token is a piece of a stream, also one that shows no text.
    question = {"prompt": "The capital of France is", "max_tokens": 8, "logprobs": 0, "ignore_eos": True}
    first_tokens = []
    for _ in range(2):
        begun = time.monotonic()
        first_tokens.append([round(moment - begun, 4) for moment in server.stream(question)[:2]])
    resident.append(round(server.resident()))
    gpu.append(gpu_mib())

    text = {"prompt": "Once upon a time", "max_tokens": args.stream_tokens, "logprobs": 0, "ignore_eos": True}
    alone = server.stream(text)
    # Other prompts than before, so that nothing of them is kept.
    long_prompt = lambda number: {"prompt": ids(args.prompt_tokens, number), "max_tokens": 1}
    _, prompt_alone = server.ask(long_prompt(1))
    # Twice: the first time kernels of a GPU may be compiled.
    beside = [beside_prompt(server, args.streams, text, long_prompt(2 + time), alone) for time in range(2)]
    gpu.append(gpu_mib())
    more = {}
    if args.clients:
        more["tokens_per_second"] = together(server, args.clients, args.client_tokens)
    if args.turn_tokens:
        more["second_turn"] = token_turns(server, args.turn_tokens)
    else:
        more["second_turn"] = chat_turns(server)
    gpu.append(gpu_mib())
    print(json.dumps({
        "first_tokens": first_tokens, "resident_mib": resident, "gpu_mib": gpu,
        "stream_alone": pauses(alone), "stream_beside_prompt": [pauses for pauses, _ in beside],
        "prompt_alone": round(prompt_alone, 3), "prompt_beside": [round(seconds, 3) for _, seconds in beside], **more,
    }))


def beside_prompt(server, count, text, prompt, alone):
    """The pauses of `count` streams while a prompt is read, of the one with the longest pause, and the prompt's
    seconds. `alone` are the times of a stream that nobody disturbed."""
    streams = [[] for _ in range(count)]
    ask = lambda number: streams[number].extend(server.stream({**text, "seed": 1 + number}))
    readers = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for reader in readers:
        reader.start()
    time.sleep(10 * pauses(alone)["median"] + (0.1 if count > 1 else 0))
    seconds = server.ask(prompt)[1]
    ended = time.monotonic()
    for reader in readers:
        reader.join()
    # With the piece that came behind the prompt's end, if the stream waited for that.
    beside = [pauses(times[:1 + sum(moment <= ended for moment in times)]) for times in streams]
    return max(beside, key=lambda pauses: pauses["longest"]), seconds


def chat_turns(server):
    """A chat's second turn, and the same messages as a first one."""
    turns = [{"role": "user", "content": "Tell me about the sea, in many words. " * 12}]
    try:
        answer, _ = server.ask({"messages": turns, "max_tokens": 60})
        said = answer["choices"][0]["message"]["content"]
        turns += [{"role": "assistant", "content": said}, {"role": "user", "content": "And the sky?"}]
        second, second_seconds = server.ask({"messages": turns, "max_tokens": 1})
        turns[0]["content"] = "Again: " + turns[0]["content"]
        _, whole_seconds = server.ask({"messages": turns, "max_tokens": 1})
        usage = second["usage"]
        return {"seconds": round(second_seconds, 3), "seconds_without": round(whole_seconds, 3),
                "tokens": usage["prompt_tokens"], "kept": usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)}
    except urllib.error.HTTPError as error:
        return json.load(error.fp)["error"]["message"]


if __name__ == "__main__":
    main()
