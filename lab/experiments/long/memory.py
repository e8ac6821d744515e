"""Memory by kind of attention and length: what a training step of one row and the cache of one text take.

    python3 lab/experiments/long/memory.py plan target/release/sieve > lab/experiments/long/memory.jsonl
    python3 lab/experiments/long/memory.py measure SIEVE TEXT.jsonl OUT >> lab/experiments/long/memory.jsonl   150 s on one GPU
    python3 lab/experiments/long/memory.py measure SIEVE TEXT.jsonl OUT cuda:0 msa …     these kinds alone
    python3 lab/experiments/long/memory.py draw lab/docs/long_memory.svg

The models are those of the recipes of 80M, a row a step, on one H200; nothing is recomputed. `plan` asks `sieve plan`.
`measure` takes two steps of each and notes the most memory that a step held; one that fails gets its words. The dense
model of long_80m.jsonl is drawn too: it was measured on four GPUs, which share moments.
"""

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / part) for part in ("lab/experiments", "tests/python")]

import kinds as recipes_of_kinds  # noqa: E402
from runs import chart, device_name, json_lines, sets  # noqa: E402

HERE = pathlib.Path(__file__).parent
# Each has a recipe of 80M, and kernels for a GPU.
KINDS = sorted(set(recipes_of_kinds.names()) - {"cowa"})
LENGTHS = [2048, 8192, 32768, 65536, 131072]
SHOWN = [8192, 65536, 131072]  # in the table
MEASURED = [32768, 131072]
LIMIT = 40  # seconds of one measurement
GIB, MIB = 2**30, 2**20


def keys(length):
    """One row of this length a step."""
    return [f"training.seq_len={length}", "training.local_batch_size=1", "training.global_batch_size=1",
            f"model.max_position_embeddings={length}", "activation_checkpoint.mode=none"]


def plan(sieve):
    """A row a kind and length: bytes of a training step, of its activations and of a text's cache, by `sieve plan`."""
    for kind in KINDS:
        for length in LENGTHS:
            words = [sieve, "-q", "plan", "--recipe", f"{kind}_80m", "--gpu", "h200", *sets(keys(length)), "--json"]
            planned = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
            yield {"row": "planned", "kind": kind, "length": length, "bytes": planned["memory"]["total_bytes"],
                   "activation_bytes": planned["memory"]["activation_bytes"],
                   "cache_bytes": planned["cache"]["bytes_at_seq_len"]}


def two_steps(kind, sieve):
    """The keys for a run of two steps: one of each stage where the recipe has stages (two of them)."""
    stages = recipes_of_kinds.recipe(f"{kind}_80m", sieve).get("stage", [])
    return ["training.steps=2", *(f"stage.{number}.steps=1" for number in range(1, len(stages) + 1))]


def measure(sieve, text, out, device="cuda:0", kinds=KINDS, lengths=MEASURED, more=()):
    """A row a kind and length: the most bytes in use in two training steps, or why they
    failed. `more`: further keys of the recipe."""
    for kind in kinds:
        for length in lengths:
            folder = pathlib.Path(out) / f"{kind}-{length}"
            # The tiny model's tokenizer: memory hangs on the vocabulary's size alone, which the recipe has.
            words = [*keys(length), *two_steps(kind, sieve), "lr_scheduler.warmup_steps=1", "metrics.log_freq=1",
                     "validation.interval=1000", f"validation.tokens={length}", f'data.paths=["{text}"]',
                     f'data.cache_dir="{out}/cache"',
                     f'tokenizer.path="{ROOT / "checkpoints/tiny/tokenizer.json"}"', *more]
            row = {"row": "measured", "kind": kind, "length": length, "card": device_name(device)}
            try:
                command = [sieve, "-q", "train", "--recipe", f"{kind}_80m", "--out", str(folder), "--device", device]
                done = subprocess.run([*command, *sets(words)], capture_output=True, text=True, timeout=LIMIT,
                                      check=False)
                failed = done.stderr.strip().splitlines()[-3:] if done.returncode else None
            except subprocess.TimeoutExpired:
                failed = [f"not finished after {LIMIT} s"]
            lines = json_lines(folder / "metrics.jsonl")
            peaks = [line["in_use_bytes"] for line in lines if line["kind"] == "memory"]
            yield row | ({"bytes": max(peaks)} if peaks else {"failed": failed or ["no peak was reported"]})


def stored():
    return json_lines(HERE / "memory.jsonl")


def measured():
    """Most memory by kind and length where it was measured; the long model's by the rows of its last two stages."""
    most = {(row["kind"], row["length"]): row["bytes"] for row in stored()
            if row["row"] == "measured" and "bytes" in row}
    peaks = [row["in_use_bytes"] for row in json_lines(HERE / "long_80m.jsonl") if row["kind"] == "memory"]
    return {("mha", length): peak for length, peak in zip(MEASURED, peaks[1:])} | most


def table():
    """Head and lines: planned and measured GiB of a step, MiB of a cache."""
    planned = {(row["kind"], row["length"]): row for row in stored() if row["row"] == "planned"}
    most = measured()
    head = ["kind", *(f"a step of {length:,} tokens, GiB" for length in SHOWN),
            f"measured, {MEASURED[-1]:,}", *(f"cache of {length:,}, MiB" for length in (SHOWN[0], SHOWN[-1]))]
    lines = []
    for kind in KINDS:
        of = [f"{planned[kind, length]['bytes'] / GIB:.1f}" for length in SHOWN]
        peak = most.get((kind, MEASURED[-1]))
        caches = [f"{planned[kind, length]['cache_bytes'] / MIB:.0f}" for length in (SHOWN[0], SHOWN[-1])]
        lines.append([f"`{kind}`", *of, f"{peak / GIB:.1f}" if peak else "", *caches])
    return head, lines


def draw(path):
    """Writes the picture: planned memory of a step and of a cache over the
    length, a line a kind, and the measured steps."""
    planned = [row for row in stored() if row["row"] == "planned"]
    of = lambda value: {  # noqa: E731
        kind: [(row["length"] / 1024, [value(row)]) for row in planned if row["kind"] == kind] for kind in KINDS}
    most = measured()
    dots = [(length / 1024, [size / GIB for (_, at), size in most.items() if at == length]) for length in MEASURED]
    axis = ("linear", "thousands (1024) of tokens", "{:.0f}")
    steps = of(lambda row: row["bytes"] / GIB) | {"measured": [dot for dot in dots if dot[1]]}
    panels = [("a training step of one row, GiB", steps, *axis),
              ("the cache of one text, MiB", of(lambda row: row["cache_bytes"] / MIB), *axis)]
    pathlib.Path(path).write_text(chart(panels, [*KINDS, "measured"]), encoding="utf-8")


def main():
    """Prints the rows of `plan` or `measure` as they come, or draws the stored ones."""
    match sys.argv[1:]:
        case ["plan", sieve]:
            rows = plan(sieve)
        case ["measure", sieve, text, out, device, *kinds] if set(kinds) <= set(KINDS):
            rows = measure(sieve, text, out, device, kinds or KINDS)
        case ["measure", sieve, text, out]:
            rows = measure(sieve, text, out)
        case ["draw", path]:
            return draw(path)
        case _:
            sys.exit(__doc__)
    for row in rows:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
