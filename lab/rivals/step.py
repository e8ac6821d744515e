"""Times training steps of transformers' Qwen3, Llama and Qwen2 under torch.compile, the rivals of whole runs of `sieve train` with models of the
same sizes (lab/docs/benchmarks.md).

    python3 lab/rivals/step.py [--cases 1.7B-2K,1.7B-8K,1.7B-32K,80M-2K,SmolLM2-2K,SmolLM2-8K,Qwen2.5-2K,Qwen2.5-8K]
    python3 lab/rivals/step.py --float8        (torchao's float8 for the layers' projections, one scale a tensor)
    python3 lab/rivals/step.py --tiny          (no GPU: runs every line once on the CPU, uncompiled)

Every layer compiled, SDPA by cuDNN, bf16 autocast over f32 weights, fused AdamW, gradients clipped at 1; random tokens; the median of nine steps
after three, and the most memory that tensors took.
"""

import argparse
import statistics
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForCausalLM

# Kind of model, its vocabulary, layers, width, query heads, KV heads, width of a head and of the feed-forward layer; tokens of a row, rows.
QWEN3, SMOLLM2, QWEN25 = ("qwen3", 50280), ("llama", 49152, 30, 576, 9, 3, 64, 1536), ("qwen2", 151936, 24, 896, 14, 2, 64, 4864)
CASES = {
    "1.7B-2K": (*QWEN3, 28, 2048, 16, 8, 128, 6144, 2048, 8),
    "1.7B-8K": (*QWEN3, 28, 2048, 16, 8, 128, 6144, 8192, 2),
    "1.7B-32K": (*QWEN3, 28, 2048, 16, 8, 128, 6144, 32768, 1),
    "80M-2K": (*QWEN3, 12, 768, 6, 6, 128, 2048, 2048, 32),
    "SmolLM2-2K": (*SMOLLM2, 2048, 16),
    "SmolLM2-8K": (*SMOLLM2, 8192, 4),
    "Qwen2.5-2K": (*QWEN25, 2048, 8),
    "Qwen2.5-8K": (*QWEN25, 8192, 2),
}
TINY = ("qwen2", 500, 2, 64, 2, 1, 32, 96, 32, 2)


def config_of(sizes):
    """Of transformers, for one of CASES."""
    family, vocabulary, layers, width, heads, kv_heads, head_dim, ff, seq_len, _ = sizes
    return AutoConfig.for_model(family, vocab_size=vocabulary, hidden_size=width, intermediate_size=ff, num_hidden_layers=layers,
                                num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, use_cache=False,
                                max_position_embeddings=seq_len, tie_word_embeddings=True)


def head_loss(hidden, weight, labels):
    logits = torch.nn.functional.linear(hidden, weight).float()
    return torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1))


def built(config, device, float8=False):
    """A model of this configuration and its loss of tokens and labels, compiled on a GPU."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    head = head_loss
    if float8:
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(model.model.layers)
    if device == "cuda":
        for layer in model.model.layers:
            layer.compile(dynamic=False)
        head = torch.compile(head_loss, dynamic=False)
    backends = [SDPBackend.CUDNN_ATTENTION] if device == "cuda" else [SDPBackend.MATH]

    def loss(tokens, labels):
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"), sdpa_kernel(backends):
            hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
            return head(hidden, model.lm_head.weight, labels)

    return model, loss


def inputs_of(sizes, model, device):
    """Random tokens, one more a row than are read, and the optimizer."""
    seq_len, rows = sizes[-2:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda")
    return torch.randint(0, sizes[1], (rows, seq_len + 1), device=device), optimizer


def update(model, optimizer):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def measured(step, device, warm, steps):
    """Median seconds of `steps` steps after `warm` ones, and the most GiB that tensors took."""
    times = []
    for _ in range(warm + steps):
        started = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[warm:]), torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0


def run(name, sizes, device, steps, warm, float8=False):
    """Prints the median milliseconds of a step, tokens/s and most GiB of one case; float8: projections by torchao."""
    seq_len, rows = sizes[-2:]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model, loss = built(config_of(sizes), device, float8)
    tokens, optimizer = inputs_of(sizes, model, device)

    def step():
        loss(tokens[:, :-1], tokens[:, 1:]).backward()
        update(model, optimizer)

    seconds, peak = measured(step, device, warm, steps)
    print(f"{name:10} {1e3 * seconds:9.2f} ms a step, {rows * seq_len / seconds:9.0f} tokens/s, at most {peak:.1f} GiB", flush=True)


def main():
    """Times each of --cases, or with --tiny runs every line once on the CPU."""
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
