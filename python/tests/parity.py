"""Comparison with a definition: by norm and by row, against the error that plain bf16 torch makes."""

import torch


def random(*shape, device, scale=1.0, dtype=torch.bfloat16, seed):
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    return made.to(device=device, dtype=dtype)


def leaves(tensors, dtype=None):
    return [x.detach().clone().to(dtype or x.dtype).requires_grad_() for x in tensors]


def marked(indices, like):
    """Blocks that the kernels chose, int `[batch, tokens, choosers, blocks]`, as bools of the shape of `like`."""
    slots = indices.transpose(1, 2).long()
    counts = torch.zeros(like.shape, dtype=torch.long, device=indices.device)
    return counts.scatter_add_(-1, slots.clamp(min=0), (slots >= 0).long()) > 0


# In a tensor of fewer numbers the error that plain bf16 makes once is luck: the largest of DRAWS is taken.
FEW, DRAWS = 16, 5


def assert_close(name, got, exact, plain, floor=1e-3, others=()):
    """The error of `got` is at most twice that of `plain`, over the whole tensor and in the worst row; `others` are
    further pairs of exact and plain results, of which the worst error counts."""
    got, exact, plain = (x.detach().double() for x in (got, exact, plain))
    assert got.shape == exact.shape, f"{name}: {tuple(got.shape)}, expected {tuple(exact.shape)}"
    assert torch.isfinite(got).all(), f"{name}: a number that is not finite"
    scale = exact.norm(dim=-1).mean() if exact.dim() else exact.abs()
    sizes = {
        "norm": lambda x: x.norm() / max(x.numel() // x.shape[-1], 1) ** 0.5,
        "row": lambda x: x.norm(dim=-1).max(),
    }
    for form, size in sizes.items():
        plain_errors = [size(plain - exact), *(size(b.detach().double() - a.detach().double()) for a, b in others)]
        error, allowed = size(got - exact), 2 * max(plain_errors) + floor * scale + 1e-5
        assert error <= allowed, f"{name}, by {form}: error {error:.3g}, plain bf16 allows {allowed:.3g}"


def compare(name, ours, definition, inputs, settings=None, names="qkv"):
    """Output and all gradients of `ours` beside the definition in f32 and in the inputs' own types."""
    settings = settings or {}

    def results(function, dtype, seed=99):
        copies = leaves(inputs, dtype)
        o = function(*copies, **settings)
        d_o = random(*o.shape, device=o.device, seed=seed).to(o.dtype)
        return (o, *torch.autograd.grad(o, copies, d_o))

    results_by_kind = [results(ours, None), results(definition, torch.float32), results(definition, None)]
    others = []
    if any(x.numel() < FEW for x in results_by_kind[0]):
        others = [(results(definition, torch.float32, seed), results(definition, None, seed))
                  for seed in range(100, 99 + DRAWS)]
    for at, part in enumerate(("o", *(f"d{x}" for x in names))):
        pairs = [(exact[at], plain[at]) for exact, plain in others] if results_by_kind[0][at].numel() < FEW else ()
        assert_close(f"{name}: {part}", *(x[at] for x in results_by_kind), others=pairs)
    return results_by_kind[0]
