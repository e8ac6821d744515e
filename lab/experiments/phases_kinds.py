"""Does finding a needle depend on its position in a block? Small models of each kind, trained on facts that are said again.

    python3 lab/experiments/phases_kinds.py --sieve target/release/sieve --out OUT --devices cuda:0 cuda:0 cuda:1 cuda:1
    python3 lab/experiments/phases_kinds.py --out OUT

Run from the repository's root. A run trains recipes/quickstart.toml's model in rows of 1024 tokens with one kind of
attention that reads 128 keys a query (learning_table.py's set "recall"), on its text; the kinds that choose read 8 blocks
of 16. Then `sieve eval needle --phases 16` asks each of --needles needles at all 16 positions modulo a block. Dense
attention and windows, which have no blocks, are the controls. OUT/phases.jsonl gets a line for each finished run; runs
that have one are not repeated. Without --sieve the table of the lines is printed, and --draw FILE.svg draws them by
phase. Needs nothing but Python.
"""

import subprocess

from learning_table import ROWS, base, restated_numbers
from runs import (chart, device_name, evaluated, finished, named, parsed, parser_of, prepare, scores, table_text, train_missing,
                  trained)

KINDS = ["dense", "InfLLM-V2", "MoBA", "MSA", "NSA", "DMA 128, slope, r 32", "window 128"]
# Whose blocks begin elsewhere in each second layer: does InfLLM-V2 keep its gap?
MORE = ["InfLLM-V2, blocks of 16 and 24 by turns"]
KEY = ("kind", "steps", "length", "needles", "phases", "seed")


def settings(kind, seed, arguments):
    """The recipe and the keys of a run: 16,384 tokens a step."""
    recipe, shared = base("recall", arguments)
    return recipe, [*shared, f"training.seed={seed}", *ROWS["recall"][kind], *arguments.set]


def run(job, runs, arguments):
    """The line of one run."""
    kind, steps, length, needles, phases, seed = job
    folder = arguments.out / named(kind, steps, length, seed)
    recipe, keys = settings(kind, seed, arguments)
    lines = trained(folder, recipe, keys, runs, arguments)
    words = ["needle", "--phases", phases, "--lengths", length, "--needles", needles]
    method = evaluated(folder, words, runs, arguments, f"phases-{phases}-{needles}")["methods"][0]
    version = subprocess.run([arguments.sieve, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    return {**dict(zip(KEY, job)), "loss": scores(lines)["loss"], "program": version, "card": device_name(runs.device),
            "found": gap(method["found"]), "log_likelihood": gap(method["log_likelihood"])}


def gap(score):
    """A score by phase: what is kept of it."""
    return {**{name: score[name] for name in ("best", "worst", "gap", "gap_interval", "p_gap", "wave", "p_wave")},
            "means": [round(phase["mean"], 4) for phase in score["phases"]]}


def print_table(rows):
    """Prints a line a run: found at the best and the worst phase, the gap with its interval and its chance; the same of the
    log-likelihood."""
    lines = []
    for key, row in sorted(rows.items(), key=lambda pair: ([*KINDS, *MORE].index(pair[0][0]), pair[0][-1])):
        found, likelihood = row["found"], row["log_likelihood"]
        interval = " to ".join(f"{100 * end:.0f}" for end in found["gap_interval"] or [])
        high, low = max(found["means"]), min(found["means"])
        lines.append([key[0], str(key[-1]), f"{row['loss']:.3f}", f"{100 * high:.0f} at {found['best']}",
                      f"{100 * low:.0f} at {found['worst']}", f"{100 * found['gap']:.0f} ({interval})",
                      f"{found['p_gap']:.3f}", f"{likelihood['gap']:.3f}", f"{likelihood['p_gap']:.3f}"])
    head = ["attention", "seed", "loss", "found, %", "worst", "gap", "p", "log-likelihood's gap", "p"]
    print(table_text(head, lines))


def drawn(rows):
    """A panel for the needles found and one for the log-likelihood, over the phase: a line a kind, a dot a seed."""
    kinds = [kind for kind in [*KINDS, *MORE] if any(key[0] == kind for key in rows)]

    def series(score, factor):
        of_kind = {kind: [row[score]["means"] for key, row in rows.items() if key[0] == kind] for kind in kinds}
        return {kind: [(phase, [factor * mean for mean in means]) for phase, means in enumerate(zip(*of_seeds))]
                for kind, of_seeds in of_kind.items()}

    return chart([("found in %", series("found", 100), "linear", "phase", "{:.0f}"),
                  ("log-likelihood, nats a token", series("log_likelihood", 1), "linear", "phase", "{:.2f}")], kinds)


def main():
    """Trains and asks what has no line yet where --sieve is given; prints the table of these steps and needles."""
    parser = parser_of(__doc__, "phases.jsonl", reads_text=False)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=[*KINDS, *MORE])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=2400, help="2.5 times as many are trained, as in learning_table.py")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row, and of a question's text")
    parser.add_argument("--needles", type=int, default=24)
    parser.add_argument("--phases", type=int, default=16)
    arguments = parsed(parser)
    # Refused here, since they are used after the training alone.
    if arguments.needles < 1 or arguments.phases < 2:
        parser.error(f"--needles {arguments.needles} --phases {arguments.phases}: ask at least one needle at two phases")
    arguments.recall_length, arguments.needle_lengths = arguments.length, [arguments.length + 64]
    path = arguments.out / "phases.jsonl"
    rows, same = finished(path, KEY), (arguments.steps, arguments.length, arguments.needles, arguments.phases)
    if arguments.sieve:
        text = arguments.out / f"facts-{arguments.length}.jsonl"
        if not text.exists():
            restated_numbers(text, arguments.length)
        prepare(arguments, *settings(arguments.kinds[0], 0, arguments))
        jobs = [(kind, *same, seed) for seed in arguments.seeds for kind in arguments.kinds]
        train_missing(jobs, run, arguments, path, rows)
    rows = {key: row for key, row in rows.items() if key[1:-1] == same}
    if not rows:
        parser.error(f"{path} has no run of these --steps, --length, --needles and --phases: {', '.join(map(str, same))}")
    print_table(rows)
    if arguments.draw:
        arguments.draw.write_text(drawn(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
