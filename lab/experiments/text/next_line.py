"""Questions from the held-out text: which of four lines of a document comes next. A guess is right in one of four.

    python3 lab/experiments/text/next_line.py --heldout data/text/heldout.jsonl --out data/text/next_line.jsonl
    sieve eval tasks --checkpoint RUN --truncate --data lab/experiments/text/next_line.toml=data/text/next_line.jsonl

A document of at least 40 lines gives one question: the hash of its text draws the line, the three others, which are of
a similar length and come later, and where the right one stands. The prompt is the 1500 characters before it, from the
beginning of a line.
"""

import argparse
import hashlib
import json
import pathlib
import random


def question(text):
    """A question of a document, or None."""
    draw = random.Random(hashlib.sha256(text.encode()).hexdigest())
    lines = text.split("\n")
    fit = [n for n, line in enumerate(lines) if 20 <= len(line.strip()) <= 120]
    right = [n for n in fit if n >= 15]
    if len(lines) < 40 or not right:
        return None
    n = draw.choice(right)
    size = len(lines[n])
    others = {lines[m] for m in fit if m > n and lines[m] != lines[n] and size / 2 <= len(lines[m]) <= 2 * size}
    if len(others) < 3:
        return None
    others = draw.sample(sorted(others), 3)
    label = draw.randrange(4)
    before = "\n".join(lines[:n])
    prompt = before[-1500:].partition("\n")[2] if len(before) > 1500 else before
    return {"text": prompt, "lines": [*others[:label], lines[n], *others[label:]], "label": label}


def main():
    """Writes the question of each held-out document that gives one, and prints how many there are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heldout", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    with open(args.heldout, encoding="utf-8") as file:
        asked = [question(json.loads(line)["text"]) for line in file]
    asked = [row for row in asked if row]
    args.out.write_text("".join(json.dumps(row) + "\n" for row in asked), encoding="utf-8")
    print(f"{len(asked)} questions")


if __name__ == "__main__":
    main()
