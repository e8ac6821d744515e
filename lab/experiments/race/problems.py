"""What is raced: inputs, which keys a query sees, and the definition in f64 that every kernel is compared with.

Shapes are FlashAttention's, `[1, tokens, heads, 128]` in bf16. A problem's numbers follow from its task, heads, tokens
and documents alone, so that all rivals have the same ones.
"""

import dataclasses
import functools
import heapq
import zlib

import torch

WIDTH = 128
WINDOW = 1024  # keys of `window`, and keys that `expiring` keeps
LOCAL = 128  # of them the last ones, whatever their rank
BLOCK, CHOSEN = 64, 16  # of `selected` and `shared`: tokens of a block, blocks of a query
TILE, TILES = 128, 16  # of `tiles`: tokens of a tile, earlier tiles that a tile of queries sees
FIRST, BANDS = 64, 8  # of `bands`: first keys, and bands beyond the window of as many keys as `window`'s
CHUNK = 1024  # queries that the definition computes at once

TASKS = {
    "dense": "causal attention",
    "window": f"the last {WINDOW} keys",
    "bands": f"the last {WINDOW} keys, the first {FIRST}, and for each KV head one of {BANDS} bands (CoWindow)",
    "selected": f"{CHOSEN} blocks of {BLOCK} keys for each query and KV head: its own, the first, the others random",
    "shared": "as selected, one KV head whose keys are its values too",
    "tiles": f"{TILES} random earlier tiles of {TILE} keys for each head and tile of {TILE} queries, none of its own",
    "expiring": f"the {WINDOW} best-ranked keys by KV head, the last {LOCAL} in any case; the rank is a bias (DMA)",
    "own": "each method with its own choice of keys, which is timed too",
}


def expiry(rank, keep, local):
    """First query that no longer sees each key: it has the last `local` keys and of the older ones the best, `keep` in
    all, ties to the later one. rank: a list of numbers."""
    expires, best = [len(rank)] * len(rank), []
    for query in range(local, len(rank)):
        heapq.heappush(best, (rank[query - local], query - local))
        if len(best) > keep - local:
            expires[heapq.heappop(best)[1]] = query
    return expires


@dataclasses.dataclass
class Problem:
    task: str
    heads: int
    kv_heads: int
    tokens: int
    documents: list | None = None  # first tokens and the end, as cu_seqlens
    device: str = "cuda"
    gradients: bool = True

    def __post_init__(self):
        label = repr((self.task, self.heads, self.kv_heads, self.tokens, self.documents))
        self.generator = torch.Generator(self.device).manual_seed(zlib.crc32(label.encode()))
        self.group = self.heads // self.kv_heads
        self.q, self.k = self.new(self.heads), self.new(self.kv_heads)
        self.v = self.k if self.task == "shared" else self.new(self.kv_heads)
        self.do = self.new(self.heads).detach()

    def random(self, *shape):
        return torch.randn(shape, device=self.device, generator=self.generator)

    def new(self, heads, width=WIDTH):
        return self.random(1, self.tokens, heads, width).bfloat16().requires_grad_(self.gradients)

    @property
    def inputs(self):
        return (self.q, self.k) if self.task == "shared" else (self.q, self.k, self.v)

    @functools.cached_property
    def start(self):
        """First token of each token's document, int64 `[tokens]`."""
        position = torch.arange(self.tokens, device=self.device)
        if self.documents is None:
            return position * 0
        ends = torch.tensor(self.documents[1:], device=self.device)
        return torch.tensor(self.documents, device=self.device)[torch.searchsorted(ends, position, right=True)]

    @functools.cached_property
    def cu_seqlens(self):
        return torch.tensor(self.documents or [0, self.tokens], dtype=torch.int32, device=self.device)

    @functools.cached_property
    def blocks(self):
        """Blocks of each query, int32 `[tokens, KV heads, 16]`, counted in its document: ascending, then -1."""
        own = (torch.arange(self.tokens, device=self.device) - self.start) // BLOCK
        lists = []
        for begin in range(0, self.tokens, CHUNK):
            own_part = own[begin : begin + CHUNK, None, None]
            count = max(int(own_part.max()) + 1, CHOSEN)
            number = torch.arange(count, device=self.device)
            shape = (len(own_part), self.kv_heads, count)
            score = torch.rand(shape, device=self.device, generator=self.generator)
            score = torch.where((number == own_part) | (number == 0), 2.0, score).masked_fill(number > own_part, -1.0)
            chosen = score.topk(CHOSEN)
            lists.append(chosen.indices.masked_fill(chosen.values < 0, count).sort(-1).values)
            lists[-1] = lists[-1].masked_fill(lists[-1] == count, -1).int()
        return torch.cat(lists)

    @property
    def reach(self):
        """The distance at which the last of `bands` ends."""
        return max(self.tokens - FIRST, WINDOW + BANDS)

    def band(self, kv_head):
        """The distances of a KV head's band: the first, and the end."""
        border = lambda at: WINDOW + (self.reach - WINDOW) * at // BANDS  # noqa: E731
        return border(kv_head % BANDS), border(kv_head % BANDS + 1)

    def share(self):
        """Pairs that `bands` reads of those up to each query's own key, of one document."""
        behind = torch.arange(1 - FIRST, self.tokens - FIRST + 1).clamp(min=0)
        bands = map(self.band, range(self.kv_heads))
        of_bands = [behind.clamp(max=end) - behind.clamp(max=begin) for begin, end in bands]
        # Behind the first keys a query sees as many as in a row that begins there.
        first = torch.arange(1, self.tokens + 1).clamp(max=FIRST)
        seen = first + behind.clamp(max=WINDOW) + sum(of_bands) / len(of_bands)
        return float(seen.sum()) / (self.tokens * (self.tokens + 1) / 2)

    @functools.cached_property
    def tile_of(self):
        """The tile of each token: those of each document are counted from its first token, after earlier documents'."""
        bounds = self.documents or [0, self.tokens]
        tiles = [-(-(end - begin) // TILE) for begin, end in zip(bounds, bounds[1:])]
        before = [sum(tiles[:at]) * TILE for at in range(len(tiles))]
        places = [torch.arange(end - begin) + at for begin, end, at in zip(bounds, bounds[1:], before)]
        return torch.cat(places).to(self.device) // TILE

    @functools.cached_property
    def tiles(self):
        """Which tiles of keys a tile of queries sees, bool `[heads, tiles, tiles]`."""
        count = int(self.tile_of[-1]) + 1
        number = torch.arange(count, device=self.device)
        first = torch.zeros_like(number).scatter_(0, self.tile_of, self.tile_of[self.start])
        earlier = (number < number[:, None]) & (number >= first[:, None])
        shape = (self.heads, count, count)
        score = torch.rand(shape, device=self.device, generator=self.generator).masked_fill(~earlier, -1.0)
        least = score.topk(min(TILES, count)).values[..., -1:]
        return (score >= least) & earlier

    @functools.cached_property
    def rank(self):
        """f32 `[1, KV heads, tokens]`."""
        return self.random(1, self.kv_heads, self.tokens)

    @functools.cached_property
    def expires(self):
        """First query that no longer sees a key, int64 `[KV heads, tokens]`."""
        bounds = self.documents or [0, self.tokens]
        rows = [[begin + at for begin, end in zip(bounds, bounds[1:]) for at in expiry(row[begin:end], WINDOW, LOCAL)]
                for row in self.rank[0].tolist()]
        return torch.tensor(rows, device=self.device)

    def sees(self, begin, end, head):
        """Whether queries from `begin` to `end` of a head see the keys before `end`, bool `[queries, end]`."""
        query = torch.arange(begin, end, device=self.device)[:, None]
        key = torch.arange(end, device=self.device)
        visible = (key <= query) & (key >= self.start[begin:end, None])
        if self.task == "window":
            visible &= query - key < WINDOW
        elif self.task == "bands":
            (first, last), distance = self.band(head // self.group), query - key
            is_first = key - self.start[begin:end, None] < FIRST
            visible &= is_first | (distance < WINDOW) | ((distance >= first) & (distance < last))
        elif self.task in ("selected", "shared"):
            table = torch.zeros(end - begin, -(-end // BLOCK) + 1, dtype=torch.bool, device=self.device)
            chosen = self.blocks[begin:end, head // self.group].long()
            table.scatter_(1, torch.where(chosen < 0, table.shape[1] - 1, chosen), True)
            table[:, -1] = False
            block = ((key - self.start[begin:end, None]) // BLOCK).clamp(min=0)
            visible &= table.gather(1, block)
        elif self.task == "tiles":
            visible &= self.tiles[head][self.tile_of[query], self.tile_of[key]]
        elif self.task == "expiring":
            visible &= query < self.expires[head // self.group, :end]
        return visible

    def mixed(self, deeper=64):
        """Which tiles of `deeper`-by-`deeper` hold a pair that is seen, and which hold no other, for FlexAttention: two
        bool `[heads or 1, tiles, tiles]`. Tiles of `selected` count as mixed wherever a query chose them."""
        count = -(-self.tokens // deeper)
        number = torch.arange(count, device=self.device)
        row, column = number[:, None], number
        first, last = row * deeper, (row * deeper + deeper - 1).clamp(max=self.tokens - 1)
        begin, end = column * deeper, (column * deeper + deeper - 1).clamp(max=self.tokens - 1)
        mixed_tiles, whole = column <= row, column < row
        mixed_tiles, whole = mixed_tiles & (end >= self.start[first]), whole & (begin >= self.start[last])
        if self.task == "window":
            mixed_tiles, whole = mixed_tiles & (first - end < WINDOW), whole & (last - begin < WINDOW)
        elif self.task == "tiles" and self.documents:
            whole = torch.zeros_like(whole)
        elif self.task == "tiles":
            mixed_tiles, whole = self.tiles & mixed_tiles, self.tiles & whole
        elif self.task == "expiring":
            padded = torch.nn.functional.pad(self.expires, (0, count * deeper - self.tokens), value=0)
            padded = padded.view(self.kv_heads, 1, count, deeper)
            mixed_tiles, whole = mixed_tiles & (padded.amax(-1) > first), whole & (padded.amin(-1) > last)
            mixed_tiles, whole = (x.repeat_interleave(self.group, 0) for x in (mixed_tiles, whole))
        elif self.task == "selected":
            chosen = self.blocks.long()
            key = (chosen * BLOCK + self.start[:, None, None]) // deeper
            table = torch.zeros(self.kv_heads, count, count + 1, dtype=torch.bool, device=self.device)
            query = (torch.arange(self.tokens, device=self.device) // deeper)[:, None, None].expand_as(chosen)
            head = torch.arange(self.kv_heads, device=self.device)[None, :, None].expand_as(chosen)
            for further in (0, BLOCK - 1):
                key = (chosen * BLOCK + self.start[:, None, None] + further) // deeper
                table[head, query, torch.where(chosen < 0, count, key.clamp(max=count))] = True
            mixed_tiles = (table[..., :count] & mixed_tiles).repeat_interleave(self.group, 0)
            whole = torch.zeros_like(mixed_tiles)
        dims = (1, count, count)
        return [x if x.dim() == 3 else x.expand(dims) for x in (mixed_tiles, whole & mixed_tiles)]


@torch.no_grad()
def definition(problem):
    """o and the gradients of `problem.inputs` in f64; 0 where a query sees no key."""
    wide = [x.detach()[0].double() for x in (problem.q, problem.k, problem.v, problem.do)]
    q, k, v, do = (x.transpose(0, 1).contiguous() for x in wide)
    o, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    scale = WIDTH**-0.5
    for head in range(problem.heads):
        kv_head = head // problem.group
        for begin in range(0, problem.tokens, CHUNK):
            end = min(begin + CHUNK, problem.tokens)
            logits = q[head, begin:end] @ k[kv_head, :end].T * scale
            if problem.task == "expiring":
                logits += problem.rank[0, kv_head, :end]
            logits.masked_fill_(~problem.sees(begin, end, head), -torch.inf)
            weights = (logits - logits.amax(-1, keepdim=True).clamp(min=-1e300)).exp()
            weights /= weights.sum(-1, keepdim=True).clamp(min=1e-300)
            o[head, begin:end] = weights @ v[kv_head, :end]
            dp = do[head, begin:end] @ v[kv_head, :end].T
            ds = weights * (dp - (weights * dp).sum(-1, keepdim=True)) * scale
            dq[head, begin:end] = ds @ k[kv_head, :end]
            dk[kv_head, :end] += ds.T @ q[head, begin:end]
            dv[kv_head, :end] += weights.T @ do[head, begin:end]
    results = (o, dq, dk + dv) if problem.task == "shared" else (o, dq, dk, dv)
    return [x.transpose(0, 1)[None] for x in results]


@torch.no_grad()
def last_row(problem):
    """o of the row's last query in f64, `[heads, width]`."""
    rows, end = [], problem.tokens
    for head in range(problem.heads):
        k, v = (x.detach()[0, :, head // problem.group].double() for x in (problem.k, problem.v))
        logits = k @ problem.q.detach()[0, -1, head].double() * WIDTH**-0.5
        logits.masked_fill_(~problem.sees(end - 1, end, head)[0], -torch.inf)
        rows.append(logits.softmax(0) @ v)
    return torch.stack(rows)


def distance(computed, wanted, unit):
    """Norm of the difference over the norm of what is wanted, or over that of `unit` where 0 is wanted."""
    computed, wanted = computed.detach().double(), wanted.double()
    norm = wanted.norm() if wanted.any() else unit.double().norm()
    return float((computed - wanted).norm() / norm)
