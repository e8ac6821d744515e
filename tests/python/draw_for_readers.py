"""Draws comments and functions for a reader who knows FlashAttention and Burn, but not Sieve, to explain.

    python3 tests/python/draw_for_readers.py SEED [COMMENTS FUNCTIONS]      10 comments and 5 functions by default

A comment is a run of comment lines of a .rs, .cu or .cuh file; a function is one of 8 to 60 lines outside tests. One seed
draws the same for the same tree.
"""

import random
import re
import subprocess
import sys

TESTS = re.compile(r"#\[cfg\(test\)\]\n(?:pub(?:\(crate\))? )?mod tests")
FUNCTION = re.compile(r"^ *(pub(\([a-z]+\))? )?(const )?(unsafe )?fn \w+")


def blocks(path, lines):
    """Comments and functions of a file, each as (first line, its lines)."""
    comments, functions, begun = [], [], None
    for n, line in enumerate([*lines, ""]):
        if line.strip().startswith("//"):
            begun = n if begun is None else begun
        elif begun is not None:
            comments.append((begun, lines[begun:n]))
            begun = None
        if FUNCTION.match(line) and path.endswith(".rs"):
            indent = line[: len(line) - len(line.lstrip())]
            end = next((m for m in range(n, len(lines)) if lines[m].startswith(indent + "}")), n)
            if 8 <= end - n + 1 <= 60:
                functions.append((n, lines[n : end + 1]))
    return comments, functions


def main():
    if any(word.startswith("-") for word in sys.argv[1:]):
        sys.exit(__doc__)
    seed, *counts = (int(word) for word in sys.argv[1:])
    num_comments, num_functions = counts or (10, 5)
    listed = subprocess.run(["git", "ls-files", "*.rs", "*.cu", "*.cuh"], check=True, capture_output=True, text=True)
    comments, functions = [], []
    for path in listed.stdout.split():
        with open(path, encoding="utf-8") as file:
            text = file.read()
        if "test" in path:
            continue
        code = TESTS.split(text)[0].split("\n")
        of_file = blocks(path, code)
        comments += [(path, *block) for block in of_file[0]]
        functions += [(path, *block) for block in of_file[1]]
    draw = random.Random(seed)
    for what, drawn in [
        ("comment", draw.sample(comments, num_comments)),
        ("function", draw.sample(functions, num_functions)),
    ]:
        for number, (path, first, lines) in enumerate(drawn, 1):
            print(f"==== {what} {number}: {path}:{first + 1}")
            print("\n".join(lines))


if __name__ == "__main__":
    main()
