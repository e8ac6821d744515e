"""What layers are made of besides projections: norms of heads, the rotation by positions, and the cache."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ._library import SieveError


class Cache:
    """What one layer keeps of the tokens before a call, for rows of equal length: `capacity` tokens at most.

    A layer fills it; `length` counts the tokens that it has seen. The tensors are made by the first call, with its
    batch, type and device. DMA keeps `keep_window_size` tokens of them and needs no capacity. `decode` says up to which
    capacity a token's attention has the bits of whole rows.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self.tensors: dict[str, Tensor] = {}

    def append(self, name: str, new: Tensor, at: int | None = None) -> Tensor:
        """Writes new `[batch, tokens, heads, width]` behind the tokens that are there; returns what is in use,
        `[batch, heads, tokens, width]`."""
        at, new = self.length if at is None else at, new.transpose(1, 2)
        end = at + new.shape[2]
        self.check(end)
        if name not in self.tensors:
            self.tensors[name] = new.new_zeros(*new.shape[:2], self.capacity, *new.shape[3:])
        self.tensors[name][:, :, at:end] = new
        return self.tensors[name][:, :, :end]

    def check(self, tokens: int) -> None:
        """Refuses more tokens than there is room for."""
        if tokens > self.capacity:
            raise SieveError(f"a cache of {self.capacity} tokens gets {tokens}\n  hint: Cache(capacity) with more")

    def lengths(self, like: Tensor, more: int = 0) -> Tensor:
        """Tokens of each row and `more`, as the decode functions take them."""
        return torch.full((len(like),), self.length + more, dtype=torch.int32, device=like.device)


def cast(x: Tensor) -> Tensor:
    """x as kernels and caches take it: under autocast in its type, in which norms and rotations do not end."""
    device = x.device.type
    is_cast = device != "meta" and torch.is_autocast_enabled(device)
    return x.to(torch.get_autocast_dtype(device)) if is_cast else x


class RMSNorm(nn.Module):
    """x by its root mean square and a weight, in f32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x.float() * self.inverse(x)).to(x.dtype)

    def inverse(self, x: Tensor) -> Tensor:
        """1 / the root mean square, `[.., 1]`."""
        return torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)


class Rotary(nn.Module):
    """Rotates the halves of each head by its position; without frequencies by those of rope_theta."""

    def __init__(self, theta: float, frequencies: Sequence[float] | None, amplitude: float, rotates: bool) -> None:
        super().__init__()
        self.theta, self.frequencies = theta, frequencies
        # The factor of cosines and sines is part of the rotation.
        self.amplitude, self.rotates = amplitude if rotates else 1.0, rotates

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: `[batch, tokens, heads, width]`; positions: `[batch or 1, tokens]`."""
        if not self.rotates:
            return x
        half = x.shape[-1] // 2
        frequency = self.theta ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
        if self.frequencies is not None:
            frequency = torch.tensor(self.frequencies, device=x.device, dtype=torch.float64)
        angle = positions[..., None, None] * frequency
        cos, sin = ((function(angle) * self.amplitude).float() for function in (torch.cos, torch.sin))
        x1, x2 = x.float().chunk(2, -1)
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).to(x.dtype)
