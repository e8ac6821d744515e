"""Sixty one-line faults of lab/notes/mutants.toml, and which test finds each.

    mutants.py draw                      lines of the seeded draw, in their order
    mutants.py check TREE                which faults no longer apply to a tree
    mutants.py instrument TREE           writes all faults into a tree (a copy!), each off until SIEVE_MUTANT names it
    mutants.py build TREE                builds it once: tests, examples, program; put a lock's name before as a word
    mutants.py run TREE OUT [ID ...]     runs `found_by` and then other tests under each fault until one fails; OUT gets
                                         a JSON line each

A fault of Rust becomes `(if SIEVE_MUTANT is its id { new } else { old })`. One of a kernel is a changed line of the
text that the copy's sieve-gpu puts together, so the emulator and NVRTC compile it. Faults whose `run` is "gpu" are
found by `sieve kernels check` of the instrumented program on a GPU alone.
"""

import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIST = ROOT / "lab/notes/mutants.toml"

# The draw: lines of each pool's files, sorted by file and number, without tests and without lines that hold no code;
# shuffled by `random.Random(f"{SEED} {pool}")`. They are read in that order; a line where no sensible fault is possible,
# or whose fault changes nothing observable, is drawn again. lab/notes/mutants.toml has the place of each line in the order.
SEED = 20261122
POOLS = {
    "kernels": ["kernels"],
    "ops and cpu": ["crates/sieve-ops/src", "crates/sieve-cpu/src"],
    "select, train and data": ["crates/sieve-select/src", "crates/sieve-train/src", "crates/sieve-data/src"],
}
TEST_FILE = re.compile(r"(^|/)(tests?|testing|test_data|mutated)(/|\.rs$)")
NO_CODE = re.compile(r"\s*($|//|/\*|\*|#|(pub(\(\w+\))? )?(use|mod) |[\W]+$|\}? ?else \{$)")


def drawn(pool):
    rows = []
    for folder in POOLS[pool]:
        for path in sorted((ROOT / folder).rglob("*")):
            name = str(path.relative_to(ROOT))
            if path.suffix not in (".rs", ".cu", ".cuh") or TEST_FILE.search(name):
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if line.startswith("#[cfg(test)]"):
                    break
                if not NO_CODE.match(line):
                    rows.append((name, number, line.strip()))
    random.Random(f"{SEED} {pool}").shuffle(rows)
    return rows


def mutants():
    return tomllib.loads(LIST.read_text())["mutant"]


def place(text, mutant):
    """Where `old` begins: its first occurrence behind `after`, both of which must be there; None if not."""
    at = text.find(mutant["after"]) if "after" in mutant else 0
    at = at if at < 0 else text.find(mutant["old"], at + len(mutant.get("after", "")))
    return None if at < 0 else at


def misplaced(tree):
    problems = []
    for mutant in mutants():
        path = tree / mutant["file"]
        text = path.read_text() if path.exists() else ""
        anchor = mutant.get("after", mutant["old"])
        if text.count(anchor) != 1 or place(text, mutant) is None:
            problems.append(f"{mutant['id']}: {mutant['file']} has {text.count(anchor)} times: {anchor}")
    return problems


RUST = (
    '(if {{ static M: ::std::sync::OnceLock<bool> = ::std::sync::OnceLock::new(); *M.get_or_init(|| '
    '::std::env::var("SIEVE_MUTANT").is_ok_and(|m| m == "{id}")) }} {{ {new} }} else {{ {old} }})'
)
KERNEL_LINE = '''
/// The line, or what the fault that SIEVE_MUTANT names makes of it.
fn mutant_line<'a>(file: &str, number: usize, line: &'a str) -> &'a str {
    static MUTANT: LazyLock<String> = LazyLock::new(|| std::env::var("SIEVE_MUTANT").unwrap_or_default());
    match (MUTANT.as_str(), file, number) {
%s        _ => line,
    }
}
'''


def instrument(tree):
    assert tree.resolve() != ROOT, "instrument a copy"
    problems = misplaced(tree)
    assert not problems, "\n".join(problems)
    rows, edits = [], {}
    for mutant in mutants():
        path = tree / mutant["file"]
        text = path.read_text()
        at, old = place(text, mutant), mutant["old"]
        if path.suffix == ".rs":
            edits.setdefault(path, []).append((at, old, RUST.format(**mutant)))
            continue
        begin, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
        line = text[begin:at] + mutant["new"] + text[at + len(old) : end]
        file = mutant["file"].removeprefix("kernels/")
        rows.append(f'        ("{mutant["id"]}", "{file}", {text.count(chr(10), 0, at) + 1}) => r##"{line}"##,\n')
    for path, changes in edits.items():
        text = path.read_text()
        for at, old, new in sorted(changes, reverse=True):
            text = text[:at] + new + text[at + len(old) :]
        path.write_text(text)
    source = tree / "crates/sieve-gpu/src/runtime/source.rs"
    text = source.read_text()
    assert text.count("out.push_str(line);") == 1, "the text assembly has changed: mend this script"
    text = text.replace("out.push_str(line);", "out.push_str(mutant_line(file, number, line));")
    source.write_text(text.replace("#[cfg(test)]", KERNEL_LINE % "".join(rows) + "\n#[cfg(test)]", 1))


def build(tree, lock):
    test = [*lock, "cargo", "test", "--release", "--workspace", "--no-run", "--message-format=json"]
    out = subprocess.run(test, cwd=tree, stdout=subprocess.PIPE, text=True, check=True).stdout
    executables = []
    for row in (json.loads(line) for line in out.splitlines() if line.startswith("{")):
        if row.get("executable") and row.get("profile", {}).get("test"):
            package = pathlib.Path(row["manifest_path"]).parent
            executables.append({"package": package.name, "target": row["target"]["name"], "path": row["executable"]})
    (tree / "target/mutants.json").write_text(json.dumps(executables, indent=1))
    subprocess.run([*lock, "cargo", "build", "--release"], cwd=tree, check=True)


def watched(command, cwd, mutant, limit, failed):
    """The first word of the output that `failed` finds, or how the command ended wrongly, or None."""
    env = os.environ | {"SIEVE_MUTANT": mutant, "CARGO_MANIFEST_DIR": str(cwd), "RUST_BACKTRACE": "0"}
    child = subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                             errors="replace", start_new_session=True)
    late = threading.Event()

    def stop():
        late.set()
        os.killpg(child.pid, signal.SIGKILL)

    timer = threading.Timer(limit, stop)
    timer.start()
    failure = next((match[1] for line in child.stdout if (match := failed.search(line))), None)
    if failure and child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
    code = child.wait()
    timer.cancel()
    if failure is None and code:
        failure = f"(no end within {limit} s)" if late.is_set() else f"(exit status {code})"
    return failure


def first_failure(command, cwd, mutant, limit, failed):
    """As `watched`, of a test that fails alone under the fault and passes without it: clocks of a busy machine."""
    skipped = []
    while failure := watched([*command, *skipped], cwd, mutant, limit, failed):
        test_alone = [*command[:1], "--exact", failure]
        if failed is not TEST or failure.startswith("("):
            return failure
        if watched(test_alone, cwd, mutant, limit, failed) and not watched(test_alone, cwd, "", limit, failed):
            return failure
        skipped += ["--skip", failure]
    return None


# It reads the sources for names of environment variables, and finds SIEVE_MUTANT.
SEES_THE_COPY = "the_page_of_the_command_line_names_every_variable"
TEST = re.compile(r"^test (\S+) .*\bFAILED")
EMULATED = re.compile(r"s  (.*): \d+ cases, [1-9]\d* failed")


def run(tree, out, wanted):
    binaries = json.loads((tree / "target/mutants.json").read_text())

    def tests(package):
        rows = [row for row in binaries if row["package"] == package]
        folder = tree / ("tests" if package == "tests" else f"{'lab/' * (tree / 'lab/crates' / package).is_dir()}crates/{package}")
        words = ["--test-threads=2", "--skip", SEES_THE_COPY]
        return [(row["package"], [row["path"], *words], folder, TEST) for row in rows]

    emulate = [("emulate", [str(tree / "target/release/examples/emulate")], tree, EMULATED)]
    for mutant in mutants():
        if mutant["id"] not in wanted and (wanted or mutant.get("run") == "gpu"):
            continue
        own = mutant["file"].split("/")[1]
        kernel = mutant["file"].startswith("kernels/")
        others = sorted({row["package"] for row in binaries} - {own, "tests"})
        packages = ["sieve-bench"] if kernel else [own, *others, "tests"]
        steps = emulate * kernel + [step for package in packages for step in tests(package)]
        # The test that found the fault last time runs first, alone.
        where, _, test = mutant["found_by"].partition(": ")
        first = [(name, [*command[:1], "--exact", test.split(" ")[0]], folder, failed)
                 for name, command, folder, failed in steps if failed is TEST and name == where]
        steps = first + steps
        failure, where, begin = None, "", time.time()
        for where, command, folder, failed in steps:
            if failure := first_failure(command, folder, mutant["id"], 900, failed):
                break
        found_by = f"{where}: {failure}" if failure else ""
        row = {"id": mutant["id"], "found_by": found_by, "seconds": round(time.time() - begin, 1)}
        print(json.dumps(row), flush=True)
        with open(out, "a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    action, *words = sys.argv[1:] or ["help"]
    if action == "draw":
        for pool in POOLS:
            lines = drawn(pool)
            print(f"# {pool}: {len(lines)} lines")
            for order, (name, number, text) in enumerate(lines[:100], 1):
                print(order, f"{name}:{number}", text)
    elif action == "check":
        sys.exit("\n".join(misplaced(pathlib.Path(words[0]))) or 0)
    elif action == "instrument":
        instrument(pathlib.Path(words[0]))
    elif action == "build":
        build(pathlib.Path(words[-1]), words[:-1])
    elif action == "run":
        run(pathlib.Path(words[0]), words[1], words[2:])
    else:
        sys.exit(__doc__)
