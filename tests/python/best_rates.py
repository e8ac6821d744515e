"""Each kind of attention at its own best learning rate, then further seeds there: an 80M model on rows of 8192 tokens.

    python3 tests/python/best_rates.py --sieve target/release/sieve --text data/crates.jsonl --out OUT \\
      --devices cuda:0 cuda:0 cuda:1 cuda:1
    python3 tests/python/best_rates.py --out docs --steps 400 --draw docs/rates.svg

Run from the repository's root. Each kind is trained with --rate-steps steps and seed 0 at each rate of --rates, and at
one further rate while the best one is an edge; then with --steps steps at its best rate with every seed. Text and rows
are those of learning_table.py. OUT/rates.jsonl gets a line for each finished run; runs that have one are not repeated,
so a call that was cut off resumes. A device named twice takes two
runs at a time. docs/rates.jsonl holds the runs of docs/results.md. Needs nothing but Python.
"""

import argparse
import json
import pathlib
import shutil
import statistics
import subprocess
import threading
import time

from learning_table import ROWS, base, metrics, on_devices

KINDS = {
    "dense": "dense",
    "window": "window 1024",
    "window + slope": "window 1024 + slope",
    "DMA": "DMA 1024, slope, r 128",
    "DMA as published": "DMA 1024 as published",
    "NSA": "NSA",
    "InfLLM-V2": "InfLLM-V2",
    "MoBA": "MoBA",
    "MSA": "MSA",
    "MLA": "MLA",
    "window + slope, 1 of 4 dense": "window 1024 + slope, 1 of 4 dense",
    "DMA, 1 of 4 dense": "DMA 1024, slope, r 128, 1 of 4 dense",
}


def finished(out):
    """Runs of OUT/rates.jsonl by kind, rate, seed and steps."""
    path = out / "rates.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {(row["kind"], row["rate"], row["seed"], row["steps"]): row for row in rows}


def tried(rows, kind, arguments):
    """Rate and loss of the kind's short runs, from the lowest rate to the highest."""
    losses = {key[1]: row["loss"] for key, row in rows.items() if key[0] == kind and key[2:] == (0, arguments.rate_steps)}
    return sorted(losses.items())


def best_rate(rows, kind, arguments):
    """The rate of the lowest loss with lower and higher rates beside it, or None where one has to be tried yet, and
    the rates to try."""
    found = tried(rows, kind, arguments)
    missing = [rate for rate in arguments.rates if rate not in dict(found)]
    if missing:
        return None, missing
    best = min(found, key=lambda pair: pair[1])[0]
    if best == found[0][0]:
        return None, [best / 2]
    if best == found[-1][0]:
        return None, [best * 2]
    return best, []


def wanted(rows, arguments):
    """The runs that can begin now: kind, rate, seed, steps."""
    jobs = []
    for kind in arguments.kinds:
        best, rates = best_rate(rows, kind, arguments)
        jobs += [(kind, rate, 0, arguments.rate_steps) for rate in rates]
        jobs += [(kind, best, seed, arguments.steps) for seed in arguments.seeds if best]
    return sorted((job for job in jobs if job not in rows), key=lambda job: (job[3] == arguments.steps, job[2]))


def run(job, runs, arguments, out):
    """The line of one run, or None: at the deadline, or where training failed (its log says why)."""
    kind, rate, seed, steps = job
    folder = out / f"{kind.replace(' ', '-').replace(',', '')}-{rate}-{seed}-{steps}"
    shutil.rmtree(folder, ignore_errors=True)  # cut off before
    recipe, settings = base("8192", arguments, out)
    settings += [*ROWS["8192"][KINDS[kind]], f"optimizer.lr={rate}", f"training.seed={seed}", f"training.steps={steps}",
                 f"checkpoint.interval={steps}", f"validation.interval={steps}", *arguments.set]
    with open(f"{folder}.log", "a", encoding="utf-8") as log:
        command = [arguments.sieve, "train", "--recipe", recipe, "--out", str(folder)]
        if runs.run(command + [part for key in settings for part in ("--set", key)], log, log) != 0:
            return None
    lines = metrics(folder)
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    check = [line for line in lines if line["kind"] == "validation"][-1]
    return {"kind": kind, "rate": rate, "seed": seed, "steps": steps, "loss": round(check["loss"], 4),
            "bits_per_byte": round(check["bits_per_byte"], 4)}


def final(rows, kind, arguments):
    """The kind's best rate, or None, and the losses of its long runs there."""
    best, _ = best_rate(rows, kind, arguments)
    losses = [rows[kind, best, seed, arguments.steps]["loss"] for seed in arguments.seeds
              if (kind, best, seed, arguments.steps) in rows]
    return best, losses


def table(rows, arguments):
    print(f"| attention | loss after {arguments.rate_steps} steps by rate | best rate | loss after {arguments.steps} steps, "
          f"seeds {', '.join(map(str, arguments.seeds))} | mean | spread |\n|---|---|---|---|---|---|")
    for kind in arguments.kinds:
        rates = ", ".join(f"{rate:g}: {loss:.3f}" for rate, loss in tried(rows, kind, arguments))
        best, losses = final(rows, kind, arguments)
        mean, spread = (f"{statistics.mean(losses):.3f}", f"{max(losses) - min(losses):.3f}") if losses else ("", "")
        cells = [kind, rates, f"{best:g}" if best else "", ", ".join(f"{loss:.3f}" for loss in losses), mean, spread]
        print("| " + " | ".join(cells) + " |")


def drawn(rows, arguments):
    """Two panels: loss over rate after the short runs, a line a kind; losses of all seeds after the long ones."""
    colours = ["#1b6ca8", "#7f8c8d", "#e08a1e", "#000000", "#999900", "#2e8b57", "#c0392b", "#7d3c98", "#b03a7a",
               "#f0b070", "#555599", "#40a0a0"]
    lines = {kind: tried(rows, kind, arguments) for kind in arguments.kinds}
    lines = {kind: found for kind, found in lines.items() if found}
    rates = sorted({rate for found in lines.values() for rate, _ in found})
    left, width, height, top, bottom = 60, 330, 330, 34, 46
    parts = []

    def axis(at, losses, title):
        low, high = min(losses), max(losses)
        up = lambda loss: top + (high - loss) / max(high - low, 1e-9) * (height - top - bottom)
        parts.append(f'<text x="{at}" y="18" font-weight="bold">{title}</text>')
        for tick in range(5):
            loss = low + (high - low) * tick / 4
            parts.append(f'<line x1="{at}" x2="{at + width}" y1="{up(loss):.1f}" y2="{up(loss):.1f}" stroke="#ddd"/>')
            parts.append(f'<text x="{at - 6}" y="{up(loss) + 4:.1f}" text-anchor="end">{loss:.2f}</text>')
        return up

    up = axis(left, [loss for found in lines.values() for _, loss in found],
              f"nats after {arguments.rate_steps} steps, by learning rate")
    across = lambda rate: left + 14 + rates.index(rate) * (width - 28) / max(len(rates) - 1, 1)
    for rate in rates:
        parts.append(f'<text x="{across(rate):.1f}" y="{height - bottom + 18}" text-anchor="middle">{rate:g}</text>')
    second = left + width + 260
    ends = {kind: final(rows, kind, arguments)[1] for kind in lines}
    ends = dict(sorted(((kind, found) for kind, found in ends.items() if found), key=lambda pair: statistics.mean(pair[1])))
    for (kind, found), colour in zip(lines.items(), colours):
        points = " ".join(f"{across(rate):.1f},{up(loss):.1f}" for rate, loss in found)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{across(rate):.1f}" cy="{up(loss):.1f}" r="3" fill="{colour}"/>' for rate, loss in found]
        y = top + 10 + 18 * list(lines).index(kind)
        parts.append(f'<line x1="{left + width + 20}" x2="{left + width + 38}" y1="{y}" y2="{y}" stroke="{colour}" '
                     f'stroke-width="3"/><text x="{left + width + 44}" y="{y + 4}">{kind}</text>')
    if ends:
        up = axis(second, [loss for found in ends.values() for loss in found],
                  f"nats after {arguments.steps} steps at the best rate, a dot a seed")
        for number, (kind, found) in enumerate(ends.items()):
            x = second + 20 + number * (width - 40) / max(len(ends) - 1, 1)
            colour = colours[list(lines).index(kind)]
            parts += [f'<circle cx="{x:.1f}" cy="{up(loss):.1f}" r="4" fill="{colour}" fill-opacity="0.7"/>' for loss in found]
    size = f'width="{second + width + 20}" height="{height}" viewBox="0 0 {second + width + 20} {height}"'
    return (f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">\n'
            '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sieve", help="the program; without it nothing is trained")
    parser.add_argument("--text", type=pathlib.Path, help="crates.jsonl")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder of the runs and of rates.jsonl")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--rates", nargs="+", type=float, default=[7.5e-4, 1.5e-3, 3e-3])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rate-steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="for every run")
    parser.add_argument("--seconds", type=float, default=1e6, help="stop after this time; the next call resumes")
    parser.add_argument("--devices", nargs="+", default=["cuda:0"], help="one run at a time each: cuda:0 cuda:1 …, or cpu")
    parser.add_argument("--draw", type=pathlib.Path, help="an SVG of what is finished")
    arguments = parser.parse_args()
    if arguments.sieve and not arguments.text:
        parser.error("--sieve needs --text")
    arguments.deadline = time.monotonic() + arguments.seconds
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    rows, running, failed, lock = finished(out), set(), set(), threading.Lock()

    def work(_, runs):
        while time.monotonic() < arguments.deadline:
            with lock:
                jobs = [job for job in wanted(rows, arguments) if job not in running | failed]
                if not jobs and not running:
                    return
                job = jobs[0] if jobs else None
                running.update(jobs[:1])
            if job is None:  # what another device runs decides what comes next
                time.sleep(0.2)
                continue
            row = run(job, runs, arguments, out)
            with lock:
                running.remove(job)
                print(row or f"{job}: not finished, see its log", flush=True)
                if row is None:
                    failed.add(job)
                    continue
                rows[job] = row
                with open(out / "rates.jsonl", "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")

    if arguments.sieve:
        arguments.text = arguments.text.resolve()
        recipe, settings = base("8192", arguments, out)
        subprocess.run([arguments.sieve, "data", "prepare", "--recipe", recipe]
                       + [part for key in settings + arguments.set for part in ("--set", key)], check=True)
        on_devices(arguments.devices, arguments, out, work)
    table(rows, arguments)
    if arguments.draw:
        arguments.draw.write_text(drawn(rows, arguments), encoding="utf-8")


if __name__ == "__main__":
    main()
