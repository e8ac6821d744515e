"""The tables of docs/papers.md: what became of each claim of five papers, computed from the rows.

    python3 experiments/papers.py             every claim with its verdict, computed now, and the rows that decide it
    python3 experiments/papers.py --commands  each of these rows with the command that measures it again

A claim has conditions: it is *reproduced* where all of them hold, *refuted* where none does, and *partly* reproduced
otherwise. Claims without a measurement that could decide them are *not comparable* or *not run*. `TABLES` holds a
function for each paper, as in run_tables.py. Needs nothing but Python.
"""

import argparse
import functools
import itertools
import re
import statistics

from long import table as long_prompts
from noted import noted
from run_tables import MQAR, SIZES, runs
from selector_tables import added, row

HEAD = ["claim", "it is reproduced if", "here", "verdict", "what differs", "rows"]
ALONE = "first_dense_layers=0"
MOMO = f"momo:{ALONE}"
GPU = "`experiments/papers_gpu.sh`"
# What measures the rows of a table again that was not noted by hand: those have a `command` in their line `about`.
SMOLLM2 = "python3 tests/python/published_selectors.py --sieve SIEVE --checkpoint in/smollm2 --device cuda --only"
MQAR_FIGURE = "python3 tests/python/mqar_figure.py --sieve SIEVE --out OUT"
LONG = "experiments/long/score.sh SIEVE out/long text/heldout_long.jsonl OUT"
MEASURES = {
    "scaling": "python3 tests/python/scaling.py --sieve SIEVE --text data/scaling.jsonl --out OUT",
    "mqar_256": MQAR_FIGURE, "mqar_worst": MQAR_FIGURE,
    "mqar_hard": f'{MQAR_FIGURE} --hard 12000 --seeds 0 1 2 --kinds "DMA as published"',
    "needle_depth": "python3 tests/python/learning_table.py --sieve SIEVE --text data/crates.jsonl --out OUT "
                    "--evaluate --sets recall --recall-length 4096 --steps 2400",
    "long_time": LONG, "long_loss": LONG, "long_density": LONG,
    "bfla_group_ms": "sieve kernels bench --selectors --lengths 131072 --selector bfla:group=GROUP",
    "bfla_rescue": f"{SMOLLM2} bfla", "momo_oracle": f"{SMOLLM2} oracle", "momo_settings": f"{SMOLLM2} momo_k",
    "momo_chi": f"{SMOLLM2} momo_chi", "papers_settings": f"{SMOLLM2} where",
    "pbs_segments": f"{SMOLLM2} pbs pbs_segment", "ba_att_sorts": f"{SMOLLM2} ba_att",
    "ba_att_xattention": f"{SMOLLM2} time",
}


def judged(conditions):
    return "**reproduced**" if all(conditions) else "**partly**" if any(conditions) else "**refuted**"


def not_run(claim, why, verdict="not run", condition="-"):
    """A claim that no row decides; `condition` where experiments/papers_gpu.sh or another script will."""
    return [claim, condition, "-", verdict, why, "-"]


def alone(method, tokens=131072):
    """What experiments/papers_gpu.sh measured of a selector as (dense ms, whole ms, selection ms, pairs in percent);
    None where it did not."""
    columns = ("dense, ms", "whole, ms", "selection, ms", "pairs, %")
    for one in noted().get("selectors_alone", (None, ()))[1]:
        if (one["method"], one["tokens"]) == (f"`{method}`", f"{tokens:,}"):
            return [float(one[column]) for column in columns]
    return None


def timed(claim, condition, part, differs, methods, judge, tokens=131072):
    """A claim that papers_gpu.sh decides: `judge` has what was measured of each method and returns the cell of what
    was found and the conditions. Without all of these methods the claim is not run."""
    found = [alone(method, tokens) for method in methods]
    if None in found:
        return not_run(claim, "; ".join(filter(None, [f"{GPU}, part `{part}`", differs])), condition=condition)
    here, conditions = judge(*found)
    return [claim, condition, here, judged(conditions), differs or "generated operands, 32/8 heads",
            "`selectors_alone`"]


def numbers(name, label, *columns):
    """The row of a noted table whose first column begins with `label`, as floats of these columns."""
    about, rows = noted()[name]
    first = next(iter(about["columns"]))
    (found,) = (one for one in rows if one[first] == label)
    return [float(found[column]) for column in columns]


def over(selector, group="where"):
    return row(group, selector)["loss"] - row(group, selector)["dense_loss"]


def sooner_than(a, b):
    """Whether a time is below another one. Two within a hundredth are equal: calls of one process differ by as much."""
    return a < 0.99 * b


def rising(values):
    return all(a < b for a, b in itertools.pairwise(values))


def spread(values, form="{:.1f}"):
    return f"{form.format(min(values))} to {form.format(max(values))}"


def by_size(rank):
    """Of each size: whether DMA as published is the best (0) or the last (-1) of the kinds by the mean of seeds."""
    found = []
    for size in SIZES:
        of = {kind: [one["loss"] for one in runs("scaling", kind=kind, size=size)] for kind in MQAR}
        order = sorted((kind for kind in of if of[kind]), key=lambda kind: statistics.mean(of[kind]))
        found.append(order[rank] == "DMA as published")
    return found


def right(kind, **values):
    return [100 * one["accuracy"] for one in runs("mqar", kind=kind, **values)]


def hard(kind, steps):
    """The best share of right answers of each seed, in percent."""
    of_seed = [runs("mqar_hard", kind=kind, steps=steps, seed=seed) for seed in (0, 1, 2)]
    return [100 * max(one["accuracy"] for one in found) for found in of_seed]


def needles(kind, *lengths):
    """Needles found of 99 in texts of each length."""
    return [sum(sum(one["found"]) for one in runs("needle_depth", attention=kind, length=length)) for length in lengths]


def share_found(kind):
    """Percent of the needles that were found at 2 and 3 times the trained length."""
    (one,) = (one for one in noted()["selector_needles"][1] if one["attention"] == kind)
    return [float(one[length][0]) for length in ("2048", "3072")]


def both(values, form="{:.0f}"):
    return " and ".join(form.format(value) for value in values)


def figure2():
    """The claim that experiments/figure2.sh decides, of the published form."""
    claim = "Figure 2: which keys copying and selecting need"
    condition = "it answers 90 %, and a layer reads a tenth of its keys outside a window of as many"
    rows = [one for one in noted().get("figure2", (None, ()))[1]
            if one["form"] == "as published" and one["task"] in ("copy", "select")]
    if len(rows) < 2:
        return not_run(claim, "`experiments/figure2.sh` draws them", condition=condition)
    answered, far = "answered, % at 512", "keys outside a window of as many, % in the layer with most"
    said = "; ".join(f"{one['task']}: {one[answered]:.0f} % answered, {one[far]:.0f} % of the keys" for one in rows)
    learned = "" if any(one[answered] for one in rows) else "; it learned neither task"
    return [claim, condition, said, judged([one[column] >= least for one in rows for column, least in (
        (answered, 90), (far, 10))]),
            f"2.5M parameters, texts of 512 tokens, {rows[0]['steps']} steps, one seed{learned}", "`figure2`"]


def dma():
    ours, sizes = "DMA as published", len(SIZES)
    width = {number: right(ours, width=number) for number in (64, 128, 256)}
    cells = [(length, number) for length in (64, 256, 1024, 2048) for number in (64, 128, 256)]
    of_cell = lambda kind, cell: statistics.mean(right(kind, length=cell[0], width=cell[1]))
    ahead = [of_cell(ours, cell) > max(of_cell("window", cell), of_cell("NSA", cell)) for cell in cells]
    of_hard = {"DMA": hard(ours, 12000), "NSA": hard("NSA", 4000), "window": hard("window", 4000)}
    best = [a > max(b, c) for a, b, c in zip(*of_hard.values())]
    ms = {kind: numbers("growth", kind, "both passes, ms: 8192 tokens", "ms: 131,072")
          for kind in ("window 1024", "DMA, w 1024")}
    power = numbers("growth", "DMA, w 1024", "power of n")[0]
    table2 = [(float(one["SDPA under a mask"] / one["DMA"]), float(one["the paper's"])) for one in noted()["table2"][1]]
    reached = [here > theirs for here, theirs in table2]
    faster = {one["batch x tokens, heads, width"]: one["DMA"] < one["dense, ours"] for one in noted()["table2"][1]}
    first = next(shape.split()[2] for shape, is_faster in faster.items() if shape.startswith("1 x ") and is_faster)
    long = [here for one, (here, _) in zip(noted()["table2"][1], table2)
            if one["batch x tokens, heads, width"] in [f"1 x {n} h2/1 d128" for n in (4096, 8192, 16384, 32768)]]
    far = [needles(kind, 8192, 16384) for kind in ("DMA 128, slope, r 32", "NSA", "dense")]
    trained = ("trained dma, keeps 256", "trained nsa, 8 x 16 selected, window 128", "dense")
    near = [share_found(kind) for kind in trained]
    further = [a > max(b, c) for a, b, c in [*zip(*far), *zip(*near)]]
    longer = {one["attention"]: float(one["ratio"]) for one in noted()["longer_texts"][1]}
    layers = [one for one in noted()["tiny_attention"][1] if one["kind"] == "DMA"]
    kept = numbers("kept_keys", "it keeps the value that the question asks for", "step 2000", "step 2600")
    fifth = [float(one["weight on the top fifth"]) for one in noted()["tiny_attention"][1] if one["kind"] == "dense"]
    shared = [100 * float(one["keys that two KV heads both see"]) for one in layers]
    return HEAD, [
        ["Figure 4: the lowest perplexity at each size, 80M to 1.7B",
         "it has the lowest loss of up to ten kinds at each size",
         f"the lowest at {sum(by_size(0))} of {sizes} sizes, the highest at {sum(by_size(-1))}", judged(by_size(0)),
         "2 to 80M, code, 80M under-trained, one seed from 10M on", "`scaling`"],
        ["Figure 5: MQAR stays solved in smaller models", "at each width all lengths and seeds are above 90 %",
         "; ".join(f"width {number}: {spread(values)} %" for number, values in width.items()),
         judged([min(values) > 90 for values in width.values()]), "64 to 2048 tokens, a pair for every 16, two seeds",
         "`mqar_worst`"],
        ["Figure 5: above the window and NSA", "it is above both at each length and width, by the mean of two seeds",
         f"above both in {sum(ahead)} of {len(ahead)} cells", judged(ahead), "the same; one learning rate a width",
         "`mqar_256`, the others by `mqar_figure.py`"],
        ["Section 5.2: 512 pairs, windows of 512", "its best share is above NSA's and the window's with each seed",
         "; ".join(f"{kind} {', '.join(f'{value:.0f}' for value in values)} %" for kind, values in of_hard.items()),
         judged(best), "2048 tokens; DMA has 12,000 steps, the others 4000", "`mqar_hard`"],
        ["Figure 6: from 4096 tokens on as fast as a window", "it takes at most the window's time",
         f"{ms['DMA, w 1024'][0]:.2f} and {ms['window 1024'][0]:.2f} ms at 8192, {ms['DMA, w 1024'][1]:.1f} and "
         f"{ms['window 1024'][1]:.1f} at 131,072",
         judged([a <= b for a, b in zip(ms["DMA, w 1024"], ms["window 1024"])]),
         "CUDA kernels, both passes; there PyTorch, inference", "`growth`"],
        ["Figure 6: faster than dense attention at each length", "it is faster in each of 26 shapes",
         f"in {sum(faster.values())} of {len(faster)}; forward, width 128, from {first} tokens on",
         judged(faster.values()), "our dense kernel is the rival", "`table2`"],
        ["Table 1: O(n w) time", "the power of n is 1 within 0.15", f"{power}", judged([abs(power - 1) <= 0.15]),
         "8192 to 131,072 tokens, an H200", "`growth`"],
        ["Table 2: 1.6 to 17.6 times SDPA under a mask", "each of 26 shapes has at least the paper's factor",
         f"{sum(reached)} of {len(reached)} have; {spread([here for here, _ in table2])} times", judged(reached),
         "an H200 for an RTX 4090; a newer SDPA; cuDNN's dense attention is a harder rival", "`table2`"],
        ["Section 5.3: the factor grows with the length", "it grows in each step from 4096 to 32,768",
         ", ".join(f"{value:.1f}" for value in long), judged([rising(long)]), "an H200", "`table2`"],
        ["Figure 7: finds more beyond the trained length",
         "it finds more than NSA and dense at twice the length and beyond",
         f"trained on 4096: {both(far[0])} of 99, NSA {both(far[1])}, dense {both(far[2])}; on 1024: {both(near[0])} %,"
         f" NSA {both(near[1])}, dense {both(near[2])}", judged(further),
         "4 layers of 192, one seed; with the slope", "`needle_depth`, `selector_needles`"],
        ["Section 5.4: loses less on longer texts", "its perplexity ratio is below NSA's and dense attention's",
         f"DMA {longer['window, DMA']:.3f}, a window the same; NSA {longer['NSA']:.3f}, dense {longer['dense']:.3f}",
         judged([longer["window, DMA"] < min(longer["NSA"], longer["dense"])]), "rows of 256, 64 keys, a CPU, one seed",
         "`longer_texts`"],
        ["Section 6.1: the fifth of the keys with most weight has only 70 % of it",
         "in each dense layer it has at most 80 %",
         f"{spread([100 * value for value in fifth], '{:.0f}')} % in two dense layers",
         judged([value <= 0.8 for value in fifth]), "a DMA hybrid of 3.4M parameters, 512 tokens", "`tiny_attention`"],
        ["Figure 3: each head has a mask of its own", "two KV heads share less than all keys in each layer",
         f"they share {spread(shared, '{:.0f}')} %", judged([value < 100 for value in shared]), "the same model",
         "`tiny_attention`"],
        not_run("Table 3: Pile 45.12 for 48.65; nine tasks, zero and five shots", "1.7B, 40B tokens: days of GPUs"),
        not_run("Table 3: LongBench 16.2 for 14.2; above H2O, InfLLM, Quest, DAM", "the same model; LongBench's files"),
        ["Figure 2: induction keeps the keys that it needs",
         "a layer keeps the asked value in 90 % of the questions, where chance is 20 %",
         f"{kept[0]:.0f} % at step 2000, {kept[1]:.0f} % at 2600", judged([kept[1] >= 90]),
         "MQAR with 16 of 64 keys, one seed", "`kept_keys`"],
        figure2(),
    ]


def sooner(method):
    """Dense attention's time to the first token over a method's, by length: one model, docs/long-prompts.md."""
    return {one["length"]: one["dense_prefill_ms"] / one["prefill_ms"] for one in long_prompts.stored()
            if (one["method"], one["kind"]) == (method, "time") and "failed" not in one}


def in_order(times):
    return ", ".join(f"{times[length]:.2f}" for length in sorted(times))


def selection(method):
    """Milliseconds of the selection alone at 131,072 tokens, which stands in the row's name."""
    first = "method (selection alone, 128K)"
    (found,) = (one[first] for one in noted()["whole_selectors"][1] if one[first].startswith(f"`{method}` ("))
    return float(found.partition(" (")[2].strip(")"))


def bfla():
    times = sooner("bfla")
    from_8k = [times[length] for length in sorted(times) if length >= 8192]
    settings = ["keep_mass=0.95", "stride=16", "stride=16,prob=0.1", "block=1024,stride=16,prob=0.1"]
    rows = [row("bfla", f"bfla:{one}") for one in settings]
    losses = [one["loss"] - one["dense_loss"] for one in rows]
    bound = noted()["bfla_bound"][1][0]
    least, most = bound["bound over error: least"], bound["most"]
    group = list(numbers("bfla_group_ms", "ms", "32", "64", "128", "256"))
    return HEAD, [
        ["Tables 1, 2: prefill 0.95 times dense at 2K, 1.07 at 8K, 1.33 at 32K, 2.27 to 2.50 at 128K",
         "it is faster from 8K on, and by more at each length",
         f"{in_order(times)} at 2K, 8K, 32K, 64K, 128K", judged([*(one > 1 for one in from_8k), rising(from_8k)]),
         "all layers are dense ones of an 85M model; defaults, which lose 0.3 nats", "`long_time`, `long_loss`"],
        ["Table 5: more density, better", "each step of density lowers the loss",
         ", ".join(f"{100 * one['density']:.0f} %: {added(one)}" for one in rows),
         judged([rising([one["density"] for one in rows]), rising([-one for one in losses])]),
         "loss of a 135M model at 8192 tokens, not LongBench of 8B", "`bfla_rescue`"],
        ["Tables 3, 5: nearly as good as dense", "it adds at most 0.02 nats with the best setting of Table 5",
         f"{min(losses):+.3f} nats", judged([min(losses) <= 0.02]), "the same", "`bfla_rescue`"],
        ["Table 5: builds its mask in a quarter of XAttention's time (1.65 to 2.27 for 7.82 ms)",
         "it takes at most a third",
         f"{selection('bfla')} and {selection('xattention')} ms at 131,072 tokens",
         judged([selection("bfla") <= selection("xattention") / 3]),
         "generated operands, 32/8 heads, an H200", "`whole_selectors`"],
        ["Eq. 22 to 27: the cost falls with the group", "it falls with each doubling from 32 to 256",
         f"{', '.join(map(str, group))} ms", judged([rising([-one for one in group])]), "131,072 tokens, an H200",
         "`bfla_group_ms`"],
        ["Eq. 30 bounds the error of its attention", "the error is at most the bound in each head",
         f"it is: the bound is {least:,} to {most:,} times the error",
         judged([least >= 1]), "a dense model of 11M parameters, 2048 tokens, 32 heads, blocks of 64", "`bfla_bound`"],
        not_run("Table 3: LongBench 0.3975 for 0.4022", "Llama-3.1-8B; LongBench's files"),
        not_run("Table 4: MMLU-Pro, AIME, GPQA, LiveCodeBench unchanged", "models of 4B to 31B"),
    ]


def per_pair(permuted, plain):
    """By how many percent `permuted` takes longer for a pair that it keeps."""
    return 100 * (permuted[1] / permuted[3] / (plain[1] / plain[3]) - 1)


def equation_9(tokens, dense=3 / 12):
    """MOMO's share of the causal pairs by eq. 9, as a mean over queries, with its defaults: 128 blocks of 64 keys, and
    a probe that reads every key for 16 queries. The share `dense` of the layers reads all of the pairs."""
    kept = min(tokens, 128 * 64)
    causal = tokens * (tokens + 1) / 2
    read = kept * (kept + 1) / 2 + (tokens - kept) * kept + causal / 16
    return dense + (1 - dense) * read / causal


def momo():
    estimate = [float(one["estimate"] - one["exact lists"]) for one in noted()["momo_topk"][1]]
    measured = [one for one in long_prompts.stored()
                if (one["method"], one["kind"]) == ("momo", "time") and one["length"] >= 8192]
    shares = [one["density"] for one in measured]
    formula = [equation_9(one["length"]) for one in measured]
    trimmed = [float(one["trimmed to k: mass"] / one["whole union: mass"]) for one in noted()["momo_trim"][1]]
    mass = lambda label: 100 * row("oracle", label)["recall"]
    apart = [mass(f"momo:k={k},{ALONE}") - mass(f"oracle_topk:block=64,k={k}") for k in (8, 16, 32)]
    of = lambda k, exact: over(f"momo:k={k},{'' if exact == 8 else f'k_exact={exact},'}{ALONE}", "momo_k")
    by_k = [of(k, 8) for k in (8, 16, 32)]
    by_exact = [of(16, exact) for exact in (4, 8, 16)]
    label = lambda gamma, chi: "momo:" + ",".join(filter(None, [
        f"gamma={gamma}" if gamma != 16 else "", f"chi={chi}" if chi != 128 else "", f"k=16,{ALONE}"]))
    grid = {(gamma, chi): over(label(gamma, chi), "momo_chi") for gamma in (8, 16, 32, 64) for chi in (64, 128, 256)}
    worse = ([rising([grid[gamma, chi] for gamma in (8, 16, 32, 64)]) for chi in (64, 128, 256)]
             + [rising([grid[gamma, chi] for chi in (64, 128, 256)]) for gamma in (8, 16, 32, 64)])
    dense, few, more = (numbers("needles_8k", name, "found")[0] for name in (
        "dense", f"`momo:k=8,{ALONE}`", f"`momo:k=16,{ALONE}`"))
    return HEAD, [
        ["Figure 2: its mass is within 1.5 % of the best blocks", "it is within 1.5 points with 8, 16 and 32 blocks",
         f"{', '.join(f'{one:+.1f}' for one in apart)} points", judged([abs(one) <= 1.5 for one in apart]),
         "135M, 8192 tokens; on 1.2 to 2 times the pairs of the best blocks", "`momo_oracle`"],
        ["Figure 7: k decides, k_exact hardly",
         "k from 8 to 32 changes the loss 3 times as much as k_exact from 4 to 16",
         f"k: {spread(by_k, '{:+.3f}')}; k_exact: {spread(by_exact, '{:+.3f}')}",
         judged([max(by_k) - min(by_k) > 3 * (max(by_exact) - min(by_exact))]),
         "loss at 8192 tokens, not RULER at 131K", "`momo_settings`; published.jsonl"],
        ["Figure 9: larger gamma and larger chi are worse",
         "the loss rises with gamma for each chi, and with chi for each gamma",
         f"so in {sum(worse)} of {len(worse)} rows and columns", judged(worse), "the same", "`momo_chi`"],
        ["Table 2: RULER 89.49 for 89.73",
         "with 8 of 128 blocks it finds nine tenths of the needles that dense attention finds",
         f"{few:.0f} of {dense:.0f} with 8 blocks, {more:.0f} with 16", judged([few >= 0.9 * dense]),
         "as many blocks by share, not by number; 11M parameters, ten needles in 8192 tokens; there 8B at 4K to 131K",
         "`needles_8k`"],
        ["Section 3: the estimated top-k chooses nearly as well as exact lists",
         "its mass is within 1 point of theirs at each k from 2 to 32",
         f"{', '.join(f'{one:+.2f}' for one in estimate)} points",
         judged([abs(one) <= 1 for one in estimate]),
         "two dense layers of 3.4M parameters, 1024 tokens, blocks of 16; tree and lists are one code here",
         "`momo_topk`"],
        ["Table 1: trimming the union costs hardly any quality (RULER 77.57, 77.20)",
         "trimmed to k it keeps 95 % of the union's mass, at k = 2, 4, 8",
         f"{', '.join(f'{100 * one:.0f}' for one in trimmed)} %", judged([one >= 0.95 for one in trimmed]),
         "the same; on 0.5 to 0.6 of the union's pairs", "`momo_trim`"],
        timed("Table 1: trimming turns 45.0 into 26.5 ms, dense 31.5",
              "at 131,072 tokens the trimmed union takes less than dense attention, the whole one more", "trim", "",
              [MOMO, f"momo:k_trim=1024,{ALONE}"], lambda trimmed, union: (
                  f"{union[1]:.1f} to {trimmed[1]:.1f} ms, dense {trimmed[0]:.1f}",
                  [sooner_than(trimmed[1], trimmed[0]), sooner_than(union[0], union[1])])),
        timed("Figure 4: the tree is faster than exact lists for large k, the estimate than both",
              "at k = 128 choosing by the estimate takes less than by the tree, and that less than by lists", "topk",
              "tree and lists run the same code here", [MOMO, f"momo:topk=tree,{ALONE}", f"momo:topk=exact,{ALONE}"],
              lambda *ways: (f"{', '.join(f'{one[2]:.1f}' for one in ways)} ms at 131,072 tokens",
                             [sooner_than(ways[0][2], ways[1][2]), sooner_than(ways[1][2], ways[2][2])])),
        timed("Figure 6, Table 4: first token 2.3 to 2.5 times as fast at 1M",
              "attention is at least 2.3 times dense attention's speed at 1M", "million",
              "30B on 4 and 8 GPUs; here attention alone, 8/2 heads, on 1.6 % of the pairs", [MOMO],
              lambda ours: (f"{ours[0] / ours[1]:.2f} times", [ours[0] >= 2.3 * ours[1]]), 1048576),
        not_run("Table 3: InfiniteBench 66.5 for 68.3", "30B; the data set is not read"),
        ["Eq. 9, Figure 8: sparsity grows with the length",
         "the share of pairs falls from each length to the next, from 8K",
         f"{', '.join(f'{one:.2f}' for one in shares)} at 8K, 32K, 64K, 128K",
         judged([rising([-one for one in shares])]), "a mean over queries; eq. 9 is of the last one", "`long_density`"],
        ["Eq. 9: what is read follows from k, gamma and the length",
         "its mean over queries is within 0.01 of the measured share at each length from 8K",
         f"{', '.join(f'{one:.2f}' for one in formula)} for those of the row above; {equation_9(1048576, 0):.2f} at 1M "
         "with no dense layer",
         judged([abs(one - share) <= 0.01 for one, share in zip(formula, shares)]),
         "three of twelve layers dense; no window, a sink block among the k", "`long_density`"],
    ]


def pbs():
    times = sooner("pbs")
    lengths = [length for length in sorted(times) if length >= 8192]
    rivals = [sooner(name) for name in ("xattention", "flexprefill")]
    ahead = [times[length] > max(1, *(of[length] for of in rivals)) for length in lengths]
    saved = {one["model, tokens"]: float(one["without"] - one["with"]) for one in noted()["pbs_density"][1]}
    smol = [saved["SmolLM2-135M, 4096"], saved["SmolLM2-135M, 8192"]]
    young = [saved["ours, 4096"], saved["ours, 32,768"]]
    permuted = ("", ":permute=queries", ":permute=both", ":permute=none")
    keys, queries, mixed, none = (over(f"pbs{rest}") for rest in permuted)
    floors = [row("pbs_segment", "pbs:segment=128"), row("pbs", "pbs"),
              *(row("pbs_segment", f"pbs:segment={size}") for size in (512, 1024))]
    with_choice = [row("where", f"pbs:select=xattention{rest}") for rest in ("", ",permute=none")]
    exact = {one["permuted"]: one["error of the output"] for one in noted()["pbs_exact"][1]}
    return HEAD, [
        ["Theorem 3.3: permuted keys and queries, put back, change nothing",
         "with every block kept the output differs by less than 1e-6 of its norm",
         f"{exact['keys']} with permuted keys, {exact['queries']} with queries, {exact['both']} with both",
         judged([float(one) < 1e-6 for one in exact.values()]), "two dense layers of 3.4M parameters, 1024 tokens, f32",
         "`pbs_exact`"],
        ["Figure 3: the fastest first token at each length, 2.75 times dense at 256K",
         "from 8K on it is faster than dense, and than XAttention and FlexPrefill, at each length",
         f"{in_order(times)} times dense at 2K, 8K, 32K, 64K, 128K; the fastest of them at {sum(ahead)} of "
         f"{len(ahead)}",
         judged([*ahead, *(times[length] > 1 for length in lengths)]),
         "85M; MInference was not timed; half of 256K at most", "`long_time`"],
        ["Figure 4: permuting saves 7 points of density at 8K, more in longer texts",
         "it saves at each length, and more in the longer",
         f"{both(smol, '{:.1f}')} points at 4096 and 8192; a second model {both(young, '{:.1f}')} at 4096 and 32,768",
         judged([min(smol) > 0, min(young) > 0, rising(smol), rising(young)]), "135M; our own 80M", "`pbs_density`"],
        ["Figure 5a: permuted keys are the better trade", "permuted keys lose at most what unpermuted ones do",
         f"{keys:+.3f} with, {none:+.3f} without", judged([keys <= none]),
         "135M, 8192 tokens, loss; it keeps 2.7 points less",
         "`papers_settings`"],
        ["Figure 5a: permuting queries too gains nothing", "both lose at least what keys alone lose, less 0.005",
         f"keys {keys:+.3f}, both {mixed:+.3f}, queries {queries:+.3f}", judged([mixed >= keys - 0.005]), "the same",
         "`papers_settings`"],
        ["Figure 5b: larger segments raise the least density",
         "the density rises with each doubling from 128 to 1024",
         ", ".join(f"{100 * one['density']:.1f} %" for one in floors),
         judged([rising([one["density"] for one in floors])]),
         "the same", "`pbs_segments`"],
        ["Figure 6: XAttention's choice gains by it too", "permuted it loses at most what it loses unpermuted",
         f"{added(with_choice[0])} at {100 * with_choice[0]['density']:.1f} %, {added(with_choice[1])} at "
         f"{100 * with_choice[1]['density']:.1f} % without",
         judged([with_choice[0]["loss"] <= with_choice[1]["loss"]]), "the same", "`papers_settings`"],
        not_run("Tables 1, 2: LongBench 37.37 for 38.28, v2 29.82 for 28.83", "8B and 7B models; LongBench's files"),
        timed("Appendix C: permuting takes 4 % of block attention's time at 128K",
              "`pbs` takes at most 10 % more than `pbs:permute=none`, per pair that it keeps", "permute", "",
              ["pbs", "pbs:permute=none"], lambda permuted, plain: (
                  f"{per_pair(permuted, plain):+.0f} % per pair; {permuted[1]:.1f} ms on {permuted[3]:.0f} % of the "
                  f"pairs, {plain[1]:.1f} on {plain[3]:.0f} %", [per_pair(permuted, plain) <= 10])),
    ]


def ba_att():
    sorted_both = noted()["ba_att_bound"][1][0]
    bound = [sorted_both[name] for name in ("R of U and error, segments of 128", "the same, bidirectional")]
    label = lambda sparsity, rest: "ba_att" + (":" if rest or sparsity != 0.5 else "") + ",".join(
        filter(None, ["" if sparsity == 0.5 else f"sparsity={sparsity}", rest]))
    of = {(sparsity, sort): over(label(sparsity, "" if sort == "qk" else f"sort={sort}"), "ba_att")
          for sparsity in (0.5, 0.7, 0.9) for sort in ("qk", "k", "q", "none")}
    helps = [of[sparsity, "qk"] < of[sparsity, "none"] for sparsity in (0.5, 0.7, 0.9)]
    keys = [of[sparsity, "k"] < of[sparsity, "q"] for sparsity in (0.5, 0.7, 0.9)]
    ends, nowhere, everywhere = (over(f"ba_att:sparsity=0.9{rest}", "ba_att") for rest in (
        "", ",compensate_layers=none", ",compensate_layers=all"))
    beside = [row("time", f"ba_att{rest}") for rest in (":sparsity=0.9", ":sparsity=0.75", "")]
    rivals = [row("time", f"xattention{rest}") for rest in (":tau=0.7", "", "")]
    of_both = lambda one: f"{added(one)} at {100 * one['density']:.0f} %"
    kept = [numbers("needles_8k", f"`{name}`", "found")[0] for name in ("ba_att", "ba_att:sparsity=0.9", "xattention")]
    asked = numbers("needles_8k", "dense", "of")[0]
    said = lambda *sorts: "; ".join(f"{sparsity}: " + ", ".join(f"{of[sparsity, sort]:+.3f}" for sort in sorts)
                                    for sparsity in (0.5, 0.7, 0.9))
    return HEAD, [
        ["Ablation: sorting queries and keys by norm helps at 0.5, 0.7 and 0.9 dropped", "sorted it loses less at each",
         f"both, none at {said('qk', 'none')}", judged(helps),
         "a causal 135M model at 8192; there a bidirectional 8B, RULER at 4K",
         "`ba_att_sorts`"],
        ["Ablation: sorted keys matter more than sorted queries", "sorted keys lose less than sorted queries at each",
         f"keys, queries at {said('k', 'q')}", judged(keys), "the same", "`ba_att_sorts`"],
        ["Compensation belongs into the first and last layers",
         "there it loses less than nowhere and than everywhere, at 0.9",
         f"{ends:+.3f}; nowhere {nowhere:+.3f}, everywhere {everywhere:+.3f}",
         judged([ends < nowhere, ends < everywhere]), "the same", "`ba_att_sorts`; published.jsonl"],
        ["Half of the pairs dropped: nearly as good as dense", "it adds at most 0.02 nats",
         f"{of[0.5, 'qk']:+.3f} nats",
         judged([of[0.5, "qk"] <= 0.02]), "the same; blocks of 128 of 8192 tokens", "`ba_att_sorts`"],
        ["Above XAttention: LongBench 31.3 for 28.8, RULER at 4K 90.06 for 81.43",
         "with more pairs than XAttention it loses less, in three pairs of settings",
         "; ".join(f"{of_both(one)}, XAttention {of_both(other)}" for one, other in zip(beside, rivals)),
         judged([one["loss"] < other["loss"] for one, other in zip(beside, rivals)]),
         "a causal 135M model, loss at 8192; there bidirectional 8B models", "`ba_att_xattention`"],
        ["The same on needles", "by its defaults it finds as many as XAttention by its own",
         f"{kept[0]:.0f} and {kept[2]:.0f} of {asked:.0f}; with nine tenths dropped {kept[1]:.0f}",
         judged([kept[0] >= kept[2]]), "a causal 11M model, 8192 tokens", "`needles_8k`"],
        not_run("LongBench 31.3 for 31.5, RULER 90.06 for 88.37", "bidirectional diffusion models cannot be loaded"),
        timed("6.95 times FlashAttention at 256K, 5.70 with compensation",
              "at 262,144 tokens, nine tenths dropped, it is at least 6 times dense, 5 with compensation", "far", "",
              ["ba_att:sparsity=0.9,compensate_layers=none", "ba_att:sparsity=0.9"], lambda bare, ours: (
                  f"{bare[0] / bare[1]:.2f} times, {ours[0] / ours[1]:.2f} with compensation",
                  [bare[0] >= 6 * bare[1], ours[0] >= 5 * ours[1]]), 262144),
        ["Figure 2: the bound's correlation with the error is above 0.5",
         "it is, in both forms, when queries and keys are sorted",
         f"{bound[0]} in segments of 128, {bound[1]} bidirectional", judged([float(one) > 0.5 for one in bound]),
         "two dense layers of 3.4M parameters, 1024 tokens", "`ba_att_bound`"],
        not_run("Images and video", "other models"),
    ]


PAPERS = {"DMA": dma, "BFLA": bfla, "MOMO": momo, "PBS-Attn": pbs, "BA-Att": ba_att}


@functools.cache
def verdicts():
    """How many claims of each paper have which verdict."""
    names = ["reproduced", "partly", "refuted", "not comparable", "not run"]
    lines = []
    for name, of_paper in PAPERS.items():
        said = [line[3].strip("*") for line in of_paper()[1]]
        lines.append([name, *(str(said.count(one)) for one in names)])
    return ["paper", *names], lines


def rows_of(line):
    """Names of the tables whose rows decide a claim."""
    return re.findall(r"`(\w+)`", line[-1])


def command(table):
    """What measures the rows of this table again."""
    return MEASURES.get(table) or noted()[table][0]["command"]


def commands():
    """The tables whose rows a script measures, a line a command."""
    return ["rows", "measured again by"], [
        [", ".join(f"`{name}`" for name in MEASURES if MEASURES[name] == one), f"`{one}`"]
        for one in dict.fromkeys(MEASURES.values())]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commands", action="store_true", help="what measures the rows again, instead of the verdicts")
    if parser.parse_args().commands:
        named = dict.fromkeys(name for of_paper in PAPERS.values() for line in of_paper()[1] for name in rows_of(line))
        print("\n".join(f"{name}: {command(name)}" for name in named))
        return
    for paper, of_paper in PAPERS.items():
        for line in of_paper()[1]:
            print(f"{line[3].strip('*'):14}  {paper}, {line[0]}  [{', '.join(rows_of(line)) or '-'}]")


def shown(of_paper):
    """The table of a paper without its last column: names of rows are long, and `main` prints them."""
    head, lines = of_paper()
    return head[:-1], [line[:-1] for line in lines]


TABLES = {"papers": verdicts, "papers_commands": commands} | {
    f"papers_{name.lower().removesuffix('-attn').replace('-', '_')}": functools.partial(shown, of_paper)
    for name, of_paper in PAPERS.items()}

if __name__ == "__main__":
    main()
