"""The `config.json` of an export, or transformers' object of it, as the keys that a layer of `layers` takes."""

from collections.abc import Mapping
from typing import Any

from ._library import SieveError


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
    given = dict(config) if isinstance(config, Mapping) else config.to_dict()
    model_type, layers = given.get("model_type", "sieve"), given.get("num_hidden_layers")
    if model_type not in ("sieve", "qwen3"):
        raise SieveError(
            f"of_config: config is of a {model_type}; it reads exports of the class SieveForCausalLM, and of Qwen3\n"
            "  hint: make the layer by its class, with the sizes and keys that config.json has"
        )
    if layers is not None and not 0 <= index < layers:
        raise SieveError(f"of_config: there is no layer {index}\n  hint: the model has layers 0 to {layers - 1}")
    given |= theta_of(given, model_type)
    if model_type == "qwen3":
        given |= of_qwen3(given, index)
    return given
