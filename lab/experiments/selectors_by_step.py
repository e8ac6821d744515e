"""What selectors, and Delta Attention's correction of them, cost a model of our own by the steps it was trained for.

    python3 lab/experiments/selectors_by_step.py --sieve sieve --out OUT --device cuda [--seconds 580]
    python3 lab/experiments/selectors_by_step.py --out OUT --table

Run from the repository's root. lab/recipes/code_80m.toml with dense attention and RoPE's base 500,000 trains on rows of
--row, the second of --rows from step --short on, 32,768 tokens a step. After each of --steps `eval selectors` reads
prompts of --lengths from --data, which no model saw, under each of BASES without and with the correction.
OUT/results.jsonl gets a line for each setting; measured steps are not measured again, and training resumes, so a call
that was cut off is called again. Needs nothing but Python.
"""

import argparse
import json
import pathlib
import subprocess

from dense_to_sparse import Runs
from published_selectors import rows
from runs import append, json_lines, saved_steps, sets, table_text

BASES = ["xattention:tau=0.5", "xattention:tau=0.7", "streamingllm:n_local=1024", "a_shape", "block_sparse:topk=32",
         "oracle_topk:block=64,k=32"]
TOKENS = 32768  # of a step


def settings():
    """Each base, then the base with the correction."""
    for base in BASES:
        name, _, rest = base.partition(":")
        yield base
        yield ",".join([f"delta:base={name}", *(f"base.{item}" for item in rest.split(",") if item)])


def recipe(args):
    """The recipe's text with two stages for its steps."""
    text = pathlib.Path("lab/recipes/code_80m.toml").read_text(encoding="utf-8").splitlines()
    text = [line for line in text if not line.startswith("steps = ")]
    counts = [args.short, args.steps[-1] - args.short]
    for row, count in zip(args.rows, counts, strict=True):
        batch = max(args.tokens // row, 1)
        text += ["[[stage]]", f"steps = {count}", f"seq_len = {row}", f"local_batch_size = {batch}",
                 f"global_batch_size = {batch}"]
    return "\n".join(text) + "\n"


def measure(args):
    """Trains up to each of --steps that has no lines yet, and adds what `eval selectors` says of its checkpoint."""
    args.out.mkdir(parents=True, exist_ok=True)
    path, log, run, place = args.out / "recipe.toml", args.out / "log.txt", args.out / "run", ["--device", args.device]
    if path.exists() and path.read_text(encoding="utf-8") != recipe(args):
        raise SystemExit(f"{path} has other stages than this call: name another --out")
    path.write_text(recipe(args), encoding="utf-8")
    keys = ["attention.kind=mha", "model.rope_theta=500000.0", f"model.max_position_embeddings={args.rows[-1]}",
            f"data.paths={json.dumps([str(args.text)])}", f"checkpoint.interval={args.steps[0]}",
            f"validation.interval={args.steps[0]}", f"training.seq_len={args.rows[0]}", *args.set]
    runs, done = Runs(args), {line["step"] for line in results(args)}
    for step in args.steps:
        if step in done:
            continue
        at = max(saved_steps(run), default=0)
        if at < step:
            words = ["--stop-after", step - at, *(["--resume"] if at else [])]
            runs.sieve("train", "--recipe", path, "--out", run, *sets(keys), *place, *words, log=log)
        words = [word for selector in settings() for word in ("--selector", selector)]
        report = runs.sieve("eval", "selectors", "--checkpoint", run / f"checkpoint/step-{step}", "--data", *args.data,
                            "--lengths", ",".join(map(str, args.lengths)), *words, "--json", *place, log=log)
        append(args.out / "results.jsonl", *({"step": step, **row} for row in rows("", json.loads(report), [])))


def results(args):
    return json_lines(args.out / "results.jsonl")


def print_table(rows_of_all):
    """Prints loss over dense attention's, KL, and the cosine of layers' attention to the dense one: mean, least."""
    for row in (row for row in rows_of_all if "failed" in row):
        print(f"failed: step {row['step']}, {row['label']}: {row['failed']}")
    rows_of_all = [row for row in rows_of_all if "failed" not in row]
    for length in sorted({row["num_tokens"] for row in rows_of_all}):
        here = [row for row in rows_of_all if row["num_tokens"] == length]
        steps = {row["step"]: row["dense_loss"] for row in here}
        head, lines = [f"{step} steps, dense loss {loss:.4f}" for step, loss in steps.items()], []
        for label in dict.fromkeys(row["label"] for row in here):
            by_step = {row["step"]: row for row in here if row["label"] == label}
            cells = [f"{row['density']:.1%}, {row['loss'] - row['dense_loss']:+.4f}, {row['kl']:.4f}, "
                     f"{sum(row['cosines']) / len(row['cosines']):.3f} (least {min(row['cosines']):.3f})"
                     if (row := by_step.get(step)) else "-" for step in steps]
            lines.append([f"`{label}`", *cells])
        print(f"\n{length} tokens\n\n{table_text(['density, loss - dense, KL, cosine', *head], lines)}")


def main():
    """Measures where --sieve is given, until --seconds are over, and prints the table of what there is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sieve", help="the program; without it nothing is measured")
    parser.add_argument("--text", type=pathlib.Path, default=pathlib.Path("data/crates.jsonl"))
    parser.add_argument("--data", nargs="+", default=["crates/sieve-kernels/src", "crates/sieve-gpu/src"])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rows", type=int, nargs=2, default=[2048, 32768], help="tokens of a row in the two stages")
    parser.add_argument("--short", type=int, default=300, help="steps of the first stage")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a step")
    parser.add_argument("--steps", type=int, nargs="+", default=[400, 4000], help="multiples of the first")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--set", nargs="+", default=[], help="other keys of the recipe")
    parser.add_argument("--seconds", type=float, default=1e6)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.sieve:
        try:
            measure(args)
        except subprocess.TimeoutExpired:
            print("the time is over: call it again")
        except subprocess.CalledProcessError as error:
            print(f"{error.cmd[2]} failed; {args.out}/log.txt says why")
    if args.table:
        print_table(results(args))


if __name__ == "__main__":
    main()
