"""Masks of blocks as lists: of keys for each tile of queries, and of queries for each tile of keys."""

import dataclasses
import functools
from dataclasses import dataclass, field

import torch

from ._library import SieveError

# Queries of a step, and keys of a tile, of the backward pass under a mask of blocks.
STEP_QUERIES, TILE_KEYS = 64, 128
# Time of a list beside its steps, in steps: its keys are loaded and their gradients stored.
LIST_STEPS = 3
# Bytes of queries and their gradients that thread blocks read at the same time, and of one query, of 128 columns: these
# and as many bytes of sums of dq stay in an L2 cache of 50 MB.
QUERY_BYTES, ROW_BYTES = 32 << 20, 512


@dataclass(frozen=True, eq=False)
class BlockMask:
    """What `block_mask` returns: lists of key blocks for every head and query block, and the mask's sizes.

    words: int32, an unused word; for every head and query block the place of its first key block, and one more for the
    end; the key blocks, list after list; one more unused word.
    places: int64 `[tokens]`, where the blocks have each token of a row of documents; None where that is its own place.
    """

    words: torch.Tensor
    block: int
    shape: tuple[int, ...]
    places: torch.Tensor | None = None
    _by_keys: dict[tuple[int, int, bool], torch.Tensor] = field(default_factory=dict, repr=False)

    def over_documents(self, attend, q, k, v):
        """`attend(q, k, v, mask)` of the same mask without `places`, over rows in which every document begins at a
        block; zeros fill its last one, and no query before them sees them.
        """
        if q.shape[1] != len(self.places):
            raise SieveError(f"block_sparse: the mask is one of {len(self.places)} tokens, and q has {q.shape[1]}")
        tokens, plain = self.shape[1] * self.block, dataclasses.replace(self, places=None)
        placed = [x.new_zeros(1, tokens, *x.shape[2:]).index_copy(1, self.places, x) for x in (q, k, v)]
        return attend(*placed, plain).index_select(1, self.places)

    def by_keys(self, kv_heads, deterministic=True):
        """The mask as the backward pass reads it: for every share of a KV head's query heads (`head_shares`) and tile
        of keys its queries, int32 in a row. With `deterministic` it also says in which order tiles of keys add to dq,
        and which thread block goes through which lists.

        It is made once for a number of KV heads and a stream, and does not wait for the GPU.
        """
        is_traced = torch.compiler.is_compiling() or type(self.words) is not torch.Tensor
        if is_traced or (self.words.is_cuda and torch.cuda.is_current_stream_capturing()):
            # A graph keeps its tensors for itself: lists that it makes may not be kept for later calls.
            return self._lists(kv_heads, deterministic)
        stream = torch.cuda.current_stream(self.words.device).cuda_stream if self.words.is_cuda else 0
        key = kv_heads, stream, deterministic
        made = self._by_keys.get(key)
        if made is None:
            made = self._by_keys[key] = self._lists(kv_heads, deterministic)
        return made

    def _lists(self, kv_heads, deterministic):
        """The lists that `by_keys` keeps, made anew. Without `deterministic`, off a Hopper GPU and in a trace they have
        no schedule: then lists follow the order of the tiles.
        """
        blocks, schedule = _blocks_of(self.words.device), None
        # A trace would hold each round of a schedule.
        is_traced = torch.compiler.is_compiling() or type(self.words) is not torch.Tensor
        if deterministic and blocks > 1 and not is_traced:
            tiles, heads_at_once = -(-self.shape[2] * self.block // TILE_KEYS), self._heads_at_once(kv_heads)
            schedule = functools.partial(_rounds, tiles=tiles, heads_at_once=heads_at_once)
        return _tile_lists(self.words, self.block, self.shape, kv_heads, blocks, schedule)

    def _heads_at_once(self, kv_heads):
        """How many shares of heads fit the L2 cache together."""
        heads, queries, _ = self.shape
        own = heads // (kv_heads * head_shares(heads // kv_heads))
        return max(QUERY_BYTES // (own * queries * self.block * ROW_BYTES), 1)


@torch.compiler.assume_constant_result
def _blocks_of(device):
    """Thread blocks that go through lists in their order: as many as a Hopper GPU runs at a time; others have none."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 1
    gpu = torch.cuda.get_device_properties(device)
    return gpu.multi_processor_count if gpu.major == 9 else 1


def places_of(documents, block):
    """Where each token of a row of documents lies when each of them begins at a block, int64 `[tokens]`, and the
    document of each block. documents: `(start, end)` of each token, `[1, tokens]`."""
    start, end = (x[0].long() for x in documents)
    position = torch.arange(len(start), device=start.device)
    first = position[position == start]
    blocks = -(-(end[first] - first) // block)
    document = (position == start).cumsum(0) - 1
    begin = (blocks.cumsum(0) - blocks) * block
    number = torch.arange(len(first), device=start.device)
    return begin[document] + position - start, number.repeat_interleave(blocks)


def head_shares(group):
    """How many shares a KV head's `group` query heads are divided into: of two heads, or of one. More heads in a share
    are more queries and sums of dq at a time than the L2 cache holds; fewer are more sums of dk and dv in memory.
    """
    return group if group % 2 else group // 2


def _tile_lists(words, block, shape, kv_heads, blocks=1, schedule=None):
    """`BlockMask.by_keys`, in the form that kernels/common/tile_steps.cuh describes.

    blocks: thread blocks that go through the lists. schedule: a function of the lists' lengths and of `blocks`, which
    returns the time of each list's first step and the order of the lists; then tiles of keys add to dq in the order of
    their steps' times. Without one both orders are that of the tiles. In either case a block comes to its steps in the
    order of one time for all blocks, so that blocks that wait for each other's steps do not wait for ever.
    """
    heads, queries, keys = shape
    rows, device = heads * queries, words.device
    shares = kv_heads * head_shares(heads // kv_heads)
    own = heads // shares
    starts, listed = words[1 : 2 + rows].long(), words[2 + rows : -1].long()
    # Row and tile of keys of each listed block; the second of a row's two blocks in one tile is the first's step.
    row = torch.arange(rows, device=device).repeat_interleave(starts.diff(), output_size=listed.shape[0])
    tile, half = listed // (TILE_KEYS // block), listed % (TILE_KEYS // block)
    halves = 1 << half if block < TILE_KEYS else torch.full_like(tile, 3)
    again = torch.nn.functional.pad((row[1:] == row[:-1]) & (tile[1:] == tile[:-1]), (1, 0))[: len(row)]
    halves = halves + torch.nn.functional.pad((halves * again)[1:], (0, 1))[: len(row)]
    # How many tiles of its row come before each.
    turn = (~again).long().cumsum(0) - (~again).long()
    turn = turn - torch.nn.functional.pad(turn, (0, 1)).gather(0, starts[row])
    # By share, tile of keys, then from the last queries down, heads side by side.
    parts, tiles = block // STEP_QUERIES, -(-keys * block // TILE_KEYS)
    head, step = row // queries, row % queries * parts
    step = step[:, None] + torch.arange(parts, device=device)
    place = (head // own * tiles + tile)[:, None] * queries * parts + queries * parts - 1 - step
    lists = shares * tiles
    place = torch.where(again[:, None], lists * queries * parts * own, place * own + (head % own)[:, None])
    place, by_place = place.flatten().sort()
    starts = torch.searchsorted(place, torch.arange(lists + 1, device=device) * (queries * parts * own))
    order = torch.arange(lists, device=device)
    turn = turn[:, None].expand_as(step).flatten()[by_place]
    if schedule is not None:
        first, order = schedule(starts.diff(), blocks)
        at = torch.arange(len(place), device=device)
        list_of = (torch.searchsorted(starts, at, right=True) - 1).clamp(max=lists - 1)
        by_time = (first[list_of] + at - starts[list_of]).sort(stable=True).indices
        sums = (head[:, None] * queries * parts + step).flatten()[by_place]
        sums = torch.where(at < starts[-1], sums, heads * queries * parts)
        sums, by_sums = sums[by_time].sort(stable=True)
        turn = torch.empty_like(turn).scatter_(0, by_time[by_sums], at - torch.searchsorted(sums, sums))
    order = torch.nn.functional.pad(order, (0, -len(order) % blocks), value=-1)
    step_words = torch.stack(
        [
            (step << 2 | halves[:, None]).flatten()[by_place],
            (head % own)[:, None].expand_as(step).flatten()[by_place] << 16 | turn,
        ],
        -1,
    )
    header = torch.cat([torch.full_like(starts[:1], blocks), starts, order])
    header = torch.nn.functional.pad(header, (0, len(header) % 2))
    return torch.cat([header, step_words.flatten()]).to(torch.int32)


def _rounds(lengths, blocks, tiles, heads_at_once):
    """A schedule of lists: their first steps' times, in steps, and the order in which blocks go through them.

    In each round every block gets one list, the longest the block that is free first. Lists of `heads_at_once` shares
    of heads alternate, each with `tiles` lists.
    """
    count, device = len(lengths), lengths.device
    rounds = -(-count // blocks)
    at = torch.arange(count, device=device)
    share, tile = at // tiles, at % tiles
    at = ((share // heads_at_once * tiles + tile) * heads_at_once + share % heads_at_once).sort().indices
    at = torch.nn.functional.pad(at, (0, rounds * blocks - count), value=count)
    time = torch.nn.functional.pad(lengths + LIST_STEPS, (0, 1))[at].view(rounds, blocks)
    time, longest = time.sort(dim=1, descending=True, stable=True)
    at = at.view(rounds, blocks).gather(1, longest)
    free, block = torch.zeros_like(time[0]), torch.arange(blocks, device=device)
    begins, taken_by = [], []
    for each in time:
        free, first = free.sort(stable=True)
        block = block[first]
        begins.append(free)
        taken_by.append(block)
        free = free + each
    begin = torch.zeros(count + 1, dtype=time.dtype, device=device).scatter_(0, at.flatten(), torch.cat(begins))
    order = torch.empty_like(at).scatter_(1, torch.stack(taken_by), at)
    return begin[:-1], torch.where(order == count, -1, order).flatten()
