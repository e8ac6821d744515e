"""How long people wait for `sieve serve`: the first answer after a start, a stream beside another's prompt, a second turn.

    serve_waits.py SIEVE CHECKPOINT [--device cpu] [--prompt-tokens 1500] [more flags of serve]

Starts the server, and prints a line of JSON: seconds until the first answer after a start and of the next one; resident
memory at the start and after them, in MiB; the median and the longest pause between the pieces of a stream, alone and
while another client's prompt is read, and that prompt's seconds alone and beside the stream; the seconds of a chat's
second turn and of the same messages sent as a first one, with the tokens that were not read again.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import threading
import time
import urllib.error
import urllib.request


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

    def resident(self, part="VmRSS"):
        """Resident memory in MiB, or a part of it: `RssAnon` is what the program allocated, without files in memory."""
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split(f"{part}:")[1].split()[0]) / 1024

    def open(self, path, body):
        request = urllib.request.Request(f"http://{self.address}{path}", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=600)

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


def pauses(times):
    """The median and the longest pause between moments, in seconds."""
    between = [later - earlier for earlier, later in zip(times, times[1:])]
    return {"median": round(statistics.median(between), 3), "longest": round(max(between), 3)}


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
        measure(server, args)
    finally:
        server.process.terminate()
        server.process.wait()


def main():
    """Measures a server."""
    words = parser_of(__doc__)
    words.add_argument("--prompt-tokens", type=int, default=1500)
    words.add_argument("--stream-tokens", type=int, default=300)
    run(words, measure)


def measure(server, args):
    """Asks the server, and prints what it took."""
    resident = [round(server.resident())]
    question = {"prompt": "The capital of France is", "max_tokens": 8}
    first, again = [server.ask(question)[1] for _ in range(2)]
    resident.append(round(server.resident()))

    text = {"prompt": "Once upon a time", "max_tokens": args.stream_tokens}
    alone = server.stream(text)
    # Other prompts than before, so that nothing of them is kept.
    long_prompt = lambda number: {"prompt": [100 + (7 * at + number) % 900 for at in range(args.prompt_tokens)], "max_tokens": 1}
    _, prompt_alone = server.ask(long_prompt(1))
    times, prompt_beside = [], []
    reader = threading.Thread(target=lambda: times.extend(server.stream({**text, "seed": 1})))
    reader.start()
    time.sleep(10 * pauses(alone)["median"])
    prompt_beside = server.ask(long_prompt(2))[1]
    ended = time.monotonic()
    reader.join()
    # With the piece that came behind the prompt's end, if the stream waited for that.
    beside = times[:1 + sum(moment <= ended for moment in times)]

    turns = [{"role": "user", "content": "Tell me about the sea, in many words. " * 12}]
    try:
        answer, _ = server.ask({"messages": turns, "max_tokens": 60})
        said = answer["choices"][0]["message"]["content"]
        turns += [{"role": "assistant", "content": said}, {"role": "user", "content": "And the sky?"}]
        second, second_seconds = server.ask({"messages": turns, "max_tokens": 1})
        turns[0]["content"] = "Again: " + turns[0]["content"]
        _, whole_seconds = server.ask({"messages": turns, "max_tokens": 1})
        usage = second["usage"]
        turn = {"seconds": round(second_seconds, 3), "seconds_without": round(whole_seconds, 3),
                "tokens": usage["prompt_tokens"], "kept": usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)}
    except urllib.error.HTTPError as error:
        turn = json.load(error)["error"]["message"]
    print(json.dumps({
        "first_answer": round(first, 3), "next_answer": round(again, 3), "resident_mib": resident,
        "stream_alone": pauses(alone), "stream_beside_prompt": pauses(beside),
        "prompt_alone": round(prompt_alone, 3), "prompt_beside": round(prompt_beside, 3), "second_turn": turn,
    }))


if __name__ == "__main__":
    main()
