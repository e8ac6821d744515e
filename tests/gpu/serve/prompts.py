"""The prompts that all programs are given, and where their numbers go."""

import json
import pathlib
import random


def prompts(export, count, tokens):
    """Random token ids, without the special ones at the ends of a vocabulary."""
    size = json.loads((pathlib.Path(export) / "config.json").read_text())["vocab_size"]
    draw = random.Random(5)
    return [[draw.randrange(size // 10, size - size // 10) for _ in range(tokens)] for _ in range(count)]


def write(path, program, rates, texts):
    """`rates`: tokens a second by number of clients. `texts`: the greedy tokens or text of each prompt."""
    pathlib.Path(path).write_text(json.dumps({"program": program, "rates": rates, "texts": texts}))
