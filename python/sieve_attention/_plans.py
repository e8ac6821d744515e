"""Whether a call has kernels, asked of the plans: they need shapes and types alone, and no GPU."""

import dataclasses
from functools import partial

import torch

from ._library import SieveError, asked_of
from ._tiles import BlockMask


def refusal(function, args, kwargs, device=None, arch=None):
    """Why no kernel does `function(*args, **kwargs)` and its gradients; empty where kernels do. Runs nothing.

    function: of the package, or a layer, whose weights count as tensors of the call. device: where the tensors count as
    being, their own place without one. arch: the GPU's, this machine's without it.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    leaves = []
    if device is not None and torch.device(device).type == "cuda" and not torch.cuda.is_available():
        # torch differentiates nothing on a GPU that is not there; plans of tensors without a place are a GPU's.
        device = "meta"
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, asked_of(arch):
        fake = partial(_fake, mode, device, leaves)
        if isinstance(function, torch.nn.Module):
            weights = {name: fake(x) for name, x in (*function.named_parameters(), *function.named_buffers())}
            function = partial(_call_with, function, weights)
        try:
            o = function(*map(fake, args), **{name: fake(x) for name, x in kwargs.items()})
            first = o[0] if isinstance(o, tuple) else o
            wanted = [x for x in leaves if x.requires_grad]
            if isinstance(first, torch.Tensor) and first.requires_grad and wanted:
                torch.autograd.grad(first, wanted, torch.empty_like(first), allow_unused=True)
        except SieveError as error:
            return str(error)
    return ""


def _call_with(layer, weights, *args, **kwargs):
    return torch.func.functional_call(layer, weights, args, kwargs)


def _of_tensors(replace, x):
    """x with replace(tensor) in place of each of its tensors; what is no tensor stays."""
    inner = partial(_of_tensors, replace)
    if isinstance(x, BlockMask):
        places = None if x.places is None else inner(x.places)
        return dataclasses.replace(x, words=inner(x.words), places=places, _by_keys={})
    if isinstance(x, tuple):
        made = map(inner, x)
        return type(x)(*made) if hasattr(x, "_fields") else tuple(made)
    return replace(x) if isinstance(x, torch.Tensor) else x


def _fake(mode, device, leaves, x):
    """x without memory, as part of what a call is given."""

    def fake(tensor):
        if tensor.layout != torch.strided:
            return mode.from_tensor(tensor)
        on = {"dtype": tensor.dtype, "device": tensor.device if device is None else device}
        made = torch.empty_strided(tensor.shape, tensor.stride(), **on, requires_grad=tensor.requires_grad)
        leaves.append(made)
        return made

    return _of_tensors(fake, x)


def without_values(x, dtype=None):
    """x of that type without memory, as `refusal` takes it; what is no tensor stays."""

    def empty(tensor):
        if tensor.layout != torch.strided:
            return tensor
        on = {"dtype": dtype or tensor.dtype, "device": "meta"}
        return torch.empty_strided(tensor.shape, tensor.stride(), **on, requires_grad=tensor.requires_grad)

    return _of_tensors(empty, x)


def key_of(x):
    """What an answer depends on: equal for equal shapes, strides and types."""
    if isinstance(x, dict):
        return tuple((name, key_of(y)) for name, y in x.items())
    if isinstance(x, BlockMask):
        return x.block, x.shape, key_of(x.words), key_of(x.places)
    if isinstance(x, (tuple, list)):
        return tuple(map(key_of, x))
    if isinstance(x, torch.Tensor):
        return tuple(x.shape), x.stride(), x.dtype, x.requires_grad
    return type(x), repr(x)


def lists_of(rank, keep, local, documents):
    """The lists of a `select`, a tensor without values; None where every key is kept."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from . import ops

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        rank, *bounds = _fake(mode, "meta", [], (rank.float().detach(), *(documents or (None, None))))
        _, *lists = ops.dma_select(rank, *bounds, keep, local)
        shapes = [(tuple(x.shape), x.dtype) for x in lists]
    return torch.empty(shapes[0][0], dtype=shapes[0][1], device="meta") if shapes else None
