"""The kinds of attention, read off the program's own list of them."""

import pathlib
import re

LIST = pathlib.Path(__file__).parents[2] / "crates/sieve-core/src/kinds/list.rs"
# A line of the list is `Variant(Shape) = "name",`.
KINDS = dict(re.findall(r'^    (\w+)(?:\(\w+\))? = "(\w+)",$', LIST.read_text(encoding="utf-8"), re.M))


def names():
    """Names in recipes."""
    return list(KINDS.values())


def variants():
    """Variants of the Rust enums of kinds."""
    return list(KINDS)
