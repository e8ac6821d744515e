"""RULER's families (arXiv:2404.06654) by kind of attention: small models that train on the tasks, asked in 1, 2 and 4
times the trained length.

    python3 lab/experiments/ruler_kinds.py --sieve target/release/sieve --out OUT --devices cuda:0 cuda:0 cuda:1 cuda:1
    python3 lab/experiments/ruler_kinds.py --out OUT --draw OUT/ruler.svg

Run from the repository's root. The text is `sieve data generate`: retrieval (niah_multikey_1, niah_multivalue), tracing
(vt) and aggregation (cwe) in texts of half to the whole trained length, with the tokenizer of checkpoints/tiny; RULER's
fourth family, questions about documents, needs files that are not here, and kv_retrieval takes its place. A run trains
recipes/quickstart.toml's model with one kind of attention that reads 128 keys a query, then `sieve eval ruler` asks
--samples new texts a task and length. OUT/ruler.jsonl gets a line for each finished run; runs that have one are not
repeated, so a call that was cut off resumes. Needs nothing but Python.
"""

import pathlib
import statistics

from learning_table import ROWS, WARMUP
from runs import (chart, evaluated, finished, named, parsed, parser_of, prepare, scores, succeed, table_text,
                  train_missing, trained)

TASKS = ["niah_multikey_1", "niah_multivalue", "vt", "cwe", "kv_retrieval"]
KINDS = [name for name in ROWS["recall"] if name != WARMUP and "periods" not in name]
KEY = ("kind", "trained", "texts", "steps", "seed")
TOKENIZER = pathlib.Path("checkpoints/tiny/tokenizer.json")


def text_of(arguments):
    return arguments.out / f"ruler-{arguments.length}-{arguments.texts}.jsonl"


def generate(arguments):
    """Writes the text to train on, where an earlier call did not."""
    path = text_of(arguments)
    if not path.exists():
        unfinished = path.with_suffix(".part")
        unfinished.unlink(missing_ok=True)
        succeed([arguments.sieve, "data", "generate", "--tasks", ",".join(TASKS), "--tokenizer", str(TOKENIZER),
                 "--min-length", str(arguments.length // 2), "--max-length", str(arguments.length - 1),
                 "--samples", str(arguments.texts), "--out", str(unfinished)])
        unfinished.rename(path)


def settings(kind, seed, arguments):
    """Keys of one run: 16,384 tokens a step."""
    length = arguments.length
    return [
        f'data.paths=["{text_of(arguments)}"]', "data.format=jsonl", "data.max_bytes=1_000_000_000",
        f'data.cache_dir="{text_of(arguments).with_suffix(".tokens")}"',
        f'tokenizer.path="{TOKENIZER.resolve()}"', 'model.layer_types=["sparse"]',
        f"model.max_position_embeddings={4 * length}", f"training.seq_len={length}",
        f"training.local_batch_size={max(16384 // length, 1)}", f"training.steps={arguments.steps}",
        f"training.seed={seed}", "optimizer.lr=2e-3", f"lr_scheduler.warmup_steps={max(arguments.steps // 40, 1)}",
        f"validation.interval={arguments.steps}", f"checkpoint.interval={max(arguments.steps // 2, 1)}",
        *ROWS["recall"][kind], *arguments.set]


def run(job, runs, arguments):
    """The line of one run."""
    kind, length, texts, steps, seed = job
    folder = arguments.out / named(*job)
    lines = trained(folder, "recipes/quickstart.toml", settings(kind, seed, arguments), runs, arguments)
    words = ["ruler", "--tasks", ",".join(TASKS), "--lengths", ",".join(str(times * length) for times in (1, 2, 4)),
             "--samples", str(arguments.samples)]
    report = evaluated(folder, words, runs, arguments)
    numbers = lambda cell: [cell["length"], round(100 * cell["score"], 1), round(cell["mean_rank"], 2)]
    of_tasks = {task["task"]: list(map(numbers, task["lengths"])) for task in report["methods"][0]["tasks"]}
    return {**dict(zip(KEY, job)), "loss": scores(lines)["loss"], "scores": of_tasks}


def of_task(rows, kind, task, which):
    """Numbers of a task by length, a value a seed: the score in % (`which` 1) or the mean rank of the answer (2)."""
    by_length = {}
    for key, row in sorted(rows.items(), key=lambda pair: pair[0][-1]):
        for cell in row["scores"][task] if key[0] == kind else []:
            by_length.setdefault(cell[0], []).append(cell[which])
    return by_length


def print_tables(rows, arguments):
    """Prints a table a task: loss, score and mean rank of the answer among eleven by length, all means over seeds."""
    lengths = [times * arguments.length for times in (1, 2, 4)]
    head = ["attention", "loss", *(f"{length}: %" for length in lengths), *(f"{length}: rank" for length in lengths)]
    for task in TASKS:
        lines = []
        for kind in arguments.kinds:
            losses = [row["loss"] for key, row in rows.items() if key[0] == kind]
            if losses:
                cells = [f"{statistics.mean(values):.1f}" for which in (1, 2)
                         for values in of_task(rows, kind, task, which).values()]
                lines.append([kind, f"{statistics.mean(losses):.3f}", *cells])
        print(f"{task}\n\n{table_text(head, lines)}\n")


def drawn(rows, arguments):
    """A panel a task: score over length, a line a kind, a dot a seed."""
    lines = lambda task: {kind: list(of_task(rows, kind, task, 1).items()) for kind in arguments.kinds}
    lengths = [times * arguments.length for times in (1, 2, 4)]
    return chart([(f"{task}: score in %", lines(task), lengths, "tokens", "{:.0f}") for task in TASKS],
                 [kind for kind in arguments.kinds if any(key[0] == kind for key in rows)])


def main():
    """Makes the text and trains what has no line yet where --sieve is given; prints
    the table of these lengths, and draws it."""
    parser = parser_of(__doc__, "ruler.jsonl", reads_text=False)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=6000, help="of 16,384 tokens")
    parser.add_argument("--texts", type=int, default=60_000, help="samples to train on")
    parser.add_argument("--samples", type=int, default=40, help="asked of each task and length")
    arguments = parsed(parser)
    if arguments.samples < 1:  # refused here, since it is used after the training alone
        parser.error(f"--samples {arguments.samples}: ask at least one")
    path = arguments.out / "ruler.jsonl"
    rows, same = finished(path, KEY), (arguments.length, arguments.texts, arguments.steps)
    if arguments.sieve:
        generate(arguments)
        prepare(arguments, "recipes/quickstart.toml", settings(arguments.kinds[0], 0, arguments))
        jobs = [(kind, *same, seed) for seed in arguments.seeds for kind in arguments.kinds]
        train_missing(jobs, run, arguments, path, rows)
    rows = {key: row for key, row in rows.items() if key[1:-1] == same}
    if not rows:
        parser.error(f"{path} has no run of these --length, --texts and --steps: {', '.join(map(str, same))}")
    print_tables(rows, arguments)
    if arguments.draw:
        arguments.draw.write_text(drawn(rows, arguments), encoding="utf-8")


if __name__ == "__main__":
    main()
