"""Times of modeling_sieve.py beside transformers' dense Qwen3: layers of an 80M model with random weights.

usage: export_speed.py [--layers N] [--threads N] [--source FILE] KIND,TOKENS...

KIND is one of qwen3, dma, hybrid (every third layer dense), nsa and mla; FILE another modeling_sieve.py. One line each: the
seconds of a prompt of TOKENS in one pass, and the milliseconds of a token after it, with the cache where there is one. Of
one thread (the default) both are what the processor worked, which other programs disturb less than the clock; of several
they are the clock's.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests/python"))  # what tests share with experiments
from dma_expiry import SOURCE, exported  # noqa: E402

SIZES = {
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 128,
    "vocab_size": 2000,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
}
DMA = {
    "attention_kind": "dma",
    "keep_window_size": 1024,
    "local_window_size": 128,
    "bias": "linear",
    "periods": [64.0, 512.0, 4096.0],
}
# NSA's sizes are those of SieveConfig.
KINDS = {
    "dma": DMA,
    "hybrid": {**DMA, "dense_layers": [False, False, True]},
    "nsa": {"attention_kind": "nsa", "compress_hidden_size": 256},
    "mla": {"attention_kind": "mla", "num_key_value_heads": 6, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
}


def model_of(kind, layers, source):
    """A model of `layers` layers with random weights: transformers' dense Qwen3, or for another `kind` that of the
    modeling_sieve.py at path `source`. DMA's weights are drawn wider, so that its keys rank apart."""
    sizes = {**SIZES, "num_hidden_layers": layers}
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    else:
        modeling = exported("modeling_sieve", source)
        model = modeling.SieveForCausalLM(modeling.SieveConfig(**{**sizes, **KINDS[kind]}))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(".A"):
                weight.uniform_(-1, 1)
            elif weight.dim() == 2:
                weight.normal_(0, 0.1 if "dt_proj" in name else 0.02)
    return model.eval()


@torch.no_grad()
def main() -> None:
    """Prints a line an argument KIND,TOKENS: the seconds of a prompt, and the milliseconds of the fastest of 15 tokens
    behind it; of a model without a cache, of one pass over the prompt and a token."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--source", type=Path, default=SOURCE)
    parser.add_argument("rows", nargs="+")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    clock = time.process_time if given.threads == 1 else time.perf_counter
    for argument in given.rows:
        kind, num_tokens = argument.split(",")
        model = model_of(kind, given.layers, given.source)
        ids = torch.randint(0, SIZES["vocab_size"], (1, int(num_tokens)))
        started = clock()
        out = model(ids, use_cache=True, logits_to_keep=1)
        prompt, tokens = clock() - started, []
        cache = out.past_key_values
        for _ in range(15 if cache is not None else 1):
            started = clock()
            more = ids[:, :1] if cache is not None else torch.cat([ids, ids[:, :1]], 1)
            model(more, past_key_values=cache, use_cache=True, logits_to_keep=1)
            tokens.append(clock() - started)
        print(f"{argument}: prompt {prompt:.2f} s, token {min(tokens) * 1e3:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
