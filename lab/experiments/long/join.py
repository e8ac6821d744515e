"""Joins the documents of `lab/experiments/text` into long ones, and states numbers in them that are stated again later.

    python3 lab/experiments/long/join.py TRAIN.jsonl OUT.jsonl [--bytes 24000,100000,420000] [--shares 0.25,0.35,0.4]
        [--facts 12000] [--seed 0]

Reads and writes JSON lines with a `text`. Neighbours in the file are files of one folder, so a joined document is a stretch
of a package: its files one after the other, each behind a line `==> N <==`. The length of each joined document is drawn.
About every FACTS letters one fact ("The secret number of the red falcon is 1234567.", as in lab/experiments/needle_corpus.py
and `sieve eval needle`) is stated at the end of a line, and stated again anywhere later in the same document. The same
input gives the same output, byte for byte. A text that is joined in parts takes another seed for each part, or the parts
would state the same facts. `--facts 0` states none: the form of a text that needles are hidden in. Needs nothing but Python.
"""

import argparse
import json
import pathlib
import random
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from needle_corpus import fact, name  # noqa: E402

FACTS = 12_000


def with_facts(text, every, draw):
    """The text with one new fact about every EVERY letters, each stated again once, at ends of lines; 0: the text."""
    if every == 0:
        return text
    ends = [at + 1 for at, letter in enumerate(text) if letter == "\n"]
    count = min(len(text) // every, len(ends) // 4)
    if count == 0:
        return text
    keys, inserted = set(), []
    for _ in range(count):
        key = name(draw)
        if key in keys:  # two numbers of one name could not be told apart
            continue
        keys.add(key)
        number = draw.randrange(1_000_000, 10_000_000)
        first, again = sorted(draw.sample(range(len(ends)), 2))
        inserted += [(ends[first], fact(key, number)), (ends[again], fact(key, number))]
    parts, last = [], 0
    for at, line in sorted(inserted):
        parts += [text[last:at], line]
        last = at
    return "".join([*parts, text[last:]])


def joined(texts, sizes, shares, every, draw):
    """Long documents made of neighbours."""
    parts, length, wanted = [], 0, draw.choices(sizes, shares)[0]
    for text in texts:
        parts.append(f"==> {len(parts) + 1} <==\n{text}\n")
        length += len(text)
        if length >= wanted:
            yield with_facts("".join(parts), every, draw)
            parts, length, wanted = [], 0, draw.choices(sizes, shares)[0]
    if parts:
        yield with_facts("".join(parts), every, draw)


def main():
    """Writes the joined documents as JSON lines and prints how many there are and their letters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input")
    parser.add_argument("output")
    parser.add_argument("--bytes", default="24000,100000,420000", help="lengths of joined documents")
    parser.add_argument("--shares", default="0.25,0.35,0.4", help="how often each length is drawn")
    parser.add_argument("--facts", type=int, default=FACTS, help="letters to a stated fact; 0: no facts")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sizes = [int(size) for size in given.bytes.split(",")]
    shares = [float(share) for share in given.shares.split(",")]
    if given.facts < 0:
        parser.error(f"--facts {given.facts} is below 0")
    if len(sizes) != len(shares):
        parser.error(f"{len(sizes)} lengths and {len(shares)} shares")
    draw = random.Random(given.seed)
    count = total = 0
    with open(given.input, encoding="utf-8") as lines, open(given.output, "w", encoding="utf-8") as out:
        for text in joined((json.loads(line)["text"] for line in lines), sizes, shares, given.facts,
                           draw):
            out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            count, total = count + 1, total + len(text)
    print(f"{count} documents, {total} letters; asked for at most {max(sizes)} and a document")


if __name__ == "__main__":
    main()
