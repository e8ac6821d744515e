"""Table 4 of the DMA paper (arXiv:2508.02124) in small, with seeds: each kind's shipped recipe with its own decay over
a tenth of its steps, at any size, in pieces of ten minutes.

    python3 lab/experiments/table4/race.py --sieve target/release/sieve --text data/text --out OUT --size 80m \\
      --kinds mha swa mla nsa dma_paper --seeds 0 1 2 --steps 1350 --devices cuda:0 cuda:1 --seconds 540
    python3 lab/experiments/table4/race.py --sieve target/release/sieve --text data/text --out OUT --try --devices cuda:0
    python3 lab/experiments/table4/race.py --sieve target/release/sieve --out OUT --plan h100
    python3 lab/experiments/table4/race.py --sieve target/release/sieve --out OUT --tiny

Seed 0 of all kinds runs first, then seed 1, then seed 2, one run at a time on each device. The same call again goes on
where the last one stopped: at --seconds a training writes a checkpoint, and it resumes from it. A run that was killed
resumes from a checkpoint that is some two minutes of training old at most. KIND/kv6 is a kind with six KV heads, so
that DMA has a mask for each of its query heads, as in the paper's listing: `--kinds dma_paper/kv6 mha/kv6 --seeds 0`.
--try is 50 steps of 1.7B in MHA, SWA, NSA and DMA, half of them in each of the recipe's two row lengths, in steps of
32,768 tokens, without scores: held-out loss, tokens a second, memory. --tiny tries everything on a CPU in a minute,
with the pages of docs/ as text. --plan prints the minutes of the runs that have no line yet, on a GPU that need not be
there.

TEXT is the text of lab/experiments/text; its checksums are compared first. A seed decides the weights and the order of the
rows, so with one seed all kinds read the same rows in the same order. A finished run is scored on its device: `eval
ppl` of the held-out text, needles in held-out text and in made-up prose, RULER's tasks. OUT/table4.jsonl then gets its
line, behind the stored lines of lab/rows/table4.jsonl; what has a line is not trained again. A line is known by
size, kind, seed and steps, so runs with --set belong into an OUT of their own. Of each kind's seed 0 the bf16 weights
are kept: OUT/weights/NAME.tar.xz.00, .01 … of at most 16 MiB, and NAME.sha256. Needs nothing but Python.

On a machine that gives back eight files of at most 16 MiB a call, 64 MiB in all, --back FOLDER takes the lines, all
logs in one archive, and weights that no earlier call took. Without --sieve it does nothing else, while another call
trains.
"""

# How it runs on a bare machine of two or four GPUs, to which 64 MiB travel a call with the working tree among them, of
# which this needs 5 MB: `git sparse-checkout set lab recipes tests/python crates/sieve-core` leaves the others at home for a while.
#
#   bzip3 -e -c -b 64 -j 2 data/text/train.jsonl | split -b 54M -d - .carry/train.jsonl.bz3.     # 269 MB, once, here
#   strip -o .carry/sieve target/release/sieve && xz -T2 .carry/sieve      # 90 MB are 17 then
#   cp $(command -v bzip3) data/text/{heldout.jsonl,tokenizer.json} .carry/
#
# 1. Carry a piece a call: `mkdir -p /tmp/text && mv .carry/train.jsonl.bz3.* /tmp/text`. /tmp stays between the calls of
#    one machine. Last come the program, bzip3, the held-out text and the tokenizer:
#      cd .carry; xz -dc sieve.xz > /tmp/sieve; mv bzip3 /tmp; mv heldout.jsonl tokenizer.json /tmp/text
#      chmod +x /tmp/sieve /tmp/bzip3
#      export CUDA_PATH=/usr/local/cuda LD_LIBRARY_PATH=/usr/local/cuda/lib64 BZIP3=/tmp/bzip3
# 2. setsid nohup python3 lab/experiments/table4/race.py --sieve /tmp/sieve --text /tmp/text \
#      --out /tmp/race --devices cuda:0 cuda:1 cuda:2 cuda:3 > /tmp/race.log 2>&1 &
#    trains on while further calls take away what is finished:
#      sleep 500; tail -3 /tmp/race.log; python3 lab/experiments/table4/race.py --out /tmp/race --back "$OUT"
#    Where processes end with their call, each call is the command of step 2 in the foreground, with `--seconds 540
#    --back "$OUT"`: a training that is cut off goes on from its checkpoint in the next call.
# 3. Here: cp BACK/table4.jsonl lab/rows && python3 lab/experiments/table4/table.py --draw lab/docs/table4_race.svg
#    The weights: sha256sum -c NAME.sha256 && cat NAME.tar.xz.* | tar -xJ
#
# On H200s a run of 1,350 steps took 5.2 (mha, swa), 5.6 (dma_paper) and 7.5 (nsa) minutes, scores with five needles and
# samples 0.5 to 1 more, a call of 60 MB seven seconds. Two calls must not be 30 seconds apart.
# The text takes 4 GB of disk, a checkpoint of 80M 1.5 GB, one of 1.7B 18 GB.

import collections
import concurrent.futures
import hashlib
import json
import lzma
import math
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / part) for part in ("lab/experiments", "lab/experiments/text", "tests/python")]

import make_text  # noqa: E402
from kinds import recipe as read_recipe  # noqa: E402
from layouts.layouts import by_length, by_task  # noqa: E402
from runs import (Unfinished, curve, device_name, evaluated, finished, metrics, named, output_of, parsed,  # noqa: E402
                  parser_of, prepare, sets, steps_of, train_missing, trained, validations_of)
from table4 import table  # noqa: E402

Job = collections.namedtuple("Job", table.KEY)
KINDS = ["mha", "swa", "mla", "nsa", "dma_paper"]
TRIED = ["mha", "swa", "nsa", "dma_paper"]
TRY_STEPS, TRY_TOKENS = 50, 32_768  # steps of --try, and tokens of each
CHECKPOINT_SECONDS = 120  # of training between two checkpoints, by the plan for the slower card
VALIDATION_STEPS = 250  # between two validations, so that the long runs' at 1,000 and 2,000 steps have their like here
WARMUP_SHARE = 5  # a warm-up that would take more than a third of the steps takes one in this many
TASKS, DEPTHS = "niah_single_1,niah_single_2,vt,passkey,induce,copy", "0,25,50,75,100"
CHUNK = 16_000_000  # bytes of an export, packed alone: a piece stays below 16 MiB whatever it holds
MOST_FILES, MOST_BYTES = 8, 64 << 20  # that a call gives back
# The shape of --tiny, and what kinds need besides.
TINY = ["model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=2", "model.head_dim=16",
        "model.vocab_size=4096", "model.max_position_embeddings=1024", "training.seq_len=1024", "metrics.log_freq=1",
        "training.local_batch_size=1", "training.global_batch_size=2", "validation.tokens=4096"]
TINY_OF = {"mla": ["attention.kv_lora_rank=16", "attention.qk_rope_head_dim=8"], "swa": ["attention.sliding_window=64"],
           "dma": ["attention.keep_window_size=64"],
           "nsa": ["attention.compress_hidden_size=16", "attention.num_selected_blocks=3", "attention.window_size=64"]}


def parts_of(kind):
    """Of "dma_paper/kv6" the recipe's kind, its form and the KV heads: "dma", "_paper", "6"."""
    parts = re.fullmatch(r"(\w+?)(_paper)?(?:/kv(\d+))?", kind)
    return (parts[1], parts[2] or "", parts[3]) if parts else (kind, "", None)


def recipe_of(job):
    """The recipe's file."""
    kind, form, _ = parts_of(job.kind)
    return f"{kind}_{job.size}{form}.toml"


def recipe_text(args, job):
    """The recipe as TOML's tables; the program prints those without a file."""
    return read_recipe(recipe_of(job).removesuffix(".toml"), args.sieve)


def steps_keys(args, job, recipe):
    """Keys of the steps, over the recipe's stages by their shares where it has any, and of a --try."""
    stages = recipe.get("stage", [])
    if not stages:
        return [f"training.steps={job.steps}"]
    whole = sum(stage["steps"] for stage in stages)
    shares = [1 / len(stages) if args.tries else stage["steps"] / whole for stage in stages]
    counts = [max(round(job.steps * share), 1) for share in shares]
    counts[0] += job.steps - sum(counts)
    keys = [f"stage.{number}.steps={count}" for number, count in enumerate(counts, 1)]
    if args.tries:
        rows = [TRY_TOKENS // stage.get("seq_len", recipe["training"]["seq_len"]) for stage in stages]
        keys += [f"stage.{number}.global_batch_size={count}" for number, count in enumerate(rows, 1)]
        keys += [f"training.global_batch_size={rows[0]}"]
    return keys


def keys_of(args, job):
    """All keys of a run besides its recipe's."""
    recipe = recipe_text(args, job)
    kind, _, heads = parts_of(job.kind)
    keys = [*text_keys(args), *steps_keys(args, job, recipe), f"training.seed={job.seed}", "checkpoint.keep_latest_k=1",
            f"validation.interval={min(job.steps if args.tries else VALIDATION_STEPS, job.steps)}",
            "metrics.enable_tensorboard=false", "generation.prompts=[]"]
    # The paper's four domains are one text here.
    keys += ["data.weights=[1.0]"] if "weights" in recipe["data"] else []
    keys += [f"model.num_key_value_heads={heads}"] if heads else []
    keys += ["metrics.log_freq=5"] if args.tries else []
    if 3 * recipe["lr_scheduler"]["warmup_steps"] > job.steps:
        keys += [f"lr_scheduler.warmup_steps={max(job.steps // WARMUP_SHARE, 1)}"]
    return [*keys, *(TINY + TINY_OF.get(kind, []) if args.tiny else []), *args.set]


def text_keys(args):
    """Keys that say which tokens are prepared, the same for all runs."""
    files = {"data.paths": ["train.jsonl"], "validation.paths": ["heldout.jsonl"], "tokenizer.path": "tokenizer.json",
             "data.cache_dir": "../tokens"}
    place = lambda name: str(args.folder / name if name != "../tokens" else args.out / "tokens")  # noqa: E731
    return [f"{key}={json.dumps([place(one) for one in name] if isinstance(name, list) else place(name))}"
            for key, name in files.items()]


def text(args):
    """The training text's checksum, after it was unpacked and compared; --tiny writes a text of its own."""
    path = args.folder / "train.jsonl"
    if args.tiny:
        if not path.exists():
            args.folder.mkdir(exist_ok=True)
            pages = sorted((ROOT / "docs").glob("*.md"))
            texts = [json.dumps({"text": page.read_text(encoding="utf-8")}) + "\n" for page in pages]
            (args.folder / "heldout.jsonl").write_text("".join(texts[:4]), encoding="utf-8")
            shutil.copy(ROOT / "checkpoints/tiny/tokenizer.json", args.folder)
            path.write_text("".join(texts[4:]), encoding="utf-8")
        return "docs"
    pieces = sorted(args.folder.glob("train.jsonl.bz3.*"))
    if pieces and not path.exists():
        unfinished = path.with_suffix(".part")
        # Eight blocks of 64 MiB at once take 3 GiB of memory.
        command = [os.environ.get("BZIP3", "bzip3"), "-d", "-c", "-j", "8"]
        with open(unfinished, "wb") as plain, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=plain) as unpack:
            for piece in pieces:
                unpack.stdin.write(piece.read_bytes())
            unpack.stdin.close()
            if unpack.wait():
                sys.exit(f"{' '.join(command)}: exit code {unpack.returncode}, so {path} cannot be unpacked")
        unfinished.rename(path)
    return make_text.checked(args.folder)


def planned(args, job, gpu=None):
    """`sieve plan` of a run as JSON, on a GPU by name, else on this machine's CPU."""
    words = [args.sieve, "-q", "plan", "--recipe", recipe_of(job), *sets(keys_of(args, job)), "--json"]
    return json.loads(output_of([*words, *(["--gpu", gpu] if gpu else [])]))


def scored(args, runs, folder, rows_of):
    """All scores of a trained run, side by side on its device; what an earlier call measured is read again."""
    lengths = [rows_of * part // 4 for part in (1, 2, 3, 4)]
    heldout = args.folder / "heldout.jsonl"
    needles = ["needle", "--lengths", ",".join(map(str, lengths)), "--depths", DEPTHS, "--needles", args.needles]
    words = {
        "ppl": ["ppl", "--data", heldout, "--context", rows_of, "--stride", rows_of // 2, "--max-tokens",
                args.ppl_tokens],
        "needles": [*needles, "--data", heldout], "needles_prose": needles,
        "ruler": ["ruler", "--tasks", TASKS, "--lengths", f"{lengths[1]},{lengths[3]}", "--samples", args.samples]}
    with concurrent.futures.ThreadPoolExecutor(len(words)) as pool:
        scores = dict(zip(words, pool.map(lambda name: evaluated(folder, words[name], runs, args, name), words)))
    ppl = {name: scores["ppl"][name] for name in ("loss", "bits_per_byte", "num_tokens")}
    return {"ppl": ppl, "ruler": by_task(scores["ruler"]["methods"][-1]["tasks"]), **{
        name: by_length(scores[name]["methods"][-1]["cells"]) for name in ("needles", "needles_prose")}}


def kept(args, folder):
    """Exports a run's bf16 weights and packs them in pieces, each an xz file of its own, so that they are packed side
    by side and a `cat` of them is one; their checksums come last, as the mark that all are there."""
    sums = args.out / "weights" / f"{folder.name}.sha256"
    if sums.exists():
        return
    sums.parent.mkdir(exist_ok=True)
    export = sums.with_suffix("")
    shutil.rmtree(export, ignore_errors=True)
    with open(f"{folder}.log", "a", encoding="utf-8") as log:
        words = [args.sieve, "-q", "export", "--checkpoint", folder, "--out", export, "--dtype", "bf16"]
        if subprocess.run(words, stdout=log, stderr=log, check=False).returncode:
            raise Unfinished
    with tarfile.open(f"{export}.tar", "w") as tar:
        tar.add(export, export.name)
    pack = lambda chunk: lzma.compress(chunk, preset=1)  # noqa: E731
    with open(f"{export}.tar", "rb") as whole, concurrent.futures.ThreadPoolExecutor(8) as pool:
        lines = []
        for number, piece in enumerate(pool.map(pack, iter(lambda: whole.read(CHUNK), b""))):
            name = f"{export.name}.tar.xz.{number:02}"
            (sums.parent / name).write_bytes(piece)
            lines.append(f"{hashlib.sha256(piece).hexdigest()}  {name}\n")
    sums.write_text("".join(lines), encoding="utf-8")
    pathlib.Path(f"{export}.tar").unlink()
    shutil.rmtree(export)


def speeds(steps, stages):
    """Tokens a second by the rows' length, the median of the logged steps of each stage without its first one, which
    compiles kernels, and the seconds of all steps at these speeds."""
    rates, seconds, begin = {}, 0, 0
    tokens = steps[-1]["tokens_seen"] / steps[-1]["step"]
    for stage in stages:
        end = begin + stage["steps"]
        logged = [line["tokens_per_second"] for line in steps if begin < line["step"] <= end]
        rates[str(stage["seq_len"])] = round(statistics.median(logged[1:] or logged))
        seconds += tokens * stage["steps"] / rates[str(stage["seq_len"])]
        begin = end
    return rates, seconds


def folder_of(args, job):
    return args.out / "runs" / named(*(str(part).replace("/", "-") for part in job))


def run(job, runs, args):
    """The line of one run."""
    folder, keys = folder_of(args, job), keys_of(args, job)
    folder.parent.mkdir(exist_ok=True)
    plan = args.plans[job]
    every = job.steps if args.tries or not plan["seconds"] else job.steps * CHECKPOINT_SECONDS / plan["seconds"]
    lines = trained(folder, recipe_of(job), [f"checkpoint.interval={max(int(every), 1)}", *keys], runs, args, job.steps)
    steps, validations = steps_of(lines), validations_of(lines)
    rate, seconds = speeds(steps, plan["stages"])
    row = {**job._asdict(), "recipe": recipe_of(job), "set": args.set, "parameters": plan["num_non_embedding"],
           "tokens": steps[-1]["tokens_seen"], "tokens_per_second": rate, "seconds": round(seconds, 1),
           "memory_gib": round(max(line["memory_bytes"] for line in steps) / 2**30, 2),
           **{name: round(validations[-1][name], 4) for name in ("loss", "perplexity", "bits_per_byte")},
           "validations": [[line["step"], round(line["loss"], 4)] for line in validations],
           "curve": curve(steps, seconds / job.steps)}
    if not math.isfinite(row["loss"]):
        raise Unfinished
    if not args.tries:
        row |= scored(args, runs, folder, plan["stages"][-1]["seq_len"])
        if job.seed == 0:
            kept(args, folder)
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    command = " ".join(["sieve train --recipe", recipe_of(job), *(f"--set '{key}'" for key in keys)])
    for path in (args.folder, args.out):
        command = command.replace(f"{path}/", "")
    return row | args.facts | {"date": time.strftime("%Y-%m-%d"), "card": args.cards[runs.device], "command": command}


def race(args, jobs, path, rows):
    """Trains what has no line yet."""
    version = output_of([args.sieve, "--version"])
    args.cards = {device: device_name(device) for device in args.devices}
    args.facts = {"text": text(args), "commit": version.rpartition("(")[2].rstrip(")")}
    missing = [job for job in jobs if job not in rows]
    # The interval between checkpoints follows from the slower card, so a run that resumes on another one keeps it.
    gpu = None if args.devices == ["cpu"] else "h100"
    args.plans = {job: planned(args, job, gpu) for job in missing}
    if missing:  # the tokens are the same for every kind and size
        prepare(args, recipe_of(missing[0]), keys_of(args, missing[0]))
    train_missing(jobs, run, args, path, rows)


def back(args, path):
    """Copies what a call may give back into --back: lines, logs, and weights that were not taken before."""
    args.back.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, args.back)
    with tarfile.open(args.back / "logs.tar.xz", "w:xz") as logs:
        for one in sorted([*args.out.glob("runs/*.log"), *args.out.glob("runs/*/metrics.jsonl")]):
            logs.add(one, one.relative_to(args.out))
    weights, taken = args.out / "weights", args.out / "taken"
    names_taken = set(taken.read_text().splitlines()) if taken.exists() else set()
    size, count = sum(one.stat().st_size for one in args.back.iterdir()), 2
    of = lambda one: weights / f"{one.name.partition('.tar.xz.')[0]}.sha256"  # noqa: E731
    left = [one for one in sorted(weights.glob("*.*")) if one.name not in names_taken and
            (one.suffix == ".sha256" or ".tar.xz." in one.name and of(one).exists())]
    while left and count < MOST_FILES and size + left[0].stat().st_size <= MOST_BYTES:
        one = left.pop(0)
        shutil.copy(one, args.back)
        size, count = size + one.stat().st_size, count + 1
        with open(taken, "a", encoding="utf-8") as names:
            names.write(f"{one.name}\n")
    print(f"{args.back}: {count} files, {size / 2**20:.1f} MiB; {len(left)} files of weights wait for further calls")


def print_plan(args, jobs, rows):
    """Minutes of the steps of the runs that have no line, by kind, and of all of them on one, two and four GPUs."""
    missing = [job for job in jobs if job not in rows]
    minutes = {job.kind: planned(args, job, args.plan)["seconds"] / 60 for job in missing}
    for kind, spent in minutes.items():
        print(f"{kind}: {spent:.1f} minutes of steps, {sum(job.kind == kind for job in missing)} runs")
    for gpus in (1, 2, 4):
        free = [0.0] * gpus  # when each GPU is free: a run takes the first that is
        for job in missing:
            free[free.index(min(free))] += minutes[job.kind]
        print(f"{len(missing)} runs on {gpus} x {args.plan}: {max(free):.0f} minutes of steps")


def arguments():
    """The script's arguments, with defaults that depend on --try and --tiny. With --sieve
    a kind without a recipe ends the program."""
    parser = parser_of(__doc__, "table4.jsonl", reads_text=False)
    parser.add_argument("--text", dest="folder", type=pathlib.Path, metavar="TEXT",
                        help="folder of train.jsonl, heldout.jsonl and tokenizer.json")
    parser.add_argument("--size", help="80m, 200m, 680m or 1p7b")
    parser.add_argument("--kinds", nargs="+", help=f"recipes' kinds; {' '.join(KINDS)} when absent")
    parser.add_argument("--seeds", nargs="+", type=int, help="0 1 2 when absent")
    parser.add_argument("--steps", type=int, help="a tenth of the recipe's when absent")
    parser.add_argument("--needles", type=int, default=10, help="of each of four lengths and five depths, twice")
    parser.add_argument("--samples", type=int, default=10, help="of each of RULER's tasks and of two lengths")
    parser.add_argument("--ppl-tokens", type=int, default=1 << 30, help="held-out tokens that `eval ppl` reads")
    parser.add_argument("--back", type=pathlib.Path, help="folder for what this call gives back")
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--try", dest="tries", action="store_true", help="50 steps of 1.7B: loss, speed, memory")
    forms.add_argument("--tiny", action="store_true", help="a small shape and text on a CPU")
    forms.add_argument("--plan", metavar="GPU", help="print minutes alone")
    args = parsed(parser)
    args.size = args.size or ("1p7b" if args.tries else "80m")
    args.kinds = args.kinds or (TRIED if args.tries else KINDS)
    args.seeds = args.seeds or ([0] if args.tries else [0, 1, 2])
    args.folder = (args.out / "text" if args.tiny or not args.folder else args.folder).resolve()
    if args.tiny:
        args.devices, args.steps, args.needles, args.samples = ["cpu"], args.steps or 12, 1, 1
        args.ppl_tokens = 4096
    for kind in args.kinds if args.sieve else []:
        recipe_text(args, Job(args.size, kind, 0, 0))  # a kind without a recipe ends here, in the program's words
    return args


def steps_of_recipe(args, kind):
    """A tenth of the recipe's steps, those of its stages together."""
    recipe = recipe_text(args, Job(args.size, kind, 0, 0))
    return (recipe["training"].get("steps") or sum(stage["steps"] for stage in recipe["stage"])) // 10


def main():
    """Trains what has no line, copies what goes --back, prints all tables; exit code 1 where a run
    is missing. --plan prints minutes alone."""
    args = arguments()
    # What is stored is drawn without the program, which has the recipes.
    steps = {kind: args.steps or (TRY_STEPS if args.tries else steps_of_recipe(args, kind))
             for kind in (args.kinds if args.sieve or args.plan else [])}
    jobs = [Job(args.size, kind, seed, steps[kind]) for seed in args.seeds for kind in steps]
    path = args.out / "table4.jsonl"
    if table.ROWS.exists() and not path.exists() and not args.tiny:
        shutil.copy(table.ROWS, path)
    rows = {Job(*key): row for key, row in finished(path, table.KEY).items()}
    if args.plan:
        print_plan(args, jobs, rows)
        return
    if args.sieve:
        race(args, jobs, path, rows)
        print(f"{sum(job in rows for job in jobs)} of {len(jobs)} runs have their line")
    if args.back and path.exists():
        back(args, path)
    if races := table.races(rows.values()):
        print("\n\n".join(table.texts(races)))
        scored = [kinds for kinds in races.values() if not table.is_try(kinds)]
        if args.draw and scored:
            args.draw.write_text(table.picture_of_race(scored[-1]), encoding="utf-8")
    sys.exit(bool(args.sieve) and any(job not in rows for job in jobs))


if __name__ == "__main__":
    main()
