"""What mypy --strict must take, and what it must refuse: each `type: ignore` here is one that it needs."""

import torch
from torch import Tensor

import sieve_attention as sieve
import sieve_attention.transformers as integration
from sieve_attention import layers


def right(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    o: Tensor = sieve.attention(q, k, v, window=3, documents=cu_seqlens)
    o, lse = sieve.attention(q, k, v, return_lse=True)
    bounds: tuple[Tensor, Tensor] = sieve.documents(cu_seqlens, 128)
    bounds = sieve.documents([cu_seqlens, cu_seqlens], 128)
    selection: sieve.Selection = sieve.select(lse, keep=16, local=2, documents=bounds)
    o = o + sieve.expiring_attention(q, k, v, None, selection)
    o = o + sieve.dma_attention(q, k, v, q, k, keep=16, preset="paper", slopes=sieve.dma_slopes(16, 2))
    pooled: tuple[Tensor, Tensor] = sieve.nsa_mean_pool(k, v, blocks=sieve.NsaBlocks(32, 16))
    o = o + sieve.nsa(q, k, v, *pooled, q, window=9)
    o, sums = sieve.selected_attention(q, k, v, q, block_sums=True)
    mask: sieve.BlockMask = sieve.block_mask(lse, 64)
    with sieve.on_cpu(strict=False):
        o = o + sums + sieve.block_sparse(q, k, v, mask) + sieve.infllm_v2(q, k, v) + sieve.msa(q, k, v, q, k)
    is_supported, why = sieve.supports("attention", q, k, v, device="cuda")
    made = layers.MSA(256, 4, 2, select_block_size=64)
    is_supported, why = sieve.supports(made, q, device="cuda", arch="sm_80")
    integration.register("sieve" if is_supported else why)
    return o + sieve.decode(q, None, None, k, v, torch.tensor([3]))


def wrong(q: Tensor) -> None:
    sieve.attention(q, q, q, windw=3)  # type: ignore[call-overload]
    sieve.attention(q, q, q, window="3")  # type: ignore[call-overload]
    sieve.msa(q, q, q, q, q, block=1.5)  # type: ignore[arg-type]
    sieve.dma_attention(q, q, q, q, q, keep=3, preset="papr")  # type: ignore[arg-type]
    sieve.select(q, 3)  # type: ignore[call-arg]
    layers.MSA(256, 4, select_block_sise=64)  # type: ignore[call-arg]
    sieve.documents([0, 3], 3)  # type: ignore[list-item]
    o: int = sieve.nsa_selected(q, q, q, q)  # type: ignore[assignment]
    sieve.attention(q, q, q) + o.nothing  # type: ignore[attr-defined]
