"""Each kind of attention at its own best learning rate, then further seeds there: an 80M model on rows of 8192 tokens
or more.

    python3 lab/experiments/best_rates.py --sieve target/release/sieve --text data/crates.jsonl --out OUT \\
      --devices cuda:0 cuda:0 cuda:1 cuda:1
    python3 lab/experiments/best_rates.py --out lab/rows --steps 400 --draw lab/docs/rates.svg [--length 32768]

Run from the repository's root. Each kind is trained with --rate-steps steps and seed 0 at each rate of --rates, and at
one further rate while the best one is an edge; then with --steps steps at its best rate with every seed. Text and rows
are those of learning_table.py; every step holds 32,768 tokens. With --evaluate a line has the losses on words last used
far back. OUT/rates.jsonl gets a line for each finished run; runs that have one are not repeated, so a call that was cut
off resumes. A device named twice takes two runs at a time. lab/rows/rates.jsonl holds the runs of lab/docs/results.md. Needs
nothing but Python.
"""

import shutil
import statistics

from learning_table import OF_BLOCKS_ALONE, ROWS, WARMUP, base, recipe_of
from runs import (chart, evaluated, far_losses, finished, named, parsed, parser_of, prepare, scores, table_text, train,
                  trained, words_of_far)

KEY = ("kind", "length", "rate", "seed", "steps")
FAR = ["1024", "4096", "16384"]
KINDS = {
    "dense": "dense",
    "window": "window 1024",
    "window + slope": "window 1024 + slope",
    "DMA": "DMA 1024, slope, r 128",
    "DMA as published": "DMA 1024 as published",
    "NSA": "NSA",
    "InfLLM-V2": "InfLLM-V2",
    **{kind: kind for kind in OF_BLOCKS_ALONE},
    "MSA": "MSA",
    WARMUP: WARMUP,
    "MSA, 8 local blocks": "MSA, 8 local blocks",
    "InfLLM-V2, 1 local block": "InfLLM-V2, 1 local block",
    "MLA": "MLA",
    "window + slope, 1 of 4 dense": "window 1024 + slope, 1 of 4 dense",
    "DMA, 1 of 4 dense": "DMA 1024, slope, r 128, 1 of 4 dense",
    # Controls: the slope without sparsity, in all layers or where the hybrids are sparse, and sparsity without the slope.
    "dense + slope": "dense + slope",
    "dense + slope, 1 of 4 without": "dense + slope, 1 of 4 dense",
    "window, 1 of 4 dense": "window 1024, 1 of 4 dense",
    "CoWindow, 1 of 4 dense": "CoWindow, 1 of 4 dense",
}


def tried(rows, kind, arguments):
    """Rate and loss of the kind's short runs, from the lowest rate to the highest."""
    run_key = (kind, arguments.length, 0, arguments.rate_steps)
    return sorted((key[2], row["loss"]) for key, row in rows.items() if key[:2] + key[3:] == run_key)


def best_rate(rows, kind, arguments):
    """The rate of the lowest loss with lower and higher rates beside it, or None where one has to be tried yet, and
    the rates to try."""
    losses = tried(rows, kind, arguments)
    best = min(losses, key=lambda pair: pair[1])[0] if losses else None
    if losses and losses[0][0] < best < losses[-1][0]:
        return best, []
    missing = [rate for rate in arguments.rates if rate not in dict(losses)]
    return None, missing or [best / 2 if best == losses[0][0] else best * 2]


def wanted(rows, arguments):
    """The runs that can begin now, as `KEY` names them."""
    jobs = []
    for kind in arguments.kinds:
        best, rates = best_rate(rows, kind, arguments)
        jobs += [(kind, arguments.length, rate, 0, arguments.rate_steps) for rate in rates]
        jobs += [(kind, arguments.length, best, seed, arguments.steps) for seed in arguments.seeds if best]
    return sorted((job for job in jobs if job not in rows), key=lambda job: (job[4] == arguments.steps, job[3]))


def rows_of(length):
    """Rows of `length` tokens, 32,768 tokens a step."""
    return [f"training.seq_len={length}", f"training.local_batch_size={max(32768 // length, 1)}",
            f"model.max_position_embeddings={max(length, 8192)}"]


def run(job, runs, arguments):
    """The line of one run."""
    kind, length, rate, seed, steps = job
    folder = arguments.out / named(*job)
    recipe, settings = base("8192", arguments)
    settings += rows_of(length)
    settings += [*ROWS["8192"][KINDS[kind]], f"optimizer.lr={rate}", f"training.seed={seed}", f"training.steps={steps}",
                 f"checkpoint.interval={max(steps // 2, 1)}", f"validation.interval={steps}", *arguments.set]
    lines = trained(folder, recipe_of(KINDS[kind], recipe, steps, arguments.out), settings, runs, arguments)
    report = evaluated(folder, words_of_far(length, FAR), runs, arguments) if arguments.evaluate else None
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    return {**dict(zip(KEY, job)), **scores(lines), **({"far": far_losses(report)} if report else {})}


def final(rows, kind, arguments):
    """The kind's best rate, or None, and its long runs there."""
    best, _ = best_rate(rows, kind, arguments)
    keys = [(kind, arguments.length, best, seed, arguments.steps) for seed in arguments.seeds]
    return best, [rows[key] for key in keys if key in rows]


def far_of(runs, far):
    """The runs' losses on words last used more than `far` tokens back, of runs that were evaluated."""
    return [run["far"][far] for run in runs if far in run.get("far", {})]


def print_table(rows, arguments):
    """Prints a line a kind: its losses by learning rate, the best rate, and the losses of the
    seeds there. `rows`: finished runs by `KEY`."""
    fars = [far for far in FAR if far_of([row for key, row in rows.items() if key[1] == arguments.length], far)]
    head = ["attention", f"loss after {arguments.rate_steps} steps by rate", "best rate",
            f"loss after {arguments.steps} steps, seeds {', '.join(map(str, arguments.seeds))}", "mean", "spread",
            *(f"far > {far}" for far in fars)]
    lines = []
    for kind in arguments.kinds:
        rates = ", ".join(f"{rate:g}: {loss:.3f}" for rate, loss in tried(rows, kind, arguments))
        best, runs = final(rows, kind, arguments)
        losses = [run["loss"] for run in runs]
        mean, spread = (f"{statistics.mean(losses):.3f}", f"{max(losses) - min(losses):.3f}") if losses else ("", "")
        cells = [kind, rates, f"{best:g}" if best else "", ", ".join(f"{loss:.3f}" for loss in losses), mean, spread]
        for far in fars:
            far_losses = far_of(runs, far)
            cells.append(f"{statistics.mean(far_losses):.3f}" if far_losses else "")
        lines.append(cells)
    print(table_text(head, lines))


def drawn(rows, arguments):
    """Panels: loss over rate after the short runs, a line a kind; losses of all seeds after the long ones; and theirs on
    words last used far back, where those were evaluated."""
    lines = {kind: [(rate, [loss]) for rate, loss in tried(rows, kind, arguments)] for kind in arguments.kinds}
    lines = {kind: points for kind, points in lines.items() if points}
    runs = {kind: final(rows, kind, arguments)[1] for kind in lines}
    ends = {kind: [run["loss"] for run in points] for kind, points in runs.items() if points}
    ends = dict(sorted(ends.items(), key=lambda pair: statistics.mean(pair[1])))
    far = {kind: [(int(far), far_losses) for far in FAR if (far_losses := far_of(runs[kind], far))] for kind in ends}
    panels = [
        (f"nats after {arguments.rate_steps} steps, rows of {arguments.length}", lines,
         sorted({rate for points in lines.values() for rate, _ in points}), "learning rate"),
        (f"nats after {arguments.steps} steps, best rate", {kind: [(kind, losses)] for kind, losses in ends.items()}, list(ends),
         "a dot a seed"),
    ]
    if any(far.values()):
        panels.append(("nats on words used far back, best rate", far, None, "last used more than so many tokens back"))
    return chart(panels, list(lines))


def main():
    """Runs what has no line yet where --sieve is given, then prints the table of
    one --length and, with --draw, draws it."""
    parser = parser_of(__doc__, "rates.jsonl")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--rates", nargs="+", type=float, default=[7.5e-4, 1.5e-3, 3e-3])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--length", type=int, default=8192, help="tokens of a row")
    parser.add_argument("--evaluate", action="store_true", help="also the loss on words last used far back")
    parser.add_argument("--rate-steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=800)
    arguments = parsed(parser)
    path = arguments.out / "rates.jsonl"
    rows = finished(path, KEY)
    if arguments.sieve:
        recipe, settings = base("8192", arguments)
        prepare(arguments, recipe, settings + rows_of(arguments.length) + arguments.set)
        train(lambda rows: wanted(rows, arguments), run, arguments, path, rows)
    lengths = sorted({key[1] for key in rows})
    if arguments.length not in lengths:
        parser.error(f"--length {arguments.length}: {path} has runs of {', '.join(map(str, lengths)) or 'no length'}")
    print_table(rows, arguments)
    if arguments.draw:
        arguments.draw.write_text(drawn(rows, arguments), encoding="utf-8")


if __name__ == "__main__":
    main()
