"""How far a sampler's log-probabilities are from those of the trainer's pass: in Sieve, and in transformers.

    sampler_trainer.py SIEVE EXPORT [--texts 32] [--tokens 64] [--prompt TEXT] [--dtypes f32 bf16]

Sieve samples with `generate --json --logprobs`, and `serve` scores the same ids as whole texts (`echo`), with the numbers
of the trainer's pass. transformers samples from the same folder with its cache, and scores by a pass over whole rows; it
scores Sieve's texts too, as a trainer in PyTorch on texts of `sieve generate`. Both draw at temperature 1 from all tokens, on a CPU. A line of JSON for each dtype and program: tokens, how many
log-probabilities differ, the largest difference in nats, and the mean of exp(d) - 1 - d with d the trainer's minus the
sampler's, an estimate of the KL divergence of the two that is never negative. Needs torch and transformers.
"""

import argparse
import json
import math
import subprocess

import torch
from same_bits import echoed
from serve_waits import Server
from transformers import AutoModelForCausalLM


def line(program, dtype, pairs):
    """Prints what the pairs of log-probabilities, sampler's and trainer's, say."""
    apart = [trained - drawn for drawn, trained in pairs]
    print(json.dumps({
        "program": program, "dtype": dtype, "tokens": len(apart), "differ": sum(d != 0.0 for d in apart),
        "largest": max(map(abs, apart)), "kl": sum(math.expm1(d) - d for d in apart) / len(apart),
    }), flush=True)


def of_sieve(given, dtype):
    """What Sieve samples, an object of JSON a text, and the pairs of its tokens."""
    flags = ["--device", "cpu", "--dtype", dtype]
    command = [given.sieve, "generate", "--checkpoint", given.export, *flags, "--prompt", given.prompt, "--json",
               "--logprobs", "--samples", str(given.texts), "--max-new-tokens", str(given.tokens), "--temperature", "1",
               "--top-p", "1"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    texts, pairs = [json.loads(line) for line in printed.splitlines()], []
    server = Server(given.sieve, given.export, flags)
    try:
        for text in texts:
            prompt, new = text["prompt_token_ids"], text["token_ids"]
            pairs += zip(text["token_logprobs"], echoed(server, {"prompt": prompt}, new), strict=True)
    finally:
        server.process.terminate()
        server.process.wait()
    return texts, pairs


@torch.no_grad()
def of_both(model, texts):
    """The pairs of Sieve's texts, scored by transformers."""
    pairs = []
    for text in texts:
        new = torch.tensor(text["token_ids"])
        row = torch.tensor([text["prompt_token_ids"] + text["token_ids"]])
        logits = model(row).logits[0, -len(new) - 1 : -1].float()
        pairs += zip(text["token_logprobs"], logits.log_softmax(-1).gather(1, new[:, None])[:, 0].tolist(), strict=True)
    return pairs


def of_transformers(model, given, prompt):
    """The pairs of as many tokens that transformers samples behind the prompt."""
    torch.manual_seed(1)
    begin = torch.tensor([prompt] * given.texts)
    answer = model.generate(begin, do_sample=True, top_p=1.0, top_k=0, temperature=1.0, max_new_tokens=given.tokens,
                            eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, output_logits=True)
    with torch.no_grad():
        rows = model(answer.sequences).logits.float().log_softmax(-1)
    pairs = []
    for at, logits in enumerate(answer.logits):
        ids = answer.sequences[:, len(prompt) + at, None]
        drawn = logits.float().log_softmax(-1).gather(1, ids)
        trained = rows[:, len(prompt) + at - 1].gather(1, ids)
        pairs += zip(drawn.flatten().tolist(), trained.flatten().tolist())
    return pairs


def main():
    """Prints three lines a dtype."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("sieve")
    words.add_argument("export")
    words.add_argument("--texts", type=int, default=32)
    words.add_argument("--tokens", type=int, default=64)
    words.add_argument("--prompt", default="fn ")
    words.add_argument("--dtypes", nargs="+", default=["f32", "bf16"], choices=["f32", "bf16"])
    given = words.parse_args()
    for dtype in given.dtypes:
        texts, pairs = of_sieve(given, dtype)
        line("sieve", dtype, pairs)
        kind = torch.float32 if dtype == "f32" else torch.bfloat16
        model = AutoModelForCausalLM.from_pretrained(given.export, dtype=kind, trust_remote_code=True).eval()
        line("sieve samples, transformers trains", dtype, of_both(model, texts))
        line("transformers", dtype, of_transformers(model, given, texts[0]["prompt_token_ids"]))


if __name__ == "__main__":
    main()
