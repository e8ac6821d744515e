"""Twenty steps of fine-tuning on chats by Sieve and by TRL, from the same weights, chats and order.

usage, from the repository's root (needs torch, transformers, TRL 1.16, datasets):
    chat_sft.py [--sieve target/release/sieve] [--steps 20] [--packed] [--keep DIR] [--model FOLDER]

A small Llama of random weights in the shape of SmolLM2 (9 heads on 3, tied embedding), with the tokenizer of
tests/golden/chat_masks and a ChatML template with {% generation %} blocks, is imported. Sieve trains on chats of JSON
lines (`data.messages_column`), one a row, and `sieve data batch` says which chats each step holds. TRL's SFTTrainer
then takes the same steps with `assistant_only_loss`, and tokenises and masks by itself: AdamW, clipping, a constant
learning rate, f32 on the CPU.

--packed   Sieve packs the chats into rows, of which the last of a row goes on in the next. PyTorch takes the same steps
           with each chat of a row, or part of one, by itself.

--model    Trains this model of ChatML, such as SmolLM2 by smollm2.py, with two chats a step of at most 128 tokens.

Prints both losses of every step; exit code 1 when one differs by more than 1e-3.
"""

import argparse
import json
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile

import torch
from datasets import Dataset
from runs import metrics, steps_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

ROOT = pathlib.Path(__file__).resolve().parents[2]
MASKS = ROOT / "tests/golden/chat_masks"
TOLERANCE = 1e-3
ROWS, TOKENS, LR = 4, 256, 1e-3


def published_folder(model, folder):
    """A copy of a model with the template that marks the assistant's words."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (MASKS / "chatml.jinja").read_text()
    tokenizer.save_pretrained(folder)
    return tokenizer


def model_folder(folder):
    """Writes a small Llama with random weights and its chat template to `folder`; returns its tokenizer."""
    torch.manual_seed(0)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(MASKS / "tokenizer.json"), bos_token="<s>", eos_token="<|im_end|>", pad_token="</s>"
    )
    tokenizer.chat_template = (MASKS / "chatml.jinja").read_text()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=144, intermediate_size=384, num_hidden_layers=3, num_attention_heads=9,
        num_key_value_heads=3, head_dim=16, max_position_embeddings=TOKENS, tie_word_embeddings=True,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def chats(count):
    """Yields `count` random chats of one or two turns, some with a system message; not all words are ASCII."""
    words = ["Hello", "Grüße", "who", "are", "you", "fine", "it's", "brief", "message", "<é>", "🙂", "role\n"]
    draw = random.Random(7)

    def say(most):
        return " ".join(draw.choice(words) for _ in range(draw.randint(1, most)))

    for _ in range(count):
        turns = [{"role": "system", "content": say(3)}] if draw.random() < 0.4 else []
        for _ in range(draw.randint(1, 2)):
            turns += [{"role": "user", "content": say(6)}, {"role": "assistant", "content": say(8)}]
        yield turns


class Sieve:
    def __init__(self, program, folder, packed, steps):
        """Imports the model of `folder` and sets the keys of a run on its chats;
        `packed`: rows of several chats instead of one."""
        self.program, self.folder = program, folder
        chats = ("--data", folder / "chats.jsonl", "--set", "data.messages_column=messages")
        self.run("import", "--from", folder / "model", "--out", folder / "imported", *chats)
        keys = {
            "data.paths": [str(folder / "chats.jsonl")], "data.messages_column": "messages", "training.steps": steps,
            "data.validation_fraction": 0.01, "data.cache_dir": str(folder / "data"), "training.seq_len": TOKENS,
            "training.local_batch_size": ROWS, "training.global_batch_size": ROWS, "training.max_norm": 1.0,
            "training.one_document_per_row": not packed, "optimizer.lr": LR, "optimizer.beta1": 0.9,
            "optimizer.beta2": 0.999, "optimizer.eps": 1e-8, "optimizer.weight_decay": 0.0,
            "lr_scheduler.warmup_steps": 0, "lr_scheduler.decay_ratio": 0.0, "metrics.log_freq": 1,
            "metrics.enable_tensorboard": False, "checkpoint.interval": steps, "checkpoint.at_start": True,
        }  # fmt: skip
        self.sets = [word for key, value in keys.items() for word in ("--set", f"{key}={json.dumps(value)}")]

    def run(self, *arguments):
        command = [self.program, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        return done.stdout

    def train(self):
        out = self.folder / "run"
        recipe = self.folder / "imported/recipe.toml"
        said = self.run("train", "--recipe", recipe, "--out", out, "--device", "cpu", *self.sets)
        print(next(line for line in said.splitlines() if "loss on" in line))
        return [row["loss"] for row in steps_of(metrics(out))]

    def batch(self, step):
        out = self.folder / "batch.safetensors"
        recipe = self.folder / "run/config.toml"
        self.run("data", "batch", "--recipe", recipe, "--step", step, "--out", out)
        return load_file(out)


def torch_model(folder):
    """The model in f32, with all its gradients: transformers leaves out that of the padding token's row in the input
    embedding, which in SmolLM2's chats is a token that counts, `<|im_end|>`."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    model.get_input_embeddings().padding_idx = None
    return model


def trl_losses(folder, tokenizer, rows):
    """The losses of TRL's SFTTrainer on these chats, `ROWS` of them a step, in the order in which Sieve took them."""
    model = torch_model(folder)
    steps = len(rows) // ROWS
    config = SFTConfig(
        output_dir=str(folder / "trl"), max_steps=steps, per_device_train_batch_size=ROWS, learning_rate=LR,
        lr_scheduler_type="constant", bf16=False, fp16=False, logging_steps=1, report_to="none", save_strategy="no",
        max_length=TOKENS, disable_tqdm=True, use_cpu=True, gradient_checkpointing=False, weight_decay=0.0,
        max_grad_norm=1.0, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, assistant_only_loss=True,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    data = Dataset.from_list([{"messages": row} for row in rows])
    trainer = SFTTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def packed_loss(model, batch):
    """Cross-entropy of packed rows, each chat of a row by itself."""
    total, count = 0.0, 0
    for row in range(batch["tokens"].shape[0]):
        starts = sorted(set(batch["doc_start"][row].tolist()))
        for start, end in zip(starts, [*starts[1:], TOKENS]):
            tokens = batch["tokens"][row : row + 1, start:end].long()
            labels = batch["labels"][row, start:end].long()
            logits = model(tokens, use_cache=False).logits[0]
            total = total + torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
            count += int((labels != -100).sum())
    return total / count


def packed_losses(folder, batches):
    """The losses of PyTorch on the batches that Sieve wrote, a step each by `packed_loss` and AdamW."""
    model = torch_model(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = packed_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    """Trains both and prints their losses step by step; exit code 1 where one differs by more than `TOLERANCE`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sieve", default="target/release/sieve")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--keep")
    parser.add_argument("--model", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.model:
        global ROWS, TOKENS, LR
        ROWS, TOKENS, LR = 2, 128, 1e-4
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(arguments.keep or temporary).resolve()
        (folder / "model").mkdir(parents=True)
        model = folder / "model"
        tokenizer = published_folder(arguments.model, model) if arguments.model else model_folder(model)
        length = lambda chat: len(tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"])  # noqa: E731
        all_chats = [chat for chat in chats(300) if length(chat) <= TOKENS]
        lines = [json.dumps({"messages": chat}, ensure_ascii=False) for chat in all_chats]
        (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")
        sieve = Sieve(arguments.sieve, folder, arguments.packed, arguments.steps)
        losses = sieve.train()
        batches = [sieve.batch(step) for step in range(1, arguments.steps + 1)]
        if arguments.packed:
            expected = packed_losses(folder, batches)
        else:
            ids = [tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"] for chat in all_chats]
            # The last token of a row has no label, so Sieve leaves it out.
            chat_of_ids = {tuple(row[:-1]): chat for row, chat in zip(ids, all_chats)}
            pairs = [pair for batch in batches for pair in zip(batch["tokens"], batch["doc_start"])]
            rows = [chat_of_ids[tuple(row[starts == 0].tolist())] for row, starts in pairs]
            expected = trl_losses(folder, tokenizer, rows)
    worst = 0.0
    name = "PyTorch" if arguments.packed else "TRL"
    for step, (ours, theirs) in enumerate(zip(losses, expected, strict=True), 1):
        worst = max(worst, abs(ours - theirs))
        print(f"step {step:2}: Sieve {ours:.5f}, {name} {theirs:.5f}")
    print(f"largest difference {worst:.1e}, {'within' if worst <= TOLERANCE else 'NOT within'} {TOLERANCE}")
    sys.exit(not worst <= TOLERANCE)


main()
