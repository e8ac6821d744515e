"""The keys of a layer of `layers`: from the `config.json` of an export or transformers' object of it, and as the layer
says them of itself."""

import inspect
from collections.abc import Mapping
from typing import Any

from ._library import SieveError
from ._on_cpu import takes_all

SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")


def theta_of(config: dict[str, Any], model_type: str) -> dict[str, float]:
    """The `rope_theta` of a config, wherever it stands: transformers 5 keeps it in `rope_parameters` alone. Angles that
    are scaled are refused, unless the config lists them, as an export of the class SieveForCausalLM does.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    form = rope.get("rope_type", rope.get("type", "default"))
    if form != "default" and config.get("rope_frequencies") is None:
        raise SieveError(
            f"of_config: a {model_type} with angles of the form {form!r} is not read\n"
            "  hint: make the layer by its class; its rope_frequencies are model.model.rotary_emb.inv_freq.tolist(), and "
            "its rope_amplitude is model.model.rotary_emb.attention_scaling"
        )
    theta = config.get("rope_theta", rope.get("rope_theta"))
    return {} if theta is None else {"rope_theta": theta}


def of_qwen3(config: dict[str, Any], index: int) -> dict[str, Any]:
    """A layer's keys of a Qwen3, by which models of dense attention and windows are exported: kind, and window."""
    if config.get("attention_bias"):
        what = "of_config: a qwen3 with attention_bias has a bias behind o_proj, which no layer has here"
        raise SieveError(what + "\n  hint: keep transformers' own layer")
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    types = config.get("layer_types") or ["sliding_attention" if window else "full_attention"] * (index + 1)
    if types[index] == "full_attention":
        return {"attention_kind": "mha"}
    if types[index] != "sliding_attention" or not window:
        raise SieveError(f"of_config: layer {index} is of type {types[index]!r} with sliding_window = {window}")
    return {"attention_kind": "swa", "window_size": window}


def keys_of(config: Mapping[str, Any] | Any, index: int) -> dict[str, Any]:
    """The keys of layer `index` as an export of the class SieveForCausalLM has them, for a Qwen3 too; another class, a
    layer that is not there, and scaled angles that are not listed are refused.
    """
    if not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
        what = f"of_config: config is a {type(config).__name__}; it is what config.json holds, or transformers' object"
        raise SieveError(what + "\n  hint: json.load(open(...)), or model.config")
    given = dict(config) if isinstance(config, Mapping) else config.to_dict()
    model_type, layers = given.get("model_type", "sieve"), given.get("num_hidden_layers")
    if model_type not in ("sieve", "qwen3"):
        raise SieveError(
            f"of_config: config is of a {model_type}; it reads exports of the class SieveForCausalLM, and of Qwen3\n"
            "  hint: make the layer by its class, with the sizes and keys that config.json has"
        )
    if layers is not None and not 0 <= index < layers:
        raise SieveError(f"of_config: there is no layer {index}\n  hint: the model has layers 0 to {layers - 1}")
    # Defaults of classes differ, and every config.json that is read here has all of them.
    if missing := [key for key in SIZES if key not in given]:
        raise SieveError(f"of_config: config has no {', no '.join(missing)}\n  hint: pass all that config.json holds")
    given |= theta_of(given, model_type)
    if model_type == "qwen3":
        given |= of_qwen3(given, index)
    return given


def check_width(layer: object, width: int) -> None:
    """Refuses heads of a width that no kernel which chooses blocks has, unless definitions take all widths."""
    if width in (64, 128) or takes_all():
        return
    what = f"{type(layer).__name__}: heads of {width} have no kernel that chooses blocks (supported: 64 and 128)"
    raise SieveError(
        f"{what}\n  hint: head_dim=64, which o_proj brings back to hidden_size; on_cpu(strict=False) takes any width"
    )


def described(layer: Any) -> str:
    """Sizes and own keys of a layer, as its constructor takes them; rotations and norms are left out."""
    form, blocks = getattr(layer, "form", None), getattr(layer, "blocks", None)
    of: dict[str, Any] = {
        "hidden_size": layer.o_proj.out_features,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": getattr(layer, "num_kv_heads", None),
        "head_dim": layer.head_dim,
        "attention_sinks": getattr(layer, "sinks", None) is not None or None,
        "kv_lora_rank": getattr(layer, "rank", None),
        "qk_rope_head_dim": getattr(layer, "rope", None),
    }
    if form is not None:
        of |= {"local_window_size": form.local, "bias": "linear" if form.linear else "exp"}
        periods = [float(f"{1.0 / slope:.6g}") for slope in form.slopes]
        of |= {"periods": periods} if periods else {"recency": "none"}
    if blocks is not None:
        of |= {"compress_block_size": blocks.compressed, "compress_stride": blocks.stride}
    names = dict.fromkeys([*of, *inspect.signature(type(layer)).parameters])
    found = {name: of.get(name, getattr(layer, name, None)) for name in names}
    return ", ".join(f"{name}={x!r}" for name, x in found.items() if x is not None)
