"""A token and a prompt on a CPU: `sieve generate` beside transformers and llama.cpp, on the same random Qwen3 models.

    python3 lab/experiments/cpu_rivals.py --sieve target/release/sieve --out OUT [--llama FOLDER] [--cores 0 1]

--llama is a folder of llama.cpp with build/bin/llama-bench, whose converter makes the GGUF files. The programs run by
turns, on --cores alone, --rounds times. Each model is written once, in bf16, by transformers. Of a prompt of --prompt
tokens: tokens a second. Of a token behind it: tokens a second, as the median of --tokens (ours, transformers) or as
the median of three means (llama-bench). Ours is a new process in each round, so its first prompt is its only one; the
rivals' prompt is the best of three in a process. With --isa, transformers and ours run once more without AMX.

A line a program, weight type and round is added to OUT/cpu.jsonl. lab/docs/cpu.md has the table of
lab/rows/cpu.jsonl: medians of the rounds that all programs have, the slowest and the fastest, and ours over the better
of transformers' two. The table leaves rounds of fewer programs out; in these llama.cpp's tokens began with an empty cache.
"""

import argparse
import collections
import datetime
import importlib.metadata
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "tests/python"))  # what tests share with experiments
import gguf_files  # noqa: E402
from cpu_bench import random_model  # noqa: E402

LLAMA_BENCH = "build/bin/llama-bench"
ROWS = HERE.parent / "rows/cpu.jsonl"
TINY = HERE.parents[1] / "checkpoints/tiny"
# Hidden width, feed-forward width, layers, heads, KV heads, vocabulary: Table 4 of arXiv:2508.02124, smaller vocabularies.
MODELS = {"98M": (768, 2304, 12, 6, 3, 16384), "253M": (1024, 3072, 16, 8, 4, 49152), "try": (64, 128, 2, 4, 2, 4096)}
WORDS = "one two three four five six seven eight nine ten eleven twelve ".split()


def write_model(folder, shape):
    """A folder of a Qwen3 model with random weights in bf16; the number of its parameters."""
    hidden, inner, layers, heads, kv_heads, vocabulary = shape
    return random_model(
        folder, "bfloat16", hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=128, vocab_size=vocabulary,
        max_position_embeddings=4096, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip


def write_gguf(args, folder, dtype):
    """The model's file for llama.cpp."""
    out = folder.parent / f"{folder.name}-{dtype}.gguf"
    if not out.exists():
        partial = out.with_suffix(".part")
        made = gguf_files.convert(args.llama, folder, partial, dtype)
        if made.returncode:
            raise RuntimeError(f"the converter: {made.stderr[-600:]}")
        partial.rename(out)
    return out


def text_of(count):
    """A text of `count` tokens, or of as few more as there can be."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    words = [WORDS[i * 7 % 12 if i % 3 else i * 5 % 11] for i in range(count)]
    low, high = 1, count
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(tokenizer.encode(" ".join(words[:middle])).ids) >= count else (middle + 1, high)
    return " ".join(words[:low])


def pinned(args, command, **env):
    """What a command prints to standard output, on --cores alone."""
    threads = str(len(args.cores))
    env = {**os.environ, "OMP_NUM_THREADS": threads, "RAYON_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": "", **env}
    cores = ",".join(map(str, args.cores))
    done = subprocess.run(["taskset", "-c", cores, *map(str, command)], env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]}: exit code {done.returncode}: {done.stderr[-600:]}")
    return done.stdout


def ours(args, folder, dtype, **env):
    """(tokens a second of the prompt, of a token)"""
    said = pinned(args, [args.sieve, "generate", "--checkpoint", folder, "--prompt", text_of(args.prompt), "--json",
                         "--max-new-tokens", args.tokens + 4, "--temperature", 0, "--device", "cpu", "--dtype", dtype], **env)  # fmt: skip
    line = json.loads(said.splitlines()[-1])
    return line["prompt_tokens"] / line["prompt_seconds"], 1 / line["median_token_seconds"]


def transformers(args, folder, dtype, **env):
    words = [sys.executable, __file__, "--rival", folder, "--dtype", dtype, "--prompt", args.prompt, "--tokens", args.tokens]
    return json.loads(pinned(args, words, **env).splitlines()[-1])


def rival(folder, dtype, prompt, tokens):
    """The process of transformers: best of three prompts, median of the tokens behind the first four."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()
    ids = torch.randint(0, model.config.vocab_size, (1, prompt))
    read, written = [], []
    with torch.inference_mode():
        for _ in range(3):
            cache, begun = DynamicCache(config=model.config), time.perf_counter()
            logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            read.append(time.perf_counter() - begun)
        for _ in range(tokens + 4):
            begun = time.perf_counter()
            logits = model(logits[:, -1:].argmax(-1), past_key_values=cache, use_cache=True).logits
            written.append(time.perf_counter() - begun)
    print(json.dumps([prompt / min(read), 1 / statistics.median(written[4:])]))


def llama(args, folder, dtype):
    """llama-bench's tokens a second of the prompt, the best of three, and of a
    token behind it, the median of three means."""

    def rates(*test):
        said = pinned(args, [args.llama / LLAMA_BENCH, "-m", write_gguf(args, folder, dtype), "-t",
                             len(args.cores), *test, "-r", 3, "-o", "json"])  # fmt: skip
        return json.loads(said)[0]["samples_ts"]

    read, written = rates("-p", args.prompt, "-n", 0), rates("-p", 0, "-n", args.tokens, "-d", args.prompt)
    return max(read), statistics.median(written)


def rounds_of(programs):
    """Stored lines of the rounds that have these programs and no others."""
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    round_of = lambda row: tuple(row[key] for key in ("session", "turn", "model", "dtype"))  # noqa: E731
    measured = collections.defaultdict(set)
    for row in rows:
        measured[round_of(row)].add(row["program"])
    return [row for row in rows if measured[round_of(row)] == set(programs)]


def table():
    """Head and lines: medians of the rounds that have all programs, with the slowest and the fastest; ours over rivals'."""
    programs = ["sieve", "sieve, without AMX", "transformers", "transformers, AVX512_CORE_BF16", "llama.cpp"]
    by_case = collections.defaultdict(lambda: collections.defaultdict(list))
    for row in rounds_of(programs):
        for what, key in (("prompt", "prompt_tokens_per_second"), ("token", "tokens_per_second")):
            by_case[what, row["dtype"], row["model"]][row["program"]].append(row[key])
    lines = []
    for (what, dtype, model), by_program in sorted(by_case.items(), key=lambda item: (*item[0][:2], len(item[0][2]), item[0][2])):
        middle = {program: statistics.median(rates) for program, rates in by_program.items()}
        cells = [f"{middle[program]:,.0f} ({min(by_program[program]):,.0f} to {max(by_program[program]):,.0f})"
                 for program in programs]
        over = [middle["sieve"] / max(middle[rival] for rival in rivals) for rivals in (programs[2:4], programs[4:])]
        lines.append([f"{what}, {model}, {dtype}", str(len(by_program["sieve"])), *cells, *(f"{ratio:.2f}" for ratio in over)])
    return ["tokens/s", "rounds", "ours", "ours without AMX", "transformers", "transformers without AMX", "llama.cpp",
            "ours over transformers", "over llama.cpp"], lines  # fmt: skip


def torch_version():
    return " on torch ".join(importlib.metadata.version(name) for name in ("transformers", "torch"))


def cpu():
    text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
    name = re.search(r"model name\s*: (.*)", text)[1]
    flags = re.search(r"flags\s*: (.*)", text)[1].split()
    return name, [flag for flag in ("avx512f", "avx512_bf16", "amx_bf16") if flag in flags]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sieve", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--llama", type=pathlib.Path)
    parser.add_argument("--llama-version", help="of the folder, for the lines")
    parser.add_argument("--cores", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=2040)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--models", nargs="+", default=["98M", "253M"], choices=MODELS)
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "f32"], choices=["bf16", "f32"])
    parser.add_argument("--isa", help="ONEDNN_MAX_CPU_ISA of one more run of transformers, such as AVX512_CORE_BF16; ours has one more, too")
    parser.add_argument("--seconds", type=float, default=1e9, help="no round of a model and type begins behind them")
    parser.add_argument("--rival", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rival:
        return rival(args.rival, args.dtype, args.prompt, args.tokens)
    if not args.sieve or not args.out:
        parser.error("--sieve and --out say which program is measured, and where the lines go")
    for path in (args.sieve, *([args.llama / LLAMA_BENCH] if args.llama else [])):
        if not path.is_file():
            parser.error(f"there is no program {path}")
    if not set(args.cores) <= os.sched_getaffinity(0):
        parser.error(f"--cores {args.cores}: this process may run on {sorted(os.sched_getaffinity(0))}")
    began = time.monotonic()
    programs = {"sieve": ours, "transformers": transformers}
    if args.isa:
        programs["sieve, without AMX"] = lambda *words: ours(*words, SIEVE_AMX="0")
        programs["transformers, " + args.isa] = lambda *words: transformers(*words, ONEDNN_MAX_CPU_ISA=args.isa)
    if args.llama:
        programs["llama.cpp"] = llama
    args.out.mkdir(parents=True, exist_ok=True)
    name, flags = cpu()
    commit = re.search(r"\((\w+)", subprocess.run([args.sieve, "--version"], capture_output=True, text=True, check=True).stdout)
    now = datetime.datetime.now(datetime.timezone.utc)
    versions = {"sieve": commit and commit[1], "llama.cpp": args.llama_version}
    about = {"cpu": name, "flags": flags, "threads": len(args.cores), "prompt": args.prompt, "tokens": args.tokens,
             "depth": args.prompt, "commit": commit and commit[1], "date": f"{now:%Y-%m-%d}", "session": f"{now:%FT%TZ}"}  # fmt: skip
    measured = collections.defaultdict(list)
    sizes = {model: write_model(args.out / model, MODELS[model]) for model in args.models}
    for turn in range(args.rounds):
        for model in args.models:
            for dtype in args.dtypes:
                if time.monotonic() - began > args.seconds:
                    continue
                for program in list(programs)[:: 1 if turn % 2 == 0 else -1]:
                    try:
                        prompt, token = programs[program](args, args.out / model, dtype)
                    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
                        print(f"{model} {dtype} {program}: {error}", flush=True)
                        continue
                    measured[model, dtype, program].append((prompt, token))
                    row = {"model": model, "parameters": sizes[model], "dtype": dtype, "program": program, "turn": turn,
                           "prompt_tokens_per_second": round(prompt, 1), "tokens_per_second": round(token, 2),
                           "version": versions.get(program, torch_version()), **about}  # fmt: skip
                    with open(args.out / "cpu.jsonl", "a", encoding="utf-8") as out:
                        out.write(json.dumps(row) + "\n")
    print(f"{name}, {' '.join(flags)}; {len(args.cores)} threads; best (least) of the rounds, tokens a second")
    for (model, dtype, program), times in measured.items():
        prompts, tokens = zip(*times)
        print(f"{model:5} {dtype:5} {program:36} prompt {max(prompts):9.1f} ({min(prompts):.1f})   "
              f"token {max(tokens):8.2f} ({min(tokens):.2f})")  # fmt: skip


if __name__ == "__main__":
    main()
