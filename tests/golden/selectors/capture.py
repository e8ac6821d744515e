"""Queries and keys of trained models, after the rotation, as bfloat16: a plain numpy forward pass of exported checkpoints.

Usage: python capture.py OUT.safetensors TEXT SIEVE NAME:EXPORT:CHECKPOINT:LAYER...
TEXT is the file whose first tokens are read, SIEVE the program; EXPORT is what `sieve export` wrote of CHECKPOINT. The pass is
checked against `sieve logits` first.
"""
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from make_lists import softmax, write

TOKENS = 768


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def rotate(x, theta):
    """Rotate-half positions of x [tokens, heads, head_dim]."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None, None] * theta ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=-1)


def forward(folder, tokens):
    """Logits, and q and k of every layer."""
    config = json.loads((folder / "config.json").read_text())
    weights = {name: x.astype(np.float64) for name, x in load_file(folder / "model.safetensors").items()}
    d, eps = config["head_dim"], config["rms_norm_eps"]
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    n = len(tokens)
    future = np.triu(np.full((n, n), -np.inf), 1)
    x, operands = weights["model.embed_tokens.weight"][tokens], []
    for layer in range(config["num_hidden_layers"]):
        w = lambda name: weights[f"model.layers.{layer}.{name}.weight"]
        y = rms_norm(x, w("input_layernorm"), eps)
        q, k, v = ((y @ w(f"self_attn.{name}_proj").T).reshape(n, -1, d) for name in "qkv")
        q = rotate(rms_norm(q, w("self_attn.q_norm"), eps), theta)
        k = rotate(rms_norm(k, w("self_attn.k_norm"), eps), theta)
        operands.append((q, k))
        heads = []
        for head in range(q.shape[1]):
            logits = q[:, head] @ k[:, head // group].T / np.sqrt(d) + future
            heads.append(softmax(logits) @ v[:, head // group])
        x = x + np.concatenate(heads, axis=-1) @ w("self_attn.o_proj").T
        y = rms_norm(x, w("post_attention_layernorm"), eps)
        gate, up = y @ w("mlp.gate_proj").T, y @ w("mlp.up_proj").T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w("mlp.down_proj").T
    x = rms_norm(x, weights["model.norm.weight"], eps)
    return x @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T, operands


def bfloat16(x):
    """Bits of the nearest bfloat16."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def main():
    out, text, sieve, *captures = sys.argv[1:]
    tensors = {}
    for capture in captures:
        name, folder, checkpoint, layer = capture.split(":")
        folder = Path(folder)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokens = tokenizer.encode(Path(text).read_text()).ids[:TOKENS]
        logits, operands = forward(folder, tokens)
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
            ids = ",".join(map(str, tokens))
            command = [sieve, "logits", "--checkpoint", checkpoint, "--tokens", ids, "--device", "cpu", "--out", file.name]
            subprocess.run(command, check=True)
            error = np.abs(load_file(file.name)["logits"][0] - logits).max()
        print(f"{name}: {len(tokens)} tokens, largest difference of a logit {error:.1e}")
        assert error < 1e-3 and len(tokens) == TOKENS
        q, k = operands[int(layer)]
        tensors[f"{name}/q"], tensors[f"{name}/k"] = bfloat16(q), bfloat16(k)
    write(out, tensors)


if __name__ == "__main__":
    main()
