"""Draws comments and functions for a reader who knows FlashAttention and Burn, but not Sieve, to explain.

    python3 tests/python/draw_for_readers.py SEED [COMMENTS FUNCTIONS]      10 comments and 5 functions by default

Three strata, each drawn from in turn, so that none is left out: Rust (.rs), CUDA (.cu and .cuh: device and global
functions), Python (.py of python/ and lab/). A comment is a run of comment lines, in Python a docstring too; a function
has 8 to 60 lines. Nothing of tests is drawn: neither files and folders named so, nor functions and modules that only a
test build has. First the counts of each stratum are printed. One seed draws the same for the same tree.
"""

import ast
import random
import re
import subprocess
import sys
from pathlib import PurePosixPath

OF_TESTS = re.compile(r"(^|[/_])(tests?|conftest)([/_.]|$)")
# An attribute of what only a test build has; `any(.., test)` and `not(test)` are of other builds as well.
TEST_ATTRIBUTE = re.compile(r"\s*#\[(cfg\(test\)|cfg\(all\(.*\btest\b|(\w+::)*test\b|should_panic|ignore\b)")
MODULE = re.compile(r"\s*(?:pub(?:\([^)]*\))? )?mod (\w+);")
FUNCTION = {
    "Rust": re.compile(r'\s*(pub(\([^)]*\))? )?(const )?(async )?(unsafe )?(extern "C" )?fn \w+'),
    "CUDA": re.compile(r'\s*(static )?(extern "C" )?(inline )?(DEVICE|__global__|(__host__ )?__device__)\s'),
}
STRATA = {".rs": "Rust", ".cu": "CUDA", ".cuh": "CUDA", ".py": "Python"}
LINES = range(8, 61)


def stratum_of(path):
    """Rust, CUDA or Python; None for a file of tests and for one that is not drawn from."""
    stratum = STRATA.get(PurePosixPath(path).suffix)
    is_drawn = stratum != "Python" or path.startswith(("python/", "lab/"))
    return stratum if is_drawn and not OF_TESTS.search(path) else None


def indent_of(line):
    return line[: len(line) - len(line.lstrip())]


def end_of(lines, first):
    """The last line of the item that begins in `first`, by its braces' indent."""
    for opens in range(first, len(lines)):
        line = lines[opens].split("//")[0].rstrip()
        if line.endswith("{"):
            closing = indent_of(lines[first]) + "}"
            return next((n for n in range(opens + 1, len(lines)) if lines[n].startswith(closing)), opens)
        if line.endswith((";", "}")):
            break
    return opens


def test_modules(path, text):
    """Files and folders of the modules that only a test build of a Rust file has."""
    place = PurePosixPath(path)
    folder = place.parent if place.stem in ("lib", "main", "mod") else place.with_suffix("")
    lines = text.split("\n")
    named = [MODULE.match(after) for line, after in zip(lines, lines[1:]) if TEST_ATTRIBUTE.match(line)]
    return [f"{folder / module[1]}{end}" for module in named if module for end in (".rs", "/")]


def without_tests(lines):
    """Lines of a Rust file, those of tests empty, with the comments and attributes above them."""
    kept = list(lines)
    for n, line in enumerate(lines):
        if not TEST_ATTRIBUTE.match(line) or not kept[n]:
            continue
        first, item = n, n
        while first and lines[first - 1].strip().startswith(("//", "#[")):
            first -= 1
        while item + 1 < len(lines) and lines[item].strip().startswith(("//", "#[")):
            item += 1
        last = end_of(lines, item)
        kept[first : last + 1] = [""] * (last + 1 - first)
    return kept


def comments_of(lines, mark):
    """Runs of comment lines, each as (first line, its lines)."""
    comments, begun = [], None
    for n, line in enumerate([*lines, ""]):
        if line.strip().startswith(mark) and not line.startswith("#!"):
            begun = n if begun is None else begun
        elif begun is not None:
            comments.append((begun, lines[begun:n]))
            begun = None
    return comments


def functions_of(lines, stratum):
    """Functions of Rust or CUDA with a body, CUDA's with the template above."""
    functions = []
    for n, line in enumerate(lines):
        if FUNCTION[stratum].match(line):
            end, first = end_of(lines, n), n
            while first and lines[first - 1].strip().startswith("template"):
                first -= 1
            functions.append((first, lines[first : end + 1]))
    return functions


def of_python(text):
    """Comments, docstrings among them, and functions of a Python file; none of its test functions and classes."""
    lines, tree = text.split("\n"), ast.parse(text)
    comments, functions, of_tests = comments_of(lines, "#"), [], set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        name = getattr(node, "name", "")
        if node in of_tests or name.startswith(("test_", "Test")):
            of_tests.update(ast.walk(node))
            continue
        if ast.get_docstring(node) is not None:
            comments.append((node.body[0].lineno - 1, lines[node.body[0].lineno - 1 : node.body[0].end_lineno]))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
            functions.append((first, lines[first : node.end_lineno]))
    return sorted(comments), sorted(functions)


def drawn_from(files):
    """{"comment" or "function": {stratum: [(path, first line, its lines)]}} of {path: text}."""
    names = ("Rust", "CUDA", "Python")
    pools = {what: {name: [] for name in names} for what in ("comment", "function")}
    of_tests = tuple(name for path, text in files.items() if path.endswith(".rs") for name in test_modules(path, text))
    for path, text in files.items():
        stratum = stratum_of(path)
        if stratum is None or path.startswith(of_tests):
            continue
        if stratum == "Python":
            comments, functions = of_python(text)
        else:
            lines = without_tests(text.split("\n")) if stratum == "Rust" else text.split("\n")
            comments, functions = comments_of(lines, "//"), functions_of(lines, stratum)
        pools["comment"][stratum] += [(path, *block) for block in comments]
        pools["function"][stratum] += [(path, *block) for block in functions if len(block[1]) in LINES]
    return pools


def draw(pools, count, generator):
    """So many of the strata in turn, as long as each has some."""
    shuffled = [generator.sample(pool, len(pool)) for pool in pools.values()]
    turns = max(map(len, shuffled), default=0)
    return [pool[turn] for turn in range(turns) for pool in shuffled if turn < len(pool)][:count]


def main():
    if any(word.startswith("-") for word in sys.argv[1:]) or len(sys.argv) not in (2, 4):
        sys.exit(__doc__)
    seed, *counts = (int(word) for word in sys.argv[1:])
    listed = ["git", "ls-files", *(f"*{suffix}" for suffix in STRATA)]
    paths = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split()
    files = {}
    for path in paths:
        with open(path, encoding="utf-8") as file:
            files[path] = file.read()
    generator = random.Random(seed)
    for (what, pools), count in zip(drawn_from(files).items(), counts or (10, 5)):
        print(f"==== {what}s: " + ", ".join(f"{name} {len(pool)}" for name, pool in pools.items()))
        for number, (path, first, lines) in enumerate(draw(pools, count, generator), 1):
            print(f"==== {what} {number}: {path}:{first + 1}")
            print("\n".join(lines))


if __name__ == "__main__":
    main()
