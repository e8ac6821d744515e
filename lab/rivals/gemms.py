"""Times torch's GEMMs over the shapes of the 1.7B recipe, in the order of a step: forward, then gradients of inputs and of weights.

    python3 lab/rivals/gemms.py [--tokens 16384]

Nothing but GEMMs runs, so this is what cuBLAS takes for them on this GPU at the clocks it holds under such a load. Compare with the
GEMMs in the table of `sieve train --profile N` from the same minutes.
"""

import argparse
import statistics

import torch

HIDDEN, INTERMEDIATE, LAYERS, VOCAB = 2048, 6144, 28, 50280
# (in, out) of a layer's weights: packed q, k, v; output; packed gate and up; down.
WEIGHTS = [(HIDDEN, 4096), (HIDDEN, HIDDEN), (HIDDEN, 2 * INTERMEDIATE), (INTERMEDIATE, HIDDEN)]


def main():
    """Prints the median milliseconds of a step's GEMMs, and their TFLOP/s."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    new = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02
    layers = [[new(out, width) for width, out in WEIGHTS] for _ in range(LAYERS)]
    head = new(VOCAB, HIDDEN)
    x, dy = {w: new(args.tokens, w) for w in (HIDDEN, INTERMEDIATE)}, {out: new(args.tokens, out) for out in (HIDDEN, 4096, 2 * INTERMEDIATE)}
    chunk = 4096  # logits come in chunks, as in any step that does not hold them all

    def step():
        """Queues the GEMMs of one step; their results are dropped."""
        for weights in layers:
            for weight in weights:
                x[weight.shape[1]] @ weight.T
        for at in range(0, args.tokens, chunk):
            rows = x[HIDDEN][at : at + chunk]
            logits = rows @ head.T
            logits @ head
            logits.T @ rows
        for weights in reversed(layers):
            for weight in reversed(weights):
                grad = dy[weight.shape[0]]
                grad @ weight
                grad.T @ x[weight.shape[1]]

    for _ in range(3):
        step()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(args.steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    ms = statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:]))
    flops = 6.0 * args.tokens * (LAYERS * sum(a * b for a, b in WEIGHTS) + HIDDEN * VOCAB)
    print(f"torch {torch.__version__}, GEMMs alone: {ms:.2f} ms a step, {flops / ms / 1e9:.0f} TFLOP/s")


if __name__ == "__main__":
    main()
