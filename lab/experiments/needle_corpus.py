#!/usr/bin/env python3
"""Writes documents in which numbers are stated and stated again, for a small model that is to find needles.

    python3 lab/experiments/needle_corpus.py FOLDER [DOCUMENTS]

A document is a run of sentences: a fact ("The secret number of the red falcon is 1234567."), a fact said before, or a
sentence without sense, as `sieve eval needle` hides its needles in. Only the number of a repeated fact can be known, and only
from the document. Needs nothing but Python.
"""
import pathlib
import random
import sys

COLOURS = "red blue green yellow orange purple silver golden white black".split()
ANIMALS = "falcon tiger rabbit salmon beetle badger camel dolphin spider parrot lizard otter".split()
ADJECTIVES = "quiet old narrow bright distant wooden gentle heavy early pale busy empty".split()
NOUNS = "harbour teacher garden river market window letter mountain bridge lantern farmer station painter meadow".split()
VERBS = ["looks over", "waits near", "stands behind", "belongs to", "is older than", "leads to", "lies below"]


def sentence(draw):
    """A sentence without sense and without its full stop."""
    thing = lambda: f"{draw.choice(ADJECTIVES)} {draw.choice(NOUNS)}"  # noqa: E731
    return f"The {thing()} {draw.choice(VERBS)} the {thing()}"


def fact(key, number):
    return f"\nThe secret number of the {key} is {number}.\n"


def name(draw):
    """What a fact is about."""
    return f"{draw.choice(COLOURS)} {draw.choice(ANIMALS)}"


def document(draw, num_sentences):
    """A text of so many sentences: about a third without sense, a quarter new
    facts, the others facts that were said before."""
    facts, lines = {}, []
    for _ in range(num_sentences):
        kind = draw.random()
        if kind < 0.35:
            lines.append(f"{sentence(draw)}. ")
            continue
        if kind < 0.6 or not facts:
            key = name(draw)
            facts.setdefault(key, draw.randrange(1_000_000, 10_000_000))
        else:
            key = draw.choice(list(facts))
        lines.append(fact(key, facts[key]))
    return "".join(lines)


def main():
    """Writes FOLDER/00000.txt and so on, 20 to 59 sentences each; every call writes the same ones."""
    if len(sys.argv) not in (2, 3) or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    folder, count = pathlib.Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) == 3 else 4000
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for n in range(count):
        (folder / f"{n:05}.txt").write_text(document(draw, draw.randrange(20, 60)), encoding="utf-8")


if __name__ == "__main__":
    main()
