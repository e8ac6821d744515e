"""The race of layouts: which kinds of attention, in which layers, learn most in equal time in rows of 32,768 tokens.

    python3 lab/experiments/layouts/layouts.py --sieve target/release/sieve --text train.jsonl --heldout heldout.jsonl \\
      --tokenizer tokenizer.json --out OUT --devices cuda:0 cuda:1 cuda:2 cuda:3

An 85M model after Table 4 of arXiv:2508.02124 (mha_80m.toml); `layouts` has the keys in which the layouts differ. Each
query of a sparse layer or window reads --w keys, also in "InfLLM-V2, then dense", whose recipe has four times as many.
Three phases, one run at a time on a device, with no wait for a whole phase:

- `speed`: --speed-steps steps of each layout in rows of --row, which give its tokens/s;
- `rate`: each layout with each of --rates, seed 0, --rate-steps steps in rows of --rate-row; the lowest held-out loss
  names its rate. "InfLLM-V2, then dense" takes the rate of the InfLLM-V2 layout;
- `run`: each layout at its rate with each of --seeds for --run-seconds of training, in rows of --row: its steps follow
  from its tokens/s, so that the learning rate's decay ends with the run. All steps hold one row of --row.

A run is scored on its device at once: loss on held-out text, also of words last used far back, needles, RULER's tasks.
OUT/layouts.jsonl gets a line for each finished one. A call does what has no line yet, and begins nothing that --seconds
leaves no time for. A run that was cut off begins again, since its time was not one stretch. MSA has no warm-up of its
indexer here. MQAR's hard form is left out: it takes minutes of training on two layers of its own. Needs nothing but
Python.
"""

import collections
import concurrent.futures
import copy
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from runs import (Unfinished, curve, device_name, finished, metrics, named, output_of, parsed, parser_of, prepare,
                  scores, steps_of, train, trained, validations_of)

Job = collections.namedtuple("Job", "phase layout rate seed")
FAR = ["1024", "4096", "16384"]
TASKS = ["passkey", "niah_single_1", "vt", "induce"]
DENSE, THEN_DENSE = "dense", "InfLLM-V2, then dense"
# Whose rate is taken where a layout tries none itself.
RATE_OF = {THEN_DENSE: "windows, 1 of 4 InfLLM-V2"}


def layouts(w):
    """Recipe and keys by layout; the window of `w` keys, or as many in blocks of 64, half of them local."""
    blocks = ["attention.select_block_size=64", f"attention.num_selected_blocks={max(w // 64, 2)}",
              f"attention.num_local_blocks={max(w // 128, 1)}"]
    msa = ["attention.kind=msa", *blocks]
    infllm = ["attention.kind=infllm_v2", "attention.compress_block_size=32", "attention.compress_stride=16", *blocks]
    in_windows = ['model.layer_types=["3 swa","sparse"]', f"attention.swa.sliding_window={w}"]
    one_dense = 'model.layer_types=["3 sparse","mha"]'
    recipe = "mha_80m.toml"
    # Feed-forward layers give up what indexers take, as in msa_80m.toml.
    return {
        "windows, 1 of 4 MSA": (recipe, [*msa, *in_windows, "model.intermediate_size=2272"]),
        "windows, 1 of 4 InfLLM-V2": (recipe, [*infllm, *in_windows]),
        "windows, 1 of 4 dense": (recipe, ["attention.kind=swa", f"attention.sliding_window={w}", one_dense]),
        "DMA, 1 of 4 dense": (recipe, ["attention.kind=dma", f"attention.keep_window_size={w}", one_dense]),
        "MSA": (recipe, [*msa, "model.intermediate_size=2144"]),
        THEN_DENSE: ("sparse_then_dense_80m.toml", blocks),
        DENSE: (recipe, []),
    }


def dense_end(layout, steps):
    """Steps of the dense end of the layout that has one."""
    return max(round(steps / 10), 1) if layout == THEN_DENSE else 0


def data_keys(args):
    """Keys that say which tokens are prepared, the same for all runs and any length of rows."""
    return [f'data.paths=["{args.text}"]', f'validation.paths=["{args.heldout}"]', f'tokenizer.path="{args.tokenizer}"',
            f'data.cache_dir="{args.out / "cache"}"']


def keys_of(args, job, steps):
    """All keys of a run besides its recipe's."""
    row = args.rate_row if job.phase == "rate" else args.row
    rows, end = args.row // row, dense_end(job.layout, steps)
    stages = [f"stage.1.steps={steps - end}", f"stage.2.steps={end}"] if end else []
    return [*data_keys(args), *layouts(args.w)[job.layout][1], *stages, f"training.steps={steps}",
            f"training.seq_len={row}", f"training.local_batch_size={rows}", f"training.global_batch_size={rows}",
            f"training.seed={job.seed}", f"optimizer.lr={job.rate or args.rates[0]}", "model.rope_theta=500000.0",
            f"model.max_position_embeddings={args.row}", f"lr_scheduler.warmup_steps={max(steps // 10, 1)}",
            f"checkpoint.interval={steps}", "checkpoint.keep_latest_k=1", "metrics.enable_tensorboard=false",
            f"metrics.log_freq={5 if job.phase == 'speed' else 10}", f"validation.interval={steps}",
            f"validation.tokens={args.row if job.phase == 'speed' else args.validation}", "generation.prompts=[]",
            *args.set]


def seconds_a_step(steps, count, end):
    """By the medians of the logged steps, and of the last `end` of `count` steps apart."""
    tokens = steps[-1]["tokens_seen"] / steps[-1]["step"]
    parts = [[line["tokens_per_second"] for line in steps if (line["step"] > count - end) == late]
             for late in (False, True)]
    shares = [(share, rates) for share, rates in zip((count - end, end), parts) if rates]
    return tokens * sum(share / statistics.median(rates) for share, rates in shares) / sum(share for share, _ in shares)


def steps_of_job(args, job, rows):
    if job.phase != "run":
        return args.rate_steps if job.phase == "rate" else args.speed_steps
    spent = [rows[speed]["seconds_a_step"] for speed in speeds_for(job.layout)]
    return max(int(args.run_seconds / (0.9 * spent[0] + 0.1 * spent[-1])), 10)


def speeds_for(layout):
    """Whose steps a layout's run has: the short run that measures speed says nothing of so few dense steps."""
    return [Job("speed", measured, None, 0) for measured in (layout, *([DENSE] if layout == THEN_DENSE else []))]


def best_rate(rows, layout):
    """The rate of the lowest held-out loss, of the rates that have a line."""
    losses = {job.rate: row["loss"] for job, row in rows.items()
              if job.phase == "rate" and job.layout == RATE_OF.get(layout, layout)}
    return min(losses, key=losses.get, default=None)


def wanted(rows, args, dead):
    """The jobs that can begin now and end in time, best first; one that failed counts as tried."""
    speeds = [Job("speed", layout, None, 0) for layout in reversed(args.layouts)]
    rates = {layout: [Job("rate", layout, rate, 0) for rate in args.rates] for layout in args.layouts
             if layout not in RATE_OF}
    jobs = [*speeds, *(job for of_layout in rates.values() for job in of_layout)]
    over = lambda jobs_given: all(job in rows or job in dead for job in jobs_given)  # noqa: E731
    # The control's last seed comes last: it is what is left out where the time is short.
    order = [(layout, seed) for seed in args.seeds for layout in args.layouts]
    order.sort(key=lambda pair: pair == (DENSE, args.seeds[-1]))
    for layout, seed in order:
        rate = best_rate(rows, layout)
        if rate and all(job in rows for job in speeds_for(layout)) and over(rates.get(RATE_OF.get(layout, layout), [])):
            jobs.append(Job("run", layout, rate, seed))
    left = args.deadline - time.monotonic()
    return [job for job in jobs if job not in rows and args.needed[job.phase] < left]


def asked(args, runs, folder, name, words):
    """The JSON object of a command of `sieve eval`, or None where it fails or takes too long: its log says why."""
    command = [args.sieve, "-q", "eval", *map(str, words), "--checkpoint", str(folder), "--json"]
    command += ["--device", runs.device]
    with open(f"{folder}.{name}.log", "w", encoding="utf-8") as log:
        try:
            done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=log, env=runs.environment,
                                  timeout=args.score_limit, check=True)
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            log.write(f"{error}\n")
            return None
    return json.loads(done.stdout)


def scores_of(args, runs, folder):
    """All scores of a trained run, side by side on its device; one that failed is None."""
    lengths = f"{args.row // 4},{args.row}"
    words = {
        "ppl": ["ppl", "--data", args.heldout, "--context", args.row, "--stride", args.row, "--max-tokens",
                args.validation, "--far", *FAR],
        "needle": ["needle", "--data", args.heldout, "--lengths", lengths, "--depths", "0,25,50,75,100", "--needles",
                   args.needles],
        "ruler": ["ruler", "--tasks", ",".join(TASKS), "--lengths", lengths, "--samples", args.samples]}
    with concurrent.futures.ThreadPoolExecutor(len(words)) as pool:
        answers = dict(zip(words, pool.map(lambda name: asked(args, runs, folder, name, words[name]), words)))
    ppl, needle, ruler = answers.values()
    return {"far": ppl and {str(part["more_than"]): round(part["far"]["loss"], 4) for part in ppl["by_word"]["again"]
                            if part["far"]["num_tokens"]},
            "needles": needle and by_length(needle["methods"][-1]["cells"]),
            "ruler": ruler and by_task(ruler["methods"][-1]["tasks"])}


def by_length(cells):
    """Needles found, their number, and the mean rank of the right number among eleven, by length of the text."""
    by_size = {}
    for cell in cells:
        by_size.setdefault(str(cell["length"]), []).append(cell)
    return {length: [sum(cell["num_found"] for cell in same), sum(cell["num_needles"] for cell in same),
                     round(statistics.mean(cell["mean_rank"] for cell in same), 2)] for length, same in by_size.items()}


def by_task(tasks):
    """Score and mean rank of RULER's tasks, by task and length of the text."""
    return {task["task"]: {str(cell["length"]): [round(cell["score"], 3), round(cell["mean_rank"], 2)]
                           for cell in task["lengths"]} for task in tasks}


def folder_of(args, job):
    return args.out / "runs" / named(*(part for part in job if part is not None))


def run(job, runs, args, rows):
    """The line of one run."""
    began = time.monotonic()
    runs = copy.copy(runs)
    runs.deadline = min(runs.deadline, began + 3 * args.needed[job.phase])
    steps = steps_of_job(args, job, rows)
    folder = folder_of(args, job)
    folder.parent.mkdir(exist_ok=True)
    if folder.exists() and not any(line["step"] == steps for line in validations_of(metrics(folder))):
        shutil.rmtree(folder)
    recipe, keys = layouts(args.w)[job.layout][0], keys_of(args, job, steps)
    lines = trained(folder, recipe, keys, runs, args)
    steps_logged = steps_of(lines)
    end, tokens = dense_end(job.layout, steps), steps_logged[-1]["tokens_seen"]
    if job.phase == "speed":
        steps_logged = [line for line in steps_logged if line["step"] <= steps - end]
    a_step = seconds_a_step(steps_logged[1:], steps, end)
    row = {**job._asdict(), "steps": steps, "tokens": tokens, "seconds_a_step": a_step,
           "seconds": round(a_step * steps, 1), "tokens_per_second": round(tokens / steps / a_step), **scores(lines),
           "memory_gib": round(steps_logged[-1]["memory_bytes"] / 2**30, 2)}
    if job.phase == "run":
        row |= {"curve": curve(steps_logged, a_step), **scores_of(args, runs, folder)}
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    command = " ".join(["sieve train --recipe", recipe, *(f"--set '{key}'" for key in keys)])
    for path in (args.out, args.text.parent):
        command = command.replace(f"{path}/", "")
    return row | {"whole_seconds": round(time.monotonic() - began, 1), **args.facts, "command": command}


def work(args, path, rows):
    """All phases; whether every run has its line."""
    dead = set()
    # What a phase takes with its start, validation and scores: a run that has less time left does not begin.
    args.needed = {"speed": 30, "rate": 20 + args.rate_seconds, "run": 30 + args.run_seconds}
    version = output_of([args.sieve, "--version"])
    args.facts = {"row": args.row, "rate_row": args.rate_row, "w": args.w, "run_seconds": args.run_seconds, "card": device_name(args.devices[0]),
                  "commit": version.rpartition("(")[2].rstrip(")"), "date": time.strftime("%Y-%m-%d")}

    def guarded(job, runs, arguments):
        """`run`, in which every failure becomes `Unfinished`: died.log says why, and
        the job is not tried again in this call."""
        try:
            return run(job, runs, arguments, rows)
        except Exception as error:  # one run that dies costs one line, whatever it died of
            dead.add(job)
            told = pathlib.Path(f"{folder_of(args, job)}.log")
            why = told.read_text(encoding="utf-8")[-400:] if told.exists() else ""
            with open(args.out / "died.log", "a", encoding="utf-8") as log:
                log.write(f"{job}\n{why if isinstance(error, Unfinished) else traceback.format_exc()}\n")
            raise Unfinished from error

    prepare(args, "mha_80m.toml", data_keys(args))
    train(lambda rows: wanted(rows, args, dead), guarded, args, path, rows)
    # Of the runs that are asked for: an earlier call may have had others.
    asked = [job for job in rows if job.phase == "run" and job.layout in args.layouts and job.seed in args.seeds]
    ended, all_runs = len(asked), len(args.layouts) * len(args.seeds)
    print(f"{len(rows)} lines, {ended} of {all_runs} runs; {len(dead)} died")
    for layout in args.layouts:
        rate, tried = best_rate(rows, layout), sorted(args.rates)
        if layout not in RATE_OF and rate in (tried[0], tried[-1]):
            print(f"{layout}: the best rate, {rate:g}, is at the border of those tried")
    return ended == all_runs


def main():
    """Does the phases that have no line yet; exit code 0 where there is a run for each layout and seed."""
    parser = parser_of(__doc__, "layouts.jsonl")
    parser.add_argument("--heldout", type=pathlib.Path, required=True, help="documents that --text does not have")
    parser.add_argument("--tokenizer", type=pathlib.Path, required=True)
    parser.add_argument("--layouts", nargs="+", choices=[*layouts(0)], default=[*layouts(0)])
    parser.add_argument("--row", type=int, default=32768)
    parser.add_argument("--rate-row", type=int, default=8192)
    parser.add_argument("--w", type=int, default=1024, help="keys a query reads in a sparse layer or window")
    parser.add_argument("--rates", type=float, nargs="+", default=[7.5e-4, 1.5e-3, 3e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--run-seconds", type=float, default=125)
    parser.add_argument("--rate-seconds", type=float, default=25, help="what --rate-steps are thought to take")
    parser.add_argument("--rate-steps", type=int, help="as many as fit at 400,000 tokens/s when absent")
    parser.add_argument("--speed-steps", type=int, default=30)
    parser.add_argument("--validation", type=int, default=1 << 20, help="held-out tokens")
    parser.add_argument("--needles", type=int, default=4, help="of each of five depths and two lengths")
    parser.add_argument("--samples", type=int, default=5, help="of each of RULER's tasks and of two lengths")
    parser.add_argument("--score-limit", type=float, default=25, help="seconds after which a score is given up")
    args = parsed(parser)
    args.rate_steps = args.rate_steps or int(args.rate_seconds * 400_000 / args.row)
    args.heldout, args.tokenizer = args.heldout.resolve(), args.tokenizer.resolve()
    path = args.out / "layouts.jsonl"
    rows = {Job(*key): row for key, row in finished(path, Job._fields).items()}
    sys.exit(not work(args, path, rows))


if __name__ == "__main__":
    main()
