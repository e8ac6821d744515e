"""The texts of checkpoints/tiny8k, from the first part of those of lab/experiments/text.

    python3 lab/experiments/tiny8k/texts.py --text data/text/train.jsonl --out data/tiny8k [--bytes 130000000] [--parts 16]

Reads the first BYTES of TEXT in whole lines and writes JSON lines with a `text` to OUT:

- long.jsonl, short.jsonl: stretches of neighbouring documents of about 26,000 and 2,600 letters (8192 and 800 tokens),
  with facts stated at ends of lines and stated again later, by lab/experiments/long/join.py;
- needles_long.jsonl, needles_short.jsonl: made-up sentences or such text with facts anywhere, and each fact again at
  the end in another order: what `sieve eval needle` asks;
- recall.jsonl: pairs of words, then the same pairs again (lab/experiments/tiny_corpus.py);
- heldout.jsonl: the last hundred documents as such stretches, without facts, of no other file.

The same input, BYTES and PARTS give the same files, byte for byte. Needs nothing but Python.
"""

import argparse
import json
import multiprocessing
import pathlib
import random
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "lab/experiments/long"), str(ROOT / "lab/experiments")]

from join import joined, with_facts  # noqa: E402
from needle_corpus import fact, name, sentence  # noqa: E402
from tiny_corpus import ENDINGS, recall  # noqa: E402

LONG, SHORT = 26_000, 2_600  # letters of a document: a row of 8192 tokens, of 1024
HELD_OUT = 100  # documents of the input, the last
# Letters to a fact in joined text, and in documents that end in facts.
FACTS = {LONG: 1_500, SHORT: 400}
NEEDLES = {LONG: 900, SHORT: 300}


def stretches(texts, size):
    """Neighbouring documents, joined and cut at ends of lines into stretches of about `size` letters."""
    for text in texts:
        lines, letters = [], 0
        for line in text.splitlines(keepends=True):
            lines.append(line)
            letters += len(line)
            if letters >= size:
                yield "".join(lines)
                lines, letters = [], 0
        if letters > size // 4:
            yield "".join(lines)


def needles(draw, texts, most, every, count):
    """Documents of all lengths up to `most` letters alike: facts anywhere, then each again."""
    pool = [f"{sentence(draw)}{draw.choice(ENDINGS)}." for _ in range(20_000)]
    for _ in range(count):
        length = draw.randrange(SHORT // 4, most)
        if draw.random() < 0.5:
            lines = [f"{filler} " for filler in draw.choices(pool, k=length // 55 + 1)]
            lines = [line if at % 8 else line + "\n" for at, line in enumerate(lines)]
        else:
            text = draw.choice(texts)
            at = draw.randrange(max(len(text) - length, 0) + 1)
            lines = text[at:at + length].splitlines(keepends=True)
        keys = sorted({name(draw) for _ in range(min(length // every, 60) + 1)})
        facts = [fact(key, draw.randrange(1_000_000, 10_000_000)) for key in keys]
        for stated in facts:
            lines.insert(draw.randrange(len(lines) + 1), stated)
        yield "".join(lines) + "".join(draw.sample(facts, len(facts)))


def write(path, texts):
    with open(path, "w", encoding="utf-8") as out:
        out.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)


def part(job):
    """Writes one part of each file."""
    number, texts, out = job
    draw = random.Random(number)
    plain = [*joined(texts, [4 * LONG], [1.0], 0, draw)]
    long, short = ((with_facts(text, FACTS[size], draw) for text in stretches(plain, size)) for size in (LONG, SHORT))
    # Half as many letters of documents that end in facts as of joined text; the longest fill a row, as their sentences
    # have more letters a token.
    letters = sum(map(len, texts)) // 2
    ends = {size: needles(draw, plain, size + size // 6, NEEDLES[size], 2 * letters // size) for size in (LONG, SHORT)}
    files = {"long": long, "short": short, "needles_long": ends[LONG], "needles_short": ends[SHORT],
             "recall": recall(draw, max(len(texts), 20))}
    for file, documents in files.items():
        write(out / f"{file}.{number:02}", documents)


def main():
    """Writes the files in parts, by several processes, joins the parts and prints each file's documents and MB."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, type=pathlib.Path)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--bytes", type=int, default=130_000_000)
    parser.add_argument("--parts", type=int, default=16)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with open(given.text, "rb") as file:
        read = file.read(given.bytes)
    texts = [json.loads(line)["text"] for line in read[:read.rindex(b"\n") + 1].splitlines()]
    at = max(len(texts) - HELD_OUT, given.parts)
    texts, last = texts[:at], texts[at:]
    held = [*stretches(joined(last, [4 * LONG], [1.0], 0, random.Random(0)), LONG)]
    write(given.out / "heldout.jsonl", held)
    size = -(-len(texts) // given.parts)
    jobs = [(number, texts[number * size:(number + 1) * size], given.out) for number in range(given.parts)]
    with multiprocessing.Pool() as pool:
        pool.map(part, jobs, chunksize=1)
    for file in ("long", "short", "needles_long", "needles_short", "recall"):
        paths = sorted(given.out.glob(f"{file}.[0-9][0-9]"))
        with open(given.out / f"{file}.jsonl", "wb") as out:
            for path in paths:
                out.write(path.read_bytes())
                path.unlink()
    for path in sorted(given.out.glob("*.jsonl")):
        print(f"{path}: {path.read_bytes().count(10):,} documents, {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
