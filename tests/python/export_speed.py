"""Times of modeling_sieve.py beside transformers' dense Qwen3: three layers of an 80M model, random weights, a thread.

usage: export_speed.py KIND,TOKENS... with KIND one of qwen3, dma, hybrid (the third layer dense), nsa, mla

One line each: the seconds of a prompt of TOKENS in one pass, and the milliseconds of a token after it, with the cache;
both are what the processor worked, which other programs disturb less than the clock.
"""

import importlib.util
import sys
import time
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

SOURCE = Path(__file__).parents[2] / "crates/sieve-hf/src/export/modeling_sieve.py"
SIZES = {
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 3,
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


def model_of(kind):
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    else:
        spec = importlib.util.spec_from_file_location("modeling_sieve", SOURCE)
        modeling = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modeling)
        model = modeling.SieveForCausalLM(modeling.SieveConfig(**{**SIZES, **KINDS[kind]}))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(".A"):
                weight.uniform_(-1, 1)
            elif weight.dim() == 2:
                weight.normal_(0, 0.1 if "dt_proj" in name else 0.02)
    return model.eval()


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for argument in sys.argv[1:]:
        kind, num_tokens = argument.split(",")
        model, ids = model_of(kind), torch.randint(0, SIZES["vocab_size"], (1, int(num_tokens)))
        started = time.process_time()
        out = model(ids, use_cache=True, logits_to_keep=1)
        prompt, tokens = time.process_time() - started, []
        for _ in range(15):
            started = time.process_time()
            model(ids[:, :1], past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
            tokens.append(time.process_time() - started)
        print(f"{argument}: prompt {prompt:.2f} s, token {min(tokens) * 1e3:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
