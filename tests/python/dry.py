"""The dry form of the scripts that only GPUs run: nothing of them is started but the program's help.

    python3 tests/python/dry.py target/release/sieve

Of tests/gpu, lab/experiments and lab/rivals each shell script is parsed by `bash -n`, and each Python file is compiled.
The modules of this repository that it imports are on its path when it starts, and have the names that it takes. Each
call of the program in a shell script is looked up in the program's own help: the command is there, and every flag that
it is given. Flags that a script collects in an array, as `train=(train --recipe ..)`, are flags of the command that the
array begins with. Rivals (torch, FlashAttention and others) are imported by none of this, so a machine without them can
run it.
"""

import argparse
import ast
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ("tests/gpu", "lab/experiments", "lab/rivals")
GROUPS = ("eval", "data", "recipe", "tokenizer", "kernels")
# `"$sieve" train ..` and `"$program" ..`, and arrays of a command's words: `train=(train --recipe ..`.
CALL = re.compile(r'"?\$\{?(?:sieve|SIEVE|program)\}?"? +([a-z].*)')
ARRAY = re.compile(r"\b[a-z_]+=\(([a-z]+(?: [a-z]+)? --.*)")
# Of a line that adds to sys.path: `.parents[2]`, and `"tests/python"` behind that or behind the repository's root.
PARENT, FOLDER = re.compile(r"\.parents\[(\d+)\]"), re.compile(r'"([^"]+)"')
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def logical_lines(text):
    """(number, line) of a shell script: a line that ends with a backslash goes on, comments are left out."""
    begun, number = "", 0
    for at, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            continue
        begun, number = begun + line.rstrip("\\"), number or at
        if not line.endswith("\\"):
            yield number, begun
            begun, number = "", 0


def commands(line):
    """The program's commands on a line, each as the words before its flags and the flags."""
    for match in [*CALL.finditer(line), *ARRAY.finditer(line)]:
        # What follows a pipe, a redirection or another command is no argument.
        own = re.split(r"[|;&>)]", match[1])[0]
        for part in own.split(" -- "):
            words = []
            for word in part.split():
                if not re.fullmatch(r"[a-z]+(-[a-z]+)?", word):
                    break
                words.append(word)
            words = words[: 2 if words and words[0] in GROUPS else 1]
            if words:
                yield words, FLAG.findall(part)


class Helps:
    """The help of the program's commands."""

    def __init__(self, program):
        self.program, self.known = program, {}

    def of(self, words):
        key = tuple(words)
        if key not in self.known:
            done = subprocess.run([self.program, *words, "--help"], capture_output=True, text=True)
            self.known[key] = set(FLAG.findall(done.stdout)) if done.returncode == 0 else None
        return self.known[key]


def shell_problems(path, helps):
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
    if done.returncode:
        return [done.stderr.strip()], 0
    problems, count = [], 0
    for number, line in logical_lines(path.read_text(encoding="utf-8")):
        for words, flags in commands(line):
            known_flags, place = helps.of(words), f"{path.relative_to(ROOT)}:{number}: sieve {' '.join(words)}"
            if known_flags is None:
                problems.append(f"{place}: there is no such command")
                continue
            count += 1
            problems += [f"{place}: no {flag}" for flag in flags if flag not in known_flags]
    return problems, count


def defined(tree):
    """Names that a module has at its top."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return names


def imported(tree):
    """(module, line, names taken from it) of each import that names its module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module, node.lineno, [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, []) for alias in node.names)


def search_path(path, seen=()):
    """Folders where a script finds this repository's modules: its own, and those that it, or a module that it imports, adds to
    sys.path."""
    text = path.read_text(encoding="utf-8")
    folders = {path.parent}
    for line in text.splitlines():
        if "sys.path" in line:
            bases = [ROOT, *(path.parents[int(up)] for up in PARENT.findall(line))]
            folders |= {base / folder for base in bases for folder in FOLDER.findall(line) or [""]}
    for module, _, _ in imported(ast.parse(text)):
        for file in [folder / f"{module}.py" for folder in folders]:
            if file.is_file() and file not in seen:
                folders |= search_path(file, (*seen, path, file)) - {file.parent}
    return folders


def python_problems(path):
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except SyntaxError as error:
        return [f"{path.relative_to(ROOT)}:{error.lineno}: {error.msg}"]
    problems = []
    known = {path.parent, *path.parents[1].glob("*/"), *(ROOT / folder for folder in ("tests/python", "python/tests", *FOLDERS))}
    searched = search_path(path)
    for module, line, names in imported(tree):
        files = [folder / f"{module}.py" for folder in known if (folder / f"{module}.py").is_file()]
        within = [file for file in files if file.parent in searched]
        place = f"{path.relative_to(ROOT)}:{line}"
        if files and not within:
            problems.append(f"{place}: {module}.py is in {files[0].parent.relative_to(ROOT)}, which is not on its path")
        elif within:
            has = defined(ast.parse(within[0].read_text(encoding="utf-8")))
            problems += [f"{place}: {within[0].name} has no {name}" for name in names if name not in has and name != "*"]
    return problems


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=pathlib.Path)
    helps = Helps(parser.parse_args().program.resolve())
    problems, calls, files = [], 0, 0
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix == ".sh":
                file_problems, count = shell_problems(path, helps)
                problems, calls, files = problems + file_problems, calls + count, files + 1
            elif path.suffix == ".py":
                problems, files = problems + python_problems(path), files + 1
    print("\n".join(problems) or f"{files} scripts, {calls} calls of the program: all are there")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
