"""The texts of checkpoints/tiny: code, English, facts said again, and pairs asked for.

    apt-get install bible-kjv jargon-text
    python3 lab/experiments/make_corpus.py --from lab/experiments/crates.lock --out data/crates.jsonl
    python3 lab/experiments/tiny_corpus.py --code data/crates.jsonl --out data/tiny

Writes OUT/code.jsonl (the locked crates, a document a file of at most 20 kB), english.jsonl (the King James Bible by
chapter and the Jargon File, both in the public domain), needles.jsonl (facts stated and restated, in the words of `sieve
eval needle`) and recall.jsonl (pairs of words, then the same pairs again: multi-query associative recall as text).
Needs nothing but Python and, for english.jsonl, those two packages of Debian.
"""

import argparse
import gzip
import json
import pathlib
import random
import re
import subprocess

from needle_corpus import fact, name, sentence

JARGON = "/usr/share/doc/jargon-text/jargon.txt.gz"
ENDINGS = ["", " in the morning", " when it rains", " most of the year", ", as everyone knows", " on market days"]


def code(path):
    """Files of the crates: a document there has each after a line with its path."""
    for line in open(path, encoding="utf-8"):
        text = json.loads(line)["text"]
        for file in re.split(r"(?m)^(?=// [\w.-]+/\S+\n)", text):
            if 200 <= len(file) <= 20_000:
                yield file


def english():
    """Yields the Bible's chapters, by Debian's program `bible`, then the Jargon File in pieces of
    1500 letters or more, without its tables."""
    done = subprocess.run(["bible", "-f", "gen1:1-rev22:21"], capture_output=True, text=True, check=True).stdout
    chapters = {}
    for line in done.splitlines():
        place, verse = line.split(" ", 1)
        chapters.setdefault(place.split(":")[0], []).append(verse)
    yield from (" ".join(verses) for verses in chapters.values())
    with gzip.open(JARGON, "rt", encoding="utf-8", errors="replace") as file:
        lines = [line.strip() for line in file if not re.search("[\u2500-\u257f]", line)]  # no tables
    together = ""
    for paragraph in "\n".join(lines).split("\n\n"):
        together += " ".join(paragraph.split()) + "\n"
        if len(together) >= 1500:
            yield together
            together = ""


def needles(draw, count):
    """Facts at any place of up to 70 sentences; then each fact again, in another order."""
    for _ in range(count):
        lines = [f"{sentence(draw)}{draw.choice(ENDINGS)}. " for _ in range(draw.randrange(4, 70))]
        keys = {name(draw) for _ in range(draw.randrange(1, 9))}
        facts = [fact(key, draw.randrange(1_000_000, 10_000_000)) for key in sorted(keys)]
        for stated in facts:
            lines.insert(draw.randrange(len(lines) + 1), stated)
        yield "".join(lines) + "".join(draw.sample(facts, len(facts)))


def recall(draw, count):
    """Pairs of words, then the same pairs in another order."""
    word = lambda: "".join(draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(draw.randrange(2, 4)))  # noqa: E731
    for _ in range(count):
        pairs = {word(): word() for _ in range(draw.randrange(4, 48))}
        lines = [f"{key} = {value}\n" for key, value in pairs.items()]
        yield "".join(lines) + "".join(draw.sample(lines, len(lines)))


def main():
    """Writes the four files and prints the documents and MB of each; the same input gives the same files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--code", required=True, type=pathlib.Path, help="crates.jsonl")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder of the four files")
    parser.add_argument("--english", type=pathlib.Path, help="take OUT/english.jsonl from this file, written elsewhere")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    written = arguments.english and [json.loads(line)["text"] for line in open(arguments.english, encoding="utf-8")]
    texts = {"code": code(arguments.code), "english": written or english(), "needles": needles(random.Random(0), 50_000),
             "recall": recall(random.Random(1), 30_000)}
    for file_name, documents in texts.items():
        path = arguments.out / f"{file_name}.jsonl"
        with open(path, "w", encoding="utf-8") as file:
            count = sum(1 for text in documents if file.write(json.dumps({"text": text}) + "\n"))
        print(f"{path}: {count:,} documents, {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
