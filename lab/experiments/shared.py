"""Numbers that sentences share with other pages or with rows: `tables.py --check` fails where a page says another one.

Tables are made from rows, so two of them cannot disagree; a sentence is written by hand and can. `FACTS` holds what a
sentence says, as a pattern with a group for each number, and a function that computes these numbers from the rows; None
where no row has them, and all places must say the same. Every place of every page that matches is compared. Each pattern
must match somewhere, so that a reworded sentence does not leave the check. One pattern is wider than a sentence: whatever
is "times as fast as cuDNN's dense attention" must be a number of speeds.py.
"""

import functools
import re
import statistics

import papers
import speeds
from noted import noted
from run_tables import ROWS, runs
from table4 import table as table4

import board  # noqa: E402  (run_tables names its folder)

BYTES_A_TOKEN = 1544919 / 416624  # of the held-out crates, as lab/docs/board.md has them
TRAINING_TOKENS, PARAMETERS = 45.0e6, 85.0e6  # of the crates' text and the 80M models
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def of_board(entry, key, length=8192):
    """Mean of a value over the nine-minute runs of an entry."""
    by_entry = dict(board.by_entry(board.finished(ROWS / "board.jsonl", board.KEY), 9.0))
    return statistics.mean(row[key] for row in by_entry[length, entry])


def ends_of_board(entry, length):
    """Best and worst bits per byte of an entry's three seeds."""
    by_entry = dict(board.by_entry(board.finished(ROWS / "board.jsonl", board.KEY), 9.0))
    bits = [row["bits_per_byte"] for row in by_entry[length, entry]]
    assert len(bits) == 3, (entry, length)
    return f"{min(bits):.3f}", f"{max(bits):.3f}"


def sparse_lead():
    """From the best run of dense attention with the slope to the worst of windows and DMA, rows of 32,768."""
    worst = max(float(ends_of_board(entry, 32768)[1]) for entry in ("window + slope", "DMA"))
    return (f"{float(ends_of_board('dense + slope', 32768)[0]) - worst:.3f}",)


def table4_distance():
    """How far the published form of the 80M recipe is behind dense attention, at the first validation and the last."""
    losses = {head["recipe"]: {line["step"]: line["loss"] for line in validations if line["step"]}
              for head, validations, _ in table4.runs()}
    behind = [losses["dma_80m_paper.toml"][step] - loss for step, loss in sorted(losses["mha_80m.toml"].items())]
    return f"{behind[0]:.3f}", f"{behind[-1]:.3f}"


def after_nine_minutes():
    """Nats that DMA and the window with its slope are ahead of dense attention, rows of 32,768, seed 0; tokens over its."""
    by_kind = {kind: runs("equal_time", text="crates", kind=kind, length=32768, minutes=9.0, seed=0)[0]
               for kind in ("DMA", "window + slope", "dense")}
    return tuple(f"{by_kind['dense']['loss'] - by_kind[kind]['loss']:.3f}" for kind in ("DMA", "window + slope"))


def hybrids_over_slope():
    """Speed of both hybrids over that of dense attention with DMA's slope, rows of 8192."""
    speed = {kind: statistics.mean(row["tokens_per_second"] for row in of) for kind, of in board.front_runs(
        board.finished(ROWS / "board.jsonl", board.KEY), 9.0).items()}
    return tuple(f"{speed[kind] / speed['dense + slope']:.2f}" for kind in ("DMA, 1 of 4 dense", "window + slope, 1 of 4 dense"))


def layout_without_slope():
    """Speed of windows with one layer in four dense over dense attention's, without a slope."""
    rate = {row["attention"]: row["tokens/s"] for row in noted()["far_tokens"][1]}
    return (f"{rate['windows, 1 of 4 dense, no slope'] / rate['dense']:.2f}",)


def sampled_by_clients():
    """Tokens a second of 64 clients of `serve`, at the defaults and greedily."""
    row = next(row for row in noted()["sampling"][1] if row["texts"] == "64 clients")
    return f"{row['0.8, top-p 0.95, tokens/s']:,}", f"{row['greedy']:,}"


def verdicts():
    head, lines = papers.verdicts()
    (of_all,) = (dict(zip(head, line)) for line in lines if line[0] == "all")
    count = sum(int(of_all[verdict]) for verdict in head[1:])
    return of_all["reproduced"], str(count), of_all["partly"], of_all["refuted"]


def faster_at_2048():
    rates = {line["attention"]: line["tokens/s"] for line in noted()["five_kinds"][1] if line["rows of"] == "2048"}
    return (f"{100 * (max(rates.values()) / rates['dense'] - 1):.0f}",)


def after_200m_tokens():
    """Nats of DMA with dense layers below dense attention, and above the windows with as many, read whole."""
    losses = {row["attention"]: float(row["read whole"]) for row in noted()["tokens_200m"][1]}
    ours = losses["DMA, slope, r 128, 1 of 4 dense"]
    return losses["dense"] - ours, losses["windows + slope, 1 of 4 dense"] - ours


def longest_prompt(*methods):
    """Dense attention's time to the first token over a method's, 131,072 tokens."""
    return tuple(f"{papers.sooner(method)[131072]:.2f}" for method in methods)


def dma_over_cudnn():
    return tuple(f"{ratio:.1f}" for ratio in sorted(speeds.dma_over_cudnn(32768)))


FACTS = [
    (r"of an 85M model get ([\d,]+) tokens a\s+second together on one H200, where greedy decoding gives ([\d,]+)",
     sampled_by_clients),
    (r"the ([\d.]+)M training tokens|\| training \| ([\d.]+)M tokens", lambda: (f"{TRAINING_TOKENS / 1e6:.1f}",)),
    (r"([\d.]+)M (?:parameters )?besides (?:the|a) tied embedding|each of its ([\d.]+)M parameters",
     lambda: (f"{PARAMETERS / 1e6:.1f}",)),
    (r"istance falls from ([\d.]+)(?: at step [\d,]+)? to ([\d.]+)", table4_distance),
    (r"ends (0\.\d+) above dense attention", lambda: table4_distance()[1:]),
    (r"DMA is then ([\d.]+) nats ahead of dense attention and the window ([\d.]+)\.", after_nine_minutes),
    (r"the hybrid takes ([\d.]+) times as many tokens", lambda: (
        f"{of_board('DMA, 1 of 4 dense', 'tokens') / of_board('dense + slope, 1 of 4 without', 'tokens'):.2f}",)),
    (r"the same minutes give (0\.\d+) to (0\.\d+) instead of (0\.\d+) to (0\.\d+)", lambda: tuple(
        bits for entry in ("dense + slope, 1 of 4 without", "DMA, 1 of 4 dense") for bits in ends_of_board(entry, 8192))),
    (r"windows reach (0\.\d+) to (0\.\d+) bits per byte and DMA (0\.\d+) to (0\.\d+)\. Dense attention reaches (0\.\d+) to "
     r"(0\.\d+) with the slope and (0\.\d+) without it", lambda: (
         *(bits for entry in ("window + slope", "DMA", "dense + slope") for bits in ends_of_board(entry, 32768)),
         f"{of_board('dense', 'bits_per_byte', 32768):.3f}")),
    (r"worst of the six sparse runs is (0\.\d+) below the best dense one", sparse_lead),
    (r"sparse (?:models train|kinds process) ([\d.]+) times as (?:fast at that length|many tokens)", lambda: (
        f"{of_board('window + slope', 'tokens_per_second', 32768) / of_board('dense + slope', 'tokens_per_second', 32768):.1f}",)),
    (r"the hybrids, which process ([\d.]+) to ([\d.]+) times as many tokens a second", hybrids_over_slope),
    (r"takes ([\d.]+) of the tokens that it takes with AdamW", lambda: (
        f"{of_board('DMA, 1 of 4 dense, Muon', 'tokens') / of_board('DMA, 1 of 4 dense', 'tokens'):.2f}",)),
    (r"dense attention learns, at ([\d.]+) times its speed", layout_without_slope),
    (r"(\d+) of (\d+) claims are reproduced, (\d+) partly, (\d+) refuted", verdicts),
    (r"kind (?:is over|trains at most) (\d+) % faster", faster_at_2048),
    (r"ends (0\.\d+) nats below dense attention", lambda: (f"{after_200m_tokens()[0]:.3f}",)),
    (r"differ by (0\.\d+) nats \(one seed\)", lambda: (f"{after_200m_tokens()[1]:.3f}",)),
    (r"`xattention` is ([\d.]+) times as fast at the longest prompt and `pbs` ([\d.]+) times",
     lambda: longest_prompt("xattention", "pbs")),
    # Measured outside of the rows: the pages that say it agree.
    (r"step takes ([\d.]+) times (?:as long|AdamW's time)", None),
    (r"DMA, (?:with its|including the) selection of keys, take ([\d.]+) to ([\d.]+) ms", lambda: tuple(
        f"{ms:.1f}"
        for ms in sorted(speeds.timed()[task, rival, "16/8", 32768]["both_ms"] for task, rival in speeds.DMA))),
    (r"which is ([\d.]+) and ([\d.]+) times as fast", dma_over_cudnn),
]
# All that may be said of a kernel "times as fast as cuDNN's dense attention".
SPEED = re.compile(r"([\d.]+)(?: (?:to|and) ([\d.]+))? times as fast as cuDNN's dense attention")


@functools.cache
def computed():
    return [(pattern, compute and tuple(compute())) for pattern, compute in FACTS]


@functools.cache
def speeds_said():
    numbers = [ratio for heads, tokens in (("16/8", 8192), ("16/8", 32768), ("64/4", 32768))
               for task, rival in (*speeds.DMA, ("own", "Sieve NSA"))
               if (ratio := speeds.race.over_cudnn(speeds.timed(), task, rival, heads, tokens))]
    return {f"{number:.{digits}f}" for number in numbers for digits in (1, 2)}


@functools.cache
def said(text):
    """A page in one line, without fenced code."""
    return re.sub(r"\s+", " ", FENCE.sub("", text))


def faults(pages):
    """What pages say otherwise, of (name, text) of each."""
    problems, texts, allowed = [], [(name, said(text)) for name, text in pages], speeds_said()
    for pattern, wanted in computed():
        places = [(name, place) for name, text in texts for place in re.finditer(pattern, text)]
        numbers = [tuple(filter(None, place.groups())) for _, place in places]
        if wanted is None and len(set(numbers)) > 1:
            problems += [f"{name}: '{place[0]}', and another page says otherwise" for name, place in places]
        elif wanted is not None:
            problems += [f"{name}: '{place[0]}' should have {', '.join(wanted)}"
                         for (name, place), said_here in zip(places, numbers) if said_here != wanted]
        if not places:
            problems.append(f"no page says '{pattern}' any more: mend the pattern in lab/experiments/shared.py")
    for name, text in texts:
        problems += [f"{name}: '{place[0]}' is no number of lab/experiments/speeds.py" for place in SPEED.finditer(text)
                     if not allowed.issuperset(filter(None, place.groups()))]
    return problems
