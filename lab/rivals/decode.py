"""Tokens a second of transformers' Qwen3 with a static cache, which its `generate` compiles and captures: the rival of
`sieve generate` on a model of the same sizes (lab/docs/benchmarks.md).

    python3 lab/rivals/decode.py [--case 1.7B-2K] [--rows 1 16] [--prompt 512] [--tokens 256]
    python3 lab/rivals/decode.py --tiny          (no GPU)

Random bf16 weights, greedy tokens. The time of a prompt and one token is subtracted; medians of three calls.
"""

import argparse
import statistics
import time

import torch
from step import CASES, TINY, config_of
from transformers import AutoModelForCausalLM


def seconds(model, ids, tokens):
    """Median of three calls that generate `tokens` tokens, after one call that compiles."""
    times = []
    for _ in range(4):
        start = time.perf_counter()
        out = model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, cache_implementation="static")
        out[0, -1].item()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main():
    """Prints a line a number of texts: tokens a second behind the prompt, the prompt's own time subtracted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", default="1.7B-2K", choices=CASES)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16], help="texts at once")
    parser.add_argument("--prompt", type=int, default=512, help="tokens before")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = "cpu" if args.tiny else "cuda"
    config = config_of(TINY if args.tiny else CASES[args.case])
    config.use_cache, config.max_position_embeddings = True, args.prompt + args.tokens
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16).eval()
    for rows in args.rows:
        ids = torch.randint(0, config.vocab_size, (rows, args.prompt), device=device)
        decoding = seconds(model, ids, args.tokens) - seconds(model, ids, 1)
        print(f"{rows} texts: {rows * (args.tokens - 1) / decoding:,.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
