"""Counts what makes a page hard to read, and holds pages to a budget.

    python3 tests/python/prose.py                         every page of PAGES; ends with 1 where one is over its budget
    python3 tests/python/prose.py docs/runs.md            the named pages, against the same budget
    python3 tests/python/prose.py README.md --longest 5   with the five longest sentences and cells

Running text is what lies outside of code, tables, headings and pictures. A sentence ends at a full stop, a question or
an exclamation mark before a new word, and at the end of a paragraph or of a list item. A span of code counts as one
word. A cell's length is of its Markdown without the targets of links. The mean length of a sentence is not limited:
a limit on it breaks sentences into fragments. Needs nothing but Python.
"""

import argparse
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The most words of one sentence, and the most characters of one cell.
BUDGET = {"longest": 40, "cell": 160}
# README's lines, and the words of its first paragraph.
README = {"lines": 116, "first": 40}
# The pages that people read; recipe.md is the program's. lab/experiments/tables.py fills the tables of these.
BOOK = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", *(
    str(page.relative_to(ROOT)) for folder in ("docs", "lab/docs") for page in sorted((ROOT / folder).glob("**/*.md"))
    if page.stem not in ("recipe", "SUMMARY"))]
# Pages that are held to the budget.
PAGES = [*BOOK, "lab/experiments/README.md", "data/README.md"]
FENCE = re.compile(r"\s*(```|~~~)")
ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+")
TABLE_RULE = re.compile(r"[|:\- ]+")
LINK = re.compile(r"(!?)\[([^\]]*)\]\([^)]*\)")
SPAN = re.compile(r"`[^`]*`")
END = re.compile(r"""(?<=[.!?])[)*"']*\s+(?=[("'*]*[A-Z0-9\u0001])""")
CODE = "\u0001"  # stands for a span of code


def blocks(text):
    """Paragraphs and list items of a page as (line, text), and the cells of its tables as (line, cell)."""
    paragraphs, cells, fence, begun, blank = [], [], False, None, True
    for number, line in enumerate(text.splitlines(), 1):
        if FENCE.match(line):
            fence, begun, blank = not fence, None, False
            continue
        if fence:
            continue
        if line.startswith("|"):
            inner = line.strip().strip("|")
            if not TABLE_RULE.fullmatch(inner):
                cells += [(number, cell.strip()) for cell in re.split(r"(?<!\\)\|", inner)]
            begun = None
        elif not line.strip() or line.startswith(("#", "<")):
            begun = None
        elif line.startswith("    ") and blank:
            continue  # a block of code by its indentation: what follows is one too
        elif ITEM.match(line) or begun is None:
            begun = [number, ITEM.sub("", line, count=1)]
            paragraphs.append(begun)
        else:
            begun[1] += " " + line.strip()
        blank = not line.strip() or line.startswith("#")
    return paragraphs, cells


def plain(text):
    """`text` without pictures and the targets of links; a span of code becomes one sign."""
    text = LINK.sub(lambda link: "" if link[1] else link[2], text)
    return SPAN.sub(CODE, text).replace("**", "").strip()


def sentences(paragraphs):
    """(line of the paragraph, sentence) of each sentence that has a word."""
    parts = [(line, part.strip()) for line, text in paragraphs for part in END.split(plain(text))]
    return [(line, part) for line, part in parts if re.search(rf"\w|{CODE}", part)]


def words(sentence):
    return sum(bool(re.search(rf"\w|{CODE}", word)) for word in sentence.split())


def length(cell):
    return len(LINK.sub(lambda link: link[2], cell))


def counts(path):
    """What is counted of a page, by the names of the budget, and the sentences and cells behind it."""
    text = path.read_text(encoding="utf-8")
    paragraphs, cells = blocks(text)
    said = sentences(paragraphs)
    numbers = {"sentences": len(said), "longest": max((words(part) for _, part in said), default=0),
               "cell": max((length(cell) for _, cell in cells), default=0)}
    if path.name == "README.md":
        numbers |= {"lines": len(text.splitlines()), "first": sum(words(part) for _, part in sentences(paragraphs[:1]))}
    return numbers, said, cells


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", help="instead of those that are held to the budget")
    parser.add_argument("--longest", type=int, default=0, help="print so many of the longest sentences and cells")
    arguments = parser.parse_args()
    print(f"{'page':28} {'sentences':>9} {'longest':>7} {'cell':>5}")
    over = []
    for name in arguments.pages or PAGES:
        numbers, said, cells = counts(ROOT / name)
        print(f"{name:28} {numbers['sentences']:9} {numbers['longest']:7} {numbers['cell']:5}")
        over += [f"{name}: {what} {numbers[what]}, at most {most}" for what, most in (BUDGET | README).items()
                 if numbers.get(what, 0) > most]
        for line, part in sorted(said, key=lambda line_and_text: -words(line_and_text[1]))[:arguments.longest]:
            print(f"  {name}:{line}: {words(part)} words: {part.replace(CODE, '`…`')}")
        for line, cell in sorted(cells, key=lambda line_and_text: -length(line_and_text[1]))[:arguments.longest]:
            print(f"  {name}:{line}: a cell of {length(cell)}: {cell}")
    print("\n".join(over) or "all pages are within their budget")
    sys.exit(bool(over))


if __name__ == "__main__":
    main()
