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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sieve", required=True)
    parser.add_argument("--run", required=True, type=pathlib.Path, help="folder of a run with several checkpoints")
    parser.add_argument("--kind", default="64:4", help="LENGTH:PAIRS")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--draw", type=pathlib.Path)
    arguments = parser.parse_args()
    steps = saved_steps(arguments.run)
    if not steps:
        parser.error(f"--run {arguments.run}: no checkpoint in it")
    answers, values, kept, lines = {"right answers": []}, {"among all keys": []}, {}, []
    for step in steps:
        path = arguments.run / f"checkpoint/step-{step}"
        words = ["--checkpoint", str(path), "--kinds", arguments.kind, "--samples", "200", "--json"]
        of_kind = json.loads(output_of([arguments.sieve, "eval", "mqar", *words, "--device", arguments.device]))["kinds"][0]
        if not of_kind["reads"]:
            parser.error(f"--run {arguments.run}: no layer of {path.name} chooses keys")
        answers["right answers"].append((step, [100 * of_kind["accuracy"]]))
        cells = []
        for read in of_kind["reads"]:
            layer, own, among = f"layer {read['layer']}", 100 * read["answers"], 100 * read["values"]
            answers.setdefault(layer, []).append((step, [own]))
            values.setdefault(layer, []).append((step, [among]))
            cells.append(f"{layer}: {own:.0f} %; {among:.1f} %")
        values["among all keys"].append((step, [100 * of_kind["reads"][0]["values_of_all"]]))
        lines.append([f"{step}", f"{100 * of_kind['accuracy']:.1f} %", " · ".join(cells)])
    print(table_text(["step", "right answers", "layer: own value kept; values among kept keys"], lines))
    logged = [line for line in steps_of(metrics(arguments.run)) if line["attention"]]
    for key, name in (("beyond_window", "out of a window's sight"), ("never_active", "seen by no query")):
        size = max(len(logged) // 30, 1)
        parts = [logged[at:at + size] for at in range(0, len(logged), size)]
        kept[name] = [(statistics.mean(line["step"] for line in part),
                       [100 * statistics.mean(line["attention"][key] for line in part)]) for part in parts]
    if arguments.draw:
        panels = [("questions answered; own value kept, %", answers, "linear", "steps"),
                  ("values among the keys kept, %", values, "linear", "steps"),
                  ("keys, %", kept, "linear", "steps")]
        names = list(dict.fromkeys([*answers, *values, *kept]))
        arguments.draw.write_text(chart(panels, names), encoding="utf-8")


if __name__ == "__main__":
    main()
