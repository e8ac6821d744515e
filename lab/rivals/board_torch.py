"""The PyTorch entry of lab/docs/board.md: transformers' Qwen3 with dense attention, from the recipe and the tokens of `sieve train`.

    python3 lab/rivals/board_torch.py --recipe lab/recipes/board_80m.toml --out OUT [--set section.key=value]… [--device cuda:0]
    python3 lab/rivals/board_torch.py --recipe … --out OUT --set … --weights EXPORT    (evaluates an export of `sieve export`)

Trains, then prints the loss on the held-out documents as `sieve eval ppl --recipe-validation --json` does with a stride of
one row; OUT/metrics.jsonl gets the losses. Model, loss and torch.compile are those of step.py: bf16 autocast, SDPA by
cuDNN, fused AdamW. Rows are packed as in Sieve: documents in a random order, one after another, cut into rows, which are
shuffled; the last token of a document has no label. SDPA's causal kernel knows no bounds of documents, so a token also
sees the document before its own in the row: a mask would cost the entry its fastest kernel. Needs torch and transformers.
"""

import argparse
import json
import math
import pathlib
import sys
import time
import tomllib

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

from step import built

IGNORED = -100  # the label of a position without a prediction


def merged(sections, other):
    """The sections of a recipe with those of another in front."""
    return sections | {key: merged(sections.get(key, {}), value) if isinstance(value, dict) else value
                       for key, value in other.items()}


def documents(prefix):
    """The token ids of each document of an indexed dataset (docs/own-data.md)."""
    index = pathlib.Path(f"{prefix}.idx").read_bytes()
    lengths = np.frombuffer(index, "<i4", int.from_bytes(index[18:26], "little"), 34)
    tokens = np.fromfile(f"{prefix}.bin", {4: "<i4", 8: "<u2"}[index[17]]).astype(np.int64)
    return np.split(tokens, np.cumsum(lengths)[:-1])


def bytes_of_tokens(tokenizer):
    """Bytes of text that each token of a byte-level BPE stands for, a character a byte; 0 for special tokens."""
    found = json.loads(tokenizer.read_text())
    names = {number: len(name) for name, number in found["model"]["vocab"].items()}
    names |= {token["id"]: 0 if token["special"] else len(token["content"].encode()) for token in found["added_tokens"]}
    return np.array([names[number] for number in range(len(names))])


def batches(parts, length, rows, seed):
    """Batches of tokens and labels [rows, length] without end, another order in each epoch."""
    draw = np.random.default_rng(seed)
    while True:
        order = [parts[at] for at in draw.permutation(len(parts))]
        tokens = np.concatenate(order)
        labels = np.roll(tokens, -1)
        labels[np.cumsum([len(part) for part in order]) - 1] = IGNORED
        count = len(tokens) // length
        if count < rows:
            sys.exit(f"the training text has {len(tokens)} tokens, fewer than {rows} rows of {length}")
        tokens, labels = (values[:count * length].reshape(count, length) for values in (tokens, labels))
        chosen = draw.permutation(count)[:count // rows * rows].reshape(-1, rows)
        yield from ((tokens[at], labels[at]) for at in chosen)


def windows(parts, length):
    """Each document in windows of `length` tokens that do not overlap: tokens and labels, padded behind the last."""
    for part in parts:
        for at in range(0, len(part) - 1, length):
            tokens, labels = np.zeros(length, np.int64), np.full(length, IGNORED)
            predicted = part[at + 1:at + 1 + length]
            labels[:len(predicted)], tokens[:len(predicted)] = predicted, part[at:at + len(predicted)]
            yield tokens, labels


def factor(step, steps, schedule):
    """Share of the learning rate at a step, from 0, of a `sqrt` schedule (docs/recipe.md, [lr_scheduler])."""
    warmup = min(schedule["warmup_steps"], steps)
    decay = min(round(steps * schedule["decay_ratio"]), steps - warmup)
    if step < warmup:
        return (step + 1) / warmup
    progress = max(step - (steps - decay), 0) / max(decay, 1)
    return schedule["min_lr_factor"] + (1 - schedule["min_lr_factor"]) * (1 - math.sqrt(progress))


def train(model, loss, recipe, next_batch, out):
    """Trains in place for the recipe's steps. `loss`: a function of tokens and labels; `next_batch`: gives both on the
    device; `out`: folder that gets metrics.jsonl, a line every `log_freq` steps."""
    training, settings = recipe["training"], recipe["optimizer"]
    if recipe["lr_scheduler"]["decay_type"] != "sqrt" or settings["name"] != "AdamW" or "global_batch_size" in training:
        sys.exit("the recipe: only AdamW, lr_scheduler.decay_type = \"sqrt\" and steps of one batch are known here")
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings["weight_decay"]}, {"params": others, "weight_decay": 0.0}],
        betas=(settings["beta1"], settings["beta2"]), eps=settings["eps"], fused=matrices[0].is_cuda)
    every, started = recipe["metrics"]["log_freq"], time.monotonic()
    with open(out / "metrics.jsonl", "w", encoding="utf-8") as lines:
        for step in range(training["steps"]):
            tokens, labels = next_batch()
            value = loss(tokens, labels)
            value.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), training["max_norm"])
            for group in optimizer.param_groups:
                group["lr"] = settings["lr"] * factor(step, training["steps"], recipe["lr_scheduler"])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if (step + 1) % every == 0:
                line = {"kind": "step", "step": step + 1, "loss": value.item()}  # .item() waits for the GPU
                speed = every * tokens.numel() / (time.monotonic() - started)
                started = time.monotonic()
                lines.write(json.dumps(line | {"tokens_per_second": speed}) + "\n")
                lines.flush()


def evaluated(loss, parts, sizes, length, rows, device):
    """The keys of `sieve eval ppl --json` that the board reads."""
    found, nats, num_tokens, num_bytes = list(windows(parts, length)), 0.0, 0, 0
    empty = (np.zeros(length, np.int64), np.full(length, IGNORED))
    for at in range(0, len(found), rows):
        batch = found[at:at + rows]
        # Full batches: another shape would be compiled anew. So would a pass without gradients.
        tokens, labels = (np.stack(values) for values in zip(*batch, *[empty] * (rows - len(batch))))
        predicted = labels[labels != IGNORED]
        mean = loss(torch.from_numpy(tokens).to(device), torch.from_numpy(labels).to(device)).item()
        nats, num_tokens = nats + mean * len(predicted), num_tokens + len(predicted)
        num_bytes += int(sizes[predicted].sum())
    return {"program": f"torch {torch.__version__}, transformers {transformers.__version__}", "num_tokens": num_tokens,
            "num_bytes": num_bytes, "loss": nats / num_tokens, "bits_per_byte": nats / math.log(2) / num_bytes}


def main():
    """Trains by the recipe, or loads an export with --weights, then prints the held-out loss as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="a word as value in quotes")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--weights", type=pathlib.Path, help="an export: is not trained")
    arguments = parser.parse_args()
    recipe = {}
    for text in [pathlib.Path(arguments.recipe).read_text(), *arguments.set]:
        recipe = merged(recipe, tomllib.loads(text))
    if arguments.device != "cpu":
        torch.cuda.set_device(arguments.device)
    torch.set_float32_matmul_precision("high")
    training, data = recipe["training"], pathlib.Path(recipe["data"]["cache_dir"])
    torch.manual_seed(training["seed"])
    sizes = bytes_of_tokens(data / "tokenizer.json")
    of_model = {key: recipe["model"][key] for key in [
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings", "initializer_range"]}
    rope = {"rope_type": "default", "rope_theta": recipe["model"]["rope_theta"]}
    config = transformers.AutoConfig.for_model("qwen3", vocab_size=len(sizes), use_cache=False, rope_parameters=rope, **of_model)
    device = torch.device(arguments.device).type
    model, loss = built(config, device)
    length, rows = training["seq_len"], training["local_batch_size"]
    if arguments.weights:
        weights = load_file(arguments.weights / "model.safetensors")
        model.load_state_dict({"lm_head.weight": weights["model.embed_tokens.weight"]} | weights)  # tied: an export has it once
    else:
        arguments.out.mkdir(parents=True, exist_ok=True)
        source = batches(documents(data / "train"), length, rows, training["seed"])
        pinned = lambda values: torch.from_numpy(values).pin_memory() if device == "cuda" else torch.from_numpy(values)
        next_batch = lambda: [pinned(values).to(device, non_blocking=True) for values in next(source)]
        train(model, loss, recipe, next_batch, arguments.out)
    print(json.dumps(evaluated(loss, documents(data / "validation"), sizes, length, rows, device)))


if __name__ == "__main__":
    main()
