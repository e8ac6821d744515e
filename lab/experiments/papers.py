"""The tables of lab/docs/papers.md: what became of each claim of five papers, computed from the rows.

    python3 lab/experiments/papers.py             every claim with its verdict, computed now, and the rows that decide it
    python3 lab/experiments/papers.py --why       the same, and a line a condition: whether it holds, and by which number
    python3 lab/experiments/papers.py --commands  each of these rows with the command that measures it again

claims.py says how a verdict follows from conditions. `TABLES` holds a function for each paper, as in run_tables.py.
Needs nothing but Python.
"""

import argparse
import functools
import itertools
import re
import statistics

from claims import VERDICTS, Claim
from long import table as long_prompts
from noted import noted
from run_tables import MQAR, MQAR_LENGTHS, SIZES, best_shares, decides, runs
from selector_tables import added, row
from table4 import table as table4

LEAST_OF_FIGURE4 = 80e6  # parameters of the smallest model that the claim is about
ROWS_OF_FIGURE5 = 8000 * 8192 // 2048  # steps, tokens of a step, and tokens of a row of the longest samples
ALONE = "first_dense_layers=0"
MOMO = f"momo:{ALONE}"
GPU = "`lab/experiments/papers_gpu.sh`"
# What measures the rows of a table again that was not noted by hand: those have a `command` in their line `about`.
SMOLLM2 = "python3 lab/experiments/published_selectors.py --sieve SIEVE --checkpoint in/smollm2 --device cuda --only"
MQAR_FIGURE = "python3 lab/experiments/mqar_figure.py --sieve SIEVE --out OUT"
LONG = "lab/experiments/long/score.sh SIEVE out/long text/heldout_long.jsonl OUT"
MEASURES = {
    "scaling": "python3 lab/experiments/scaling.py --sieve SIEVE --text data/scaling.jsonl --out OUT",
    "table4": "sieve launch --nproc 4 -- train --recipe dma_80m_paper.toml --out RUN "
              "# paths: the lines of lab/experiments/table4",
    "mqar_256": MQAR_FIGURE, "mqar_narrow": MQAR_FIGURE,
    "mqar_hard": f'{MQAR_FIGURE} --hard 12000 --seeds 0 1 2 --kinds "DMA as published"',
    "needle_depth": "python3 lab/experiments/learning_table.py --sieve SIEVE --text data/crates.jsonl --out OUT "
                    "--evaluate --sets recall --recall-length 4096 --steps 2400",
    "long_time": LONG, "long_loss": LONG, "long_density": LONG, "long_needles": LONG,
    "bfla_group_ms": "sieve kernels bench --selectors --lengths 131072 --selector bfla:group=GROUP",
    "momo_oracle": f"{SMOLLM2} oracle", "momo_chi": f"{SMOLLM2} momo_chi", "ba_att_sorts": f"{SMOLLM2} ba_att",
    "papers_settings": f"{SMOLLM2} where bfla momo_k momo_chi oracle pbs pbs_segment",
    "selectors_8192": f"{SMOLLM2} time",
}


def not_run(says, why, condition="-"):
    """A claim that no row decides; `condition` where lab/experiments/papers_gpu.sh or another script will."""
    return Claim(says, condition, differs=why)


def alone(method, tokens=131072):
    """What lab/experiments/papers_gpu.sh measured of a selector as (dense ms, whole ms, selection ms, pairs in percent);
    None where it did not."""
    columns = ("dense, ms", "whole, ms", "selection, ms", "pairs, %")
    for line in noted().get("selectors_alone", (None, ()))[1]:
        if (line["method"], line["tokens"]) == (f"`{method}`", f"{tokens:,}"):
            return [float(line[column]) for column in columns]
    return None


def timed(says, condition, part, differs, methods, judge, tokens=131072, **more):
    """A claim that papers_gpu.sh decides: `judge` has what was measured of each method and returns the cell of what
    was found and the conditions. Without all of these methods the claim is not run."""
    measured = [alone(method, tokens) for method in methods]
    if None in measured:
        return not_run(says, "; ".join(filter(None, [f"{GPU}, part `{part}`", differs])), condition)
    here, holds = judge(*measured)
    return Claim(says, condition, here, holds, differs or "generated operands, 32/8 heads", "`selectors_alone`", **more)


def numbers(name, label, *columns):
    """The row of a noted table whose first column begins with `label`, as floats of these columns."""
    about, rows = noted()[name]
    first = next(iter(about["columns"]))
    (line,) = (candidate for candidate in rows if candidate[first] == label)
    return [float(line[column]) for column in columns]


def over(selector, group="where"):
    return row(group, selector)["loss"] - row(group, selector)["dense_loss"]


def sooner_than(a, b):
    """Whether a time is below another one. Two within a hundredth are equal: calls of one process differ by as much."""
    return a < 0.99 * b


def rising(values):
    return all(a < b for a, b in itertools.pairwise(values))


def spread(values, form="{:.1f}"):
    return f"{form.format(min(values))} to {form.format(max(values))}"


def listed(values, form="{:.1f}"):
    return ", ".join(form.format(value) for value in values)


def both(values, form="{:.0f}"):
    return " and ".join(form.format(value) for value in values)


def last_by_size():
    """Of each size of scaling.jsonl, whether DMA as published is the last of the kinds by the mean of seeds."""
    last = {}
    for size in SIZES:
        losses = {kind: [run["loss"] for run in runs("scaling", kind=kind, size=size)] for kind in MQAR}
        last[size] = max((kind for kind in losses if losses[kind]), key=lambda kind: statistics.mean(losses[kind]))
    return {size: kind == "DMA as published" for size, kind in last.items()}


def figure4():
    """Perplexity by size. The claim is about 80M parameters and more, trained by the recipes of Table 4; smaller models,
    and one that has seen a tenth of its tokens, are undecided."""
    losses = {head["recipe"]: {line["step"]: line["loss"] for line in validations}
              for head, validations, _ in table4.runs()}
    ours, dense = (losses[f"{name}.toml"] for name in ("dma_80m_paper", "mha_80m"))
    behind = {step: ours[step] - dense[step] for step in sorted(ours.keys() & dense.keys()) if step}
    (first, *_), last = behind, max(behind)
    race = {kind: {row["seed"]: row["loss"] for row in rows} for kind, rows in table4.main_race().items()}
    apart, six = (sorted(race[f"dma_paper{kv}"][i] - dense for i, dense in race[f"mha{kv}"].items()) for kv in ("", "/kv6"))
    holds = {f"80M by Table 4's recipe to its end: {ours[last]:.4f}, dense {dense[last]:.4f}": behind[last] < 0}
    for size, is_last in last_by_size().items():
        (run, *_) = runs("scaling", kind="DMA as published", size=size)
        why = "below the claim's sizes" if run["parameters"] < LEAST_OF_FIGURE4 else (
            f"{run['tokens'] / 1e6:.0f}M tokens of 20 a parameter")
        holds[f"{size}M, {'last' if is_last else 'not last'} of up to ten kinds: {why}"] = None
    return Claim(
        "Figure 4: the lowest perplexity at each size, 80M to 1.7B",
        "it has the lowest held-out loss at each size that ran",
        f"80M: {ours[last]:.4f}, dense {dense[last]:.4f}; the distance falls from {behind[first]:.3f} to "
        f"{behind[last]:.3f} nats", holds,
        f"one seed to its end, {len(apart)} over a tenth of it ({apart[0]:.3f} to {apart[-1]:.3f} behind), another text, three "
        f"masks a layer for six ({six[0]:.3f} behind with six); last at 2 to 20M, too",
        "`table4`, `scaling`")


def right(kind, **values):
    return [100 * run["accuracy"] for run in runs("mqar", kind=kind, **values)]


CELLS = [(length, width) for width in (64, 128, 256) for length in MQAR_LENGTHS]


def figure5():
    """Both claims, in the cells that decide; the others are undecided."""
    ours = "DMA as published"
    name = lambda cell: f"width {cell[1]}, {cell[0]} tokens"
    mean = lambda kind, cell: statistics.mean(right(kind, length=cell[0], width=cell[1]))
    solved, ahead, of_all = {}, {}, []
    for cell in CELLS:
        values = right(ours, length=cell[0], width=cell[1])
        rivals = {kind: mean(kind, cell) for kind in ("window", "NSA", "dense", "MLA")}
        judged = decides(*cell)
        solved[f"{name(cell)}: {listed(values)} %"] = min(values) > 90 if judged else None
        above = mean(ours, cell) > max(rivals["window"], rivals["NSA"])
        ahead[f"{name(cell)}: {mean(ours, cell):.1f}, window {rivals['window']:.1f}, NSA {rivals['NSA']:.1f} %"] = (
            above if judged else None)
        of_all.append(judged and mean(ours, cell) > max(rivals.values()))
    judged = [held for held in solved.values() if held is not None]
    narrow = [cell for cell in CELLS if cell[1] < 256]
    undecided = f"{len(CELLS) - len(judged)} of {len(CELLS)} cells undecided"
    return [
        Claim("Figure 5: MQAR stays solved in smaller models",
              "both seeds are above 90 % in each cell that decides",
              f"in {sum(judged)} of {len(judged)} cells; at widths 64 and 128 in "
              f"{sum(bool(solved[width]) for width in solved if not width.startswith('width 256'))} of "
              f"{sum(decides(*cell) for cell in narrow)}", solved,
              f"{undecided}; {ROWS_OF_FIGURE5:,} samples, there 250,000 for 100 epochs", "`mqar_256`, `mqar_narrow`"),
        Claim("Figure 5: above the window and NSA", "by the mean of two seeds, in each of these cells",
              f"above both in {sum(held is True for held in ahead.values())} of {len(judged)}; above dense and MLA, too, "
              f"in {sum(of_all)}", ahead, "the same; one learning rate a width", "`mqar_256`, `mqar_narrow`"),
    ]


def hard_form():
    """The claim on MQAR with 512 pairs. Kinds are compared after equal steps with three seeds each; where no number of
    steps has these, after the most that all ran, which makes the claim not comparable."""
    kinds = ("DMA as published", "NSA", "window")
    trained = {kind: {run["steps"] for run in runs("mqar_hard", kind=kind)} for kind in kinds}
    three = {kind: {steps for steps in trained[kind] if len(best_shares(kind, steps)) == 3} for kind in kinds}
    shared = set.intersection(*three.values())
    steps = max(shared or set.intersection(*trained.values()))
    dma_has, nsa, window = ([100 * share for share in best_shares(kind, steps)] for kind in kinds)
    longer = max(three["DMA as published"])
    said = f"after {steps:,} steps DMA {listed(dma_has)}, NSA {listed(nsa, '{:.0f}')}, window {listed(window, '{:.0f}')} %"
    if longer != steps:
        said += f"; DMA after {longer:,}: {listed([100 * share for share in best_shares(kinds[0], longer)], '{:.0f}')} %"
    holds = {f"seed {seed}, {steps:,} steps: DMA {a:.1f}, NSA {b:.1f}, window {c:.1f} %": a > max(b, c)
             for seed, (a, b, c) in enumerate(zip(dma_has, nsa, window))}
    unlike = (f"2048 tokens; DMA: one seed of {steps:,} steps, three of {longer:,}; the others end at {steps:,}, where NSA "
              "still rises")
    return Claim(says="Section 5.2: 512 pairs, windows of 512", here=said, holds=holds, rows="`mqar_hard`",
                 condition="its best share is above NSA's and the window's with each seed",
                 differs="" if shared else unlike, apart="" if shared else "training")


def needles(kind, *lengths):
    """Needles found of 99 in texts of each length."""
    return [sum(sum(run["found"]) for run in runs("needle_depth", attention=kind, length=length)) for length in lengths]


def share_found(kind, *lengths):
    """Percent of the needles that were found in texts of so many tokens, by a model trained on 1024."""
    (line,) = (line for line in noted()["selector_needles"][1] if line["attention"] == kind)
    return [float(line[length][0]) for length in lengths]


def figure7():
    """Needles beyond the trained length. Neither set has the published form; a form that finds none at its own length,
    or a rival that does not, cannot tell who falls less."""
    needles_at = lambda *lengths: [needles(kind, *lengths) for kind in ("DMA 128, slope, r 32", "NSA", "dense")]
    trained = ("trained dma, keeps 256", "trained nsa, 8 x 16 selected, window 128", "dense")
    near = [share_found(kind, "1024", "2048", "3072") for kind in trained]
    far = needles_at(4096, 8192, 16384)
    holds = {f"{text}: DMA {a:.0f}, NSA {b:.0f}, dense {c:.0f}": a > max(b, c) for text, (a, b, c) in zip(
        ("8192 tokens, of 99", "16,384 tokens, of 99", "2048 tokens, %", "3072 tokens, %"),
        [*zip(*(counts[1:] for counts in far)), *zip(*(counts[1:] for counts in near))])}
    return Claim("Figure 7: finds more beyond the trained length",
                 "it finds more than NSA and dense at twice the length and beyond",
                 f"trained on 4096: {both(far[0][1:])} of 99, NSA {both(far[1][1:])}, dense {both(far[2][1:])}; on 1024: "
                 f"{both(near[0][1:])} %, NSA {both(near[1][1:])}, dense {both(near[2][1:])}", holds,
                 f"with the slope; at 4096 itself dense finds {far[2][0]}, at 1024 this DMA {near[0][0]:.0f} %: nothing can "
                 "fall; one seed", "`needle_depth`, `selector_needles`", apart="form")


def figure2():
    """The claim that lab/experiments/figure2.sh decides, of the published form: where it learned no task, none can show
    which keys it needs."""
    says = "Figure 2: which keys copying and selecting need"
    condition = "it answers 90 %, and a layer reads a tenth of its keys outside a window of as many"
    rows = [line for line in noted().get("figure2", (None, ()))[1]
            if line["form"] == "as published" and line["task"] in ("copy", "select")]
    if len(rows) < 2:
        return not_run(says, "`lab/experiments/figure2.sh` draws them", condition)
    answered, far = "answered, % at 512", "keys outside a window of as many, % in the layer with most"
    said = "; ".join(f"{line['task']}: {line[answered]:.0f} % answered, {line[far]:.0f} % of the keys" for line in rows)
    learned = any(line[answered] for line in rows)
    holds = {f"{line['task']}, {column}: {line[column]:.0f}": line[column] >= least
             for line in rows for column, least in ((answered, 90), (far, 10))}
    return Claim(says, condition, said, holds,
                 f"2.5M parameters, texts of 512 tokens, {rows[0]['steps']} steps, one seed"
                 + ("" if learned else "; it learned neither task"), "`figure2`",
                 apart="" if learned else "training")


def top_fifth():
    """Section 6.1 quotes a finding of pretrained models: a pretrained model decides it, the mean over its heads."""
    rows = noted()["smollm2_attention"][1]
    tiny = [100 * float(line["weight on the top fifth"]) for line in noted()["tiny_attention"][1]
            if line["kind"] == "dense"]
    mean, least, few = "mean of all heads", "layer with least", "heads at 80 % or less"
    holds = {f"SmolLM2-135M, {line['text']}, {line['tokens']} tokens: {line[mean]:.1f} %": line[mean] <= 80
             for line in rows}
    holds |= {f"a hybrid of 3.4M trained here, a dense layer: {value:.0f} %": None for value in tiny}
    return Claim("Section 6.1: the fifth of the keys with most weight has only 70 % of it",
                 "the mean over the heads of a pretrained model is at most 80 %",
                 f"{spread([float(line[mean]) for line in rows])} %; in the layer with least "
                 f"{spread([float(line[least]) for line in rows])} %; {max(line[few] for line in rows)} of 270 heads have 80 % "
                 "or less",
                 holds, "135M; the paper quotes it of larger models",
                 "`smollm2_attention`, `tiny_attention`")


def figure6():
    """Inference on MQAR in PyTorch with 512 keys was not timed: what was timed is this project's CUDA kernels."""
    ms = {kind: numbers("growth", kind, "both passes, ms: 8192 tokens", "ms: 131,072")
          for kind in ("window 1024", "DMA, w 1024")}
    faster = {line["batch x tokens, heads, width"]: line["DMA"] < line["dense, ours"] for line in noted()["table2"][1]}
    first = next(shape.split()[2] for shape, is_faster in faster.items() if shape.startswith("1 x ") and is_faster)
    everything = sum(int(shape.replace("decode ", "").split()[2]) <= 2048 for shape in faster)
    return [
        Claim("Figure 6: from 4096 tokens on as fast as a window", "it takes at most the window's time",
              f"{ms['DMA, w 1024'][0]:.2f} and {ms['window 1024'][0]:.2f} ms at 8192, {ms['DMA, w 1024'][1]:.1f} and "
              f"{ms['window 1024'][1]:.1f} at 131,072",
              {f"{tokens} tokens: {a:.2f} ms, window {b:.2f}": a <= b for tokens, a, b in zip(
                  ("8192", "131,072"), ms["DMA, w 1024"], ms["window 1024"])},
              "CUDA kernels, both passes, 1024 keys; there PyTorch, inference on MQAR, 512", "`growth`",
              apart="implementation"),
        Claim("Figure 6: faster than dense attention at each length", "it is faster in each of 26 shapes",
              f"in {sum(faster.values())} of {len(faster)}; forward, width 128, from {first} tokens on",
              {f"{shape}": held for shape, held in faster.items()},
              f"CUDA kernels, Table 2's shapes, our dense kernel; 2048 kept keys are all of {everything} shapes' keys",
              "`table2`", apart="implementation"),
    ]


def dma():
    """The claims of arXiv:2508.02124 on dynamic mask attention, with what the stored rows say of each."""
    power = numbers("growth", "DMA, w 1024", "power of n")[0]
    table2 = {line["batch x tokens, heads, width"]: (float(line["SDPA under a mask"] / line["DMA"]),
                                                     float(line["the paper's"]))
              for line in noted()["table2"][1]}
    reached = {f"{shape}: {here:.1f} times, there {theirs}": here > theirs for shape, (here, theirs) in table2.items()}
    long = [table2[f"1 x {n} h2/1 d128"][0] for n in (4096, 8192, 16384, 32768)]
    longer = {line["attention"]: float(line["ratio"]) for line in noted()["longer_texts"][1]}
    layers = [line for line in noted()["tiny_attention"][1] if line["kind"] == "DMA"]
    kept = numbers("kept_keys", "it keeps the value that the question asks for", "step 2000", "step 2600")
    shared = [100 * float(line["keys that two KV heads both see"]) for line in layers]
    return [
        figure4(), *figure5(), hard_form(), *figure6(),
        Claim("Table 1: O(n w) time", "the power of n is 1 within 0.15", f"{power}",
              {f"8192 to 131,072 tokens: {power}": abs(power - 1) <= 0.15}, "8192 to 131,072 tokens, an H200",
              "`growth`"),
        Claim("Table 2: 1.6 to 17.6 times SDPA under a mask", "each of 26 shapes has at least the paper's factor",
              f"{sum(reached.values())} of {len(reached)} have; {spread([here for here, _ in table2.values()])} times",
              reached,
              "an H200 for an RTX 4090; a newer SDPA; cuDNN's dense attention is a harder rival", "`table2`"),
        Claim("Section 5.3: the factor grows with the length", "it grows in each step from 4096 to 32,768",
              listed(long),
              {f"{listed(long)}": rising(long)}, "an H200", "`table2`"),
        figure7(),
        Claim("Section 5.4: falls less beyond the trained length",
              "its perplexity ratio is below NSA's and dense attention's",
              f"DMA {longer['window, DMA']:.3f}, a window the same; NSA {longer['NSA']:.3f}, dense {longer['dense']:.3f}",
              {f"{kind} {longer[kind]:.3f}": longer["window, DMA"] < longer[kind] for kind in ("NSA", "dense")},
              "the claim is of needles; with the slope; rows of 256, 64 keys, one seed",
              "`longer_texts`", apart="quantity"),
        top_fifth(),
        Claim("Figure 3: each head has a mask of its own", "two KV heads share less than all keys in each layer",
              f"they share {spread(shared, '{:.0f}')} %",
              {f"layer {line['layer']}: {value:.0f} %": value < 100 for line, value in zip(layers, shared)},
              "weak: only equal masks fail; 3.4M with the slope, whose last keys all share",
              "`tiny_attention`"),
        not_run("Table 3: Pile 45.12 for 48.65; nine tasks, zero and five shots", "1.7B, 40B tokens: days of GPUs"),
        not_run("Table 3: LongBench 16.2 for 14.2; above H2O, InfLLM, Quest, DAM", "the same model; LongBench's files"),
        Claim("Figure 2: induction keeps the keys that it needs",
              "a layer keeps the asked value in 90 % of the questions, where chance is 20 %",
              f"{kept[0]:.0f} % at step 2000, {kept[1]:.0f} % at 2600", {f"step 2600: {kept[1]:.0f} %": kept[1] >= 90},
              "MQAR with 16 of 64 keys, one seed", "`kept_keys`"),
        figure2(),
    ]


def of_long(method):
    """The rows of one method in the 85M model of lab/docs/long-prompts.md, by length."""
    by_length = {line["length"]: line for line in long_prompts.stored()
                 if (line["method"], line["kind"]) == (method, "time") and "failed" not in line}
    return dict(sorted(by_length.items()))


def sooner(method):
    """Dense attention's time to the first token over a method's, by length."""
    return {length: line["dense_prefill_ms"] / line["prefill_ms"] for length, line in of_long(method).items()}


def losses_of_long(method):
    return {length: line["loss_added"] for length, line in of_long(method).items() if line["loss_added"] is not None}


def needles_of_long(method, kind="needles"):
    return {length: line[kind][0] for length, line in of_long(method).items() if line[kind]}


def in_order(values, form="{:.2f}"):
    return listed([values[length] for length in sorted(values)], form)


def selection(method):
    """Milliseconds of the selection alone at 131,072 tokens, which stands in the row's name."""
    first = "method (selection alone, 128K)"
    (name,) = (line[first] for line in noted()["whole_selectors"][1] if line[first].startswith(f"`{method}` ("))
    return float(name.partition(" (")[2].strip(")"))


def mask_times():
    """Selection of bfla and xattention in milliseconds, wherever both were timed in one call."""
    return {"131,072 tokens, an H200": (selection("bfla"), selection("xattention"))} | {
        f"{tokens:,} tokens, an H100": (alone("bfla", tokens)[2], alone("xattention", tokens)[2])
        for tokens in (32768, 262144) if alone("bfla", tokens) and alone("xattention", tokens)}


def bfla():
    """BFLA's claims; its loss is told of SmolLM2 in the paper's settings and of our 85M model by defaults."""
    times = sooner("bfla")
    long = {length: times[length] for length in times if length >= 8192}
    settings = ["keep_mass=0.95", "stride=16", "stride=16,prob=0.1", "block=1024,stride=16,prob=0.1"]
    rows = [row("bfla", f"bfla:{setting}") for setting in settings]
    losses = [line["loss"] - line["dense_loss"] for line in rows]
    defaults = losses_of_long("bfla")
    bound = noted()["bfla_bound"][1][0]
    least, most = bound["bound over error: least"], bound["most"]
    group = list(numbers("bfla_group_ms", "ms", "32", "64", "128", "256"))
    masks = mask_times()
    shares = [ours / theirs for ours, theirs in masks.values()]
    return [
        Claim("Tables 1, 2: prefill 0.95 times dense at 2K, 1.07 at 8K, 1.33 at 32K, 2.27 to 2.50 at 128K",
              "it is faster from 8K on, and by more at each length",
              in_order(times),
              {f"{length:,} tokens: {value:.2f}": value > 1 for length, value in long.items()}
              | {"by more at each length": rising(list(long.values()))},
              f"85M, defaults, which lose {spread(defaults.values(), '{:.3f}')} nats", "`long_time`, `long_loss`"),
        Claim("Table 5: more density, better", "each step of density lowers the loss",
              ", ".join(f"{100 * line['density']:.0f} %: {added(line)}" for line in rows),
              {f"to {100 * after['density']:.0f} %: {added(before)} to {added(after)}":
               after["density"] > before["density"] and after["loss"] < before["loss"]
               for before, after in itertools.pairwise(rows)},
              "the loss of 135M at 8192 tokens, not LongBench of 8B", "`papers_settings`"),
        Claim("Tables 3, 5: nearly as good as dense", "it adds at most 0.02 nats",
              f"135M, Table 5's settings: {spread(losses, '{:+.3f}')}; 85M, defaults: "
              f"{spread(defaults.values(), '{:+.3f}')} nats",
              {f"135M, {setting}: {loss:+.3f}": loss <= 0.02 for setting, loss in zip(settings, losses)}
              | {f"85M, {length:,} tokens: {loss:+.3f}": loss <= 0.02 for length, loss in defaults.items()},
              "the same, and 85M", "`papers_settings`, `long_loss`"),
        Claim("Table 5: builds its mask in a quarter of XAttention's time (1.65 to 2.27 for 7.82 ms)",
              "it takes at most a third", f"{spread(shares, '{:.2f}')} of it at 32,768 to 262,144 tokens",
              {f"{where}: {ours} and {theirs} ms": ours <= theirs / 3 for where, (ours, theirs) in masks.items()},
              "generated operands, 32/8 heads, an H200 and an H100", "`whole_selectors`, `selectors_alone`"),
        Claim("Eq. 22 to 27: the cost falls with the group", "it falls with each doubling from 32 to 256",
              f"{', '.join(map(str, group))} ms", {f"{', '.join(map(str, group))} ms": rising([-ms for ms in group])},
              "131,072 tokens, an H200", "`bfla_group_ms`"),
        Claim("Eq. 30 bounds the error of its attention", "the error is at most the bound in each head",
              f"it is: the bound is {least:,} to {most:,} times the error",
              {f"least of 32 heads: {least:,} times": least >= 1},
              "so loose a bound hardly can fail; 11M, 2048 tokens, 32 heads, blocks of 64",
              "`bfla_bound`"),
        not_run("Table 3: LongBench 0.3975 for 0.4022", "Llama-3.1-8B; LongBench's files"),
        not_run("Table 4: MMLU-Pro, AIME, GPQA, LiveCodeBench unchanged", "models of 4B to 31B"),
    ]


def probes_share(tokens, gamma=16):
    """MOMO's probes read every key for one query of `gamma`: their share of the causal pairs."""
    return sum(query + 1 for query in range(0, tokens, gamma)) / (tokens * (tokens + 1) / 2)


def equation_9(tokens, dense=3 / 12):
    """MOMO's share of the causal pairs by eq. 9, as a mean over queries, with its defaults: 128 blocks of 64 keys, and
    its probes. The share `dense` of the layers reads all of the pairs."""
    kept = min(tokens, 128 * 64)
    causal = tokens * (tokens + 1) / 2
    read = kept * (kept + 1) / 2 + (tokens - kept) * kept
    return dense + (1 - dense) * (read / causal + probes_share(tokens))


def oracle_at(density, tokens):
    """Percent of the mass that the best blocks keep on this share of the pairs, between the rows of k = 8, 16 and 32;
    None outside of them."""
    points = [(line["density"], 100 * line["recall"]) for line in (
        row("oracle", f"oracle_topk:block=64,k={k}", tokens) for k in (8, 16, 32))]
    for (below, low), (above, high) in itertools.pairwise(points):
        if below <= density <= above:
            return low + (high - low) * (density - below) / (above - below)
    return None


def momo_mass():
    """Figure 2: MOMO's mass beside that of the best blocks, as many blocks and, where rows allow it, as many pairs."""
    apart, holds, pairs = [], {}, []
    for tokens, k in itertools.product((4096, 8192), (8, 16, 32)):
        measured = row("oracle", f"momo:k={k},{ALONE}", tokens)
        best = 100 * row("oracle", f"oracle_topk:block=64,k={k}", tokens)["recall"]
        apart.append(100 * measured["recall"] - best)
        holds[f"{tokens} tokens, {k} blocks: {apart[-1]:+.1f} points"] = apart[-1] >= -1.5
        equal = oracle_at(measured["density"], tokens)
        if equal is not None:
            pairs.append(100 * measured["recall"] - equal)
    return Claim("Figure 2: its mass is within 1.5 % of the best blocks",
                 "it is at most 1.5 points below them with 8, 16 and 32 blocks",
                 f"{spread(apart, '{:+.1f}')} points; on as many pairs {spread(pairs, '{:+.1f}')}", holds,
                 "135M, 4096 and 8192 tokens; it reads 1.2 to 2 times the pairs of as many best blocks",
                 "`momo_oracle`")


def momo_needles():
    """Table 2 by needles, with the method's defaults, in the model that has them; other numbers of blocks are not the
    paper's setting."""
    by_length, dense = needles_of_long("momo"), needles_of_long("momo", "dense_needles")
    eleven, few, more = (numbers("needles_8k", name, "found")[0] for name in (
        "dense", f"`momo:k=8,{ALONE}`", f"`momo:k=16,{ALONE}`"))
    holds = {f"85M, {length:,} tokens: {by_length[length]} needles, dense {dense[length]}": by_length[length] >= 0.9 * dense[length]
             for length in by_length}
    holds |= {f"11M, 8192 tokens, k={k}, not the defaults: {count:.0f}, dense {eleven:.0f}": None
              for k, count in ((8, few), (16, more))}
    return Claim("Table 2: RULER 89.49 for 89.73", "it finds nine tenths of the needles that dense attention finds",
                 f"{listed(by_length.values(), '{}')} of dense attention's {listed(dense.values(), '{}')}", holds,
                 "85M, ten needles a length; at 2K and 8K its 128 blocks are all keys; there 8B at 4K to 131K",
                 "`long_needles`, `needles_8k`")


def momo():
    estimate = {line["k"]: float(line["estimate"] - line["exact lists"]) for line in noted()["momo_topk"][1]}
    shares = {length: line["density"] for length, line in of_long("momo").items() if length >= 8192}
    formula = {length: equation_9(length) for length in shares}
    trimmed = {line["k"]: 100 * float(line["trimmed to k: mass"] / line["whole union: mass"])
               for line in noted()["momo_trim"][1]}
    loss_at = lambda k, exact: over(f"momo:k={k},{'' if exact == 8 else f'k_exact={exact},'}{ALONE}", "momo_k")
    by_k = [loss_at(k, 8) for k in (8, 16, 32)]
    by_exact = [loss_at(16, exact) for exact in (4, 8, 16)]
    label = lambda gamma, chi: "momo:" + ",".join(filter(None, [
        f"gamma={gamma}" if gamma != 16 else "", f"chi={chi}" if chi != 128 else "", f"k=16,{ALONE}"]))
    grid = {(gamma, chi): over(label(gamma, chi), "momo_chi") for gamma in (8, 16, 32, 64) for chi in (64, 128, 256)}
    worse = {f"chi {chi}, by gamma": rising([grid[gamma, chi] for gamma in (8, 16, 32, 64)])
             for chi in (64, 128, 256)} | {
        f"gamma {gamma}, by chi": rising([grid[gamma, chi] for chi in (64, 128, 256)]) for gamma in (8, 16, 32, 64)}
    at_1m = 1048576
    return [
        momo_mass(),
        Claim("Figure 7: k decides, k_exact hardly",
              "k from 8 to 32 changes the loss 3 times as much as k_exact from 4 to 16",
              f"k: {spread(by_k, '{:+.3f}')}; k_exact: {spread(by_exact, '{:+.3f}')}",
              {f"{max(by_k) - min(by_k):.3f} and {max(by_exact) - min(by_exact):.3f} nats":
               max(by_k) - min(by_k) > 3 * (max(by_exact) - min(by_exact))},
              "the loss of 135M, not RULER at 131K", "`papers_settings`; published.jsonl"),
        Claim("Figure 9: larger gamma and larger chi are worse",
              "the loss rises with gamma for each chi, and with chi for each gamma",
              f"so in {sum(worse.values())} of {len(worse)} rows and columns", worse, "the same", "`momo_chi`"),
        momo_needles(),
        Claim("Section 3: the estimated top-k chooses nearly as well as exact lists",
              "its mass is within 1 point of theirs at each k from 2 to 32",
              f"{listed(estimate.values(), '{:+.2f}')} points",
              {f"k={k}: {apart_by:+.2f} points": abs(apart_by) <= 1 for k, apart_by in estimate.items()},
              "3.4M, blocks of 16; tree and lists are one code here",
              "`momo_topk`"),
        Claim("Table 1: trimming the union costs hardly any quality (RULER 77.57, 77.20)",
              "trimmed to k it keeps 95 % of the union's mass, at k = 2, 4, 8",
              f"{listed(trimmed.values(), '{:.0f}')} %",
              {f"k={k}: {share:.0f} %": share >= 95 for k, share in trimmed.items()},
              "mass for a score; k = 2 to 8 for 128; 3.4M; on 0.5 to 0.6 of the pairs",
              "`momo_trim`", apart="quantity"),
        timed("Table 1: trimming turns 45.0 into 26.5 ms, dense 31.5",
              "at 131,072 tokens the trimmed union takes less than dense attention, the whole one more", "trim", "",
              [MOMO, f"momo:k_trim=1024,{ALONE}"], lambda trimmed, union: (
                  f"{union[1]:.1f} to {trimmed[1]:.1f} ms, dense {trimmed[0]:.1f}",
                  {f"trimmed {trimmed[1]:.1f} ms": sooner_than(trimmed[1], trimmed[0]),
                   f"whole union {union[1]:.1f} ms": sooner_than(union[0], union[1])})),
        timed("Figure 4: the tree is faster than exact lists for large k, the estimate than both",
              "at k = 128 choosing by the estimate takes less than by the tree, and that less than by lists", "topk",
              "tree against lists is undecided where they run the same code: within 1 %",
              [MOMO, f"momo:topk=tree,{ALONE}", f"momo:topk=exact,{ALONE}"],
              lambda *ways: (f"{', '.join(f'{way[2]:.1f}' for way in ways)} ms at 131,072 tokens",
                             {f"estimate {ways[0][2]:.1f} ms, tree {ways[1][2]:.1f}": sooner_than(ways[0][2],
                                                                                                  ways[1][2]),
                              f"tree {ways[1][2]:.1f} ms, lists {ways[2][2]:.1f}": unless_equal(ways[1][2],
                                                                                                ways[2][2])})),
        timed("Figure 6, Table 4: first token 2.3 to 2.5 times as fast at 1M",
              "attention is at least 2.3 times dense attention's speed at 1M", "million",
              "attention alone for a first token; 8/2 heads; there 30B on 4 and 8 GPUs", [MOMO],
              lambda ours: (f"{ours[0] / ours[1]:.2f} times, on {ours[3]:.1f} % of the pairs, of them "
                            f"{100 * probes_share(at_1m):.2f} by probes",
                            {f"{ours[0] / ours[1]:.2f} times": ours[0] >= 2.3 * ours[1]}), at_1m, apart="quantity"),
        not_run("Table 3: InfiniteBench 66.5 for 68.3", "30B; the data set is not read"),
        Claim("Eq. 9, Figure 8: sparsity grows with the length",
              "the share of pairs falls from each length to the next, from 8K",
              f"{in_order(shares)} at 8K, 32K, 64K, 128K",
              {f"to {long:,} tokens: {shares[long]:.2f}": shares[long] < shares[short]
               for short, long in itertools.pairwise(shares)}, "85M; a mean over queries; eq. 9 is of the last one",
              "`long_density`"),
        Claim("Eq. 9: what is read follows from k, gamma and the length",
              "its mean over queries is within 0.01 of the measured share at each length from 8K",
              f"{in_order(formula)} for those of the row above; {equation_9(at_1m, 0):.2f} at 1M with no dense layer",
              {f"{length:,} tokens: {formula[length]:.3f}, measured {shares[length]:.3f}":
               abs(formula[length] - shares[length]) <= 0.01 for length in shares},
              "85M, three of twelve layers dense; no window, a sink block among the k", "`long_density`"),
    ]


def unless_equal(a, b):
    """Whether a time is below another one; None where the two are equal."""
    return None if not sooner_than(a, b) and not sooner_than(b, a) else sooner_than(a, b)


def permuted_time():
    """Appendix C: what permuting adds to the choice, which is the paper's quantity, as a share of the whole; the rest of
    the difference is this project's attention over permuted tiles."""
    says = "Appendix C: permuting takes 4 % of block attention's time at 128K"

    def judge(permuted, plain):
        share = 100 * (permuted[2] - plain[2]) / (permuted[1] - permuted[2])
        per_pair = 100 * (permuted[1] / permuted[3] / (plain[1] / plain[3]) - 1)
        return (f"choice and sort {share:.1f} % of attention; all of it {per_pair:+.0f} % per pair: {permuted[1]:.1f} ms on "
                f"{permuted[3]:.0f} % of the pairs, {plain[1]:.1f} on {plain[3]:.0f} %",
                {f"choice and sort: {share:.1f} % of attention": share <= 4,
                 f"a kept pair: {per_pair:+.0f} %": per_pair <= 4})

    return timed(says, "permuting adds at most 4 %", "permute",
                 "our own kernel is slower over permuted tiles, and by what was not found", ["pbs", "pbs:permute=none"],
                 judge, apart="implementation")


def pbs():
    """PBS-Attn's claims (arXiv:2510.21270); "the fastest" is judged against the two rivals that were timed."""
    times = sooner("pbs")
    lengths = [length for length in times if length >= 8192]
    rivals = {name: sooner(name) for name in ("xattention", "flexprefill")}
    ahead = {f"{length:,} tokens: {times[length]:.2f}, " + ", ".join(
        f"{name} {times_of[length]:.2f}" for name, times_of in rivals.items()): times[length] > max(1, *(
            times_of[length] for times_of in rivals.values())) for length in lengths}
    saved = {line["model, tokens"]: float(line["without"] - line["with"]) for line in noted()["pbs_density"][1]}
    smol = [saved["SmolLM2-135M, 4096"], saved["SmolLM2-135M, 8192"]]
    young = [saved["ours, 4096"], saved["ours, 32,768"]]
    labels = {"keys": "pbs", "queries": "pbs:permute=queries", "both": "pbs:permute=both", "none": "pbs:permute=none"}
    loss = {what: over(label) for what, label in labels.items()}
    share = {what: 100 * row("where", label)["density"] for what, label in labels.items()}
    floors = {size: row(group, label) for size, group, label in (
        (128, "pbs_segment", "pbs:segment=128"), (256, "pbs", "pbs"), (512, "pbs_segment", "pbs:segment=512"),
        (1024, "pbs_segment", "pbs:segment=1024"))}
    with_choice = [row("where", f"pbs:select=xattention{rest}") for rest in ("", ",permute=none")]
    exact = {line["permuted"]: line["error of the output"] for line in noted()["pbs_exact"][1]}
    fewer, rival = row("pbs_segment", "pbs:segment=128"), row("time", "xattention")
    return [
        Claim("Theorem 3.3: permuted keys and queries, put back, change nothing",
              "with every block kept the output differs by less than 1e-6 of its norm",
              f"{exact['keys']} with permuted keys, {exact['queries']} with queries, {exact['both']} with both",
              {f"{what}: {error}": float(error) < 1e-6 for what, error in exact.items()},
              "3.4M, f32", "`pbs_exact`"),
        Claim("Figure 3: the fastest first token at each length, 2.75 times dense at 256K",
              "from 8K on it is faster than dense, and than XAttention and FlexPrefill, at each length",
              f"{in_order(times)} times dense; the fastest of them at {sum(ahead.values())} of "
              f"{len(ahead)}", ahead | {f"{length:,} tokens, against dense": times[length] > 1 for length in lengths},
              "85M; MInference was not timed; half of 256K at most", "`long_time`"),
        Claim("Figure 4: permuting saves 7 points of density at 8K, more in longer texts",
              "it saves at each length, and more in the longer",
              f"{both(smol, '{:.1f}')} points at 4096 and 8192; a second model {both(young, '{:.1f}')} at 4096 and 32,768",
              {f"{name}: {points:.1f} points": points > 0 for name, points in saved.items()}
              | {"135M, more in the longer": rising(smol), "80M, more in the longer": rising(young)},
              "135M; our own 80M", "`pbs_density`"),
        Claim("Figure 5a: permuted keys are the better trade", "permuted keys lose at most what unpermuted ones do",
              f"{loss['keys']:+.3f} at {share['keys']:.1f} %, without {loss['none']:+.3f} at {share['none']:.1f} %",
              {f"{loss['keys']:+.3f} and {loss['none']:+.3f}": loss["keys"] <= loss["none"]},
              f"135M, loss; {added(fewer)} at {100 * fewer['density']:.1f} % with segments of 128, {added(rival)} at "
              f"{100 * rival['density']:.1f} % by `xattention`", "`papers_settings`"),
        Claim("Figure 5a: permuting queries too gains nothing", "both lose at least what keys alone lose, less 0.005",
              f"keys {loss['keys']:+.3f}, both {loss['both']:+.3f}, queries {loss['queries']:+.3f}",
              {f"{loss['both']:+.3f} and {loss['keys']:+.3f}": loss["both"] >= loss["keys"] - 0.005}, "the same",
              "`papers_settings`"),
        Claim("Figure 5b: larger segments raise the least density",
              "the density rises with each doubling from 128 to 1024",
              ", ".join(f"{100 * line['density']:.1f} %" for line in floors.values()),
              {f"to {long}: {100 * floors[long]['density']:.1f} %": floors[short]["density"] < floors[long]["density"]
               for short, long in itertools.pairwise(floors)}, "the same", "`papers_settings`"),
        Claim("Figure 6: XAttention's choice gains by it too", "permuted it loses at most what it loses unpermuted",
              f"{added(with_choice[0])} at {100 * with_choice[0]['density']:.1f} %, {added(with_choice[1])} at "
              f"{100 * with_choice[1]['density']:.1f} % without",
              {f"{added(with_choice[0])} and {added(with_choice[1])}": with_choice[0]["loss"] <= with_choice[1]["loss"]},
              "the same; fewer pairs are kept with it", "`papers_settings`"),
        not_run("Tables 1, 2: LongBench 37.37 for 38.28, v2 29.82 for 28.83", "8B and 7B models; LongBench's files"),
        permuted_time(),
    ]


def speed_at_256k():
    """6.95 times FlashAttention at 256K. The paper's page does not say at which sparsity; both of ours are told."""
    says = "6.95 times FlashAttention at 256K, 5.70 with compensation"
    condition = "at 262,144 tokens it is at least 6 times dense, 5 with compensation"
    rest = ",compensate_layers=none"
    methods = [f"ba_att:sparsity=0.9{rest}", "ba_att:sparsity=0.9", f"ba_att:{rest[1:]}", "ba_att"]

    def judge(*measured):
        times = [pair[0] / pair[1] for pair in measured]
        names = ["nine tenths dropped", "the same, compensated", "half dropped", "the same, compensated: half"]
        return (f"nine tenths dropped: {times[0]:.2f}, {times[1]:.2f} compensated; half: {times[2]:.2f}, {times[3]:.2f}",
                {f"{name}: {value:.2f} times": value >= least
                 for name, value, least in zip(names, times, (6, 5, 6, 5))})

    return timed(says, condition, "far", "the sparsity of that number is not told; generated operands, 32/8 heads",
                 methods, judge, 262144)


def ba_att_losses(half):
    """Half of the pairs dropped: what it adds in each model, against a limit and against XAttention's own."""
    ours, theirs = losses_of_long("ba_att"), losses_of_long("xattention")
    pairs = {length: own["density"] for length, own in of_long("ba_att").items()}
    of_theirs = {length: own["density"] for length, own in of_long("xattention").items()}
    beside = [row("time", f"ba_att{rest}") for rest in (":sparsity=0.9", ":sparsity=0.75", "")]
    rivals = [row("time", f"xattention{rest}") for rest in (":tau=0.7", "", "")]
    of_both = lambda own: f"{added(own)} at {100 * own['density']:.0f} %"
    told = [f"{of_both(own)}, XAttention {of_both(rival)}" for own, rival in zip(beside, rivals)]
    told = told[:1] + told[-1:]  # the most dropped and the least
    return [
        Claim("Half of the pairs dropped: nearly as good as dense", "it adds at most 0.02 nats",
              f"135M: {half:+.3f}; 85M: {in_order(ours, '{:+.3f}')}",
              {f"135M, 8192 tokens: {half:+.3f}": half <= 0.02}
              | {f"85M, {length:,} tokens: {loss:+.4f}": loss <= 0.02 for length, loss in ours.items()},
              "causal models; blocks of 128; two texts a length", "`ba_att_sorts`, `long_loss`"),
        Claim("Above XAttention: LongBench 31.3 for 28.8, RULER at 4K 90.06 for 81.43",
              "with more pairs than XAttention it loses less, in each model and length",
              f"135M: {'; '.join(told)}; 85M at 128K: {ours[131072]:+.3f}, {theirs[131072]:+.3f}",
              {f"135M: {of_both(own)}, XAttention {of_both(rival)}": own["loss"] < rival["loss"]
               for own, rival in zip(beside, rivals)}
              | {f"85M, {length:,} tokens: {ours[length]:+.4f} at {100 * pairs[length]:.0f} %, XAttention "
                 f"{theirs[length]:+.4f} at {100 * of_theirs[length]:.0f} %": ours[length] < theirs[length]
                 for length in ours},
              "causal models, loss; there bidirectional 8B models", "`selectors_8192`, `long_loss`"),
    ]


def ba_att_needles():
    """That BA-Att finds as many needles as XAttention: at 8K by an 11M model, at five lengths by an 85M one."""
    ours, theirs = needles_of_long("ba_att"), needles_of_long("xattention")
    few, most = (numbers("needles_8k", f"`{name}`", "found")[0] for name in ("ba_att", "xattention"))
    return Claim("The same on needles", "by its defaults it finds as many as XAttention by its own",
                 f"11M, 8K: {few:.0f} and {most:.0f}; 85M: {in_order(ours, '{}')} and {in_order(theirs, '{}')} of 10",
                 {f"11M, 8192 tokens: {few:.0f} and {most:.0f}": few >= most}
                 | {f"85M, {length:,} tokens: {ours[length]} and {theirs[length]}": ours[length] >= theirs[length]
                    for length in ours}, "causal models; ten needles a length", "`needles_8k`, `long_needles`")


def ba_att():
    """BA-Att's claims (arXiv:2605.19726); sorting is judged by the loss at three shares of dropped pairs."""
    sorted_both = noted()["ba_att_bound"][1][0]
    bound = {name: sorted_both[name] for name in ("R of U and error, segments of 128", "the same, bidirectional")}
    label = lambda sparsity, rest: "ba_att" + (":" if rest or sparsity != 0.5 else "") + ",".join(
        filter(None, ["" if sparsity == 0.5 else f"sparsity={sparsity}", rest]))
    loss_at = {(sparsity, sort): over(label(sparsity, "" if sort == "qk" else f"sort={sort}"), "ba_att")
               for sparsity in (0.5, 0.7, 0.9) for sort in ("qk", "k", "q", "none")}
    less = lambda sort, other: {
        f"{sparsity} dropped: {loss_at[sparsity, sort]:+.3f} and {loss_at[sparsity, other]:+.3f}":
        loss_at[sparsity, sort] < loss_at[sparsity, other] for sparsity in (0.5, 0.7, 0.9)}
    ends, nowhere, everywhere = (over(f"ba_att:sparsity=0.9{rest}", "ba_att") for rest in (
        "", ",compensate_layers=none", ",compensate_layers=all"))
    said = lambda *sorts: "; ".join(f"{sparsity}: " + ", ".join(f"{loss_at[sparsity, sort]:+.3f}" for sort in sorts)
                                    for sparsity in (0.5, 0.7, 0.9))
    return [
        Claim("Ablation: sorting queries and keys by norm helps at 0.5, 0.7 and 0.9 dropped",
              "sorted it loses less at each",
              f"both, none at {said('qk', 'none')}", less("qk", "none"),
              "135M, causal; there bidirectional 8B, RULER at 4K", "`ba_att_sorts`"),
        Claim("Ablation: sorted keys matter more than sorted queries",
              "sorted keys lose less than sorted queries at each",
              f"keys, queries at {said('k', 'q')}", less("k", "q"), "the same", "`ba_att_sorts`"),
        Claim("Compensation belongs into the first and last layers",
              "there it loses less than nowhere and than everywhere, at 0.9",
              f"{ends:+.3f}; nowhere {nowhere:+.3f}, everywhere {everywhere:+.3f}",
              {f"{ends:+.3f}, nowhere {nowhere:+.3f}": ends < nowhere, f"{ends:+.3f}, everywhere {everywhere:+.3f}":
               ends < everywhere}, "the same", "`ba_att_sorts`; published.jsonl"),
        *ba_att_losses(loss_at[0.5, "qk"]), ba_att_needles(),
        not_run("LongBench 31.3 for 31.5, RULER 90.06 for 88.37", "bidirectional diffusion models cannot be loaded"),
        speed_at_256k(),
        Claim("Figure 2: the bound's correlation with the error is above 0.5",
              "it is, in both forms, when queries and keys are sorted",
              f"{both(bound.values(), '{}')}: segments of 128, bidirectional",
              {f"{name}: {value}": float(value) > 0.5 for name, value in bound.items()},
              "3.4M", "`ba_att_bound`"),
        not_run("Images and video", "other models"),
    ]


PAPERS = {"DMA": dma, "BFLA": bfla, "MOMO": momo, "PBS-Attn": pbs, "BA-Att": ba_att}


@functools.cache
def verdicts():
    """How many claims of each paper have which verdict, and of all."""
    by_paper = {name: [claim.verdict for claim in of_paper()] for name, of_paper in PAPERS.items()}
    by_paper["all"] = sum(by_paper.values(), [])
    return ["paper", *VERDICTS], [[name, *(str(said.count(verdict)) for verdict in VERDICTS)]
                                  for name, said in by_paper.items()]


def rows_of(claim):
    """Names of the tables whose rows decide a claim."""
    return re.findall(r"`(\w+)`", claim.rows)


def command(table):
    """What measures the rows of this table again."""
    return MEASURES.get(table) or noted()[table][0]["command"]


def commands():
    """The tables whose rows a script measures, a line a command."""
    return ["rows", "measured again by"], [
        [", ".join(f"`{name}`" for name in MEASURES if MEASURES[name] == command), f"`{command}`"]
        for command in dict.fromkeys(MEASURES.values())]


def main():
    """Prints each claim with its verdict and its rows, or with --commands what measures these again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commands", action="store_true", help="what measures the rows again, instead of the verdicts")
    parser.add_argument("--why", action="store_true",
                        help="below each verdict a line a condition, and whether it holds")
    arguments = parser.parse_args()
    if arguments.commands:
        named = dict.fromkeys(name for of_paper in PAPERS.values() for claim in of_paper() for name in rows_of(claim))
        print("\n".join(f"{name}: {command(name)}" for name in named))
        return
    for paper, of_paper in PAPERS.items():
        for claim in of_paper():
            print(f"{claim.verdict:14}  {paper}, {claim.says}  [{', '.join(rows_of(claim)) or '-'}]")
            if arguments.why:
                print("".join(f"    {reason}\n" for reason in claim.reasons()), end="")


def shown(of_paper):
    """The table of a paper. It leaves out the names of rows, which are long: `main` prints them."""
    return ["claim", "it is reproduced if", "here", "verdict", "what differs"], [claim.cells() for claim in of_paper()]


TABLES = {"papers": verdicts, "papers_commands": commands} | {
    f"papers_{name.lower().removesuffix('-attn').replace('-', '_')}": functools.partial(shown, of_paper)
    for name, of_paper in PAPERS.items()}

if __name__ == "__main__":
    main()
