"""Exports of every kind of attention in the programs that read them: which work, and what the others are told.

usage: consumers.py SIEVE [--converter FOLDER] [--only WORD] [--keep FOLDER]

Trains a model of each kind for two steps, exports it, opens the export with the transformers of this Python and tries:

- batches: generate() of prompts of three lengths, padded on the left;
- continuous: generate_batch(), continuous batching;
- static: generate() with a cache of fixed size;
- assisted: generate() with prompt_lookup_num_tokens, which crops the cache;
- flex: attn_implementation="flex_attention", but for Doge (minutes on a CPU);
- engine: vLLM's and SGLang's way to run a model of transformers. Neither is installed: a function registered here does
  what theirs do. It finds the layer's cache by module.layer_idx, reads all keys of the text or of the layer's window,
  and passes over masks;
- saved: what save_pretrained() wrote, in `sieve logits`;
- gguf: with --converter, a folder of llama.cpp, what its convert_hf_to_gguf.py makes of it, in llama.cpp's library (the
  package xllamacpp): its log-likelihoods and greedy tokens beside those of `sieve logits`. --only gguf tries this
  alone. The type of the tokenizer is named to the converter, which knows published ones alone.

Of version 4 of transformers neither assisted decoding, which fails there with PyTorch 2.15, nor continuous batching of
stock classes, which wants another attn_implementation, is tried.

A text must be what the model goes on with, token by token, without a cache. Prints one line each: "works", or "refused"
with the words, or "WRONG". Ends with 1 where the outcome is not that of EXPECTED, which docs/export.md repeats.
"""

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf_files
from kinds import names

os.environ.update(CUDA_VISIBLE_DEVICES="", TRANSFORMERS_OFFLINE="1", TRANSFORMERS_VERBOSITY="critical")
os.environ.update(HF_HUB_DISABLE_PROGRESS_BARS="1", TQDM_DISABLE="1")
NEW = 16
TOLERANCE = 1e-4
PROMPTS = [[(i * 37 + 11 * n) % 300 for i in range(n)] for n in (5, 60, 21)]
RECIPE = """
[model]
hidden_size = 64
intermediate_size = 96
num_hidden_layers = 3
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 16
max_position_embeddings = 256
initializer_range = 0.2
[attention]
kind = "mha"
[tokenizer]
train = { vocab_size = 320 }
[data]
paths = [TEXT]
[training]
steps = 2
seq_len = 64
local_batch_size = 2
[optimizer]
lr = 1e-2
[lr_scheduler]
warmup_steps = 0
[validation]
interval = 100
"""
# MiniMax-M3's text class, the one form that is asked for.
M3 = "msa, --form m3"
# By kind: overrides of the recipe.
KINDS = {
    **{kind: [f"attention.kind={kind}"] for kind in names()},
    "swa": ["attention.kind=swa", "attention.sliding_window=12"],
    "mha, residual scales": ["attention.kind=mha", "model.residual_scale=true"],
    "mla, no norms": ["attention.kind=mla", "attention.qk_norm=false"],
    # Texts within the window: beyond it stock Doge keeps whichever of equal keys it finds.
    "dma, preset paper": ["attention.kind=dma", "attention.preset=paper", "attention.keep_window_size=128"],
    "dma": ["attention.kind=dma", "attention.keep_window_size=12"],
    "dma, one dense layer": [
        "attention.kind=dma", "attention.keep_window_size=12", 'model.layer_types=["dma","mha","dma"]',
    ],
    M3: ["attention.kind=msa", "attention.select_block_size=16", "attention.num_selected_blocks=2"],
}  # fmt: skip
WORKS = "works"
ENGINE = "refused: attn_implementation='vllm': an engine's attention function"
PAGED = "refused: continuous batching is not supported"
STATIC = "refused: past_key_values: StaticCache is not supported"
FLEX = "refused: SieveForCausalLM does not support"
# Words of version 5, and those of the file, which version 4 leads to.
CROP = ("refused: Assisted decoding requires a cache that can be cropped", "refused: DMA keeps no key that left")
SIEVE = {
    "batches": WORKS, "continuous": PAGED, "static": STATIC, "assisted": WORKS, "flex": FLEX, "engine": ENGINE,
    "saved": WORKS, "gguf": "refused: Model SieveForCausalLM is not supported",
}  # fmt: skip
DMA = {**SIEVE, "assisted": CROP}
STOCK = dict.fromkeys(SIEVE, WORKS)
EXPECTED = {
    **dict.fromkeys(KINDS, SIEVE),
    "mha": STOCK,
    "swa": {**STOCK, "gguf": "WRONG: other logits"},
    # The class of transformers: a traceback is logged and no error raised.
    # The library of llama.cpp wants low-rank queries of each model of this class without 26, 27 or 48 layers.
    "mla, no norms": {
        **STOCK, "continuous": "WRONG: [[], [], []]",
        "gguf": "refused: key not found in model: deepseek2.attention.q_lora_rank",
    },
    # Attention of an engine reads all keys, and no rank is added to the logits.
    "dma, preset paper": {
        **STOCK, "engine": "WRONG: other logits", "gguf": "refused: Model DogeForCausalLM is not supported",
    },
    # Blocks begin at the padding, and an engine's attention reads all keys. The last was not tried.
    M3: {
        **STOCK, "batches": "WRONG", "continuous": "refused: Invalid layer type: minimax_m3_sparse",
        "flex": "refused: MiniMaxM3VLForCausalLM does not support", "engine": "WRONG: other logits", "gguf": "",
    },
    "dma": DMA,
    "dma, one dense layer": DMA,
}  # fmt: skip


def run(*command, **options):
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)


def must(*command):
    done = run(*command)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


def make_exports(sieve, root, kinds):
    """Folders with an export of each kind."""
    lines = (f"Item {i} of the list is near {i * 37 % 101}, colour {i % 7}, weight {i * 13 % 89}." for i in range(400))
    (root / "text.txt").write_text("\n".join(lines))
    (root / "recipe.toml").write_text(RECIPE.replace("TEXT", json.dumps(str(root / "text.txt"))))
    for number, kind in enumerate(kinds):
        out = root / str(number)
        sets = [word for text in KINDS[kind] for word in ("--set", text)]
        recipe = ("--recipe", root / "recipe.toml", "--out", out, "--device", "cpu", "--overwrite")
        must(sieve, "train", *recipe, *sets)
        form = ("--form", "m3") if kind == M3 else ()
        must(sieve, "export", "--checkpoint", out, "--out", out / "hf", *form)
        yield kind, out / "hf"


def load(folder, **options):
    import torch
    import transformers

    name = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
    options = {name: torch.float32, "trust_remote_code": True, **options}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    model.generation_config.eos_token_id = None
    return model


def greedy(model, prompt):
    """What the model goes on with, a whole pass a token."""
    import torch

    ids = torch.tensor([prompt])
    for _ in range(NEW):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return ids[0, len(prompt) :].tolist()


def same(answer, expected):
    return WORKS if answer == expected else f"WRONG: {answer} for {expected}"


def close(computed, expected):
    """`expected` is of the whole model."""
    off = float((computed - expected).abs().max() / expected.abs().max())
    return WORKS if off < TOLERANCE else f"WRONG: other logits, by {off:.1e}"


class Export:
    """A loaded export, prompts and what it goes on with."""

    def __init__(self, sieve, folder):
        self.sieve, self.folder = sieve, folder
        self.is_doge = json.loads((folder / "config.json").read_text())["model_type"] == "doge"
        # With SDPA, some releases compute Doge without its mask.
        self.options = {"attn_implementation": "eager"} if self.is_doge else {}
        self.model = load(folder, **self.options)
        self.prompts = PROMPTS
        self.texts = [greedy(self.model, prompt) for prompt in self.prompts]

    def consumers(self):
        import transformers

        left_out = {"flex"} if self.is_doge else set()
        if transformers.__version__.startswith("4."):
            left_out |= {"assisted"} if type(self.model).__name__ == "SieveForCausalLM" else {"assisted", "continuous"}
        every = ("batches", "continuous", "static", "assisted", "flex", "engine", "saved")
        return [name for name in every if name not in left_out]

    def batches(self):
        import torch

        width = max(map(len, self.prompts))
        rows = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in self.prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in self.prompts])
        options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        return same(self.model.generate(rows, attention_mask=mask, **options)[:, width:].tolist(), self.texts)

    def alone(self, **options):
        """Each prompt by itself."""
        import torch

        options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
        rows = [self.model.generate(torch.tensor([prompt]), **options)[0] for prompt in self.prompts]
        return same([row[len(prompt) :].tolist() for row, prompt in zip(rows, self.prompts)], self.texts)

    def static(self):
        return self.alone(cache_implementation="static", disable_compile=True)

    def assisted(self):
        return self.alone(prompt_lookup_num_tokens=3)

    def continuous(self):
        import transformers

        model = copy.deepcopy(self.model)
        settings = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
        # Without a size the cache takes nine tenths of the machine's memory. Version 4 has no class for it.
        make = getattr(transformers, "ContinuousBatchingConfig", None)
        size = {"continuous_batching_config": make(num_blocks=64, max_batch_tokens=128)} if make else {}
        texts_by_request = model.generate_batch(inputs=self.prompts, generation_config=settings, **size)
        return same(sorted(list(text.generated_tokens) for text in texts_by_request.values()), sorted(self.texts))

    def flex(self):
        import torch

        ids = torch.tensor([self.prompts[1]])
        model = load(self.folder, attn_implementation="flex_attention")
        return close(model(ids, use_cache=False).logits, self.model(ids, use_cache=False).logits)

    def engine(self):
        import torch
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        lengths = [len(prompt) for prompt in self.prompts]

        def attention(module, query, key, value, attention_mask, scaling=None, attention_instances=None, **_):
            return attention_instances[module.layer_idx](query, key, value, scaling), None

        def layer(window):
            def attend(*given):
                q, k, v, scale = given
                texts = []
                for q, k, v in zip(*(x.split(lengths, 2) for x in (q, k, v))):
                    at = torch.arange(q.shape[2])
                    visible = at <= at[:, None] if window is None else (at <= at[:, None]) & (at > at[:, None] - window)
                    settings = {"attn_mask": visible, "scale": scale, "enable_gqa": True}
                    texts.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, **settings))
                return torch.cat(texts, 2).transpose(1, 2)

            return attend

        ALL_ATTENTION_FUNCTIONS.register("vllm", attention)
        config = self.model.config
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        windows = (config.sliding_window if kind == "sliding_attention" else None for kind in kinds)
        instances = dict(enumerate(map(layer, windows)))
        is_compatible = self.model.is_backend_compatible()
        try:
            model = load(self.folder, attn_implementation="vllm")
        except ValueError:
            assert not is_compatible, "the class says that an engine may run it, and refuses the engine's attention"
            raise
        ids = torch.tensor([[token for prompt in self.prompts for token in prompt]])
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        given = {"position_ids": positions, "attention_instances": instances, "use_cache": False}
        parts = model(ids, **given).logits[0].split(lengths)
        expected = [self.model(torch.tensor([prompt]), use_cache=False).logits[0] for prompt in self.prompts]
        assert is_compatible, "an engine refuses the class, whose logits are right"
        return close(torch.cat(parts), torch.cat(expected))

    def saved(self):
        """The way through save_pretrained() and back."""
        import torch
        from safetensors.torch import load_file

        out = self.folder.parent / "saved"
        self.model.save_pretrained(out)
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            (out / name).write_bytes((self.folder / name).read_bytes())
        made = run(self.sieve, "import", "--from", out, "--out", out / "in")
        if made.returncode:
            return f"refused: {made.stderr}"
        # Different tokens: of equal keys stock Doge keeps another one.
        tokens, logits = list(range(60)), out / "logits.safetensors"
        must(self.sieve, "logits", "--checkpoint", out / "in", "--tokens", ",".join(map(str, tokens)), "--out", logits)
        return close(load_file(logits)["logits"], self.model(torch.tensor([tokens]), use_cache=False).logits)


def gguf(sieve, folder, converter):
    """What the converter makes of an export, in llama.cpp's library; neither needs a model of transformers."""
    out = folder.parent / "model.gguf"
    done = gguf_files.convert(converter, folder, out, "f32")
    if done.returncode:
        return f"refused: {done.stderr.strip().splitlines()[-1].removeprefix('ERROR:hf-to-gguf:')}"
    # A process of its own, as the library logs to standard error.
    loaded = run(sys.executable, __file__, "--llama", out)
    if loaded.returncode:
        said = [line.split(": ", 3)[-1] for line in loaded.stderr.splitlines() if "error loading model" in line]
        return f"refused: {[*said, loaded.stderr][0]}"
    off = max(llama_differs(sieve, folder, *text) for text in json.loads(loaded.stdout))
    return WORKS if off < TOLERANCE else f"WRONG: other logits, by {off:.1e}"


def llama_texts(path):
    """After each of PROMPTS the tokens that llama.cpp writes, and the five likeliest tokens of its steps. The library's
    server leaves out steps at which the text ends within a character.
    """
    import urllib.request

    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.warmup = str(path), 256, False
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(settings)
    texts = []
    for prompt in PROMPTS:
        ask = {"prompt": prompt, "n_predict": NEW, "temperature": 0, "n_probs": 5, "ignore_eos": True}
        body = json.dumps({**ask, "return_tokens": True}).encode()
        request = urllib.request.Request(f"{server.listening_address}/completion", body)
        with urllib.request.urlopen(request) as answer:
            reply = json.load(answer)
        steps = [[(token["id"], token["logprob"]) for token in step["top_logprobs"]]
                 for step in reply["completion_probabilities"]]  # fmt: skip
        texts.append((prompt, reply["tokens"], steps))
    return texts


def llama_differs(sieve, folder, prompt, written, steps):
    """The largest difference of log-likelihoods from those of `sieve logits`, relative to the largest one; infinite if
    the tokens are not the likeliest ones.
    """
    import numpy
    from safetensors.numpy import load_file

    tokens, out = [*prompt, *written], folder.parent / "llama.safetensors"
    must(sieve, "logits", "--checkpoint", folder, "--tokens", ",".join(map(str, tokens)), "--out", out)
    logits = load_file(out)["logits"].reshape(len(tokens), -1)[len(prompt) - 1 : -1].astype(numpy.float64)
    own = logits - numpy.log(numpy.exp(logits).sum(-1, keepdims=True))
    without_end = own.copy()
    without_end[:, json.loads((folder / "config.json").read_text())["eos_token_id"]] = -numpy.inf
    if len(written) != NEW or len(steps) <= NEW // 2 or without_end.argmax(-1).tolist() != written:
        return float("inf")
    # A step is one of those whose token is the first of its five.
    nearest = [
        min(
            (max(abs(row[token] - value) for token, value in step) for row in own if row.argmax() == step[0][0]),
            default=float("inf"),
        )
        for step in steps
    ]
    return max(nearest) / abs(own).max()


def outcome(consumer):
    try:
        return consumer()
    except (ValueError, NotImplementedError, AttributeError, RuntimeError) as error:
        return f"refused: {error}"


def main() -> None:
    if sys.argv[1:2] == ["--llama"]:
        print(json.dumps(llama_texts(sys.argv[2])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sieve", type=Path)
    parser.add_argument("--converter", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    root = (given.keep or Path(tempfile.mkdtemp())).resolve()
    root.mkdir(exist_ok=True)
    os.environ["HF_MODULES_CACHE"] = str(root / "modules")
    kinds = [kind for kind in KINDS if given.only in ("", "gguf") or given.only == kind]
    unexpected = 0
    for kind, folder in make_exports(given.sieve.resolve(), root, kinds):
        sieve, converter = given.sieve.resolve(), given.converter
        tried = {} if converter is None else {"gguf": lambda folder=folder: gguf(sieve, folder, converter)}
        if given.only != "gguf":
            import torch

            torch.set_grad_enabled(False)
            export = Export(sieve, folder)
            tried = {name: getattr(export, name) for name in export.consumers()} | tried
        for name, consumer in tried.items():
            said, expected = outcome(consumer), EXPECTED[kind][name]
            differs = not said.startswith(expected)
            unexpected += differs
            print(f"{kind} | {name} | {said}" + f"\n    EXPECTED {expected}" * differs, flush=True)
    sys.exit(bool(unexpected) or not kinds)


if __name__ == "__main__":
    main()
