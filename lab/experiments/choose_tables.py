"""Tables of README's, docs/choose.md's and docs/limits.md's advice: numbers of other pages' rows, put side by side.

`TABLES` holds a function for each, as in run_tables.py.
"""

import statistics

from noted import noted
from run_tables import EQUAL_STEPS, HARD, ROWS, at_best_rate, best_shares, fixed, mean, runs
from selector_tables import added, groups
import speeds

import board  # noqa: E402  (run_tables names its folder)

TABLES = {}
HYBRIDS = {"DMA, hybrid": "DMA, 1 of 4 dense", "windows with slope, hybrid": "window + slope, 1 of 4 dense"}
ALL = {"DMA, all layers": "DMA", "window with slope, all layers": "window + slope",
       **{kind: kind for kind in ("InfLLM-V2", "NSA", "dense", "MoBA", "MSA")}}


def table(name):
    return lambda function: TABLES.setdefault(name, function)


def noted_row(name, **values):
    """The one row of a noted table with these values."""
    (row,) = (line for line in noted()[name][1] if all(line[key] == value for key, value in values.items()))
    return row


def after(kind, length, minutes):
    """The losses of the seeds after equal time."""
    return [row["loss"] for row in runs("equal_time", text="crates", kind=kind, length=length, minutes=minutes)]


def choose_2048():
    """Loss of each kind minus dense attention's of the same seed, rows of 2048."""
    names = {"window of 512": "sliding window 512", "window of 512 with slope": "window 512 + slope",
             "DMA, all layers": "DMA, w 512, slope, r 64", "DMA, hybrid": "DMA, w 512, slope, r 64, 1 of 4 dense",
             "windows with slope, hybrid": "window 512 + slope, 1 of 4 dense",
             "DMA as published": "DMA as published, w 512"}
    losses = lambda attention: noted_row("first_table", attention=attention, **{"rows of": "2048"})[
        "validation loss (nats), seeds 0, 1, 2"]
    lines = [[name, *(f"{float(a - b):+.3f}" for a, b in zip(losses(attention), losses("dense (mha)")))]
             for name, attention in names.items()]
    return ["kind", "seed 0", "seed 1", "seed 2"], lines


@table("choose_8192")
def choose_8192():
    """After one minute and after nine, rows of 8192."""
    scores = board.front_runs(board.finished(ROWS / "board.jsonl", board.KEY), 9.0)
    lines = []
    for name, kind in (HYBRIDS | ALL).items():
        of_board = scores.get(kind, [])
        lines.append([name, mean(after(kind, 8192, 1.0), 3), mean((row["bits_per_byte"] for row in of_board), 3) or "-",
                      f"{round(statistics.mean(row['tokens_per_second'] for row in of_board), -3):,.0f}" if of_board
                      else "-"])
    return ["kind, rows of 8192", "one minute: loss, mean of three seeds", "nine minutes: bits per byte, mean of three",
            "tokens/s in the nine minutes"], lines


@table("choose_32768")
def choose_32768():
    """After one minute, nine, and 400 steps, rows of 32,768."""
    of_dma = {row["seed"]: row["loss"] for row in at_best_rate("DMA", 32768)[1]}
    numbers = {1: "one", 3: "three"}
    lines = []
    for name in ("window + slope", "DMA", "NSA", "InfLLM-V2", "MSA", "MoBA", "dense"):
        nine = after(name, 32768, 9.0)
        behind = mean((row["loss"] - of_dma[row["seed"]] for row in at_best_rate(name, 32768)[1]), 3)
        lines.append([name.replace("+", "with"), mean(after(name, 32768, 1.0), 3), mean(nine, 3) or "-",
                      numbers.get(len(nine), "-"), "0" if name == "DMA" else behind])
    return ["kind, rows of 32,768", "one minute: loss, mean of three seeds", "nine minutes: loss", "seeds of the nine minutes",
            "400 steps: nats behind DMA"], lines


@table("choose_recall")
def choose_recall():
    """MQAR: least and most of the plain form at width 256, and the seeds that learn the hard form."""
    names = {"`msa`": "MSA", "dense": "dense", '`dma` as published (`preset = "paper"`)': "DMA as published",
             "`infllm_v2`": "InfLLM-V2", "`moba`": "MoBA", "`nsa`": "NSA", "`dma` with the slope": "DMA",
             "window": "window", "`cowa`, up to 944 keys": "CoWindow", "`cowa`, 512 keys": "CoWindow, 512 keys"}
    share = lambda value: f"{fixed(100 * value, 1)} %".replace("100.0", "100")
    lines = []
    for name, kind in names.items():
        right = [row["accuracy"] for row in runs("mqar", kind=kind, width=256)]
        best = best_shares(kind, EQUAL_STEPS)
        plain = [share(min(right)), share(max(right))] if right else ["not run"] * 2
        lines.append([name, *plain,
                      f"{sum(right >= 0.99 for right in best)} of {len(best)}" if kind in HARD else "not run"])
    return ["kind", "plain form, width 256: least", "most",
            f"hard form, {EQUAL_STEPS} steps each: seeds that pass 99 %"], lines


@table("choose_cache")
def choose_cache():
    """What each kind's cache holds, beside the tokens/s of generating one text."""
    caches = {"dense": ("dense", "grows with the sequence"), "window": ("`swa`", "the last `window_size` keys"),
              "DMA": ("`dma` in all layers", "`keep_window_size` keys a head"),
              "MLA": ("`mla`", "grows, one narrow latent a token"), "NSA": ("`nsa`", "grows")}
    lines = [[name, cache, str(noted_row("decode_kinds", kind=kind)["tokens/s"])]
             for kind, (name, cache) in caches.items()]
    return ["kind, 80M recipe", "cache", "tokens/s, one sequence, 300 tokens"], lines


@table("choose_imported")
def choose_imported():
    """Loss over the dense model's, as imported and after 50 steps of both."""
    code = "held-out code: imported, 50, 200, 1000 steps"
    losses_of = lambda attention: noted_row("dense_to_sparse", attention=attention)[code]
    blocks = [noted_row("dense_to_blocks", attention="InfLLM-V2", steps=steps)["code, over dense"]
              for steps in ("imported", "50")]
    dense = losses_of("dense")
    by_name = {
        "`dma` without its slope, hybrid": losses_of("DMA without its slope, one layer in four dense"),
        "`dma` without its slope, all layers": losses_of("DMA without its slope, the last 128 always"),
        "window with DMA's slope": losses_of("window with DMA's slope")}
    lines = [[name, *(f"{float(losses[at] - dense[at]):+.3f}" for at in (0, 1))] for name, losses in by_name.items()]
    lines.insert(0, ["`infllm_v2`", *(f"{loss:+}" for loss in blocks)])
    return ["imported as", "loss over dense at once, nats", "after 50 steps, nats"], lines


@table("choose_selector")
def choose_selector():
    """What one selector loses on three models."""
    steps = noted_row("delta_by_step", row="`xattention:tau=0.7`")
    lines = [["an 80M model after 400 steps", f"{steps['400 steps (dense loss 3.98)']:+}"],
             ["the same after 4000 steps", f"{steps['4000 steps (dense loss 2.33)']:+}"],
             ["SmolLM2-135M", added(groups()["time", "xattention:tau=0.7", None, 8192])]]
    return ["`xattention:tau=0.7`, 8192 tokens", "loss over dense, nats"], lines


def needles_found(attention):
    return noted_row("needles", attention=attention)["of 81 at 1024, depth to 80 %"]


@table("weak_sides")
def weak_sides():
    """What each kind is bad at."""
    of_dma = {row["seed"]: row["loss"] for row in at_best_rate("DMA", 32768)[1]}
    behind = {kind: mean((row["loss"] - of_dma[row["seed"]] for row in at_best_rate(kind, 32768)[1]), 2)
              for kind in ("dense", "MoBA")}
    losses = "validation loss, seeds 0, 1, 2"
    five = {kind: statistics.mean(map(float, noted_row("five_kinds", attention=kind, **{"rows of": "8192"})[losses]))
            for kind in ("MLA as published", "dense")}
    first = {kind: float(noted_row("first_table", attention=kind, **{"rows of": "8192"})[
        "validation loss (nats), seeds 0, 1, 2"][0]) for kind in ("DMA as published, w 1024", "sliding window 1024")}
    nsa = speeds.over_cudnn("own", "Sieve NSA", "16/8", 8192)
    hard = max(row["accuracy"] for row in runs("mqar_hard", kind="InfLLM-V2", steps=4000))
    msa = [a - b for a, b in zip(after("MSA", 8192, 1.0), after("dense", 8192, 1.0))]
    own, needle = "../lab/docs/results.md#each-kind-at-its-own-learning-rate", "[needles](../lab/docs/recall.md#needles)"
    return ["kind", "bad at", "measured"], [
        ["`mha`, no slope", "long rows",
         f"{behind['dense']} nats behind DMA after 400 steps in rows of 32,768 ([results]({own}))"],
        ["`swa`", "anything beyond its window", f"finds {needles_found('window 128')} needles of 81 ({needle})"],
        ["`mla`", "learning, in its published form",
         f"{five['MLA as published'] - five['dense']:.2f} nats behind dense after 520 steps "
         "([results](../lab/docs/results.md#five-kinds-three-seeds))"],
        ["`nsa`", "speed in rows up to 8192",
         f"{nsa:.2f} times as fast as cuDNN's dense attention ([the race](../lab/docs/race.md#whole-methods))"],
        ["`dma`, all layers", "retrieval from far back",
         f"finds {needles_found('DMA, slope, r 32')} needles of 81 beyond a window ({needle})"],
        ["`dma` as published", "text",
         f"{first['DMA as published, w 1024'] - first['sliding window 1024']:.2f} nats behind a window in rows of "
         "8192, one seed ([results](../lab/docs/results.md))"],
        ["`infllm_v2`", "MQAR's hard form", f"answers {100 * hard:.0f} % at best ([hard form](../lab/docs/recall.md#the-hard-form))"],
        ["`moba`", "rows of 32,768", f"{behind['MoBA']} nats behind DMA after 400 steps ([results]({own}))"],
        ["`msa`", "rows of 8192 at equal time",
         f"{min(msa):.2f} to {max(msa):.2f} nats behind dense after one minute ([equal time](../lab/docs/results.md#equal-time))"]]


def which(links=None):
    """What to take, with one reason; `links` leads from the first column to the page's own sections."""
    rates = {line["attention"]: line["tokens/s"] for line in noted()["five_kinds"][1] if line["rows of"] == "2048"}
    faster = 100 * (max(rates.values()) / rates["dense"] - 1)
    speed = {kind: statistics.mean(row["tokens_per_second"] for row in rows) for kind, rows in board.front_runs(
        board.finished(ROWS / "board.jsonl", board.KEY), 9.0).items()}
    over_slope = f"{speed['DMA, 1 of 4 dense'] / speed['dense + slope']:.2f}"
    (hybrid,) = (line for line in choose_2048()[1] if line[0] == "windows with slope, hybrid")
    steps = round(1600 * 32768 / 1e6)  # lab/docs/results.md, "What was trained"
    dma = [ratio for heads in ("16/8", "64/4") for ratio in speeds.dma_over_cudnn(32768, heads)]
    imported = noted_row("dense_to_blocks", attention="InfLLM-V2", steps="50")["code, over dense"]
    lines = [
        ["up to 2048 tokens", "`mha` (dense)",
         f"another kind trains at most {faster:.0f} % faster; a hybrid of windows "
         f"leads by {speeds.span([-float(apart) for apart in hybrid[1:]], 3)} nats after {steps}M tokens, the DMA hybrid by none after 1.77B"],
        ["about 8192 tokens", "`dma`, one layer in four dense, as in the `dma_*` recipes",
         f"level with dense attention with DMA's slope, at {over_slope} times the tokens a second"],
        ["32,768 tokens and more",
         "`dma` or a window with DMA's slope in all layers; or windows, with `infllm_v2` in one layer of four",
         f"DMA's attention is {speeds.span(dma)} times as fast as cuDNN's dense attention; the last one led a comparison of five layouts"],
        ["exact recall of pairs", "`msa`", "learns MQAR's hard form with each of three seeds"],
        ["decoding with a small cache", "`mla`, `swa`, or `dma` in all layers",
         "`mla` has a narrow cache, the caches of the others do not grow"],
        ["a dense model, made sparse by training", "`sieve import --attention infllm_v2`",
         f"no new parameter; SmolLM2 loses {imported:.2f} nats after 50 steps"],
        ["a dense model, long prompts", "a [selector](docs/selectors.md)",
         "no training; `sieve eval selectors` prints what your model loses"]]
    if links:
        lines = [[f"[{need}](#{to})", take.replace("docs/", ""), why] for (need, take, why), to in zip(lines, links)]
    return ["your rows, or need", "take", "one reason"], lines


TABLES["which"] = which
TABLES["which_choose"] = lambda: which([
    "up-to-2048-tokens", "about-8192-tokens", "32768-tokens-and-more", "exact-recall", "a-small-cache",
    "a-trained-dense-model", "a-trained-dense-model"])
