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
    """Seven selectors on a prompt of 8192 tokens, and last dense attention: what they read, lose and take."""
    head = ["selector", "density", "mass", "loss - dense", "KL", "top-1", "cosine", "ms"]
    labels = ["bfla", "xattention", "block_sparse:topk=16", "oracle_topk:k=32", "streamingllm",
              "vertical_slash:vertical=256,slash=256", "momo:k=32,first_dense_layers=0"]
    lines = []
    for line in (row("time", label) for label in labels):
        lines.append([f"`{line['label']}`", share(line["density"]), share(line["recall"]), added(line),
                      fixed(line["kl"], 3), share(line["top1"]),
                      f"{statistics.mean(line['cosines']):.3f}, {min(line['cosines']):.3f}", fixed(line["prefill_ms"], 0)])
    dense = statistics.median(line["dense_prefill_ms"] for line in (row("time", label) for label in labels))
    return head, [*lines, ["dense", "100 %", "100 %", "", "", "", "", fixed(dense, 0)]]


def of_settings(head, group, names):
    """Density, mass where the head has it, and loss of each setting, which `names` gives as the page calls it."""
    lines = []
    for label, name in names.items():
        line = row(group, label)
        lines.append([name, share(line["density"]), *([share(line["recall"])] if "mass" in head else []), added(line)])
    return [*head], lines


TABLES["bfla_rescue"] = lambda: of_settings(("`bfla` with", "density", "loss - dense"), "bfla", {
    "bfla:keep_mass=0.95": "no rescue", "bfla:stride=16": "`stride=16`",
    "bfla:stride=16,prob=0.1": "`stride=16,prob=0.1`",
    "bfla:block=1024,stride=16,prob=0.1": "`stride=16,prob=0.1,block=1024`"})


@table("momo_settings")
def momo():
    """`momo` with other settings, one at a time, and the best blocks that an oracle would take in its place."""
    rest = "first_dense_layers=0"
    names = {f"momo:k=16,{rest}": "its defaults (`gamma=16`, `k_exact=8`)",
             **{f"momo:k=16,k_exact={number},{rest}": f"`k_exact={number}`" for number in (1, 4, 16)}}
    head, lines = of_settings(("`momo:k=16` with", "density", "loss - dense"), "momo_k", names)
    for group, label, name in (("momo_chi", f"momo:gamma=8,k=16,{rest}", "`gamma=8`"),
                               ("momo_chi", f"momo:gamma=64,k=16,{rest}", "`gamma=64`"),
                               ("oracle", "oracle_topk:block=64,k=16", "`oracle_topk:block=64,k=16` instead")):
        lines += of_settings(head, group, {label: name})[1]
    return head, lines


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


@table("ba_att_xattention")
def ba_att_xattention():
    labels = ["ba_att:sparsity=0.9", "ba_att:sparsity=0.75", "ba_att", "xattention:tau=0.5", "xattention:tau=0.7",
              "xattention"]
    return of_settings(["method", "density", "mass", "loss - dense"], "time", {label: f"`{label}`" for label in labels})


@table("ba_att_far")
def ba_att_far():
    dropped = ["0.9", "0.95", "0.98", "0.99"]
    lines = [[f"blocks of {block}", *losses("ba_att_far", *(f"ba_att:{rest.format(part)}" for part in dropped))]
             for block, rest in ((128, "sparsity={}"), (32, "block=32,sparsity={},segment=128"))]
    return ["sparsity", *dropped], lines


@table("pbs_permuted")
def pbs():
    head, lines = of_settings(("`pbs`", "density", "mass", "loss - dense"), "pbs", {
        "pbs": "as it is (`permute=keys`, segments of 256)", "pbs:permute=none": "`permute=none`"})
    return head, lines + of_settings(head, "pbs_segment", {
        "pbs:segment=128": "`segment=128`, one block, which keeps the places of blocks",
        "pbs:select=xattention,permute=none": "`select=xattention,permute=none`: blocks by anti-diagonals"})[1]


@table("delta_bases")
def delta():
    """The loss that each base adds alone, with Delta Attention's correction, and with its recomputing form."""
    bases = {"xattention:tau=0.5": "delta:base=xattention,{}base.tau=0.5",
             "xattention:tau=0.7": "delta:base=xattention,{}base.tau=0.7",
             "streamingllm:n_local=512": "delta:{}base.n_local=512",
             "block_sparse:topk=16": "delta:base=block_sparse,{}base.topk=16"}
    lines = [[f"`{base}`", *losses("delta", base, form.format(""), form.format("mode=recompute,"))]
             for base, form in bases.items()]
    return ["base", "alone", "corrected", "`mode=recompute`"], lines


PAPERS = {
    "bfla": ("`bfla`", "BFLA Table 5, no rescue: LongBench 38.2 to 38.8 (dense 40.2) at 8.8 %"),
    "bfla:stride=16,prob=0.1": ("`bfla:stride=16,prob=0.1`", "Table 5, b 256, g 64, with rescue: 39.75 at 29.6 %"),
    "pbs": ("`pbs`", "PBS Figure 5a, keys permuted"),
    "pbs:permute=none": ("`pbs:permute=none`", "Figure 4, without permutation"),
    "pbs:permute=queries": ("`pbs:permute=queries`", "Figure 5a, queries permuted"),
    "pbs:permute=both": ("`pbs:permute=both`", "Figure 5a, both"),
    "pbs:select=xattention": ("`pbs:select=xattention`", "Figure 6, with XAttention's choice"),
    "pbs:select=xattention,permute=none": ("`pbs:select=xattention,permute=none`",
                                           "Figure 6, the same without permutation"),
    "ba_att": ("`ba_att`", "BA-Att's ablation, SortQ+SortK: RULER 88.3 at half the pairs"),
    "ba_att:sort=q": ("`ba_att:sort=q`", "SortQ: 82.6"),
    "ba_att:sort=none": ("`ba_att:sort=none`", "no sort: 81.1"),
    "minference:pattern=PATTERNS": ("`minference:pattern=FILE`",
                                    "MOMO Table 2, patterns that differ by head: RULER 88.6 (dense 89.7)"),
    "momo:k=64,first_dense_layers=0": ("`momo:k=64`", "between the rows of MOMO Table 2"),
    "momo:k=64,k_exact=32,first_dense_layers=0": ("`momo:k=64,k_exact=32`", "the same"),
    "momo:k=64,k_exact=64,first_dense_layers=0": ("`momo:k=64,k_exact=64`", "Table 2, MOMO 64/64: RULER 89.3"),
}


def chooses_on(line):
    if line["label"].startswith("minference"):
        return "GPU (a layer with an a-shape head: host)"
    return "host" if line["host_bytes"] else "GPU"


@table("papers_settings")
def papers():
    lines = []
    for label, (name, of_paper) in PAPERS.items():
        line = row("where", label)
        lines.append([name, of_paper, chooses_on(line), share(line["density"]), share(line["recall"]), added(line)])
    return ["setting", "the paper's row", "chooses on", "density", "mass", "loss - dense"], lines


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


@table("pbs_segments")
def segments():
    measured = [row("pbs_segment", "pbs:segment=128"), row("pbs", "pbs"), row("pbs_segment", "pbs:segment=512"),
                row("pbs_segment", "pbs:segment=1024")]
    lines = [["density", *(share(line["density"]) for line in measured)],
             ["loss - dense", *(added(line) for line in measured)]]
    return ["segment", "128", "256", "512", "1024"], lines


@table("streams")
def streams():
    """The loss that decode methods add to a stream of 1024 tokens, at budgets of 128 and of 512 keys."""
    settings = {"exact_top": ("exact_top:k=128", "exact_top:k=512"),
                "h2o": ("h2o:heavy=64,recent=64", "h2o:heavy=256,recent=256"),
                "snapkv": ("snapkv:capacity=128", "snapkv:capacity=512"),
                "quest": ("quest:budget=128,dense_layers=0", "quest:budget=512,dense_layers=0"),
                "streamingllm": ("streamingllm:n_local=124", "streamingllm:n_local=508")}
    lines = [[f"`{name}`", *(added(row("streams", label, 1024)) for label in labels)]
             for name, labels in settings.items()]
    return ["method", "128 keys", "512 keys"], lines


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


@table("retrieval_streams")
def retrieval_streams():
    """RULER's scores in % where prompts of 1024 tokens are read as streams under decode methods."""
    names = {None: "dense", "h2o:heavy=256,recent=256": "`h2o`, 512 slots", "h2o:heavy=64,recent=64": "`h2o`, 128 slots",
             "quest:budget=512,dense_layers=0": "`quest`, 512 keys",
             "quest:budget=128,dense_layers=0": "`quest`, 128 keys"}
    lines = [[name, *(f"{100 * row('ruler_stream', label, 1024, task)['score']:.0f} %" for task in TASKS)]
             for label, name in names.items()]
    return ["method", "niah_single_1", "niah_multikey_1"], lines
