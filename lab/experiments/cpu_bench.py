"""Speed on the CPU: training by attention kind, growth in sequence length, decoding, and PyTorch beside it.

usage: cpu_bench.py --sieve PATH --work FOLDER [--out FILE.json] [--only speed,growth,torch,decode] [--threads 2]

Each row trains the same recipe for few and for more steps and takes the difference, so that start, data and checkpoints
cancel. Two rates: by the clock, and by processor time (tokens over processor seconds, times the number of threads), which
says what the clock would say were nothing else running. "share" is executed FLOP/s by processor time over the rate of a
2048 x 2048 x 2048 f32 GEMM, which PyTorch's rows are divided by too; the GEMM is measured by PyTorch and, through
`sieve train`, by Sieve's own GEMM library, at the start of every run. Memory is the largest resident size of the process,
"start" the seconds from the start of the program to the end of its first step. PyTorch runs as it is and under
torch.compile, each in a process of its own.

"decode" (not among the rows of a plain run): greedy tokens after a prompt of some 600, of one text and of eight, by random
models of 124M and 252M parameters with weights in f32 and in bf16, beside transformers, which loads each model once. The
programs take turns; medians of five, of the tokens behind the first. Beside them what a copy of the weights' bytes by two
threads would allow.
"""

import argparse
import concurrent.futures
import json
import math
import multiprocessing
import os
import pathlib
import re
import resource
import shutil
import statistics
import subprocess
import time

from runs import metrics, steps_of

TINY = {"model.hidden_size": 192, "model.intermediate_size": 512, "model.num_hidden_layers": 4,
        "model.num_attention_heads": 4, "model.num_key_value_heads": 2, "model.head_dim": 64}
WIDE = {"model.hidden_size": 512, "model.intermediate_size": 1536, "model.num_hidden_layers": 4,
        "model.num_attention_heads": 8, "model.num_key_value_heads": 4, "model.head_dim": 64}
WINDOW = 64  # of all rows but those of "growth"
KINDS = {
    "mha": 'kind = "mha"',
    "swa": 'kind = "swa"\nsliding_window = {window}',
    "dma": 'kind = "dma"\nkeep_window_size = {window}\na_init = 0.5\nrecency = "none"\n'
           'local_window_size = 0',
    "nsa": 'kind = "nsa"\ncompress_block_size = 32\ncompress_stride = 16\ncompress = "mlp"\ncompress_hidden_size = 64\n'
           'select_block_size = 64\nnum_selected_blocks = 4\nwindow_size = {window}',
    "mla": 'kind = "mla"\nkv_lora_rank = 96\nqk_rope_head_dim = 32',
}


def recipe(sizes, kind, seq_len, batch, window, folder):
    """A recipe as TOML. `sizes`: its keys of [model]; `window`: keys that swa, dma and nsa's window read; `folder`:
    where text and shards lie. MLA gets as many KV heads as heads."""
    sizes = dict(sizes)
    if kind == "mla":
        sizes["model.num_key_value_heads"] = sizes["model.num_attention_heads"]
    model = "\n".join(f"{name.split('.')[1]} = {value}" for name, value in sizes.items())
    attention = KINDS[kind].format(window=window)
    return f"""[model]
{model}
tie_word_embeddings = true
max_position_embeddings = {seq_len}
initializer_range = 0.05
[attention]
{attention}
[tokenizer]
train = {{ vocab_size = 2048, sample_bytes = 2_000_000 }}
[data]
paths = ["{folder}/text/*.txt"]
cache_dir = "{folder}/shards"
validation_fraction = 0.2
[training]
steps = 100
seq_len = {seq_len}
local_batch_size = {batch}
[optimizer]
lr = 1e-3
[lr_scheduler]
warmup_steps = 0
decay_ratio = 0.0
[metrics]
log_freq = 1
enable_tensorboard = false
[checkpoint]
interval = 100000
[validation]
interval = 100000
tokens = 1
"""


def make_text(folder):
    """Long documents of Rust sources, so that most rows are filled by one document each."""
    text = folder / "text"
    if text.exists():
        return
    text.mkdir(parents=True)
    registry = pathlib.Path(os.environ.get("CARGO_HOME", pathlib.Path.home() / ".cargo")) / "registry" / "src"
    sources = sorted(path for path in registry.glob("**/*.rs") if 2000 < path.stat().st_size < 60_000)[:2000]
    for n in range(40):
        parts = [path.read_text("utf-8", "ignore") for path in sources[n::40]]
        (text / f"long{n}.txt").write_text("\n".join(parts)[:250_000])


def environment(args):
    return dict(os.environ, RAYON_NUM_THREADS=str(args.threads))


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def train(args, text, steps):
    """Trains the recipe `text` for so many steps: the process's seconds of processor time, its logged steps, the speed
    of GEMMs and the start as it prints them, and its memory in MB."""
    path = args.work / "recipe.toml"
    path.write_text(text)
    out = args.work / "run"
    shutil.rmtree(out, ignore_errors=True)
    before = cpu_seconds()
    command = [args.sieve, "train", "--recipe", path, "--out", out, "--device", "cpu", "--set", f"training.steps={steps}"]
    log = args.work / "log"
    with log.open("w") as file:
        child = subprocess.Popen(command, env=environment(args), stdout=file, stderr=file)
    _, status, usage = os.wait4(child.pid, 0)
    said = log.read_text()
    if status:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{said[-2000:]}")
    gemm = re.search(r"([\d.]+) GFLOP/s measured", said)
    start = re.search(r"started: ([\d.]+) s", said)
    extras = {"gemm_gflops_at_start": float(gemm.group(1)) if gemm else None,
              "start_seconds": float(start.group(1)) if start else None, "memory_mb": usage.ru_maxrss * 1024 / 1e6}
    return cpu_seconds() - before, steps_of(metrics(out)), extras


def measure(args, sizes, kind, seq_len, batch, window=WINDOW, steps=(3, 15)):
    """The row of a kind: tokens/s by processor time from the difference between runs of both numbers of `steps`, by the
    clock from the fastest step of the longer one. The first call of all also makes the shards."""
    text = recipe(sizes, kind, seq_len, batch, window, args.work)
    if not (args.work / "shards").exists():
        train(args, text, 1)
    few, _, _ = train(args, text, steps[0])
    many, lines, extras = train(args, text, steps[1])
    tokens = seq_len * batch
    seconds = (many - few) / (steps[1] - steps[0])
    flops = statistics.median(line["tflops"] * 1e12 / line["tokens_per_second"] for line in lines)
    by_cpu = tokens * args.threads / seconds
    return {
        "kind": kind, "seq_len": seq_len, "batch": batch,
        "tokens_per_second_clock": max(line["tokens_per_second"] for line in lines[1:]),
        "tokens_per_second_cpu": by_cpu,
        "flops_per_token": flops, "gflops_cpu": flops * by_cpu / 1e9, **extras,
    }


def torch_gemm(threads):
    """f32 rate of a 2048^3 GEMM by clock (best) and by processor time (mean), GFLOP/s."""
    import torch

    torch.set_num_threads(threads)
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    a @ b
    clock, cpu, count = 1e9, time.process_time(), 12
    for _ in range(count):
        start = time.perf_counter()
        a @ b
        clock = min(clock, time.perf_counter() - start)
    cpu = (time.process_time() - cpu) / count / threads
    return 2 * 2048**3 / clock / 1e9, 2 * 2048**3 / cpu / 1e9


def torch_train(threads, sizes, kind, seq_len, batch, compiled):
    """The same model by transformers' Qwen3 with SDPA, f32, fused AdamW, gradients clipped."""
    began = time.perf_counter()
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(threads)
    size = {name.split(".")[1]: value for name, value in sizes.items()}
    layers = size["num_hidden_layers"]
    config = Qwen3Config(
        **size, vocab_size=2048, max_position_embeddings=seq_len, tie_word_embeddings=True,
        use_sliding_window=kind == "swa", sliding_window=WINDOW if kind == "swa" else None,
        max_window_layers=0 if kind == "swa" else layers,
        layer_types=["sliding_attention" if kind == "swa" else "full_attention"] * layers,
    )
    config._attn_implementation = "sdpa"
    model = Qwen3ForCausalLM(config).float().train()
    if compiled:
        model.compile(dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step():
        """One training step on random tokens; returns the loss."""
        ids = torch.randint(2048, (batch, seq_len))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    step()
    start_seconds = time.perf_counter() - began
    step()
    clock, cpu, steps = [], time.process_time(), 8
    for _ in range(steps):
        start = time.perf_counter()
        step()
        clock.append(time.perf_counter() - start)
    cpu = (time.process_time() - cpu) / steps / threads
    tokens = batch * seq_len
    return {"kind": f"torch {kind}", "seq_len": seq_len, "batch": batch, "threads": threads, "compiled": compiled,
            "tokens_per_second_clock": tokens / min(clock), "tokens_per_second_cpu": tokens / cpu,
            "start_seconds": start_seconds,
            "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6}


DECODED = {
    "124M": dict(hidden_size=768, intermediate_size=2304, num_hidden_layers=12, num_attention_heads=6,
                 num_key_value_heads=3, head_dim=128),
    "252M": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=16, num_attention_heads=16,
                 num_key_value_heads=8, head_dim=64),
}
NEW_TOKENS, TEXTS, TURNS = 33, (1, 8), 5
ROOT = pathlib.Path(__file__).parents[2]


def random_model(out, dtype, **sizes):
    """Writes a Qwen3 with random weights as a folder of transformers, with the tokenizer of checkpoints/tiny. Returns
    the number of its parameters.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(0, 0.02)
    model.to(getattr(torch, dtype)).save_pretrained(out)
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (out / file).write_bytes((ROOT / "checkpoints/tiny" / file).read_bytes())
    return sum(weight.numel() for weight in model.parameters())


def torch_decoder(threads, folder, dtype, prompt, answers, questions):
    """Answers each number of texts with the tokens per second of all of them."""
    import torch
    from tokenizers import Tokenizer
    from transformers import Qwen3ForCausalLM

    torch.set_num_threads(threads)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    ids = torch.tensor([Tokenizer.from_file(str(folder / "tokenizer.json")).encode(prompt).ids])

    def seconds(texts, new):
        begun = time.perf_counter()
        with torch.no_grad():
            rows = ids.repeat(texts, 1)
            model.generate(rows, attention_mask=torch.ones_like(rows), do_sample=False, min_new_tokens=new,
                           max_new_tokens=new, pad_token_id=0)
        return time.perf_counter() - begun

    seconds(1, 2)
    answers.put(None)
    for texts in iter(questions.get, None):
        answers.put(texts * (NEW_TOKENS - 1) / (seconds(texts, NEW_TOKENS) - seconds(texts, 1)))


def sieve_decoder(args, folder, dtype, prompt, texts):
    command = [args.sieve, "generate", "--checkpoint", folder, "--prompt-file", prompt, "--temperature", "0", "--json",
               "--max-new-tokens", str(NEW_TOKENS), "--samples", str(texts), "--device", "cpu", "--dtype", dtype]
    done = subprocess.run(command, env=environment(args), check=True, capture_output=True, text=True)
    return texts * statistics.median(json.loads(line)["tokens_per_second"] for line in done.stdout.splitlines())


def copy_rate(threads, count=1 << 27):
    """Bytes a second that threads copy."""
    import torch

    torch.set_num_threads(threads)
    a, b = torch.ones(count), torch.zeros(count)
    times = []
    for _ in range(7):
        begun = time.perf_counter()
        b.copy_(a)
        times.append(time.perf_counter() - begun)
    return 4 * count / statistics.median(times)


def decode(args):
    """Rows of tokens/s behind a prompt, by model and number of texts, of `sieve generate` and transformers by
    turns, and one of how fast the memory copies."""
    prompt = args.work / "prompt.txt"
    prompt.write_text((ROOT / "README.md").read_text()[:1500])
    rows, spawn = [], multiprocessing.get_context("spawn")
    for name in DECODED:
        folder = args.work / f"decode-{name}"
        if not folder.exists():
            random_model(folder, "float32", **DECODED[name], vocab_size=50304, max_position_embeddings=2048)
        rivals = {}
        for dtype in ("float32", "bfloat16"):
            answers, questions = spawn.Queue(), spawn.Queue()
            texts = (args.threads, folder, dtype, prompt.read_text(), answers, questions)
            rival = spawn.Process(target=torch_decoder, args=texts)
            rival.start()
            answers.get()
            rivals[dtype] = (rival, answers, questions)
        for texts in TEXTS:
            rates = {}
            for _ in range(TURNS):
                for dtype in ("f32", "bf16"):
                    rates.setdefault(f"sieve {dtype}", []).append(sieve_decoder(args, folder, dtype, prompt, texts))
                for dtype, (_, answers, questions) in rivals.items():
                    questions.put(texts)
                    rates.setdefault(f"transformers {dtype}", []).append(answers.get())
            medians = {who: round(statistics.median(all_of), 1) for who, all_of in rates.items()}
            rows.append({"kind": "decode", "model": name, "texts": texts, "tokens_per_second": medians, "all": rates})
            print(f"decode {name}, {texts} text(s), tokens/s: {medians}", flush=True)
        for rival, _, questions in rivals.values():
            questions.put(None)
            rival.join()
    rate = copy_rate(args.threads)
    print(f"a copy by {args.threads} threads: {rate / 1e9:.1f} GB/s")
    return [*rows, {"kind": "copy", "bytes_per_second": rate}]


def in_own_process(function, *args):
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(function, *args).result()


def show(row, gemm=None):
    share = f"{100 * row['gflops_cpu'] / gemm:5.1f} %" if gemm and "gflops_cpu" in row else "      -"
    how = f", {row['threads']} threads, {'compiled' if row['compiled'] else 'as it is'}" if "threads" in row else ""
    start = f" {row['start_seconds']:6.1f} s" if row.get("start_seconds") else "        -"
    print(f"{row['kind']:10} {row['seq_len']:6} x {row['batch']:<4} {row['tokens_per_second_clock']:9.0f} "
          f"{row['tokens_per_second_cpu']:9.0f}  {share} {row.get('memory_mb', 0):8.0f} MB{start}{how}", flush=True)


def growth_svg(rows):
    """Tokens/s by processor time over the length, both axes logarithmic."""
    colours = {"mha": "#c33", "swa": "#36c", "dma": "#2a2", "nsa": "#a3a", "mla": "#e80"}
    kinds = {}
    for row in rows:
        kinds.setdefault(row["kind"], []).append((row["seq_len"], row["tokens_per_second_cpu"]))
    lengths = sorted({length for points in kinds.values() for length, _ in points})
    at_x = lambda length: 60 + 460 * math.log(length / lengths[0]) / math.log(lengths[-1] / lengths[0])
    at_y = lambda rate: 330 - 290 * math.log(rate / 1000) / math.log(40)
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 380" font-family="sans-serif" font-size="12">',
             '<rect width="100%" height="100%" fill="white"/>',
             '<text x="60" y="20">tokens/s by processor time, two threads, against sequence length</text>']
    for rate in (1000, 2000, 5000, 10000, 20000, 40000):
        parts.append(f'<line x1="60" x2="520" y1="{at_y(rate):.1f}" y2="{at_y(rate):.1f}" stroke="#ddd"/>'
                     f'<text x="54" y="{at_y(rate) + 4:.1f}" text-anchor="end">{rate:,}</text>')
    for length in lengths:
        parts.append(f'<text x="{at_x(length):.1f}" y="350" text-anchor="middle">{length}</text>')
    labels = []
    for kind, points in sorted(kinds.items(), key=lambda item: -item[1][-1][1]):
        line = " ".join(f"{at_x(length):.1f},{at_y(rate):.1f}" for length, rate in sorted(points))
        y = at_y(sorted(points)[-1][1]) + 4
        while any(abs(y - other) < 13 for other in labels):
            y += 1
        labels.append(y)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colours[kind]}" stroke-width="2"/>'
                     f'<text x="528" y="{y:.1f}" fill="{colours[kind]}">{kind}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main():
    """Measures what --only names, prints each row and writes them to --out. "decode" is named alone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sieve", required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--plot", type=pathlib.Path, help="SVG of the growth rows")
    parser.add_argument("--only", default="speed,torch,growth")
    parser.add_argument("--kinds", default="mha,swa,dma,nsa,mla")
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192,16384")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    only, kinds, rows = args.only.split(","), args.kinds.split(","), []
    if "decode" in only and len(only) > 1:
        parser.error("--only decode is measured alone: name it without others")
    if "decode" in only:
        rows = decode(args)
        if args.out:
            args.out.write_text(json.dumps({"rows": rows}, indent=1))
        return
    make_text(args.work)
    clock, by_cpu = torch_gemm(args.threads)
    print(f"2048^3 f32 GEMM, PyTorch: {clock:.0f} GFLOP/s by the clock (best), {by_cpu:.0f} by processor time\n"
          "kind       length x batch  tok/s clock, by cpu   share    memory    start")
    for name, sizes in (("tiny", TINY), ("wide", WIDE)):
        seq_len, batch = 256, 8
        for kind in kinds if "speed" in only else ():
            rows.append(measure(args, sizes, kind, seq_len, batch) | {"model": name})
            show(rows[-1], by_cpu)
        ways = [(threads, compiled) for threads in range(1, args.threads + 1) for compiled in (False, True)]
        for kind in ("mha", "swa") if "torch" in only else ():
            for threads, compiled in ways:
                row = in_own_process(torch_train, threads, sizes, kind, seq_len, batch, compiled)
                rows.append(row | {"model": name})
                show(rows[-1])
    for kind in kinds if "growth" in only else ():
        for seq_len in map(int, args.lengths.split(",")):
            batch = max(1, 16384 // seq_len)
            rows.append(measure(args, TINY, kind, seq_len, batch, 128, (1, 3)) | {"model": "tiny"})
            show(rows[-1], by_cpu)
    if args.out:
        args.out.write_text(json.dumps({"torch_gemm_gflops": [clock, by_cpu], "rows": rows}, indent=1))
    if args.plot:
        args.plot.write_text(growth_svg(rows))


if __name__ == "__main__":
    main()
