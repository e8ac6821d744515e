"""Whether a token has one log-probability: as it was sampled among others, and as `echo` scores the same text whole.

    same_bits.py SIEVE CHECKPOINT... [--device cuda] [--texts 1 4 16] [--tokens 64] [--longest 600] [--out FILE]
        [--eval TEXTS] [more flags of serve]

For each checkpoint and each number of texts it starts `sieve serve --max-texts`, and lets twice as many clients sample
at once, each with a seed and a prompt of its own; lengths are drawn up to --longest. Then each text is scored whole.
Prints a line of JSON a checkpoint: tokens, how many log-probabilities differ from those of `echo` for each number of
texts, the largest difference, and how many texts differ between servers. With --eval as many texts are scored by `eval
ppl` too, each alone, and the row has their tokens and by how much the sum of a text's losses differs from `echo`'s at
most: from its sum, as the two may add the tokens in another order. Exits with 1 if a number differs.
"""

import argparse
import concurrent.futures
import json
import pathlib
import random
import subprocess
import sys
import tempfile

from serve_waits import Server


def requests_of(count, longest, tokens, vocabulary):
    """`count` requests: prompts of ids, lengths from 1 to `longest` with the edges of a stage of 128 keys among them."""
    draw = random.Random(7)
    edges = [1, 3, 5, 127, 128, 129]
    lengths = [edges[at] if at < len(edges) else draw.randint(1, longest) for at in range(count)]
    return [{"prompt": [draw.randrange(1, vocabulary) for _ in range(min(length, longest))], "max_tokens": tokens,
             "temperature": 0.9, "seed": at, "logprobs": 0, "return_token_ids": True}
            for at, length in enumerate(lengths)]


def sampled(server, requests, clients):
    """Each request's new tokens and their log-probabilities, asked by `clients` at once."""
    def ask(body):
        choice = server.ask(body)[0]["choices"][0]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        return list(pool.map(ask, requests))


def echoed(server, request, new):
    """The log-probabilities of `new` behind the request's prompt, scored as one text."""
    body = {"prompt": request["prompt"] + new, "max_tokens": 0, "echo": True, "logprobs": 0}
    return server.ask(body)[0]["choices"][0]["logprobs"]["token_logprobs"][len(request["prompt"]):]


def evaluated(arguments, checkpoint, text):
    """Tokens that `eval ppl` predicts of a text, and the sum of their losses in nats."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "text.jsonl"
        file.write_text(json.dumps({"text": text}) + "\n")
        same_bits = [flag for flag in arguments.more if flag == "--same-bits"]
        command = [arguments.program, "eval", "ppl", "--checkpoint", checkpoint, "--data", str(file), "--text-column",
                   "text", "--context", str(arguments.context), "--device", arguments.device, "--json", *same_bits]
        report = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
        return report["num_tokens"], report["nats"]


def compare_eval(arguments, checkpoint, server, requests):
    """Adds up, for each of some texts, the losses of `echo`, and compares their sum with that of `eval ppl`."""
    row = {"tokens": 0, "apart": 0.0}
    special = json.loads(next(pathlib.Path(checkpoint).rglob("tokenizer.json")).read_text())["added_tokens"]
    end = next(token["id"] for token in special if "end" in token["content"])
    for request in requests:
        text = server.ask({**request, "echo": True})[0]["choices"][0]["text"]
        text = "".join(letter for letter in text if letter.isprintable() or letter == "\n")  # a file of text has no NUL
        score = {"max_tokens": 0, "echo": True, "logprobs": 0, "return_token_ids": True}
        ids = server.ask({**score, "prompt": text})[0]["choices"][0]["prompt_token_ids"]
        # A document ends with a token that `eval ppl` predicts, too.
        scores = echoed(server, {"prompt": ids[:1]}, [*ids[1:], end])
        tokens, nats = evaluated(arguments, checkpoint, text)
        assert len(scores) == tokens, (len(scores), tokens)
        row["tokens"] += tokens
        row["apart"] = max(row["apart"], abs(nats + sum(scores)))
    return row


def compare(arguments, checkpoint):
    """The row of a checkpoint."""
    row = {"checkpoint": pathlib.Path(checkpoint).name, "tokens": 0, "differ": {}, "largest": 0.0, "texts_differ": 0}
    requests = requests_of(2 * max(arguments.texts), arguments.longest, arguments.tokens, arguments.vocabulary)
    first = None
    for texts in arguments.texts:
        flags = ["--device", arguments.device, "--max-texts", str(texts), *arguments.more]
        server = Server(arguments.program, checkpoint, flags)
        try:
            answers = sampled(server, requests, 2 * texts)
            first = first or [new for new, _ in answers]
            row["texts_differ"] += sum(new != other for (new, _), other in zip(answers, first))
            differ = 0
            for request, (new, scores) in zip(requests, answers):
                again = echoed(server, request, new)
                assert new and len(again) == len(scores), (len(new), len(again), len(scores))
                distances = [abs(a - b) for a, b in zip(again, scores)]
                differ += sum(distance != 0.0 for distance in distances)
                row["tokens"] += len(distances)
                row["largest"] = max(row["largest"], *distances)
            row["differ"][texts] = differ
            if arguments.eval and texts == arguments.texts[-1]:
                longest = sorted(requests, key=lambda request: len(request["prompt"]))[-arguments.eval:]
                row["eval"] = compare_eval(arguments, checkpoint, server, longest)
        finally:
            server.process.terminate()
            server.process.wait()
    return row


def main():
    """Prints a line a checkpoint as `compare` returns it; returns 1 where a log-probability or a text differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("checkpoints", nargs="+")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--texts", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--longest", type=int, default=600)
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--eval", type=int, default=0)
    parser.add_argument("--context", type=int, default=8192, help="tokens of a row of eval ppl")
    parser.add_argument("--out")
    arguments, arguments.more = parser.parse_known_args()
    rows = []
    for checkpoint in arguments.checkpoints:
        rows.append(compare(arguments, checkpoint))
        print(json.dumps(rows[-1]), flush=True)
        if arguments.out:
            with open(arguments.out, "a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    # A sum of some thousand losses, of which one has another bit, is farther apart than another order of adding them.
    return int(any(any(row["differ"].values()) or row["texts_differ"] or row.get("eval", {}).get("apart", 0.0) > 1e-8
                   for row in rows))


if __name__ == "__main__":
    sys.exit(main())
