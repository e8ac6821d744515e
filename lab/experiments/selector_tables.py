"""Tables of lab/docs/published-models.md that are computed from lab/rows/published.jsonl: SmolLM2-135M under
selectors.

`TABLES` holds a function for each, as in run_tables.py.
"""

import collections
import functools
import statistics

from run_tables import fixed, runs

TABLES = {}


def table(name):
    return lambda function: TABLES.setdefault(name, function)


@functools.cache
def groups():
    """The row of each group, setting, task and length; of several calls the median by rank."""
    by_setting = collections.defaultdict(list)
    for row in runs("published"):
        if "num_tokens" in row:
            by_setting[row["group"], row["label"], row.get("task"), row["num_tokens"]].append(row)
    rank = lambda row: row.get("mean_rank", 0)
    return {key: sorted(rows, key=rank)[len(rows) // 2] for key, rows in by_setting.items()}


def row(group, label, length=8192, task=None):
    return groups()[group, label, task, length]


def share(value, space=" "):
    return "-" if value is None else f"{100 * value:.1f}{space}%"


def added(line):
    """The loss over dense attention's, of the same prompt."""
    return f"{line['loss'] - line['dense_loss']:+.3f}"


def losses(group, *labels):
    return [added(row(group, label)) for label in labels]


@table("selectors_8192")
def selectors():
    """Selectors on a prompt of 8192 tokens, those that read least first, and last dense attention."""
    labels = ["bfla", "xattention:tau=0.5", "xattention:tau=0.7", "xattention", "ba_att:sparsity=0.9",
              "ba_att:sparsity=0.75", "ba_att", "block_sparse:topk=16", "oracle_topk:k=32", "streamingllm",
              "vertical_slash:vertical=256,slash=256", "momo:k=32,first_dense_layers=0"]
    measured = sorted((row("time", label) for label in labels), key=lambda line: line["density"])
    lines = [[f"`{line['label']}`", share(line["density"]), share(line["recall"]), added(line),
              fixed(line["prefill_ms"], 0)] for line in measured]
    dense = statistics.median(line["dense_prefill_ms"] for line in measured)
    return ["selector", "density", "mass", "loss - dense", "ms"], [*lines, ["dense", "100 %", "100 %", "", fixed(dense, 0)]]


@table("ba_att_sorts")
def ba_att():
    """The loss that `ba_att` adds by what it sorts, at three shares of dropped pairs, and compensated in all layers."""
    lines = []
    for sparsity in ("0.5", "0.7", "0.9"):
        named = lambda rest: "ba_att" + (":" if rest or sparsity != "0.5" else "") + ",".join(
            filter(None, ["" if sparsity == "0.5" else f"sparsity={sparsity}", rest]))
        all_layers = named("compensate_layers=all")
        cells = losses("ba_att", named("sort=k"), named(""), named("sort=q"), named("sort=none"))
        is_measured = ("ba_att", all_layers, None, 8192) in groups()
        lines.append([sparsity, *cells, *(losses("ba_att", all_layers) if is_measured else ["-"])])
    head = ["`ba_att` at sparsity", "sort of keys", "of both", "of queries", "none", "both, compensated in all layers"]
    return head, lines


# Settings of the papers' tables and figures by the group of their row; "momo" is without its dense first layers.
SETTINGS = {
    "where": ["bfla", "bfla:stride=16,prob=0.1", "minference:pattern=PATTERNS", "momo:k=64", "momo:k=64,k_exact=32",
              "momo:k=64,k_exact=64", "pbs", "pbs:permute=none", "pbs:permute=queries", "pbs:permute=both",
              "pbs:select=xattention", "pbs:select=xattention,permute=none"],
    "bfla": ["bfla:stride=16", "bfla:block=1024,stride=16,prob=0.1"],
    "momo_k": ["momo:k=16,k_exact=1", "momo:k=16,k_exact=4", "momo:k=16", "momo:k=16,k_exact=16"],
    "momo_chi": ["momo:gamma=8,k=16", "momo:gamma=64,k=16"],
    "oracle": ["oracle_topk:block=64,k=16"],
    "pbs_segment": ["pbs:segment=128", "pbs:segment=512", "pbs:segment=1024"]}


@table("papers_settings")
def papers():
    """Density and loss of each setting, a method together, the least density first."""
    by_method = []
    for group, labels in SETTINGS.items():
        for label in labels:
            line = row(group, f"{label},first_dense_layers=0" if label.startswith("momo") else label)
            shown = label.replace("PATTERNS", "FILE")
            by_method.append((label.partition(":")[0], line["density"], [
                f"`{shown}`", share(line["density"]), added(line)]))
    return ["setting", "density", "loss - dense"], [cells for *_, cells in sorted(by_method)]


@table("momo_oracle")
def oracle():
    """Mass that MOMO's blocks keep beside the best blocks, as many and as large, and how many pairs those have."""
    lines = []
    for k in (8, 16, 32):
        ours, best = row("oracle", f"momo:k={k},first_dense_layers=0"), row("oracle", f"oracle_topk:block=64,k={k}")
        pairs = best["density"] / ours["density"]
        lines.append([str(k), share(ours["recall"]), share(best["recall"]), fixed(pairs, 2)])
    return ["k", "mass", "mass of the best blocks", "their pairs over MOMO's"], lines


@table("momo_chi")
def momo_chi():
    setting = lambda gamma, chi: ",".join(filter(None, [  # a label leaves defaults out
        f"gamma={gamma}" if gamma != 16 else "", f"chi={chi}" if chi != 128 else "", "k=16,first_dense_layers=0"]))
    lines = [[str(chi), *losses("momo_chi", *(f"momo:{setting(gamma, chi)}" for gamma in (8, 16, 32, 64)))]
             for chi in (64, 128, 256)]
    return ["chi", "gamma 8", "16", "32", "64"], lines


TASKS = ["niah_single_1", "niah_multikey_1"]


def score(line):
    return f"{100 * line['score']:.0f} ({line['mean_rank']:.1f})"


@table("retrieval")
def retrieval():
    """RULER's scores in % (mean rank) and needles found under each selector, in texts
    of 4096 and 8192 tokens or a little less."""
    labels = [None, "xattention:tau=0.7", "flexprefill", "oracle_topk:block=64,k=16", "momo:k=16,first_dense_layers=0",
              "pbs:tau=0.7", "a_shape:n_init=64,n_local=960", "block_sparse:topk=16", "snapkv:capacity=512",
              "quest:budget=512", "h2o:heavy=64,recent=64", "streamingllm:n_local=1020"]
    lines = []
    for label in labels:
        cells = [score(row("ruler", label, length, task)) for task in TASKS for length in (4096, 8192)]
        for length in (3996, 8092):
            line = groups().get(("needle", label, None, length))
            cells.append(score(line).replace(" (", " % (") if line else "-")
        lines.append([f"`{label}`" if label else "dense", *cells])
    return ["method", "niah_single_1", "at 8192", "niah_multikey_1", "at 8192", "needles found", "at 8092"], lines
