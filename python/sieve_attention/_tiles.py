"""Masks of blocks as lists: of keys for each tile of queries, and of queries for each tile of keys."""

from dataclasses import dataclass, field

import torch

# Queries of a step, and keys of a tile, of the backward pass under a mask of blocks.
STEP_QUERIES, TILE_KEYS = 64, 128


@dataclass(frozen=True, eq=False)
class BlockMask:
    """What `block_mask` returns: lists of key blocks for every head and query block, and the mask's sizes."""

    words: torch.Tensor
    block: int
    shape: tuple
    _by_keys: dict = field(default_factory=dict, repr=False)

    def by_keys(self, kv_heads):
        """The mask as the backward pass reads it: for every KV head and tile of keys its queries, int32 in a row.

        It is made once for a number of KV heads and a stream, and does not wait for the GPU.
        """
        if torch.compiler.is_compiling() or (self.words.is_cuda and torch.cuda.is_current_stream_capturing()):
            # A graph's tensors are its own.
            return _tile_lists(self.words, self.block, self.shape, kv_heads)
        stream = torch.cuda.current_stream(self.words.device).cuda_stream if self.words.is_cuda else 0
        key = kv_heads, stream
        made = self._by_keys.get(key)
        if made is None:
            made = _tile_lists(self.words, self.block, self.shape, kv_heads)
            # Not one without values.
            if type(made) is torch.Tensor:
                self._by_keys[key] = made
        return made


def _tile_lists(words, block, shape, kv_heads):
    """`BlockMask.by_keys`, in the form that kernels/common/tile_steps.cuh describes."""
    heads, queries, keys = shape
    rows, group, device = heads * queries, heads // kv_heads, words.device
    starts, blocks = words[1 : 2 + rows].long(), words[2 + rows : -1].long()
    # Row and tile of keys of each listed block; the second of a row's two blocks in one tile is the first's step.
    row = torch.arange(rows, device=device).repeat_interleave(starts.diff(), output_size=blocks.shape[0])
    tile, half = blocks // (TILE_KEYS // block), blocks % (TILE_KEYS // block)
    halves = 1 << half if block < TILE_KEYS else torch.full_like(tile, 3)
    again = torch.nn.functional.pad((row[1:] == row[:-1]) & (tile[1:] == tile[:-1]), (1, 0))[: len(row)]
    halves = halves + torch.nn.functional.pad((halves * again)[1:], (0, 1))[: len(row)]
    # How many tiles of its row come before each.
    turn = (~again).long().cumsum(0) - (~again).long()
    turn = turn - torch.nn.functional.pad(turn, (0, 1)).gather(0, starts[row])
    # By KV head, tile of keys, then from the last queries down, heads side by side.
    parts, tiles = block // STEP_QUERIES, -(-keys * block // TILE_KEYS)
    head, step = row // queries, row % queries * parts
    step = step[:, None] + torch.arange(parts, device=device)
    place = (head // group * tiles + tile)[:, None] * queries * parts + queries * parts - 1 - step
    none = kv_heads * tiles
    place = torch.where(again[:, None], none * queries * parts * group, place * group + (head % group)[:, None])
    place, order = place.flatten().sort()
    listed = torch.stack([step << 2 | halves[:, None], (head % group << 16 | turn)[:, None].expand_as(step)], -1)
    ends = torch.arange(none + 1, device=device) * (queries * parts * group)
    starts = torch.searchsorted(place, ends)
    starts = torch.nn.functional.pad(starts, (0, (none + 1) % 2))
    return torch.cat([starts, listed.flatten(0, 1)[order].flatten()]).to(torch.int32)
