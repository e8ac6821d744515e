"""What `--same-bits` costs a token: `sieve generate` with the flag and without, by turns.

    same_bits_price.py SIEVE CHECKPOINT... [--before 500 8000 31000] [--texts 1 2] [--new 200] [--device cuda] [--rounds 2]

For models of lab/experiments/serve_models.py, whose tokens are numbers. Prints a line of JSON for each checkpoint,
length of the prompt in tokens and number of texts: the median of a greedy token's microseconds without the flag and with
it, the smallest of --rounds, all rounds, and how often the flag's is as much.
"""

import argparse
import json
import pathlib
import random
import subprocess
import tempfile


def token_of(arguments, checkpoint, prompt, texts, flags):
    """Tokens of the prompt, and microseconds of a greedy token behind it."""
    command = [arguments.program, "generate", "--checkpoint", checkpoint, "--prompt-file", prompt, "--temperature", "0",
               "--samples", str(texts), "--max-new-tokens", str(arguments.new), "--json", "--device", arguments.device, *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stderr}")
    report = json.loads(done.stdout.splitlines()[0])
    return report["prompt_tokens"], 1e6 * report["median_token_seconds"]


def main():
    """Reads the arguments and measures each cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("checkpoints", nargs="+")
    parser.add_argument("--before", type=int, nargs="+", default=[500, 8000, 31000])
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--new", type=int, default=200)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    draw = random.Random(3)
    with tempfile.TemporaryDirectory() as folder:
        prompt = pathlib.Path(folder) / "prompt.txt"
        for checkpoint in arguments.checkpoints:
            for before in arguments.before:
                prompt.write_text(" ".join(str(draw.randrange(100, 1000)) for _ in range(before)))
                for texts in arguments.texts:
                    rounds = {"without": [], "with": []}
                    for _ in range(arguments.rounds):
                        for name, flags in (("without", []), ("with", ["--same-bits"])):
                            tokens, micro = token_of(arguments, checkpoint, prompt, texts, flags)
                            rounds[name].append(round(micro, 1))
                    without, flag = min(rounds["without"]), min(rounds["with"])
                    print(json.dumps({"model": pathlib.Path(checkpoint).name, "tokens": tokens, "texts": texts,
                                      "without": without, "with": flag, "times": round(flag / without, 2),
                                      "rounds": rounds}), flush=True)


if __name__ == "__main__":
    main()
