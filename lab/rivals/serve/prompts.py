"""The prompts that all programs are given, and where their numbers go."""

import json
import pathlib
import random


def prompts(export, count, tokens):
    """Random token ids, without the special ones at the ends of a vocabulary."""
    size = json.loads((pathlib.Path(export) / "config.json").read_text())["vocab_size"]
    draw = random.Random(5)
    return [[draw.randrange(size // 10, size - size // 10) for _ in range(tokens)] for _ in range(count)]


def pairs(clients, new):
    """Numbers of clients, each with the tokens that every text of theirs gets, from two lists of words."""
    found = list(zip(map(int, clients.split()), map(int, new.split()), strict=True))
    return sorted(found)


def write(path, program, rates, texts):
    """`rates`: tokens a text and tokens a second by number of clients. `texts`: by number of clients the greedy text of
    each prompt. Called after each number of clients, so that a program that is cut off leaves what it measured."""
    pathlib.Path(path).write_text(json.dumps({"program": program, "rates": rates, "texts": texts}))
