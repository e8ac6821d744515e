"""torch.ops.sieve.*: the kernels as operators of torch, without autograd; functional.py has the functions to call.

Each operator is one op of libsieve_capi and returns its outputs as a list. Outputs of fakes come from the plans that
real calls run, so shapes, types and strides cannot differ.
"""

from typing import TYPE_CHECKING, Any

import torch

from ._library import Op

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Each operator of `TABLE`, a function of its tensors and settings."""

QKV = ("q", "k", "v")
BRANCHES = ("compressed", "selected", "window")
CHOICE = ("float scale", "int[] blocks", "str rule", "bool first", "int local", "bool only_o=False")

# Tensors, which of them may be None, settings with their types. A tensor with ! is written in place.
TABLE = {
    "attention_forward": (
        (*QKV, "doc_start?", "bias?", "sinks?"),
        ("float scale", "int? window", "bool only_o=False", "int[]? bands=None"),
    ),
    "attention_backward": (
        (*QKV, "doc_start?", "doc_end?", "bias?", "sinks?", "o", "lse", "o_low?", "base?", "d_o"),
        ("float scale", "int? window", "bool fixed_order", "int[]? bands=None"),
    ),
    "dma_scores": (("v", "w_dt", "a", "doc_start?"), ("float[] slopes",)),
    "dma_scores_backward": (("v", "w_dt", "a", "x", "dz"), ()),
    "dma_select": (("rank", "doc_start?", "doc_end?"), ("int keep", "int local")),
    "dma_attention_forward": ((*QKV, "bias", "lists"), ("float scale", "bool only_o=False")),
    "dma_attention_backward": (
        (*QKV, "bias", "lists", "o", "lse", "o_low?", "base?", "d_o"),
        ("float scale", "bool fixed_order"),
    ),
    "nsa_mean_pool": (("k", "v", "doc_start?", "doc_end?"), ("int[] blocks",)),
    "nsa_mean_pool_backward": (("k", "doc_start?", "doc_end?", "d_compressed"), ("int[] blocks",)),
    "nsa_compressed_forward": (("q", "compressed", "doc_start?", "doc_end?"), ("float scale", "int[] blocks")),
    "nsa_compressed_backward": (
        ("q", "compressed", "doc_start?", "doc_end?", "o", "lse", "d_o"),
        ("float scale", "int[] blocks", "bool fixed_order"),
    ),
    "nsa_selected_forward": ((*QKV, "block_indices", "doc_start?", "doc_end?"), ("float scale", "int[] blocks")),
    "nsa_selected_backward": (
        (*QKV, "block_indices", "doc_start?", "doc_end?", "o", "lse", "d_o"),
        ("float scale", "int[] blocks", "bool fixed_order"),
    ),
    "nsa_gates_backward": ((*BRANCHES, "logits", "gate_bias?", "d_o"), ()),
    "nsa_forward": (
        (*QKV, "compressed", "logits", "gate_bias?", "doc_start?", "doc_end?"),
        ("float scale", "int[] blocks", "int window", "bool only_o=False"),
    ),
    "dma_forward": (
        (*QKV, "w_dt", "a", "doc_start?", "doc_end?"),
        (
            "float scale", "int keep", "int local", "float[] slopes", "bool linear", "bool only_o=False",
            "bool same_bits=False",
        ),
    ),
    "choose_blocks": (("q", "k", "doc_start?", "doc_end?"), CHOICE),
    "chosen_forward": ((*QKV, "index_q?", "index_k?", "doc_start?", "doc_end?"), CHOICE),
    "selected_forward": (
        (*QKV, "indices", "counts?", "doc_start?", "doc_end?"),
        ("float scale", "int block", "bool only_o=False", "bool block_sums=False"),
    ),
    "block_sparse": ((*QKV, "words"), ("float scale", "int[] block")),
    "block_sparse_backward": (
        (*QKV, "words", "tile_lists", "o", "lse", "d_o"),
        ("float scale", "int[] block", "bool fixed_order", "int head_shares=1"),
    ),
    "attention_decode": (
        (*QKV, "k_cache!", "v_cache!", "length", "sinks?"),
        ("float scale", "int? window", "int[]? bands=None", "bool same_bits=False"),
    ),
    "cached_decode": (
        ("q", "k_cache", "v_cache", "length", "chosen?", "sinks?"), ("float scale", "int? window", "int? block")
    ),
    "dma_decode": (
        (*QKV, "z", "k_cache!", "v_cache!", "z_cache!", "positions!", "length"),
        ("float scale", "int local", "bool linear", "bool same_bits=False"),
    ),
    "selected_decode": (("q", "k_cache", "v_cache", "length", "chosen"), ("float scale", "int block")),
    "mla_decode": (("q", "latents", "key_scale?", "length?"), ("float scale", "int rank")),
}

_modes = torch._C._len_torch_dispatch_stack
_is_compiling = torch.compiler.is_compiling

_torch_library = torch.library.Library("sieve", "DEF")
IMPLEMENTATIONS = {}


def _schema(name, tensors, settings):
    arguments = []
    for at, tensor in enumerate(tensors):
        kind = "Tensor?" if tensor.endswith("?") else f"Tensor({chr(97 + at)}!)" if tensor.endswith("!") else "Tensor"
        arguments.append(f"{kind} {tensor.rstrip('?!')}")
    return f"{name}({', '.join([*arguments, *settings])}) -> Tensor[]"


def _define(name, tensors, settings):
    """Registers an operator of `TABLE` with torch, for CUDA and CPU tensors and for
    fakes, and returns the function that runs it.
    """
    op = Op(name, tensors, [x.split()[-1].split("=")[0] for x in settings])
    _torch_library.define(_schema(name, tensors, settings))
    for key in ("CUDA", "CPU"):
        # Lists cannot be part of a plan's key.
        call = lambda *arguments: op(*[tuple(x) if isinstance(x, list) else x for x in arguments])  # noqa: E731
        _torch_library.impl(name, call, key)
    torch.library.register_fake(f"sieve::{name}", op.fake, lib=_torch_library)
    IMPLEMENTATIONS[name] = op
    through_torch = getattr(torch.ops.sieve, name).default

    def run(*arguments):
        """The operator; in plain eager calls without torch's dispatcher, which costs as much as a launch."""
        if _is_compiling() or type(arguments[0]) is not torch.Tensor or _modes():
            return through_torch(*arguments)
        return op(*arguments)

    return run


for _name, (_tensors, _settings) in TABLE.items():
    globals()[_name] = _define(_name, _tensors, _settings)
