"""The kinds of attention, read off the program's own list of them, and the shipped recipes."""

import pathlib
import re
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).parents[2]
LIST = ROOT / "crates/sieve-core/src/kinds/list.rs"
# A line of the list is `Variant(Shape) = "name",`.
KINDS = dict(re.findall(r'^    (\w+)(?:\(\w+\))? = "(\w+)",$', LIST.read_text(encoding="utf-8"), re.M))


def names():
    """Names in recipes."""
    return list(KINDS.values())


def variants():
    """Variants of the Rust enums of kinds."""
    return list(KINDS)


def label(name):
    """What tables call a kind: the word before the colon of its line in the list, else its name in capitals."""
    found = re.search(rf'^    /// ([\w-]+): .*\n    \w+\(\w+\) = "{name}",$', LIST.read_text(encoding="utf-8"), re.M)
    return found[1] if found else name.upper()


def recipe(name, sieve=None):
    """A shipped recipe, as its file in recipes/ has it; of one without a file, as the program `sieve` prints it (that of
    target/release when absent). Without the program, or with a wrong name, it ends in a sentence."""
    path = ROOT / f"recipes/{name}.toml"
    if path.exists():
        return tomllib.loads(path.read_text(encoding="utf-8"))
    program = sieve or ROOT / "target/release/sieve"
    try:
        shown = subprocess.run([program, "recipe", "show", name], capture_output=True, text=True, check=False)
    except OSError as error:
        sys.exit(f"the recipe {name} has no file, and {program}, which prints it, does not run: {error}")
    if shown.returncode:
        sys.exit(shown.stderr.strip())
    return tomllib.loads(shown.stdout)


def of_blocks_alone():
    """Kinds whose queries choose blocks, and that have no key besides the size and the number of blocks."""
    declared = "".join(path.read_text(encoding="utf-8") for path in sorted((LIST.parent).glob("*.rs")))
    shapes = re.findall(r'^    \w+\((\w+)\) = "(\w+)",$', LIST.read_text(encoding="utf-8"), re.M)
    keys = {name: re.search(rf"\n    pub struct {shape} {{\n(.*?)\n    }}", declared, re.S)[1] for shape, name in shapes}
    sizes = ["select_block_size", "num_selected_blocks"]
    return [name for name, body in keys.items() if re.findall(r"^        pub (\w+):", body, re.M) == sizes]
