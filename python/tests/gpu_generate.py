"""Reading and continuing a long text by an export in transformers, beside the program: a check of on_gpu.py."""

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

import torch

import sieve_attention as sieve
from sieve_attention import _library

DEVICE = "cuda"


def sieve_program(*arguments):
    """What the program at SIEVE_PROGRAM prints."""
    command = [os.environ.get("SIEVE_PROGRAM", "sieve"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"sieve {arguments[0]}: {done.stdout[-800:]} {done.stderr[-800:]}"
    return done.stdout


def made_export(folder, text, tokens):
    """An export of an 80M DMA model after one step on a text, for so many tokens and some more."""
    names = ("made.toml", "run", "export", "corpus.txt")
    recipe, run, export, corpus = (folder / name for name in names)
    corpus.write_text(text)
    sieve_program("recipe", "new", "--size", "80m", "--kind", "dma", "--data", corpus, "--out", recipe)
    sets = ['model.layer_types=["sparse"]', f"model.max_position_embeddings={max(tokens + 1024, 2048)}",
            "tokenizer.train={ vocab_size = 2048, sample_bytes = 1_000_000 }", f'data.cache_dir="{folder}/cache"',
            "validation.tokens=16384", *os.environ.get("SIEVE_SETS", "").split()]  # fmt: skip
    sets = [x for text in sets for x in ("--set", text)]
    sieve_program("train", "--recipe", recipe, "--out", run, "--device", DEVICE, *sets, "--stop-after", 1)
    sieve_program("export", "--checkpoint", run, "--out", export, "--dtype", "bf16")
    return export


def seconds(call, repeats=3):
    """The median of so many calls behind a first one."""
    sync = torch.cuda.synchronize if DEVICE == "cuda" else lambda: None
    times = []
    for _ in range(repeats + 1):
        sync()
        start = time.perf_counter()
        call()
        sync()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[repeats // 2]


def models_of(export):
    """The export by Sieve's kernels, and a dense model of the same sizes by SDPA."""
    from transformers import AutoModelForCausalLM

    settings = {"dtype": torch.bfloat16, "trust_remote_code": True, "attn_implementation": "sieve"}
    dma = AutoModelForCausalLM.from_pretrained(export, **settings).to(DEVICE)
    config = type(dma.config)(**{**dma.config.to_dict(), "attention_kind": "mha", "dense_layers": []})
    dense = type(dma)._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16).to(DEVICE)
    return {"DMA, sieve": dma, "dense, SDPA": dense}


@torch.no_grad()
def speeds_of(model, ids, least, many):
    """ms to read ids, and tokens a second behind them: of `many` new ones without what `least` take."""
    model.generation_config.eos_token_id = None
    given = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    prefill = 1e3 * seconds(lambda: model(ids, use_cache=True, logits_to_keep=1))
    times = [seconds(lambda: model.generate(ids, max_new_tokens=n, **given), 1) for n in (least, many)]
    return prefill, (many - least) / max(times[1] - times[0], 1e-9)


def plans_of_each():
    """How many plans each operator has made."""
    return {name: len(op.plans) for name, op in sieve.functional.ops.IMPLEMENTATIONS.items()}


def generate():
    """An export of an 80M DMA model behind 32,768 tokens: ms to read them, then tokens a second by generate().

    By Sieve's kernels, a dense model of the same sizes by SDPA, and by the program at SIEVE_PROGRAM, which makes the
    model. SIEVE_TOKENS is another length, SIEVE_SETS more settings of the recipe: small ones try this on a CPU.
    """
    from transformers import AutoTokenizer

    import sieve_attention.transformers

    global DEVICE
    if not torch.cuda.is_available():
        import conftest

        DEVICE, _library.Op.emulator = "cpu", staticmethod(conftest.emulate)
    root, folder, measured = Path(__file__).parents[2], Path(tempfile.mkdtemp()), {}
    tokens, prompt = int(os.environ.get("SIEVE_TOKENS", 32768)), folder / "prompt.txt"
    text = "\n".join(path.read_text() for path in sorted([*root.glob("docs/*.md"), *root.glob("crates/**/*.rs")]))
    export = made_export(folder, text, tokens)
    sieve_attention.transformers.register()
    tokenizer = AutoTokenizer.from_pretrained(export, trust_remote_code=True)
    ids = tokenizer(text[: 16 * tokens], return_tensors="pt").input_ids[:, :tokens].to(DEVICE)
    prompt.write_text(tokenizer.decode(ids[0]))
    least, many = (2, 4) if DEVICE == "cpu" else (8, 136)
    before = plans_of_each()
    for name, model in models_of(export).items():
        measured[f"{name}: prefill, ms"], measured[f"{name}: tokens a second"] = speeds_of(model, ids, least, many)
    # Other checks of this process have made plans of their own.
    plans = {name: count - before[name] for name, count in plans_of_each().items()}
    assert plans["dma_decode"] <= 1, f"a plan for each length: {plans}"
    said = sieve_program("generate", "--checkpoint", export, "--device", DEVICE, "--prompt-file", prompt,
                         "--temperature", 0, "--max-new-tokens", 2 * many, "--json", "--quiet")  # fmt: skip
    said = json.loads(said[said.index("{") :].splitlines()[0])
    measured[f"sieve generate: prefill of {said['prompt_tokens']} tokens, kernels loaded in it, ms"] = (
        1e3 * said["prompt_seconds"]
    )
    measured["sieve generate: tokens a second"] = 1 / said["median_token_seconds"]
    return measured
