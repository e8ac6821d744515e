"""How many times as fast as a rival a kernel is: one place for all pages that say it.

A number in a fixed order of sums, as all recipes of attention kinds have it, is the race's (lab/rows/race.jsonl).
One in any order is an older program's (lab/rows/benchmarks.jsonl), and is told only beside the first.
"""

import functools

from noted import noted
from race import table as race

CUDNN = "cuDNN's dense attention"
DMA = (("expiring", "Sieve"), ("own", "Sieve DMA"))


@functools.cache
def timed():
    """Times of the race by task, rival, heads and tokens."""
    return race.by_place(race.stored())


def call():
    """The race's call of all tasks, with card, day and commit; later calls timed some again."""
    return next(row for row in race.of(race.stored(), "about") if "--only" not in row["command"])


def over_cudnn(task, rival, heads, tokens):
    """cuDNN's time of dense attention over this one's, both passes."""
    return race.over_cudnn(timed(), task, rival, heads, tokens)


def dma_over_cudnn(tokens, heads="16/8"):
    """The race times DMA with its rank given, and with all of its choice from the values."""
    return [over_cudnn(task, rival, heads, tokens) for task, rival in DMA]


def over_ours(task, rival, columns=("forward_ms", "both_ms"), ours="Sieve", tokens=None):
    """The rival's time over ours, of each shape that both ran."""
    return [row[column] / timed()[at, ours, heads, length][column]
            for (at, name, heads, length), row in timed().items() for column in columns
            if (at, name) == (task, rival) and (at, ours, heads, length) in timed() and tokens in (None, length)]


def span(numbers, digits=1):
    """The least and the most, or the one that both are."""
    least, most = f"{min(numbers):.{digits}f}", f"{max(numbers):.{digits}f}"
    return least if least == most else f"{least} to {most}"


def over_dma(row):
    return [float(row["cuDNN dense"]) / float(ms) for ms in row["independent / rising / tied scores, ms"]]


def of_noted(name, **values):
    (row,) = (line for line in noted()[name][1] if all(line[key] == value for key, value in values.items()))
    return row


def dma_in_any_order(tokens):
    """Of two calls: an older program on an H200, and the kernels as they are on an H100."""
    newer = of_noted("dma_newer_ratio", tokens=f"{tokens:,}" if tokens > 8192 else str(tokens))
    return over_dma(of_noted("dma", **{"keys, kept, width": f"{tokens}, 1024, 128"})) + [
        float(newer[which]) for which in ("least", "most")]


def nsa_in_any_order(heads, tokens):
    """Both passes of NSA, and how many times as fast it is as cuDNN's dense attention."""
    row = of_noted("nsa", heads=heads, tokens=str(tokens))
    both = float(row["forward"] + row["backward"])
    return both, float(row["cuDNN dense, both"]) / both


def head_shapes(width, *columns):
    rows = [row for row in noted()["head_shapes"][1] if row["heads, width"].endswith(f", {width}")]
    return [float(value) for row in rows for column in columns for value in row[column]]


def table():
    """README's. Each line has the recipes' order of sums; any order is next to it where it was measured."""
    about, steps, on_cpu = call(), noted()["published_steps"][1], noted()["cpu_training"][1][0]
    card = about["card"].removeprefix("NVIDIA ").split()[0]
    nsa = lambda tokens: [over_cudnn("own", "Sieve NSA", "16/8", tokens)]
    in_any = lambda tokens: [nsa_in_any_order("16/8", tokens)[1]]
    trained = lambda column: [float(row[column] / row["transformers"]) for row in steps]
    lines = [
        ["DMA with its selection of keys, 1024 keys of 8192, 16/8 heads, both passes", CUDNN, span(dma_over_cudnn(8192)),
         span(dma_in_any_order(8192))],
        ["the same, 1024 keys of 32,768", CUDNN, span(dma_over_cudnn(32768)), span(dma_in_any_order(32768))],
        ["the same, with 64/4 heads", CUDNN, span(dma_over_cudnn(32768, "64/4")), "-"],
        ["NSA, 8192 tokens, 16/8 heads, both passes", CUDNN, span(nsa(8192), 2), span(in_any(8192), 2)],
        ["the same, 32,768 tokens", CUDNN, span(nsa(32768), 2), span(in_any(32768), 2)],
        ["dense attention, width 128, forward and both passes", "cuDNN", span(over_ours("dense", "cuDNN"), 2),
         span(head_shapes(128, "forward: cuDNN", "backward: cuDNN"), 2)],
        ["the same", "FlashAttention-4", span(over_ours("dense", "FlashAttention-4"), 2),
         span(head_shapes(128, "forward: FA4", "backward: FA4"), 2)],
        ["dense attention, width 64, backward (an H200)", "FlashAttention-4",
         span(head_shapes(64, "fixed order: FA4"), 2),
         span(head_shapes(64, "backward: FA4"), 2)],
        ["masks of tiles, forward and both passes (an H200, too)", "FlashAttention-4",
         span(over_ours("tiles", "FlashAttention-4"), 2),
         span(over_ours("tiles", "FlashAttention-4", ours="Sieve, any order"), 2)],
        ["training at two published sizes, dense (an H200)", "compiled transformers",
         span(trained("ours, sums in a fixed order"), 2), span(trained("in any order"), 2)],
        ["training on two CPU cores, dense", "PyTorch",
         span([float(on_cpu["ours, dense, tokens/s"] / on_cpu["PyTorch, dense"])]), "-"]]
    return ["what", "against",
            f"times as fast, deterministic as in the recipes: an {card}, {about['date']}, {about['commit']}",
            "nondeterministic: other calls, an H200 or an H100"], lines
