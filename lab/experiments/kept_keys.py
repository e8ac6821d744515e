"""What DMA keeps while it learns MQAR: answers, and the values that their questions read, over the steps of one run.

    sieve train --recipe mqar_dma.toml --out RUN --set checkpoint.interval=200 --set checkpoint.keep_latest_k=0
    python3 lab/experiments/kept_keys.py --sieve sieve --run RUN --draw lab/docs/kept_keys.svg

Prints a table and draws three panels: right answers and the share of questions whose own value each layer keeps; the
share of values among the kept keys, beside their share of all keys; and from metrics.jsonl the share of kept keys out of
a window's sight and of keys that no query sees. Needs nothing but Python.
"""

import argparse
import json
import pathlib
import statistics

from runs import chart, metrics, output_of, saved_steps, steps_of, table_text


PARTS = 30  # points of the third panel


def parser():
    """The script's arguments; --kind is that of MQAR's samples, tokens and pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sieve", required=True)
    parser.add_argument("--run", required=True, type=pathlib.Path, help="folder of a run with several checkpoints")
    parser.add_argument("--kind", default="64:4", help="LENGTH:PAIRS")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--draw", type=pathlib.Path)
    return parser


def answered(arguments, step):
    """What `sieve eval mqar` says of the checkpoint at a step: accuracy, and for each layer what its kept keys hold."""
    path = arguments.run / f"checkpoint/step-{step}"
    words = ["--checkpoint", str(path), "--kinds", arguments.kind, "--samples", "200", "--json"]
    report = json.loads(output_of([arguments.sieve, "eval", "mqar", *words, "--device", arguments.device]))["kinds"][0]
    if not report["reads"]:
        parser().error(f"--run {arguments.run}: no layer of {path.name} chooses keys")
    return report


def layers_of(report):
    """Of each layer: the share of questions whose own value it keeps, and of values among the kept keys, in percent."""
    return {f"layer {read['layer']}": (100 * read["answers"], 100 * read["values"]) for read in report["reads"]}


def table(reports):
    """Head and lines: right answers and each layer's two shares, by step."""
    lines = []
    for step, report in reports.items():
        cells = [f"{layer}: {own:.0f} %; {among:.1f} %" for layer, (own, among) in layers_of(report).items()]
        lines.append([f"{step}", f"{100 * report['accuracy']:.1f} %", " · ".join(cells)])
    return ["step", "right answers", "layer: own value kept; values among kept keys"], lines


def answers_and_values(reports):
    """Two panels of lines over steps: right answers with own values kept, and values among kept and all keys."""
    answers, values = {"right answers": []}, {"among all keys": []}
    for step, report in reports.items():
        answers["right answers"].append((step, [100 * report["accuracy"]]))
        for layer, (own, among) in layers_of(report).items():
            answers.setdefault(layer, []).append((step, [own]))
            values.setdefault(layer, []).append((step, [among]))
        values["among all keys"].append((step, [100 * report["reads"][0]["values_of_all"]]))
    return answers, values


def kept_keys(run):
    """The third panel: from metrics.jsonl the share of kept keys behind a window and of keys no query sees, as means of
    neighbouring steps."""
    logged, lines = [line for line in steps_of(metrics(run)) if line["attention"]], {}
    for key, name in (("beyond_window", "out of a window's sight"), ("never_active", "seen by no query")):
        size = max(len(logged) // PARTS, 1)
        parts = [logged[at:at + size] for at in range(0, len(logged), size)]
        lines[name] = [(statistics.mean(line["step"] for line in part),
                        [100 * statistics.mean(line["attention"][key] for line in part)]) for part in parts]
    return lines


def picture(reports, run):
    """The three panels as SVG."""
    answers, values = answers_and_values(reports)
    kept = kept_keys(run)
    panels = [("questions answered; own value kept, %", answers, "linear", "steps"),
              ("values among the keys kept, %", values, "linear", "steps"),
              ("keys, %", kept, "linear", "steps")]
    return chart(panels, list(dict.fromkeys([*answers, *values, *kept])))


def main():
    """Asks every checkpoint of the run, prints what they answered and draws it."""
    arguments = parser().parse_args()
    steps = saved_steps(arguments.run)
    if not steps:
        parser().error(f"--run {arguments.run}: no checkpoint in it")
    reports = {step: answered(arguments, step) for step in steps}
    print(table_text(*table(reports)))
    if arguments.draw:
        arguments.draw.write_text(picture(reports, arguments.run), encoding="utf-8")


if __name__ == "__main__":
    main()
