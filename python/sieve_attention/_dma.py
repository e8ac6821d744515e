"""The form of DMA that arguments say: the keys, the defaults and the refusals of a recipe's `[attention]` of kind "dma"
(docs/recipe.md)."""

from typing import NamedTuple

from ._library import SieveError

# Tokens over which recency raises a rank by one in the first KV head, and how often `keep` in the last.
SHORTEST_PERIOD, LONGEST_OF_KEEP = 64.0, 4.0
# What preset="paper" sets, the form of arXiv:2508.02124.
PAPER = {"bias": "exp", "recency": "none", "local": 0}
NAMES = {"preset": ("paper",), "bias": ("exp", "linear"), "recency": ("slope", "none")}


class Form(NamedTuple):
    """slopes: a number for each KV head, or none of them without recency."""

    slopes: tuple
    linear: bool
    local: int


def slopes_of(keep, kv_heads, *, shortest_period=None, longest_period=None):
    """How much each KV head's rank grows per token: 1 / period, the periods spaced geometrically between the two."""
    first = SHORTEST_PERIOD if shortest_period is None else float(shortest_period)
    last = LONGEST_OF_KEEP * keep if longest_period is None else float(longest_period)
    # A single KV head takes the last period, which is the longest by default.
    place = lambda head: 1.0 if kv_heads == 1 else head / (kv_heads - 1)  # noqa: E731
    return tuple(1.0 / (first * (last / first) ** place(head)) for head in range(kv_heads))


def check_names(function, **given):
    """Refuses a name that is not one of `NAMES`."""
    for argument, x in given.items():
        if x is not None and x not in NAMES[argument]:
            names = " or ".join(f'"{name}"' for name in NAMES[argument])
            raise SieveError(f'{function}: {argument} is "{x}", and must be {names}')


def form(function, keep, kv_heads, *, preset=None, bias=None, recency=None, local=None, periods=(None, None),
         slopes=None):  # fmt: skip
    """The `Form` that the given arguments say; None is an argument that is left out.

    Slopes of one's own stand for recency "slope"; they go with either bias.
    """
    check_names(function, preset=preset, bias=bias, recency=recency)
    has_period = any(period is not None for period in periods)
    if preset is not None:
        for argument, x in (("bias", bias), ("recency", recency), ("local", local)):
            if x is not None and x != PAPER[argument]:
                raise SieveError(f'{function}: {argument} is {x!r}, but preset="paper" sets it to {PAPER[argument]!r}')
        if has_period or slopes:
            raise SieveError(f'{function}: preset="paper" has no slopes; leave slopes and periods out')
        bias, recency, local = PAPER["bias"], PAPER["recency"], PAPER["local"]
    if slopes:
        if recency == "none" or has_period:
            raise SieveError(f'{function}: slopes go with neither recency="none" nor periods')
        slopes = tuple(slopes)
    else:
        recency = recency or ("none" if bias == "exp" else "slope")
        if recency == "slope" and bias == "exp":
            raise SieveError(f'{function}: bias is "exp", but recency="slope" adds to the logit itself: bias="linear"')
        if recency == "none" and has_period:
            raise SieveError(f'{function}: a period needs recency="slope"')
        shortest, longest = periods
        slopes = ()
        if recency == "slope":
            slopes = slopes_of(keep, kv_heads, shortest_period=shortest, longest_period=longest)
            if has_period and slopes[-1] > (1.0 / (SHORTEST_PERIOD if shortest is None else shortest)):
                raise SieveError(f"{function}: shortest_period is longer than longest_period")
    linear = bool(slopes) if bias is None else bias == "linear"
    return Form(slopes, linear, keep // 8 if local is None else local)
