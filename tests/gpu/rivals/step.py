"""Times training steps of transformers' Qwen3 under torch.compile, the rival of whole runs of `sieve train` (docs/benchmarks.md).

    python3 tests/gpu/rivals/step.py [--cases 1.7B-2K,1.7B-8K,1.7B-32K,80M-2K]
    python3 tests/gpu/rivals/step.py --float8        (torchao's float8 for the layers' projections, one scale a tensor)
    python3 tests/gpu/rivals/step.py --tiny          (no GPU: runs every line once on the CPU, uncompiled)

Every layer compiled, SDPA by cuDNN, bf16 autocast over f32 weights, fused AdamW, gradients clipped at 1; random tokens; the median of nine steps
after three, and the most memory that tensors took.
"""

import argparse
import statistics
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB = 50280
# layers, width, query heads, KV heads, feed-forward width, tokens of a row, rows
CASES = {
    "1.7B-2K": (28, 2048, 16, 8, 6144, 2048, 8),
    "1.7B-8K": (28, 2048, 16, 8, 6144, 8192, 2),
    "1.7B-32K": (28, 2048, 16, 8, 6144, 32768, 1),
    "80M-2K": (12, 768, 6, 6, 2048, 2048, 32),
}
TINY = (2, 64, 2, 1, 96, 32, 2)


def head_loss(hidden, weight, labels):
    logits = torch.nn.functional.linear(hidden, weight).float()
    return torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1))


def run(name, sizes, device, steps, warm, float8=False):
    layers, width, heads, kv_heads, ff, seq_len, rows = sizes
    config = Qwen3Config(vocab_size=VOCAB, hidden_size=width, intermediate_size=ff, num_hidden_layers=layers, num_attention_heads=heads,
                         num_key_value_heads=kv_heads, head_dim=128, max_position_embeddings=seq_len, tie_word_embeddings=True, use_cache=False, attn_implementation="sdpa")
    with torch.device(device):
        model = Qwen3ForCausalLM(config).train()
    loss_of = head_loss
    if float8:
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(model.model.layers)
    if device == "cuda":
        for layer in model.model.layers:
            layer.compile(dynamic=False)
        loss_of = torch.compile(head_loss, dynamic=False)
        torch.cuda.reset_peak_memory_stats()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda")
    tokens = torch.randint(0, VOCAB, (rows, seq_len + 1), device=device)
    backends = [SDPBackend.CUDNN_ATTENTION] if device == "cuda" else [SDPBackend.MATH]
    times = []
    for _ in range(warm + steps):
        started = time.perf_counter()
        with torch.autocast(device, torch.bfloat16), sdpa_kernel(backends):
            hidden = model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
            loss_of(hidden, model.lm_head.weight, tokens[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    seconds = statistics.median(times[warm:])
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    print(f"{name:10} {1e3 * seconds:9.2f} ms a step, {rows * seq_len / seconds:9.0f} tokens/s, at most {peak:.1f} GiB", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--float8", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.tiny:
        return run("tiny", TINY, "cpu", 2, 1)
    unknown = [name for name in args.cases.split(",") if name not in CASES]
    if unknown:
        parser.error(f"--cases {unknown[0]}: not known; one of {', '.join(CASES)}")
    torch.set_float32_matmul_precision("high")
    for name in args.cases.split(","):
        run(name, CASES[name], "cuda", 9, 3, args.float8)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
