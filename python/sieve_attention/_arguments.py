"""Sentences for wrong arguments of the functions, under the names that the caller gives them."""

import contextlib
import functools
import inspect
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from . import _axes
from ._dma import NAMES
from ._foreign import refuse
from ._library import SieveError
from ._on_cpu import BF16, as_on_a_gpu, asks_a_gpu, definition_of


def is_tensor(x):
    return isinstance(x, torch.Tensor)


def _is_finite(x):
    return type(x) in (int, float) and math.isfinite(x)


def _whole(least):
    return f"a whole number of at least {least}", lambda x: type(x) is int and x >= least


def _tensor(axes):
    wanted = f"a tensor of {axes} ax{'es' if axes > 1 else 'is'}"
    return wanted, lambda x: is_tensor(x) and x.dim() == axes and x.layout == torch.strided


def _list(wanted, is_item, *lengths):
    return wanted, lambda x: type(x) in (list, tuple) and all(map(is_item, x)) and len(x) in (lengths or (len(x),))


def _are_documents(x):
    if is_tensor(x):
        is_whole = not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool
        return x.dim() == 1 and is_whole and x.layout == torch.strided
    return type(x) in (list, tuple) and all(map(is_tensor, x)) and len(x) == 2


# As many heads as a recipe may have.
MOST_HEADS = 1 << 14
# Types of arguments of the kernels, besides those that are bf16 alone; others are cast, or made by the package.
TYPES = {
    **dict.fromkeys(BF16, ("bf16", "bfloat16")),
    **dict.fromkeys(["bias", "rank", "z", "z_cache", "key_scale", "gate_bias", "sinks"], ("f32", "float")),
    "decode.sinks": ("bf16", "bfloat16"),
    **dict.fromkeys(["length", "positions", "counts", "chosen", "documents", "indices"], ("int32", "int")),
}
# What an argument must be, and a test of it, by its name or by function and name.
WANTED = {
    **dict.fromkeys(["window", "keep", "block", "num_selected", "mla_decode.rank"], _whole(1)),
    **dict.fromkeys(["local", "tokens"], _whole(0)),
    **{argument: _tensor(axes.count(", ") + 1) for argument, axes in _axes.AXES.items()},
    "selected_attention.block": ("16, 32, 64 or 128", lambda x: x in (16, 32, 64, 128)),
    **{
        argument: (" or ".join(f'"{name}"' for name in names), lambda x, names=names: x in names)
        for argument, names in (
            ("dma_attention.bias", NAMES["bias"]),
            ("dma_decode.bias", NAMES["bias"]),
            ("preset", NAMES["preset"]),
            ("recency", NAMES["recency"]),
        )
    },
    **dict.fromkeys(
        ["shortest_period", "longest_period"], ("a number of tokens of at least 1", lambda x: _is_finite(x) and x >= 1)
    ),
    "kv_heads": ("a whole number from 1 to 16384", lambda x: type(x) is int and 1 <= x <= MOST_HEADS),
    "scale": ("a positive, finite number", lambda x: _is_finite(x) and x > 0),
    "slopes": _list("a list of finite numbers", _is_finite),
    "blocks": (
        "NsaBlocks(...) of whole numbers of at least 1",
        lambda x: hasattr(x, "sizes") and all(type(size) is int and size > 0 for size in x.sizes()),
    ),
    "documents": (
        "a pair of tensors: use documents(cu_seqlens, tokens), or cu_seqlens itself, int32 or int64",
        _are_documents,
    ),
    "documents.cu_seqlens": (
        "a tensor of 1 axis, or a list of such, one a row",
        lambda x: all(map(_tensor(1)[1], x if type(x) in (list, tuple) and x else [x])),
    ),
    "bands": (
        "Bands(first, reach, number) of whole numbers, with at least one band",
        lambda x: type(x) is not str and hasattr(x, "__len__") and len(x) == 3
        and all(type(size) is int and size >= 0 for size in x) and x[2] > 0,
    ),
    "selection": ("what select(rank, keep=...) returns", lambda x: hasattr(x, "expire")),
    "block_sparse.mask": ("what block_mask(mask, 64 or 128) returns", lambda x: hasattr(x, "words")),
}
# Arguments without a default that may be None.
MAY_BE_NONE = ("decode.k", "decode.v", "expiring_attention.bias")
# What the library's sentences call an argument, and its name.
RENAMED = {
    "delta": "bias", "z": "rank", "logits": "gates", "block_indices": "indices", "keep_window_size": "keep",
    "local_window_size": "local", "softmax_scale": "scale", "doc_start": "documents", "doc_end": "documents",
    "compressed has shape": "compressed_k with compressed_v has shape", "call: ": "",
    "select_block_size": "block",
}  # fmt: skip


def check_sinks(name, q, sinks, other):
    """Refuses sinks that are not one a query head, and sinks beside a bias or chosen blocks, `other`."""
    if other is not None:
        raise SieveError(f"{name}: sinks with a bias or chosen blocks have no kernel\n  hint: pass one of them")
    if is_tensor(sinks) and sinks.dim() == 1 and is_tensor(q) and q.dim() == 4 and len(sinks) != q.shape[2]:
        raise SieveError(f"{name}: sinks are {len(sinks)}, and q has {q.shape[2]} heads; give one for each")


def check_bands(name, window, bands, other):
    """The bands as a plain tuple, refused without a window, and beside a bias or chosen blocks, `other`."""
    if other is not None:
        raise SieveError(f"{name}: bands with a bias or chosen blocks have no kernel\n  hint: pass one of them")
    if window is None:
        raise SieveError(f"{name}: bands without a window\n  hint: pass window, the keys up to a query's own")
    return tuple(bands)


def check_step_in_order(k, k_cache, chosen, block):
    """Refuses steps of `decode` with `same_bits` for which no kernel gives a row's bits on any GPU."""
    if chosen is None and k is None:
        what, hint = "without k and v, or chosen,", "pass the token's k and v, which the caches may have already"
    elif chosen is not None and block not in (16, 32, 64, 128):
        what, hint = f"with block={block}", "take blocks of 16, 32, 64 or 128 tokens"
    elif chosen is not None and chosen.shape[1] != k_cache.shape[1]:
        what = f"with {chosen.shape[1]} choosers, and the caches have {k_cache.shape[1]} KV heads,"
        hint = "keep the keys and values of each chooser in the caches"
    else:
        return
    raise SieveError(f"decode: same_bits {what} has no kernel\n  hint: {hint}")


# Tensors that autocast casts, as those of torch's own attention.
CAST = ("q", "k", "v", "compressed_k", "compressed_v", "gates", "index_q", "index_k")
# What definitions compute.
DEFINED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _problem(name, defaults, arguments):
    """What is wrong with the first argument that is not what the function takes; None where all are."""
    for argument, x in arguments.items():
        wanted, holds = WANTED.get(f"{name}.{argument}") or WANTED.get(argument) or ("", lambda _: True)
        default = defaults[argument]
        may_be_none = default is None or f"{name}.{argument}" in MAY_BE_NONE
        if holds(x) or (x is None and may_be_none) or isinstance(default, str):
            continue
        layout = "" if not is_tensor(x) or x.layout == torch.strided else "sparse "
        got = (
            f"a {layout}tensor {list(x.shape)}"
            if is_tensor(x)
            else repr(x) if len(repr(x)) < 80 else f"a {type(x).__name__}"
        )
        axes = _axes.axes_of(name, argument) if "a tensor of" in wanted else ""
        return f"{argument} is {got}; it must be {wanted}{', or None' if may_be_none else ''}{axes and ': ' + axes}"
    return None


def _mismatch(arguments):
    """Which argument does not fit the others, in the words of the library, for definitions: torch would broadcast some
    of these and name none. None where all fit.
    """
    tensors = {argument: x for argument, x in arguments.items() if is_tensor(x)}
    (first, leader), *_ = tensors.items()
    for argument, x in tensors.items():
        if x.device != leader.device:
            return f"{argument} is on {x.device}, and {first} on {leader.device}"
        if argument in CAST and x.dtype not in DEFINED:
            # A GPU's limits leave out f16.
            taken = DEFINED[:-1] if asks_a_gpu() else DEFINED
            return f"{argument} is {str(x.dtype)[6:]}; the definitions take {', '.join(str(y)[6:] for y in taken)}"
        if argument in CAST and leader.dtype in DEFINED and x.dtype != leader.dtype:
            wanted = str(leader.dtype)[6:]
            return f"{argument} is {str(x.dtype)[6:]}, expected {wanted}\n  hint: cast it before the call"
    q, k, v = (tensors.get(argument) for argument in "qkv")
    # What each must be, named in this order.
    wanted = {"k": None, "v": None}
    if k is not None and v is not None:
        heads = [x.shape[2] for x in (q, k, v) if x is not None]
        if heads[-1] != heads[-2] or not all(heads) or heads[0] % heads[-1]:
            heads_given = f"{'q/' if q is not None else ''}k/v heads {'/'.join(map(str, heads))}"
            return f"number of {heads_given} is not supported (supported: as many k as v heads, dividing the q heads)"
        wanted["v"] = [*k.shape[:3], v.shape[3]]
    if q is not None:
        rows, tokens, _, width = q.shape
        if k is not None:
            wanted["k"] = [rows, tokens, k.shape[2], width]
            wanted["v"] = [rows, tokens, *v.shape[2:]] if v is not None else None
            wanted["bias"] = [rows, k.shape[2], tokens]
        for argument in ("index_q", "index_k", "indices", "gates"):
            wanted[argument] = [rows, tokens, *tensors[argument].shape[2:]] if argument in tensors else None
    if v is not None:
        wanted["w_dt"], wanted["a"] = [v.shape[2], v.shape[2] * v.shape[3]], [v.shape[2]]
    for argument, shape in wanted.items():
        if shape is not None and argument in tensors and list(tensors[argument].shape) != shape:
            return f"{argument} has shape {list(tensors[argument].shape)}, expected {shape}"
    return None


def _tokens_of(given):
    """Tokens of a row, by the first tensor of a call: a rank has them last."""
    argument, x = next(iter(given.items()))
    return x.shape[2 if argument == "rank" else 1]


def _with_axes(name, given, problem):
    """A sentence about a shape with the names of the axes, and what to do where heads and tokens are exchanged."""
    if shape := re.search(r"\b([a-z_]+) has shape \[[^\]]*\], expected \[[^\]]*\]", problem):
        axes = _axes.axes_of(name, shape[1])
        problem = problem.replace(shape[0], f"{shape[0]}{axes and ', '}{axes}")
    if shape and shape[1] == "documents":
        problem += "\n  hint: documents([cu_seqlens of a row, ..], tokens) makes the pair of all rows"
    elif shape or problem.startswith("number of "):
        problem += _axes.hint_for(given)
    return problem


def _with_type(name, problem):
    """A sentence about a type that no kernel takes of any argument, with the type that this argument must have."""
    wrong = re.match(r"([a-z_]+) is (\w+); the kernels take bf16, f32 and i32$", problem)
    wanted = wrong and (TYPES.get(f"{name}.{wrong[1]}") or TYPES.get(wrong[1]))
    if not wanted:
        return problem
    return f"{wrong[1]} is {wrong[2]}, expected {wanted[0]}\n  hint: cast it before the call, by .{wanted[1]}()"


def _checked_for_definition(name, defaults, given):
    """Refuses arguments that do not fit, which torch would take, and makes documents of cu_seqlens."""
    if given.get("same_bits"):
        why = "same_bits has no definition on a CPU: its products of a row and of a token add in other orders"
        raise SieveError(f"{name}: {why}\n  hint: leave it out there")
    if problem := _problem(name, defaults, given) or _mismatch(given):
        raise SieveError(f"{name}: {_with_axes(name, given, problem)}")
    if is_tensor(given.get("documents")) and name != "block_mask":
        from .functional import documents

        given["documents"] = documents(given["documents"], _tokens_of(given))
    _axes.warn(given)


def _cast(argument, x, dtype):
    return x.to(dtype) if argument in CAST and is_tensor(x) and x.dtype == torch.float32 else x


F = TypeVar("F", bound=Callable[..., Any])


def checked(function: F) -> F:
    """The function with SieveErrors that name its arguments. These are looked at once a call has failed, which costs
    other calls nothing. Under autocast f32 tensors are cast first.
    """
    name, signature = function.__name__, inspect.signature(function)
    defaults = {x.name: x.default for x in signature.parameters.values()}
    leader = next(iter(defaults))

    def bound(args, kwargs):
        """Arguments by name; Python's error of missing ones and of too many gets the function's name."""
        try:
            return signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{name}(): {error}") from None

    def arguments_of_definition(args, kwargs):
        """By name. A definition takes what torch takes, so its arguments are looked at first."""
        refuse(name, kwargs, defaults)
        given = bound(args, kwargs)
        _checked_for_definition(name, defaults, given)
        if not torch.compiler.is_compiling():
            given = as_on_a_gpu(call, name, given)
        # It has no default of its own for block sizes.
        return {**{x: value for x, value in defaults.items() if x == "blocks"}, **given}

    @functools.wraps(function)
    def call(*args, **kwargs):
        """Runs the kernels' function, or the definition where `on_cpu` is on and the first argument is a CPU tensor; an
        error that either raises is looked into only then.
        """
        first = args[0] if args else kwargs.get(leader)
        run = definition_of(name, first) or function
        device = "cuda" if is_tensor(first) and first.is_cuda else "cpu"
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            args = [_cast(argument, x, dtype) for argument, x in zip(defaults, args)]
            kwargs = {argument: _cast(argument, x, dtype) for argument, x in kwargs.items()}
        if run is not function:
            args, kwargs = (), arguments_of_definition(args, kwargs)
        if torch.compiler.is_compiling():
            return run(*args, **kwargs)
        try:
            return run(*args, **kwargs)
        except Exception as error:
            refuse(name, kwargs, defaults)
            problem = None
            if not (isinstance(error, SieveError) and str(error).startswith(f"{name}: ")):
                # Where an argument is missing, or one too many, Python says so.
                with contextlib.suppress(TypeError):
                    problem = _problem(name, defaults, signature.bind(*args, **kwargs).arguments)
            if problem is None and isinstance(error, SieveError):
                problem = re.sub(r"^[a-z_]+: ", "", str(error))
                for theirs, ours in RENAMED.items():
                    problem = problem if theirs in defaults else re.sub(rf"\b{theirs}\b", ours, problem)
                problem = _with_type(name, problem)
                with contextlib.suppress(TypeError):
                    problem = _with_axes(name, signature.bind(*args, **kwargs).arguments, problem)
            if problem is None:
                raise
            raise SieveError(f"{name}: {problem}") from None

    call.is_checked, call.arguments_of_definition = True, arguments_of_definition
    return call  # type: ignore[return-value]
