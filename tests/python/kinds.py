"""The kinds of attention, read off the program's own list of them and the shipped recipes."""

import pathlib
import re
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


def attention_of(recipe):
    """The keys of `[attention]` in a shipped recipe."""
    return tomllib.loads((ROOT / f"recipes/{recipe}.toml").read_text(encoding="utf-8"))["attention"]


def settings_of(recipe):
    """The same as arguments of `--set`."""
    return [f"attention.{key}={value}" for key, value in attention_of(recipe).items()]


def of_blocks_alone():
    """Kinds whose queries choose blocks, and that have no key besides the size and the number of blocks."""
    sizes = {"kind", "select_block_size", "num_selected_blocks"}
    with_recipe = [name for name in names() if (ROOT / f"recipes/{name}_80m.toml").exists()]
    return [name for name in with_recipe if set(attention_of(f"{name}_80m")) == sizes]
