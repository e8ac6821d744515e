"""Each kind of attention trained for the same time: an 80M model on long rows, one run alone on a GPU.

    python3 lab/experiments/equal_time.py --sieve target/release/sieve --text data/crates.jsonl --out OUT \\
      --length 32768 --minutes 3 --devices cuda:0 cuda:1
    python3 lab/experiments/equal_time.py --out lab/rows --length 32768 --minutes 3 --draw lab/docs/equal_time.svg

Run from the repository's root. First a probe of --probe-steps steps, of five times as many with a warm-up, measures each
kind's tokens/s alone on a GPU, from which its steps and their learning-rate schedule follow; its rate is the kind's best
of lab/rows/rates.jsonl. Every step holds 32,768 tokens, or one row where that is longer. The time is that of training
steps: starting, preparing data and validation are not counted, and the line says how long the steps took. A device named
twice takes two runs at a time; then speed and time are the probe's. OUT/equal_time.jsonl gets a line for each finished
run; runs that have one are not repeated, and a run that was cut off resumes from its last checkpoint, one a minute. A
line has the training loss over seconds, of MSA the indexer's KL, recall and entropy too, and with --evaluate the loss by
tokens seen and on words last used far back. Texts are told apart by the names of their files; without --text the table is
of crates.jsonl. Needs nothing but Python.
"""

import argparse
import collections
import pathlib
import shutil
import statistics

from best_rates import KEY as RATE_KEY, KINDS as NAMES, rows_of, tried
from learning_table import ROWS, WARMUP, base, recipe_of
from runs import (chart, curve, device_name, evaluated, far_losses, finished, named, on_devices, over_time, parsed,
                  parser_of, prepare, scores, steps_of, table_text, train_missing, trained, words_of_far)

RATE_RUNS = finished(pathlib.Path(__file__).parents[2] / "lab/rows/rates.jsonl", RATE_KEY)


def best_rate(kind, length):
    """The learning rate with the lowest loss after 400 steps of rows of `length`, or of 8192 where those have none;
    MSA's for its warm-up as long as that has no runs."""
    for tokens in (length, 8192):
        if losses := tried(RATE_RUNS, kind, argparse.Namespace(rate_steps=400, length=tokens)):
            return min(losses, key=lambda pair: pair[1])[0]
    if kind != WARMUP:
        raise LookupError(f"{kind}: lab/rows/rates.jsonl has no run of 400 steps of it; best_rates.py makes them")
    return best_rate("MSA", length)


KINDS = [kind for kind in NAMES if kind != "DMA as published"]
Job = collections.namedtuple("Job", "text gpu kind length minutes seed")
FAR = ["1024", "4096", "16384", "65536"]
INDEXER = ["index_kl", "index_recall", "index_entropy"]


def seconds_a_token(kind, steps, count):
    """Seconds a token of a run of `count` steps, by the median speed of the logged ones, `steps`. With MSA's dense
    warm-up, a tenth of the steps, by the medians of both stages, weighted by their steps."""
    dense = max(count // 10, 1) if NAMES[kind] == WARMUP else 0
    stages = [(dense, [line for line in steps if line["step"] <= dense]),
              (count - dense, [line for line in steps if line["step"] > dense])]
    stages = [(share, [line["tokens_per_second"] for line in lines]) for share, lines in stages if lines]
    return sum(share / statistics.median(rates) for share, rates in stages) / sum(share for share, _ in stages)


def settings_of(job, count, saved, arguments):
    """Keys of a run of `count` steps that saves `saved` checkpoints."""
    kind, length = job.kind, job.length
    return [*base("8192", arguments)[1], *rows_of(length), f"training.seed={job.seed}",
            f"optimizer.lr={best_rate(kind, length)}", *ROWS["8192"][NAMES[kind]], f"training.steps={count}",
            f"checkpoint.interval={max(count // saved, 1)}", "checkpoint.keep_latest_k=1", f"validation.interval={count}",
            f"lr_scheduler.warmup_steps={max(count // 8, 1)}", *arguments.set]


def recipe_for(kind, count, arguments):
    return recipe_of(NAMES[kind], base("8192", arguments)[0], count, arguments.out)


def folder_of(job, arguments):
    return arguments.out / named(job.text, job.kind, job.length, f"{job.minutes:g}", job.seed)


def probe(job, runs, arguments):
    """Seconds a token of the job's kind alone on a GPU, from a file where another run of the kind was probed before."""
    kind = job.kind
    folder = folder_of(job._replace(seed="probe"), arguments)
    stored = pathlib.Path(f"{folder}.seconds")
    if not stored.exists():
        # Steps are logged as the run logs them, since statistics of the attention make a logged step slower. The first
        # logged step counts the start; of a warm-up another one has to be dense.
        count = arguments.probe_steps * (5 if NAMES[kind] == WARMUP else 1)
        settings = settings_of(job, count, 1, arguments)
        lines = trained(folder, recipe_for(kind, count, arguments), settings, runs, arguments)
        stored.write_text(repr(seconds_a_token(kind, steps_of(lines)[1:], count)))
    return float(stored.read_text())


def run(job, runs, arguments):
    """The line of one run."""
    kind, length, minutes = job.kind, job.length, job.minutes
    folder, batch = folder_of(job, arguments), max(32768 // length, 1)
    a_token = probe(job, runs, arguments)
    count = max(int(minutes * 60 / a_token / (length * batch)), 2)
    lines = trained(folder, recipe_for(kind, count, arguments),
                    settings_of(job, count, max(round(minutes), 1), arguments), runs, arguments)
    steps = steps_of(lines)
    report = evaluated(folder, words_of_far(length, FAR), runs, arguments) if arguments.evaluate else None
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    shared = len(set(arguments.devices)) < len(arguments.devices)
    seconds = a_token if shared else seconds_a_token(kind, steps, count)
    rate = 1 / a_token if shared else statistics.median(line["tokens_per_second"] for line in steps)
    far = far_losses(report) if report else {}
    positions = [[bin["from"], round(bin["loss"], 4)] for bin in report["by_position"]
                 if bin["num_tokens"]] if report else []
    seconds *= count * length * batch
    of_indexer = {key: curve(steps, seconds / count, lambda line: line["attention"][key]) for key in INDEXER
                  if all(key in (line["attention"] or {}) for line in steps)}
    return {**job._asdict(), "steps": count, "tokens": count * length * batch, "tokens_per_second": round(rate),
            "seconds": round(seconds, 1), **scores(lines), "far": far, "by_position": positions,
            "curve": curve(steps, seconds / count), **of_indexer}


def job_of(arguments, kind, seed):
    """The job of these arguments; without --text it is of crates.jsonl."""
    text = arguments.text.stem if arguments.text else "crates"
    return Job(text, arguments.gpu, kind, arguments.length, arguments.minutes, seed)


def chosen(rows, arguments):
    """The runs of this text, GPU, length and time, by kind."""
    by_kind = {}
    for job, row in sorted(rows.items(), key=lambda pair: pair[0].seed):
        if job == job_of(arguments, job.kind, job.seed):
            by_kind.setdefault(job.kind, []).append(row)
    return {kind: by_kind[kind] for kind in arguments.kinds if kind in by_kind}


def print_table(rows, arguments):
    """Prints a line a kind, the least mean loss first: every seed's loss, and
    means over seeds of the other measurements."""
    print(f"{arguments.gpu}, rows of {arguments.length}, {arguments.minutes:g} minutes of training each\n")
    mean = lambda values: f"{statistics.mean(values):.3f}" if values else ""
    order = sorted(chosen(rows, arguments).items(), key=lambda pair: statistics.mean(row["loss"] for row in pair[1]))
    lines = [[kind, ", ".join(f"{row['loss']:.3f}" for row in runs), mean([row["bits_per_byte"] for row in runs]),
              f"{statistics.median(row['tokens_per_second'] for row in runs):,.0f}",
              f"{statistics.median(row['tokens'] for row in runs) / 1e6:.1f}M",
              *(mean([row["far"][x] for row in runs if x in row["far"]]) for x in FAR)] for kind, runs in order]
    head = ["attention", "loss, a number a seed", "bits per byte", "tokens/s", "tokens", *(f"far > {x}" for x in FAR)]
    print(table_text(head, lines))


def by_seen(runs):
    """Points of the loss by tokens seen, whole classes of 256 tokens and more, of runs that were evaluated."""
    losses = {}
    for row in runs:
        for place, loss in row["by_position"]:
            if 256 <= place < row["length"]:
                losses.setdefault(place, []).append(loss)
    return sorted(losses.items())


def drawn(rows, arguments):
    """Training loss over minutes and over tokens (the first seed), and the last validation losses: of all words, and by
    the number of tokens seen, from 256 on, below which all kinds see alike."""
    by_kind = chosen(rows, arguments)
    ends = sorted(by_kind, key=lambda kind: statistics.mean(row["loss"] for row in by_kind[kind]))
    over = lambda last: {kind: over_time(runs[0], last(runs[0])) for kind, runs in by_kind.items()}
    title = f"training loss, rows of {arguments.length}"
    panels = [(title, over(lambda row: row["seconds"] / 60), "linear", "minutes of training"),
              (title, over(lambda row: row["tokens"] / 1e6), "linear", "millions of tokens"),
              (f"validation loss after {arguments.minutes:g} min",
               {kind: [(kind, [row["loss"] for row in by_kind[kind]])] for kind in ends}, ends, "a dot a seed")]
    losses_by_seen = {kind: by_seen(runs) for kind, runs in by_kind.items()}
    if any(losses_by_seen.values()):
        panels.append(("validation loss by tokens seen", losses_by_seen, None, "tokens seen at least"))
    return chart(panels, list(by_kind))


def main():
    """Probes each kind's speed alone on a GPU, trains the jobs without a line for the same time each,
    prints their table and, with --draw, draws it."""
    parser = parser_of(__doc__, "equal_time.jsonl")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--length", type=int, default=32768, help="tokens of a row")
    parser.add_argument("--minutes", type=float, default=3.0, help="of training steps, for each run")
    parser.add_argument("--probe-steps", type=int, default=40)
    parser.add_argument("--gpu", default="NVIDIA H200", help="of the table; with --sieve it is that of --devices")
    parser.add_argument("--evaluate", action="store_true", help="also the loss on words last used far back")
    arguments = parsed(parser)
    path = arguments.out / "equal_time.jsonl"
    rows = {Job(*key): row for key, row in finished(path, Job._fields).items()}
    if arguments.sieve:
        arguments.steps = 1600  # of `base`; a run sets its own
        recipe, settings = base("8192", arguments)
        prepare(arguments, recipe, settings + arguments.set)
        arguments.gpu = device_name(arguments.devices[0])
        jobs = [job_of(arguments, kind, seed) for seed in arguments.seeds for kind in arguments.kinds]
        # Probes alone on their GPUs, before all runs.
        missing = {job.kind: job for job in jobs if job not in rows}
        apart = argparse.Namespace(**{**vars(arguments), "devices": sorted(set(arguments.devices))})
        on_devices(missing.values(), apart, lambda job, runs: probe(job, runs, arguments))
        train_missing(jobs, run, arguments, path, rows)
    if not chosen(rows, arguments):
        stored = sorted({f"{job.text}, {job.gpu}, {job.length} tokens, {job.minutes:g} min" for job in rows})
        parser.error(f"no run of this --text, --gpu, --length, --minutes and --kinds; {path} has: {'; '.join(stored) or 'nothing'}")
    print_table(rows, arguments)
    if arguments.draw:
        arguments.draw.write_text(drawn(rows, arguments), encoding="utf-8")


if __name__ == "__main__":
    main()
