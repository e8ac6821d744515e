"""Counts what a change must not make worse: how many files one idea touches, and what is hard to read.

    python3 tests/python/houses.py            all numbers, each beside its limit; exit code 1 where one is above
    python3 tests/python/houses.py --list     the files and functions behind them, too

- files besides tests, outside of the two folders of kinds, that name a kind's variant (`Attention::..`), and files with
  the word moba, a kind like any other: what a new kind touches;
- files in circles: those of a crate that use each other, more than two of them. A path counts for the file that has the
  name, also where it goes by a `use` of another; a module written out in its file (`mod cpu { .. }`) is that file, so
  that its `super` is the file, too; tests do not count;
- functions of more than 110 lines;
- words of a kernel's params struct whose value shares no word with them at the launch;
- functions of eight lines and more without a sentence above them, in Python a docstring. Methods of a trait's
  implementation have the trait's; what only tests have does not count.

A number that falls below its limit is the new limit: the program says so, and LIMITS below is changed with it.
"""

import ast
import collections
import pathlib
import re
import subprocess
import sys
import textwrap

import draw_for_readers
import kinds

ROOT = pathlib.Path(__file__).parents[2]
TEST_FILE = re.compile(r"(^|/)(tests/|tests\.rs$|testing\.rs$|test_\w+\.rs$|benches/|examples/)")
MOST_LINES = 110
LIMITS = {
    # The table of what was measured of each kind on cards, which is no property of a kind.
    "Rust files that name a variant": 1,
    # One is that table; one has the recipes of all sizes, which were four files that this did not count.
    "Rust files with moba": 15,
    # Six are of the PyTorch layers: these, their test, the test of every function's axes, two examples, and the trainers of
    # others. The lab may name a kind wherever it compares it.
    "Python files with moba": 18,
    "files in circles": 0,
    f"functions above {MOST_LINES} lines": 0,
    "params words of another name": 0,
    "functions without a sentence": 0,
}


def outside_tests(text):
    """The lines of Rust outside of items under `#[cfg(test)]` or `#[cfg(all(test, ..))]`: such an item ends with the
    first line that closes it at the attribute's indentation."""
    skip_from = None
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        if skip_from is not None:
            if indent == skip_from and line.rstrip()[-1:] in ("}", ";"):
                skip_from = None
        elif re.match(r"#\[cfg\((all\()?test\b", line.strip()):
            skip_from = indent
        else:
            yield line


def without_comments(text):
    """Rust without comments, strings, and items under `#[cfg(test)]`."""
    return "\n".join(re.sub(r'"(\\.|[^"\\])*"', '""', line).split("//")[0] for line in outside_tests(text))


def leaves(tree, prefix=()):
    """Paths of the tree behind a `use`, each with the name that it gets."""
    tree = tree.strip()
    if tree.endswith("}"):
        head, inner = tree[:-1].split("{", 1)
        prefix = (*prefix, *(part for part in head.strip().split("::") if part))
        depth, start = 0, 0
        for at, letter in enumerate([*inner, ","]):
            depth += {"{": 1, "}": -1}.get(letter, 0)
            if letter == "," and depth == 0:
                if inner[start:at].strip():
                    yield from leaves(inner[start:at], prefix)
                start = at + 1
        return
    path, _, alias = tree.partition(" as ")
    path = (*prefix, *(part.strip() for part in path.split("::") if part.strip()))
    if path and path[-1] == "self":
        path = path[:-1]
    if path:
        yield path, alias.strip() or path[-1]


def modules(text):
    """The text of a file's own module, and of those that are written out in it (`mod cpu { .. }`), by path."""
    lines_of, open_ = collections.defaultdict(list), []
    for line in text.split("\n"):
        if open_ and line == open_[-1][1] + "}":
            open_.pop()
        elif start := re.match(r"(\s*)(?:pub(?:\([^)]*\))?\s+)?mod (\w+) \{$", line):
            open_.append((start[2], start[1]))
        else:
            lines_of[tuple(name for name, _ in open_)].append(line)
    return {path: "\n".join(lines) for path, lines in lines_of.items()}


class Crate:
    """The files of a crate by module path, and which uses which."""

    def __init__(self, sources):
        """sources: text by path below src/."""
        self.modules, self.file_of = {}, {}
        for path, text in sources.items():
            parts = path.removesuffix(".rs").split("/")
            file = () if parts in (["lib"], ["main"]) else tuple(parts)
            for inner, lines in modules(without_comments(text)).items():
                self.modules[(*file, *inner)] = lines
                self.file_of[(*file, *inner)] = file
        self.files = set(self.file_of.values())
        self.names, self.used = {}, {}
        for module, text in self.modules.items():
            uses = re.findall(r"^\s*(pub(?:\([^)]*\))?\s+)?use\s+([^;]+);", text, re.M)
            self.names[module] = {name: path for _, tree in uses for path, name in leaves(tree)}
            self.used[module] = [path for pub, tree in uses if not pub for path, _ in leaves(tree)]

    def resolve(self, module, path, visited=()):
        """The module with the name at the end of a path that is written in `module`; None where it is another
        crate's."""
        path = list(path)
        if path[0] == "crate":
            at, path = (), path[1:]
        elif path[0] in ("super", "self") or (*module, path[0]) in self.modules:
            at = module
            while path and path[0] in ("super", "self"):
                at, path = (at[:-1] if path[0] == "super" else at), path[1:]
        else:
            return None
        while path and (*at, path[0]) in self.modules:
            at, path = (*at, path[0]), path[1:]
        if path and (at, path[0]) not in visited and path[0] in self.names.get(at, {}):
            there = self.resolve(at, (*self.names[at][path[0]], *path[1:]), (*visited, (at, path[0])))
            return there if there is not None else at
        return at

    def arrows(self):
        uses = collections.defaultdict(set)
        for module, text in self.modules.items():
            names = self.names[module]
            paths = list(self.used[module])
            body = re.sub(r"^\s*(pub(?:\([^)]*\))?\s+)?use\s+[^;]+;|\bpub\(in [^)]*\)", "", text, flags=re.M)
            for words in re.findall(r"\b[a-z_]\w*(?:::\w+)+", body):
                path = tuple(words.split("::"))
                paths.append((*names[path[0]], *path[1:]) if path[0] in names else path)
            for path in paths:
                to = self.resolve(module, path)
                if to is not None and self.file_of[to] != self.file_of[module]:
                    uses[self.file_of[module]].add(self.file_of[to])
        return uses

    def circles(self):
        """Sets of more than two files each of which uses each other, maybe by way of the others."""
        arrows = self.arrows()

        def reached(start):
            reached, open_ = set(), [start]
            while open_:
                for to in arrows[open_.pop()]:
                    if to not in reached:
                        reached.add(to)
                        open_.append(to)
            return reached

        reach = {module: reached(module) for module in self.files}
        groups = {frozenset(b for b in reach[a] if a in reach[b]) for a in self.files if a in reach[a]}
        return sorted((sorted(group) for group in groups if len(group) > 2), key=len, reverse=True)


def long_functions(text):
    """Name and lines of functions of more than MOST_LINES lines."""
    lines, long = text.split("\n"), []
    for at, line in enumerate(lines):
        if start := re.match(r"(\s*)(?:pub(?:\([^)]*\))?\s+)?(?:const |unsafe |async |extern \"C\" )*fn (\w+)", line):
            ends = (n for n in range(at, len(lines)) if lines[n] == start[1] + "}" or lines[n] == start[1] + ");")
            end = at if line.rstrip()[-1:] in (";", "}") else next(ends, at)
            if end - at + 1 > MOST_LINES:
                long.append(f"{start[2]}, {end - at + 1} lines")
    return long


def parts(name):
    """The words of a name, in the singular; where a range starts is its first."""
    words = (re.sub(r"ies$", "y", word).rstrip("s") for word in re.split(r"[_.]", name) if word)
    return {{"start": "first", "len": "length", "dim": "width"}.get(word, word) for word in words}


def other_names(text):
    """Words of params structs whose values share no word with them: `word: value` in `params!(.. { .. })`."""
    names = []
    for struct, body in re.findall(r"params!\((\w+) \{(.*?)\}\)", text, re.S):
        for word, value in re.findall(r"(?:^|[\s,{])(\w+): ([\w.]+)\s*(?:,|$)", body, re.M):
            if not value[0].isdigit() and value not in ("true", "false") and not parts(word) & parts(value):
                names.append(f"{struct}.{word}: {value}")
    return names


def tracked():
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\n")
    paths = [name for name in names if name.endswith((".rs", ".py")) and (ROOT / name).is_file()]
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in paths}


def measured(files):
    """What stands behind each number, by name."""
    me = pathlib.Path(__file__).name
    files = {path: text for path, text in files.items() if not path.endswith((me, "test_houses.py"))}
    rust = {path: text for path, text in files.items() if path.endswith(".rs")}
    python = {path: text for path, text in files.items() if path.endswith(".py")}
    named = re.compile(rf"\bAttention(Kind)?::({'|'.join(kinds.variants())})\b")
    rooms = "crates/sieve-core/src/kinds", "crates/sieve-nn/src/kinds"
    others = {path: text for path, text in rust.items() if not TEST_FILE.search(path) and not path.startswith(rooms)}
    circles, crates = [], collections.defaultdict(dict)
    for path, text in rust.items():
        if (place := re.match(r"(?:lab/)?crates/([^/]+)/src/(.*)", path)) and not TEST_FILE.search(path):
            crates[place[1]][place[2]] = text
    for crate, sources in sorted(crates.items()):
        circles += [(crate, "/".join(file) or "lib") for group in Crate(sources).circles() for file in group]
    return {
        "Rust files that name a variant": [
            path for path, text in others.items() if named.search(without_comments(text))
        ],
        "Rust files with moba": [path for path, text in rust.items() if "moba" in text.lower()],
        "Python files with moba": [
            path for path, text in python.items() if "moba" in text.lower() and not path.startswith("lab/")],
        "files in circles": [f"{crate} {file}" for crate, file in circles],
        f"functions above {MOST_LINES} lines": [
            f"{path} {name}" for path, text in rust.items() for name in long_functions(text)
        ],
        "params words of another name": [f"{path} {word}" for path, text in rust.items() for word in other_names(text)],
        "functions without a sentence": without_a_sentence(files),
    }


def without_a_sentence(files):
    """Functions as a reader would draw them (draw_for_readers.py) that no comment or docstring explains."""
    found = []
    for stratum, functions in draw_for_readers.drawn_from(files)["function"].items():
        for path, first, lines in functions:
            if stratum == "Python":
                has_one = ast.get_docstring(ast.parse(textwrap.dedent("\n".join(lines))).body[0]) is not None
            else:
                before = files[path].split("\n")[:first]
                above = [line.strip() for line in before if line.strip()]
                while above and above[-1].startswith(("#[", ")]", "template")):
                    above.pop()
                of_trait = re.compile(r"(unsafe )?impl\b.* for ")
                items = [line for line in before if line[:1] not in ("", " ", "/", "#", "}", ")")]
                is_of_trait = lines[0].startswith(" ") and bool(items) and bool(of_trait.match(items[-1]))
                has_one = bool(above) and above[-1].startswith("//") or stratum == "Rust" and is_of_trait
            if not has_one:
                found.append(f"{path}:{first + 1} {lines[0].strip()}")
    return found


def main():
    if any(word != "--list" for word in sys.argv[1:]):
        sys.exit(__doc__)
    above, numbers = [], measured(tracked())
    for name, behind in numbers.items():
        limit = LIMITS[name]
        print(f"{name:32} {len(behind):4}  at most {limit}")
        if len(behind) > limit:
            above.append(f"{name}: {len(behind)}, and at most {limit}\n  hint: --list names them")
        elif len(behind) < limit:
            print(f"  less than before: set its limit in {pathlib.Path(__file__).name} to {len(behind)}")
        if sys.argv[1:]:
            print(*(f"  {line}" for line in behind), sep="\n")
    if above:
        sys.exit("\n".join(above))


if __name__ == "__main__":
    main()
