"""Makes checkpoints/tiny8k on one GPU, from text to scores: a dense model of 11M parameters that finds needles at 8K.

    python3 lab/experiments/tiny8k/run.py --sieve target/release/sieve --text data/text/train.jsonl --out OUT
    python3 lab/experiments/tiny8k/run.py --take OUT/back     # afterwards: checkpoints/tiny8k of the pieces, with its card

TEXT is that of lab/experiments/text, of which the first 130 MB are read (or one compressed by xz). A few steps measure
this device's speed in rows of 1024 and of 8192; both stages then take the steps that fit in their shares of
--train-seconds, the decay included. OUT/back has what is to be kept: `rows.jsonl` (speed, run, a line a score), the log,
the recipe and the bf16 export as a tar file in pieces of 14 MB. A call that was cut off repeats nothing that it finished.
Needs nothing but Python.
"""

import argparse
import json
import lzma
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "lab/experiments"))

from runs import (append, device_name, json_lines, metrics, sets, steps_of, succeed, table_text,  # noqa: E402
                  validations_of)

HERE = pathlib.Path(__file__).parent
RECIPE = HERE / "tiny8k.toml"
PIECE = 14_000_000  # bytes
SHARES = (0.3, 0.7)  # of the training time: rows of 1024, of 8192
ROUND = 10  # steps of a stage are a multiple
# Selectors of prefill that the card shows: from nearly free to one that never sees the middle of a long text.
METHODS = ["xattention:tau=0.9", "bfla", "flexprefill:gamma=0.9", "a_shape:n_local=896"]
CARD = HERE / "card.md"
ROWS = ROOT / "lab/rows/tiny8k.jsonl"


def parser():
    """The script's arguments: to make the model, or with --take to make the checkpoint of what came back."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--sieve", help="the program")
    arguments.add_argument("--text", type=pathlib.Path)
    arguments.add_argument("--out", type=pathlib.Path)
    arguments.add_argument("--device", default="cuda:0")
    arguments.add_argument("--train-seconds", type=float, default=95)
    arguments.add_argument("--bytes", type=int, default=130_000_000, help="of TEXT")
    arguments.add_argument("--probe-steps", type=int, default=20, help="of each stage, to measure the speed")
    arguments.add_argument("--lengths", default="2048,4096,8192", help="of needles")
    arguments.add_argument("--needles", type=int, default=4, help="at each length and depth")
    arguments.add_argument("--limit", type=float, default=60, help="seconds of one score")
    arguments.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="keys of the recipe")
    arguments.add_argument("--take", type=pathlib.Path, metavar="BACK", help="make checkpoints/tiny8k of OUT/back")
    arguments.add_argument("--to", type=pathlib.Path, default=ROOT / "checkpoints/tiny8k")
    arguments.add_argument("--rows", type=pathlib.Path, default=ROWS, help="where --take puts what was measured")
    return arguments


def texts(given):
    """Files of texts and the tokenizer, once; returns the keys that name them."""
    data = given.out / "data"
    if not (data / "done").exists():
        text = given.text
        if text.suffix == ".xz":
            text = given.out / "text.jsonl"
            with lzma.open(given.text) as packed, open(text, "wb") as plain:
                shutil.copyfileobj(packed, plain)
        succeed([sys.executable, HERE / "texts.py", "--text", text, "--out", data, "--bytes", str(given.bytes)])
        words = [given.sieve, "-q", "tokenizer", "train", "--data", data / "long.jsonl", "--data",
                 data / "needles_short.jsonl", "--vocab-size", "6144", "--sample-bytes", "40000000"]
        succeed([*words, "--out", data / "tokenizer.json"])
        (data / "done").touch()
    name = lambda *files: json.dumps([str(data / f"{file}.jsonl") for file in files])  # noqa: E731
    return [f"data.paths={name('long', 'needles_long', 'recall')}",
            f"stage.1.paths={name('short', 'needles_short', 'recall')}",
            f"validation.paths={name('heldout')}", f'tokenizer.path="{data / "tokenizer.json"}"',
            f'data.cache_dir="{given.out / "cache"}"', *given.set]


def train(given, folder, keys):
    """The metrics of a run of these keys, resumed where it was cut off."""
    words = [given.sieve, "train", "--recipe", RECIPE, "--out", folder, "--device", given.device, *sets(keys)]
    with open(f"{folder}.log", "a", encoding="utf-8") as log:
        resume = ["--resume"] if (folder / "config.toml").exists() else []
        done = subprocess.run([*words, *resume], stdout=log, stderr=log, check=False).returncode
    if done:
        sys.exit(f"train: exit code {done}\n{pathlib.Path(f'{folder}.log').read_text()[-2000:]}")
    return metrics(folder)


def speeds(given, keys):
    """Tokens a second in each stage, the median of a few steps without the first half, which compiles kernels."""
    steps = given.probe_steps
    lines = train(given, given.out / "probe", [
        *keys, f"stage.1.steps={steps}", f"stage.2.steps={steps}", "metrics.log_freq=1", "validation.interval=1000",
        "generation.prompts=[]", "lr_scheduler.warmup_steps=1"])
    by_stage = [[line["tokens_per_second"] for line in steps_of(lines) if begin < line["step"] <= begin + steps // 2]
                for begin in (steps // 2, steps + steps // 2)]
    return [statistics.median(rates) for rates in by_stage], steps_of(lines)


def steps_in(given, keys):
    """Steps of the two stages, as many as fit into their shares of the time; one line of the probe in rows.jsonl."""
    rows = given.out / "back/rows.jsonl"
    if speed_rows := [row for row in json_lines(rows) if row["row"] == "speed"]:
        return speed_rows[-1]["steps"]
    rates, lines = speeds(given, keys)
    tokens = [lines[0]["tokens_seen"], lines[-1]["tokens_seen"] - lines[-2]["tokens_seen"]]
    steps = [max(int(given.train_seconds * share * rate / size) // ROUND, 1) * ROUND
             for share, rate, size in zip(SHARES, rates, tokens)]
    append(rows, {"row": "speed", "card": device_name(given.device), "tokens_per_second": [round(r) for r in rates],
                  "tokens_a_step": tokens, "steps": steps})
    return steps


def score(given, name, words):
    """One line of rows.jsonl from the JSON of a command, or its last words where it failed or took too long."""
    rows = given.out / "back/rows.jsonl"
    if found_of(json_lines(rows), name) is not None:
        return
    began = time.monotonic()
    words = [given.sieve, "-q", "eval", *map(str, words), "--json", "--device", given.device]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=given.limit, check=False)
        # An error and its hint.
        printed, failed = done.stdout, done.stderr.strip().splitlines()[-3:] if done.returncode else None
    except subprocess.TimeoutExpired:
        printed, failed = "", [f"not finished after {given.limit:g} s"]
    row = {"row": "score", "score": name, "command": " ".join(words[2:]),
           "seconds": round(time.monotonic() - began, 1)}
    append(rows, row | ({"failed": failed} if failed is not None else {"found": json.loads(printed)}))


def packed(given, export):
    """The export as a tar file in pieces, and what tells how it came to be."""
    back = given.out / "back"
    shutil.copy(given.out / "run.log", back / "train.log")
    shutil.copy(given.out / "run/config.toml", back / "recipe.toml")
    with tarfile.open(given.out / "export.tar", "w") as tar:
        tar.add(export, "tiny8k")
    for old in back.glob("export.tar.*"):
        old.unlink()
    with open(given.out / "export.tar", "rb") as file:
        for number, piece in enumerate(iter(lambda: file.read(PIECE), b"")):
            (back / f"export.tar.{number:02}").write_bytes(piece)


def make(given):
    """Makes the model, from texts to scores, into OUT/back; what an earlier call trained or scored is not repeated."""
    (given.out / "back").mkdir(parents=True, exist_ok=True)
    given.out = given.out.resolve()
    clock, rows = time.monotonic(), given.out / "back/rows.jsonl"
    keys = texts(given)
    made = time.monotonic() - clock
    first, second = steps_in(given, keys)
    probed = time.monotonic() - clock
    run = given.out / "run"
    lines = train(given, run, [*keys, f"stage.1.steps={first}", f"stage.2.steps={second}"])
    if not any(row["row"] == "run" for row in json_lines(rows)):
        version = subprocess.run([given.sieve, "--version"], capture_output=True, text=True, check=True).stdout.strip()
        append(rows, {
            "row": "run", "program": version, "card": device_name(given.device), "steps": [first, second],
            "tokens": steps_of(lines)[-1]["tokens_seen"], "seconds": {"texts": round(made), "speed": round(probed - made),
                                                  "training": round(time.monotonic() - clock - probed)},
            "curve": [[line["step"], round(line["loss"], 4)] for line in steps_of(lines)[::10]],
            "heldout": [[line["step"], round(line["loss"], 4), round(line["bits_per_byte"], 4)]
                        for line in validations_of(lines)]})
    export = given.out / "export"
    if not export.exists():
        succeed([given.sieve, "-q", "export", "--checkpoint", run, "--out", export, "--dtype", "bf16"])
    packed(given, export)
    chosen = [word for method in METHODS for word in ("--selector", method)]
    grid = ["--lengths", given.lengths, "--depths", "0,25,50,75,100"]
    heldout = given.out / "data/heldout.jsonl"
    score(given, "needles", ["needle", "--checkpoint", export, *grid, "--needles", given.needles, *chosen])
    score(given, "selectors", ["selectors", "--checkpoint", export, "--data", heldout, "--lengths",
                               given.lengths.split(",")[-1], "--windows", 4, *chosen])
    score(given, "needles_in_text",
          ["needle", "--checkpoint", export, *grid, "--needles", given.needles, "--data", heldout])
    score(given, "needles_decoding",
          ["needle", "--checkpoint", export, *grid, "--needles", 1, "--selector", "streamingllm", "--selector", "quest"])
    score(given, "ppl", ["ppl", "--checkpoint", export, "--data", heldout, "--max-tokens", 500_000])
    print(f"{time.monotonic() - clock:.0f} s")
    print("\n\n".join(tables(json_lines(rows))))


def found_of(rows, name):
    """What a score found, or None where it failed each time."""
    return next((row["found"] for row in rows if row.get("score") == name and "found" in row), None)


def named(selector):
    """A selector as METHODS has it, of its name with every setting."""
    name = selector.partition(":")[0]
    return next((method for method in METHODS if method.partition(":")[0] == name), name)


def needle_table(rows):
    """Head and lines of the needles found, by method and length; decode methods were asked for one at each depth."""
    answers = []
    for name in ("needles", "needles_in_text", "needles_decoding"):
        for method in (found_of(rows, name) or {"methods": []})["methods"]:
            sums = {}
            for cell in method["cells"]:
                counts = sums.setdefault(cell["length"], [0, 0])
                counts[0], counts[1] = counts[0] + cell["num_found"], counts[1] + cell["num_needles"]
            selector = method.get("selector")
            label = f"`{named(selector)}`" if selector else "dense"
            where = ", in code and documentation" if name == "needles_in_text" else ""
            if name != "needles_decoding" or selector:
                answers.append((label + where, sums))
    lengths = sorted({length for _, sums in answers for length in sums})
    lines = [[label, *("{} of {}".format(*sums[n]) if n in sums else "" for n in lengths)] for label, sums in answers]
    return ["needles found", *(f"{n:,} tokens" for n in lengths)], lines


def loss_table(rows):
    """Head and lines of density and loss by method."""
    report = found_of(rows, "selectors") or {"selectors": []}
    lines = [[f"`{named(method['selector'])}`", f"{method['density']:.2f}",
              f"{method['loss'] - method['dense_loss']:+.3f}"]
             for method in report["selectors"]]
    return ["method", "pairs read", "loss added, nats"], lines


def tables(rows):
    """Both tables in Markdown."""
    return [table_text(*made) for made in (needle_table(rows), loss_table(rows)) if made[1]]


def take(given):
    """checkpoints/tiny8k from the pieces that came back, with its card; the rows behind it, for lab/docs/selectors.md."""
    kept = (given.take / "rows.jsonl").read_text(encoding="utf-8")
    # Without the folder of the machine that measured: what a command names is below it.
    (folder,) = {path.removesuffix("export") for path in re.findall(r"--checkpoint (\S+)", kept)}
    given.rows.write_text(kept.replace(folder, ""), encoding="utf-8")
    rows = json_lines(given.rows)
    pieces = b"".join(path.read_bytes() for path in sorted(given.take.glob("export.tar.*")))
    whole = given.take / "whole.tar"
    whole.write_bytes(pieces)
    given.to.mkdir(parents=True, exist_ok=True)
    with tarfile.open(whole) as tar:
        for member in tar.getmembers():
            member.name = member.name.partition("/")[2]
            if member.isfile() and not member.name.endswith((".py", "README.md", "sieve_export.json")):
                tar.extract(member, given.to, filter="data")
    whole.unlink()
    run = next(row for row in rows if row["row"] == "run")
    ppl = found_of(rows, "ppl") or {"loss": float("nan"), "bits_per_byte": float("nan")}
    card = CARD.read_text(encoding="utf-8").format(
        tokens=round(run["tokens"] / 1e6), seconds=run["seconds"]["training"], card=run["card"], first=run["steps"][0],
        second=run["steps"][1], loss=ppl["loss"], bits=ppl["bits_per_byte"], tables="\n\n".join(tables(rows)))
    (given.to / "MODEL_CARD.md").write_text(card, encoding="utf-8")
    recipe = RECIPE.read_text(encoding="utf-8").split("steps = 1500")
    first, second = run["steps"]
    text = f"{recipe[0]}steps = {first}{recipe[1]}steps = {second}{recipe[2]}"
    (given.to / "recipe.toml").write_text(text, encoding="utf-8")
    print(f"{given.to}: {sum(path.stat().st_size for path in given.to.iterdir()):,} bytes")


def main():
    """Makes the model, or with --take the checkpoint of its pieces."""
    arguments = parser()
    given = arguments.parse_args()
    if given.take:
        take(given)
    elif given.sieve and given.text and given.out:
        given.sieve = str(pathlib.Path(given.sieve).resolve())
        make(given)
    else:
        arguments.error("--sieve, --text and --out make the model; --take BACK makes the checkpoint of it")


if __name__ == "__main__":
    main()
