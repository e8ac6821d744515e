"""Counts lines of code by crate: no blank lines, comments or tests. Then engine and lab, and the share of verification.

    python3 tests/python/code_lines.py [REVISION ...]      one column for each revision; the last tag and HEAD
                                                           when none is named

Rust: `//` comments and `#[cfg(test)]` items go, and files that hold nothing but tests (tests.rs, tests/, testing.rs,
test_*.rs, the crates sieve-tests and sieve-testing). CUDA: `//` comments go. Python: comments and doc strings go.

The lab is what compares and measures: lab/ and tests/. The engine is all other code, with the PyTorch package; chores (xtask, sieve-testing) are neither.
The engine grows by features alone, and CHANGELOG says which; the lab is free.

Verification is Rust tests and sieve-bench. Its share is of all Rust with the tests, then of Rust and CUDA, then of
Rust, CUDA and Python, in percent.
"""

import collections
import io
import re
import subprocess
import sys
import tokenize

from houses import outside_tests

TESTS = "Rust tests"
TEST_FILE = re.compile(r"(^|/)(tests/|tests\.rs$|testing\.rs$|test_\w+\.(rs|py)$|sieve-testing/)")


# The first pattern is of commits before the lab had a folder.
LAB = re.compile(r"crates/(sieve-(eval|bench|report)|sieve/src/(eval|kernels))(/|\.rs$)|(lab|experiments|tests)/")
CHORES = re.compile(r"crates/(xtask|sieve-testing)/")
PARTS = "engine", "lab"


def git(*words):
    return subprocess.run(["git", *words], check=True, capture_output=True).stdout.decode()


def last_tag():
    """The last tag before HEAD, where there is one."""
    described = subprocess.run(["git", "describe", "--tags", "--abbrev=0"], check=False, capture_output=True)
    return described.stdout.decode().split()


def coded(lines):
    """How many lines are neither empty nor a comment of Rust or CUDA."""
    return sum(1 for line in lines if line.strip() and not line.strip().startswith("//"))


def rust_lines(text):
    return coded(outside_tests(text))


def cuda_lines(text):
    return coded(text.split("\n"))


def python_lines(text):
    lines, statement = set(), []
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in skipped or token.type == tokenize.ENDMARKER:
            continue
        if token.type != tokenize.NEWLINE:
            statement.append(token)
            continue
        # A statement that is one string is a doc string.
        if [part.type for part in statement] != [tokenize.STRING]:
            lines.update(n for part in statement for n in range(part.start[0], part.end[0] + 1))
        statement = []
    return len(lines)


COUNTERS = {"rs": rust_lines, "cu": cuda_lines, "cuh": cuda_lines, "py": python_lines}


def part(path):
    """The part of the project that a file belongs to; None of chores."""
    return None if CHORES.match(path) else PARTS[bool(LAB.match(path))]


def check(revision):
    """Ends in a sentence where git has no such revision."""
    words = ["git", "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"]
    if subprocess.run(words, check=False, capture_output=True).returncode:
        sys.exit(f"there is no revision {revision} in this repository")


def count(revision):
    """Lines of code by place, and by part of the project."""
    totals, parts = collections.Counter(), collections.Counter()
    for path in git("ls-tree", "-r", "--name-only", revision).split("\n"):
        ending = path.rsplit(".", 1)[-1]
        if ending not in COUNTERS:
            continue
        place = match[1] if (match := re.match(r"(?:lab/)?crates/([^/]+)/", path)) else path.split("/")[0]
        if ending == "py":
            place = "Python"
        text = git("show", f"{revision}:{path}")
        lines = 0 if TEST_FILE.search(path) and ending == "rs" else COUNTERS[ending](text)
        if lines:
            totals[place] += lines
            parts[part(path)] += lines
        if ending == "rs":
            totals[TESTS] += cuda_lines(text) - lines
    return totals, parts


def shares(totals):
    """Percent of verification in Rust; in Rust and CUDA; in Rust, CUDA and Python."""
    verification = totals[TESTS] + totals["sieve-bench"]
    without = [totals["kernels"] + totals["Python"], totals["Python"], 0]
    return [100 * verification / (totals.total() - lines) for lines in without]


def main():
    if any(word.startswith("-") for word in sys.argv[1:]):
        sys.exit(__doc__)
    revisions = sys.argv[1:] or [*last_tag(), "HEAD"]
    for revision in revisions:
        check(revision)
    counted = [count(revision) for revision in revisions]
    columns = [totals for totals, _ in counted]
    places = sorted(set().union(*columns) - {TESTS})
    print(f"{'':16}", *(f"{revision[:9]:>9}" for revision in revisions))
    for place in places:
        print(f"{place:16}", *(f"{column[place]:>9}" for column in columns))
    print(f"{'all':16}", *(f"{column.total() - column[TESTS]:>9}" for column in columns))
    for name in PARTS:
        print(f"{name:16}", *(f"{parts[name]:>9}" for _, parts in counted))
    print(f"{TESTS:16}", *(f"{column[TESTS]:>9}" for column in columns))
    for name, row in zip(["verified, Rust", "  and CUDA", "  and Python"], zip(*map(shares, columns))):
        print(f"{name:16}", *(f"{share:>8.1f}%" for share in row))


if __name__ == "__main__":
    main()
