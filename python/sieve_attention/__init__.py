"""Exact sparse and dense attention for PyTorch, by Sieve's CUDA kernels. docs/pytorch.md has examples and limits."""

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise ImportError(f"sieve_attention: torch is installed, and its import failed: {error}") from error
    raise ImportError("sieve_attention needs PyTorch: pip install torch") from error
except ImportError as error:
    raise ImportError(f"sieve_attention: torch is installed, and its import failed: {error}") from error

from ._library import SieveError
from ._on_cpu import on_cpu
from ._tiles import BlockMask
from .functional import (
    Bands,
    NsaBlocks,
    Selection,
    attention,
    block_mask,
    block_sparse,
    decode,
    dma_attention,
    dma_decode,
    dma_scores,
    dma_slopes,
    documents,
    expiring_attention,
    infllm_v2,
    mla_decode,
    moba,
    msa,
    nsa,
    nsa_compressed,
    nsa_mean_pool,
    nsa_selected,
    select,
    selected_attention,
    supports,
)

from . import _flops  # noqa: F401, E402, I001: formulas of operators that functional defines

__all__ = [
    "Bands", "BlockMask", "NsaBlocks", "Selection", "SieveError", "attention", "block_mask", "block_sparse", "decode",
    "dma_attention", "dma_decode", "dma_scores", "dma_slopes", "documents", "expiring_attention", "infllm_v2",
    "mla_decode", "moba", "msa", "nsa", "nsa_compressed", "nsa_mean_pool", "nsa_selected", "on_cpu", "select",
    "selected_attention", "supports",
]  # fmt: skip
__version__ = "0.1.0"
