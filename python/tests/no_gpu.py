"""What stands for a GPU where there is none, for on_gpu.py's calls without launches."""

import contextlib

import torch

from sieve_attention import _library


@contextlib.contextmanager
def traced_without_a_gpu():
    """Fake tensors of a CPU have plans, too, and outputs are zeros."""
    zeros = lambda plan, _: [torch.zeros(shape, dtype=dtype) for _, shape, dtype in plan.outputs]  # noqa: E731
    _library.Op.emulator = staticmethod(zeros)
    try:
        yield
    finally:
        _library.Op.emulator = None


class Nothing:
    """A stream, an event or a graph that does nothing."""

    cuda_stream = 0

    def __init__(self, *_, **__):
        pass

    def nothing(self, *_):
        return None

    wait_stream = synchronize = record = replay = nothing

    def elapsed_time(self, _):
        return 1.0
