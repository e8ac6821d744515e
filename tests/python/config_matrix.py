"""Variants of config.json of seven families, read by Sieve and by transformers: CPU, float32, tiny random weights.

usage: config_matrix.py SIEVE [--old PYTHON] [--write] [--keep FOLDER] [--only WORD]

--keep keeps the folders, and what transformers computed for the next call; --only WORD takes the variants with WORD.

Each variant changes a config.json: a key present, absent, in either place, in conflict. Right is what the transformers
of this Python computes (version 5): the largest difference of `sieve logits` over the largest logit, on 100 tokens, is
below 1e-4; or Sieve ends with code 1 and names the key. PYTHON has transformers 4: where its logits differ, Sieve must
refuse or print a note that names the key. What version 5 refuses and version 4 computes may load with such a note.

Prints a line for each variant that is wrong, then the counts, and ends with 1 if one is wrong. --write stores the
variants, what transformers read and what Sieve did in tests/golden/config_matrix.json, which a test of sieve-hf reads.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.update(CUDA_VISIBLE_DEVICES="", TRANSFORMERS_OFFLINE="1", TRANSFORMERS_VERBOSITY="critical")
GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "config_matrix.json"
TOLERANCE = 1e-4
TOKENS = [(i * 37 + 11) % 256 for i in range(100)]
LAYERS = 3
ABSENT = object()
FAMILIES = ["llama", "mistral", "ministral", "smollm3", "qwen2", "qwen3", "doge"]


def base(family):
    config = {
        "model_type": family,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "vocab_size": 300,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if family in ("qwen3", "ministral"):
        config["head_dim"] = 16
    if family == "ministral":
        config["sliding_window"] = 24
    if family == "smollm3":
        # The class's padding token lies outside this vocabulary; its layer 1 does not rotate.
        config |= {"pad_token_id": None, "no_rope_layer_interval": 2}
    if family == "mistral":
        config["sliding_window"] = None
    if family == "doge":
        config["keep_window_size"] = 40
    return config


def rotary_variants():
    """Name, key at issue, changes: the places and types of a rotary embedding."""
    linear = {"rope_type": "linear", "factor": 2.0}
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    theta = {"rope_theta": 5e5}
    plain = {"rope_type": "default", **theta}

    def without(dictionary, *names):
        return {key: value for key, value in dictionary.items() if key not in names}

    yield "theta beside", "rope_theta", theta
    yield "theta beside, whole number", "rope_theta", {"rope_theta": 500000}
    yield "theta in rope_scaling", "rope_theta", {"rope_scaling": plain}
    yield "theta in rope_scaling and another beside", "rope_theta", {"rope_scaling": plain, "rope_theta": 1e4}
    yield "theta in rope_scaling and beside", "rope_theta", {"rope_scaling": plain, **theta}
    yield "theta in rope_parameters", "rope_theta", {"rope_parameters": plain}
    yield "theta in rope_parameters and another beside", "rope_theta", {"rope_parameters": plain, "rope_theta": 1e4}
    yield "theta in rope_parameters and beside", "rope_theta", {"rope_parameters": plain, **theta}
    yield "theta null beside", "rope_theta", {"rope_theta": None}
    yield "theta null beside, given inside", "rope_theta", {"rope_theta": None, "rope_parameters": plain}
    yield "theta null inside", "rope_theta", {"rope_scaling": {**linear, "rope_theta": None}}
    yield "theta as text", "rope_theta", {"rope_theta": "10000"}
    yield "linear", "rope_scaling", {"rope_scaling": linear, **theta}
    yield "linear by type", "rope_scaling", {"rope_scaling": {"type": "linear", "factor": 2.0}, **theta}
    yield "linear by both names", "rope_scaling", {"rope_scaling": {"type": "linear", **linear}}
    yield "two types", "rope_type", {"rope_scaling": {**yarn, "type": "linear"}}
    yield "linear in rope_parameters", "rope_parameters", {"rope_parameters": {**linear, **theta}}
    yield "linear, and a default rope_parameters", "rope_parameters", {"rope_scaling": linear, "rope_parameters": plain}
    yield "linear twice", "rope_scaling", {"rope_scaling": linear, "rope_parameters": linear}
    yield "empty rope_scaling", "rope_theta", {"rope_scaling": {}, "rope_parameters": plain, **theta}
    yield "rope_scaling null", "rope_parameters", {"rope_scaling": None, "rope_parameters": {**llama3, **theta}}
    yield "rope_scaling is a number", "rope_scaling", {"rope_scaling": 3}
    yield "a factor without a type", "rope_scaling", {"rope_scaling": {"factor": 2.0}}
    yield "llama3", "rope_scaling", {"rope_scaling": llama3, **theta}
    yield "llama3 with theta inside", "rope_theta", {"rope_scaling": {**llama3, **theta}}
    yield "llama3 with another theta beside", "rope_theta", {"rope_scaling": {**llama3, **theta}, "rope_theta": 1e4}
    yield "llama3 without original", "rope_scaling", {
        "rope_scaling": without(llama3, "original_max_position_embeddings"),
        **theta,
    }
    yield "llama3 without low_freq_factor", "low_freq_factor", {"rope_scaling": without(llama3, "low_freq_factor")}
    yield "llama3 with whole factors", "rope_scaling", {"rope_scaling": {**llama3, "factor": 8, "low_freq_factor": 1}}
    yield "llama3 with original beside", "original_max_position_embeddings", {
        "rope_scaling": without(llama3, "original_max_position_embeddings"),
        "original_max_position_embeddings": 64,
    }
    yield "yarn", "rope_scaling", {"rope_scaling": yarn, **theta}
    yield "yarn by type", "rope_scaling", {"rope_scaling": {**without(yarn, "rope_type"), "type": "yarn"}}
    yield "yarn without original", "rope_scaling", {"rope_scaling": without(yarn, "original_max_position_embeddings")}
    yield "yarn with original beside", "original_max_position_embeddings", {
        "rope_scaling": without(yarn, "original_max_position_embeddings"),
        "original_max_position_embeddings": 64,
    }
    yield "yarn with two originals", "original_max_position_embeddings", {
        "rope_scaling": yarn,
        "original_max_position_embeddings": 128,
    }
    yield "yarn with original twice", "rope_scaling", {"rope_scaling": yarn, "original_max_position_embeddings": 64}
    yield "yarn with attention_factor", "rope_scaling", {"rope_scaling": {**yarn, "attention_factor": 1.25}}
    yield "yarn with betas", "rope_scaling", {"rope_scaling": {**yarn, "beta_fast": 16, "beta_slow": 2.0}}
    yield "yarn with betas null and 0", "rope_scaling", {"rope_scaling": {**yarn, "beta_fast": None, "beta_slow": 0}}
    yield "yarn with both mscales", "rope_scaling", {"rope_scaling": {**yarn, "mscale": 0.7, "mscale_all_dim": 1.2}}
    yield "yarn with one mscale", "rope_scaling", {"rope_scaling": {**yarn, "mscale": 0.7}}
    yield "yarn, truncated", "rope_scaling", {"rope_scaling": {**yarn, "truncate": True}}
    yield "yarn, not truncated", "truncate", {"rope_scaling": {**yarn, "truncate": False}}
    yield "yarn in rope_parameters", "rope_parameters", {"rope_parameters": {**yarn, **theta}, **theta}
    yield "yarn without factor", "factor", {"rope_scaling": without(yarn, "factor")}
    yield "yarn with factor null", "factor", {"rope_scaling": {**yarn, "factor": None}}
    yield "yarn with a factor below 1", "factor", {"rope_scaling": {**yarn, "factor": 0.5}}
    yield "dynamic", "rope_type", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    yield "longrope", "rope_type", {
        "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    }
    yield "mrope", "rope_type", {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    yield "default with a factor", "factor", {"rope_scaling": {"rope_type": "default", "factor": 2.0}}
    yield "linear with low_freq_factor", "low_freq_factor", {"rope_scaling": {**linear, "low_freq_factor": 1.0}}
    yield "an unknown rotary key", "bogus", {"rope_scaling": {**linear, "bogus": 1}}
    yield "rope_type null", "rope_type", {"rope_scaling": {**linear, "rope_type": None}}
    yield "nested by layer", "full_attention", {"rope_parameters": {"full_attention": plain}}
    yield "partial factor beside", "partial_rotary_factor", {"partial_rotary_factor": 0.5}
    yield "whole factor beside", "partial_rotary_factor", {"partial_rotary_factor": 1.0}
    yield "partial factor inside", "partial_rotary_factor", {"rope_scaling": {**linear, "partial_rotary_factor": 0.5}}


def other_variants():
    """Name, key at issue, changes, and the changes of the configuration that the weights are made for."""
    for key in ("rms_norm_eps", "hidden_act", "initializer_range", "max_position_embeddings", "tie_word_embeddings"):
        yield f"{key} absent", key, {key: ABSENT}, {}
    yield "rms_norm_eps null", "rms_norm_eps", {"rms_norm_eps": None}, {}
    yield "swish", "hidden_act", {"hidden_act": "swish"}, {}
    yield "gelu", "hidden_act", {"hidden_act": "gelu"}, {}
    yield "hidden_act null", "hidden_act", {"hidden_act": None}, {}
    yield "tied", "tie_word_embeddings", {"tie_word_embeddings": True}, {"tie_word_embeddings": True}
    yield "tie null", "tie_word_embeddings", {"tie_word_embeddings": None}, {}
    yield "kv heads absent, as many as heads", "num_key_value_heads", {"num_key_value_heads": ABSENT}, {
        "num_key_value_heads": 4
    }
    yield "kv heads absent, eight", "num_key_value_heads", {"num_key_value_heads": ABSENT, "num_attention_heads": 8}, {
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    yield "kv heads null", "num_key_value_heads", {"num_key_value_heads": None}, {"num_key_value_heads": 4}
    yield "head_dim absent", "head_dim", {"head_dim": ABSENT}, {}
    yield "head_dim absent, 128", "head_dim", {"head_dim": ABSENT}, {"head_dim": 128}
    yield "head_dim null", "head_dim", {"head_dim": None}, {}
    yield "head_dim 32", "head_dim", {"head_dim": 32}, {"head_dim": 32}
    yield "hidden_size no multiple of heads", "hidden_size", {"hidden_size": 66, "head_dim": 16}, {
        "hidden_size": 66,
        "head_dim": 16,
    }
    yield "vocab_size absent", "vocab_size", {"vocab_size": ABSENT}, {}
    yield "vocab_size as text", "vocab_size", {"vocab_size": "300"}, {}
    yield "attention_bias", "attention_bias", {"attention_bias": True}, {}
    yield "mlp_bias", "mlp_bias", {"mlp_bias": True}, {}
    yield "not causal", "is_causal", {"is_causal": False}, {}
    yield "causal", "is_causal", {"is_causal": True}, {}
    yield "keys by layer", "per_layer_config", {"per_layer_config": {"1": {"hidden_act": "gelu"}}}, {}
    yield "quantised", "quantization_config", {"quantization_config": {"quant_method": "bitsandbytes"}}, {}
    yield "weights elsewhere", "transformers_weights", {"transformers_weights": "other.safetensors"}, {}
    yield "experts of Mixtral", "num_local_experts", {"num_local_experts": 8}, {}
    yield "a key of another class", "embedding_multiplier", {"embedding_multiplier": 12.0}, {}
    yield "keys without effect", "use_cache", {
        "use_cache": False,
        "attention_dropout": 0.1,
        "torch_dtype": "bfloat16",
        "temperature": 0.5,
        "architectures": ["OtherForCausalLM"],
        "transformers_version": "4.30.0",
        "pretraining_tp": 2,
    }, {}
    windows = {"use_sliding_window": True, "sliding_window": 16}
    full, sliding = "full_attention", "sliding_attention"
    mixed = [full, sliding, full]
    yield "unknown layer_types", "layer_types", {"layer_types": [full, "other", full]}, {}
    yield "chunked layer_types", "layer_types", {"layer_types": [full, "chunked_attention", full]}, {}
    yield "too few layer_types", "layer_types", {"layer_types": [full]}, {}
    yield "layer_types is a text", "layer_types", {"layer_types": full}, {}
    yield "layer_types null", "layer_types", {"layer_types": None}, {}
    yield "layer_types all full", "layer_types", {"layer_types": [full] * LAYERS}, {}
    yield "layer_types by an old name", "layer_types", {"layer_types": ["attention"] * LAYERS}, {}
    yield "layer_types mixed, with windows", "layer_types", {**windows, "layer_types": mixed}, {}
    yield "layer_types mixed, with windows and head_dim", "layer_types", {
        **windows,
        "layer_types": mixed,
        "head_dim": 16,
    }, {}
    yield "layer_types all full, with head_dim", "layer_types", {"layer_types": [full] * LAYERS, "head_dim": 16}, {}
    yield "layer_types null, with windows and head_dim", "layer_types", {
        **windows,
        "layer_types": None,
        "head_dim": 16,
    }, {}
    yield "layer_types mixed, without windows", "layer_types", {"layer_types": mixed, "sliding_window": 16}, {}
    yield "a window", "sliding_window", {"sliding_window": 16}, {}
    yield "a window absent", "sliding_window", {"sliding_window": ABSENT}, {}
    yield "a window of null", "sliding_window", {"sliding_window": None, "use_sliding_window": True}, {}
    yield "windows", "sliding_window", windows, {}
    yield "windows from layer 0", "sliding_window", {**windows, "max_window_layers": 0}, {}
    yield "windows from layer 1", "sliding_window", {**windows, "max_window_layers": 1}, {}
    yield "windows from layer 28", "sliding_window", {**windows, "max_window_layers": 28}, {}
    yield "windows off", "sliding_window", {**windows, "use_sliding_window": False, "max_window_layers": 0}, {}
    yield "windows by null", "use_sliding_window", {**windows, "use_sliding_window": None, "max_window_layers": 0}, {}
    yield "windows of the usual size", "sliding_window", {"use_sliding_window": True, "max_window_layers": 0}, {}
    yield "max_window_layers null", "max_window_layers", {**windows, "max_window_layers": None}, {}


def doge_variants():
    yield "keep_window_size absent", "keep_window_size", {"keep_window_size": ABSENT}, {}
    yield "keep_window_size null", "keep_window_size", {"keep_window_size": None}, {}
    yield "experts", "is_moe", {"is_moe": True}, {}
    yield "experts that are off", "num_experts", {"is_moe": False, "num_experts": 16384, "num_experts_per_tok": 64}, {}


def smollm3_variants():
    key, interval = "no_rope_layers", "no_rope_layer_interval"
    yield "a layer named", key, {key: [0, 1, 1]}, {}
    yield "all layers named", key, {key: [0, 0, 0]}, {}
    yield "no layer named", key, {key: [1, 1, 1]}, {}
    yield "named against the interval", key, {key: [1, 1, 0], interval: 1}, {}
    yield "more names than layers", key, {key: [1, 0, 1, 0, 0]}, {}
    yield "fewer names than layers", key, {key: [1, 0]}, {}
    yield "names null", key, {key: None}, {}
    yield "names as a number", key, {key: 2}, {}
    yield "a name of 2", key, {key: [1, 2, 0]}, {}
    yield "names empty", key, {key: []}, {}
    yield "every layer by the interval", interval, {interval: 1}, {}
    yield "the interval absent", interval, {interval: ABSENT}, {}
    yield "an interval of 0", interval, {interval: 0}, {}
    yield "an interval of null", interval, {interval: None}, {}
    windows = {"use_sliding_window": True, "sliding_window": 16}
    yield "windows where nothing rotates", "sliding_window", {**windows, key: [0, 1, 0]}, {}
    yield "windows elsewhere", "layer_types", {
        **windows,
        key: [0, 1, 0],
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    }, {}


def variants(only):
    for family in FAMILIES:
        named = [("as it is", "model_type", {}, {})]
        named += [(*variant, {}) for variant in rotary_variants()]
        named += list(other_variants())
        named += list({"doge": doge_variants, "smollm3": smollm3_variants}.get(family, list)())
        for name, key, changes, of_weights in named:
            # Doge's window is refused whatever the other keys say.
            if family == "doge" and changes.get("sliding_window") not in (None, ABSENT) and key != "sliding_window":
                continue
            # The one class that ties by default.
            if family == "smollm3" and name == "tie_word_embeddings absent":
                of_weights = {"tie_word_embeddings": True}
            config = {**base(family), **changes}
            config = {name: value for name, value in config.items() if value is not ABSENT}
            name = f"{family}: {name}"
            if only in name:
                yield {"name": name, "key": key, "config": config, "weights": {**base(family), **of_weights}}


def write_folders(root, all_variants):
    """A folder a variant: config.json, weights and a tokenizer. Equal weights are stored once."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(root / "tokenizer.json"))
    made = {}
    for number, variant in enumerate(all_variants):
        key = json.dumps(variant["weights"])
        if key not in made:
            config = dict(variant["weights"])
            # Version 5 checks a Llama's hidden_size when the configuration is made.
            hidden_size = config.pop("hidden_size")
            config = AutoConfig.for_model(config.pop("model_type"), hidden_size=64, **config)
            config.hidden_size = hidden_size
            generator = torch.Generator().manual_seed(len(made))
            tensors = {}
            for name, parameter in AutoModelForCausalLM.from_config(config).named_parameters():
                values = torch.randn(parameter.shape, generator=generator)
                if name.endswith(("norm.weight", "residual")):
                    values = 1 + 0.3 * values
                elif "embed" not in name and len(parameter.shape) > 1:
                    values *= 2 / parameter.shape[-1] ** 0.5
                tensors[name] = values.contiguous()
            made[key] = root / f"weights-{len(made)}.safetensors"
            save_file(tensors, made[key], metadata={"format": "pt"})
        folder = root / f"{number:03}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        variant["folder"] = str(folder)
        (folder / "config.json").write_text(json.dumps(variant["config"]))
        (folder / "tokenizer.json").symlink_to(root / "tokenizer.json")
        (folder / "model.safetensors").symlink_to(made[key])


def theirs(folder):
    """The logits of transformers, and what it read; or its error."""
    import torch
    import transformers

    name = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
    options = {name: torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    try:
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
        if loading["missing_keys"] or loading["mismatched_keys"]:
            raise ValueError("weights are missing")
        with torch.no_grad():
            logits = model.eval()(torch.tensor([TOKENS]), use_cache=False).logits[0]
        if not torch.isfinite(logits).all():
            raise ValueError("logits are not finite")
    except Exception as error:  # noqa: BLE001: whatever it refuses a configuration with
        return None, f"{type(error).__name__}: {error}".splitlines()[0][:160]
    config, rotary, attention = model.config, model.model.rotary_emb, model.model.layers[0].self_attn
    # AutoModelForCausalLM takes Ministral for a Mistral with layer_types.
    by_layer = config.model_type in ("ministral", "smollm3", "qwen2", "qwen3")
    window = config.sliding_window if by_layer or config.model_type == "mistral" else None
    types = config.layer_types if by_layer else ["sliding_attention"] * LAYERS
    return logits, {
        "frequencies": [float(f"{x:.9g}") for x in rotary.inv_freq.double()],
        "amplitude": float(rotary.attention_scaling),
        "head_dim": attention.head_dim,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "windows": [window if kind == "sliding_attention" else None for kind in types],
        "rotates": [bool(mark) for mark in getattr(config, "no_rope_layers", [1] * LAYERS)[:LAYERS]],
        "keep_window_size": getattr(config, "keep_window_size", None),
    }


def computed(python, root, name):
    """What the transformers of a Python gives for all folders: logits or None, and what it read or its error."""
    from safetensors.torch import load_file

    folders = sorted(path for path in root.iterdir() if path.is_dir())
    texts = {str(folder): (folder / "config.json").read_text() for folder in folders}
    stored = root / f"{name}.json"
    # A folder of --keep has it from the last time, unless a variant has changed.
    if not stored.exists() or json.loads(stored.read_text())["texts"] != texts:
        subprocess.run([python, __file__, "--theirs", str(root), name], check=True)
    logits = load_file(root / f"{name}.safetensors")
    said = json.loads(stored.read_text())["said"]
    return {folder: (logits.get(folder), words) for folder, words in said.items()}


def only_theirs(root, name):
    import torch
    from safetensors.torch import save_file

    # Models this small gain nothing from a second thread.
    torch.set_num_threads(1)
    logits, said, texts = {}, {}, {}
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        texts[str(folder)] = (folder / "config.json").read_text()
        own_logits, said[str(folder)] = theirs(folder)
        if own_logits is not None:
            logits[str(folder)] = own_logits.contiguous()
    save_file(logits, root / f"{name}.safetensors")
    (root / f"{name}.json").write_text(json.dumps({"texts": texts, "said": said}))


def ours(sieve, folder):
    """Exit code, printed text and logits of Sieve."""
    from safetensors.torch import load_file

    out = Path(folder) / "ours.safetensors"
    tokens = ",".join(map(str, TOKENS))
    command = [sieve, "logits", "--checkpoint", folder, "--tokens", tokens, "--out", str(out), "--device", "cpu"]
    ran = subprocess.run(command, capture_output=True, text=True)
    logits = load_file(out)["logits"][0] if ran.returncode == 0 else None
    return ran.returncode, ran.stderr + ran.stdout, logits


def off(computed, wanted):
    """The largest difference over the largest logit."""
    if computed.shape != wanted.shape:
        return float("inf")
    return float((computed - wanted).abs().max() / wanted.abs().max())


def judge(variant, new, old, sieve):
    """The outcome of a variant, and what is wrong with it."""
    code, text, logits = ours(sieve, variant["folder"])
    (new_logits, new_said), (old_logits, old_said) = new, old
    said = [line for line in text.splitlines() if variant["key"] in line and variant["folder"] in line]
    if code == 1:
        if variant["key"] not in text:
            return "wrong", f"the refusal does not name {variant['key']}: {text.strip()}"
        variant["shapes"] = " tensors are " in text
        return ("both" if new_logits is None else "refused"), new_said
    if code != 0:
        return "wrong", f"exit code {code}: {text.strip()}"
    if new_logits is None and old_logits is None:
        return "wrong", f"loads, and transformers refuses it: {new_said}"
    wanted = old_logits if new_logits is None else new_logits
    variant["off"] = off(logits, wanted)
    if not variant["off"] < TOLERANCE:
        return "wrong", f"difference {variant['off']:.1e}"
    differs = new_logits is None or (old_logits is not None and off(old_logits, new_logits) > TOLERANCE)
    if differs and not said:
        return "wrong", f"no word of the difference between versions: {new_said} | {old_said}"
    variant["differs"] = differs
    return ("noted" if said else "equal"), (old_said if new_logits is None else new_said)


def main():
    if sys.argv[1:2] == ["--theirs"]:
        only_theirs(Path(sys.argv[2]), sys.argv[3])
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("sieve")
    parser.add_argument("--old")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--keep")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    root = Path(arguments.keep or tempfile.mkdtemp())
    root.mkdir(exist_ok=True)
    all_variants = list(variants(arguments.only))
    write_folders(root, all_variants)
    new = computed(sys.executable, root, "new")
    old = computed(arguments.old, root, "old") if arguments.old else {}
    counts = dict.fromkeys(["equal", "both", "refused", "noted", "wrong"], 0)
    stored, worst, differing = [], 0.0, 0
    for variant in all_variants:
        folder = variant["folder"]
        outcome, said = judge(variant, new[folder], old.get(folder, (None, "not run")), arguments.sieve)
        counts[outcome] += 1
        if outcome == "wrong":
            print(f"{variant['name']}: WRONG: {said}")
        worst = max(worst, variant.get("off", 0.0) if outcome != "wrong" else 0.0)
        differing += variant.get("differs", False)
        stored.append({
            "name": variant["name"],
            "key": variant["key"],
            "config": variant["config"],
            "outcome": "refused" if outcome == "both" else outcome,
            # The file of weights is for other sizes, which config.json alone does not show.
            "shapes": variant.get("shapes", False),
            "transformers": said if isinstance(said, dict) and outcome in ("equal", "noted") else None,
        })
    loaded = counts["equal"] + counts["noted"]
    print(
        f"{len(all_variants)} variants: {counts['equal']} equal, {counts['both']} refused by both, "
        f"{counts['refused']} refused here by key name, {counts['noted']} noted, {counts['wrong']} wrong; "
        f"{loaded} load, the largest difference {worst:.1e}, versions differ in {differing} of them"
    )
    if arguments.write and not counts["wrong"]:
        lines = ",\n".join(json.dumps(variant) for variant in stored)
        GOLDEN.write_text(f"[\n{lines}\n]\n")
    if not arguments.keep:
        shutil.rmtree(root)
    enough = arguments.only or (len(all_variants) >= 200 and loaded >= 140)
    sys.exit(bool(counts["wrong"]) or not enough)


if __name__ == "__main__":
    main()
