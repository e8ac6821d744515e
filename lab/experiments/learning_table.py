"""Trains the rows of lab/docs/results.md, one process a GPU, continues where it was cut off, and prints the table.

    python3 lab/experiments/learning_table.py --sieve target/release/sieve --text data/crates.jsonl --out OUT [--sets 8192]

Run from the repository's root. The text is that of lab/experiments/crates.lock (make_corpus.py --from). A run that has its
last validation is not run again; one that was cut off, by --seconds for example, goes on from its last checkpoint.
With --evaluate `sieve eval` then reads each trained model: loss by position and on words last used far back, or
needles. The shares of needles found at each length and depth are printed as a second table and kept in
OUT/needle_depth.jsonl, which --draw draws:

    python3 lab/experiments/learning_table.py --out lab/rows --recall-length 4096 --draw lab/docs/needle_depth.svg

Needs nothing but Python.
"""

import contextlib
import json
import math
import pathlib
import random
import statistics
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "tests/python"))  # what tests share with experiments
import kinds  # noqa: E402
from needle_corpus import document
from runs import (Unfinished, evaluated, finished, metrics, named, num_steps, on_devices, parsed, parser_of, prepare,
                  steps_of, svg, table_text, trained, validations_of, words_of_far)

SLOPE = ["attention.bias=linear", "attention.recency=slope"]
PUBLISHED = ["attention.bias=exp", "attention.recency=none", "attention.local_window_size=0"]
LONG = ["training.seq_len=8192", "training.local_batch_size=4"]
STEPS = {"long": 3.815, "recall": 2.5}
ONE_DENSE = ['model.layer_types=["sparse","sparse","sparse","mha"]']
FAR = ["256", "1024", "2048"]
# As nsa_80m.toml and mla_80m.toml: 85M parameters besides the embedding, as the other kinds have. The feed-forward layers
# give up what NSA's compression takes, and what MLA takes for keys and values of every head.
NSA = [
    "attention.kind=nsa", "attention.compress_block_size=32", "attention.compress_stride=16", "attention.compress=mlp",
    "attention.compress_hidden_size=192", "attention.select_block_size=64", "attention.num_selected_blocks=16",
    "attention.window_size=512", "attention.shared_kv=true", "model.intermediate_size=1600",
]
# As infllm_v2_80m.toml: 1024 tokens a query, as the others read.
INFLLM_V2 = [
    "attention.kind=infllm_v2", "attention.compress_block_size=32", "attention.compress_stride=16",
    "attention.select_block_size=64", "attention.num_selected_blocks=16", "attention.num_local_blocks=8",
]
# As many in moba_80m.toml.
OF_BLOCKS_ALONE = {
    kinds.label(kind): [f"attention.kind={kind}", "attention.select_block_size=64", "attention.num_selected_blocks=16"]
    for kind in kinds.of_blocks_alone()
}
# As msa_80m.toml, whose feed-forward layers are narrower by as many parameters as the indexer has; without its dense
# warm-up.
MSA = [
    "attention.kind=msa", "attention.select_block_size=64", "attention.num_selected_blocks=16",
    "attention.index_loss_weight=1.0", "model.intermediate_size=2144",
]
MLA = [
    "attention.kind=mla", "attention.kv_lora_rank=192", "attention.qk_rope_head_dim=64", "model.num_key_value_heads=6",
    "model.intermediate_size=2224",
]
# The same, and a tenth of the steps dense before it, in which the indexer learns from all keys.
WARMUP = "MSA, warm-up"
NEEDLES = ["needle", "--depths", "0,10,20,30,40,50,60,70,80,90,100", "--needles", "9", "--lengths"]
# As many keys as a window of 128: half in the window, half in blocks of 16.
SHORT_NSA = [
    "attention.kind=nsa", "attention.compress_block_size=16", "attention.compress_stride=8", "attention.compress=mlp",
    "attention.compress_hidden_size=32", "attention.select_block_size=16", "attention.num_selected_blocks=4",
    "attention.window_size=64", "attention.shared_kv=true", "model.intermediate_size=384",
]
# As many keys in 8 blocks of 16; the feed-forward layers give up what the indexer takes.
SHORT_BLOCKS = ["attention.select_block_size=16", "attention.num_selected_blocks=8"]
SHORT_INFLLM_V2 = [
    "attention.kind=infllm_v2", "attention.compress_block_size=16", "attention.compress_stride=8",
    "attention.num_local_blocks=4", *SHORT_BLOCKS,
]
# In every second layer blocks of 24, with fewer keys: their borders meet the others' at every 48th token alone.
BY_TURNS = [
    *SHORT_INFLLM_V2, 'model.layer_types=["sparse","wider"]', "attention.wider.kind=infllm_v2",
    "attention.wider.compress_block_size=24", "attention.wider.compress_stride=12", "attention.wider.select_block_size=24",
    "attention.wider.num_selected_blocks=5", "attention.wider.num_local_blocks=3",
]
SHORT_MSA = ["attention.kind=msa", *SHORT_BLOCKS, "attention.index_loss_weight=1.0", "model.intermediate_size=448"]


def dma(window, local, *settings):
    return [f"attention.keep_window_size={window}", f"attention.local_window_size={local}", *settings]


def window(size):
    return ["attention.kind=swa", f"attention.sliding_window={size}"]


# Set, then name of the row: settings on top of code_80m.toml, or of quickstart.toml for the set "recall". "long" is 3.8
# times as many steps over rows of 8192; "lengthened" is rows of 2048 for a quarter of the steps, then 50 of 8192.
ROWS = {
    "8192": {
        "dense": ["attention.kind=mha"],
        "window 1024": window(1024),
        "window 1024 + slope": dma(1024, 1024, *SLOPE),
        "DMA 1024, slope, r 128": dma(1024, 128, *SLOPE),
        "DMA 1024, slope, r 0": dma(1024, 0, *SLOPE),
        "DMA 1024, slope, r 512": dma(1024, 512, *SLOPE),
        "DMA 1024, slope, r 128, periods to 1024": dma(1024, 128, *SLOPE, "attention.longest_period=1024"),
        "DMA 1024, slope, r 128, periods to 65536": dma(1024, 128, *SLOPE, "attention.longest_period=65536"),
        "DMA 1024, slope, r 128, periods 256 to 16384":
            dma(1024, 128, *SLOPE, "attention.shortest_period=256", "attention.longest_period=16384"),
        "DMA 1024, linear, no recency, r 512": dma(1024, 512, "attention.bias=linear", "attention.recency=none"),
        "DMA 512, slope, r 128": dma(512, 128, *SLOPE),
        "DMA 2048, slope, r 128": dma(2048, 128, *SLOPE),
        "DMA 1024 as published": dma(1024, 0, *PUBLISHED),
        # Every query reads every key, by the dense kernel with a bias; the periods are those of a window of 1024.
        "dense + slope": dma(8192, 8192, *SLOPE, "attention.longest_period=4096"),
        "dense + slope, 1 of 4 dense": dma(8192, 8192, *SLOPE, "attention.longest_period=4096", *ONE_DENSE),
        "DMA 1024, slope, r 128, 1 of 4 dense": dma(1024, 128, *SLOPE, *ONE_DENSE),
        "window 1024 + slope, 1 of 4 dense": dma(1024, 1024, *SLOPE, *ONE_DENSE),
        "window 1024, 1 of 4 dense": [*window(1024), *ONE_DENSE],
        # As `sieve recipe new` has it: the first 64 tokens, 1024 neighbours, and the rest of the row in a band a KV head.
        "CoWindow, 1 of 4 dense": ["attention.kind=cowa", *ONE_DENSE],
        "NSA": NSA,
        "MLA": MLA,
        "InfLLM-V2": INFLLM_V2,
        **OF_BLOCKS_ALONE,
        "MSA": MSA,
        WARMUP: MSA,
        # What recent tokens are worth: MSA with as many local blocks as InfLLM-V2, InfLLM-V2 with one, as MSA has.
        "MSA, 8 local blocks": [*MSA, "attention.num_local_blocks=8"],
        "InfLLM-V2, 1 local block": [*INFLLM_V2, "attention.num_local_blocks=1"],
    },
    "2048": {
        "dense": ["attention.kind=mha"],
        "window 1024": window(1024),
        "window 512": window(512),
        "window 512 + slope": dma(512, 512, *SLOPE),
        "DMA 512, slope, r 64": dma(512, 64, *SLOPE),
        "DMA 512, slope, r 64, 1 of 4 dense": dma(512, 64, *SLOPE, *ONE_DENSE),
        "window 512 + slope, 1 of 4 dense": dma(512, 512, *SLOPE, *ONE_DENSE),
        "DMA 512, slope, r 0": dma(512, 0, *SLOPE),
        "DMA 1024 as published": dma(1024, 0, *PUBLISHED),
        "DMA 512 as published": dma(512, 0, *PUBLISHED),
        "NSA": NSA,
        "MLA": MLA,
    },
    "long": {
        "dense": ["attention.kind=mha"],
        "window 1024 + slope, 1 of 4 dense": dma(1024, 1024, *SLOPE, *ONE_DENSE),
        "DMA 1024, slope, r 128, 1 of 4 dense": dma(1024, 128, *SLOPE, *ONE_DENSE),
    },
    "lengthened": {
        "dense": ["attention.kind=mha"],
        "DMA 2048, slope, r 256": dma(2048, 256, *SLOPE),
        "DMA 2048, slope, r 256, 1 of 4 dense": dma(2048, 256, *SLOPE, *ONE_DENSE),
        "DMA 2048 as published": dma(2048, 0, *PUBLISHED),
    },
    "recall": {
        "dense": ["attention.kind=mha"],
        "window 128": window(128),
        "window 128 + slope": dma(128, 128, *SLOPE),
        "DMA 128, slope, r 32": dma(128, 32, *SLOPE),
        "DMA 128, slope, r 32, periods to 4096": dma(128, 32, *SLOPE, "attention.longest_period=4096"),
        "DMA 128, exp, r 32": dma(128, 32, *PUBLISHED[:2]),
        "DMA 128, linear, r 32": dma(128, 32, "attention.bias=linear", "attention.recency=none"),
        "DMA 128 as published": dma(128, 0, *PUBLISHED),
        "DMA 128, slope, r 32, 1 of 4 dense": dma(128, 32, *SLOPE, *ONE_DENSE),
        "window 128 + slope, 1 of 4 dense": dma(128, 128, *SLOPE, *ONE_DENSE),
        "NSA": SHORT_NSA,
        "InfLLM-V2": SHORT_INFLLM_V2,
        "InfLLM-V2, blocks of 16 and 24 by turns": BY_TURNS,
        **{kinds.label(kind): [f"attention.kind={kind}", *SHORT_BLOCKS] for kind in kinds.of_blocks_alone()},
        "MSA": SHORT_MSA,
        WARMUP: SHORT_MSA,
    },
}


def restated_numbers(path, length):
    """The documents of the set "recall", as JSON lines: 20 to 60 sentences for each 1024 tokens of a row."""
    draw, scale = random.Random(0), length // 1024
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(12_000 // scale):
            file.write(json.dumps({"text": document(draw, draw.randrange(20 * scale, 60 * scale))}) + "\n")


def staged(recipe, path, stages):
    """`recipe` with `stages`, each the lines of a [[stage]]."""
    text = pathlib.Path(recipe).read_text()
    path.write_text(text + "".join(f"[[stage]]\n{stage}\n" for stage in stages))
    return str(path)


def recipe_of(name, recipe, steps, out):
    """The recipe of a row of `steps` steps: `recipe`, with a stage before it where the indexer warms up."""
    if name != WARMUP:
        return recipe
    warmup = max(steps // 10, 1)
    stages = [f"steps = {warmup}\nindex_warmup = true", f"steps = {steps - warmup}"]
    return staged(recipe, out / f"warm-up-{pathlib.Path(recipe).stem}-{steps}.toml", stages)


def base(kind, arguments):
    """Recipe and settings that the rows of a set share."""
    out = arguments.out
    facts = f"facts-{arguments.recall_length}" if kind == "recall" else ""
    text, cache = (out / f"{facts}.jsonl", out / facts) if facts else (arguments.text, out / arguments.text.stem)
    settings = ['model.layer_types=["sparse"]', f'data.paths=["{text}"]', "data.format=jsonl", f'data.cache_dir="{cache}"']
    if kind != "recall":
        steps = arguments.steps
        if kind == "lengthened":
            long = "steps = 50\nseq_len = 8192\nrope_theta = 100000.0\nlocal_batch_size = 4"
            recipe = staged("lab/recipes/code_80m.toml", out / "lengthened.toml", [f"steps = {steps // 4}", long])
            return recipe, settings + [
                f"training.steps={steps // 4 + 50}", f"checkpoint.interval={steps // 4 + 50}",
                "validation.interval=50", "metrics.log_freq=1"]
        steps = int(steps * STEPS.get(kind, 1))
        return "lab/recipes/code_80m.toml", settings + (LONG if kind != "2048" else []) + [
            f"training.steps={steps}", f"checkpoint.interval={max(steps // 2, 1)}"]
    steps, length = int(arguments.steps * STEPS[kind]), arguments.recall_length
    return "recipes/quickstart.toml", settings + [
        "tokenizer.train.vocab_size=512", f"model.max_position_embeddings={max([length, *arguments.needle_lengths])}",
        f"training.seq_len={length}", f"training.local_batch_size={max(16384 // length, 1)}",
        f"training.steps={steps}", "optimizer.lr=2e-3",
        f"validation.interval={max(steps // 4, 1)}", f"checkpoint.interval={max(steps // 4, 1)}",
    ]


def line(kind, name, folder):
    """The line of text of a run in `folder`; `kind`: its set in ROWS. Held-out losses from the second validation on,
    median tokens/s, and of the last logged step the mask's density and keys that no query sees."""
    rows = metrics(folder)
    checks, steps = validations_of(rows), steps_of(rows)
    if not checks or not steps:
        return f"{kind:7} {name:42} no metrics, see {folder}.log"
    mask = steps[-1].get("attention") or {}
    losses = " ".join(f"{row['step']}:{row['loss']:.4f}" for row in checks[1:])
    speed = statistics.median(row["tokens_per_second"] for row in steps)
    return (f"{kind:7} {name:42} {losses}  {checks[-1]['bits_per_byte']:.3f} bits per byte, {speed:,.0f} tokens/s, "
            f"density {mask.get('density', 1):.3f}, never seen {100 * mask.get('never_active', 0):.1f} %, "
            f"out of a window's sight {100 * mask.get('beyond_window', 0):.1f} %"
            + evaluation(kind, folder))


def evaluation(kind, folder):
    """What `sieve eval` said of the trained model."""
    try:
        report = json.loads(pathlib.Path(f"{folder}.eval.json").read_text())
    except (OSError, ValueError):
        return ""
    if kind != "recall":
        again = report["by_word"]["again"]
        far = [f"far > {words['more_than']} {words['far']['loss']:.4f}" for words in again]
        return f"; read whole {report['loss']:.4f}, {', '.join(far)}, near {again[0]['near']['loss']:.4f}"
    counts = []
    for length in sorted({cell["length"] for cell in report["methods"][0]["cells"]}):
        cells = [cell for cell in report["methods"][0]["cells"] if cell["length"] == length]
        num_found, all_of_them = (sum(cell[count] for cell in cells) for count in ("num_found", "num_needles"))
        counts.append(f"{num_found} of {all_of_them} at {length}")
    return "; needles " + ", ".join(counts)


def folder_of(job, arguments):
    kind, name, seed = job
    label = f"recall-{arguments.recall_length}" if kind == "recall" else kind
    return arguments.out / named(label, name, seed)


def needles_by_depth(jobs, arguments):
    """The lines of OUT/needle_depth.jsonl, one a model and length, with those of newly evaluated models."""
    path, key = arguments.out / "needle_depth.jsonl", ("trained", "length", "attention", "seed")
    rows = finished(path, key)
    for job in jobs:
        report = pathlib.Path(f"{folder_of(job, arguments)}.eval.json")
        if job[0] != "recall" or not report.exists():
            continue
        cells = json.loads(report.read_text())["methods"][0]["cells"]
        for length in sorted({cell["length"] for cell in cells}):
            here = [cell for cell in cells if cell["length"] == length]
            row = {"trained": arguments.recall_length, "length": length, "attention": job[1], "seed": job[2],
                   "needles": here[0]["num_needles"], "depths": [round(cell["depth"]) for cell in here],
                   "found": [cell["num_found"] for cell in here]}
            rows[tuple(row[name] for name in key)] = row
    if rows:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    return [row for row in rows.values() if row["trained"] == arguments.recall_length]


def print_depth_table(rows):
    """Prints the share found in each third of the text, over all seeds. Depth 100 lies right before the question."""
    lengths, lines = sorted({row["length"] for row in rows}), []
    for name in dict.fromkeys(row["attention"] for row in rows):
        texts = []
        for length in lengths:
            own_rows = [row for row in rows if (row["attention"], row["length"]) == (name, length)]
            pairs = [(depth, 100 * count / row["needles"]) for row in own_rows
                     for depth, count in zip(row["depths"], row["found"])]
            thirds = [[share for depth, share in pairs if low <= depth < low + 33.5] for low in (0, 33.5, 67)]
            texts.append(", ".join(f"{statistics.mean(third):.0f}" for third in thirds if third))
        lines.append([name, *texts])
    print(table_text(["found in %, depth 0 to 33, 34 to 66, 67 to 100 %", *map(str, lengths)], lines))


def drawn(rows):
    """SVG with a map for each kind of attention, three beside each other, the most needles first: lengths across, depth
    down, colour and number the share found in %. A dotted line ends what was trained on."""
    across, down, left, top, beside = 50, 19, 56, 58, 3
    of_kind = {}
    for row in rows:
        of_kind.setdefault(row["attention"], []).append(row)
    names = sorted(of_kind, key=lambda name: -sum(sum(row["found"]) for row in of_kind[name]))
    lengths, depths = sorted({row["length"] for row in rows}), rows[0]["depths"]
    trained = sum(length <= rows[0]["trained"] for length in lengths)
    wide, high = left + across * len(lengths) + 22, top + down * len(depths) + 26
    text = lambda x, y, words, more="": f'<text x="{x}" y="{y}" {more}>{words}</text>'
    middle = 'text-anchor="middle"'
    parts = []
    for number, name in enumerate(names):
        x, y = wide * (number % beside) + left, high * (number // beside) + top
        parts.append(text(x - 44, y - 36, name, 'font-weight="bold"'))
        parts.append(text(x - 44, y - 6, "depth %"))
        parts += [text(x - 8, y + down * place + 14, depth, 'text-anchor="end"') for place, depth in enumerate(depths)]
        for column, length in enumerate(lengths):
            own_rows = [row for row in of_kind[name] if row["length"] == length]
            parts.append(text(x + across * (column + 0.5), y - 18, f"{length:,}", middle))
            for place in range(len(depths) if own_rows else 0):
                share = statistics.mean(row["found"][place] / row["needles"] for row in own_rows)
                colour = ",".join(f"{246 - fall * share:.0f}" for fall in (216, 141, 76))
                at = (x + across * column, y + down * place)
                parts.append(f'<rect x="{at[0]}" y="{at[1]}" width="{across - 1}" height="{down - 1}" fill="rgb({colour})"/>')
                shown = middle + (' fill="white"' if share > 0.5 else "" if share else ' fill="#767676"')
                parts.append(text(at[0] + across / 2, at[1] + 14, f"{100 * share:.0f}", shown))
        line = x + across * trained - 0.5
        parts.append(f'<line x1="{line}" x2="{line}" y1="{y - 30}" y2="{y + down * len(depths)}" stroke="black" '
                     'stroke-width="2" stroke-dasharray="2 3"/>')
    return svg(wide * min(beside, len(names)), high * math.ceil(len(names) / beside), parts, ' style="font-size: 13px"')


def train(job, runs, arguments):
    """Trains a job (a set of ROWS, a name in it, a seed) and with --evaluate evaluates it, as far as the time goes;
    returns its line of text."""
    kind, name, seed = job
    folder = folder_of(job, arguments)
    recipe, settings = base(kind, arguments)
    settings = settings + [f"training.seed={seed}"] + ROWS[kind][name] + arguments.set
    recipe = recipe_of(name, recipe, num_steps(settings), arguments.out)
    lengths = [int(value.split("=")[1]) for value in settings if value.startswith("training.seq_len=")]
    needles = [*NEEDLES, ",".join(map(str, arguments.needle_lengths))]
    words = needles if kind == "recall" else words_of_far((lengths or [2048])[-1], FAR)
    with contextlib.suppress(Unfinished):
        trained(folder, recipe, settings, runs, arguments)
        if arguments.evaluate:
            evaluated(folder, words, runs, arguments)
    return line(kind, f"{name}, seed {seed}", folder)


def train_all(jobs, arguments):
    """Makes and tokenises the texts before all runs, then trains on all devices, a
    printed line a run, also for those not begun."""
    kinds = {kind for kind, _, _ in jobs}
    facts = arguments.out / f"facts-{arguments.recall_length}.jsonl"
    if "recall" in kinds and not facts.exists():
        restated_numbers(facts, arguments.recall_length)
    for kind in sorted({kind if kind == "recall" else "8192" for kind in kinds}):  # tokenised once, before all runs
        recipe, settings = base(kind, arguments)
        prepare(arguments, recipe, settings + arguments.set)
    work = lambda job, runs: print(train(job, runs, arguments), flush=True)
    for kind, name, seed in on_devices(jobs, arguments, work):
        print(f"{kind:7} {name}, seed {seed}: not run")


def main():
    """Trains the rows of --sets or --rows; prints, and draws, where in a text the models found needles."""
    parser = parser_of(__doc__, "needle_depth.jsonl", reads_text=False)
    parser.add_argument("--text", type=pathlib.Path, default="data/crates.jsonl", help="of every set but recall")
    parser.add_argument("--sets", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=1600, help="of the 80M runs; restated numbers: 2.5 times as many")
    parser.add_argument("--rows", nargs="+", metavar="SET/NAME/SEED", help="these rows alone, in this order")
    parser.add_argument("--recall-length", type=int, default=1024, help="tokens of the set recall's rows, 1024 or more")
    parser.add_argument("--needle-lengths", nargs="+", type=int, default=[512, 1024], help="of the set recall")
    parser.add_argument("--evaluate", action="store_true", help="read each trained model with sieve eval")
    arguments = parsed(parser)
    jobs = [(kind, name, seed) for kind in arguments.sets for seed in arguments.seeds for name in ROWS[kind]]
    if arguments.rows:
        jobs = [(kind, name, int(seed)) for kind, name, seed in (row.split("/") for row in arguments.rows)]
        unknown = [f"{kind}/{name}" for kind, name, _ in jobs if name not in ROWS.get(kind, {})]
        if unknown:
            parser.error(f"no such row: {', '.join(unknown)}")
    if arguments.sieve:
        train_all(jobs, arguments)
    rows = needles_by_depth(jobs, arguments)
    if rows:
        print_depth_table(rows)
    if rows and arguments.draw:
        arguments.draw.write_text(drawn(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
