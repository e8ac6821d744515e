"""Tables of the pages that are computed from runs: rows of lab/rows, a line a run.

`TABLES` holds a function for each: it returns the head and the lines, both as texts. tables.py writes them into the
pages.
"""

import collections
import json
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROWS = ROOT / "lab/rows"
sys.path.insert(0, str(ROOT / "lab/experiments"))

import scaling  # noqa: E402  (lies beside the other scripts)

TABLES = {}


def table(name):
    return lambda function: TABLES.setdefault(name, function)


def runs(name, **values):
    """The runs of a file that have these values, by seed."""
    lines = [json.loads(line) for line in (ROWS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [row for row in lines if all(row.get(key) == value for key, value in values.items())]
    return sorted(rows, key=lambda row: row.get("seed", 0))


def fixed(value, digits):
    """A number with so many digits behind the point, without the sign of a zero."""
    return f"{value:z.{digits}f}" if sys.version_info >= (3, 11) else f"{value:.{digits}f}"


def each(rows, key, digits):
    return ", ".join(fixed(row[key], digits) for row in rows)


def mean(values, digits):
    values = list(values)
    return fixed(statistics.mean(values), digits) if values else ""


def far(rows, tokens):
    """Mean loss on words that the text last used more than `tokens` tokens back."""
    return mean((row["far"][tokens] for row in rows if tokens in row.get("far", {})), 3)


def rate(value):
    """A learning rate as recipes have it: 7.5e-4."""
    power = f"{value:.10e}".split("e")
    return f"{float(power[0]):g}e{int(power[1])}"


RATES = {
    "DMA": "DMA, slope, r 128", "window + slope": "window 1024 + slope", "NSA": "NSA", "InfLLM-V2": "InfLLM-V2",
    "MSA": None, "MSA, 8 local blocks": None, "MoBA": None,
    "dense": None, "window": None, "window + slope, 1 of 4 dense": None, "DMA, 1 of 4 dense": None, "MLA": None,
    "DMA as published": None,
}


def at_best_rate(kind, length, file="rates"):
    """The learning rate with the lowest loss of seed 0, and its runs; ("", []) where there are none."""
    tried = runs(file, kind=kind, length=length, seed=0)
    if not tried:
        return "", []
    best = min(tried, key=lambda row: row["loss"])["rate"]
    return rate(best), runs(file, kind=kind, length=length, rate=best)


@table("rates")
def rates():
    """Each kind at its own best rate: losses of all seeds in rows of 8192 and of
    32,768, and on words last used far back."""
    head = ["attention", "rows of 8192: rate", "loss, a number a seed", "rows of 32,768: rate", "loss", "far > 1024"]
    lines = []
    for kind, name in RATES.items():
        (short, of_short), (long, of_long) = at_best_rate(kind, 8192), at_best_rate(kind, 32768)
        lines.append([name or kind, short, each(of_short, "loss", 3), long, each(of_long, "loss", 3),
                      far(of_long, "1024")])
    return head, lines


EQUAL = RATES | {"DMA, 1 of 4 dense": "DMA, slope, 1 of 4 dense",
                 "window + slope, 1 of 4 dense": "windows + slope, 1 of 4 dense"}


def equal_time(length, minutes, columns, kinds=None):
    """Kinds by their mean loss after equal time."""
    by_kind = collections.defaultdict(list)
    for row in runs("equal_time", text="crates", length=length, minutes=minutes):
        by_kind[row["kind"]].append(row)
    order = sorted(by_kind, key=lambda kind: statistics.mean(row["loss"] for row in by_kind[kind]))
    lines = []
    for kind in kinds or order:
        name = EQUAL[kind] or kind
        few = len(by_kind[kind]) < 3
        name += f" (seed {by_kind[kind][0]['seed']})" if few else ""
        lines.append([name, *(column(by_kind[kind]) for column in columns.values())])
    return ["attention", *columns], lines


LOSS = {"loss": lambda rows: each(rows, "loss", 3)}
SPEED = {"tokens/s": lambda rows: f"{round(statistics.median(row['tokens_per_second'] for row in rows), -2):,.0f}"}
FARTHER = {"far > 16,384": lambda rows: far(rows, "16384")}
TOKENS = {"tokens": lambda rows: f"{statistics.median(row['tokens'] for row in rows) / 1e6:.0f}M"}


@table("minute")
def minute():
    """After one minute in rows of 8192 and of 32,768; kinds that have no runs in the longer rows are last."""
    (_, short), (_, long) = equal_time(8192, 1.0, LOSS | SPEED), equal_time(32768, 1.0, LOSS | SPEED | FARTHER)
    of_short = {name: cells for name, *cells in short}
    lines = [[name, *of_short.pop(name), *cells] for name, *cells in long]
    lines += [[name, *cells, "", "", ""] for name, cells in of_short.items()]
    return ["attention", "rows of 8192: loss", "tokens/s", "rows of 32,768: loss", "tokens/s", *FARTHER], lines


TABLES["nine_minutes"] = lambda: equal_time(32768, 9.0, LOSS | TOKENS | FARTHER)


@table("muon")
def muon():
    """Losses of DMA and dense attention by learning rate, under AdamW and under Muon; no runs, an empty cell."""
    tried = [7.5e-4, 1.5e-3, 3e-3, 6e-3]
    lines = []
    for kind, name in (("DMA", "DMA, slope, r 128"), ("dense", "dense")):
        for file, optimizer in (("rates", "AdamW"), ("muon", "Muon")):
            cells = [each(runs(file, kind=kind, length=8192, rate=rate_tried), "loss", 3) for rate_tried in tried]
            lines.append([name if file == "rates" else "", optimizer, *cells])
    return ["attention", "optimizer", *map(rate, tried)], lines


SCALED = ["dense", "MLA", "MoBA", "InfLLM-V2", "DMA", "window", "NSA", "window + slope", "DMA as published", "MSA"]
SIZES = [2, 5, 10, 20, 80]


@table("scaling")
def by_size():
    """Losses of all seeds by size in millions of parameters, and the slope over runs that were trained in full."""
    lines = []
    for kind in SCALED:
        of_size = [runs("scaling", kind=kind, size=size) for size in SIZES]
        full = [(row["parameters"], row["loss"]) for seeds in of_size for row in seeds if scaling.is_full(row)]
        lines.append(["DMA, slope, r 64" if kind == "DMA" else kind, *(each(seeds, "loss", 3) for seeds in of_size),
                      scaling.slope(full)])
    return ["attention", *(f"{size}M" for size in SIZES), "nats a doubling"], lines


MQAR_LENGTHS = (64, 256, 1024, 2048)
MQAR = ["dense", "window", "window + slope", "MLA", "NSA", "DMA as published", "DMA", "InfLLM-V2", "MoBA", "MSA"]


def percent(share, digits=1):
    return fixed(100 * share, digits)


def each_percent(kind, length, width):
    """Right answers of each seed."""
    return ", ".join(percent(row["accuracy"]) for row in runs("mqar", kind=kind, length=length, width=width))


@table("mqar_256")
def mqar_256():
    lines = [[f"{length}, {length // 16}", *(each_percent(kind, length, 256) for kind in MQAR)] for length in MQAR_LENGTHS]
    return ["length, pairs", *MQAR], lines


def decides(length, width):
    """Whether a cell of figure 5 can judge a kind: dense attention answers more than 90 % with both seeds."""
    return min(row["accuracy"] for row in runs("mqar", kind="dense", length=length, width=width)) > 0.9


@table("mqar_narrow")
def mqar_narrow():
    """Both seeds of the narrow models, and whether the cell can judge a kind."""
    kinds = MQAR[:7]
    lines = [[str(width), f"{length}, {length // 16}", *(each_percent(kind, length, width) for kind in kinds),
              "yes" if decides(length, width) else "undecided"] for width in (64, 128) for length in MQAR_LENGTHS]
    return ["width", "length, pairs", *kinds, "judges a kind"], lines


HARD = {"MSA": "MSA", "MSA, 4 local blocks": "MSA, 4 of 8 blocks local", "dense": "dense",
        "CoWindow": "CoWindow, 944 keys", "CoWindow, 512 keys": "CoWindow, 512 keys", "NSA": "NSA",
        "MoBA": "MoBA", "window": "window", "InfLLM-V2": "InfLLM-V2", "DMA as published": "DMA as published"}
EQUAL_STEPS = 4000  # of the hard form, which every kind has


def hard_runs(kind, steps):
    """Of each seed that ran for so many steps, what it answered after each eighth of them."""
    of_seed = [runs("mqar_hard", kind=kind, seed=seed, steps=steps) for seed in (0, 1, 2)]
    return [sorted(seed_rows, key=lambda row: row["step"]) for seed_rows in of_seed if seed_rows]


def best_shares(kind, steps):
    """The best share of right answers of each seed."""
    return [max(row["accuracy"] for row in seed_rows) for seed_rows in hard_runs(kind, steps)]


@table("mqar_hard")
def mqar_hard():
    """Every kind after the same steps; one that also ran for longer has a second line, which judges none."""
    lines = []
    for kind, name in HARD.items():
        for steps in sorted({row["steps"] for row in runs("mqar_hard", kind=kind)}):
            seeds = hard_runs(kind, steps)
            reached = [next((str(row["step"]) for row in steps_of_seed if row["accuracy"] >= 0.99), "none")
                       for steps_of_seed in seeds]
            lines.append([name if steps == EQUAL_STEPS else f"{name}, for longer", f"{steps:,}", str(len(seeds)),
                          "none" if set(reached) == {"none"} else ", ".join(reached),
                          ", ".join(map(percent, best_shares(kind, steps))),
                          ", ".join(percent(steps_of_seed[-1]["accuracy"]) for steps_of_seed in seeds)])
    return ["", "steps", "seeds", "step at which 99 % are right", "best share in %, asked after each eighth of the steps",
            "last share"], lines


NEEDLES = {"InfLLM-V2": "InfLLM-V2", "DMA 128, slope, r 32, 1 of 4 dense": "DMA, slope, 1 of 4 dense", "NSA": "NSA",
           "MSA": "MSA", "window 128 + slope, 1 of 4 dense": "windows + slope, 1 of 4 dense", "MoBA": "MoBA",
           "DMA 128, slope, r 32": "DMA, slope, r 32", "window 128 + slope": "window + slope", "dense": "dense"}


@table("needle_depth")
def needle_depth():
    lengths = [4096, 8192, 16384]
    lines = [[name, *(str(sum(sum(row["found"]) for row in runs("needle_depth", attention=kind, length=length)))
                      for length in lengths)] for kind, name in NEEDLES.items()]
    return ["attention", "4096 tokens", "8192", "16,384"], lines


RULER = ["dense", "window 128", "window 128 + slope", "DMA 128, slope, r 32", "DMA 128 as published",
         "DMA 128, slope, r 32, 1 of 4 dense", "window 128 + slope, 1 of 4 dense", "NSA", "InfLLM-V2", "MoBA", "MSA"]


@table("ruler")
def ruler():
    """Scores in % of RULER's tasks that some kind learns, at 1, 2 and 4 times the trained length, one seed."""
    tasks, lengths = ("niah_multikey_1", "niah_multivalue", "vt"), (1024, 2048, 4096)
    lines = []
    for kind in RULER:
        (row,) = runs("ruler", kind=kind)
        score = {(task, length): of_length for task in tasks for length, of_length, _ in row["scores"][task]}
        lines.append([kind, fixed(row["loss"], 3), *(", ".join(
            fixed(score[task, length], 1) for length in lengths) for task in tasks)])
    return ["attention", "loss", *(f"`{task}`" for task in tasks)], lines


SMOLLM2 = {"dense": "dense", "xattention:tau=0.9": "`xattention:tau=0.9`", "pbs": "`pbs`", "bfla": "`bfla`",
           "streamingllm": "`streamingllm`, 4 + 1024 keys",
           "block_sparse:block=64,topk=16": "`block_sparse`, 16 blocks of 64",
           "DMA, one layer in four dense": "DMA, one layer in four dense",
           "MSA, three layers in four windows": "MSA, three layers in four windows"}
# On H100s; the two differ in their sinks alone.
SINKS = ("window, one layer in four dense", "window with sinks, one layer in four dense")


def of_smollm2(row):
    """The numbers that both tables of the published model made sparse have, by column."""
    num_found, asked, rank = row["needles"]
    return {"held-out loss": fixed(row["loss"], 3), "far > 1024": fixed(row["far"]["1024"], 2),
            "far > 4096": fixed(row["far"]["4096"], 2), "English": fixed(row["english"], 3),
            f"needles of {asked} (rank)": f"{num_found} ({fixed(rank, 1)})",
            **{f"`{task}`": fixed(row["ruler"][task], 1) for task in ("niah_single_1", "niah_single_2", "niah_multikey_1")}}


@table("smollm2_imported")
def smollm2_imported():
    scored = [(name, of_smollm2(runs("smollm2", phase="imported", kind=kind)[0])) for kind, name in SMOLLM2.items()]
    return ["", *scored[0][1]], [[name, *row.values()] for name, row in scored]


TRAINED_FORMS = ("dense", "DMA, one layer in four dense", "MSA, three layers in four windows")
LOSSES = 4  # of_smollm2's columns before needles and tasks


def smollm2_of_seeds(kinds):
    """Of each form the runs of its seeds, and their numbers by column, a cell for all seeds."""
    for kind in kinds:
        seeds = runs("smollm2", phase="trained", kind=kind)
        cells = [of_smollm2(row) for row in seeds]
        yield kind, seeds, {key: ", ".join(row[key] for row in cells) for key in cells[0]}


def smollm2_losses(kinds):
    lines = []
    for name, seeds, cells in smollm2_of_seeds(kinds):
        speed = round(statistics.median(row["tokens_per_second"] for row in seeds), -2)
        lines.append([name, rate(seeds[0]["rate"]), str(seeds[0]["steps"]), f"{speed:,.0f}", *[*cells.values()][:LOSSES]])
    return ["", "rate", "steps", "tokens/s", *[*cells][:LOSSES]], lines


def smollm2_tasks(kinds):
    lines = []
    for name, _, cells in smollm2_of_seeds(kinds):
        lines.append([name, *[*cells.values()][LOSSES:]])
    return ["", *[*cells][LOSSES:]], lines


TABLES["smollm2_trained"] = lambda: smollm2_losses(TRAINED_FORMS)
TABLES["smollm2_trained_tasks"] = lambda: smollm2_tasks(TRAINED_FORMS)
TABLES["smollm2_sinks"] = lambda: smollm2_losses(SINKS)
