"""Runs the code of a notebook from top to bottom: `python notebook.py ../../docs/pytorch.ipynb [--write]`, which keeps
what the cells print."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

RUN = """
import contextlib, io, json, sys
names, printed = {"__name__": "__main__"}, []
for source in json.load(sys.stdin):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(source, "<cell>", "exec"), names)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


def environment():
    """With the package of this tree, also in folders of other packages."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def cells(path):
    return [cell for cell in json.loads(Path(path).read_text())["cells"] if cell["cell_type"] == "code"]


def outputs(path):
    """What each code cell of the file has printed."""
    return ["".join("".join(x.get("text", [])) for x in cell["outputs"]) for cell in cells(path)]


def run(path):
    """What each code cell prints, in a process of its own."""
    sources = json.dumps(["".join(cell["source"]) for cell in cells(path)])
    given = {"input": sources, "capture_output": True, "text": True, "cwd": Path(path).parent}
    done = subprocess.run([sys.executable, "-c", RUN], env={**environment(), "OMP_NUM_THREADS": "1"}, **given)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def rounded(text):
    """With numbers of two digits, and none for times."""
    text = re.sub(r"\d+(\.\d+)? s\b", "s", text)
    return re.sub(r"-?\d+\.\d+(e[-+]\d+)?", lambda x: f"{float(x[0]):.1e}" if abs(float(x[0])) > 1e-3 else "0", text)


def main():
    path = Path(sys.argv[1])
    file, printed = json.loads(path.read_text()), iter(run(path))
    for count, cell in enumerate((x for x in file["cells"] if x["cell_type"] == "code"), 1):
        text = next(printed)
        cell["execution_count"] = count
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": text}] if text else []
        print(text, end="")
    if "--write" in sys.argv:
        path.write_text(json.dumps(file, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
