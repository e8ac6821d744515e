"""The kernels around attention as Python calls on torch tensors, by the heads of their files in kernels/."""

import ctypes

import torch

from cuda_driver import Cuda, ceil_div, f32_word

MAX_BLOCKS = 264  # as the wrappers choose them


class Pointer:
    """A torch tensor as cuda_driver's launches take arrays."""

    def __init__(self, tensor):
        self.tensor, self.pointer = tensor, ctypes.c_uint64(tensor.data_ptr())


class StepKernels:
    def __init__(self, folder):
        torch.zeros(1, device="cuda")  # torch's context is the primary one, which Cuda joins
        self.cuda = Cuda(folder)

    def launch(self, name, grid, threads, tensors, words, shared=0):
        return self.cuda.prepare(name, name.split("-")[0], tuple(grid), threads, shared, [Pointer(t) for t in tensors], words)

    def column_sums(self, partials, first, second=None, accumulate=0):
        words = [partials.shape[0], partials.shape[1], first.numel(), accumulate, accumulate]
        return self.launch("column_sums", (ceil_div(partials.shape[1], 32), 1, 1), 1024, [partials, first, first if second is None else second], words)

    def rms_norm_forward(self, x, weight, y, epsilon, residual=None, total=None):
        rows, width = x.shape
        warps = 1 if width <= 2048 else 4
        added = residual is not None
        tensors = [x] + ([residual, total] if added else []) + [weight, y]
        words = [rows, width, x.stride(0), residual.stride(0) if added else 0, f32_word(epsilon)]
        return self.launch(f"rms_norm_forward-HAS_RESIDUAL={int(added)}-WARPS_PER_ROW={warps}", (ceil_div(rows, 8 // warps), 1, 1), 256, tensors, words)

    def rms_norm_backward(self, x, weight, dy, dx, dweight, epsilon, d_residual=None, accumulate=0, output=None):
        rows, width = x.shape
        warps = 1 << (ceil_div(width, 512) - 1).bit_length()
        blocks = min(ceil_div(rows, 16 // warps), MAX_BLOCKS)
        partials = torch.full((blocks, width), float("nan"), device="cuda")
        added = d_residual is not None
        tensors = [x, weight, dy] + ([d_residual] if added else []) + [dx, partials] + ([output] if output is not None else [])
        words = [rows, width, x.stride(0), dy.stride(0), d_residual.stride(0) if added else 0, f32_word(epsilon)]
        name = f"rms_norm_backward-HAS_RESIDUAL={int(added)}-WARPS_PER_ROW={warps}" + ("-HAS_OUTPUT=1" if output is not None else "")
        return [self.launch(name, (blocks, 1, 1), 512, tensors, words), self.column_sums(partials, dweight, None, accumulate)]

    def swiglu_backward(self, gate_up, dy, dgate_up, output):
        rows, d_ff = dy.shape
        return self.launch("swiglu_backward-IS_BF16=1-VECTOR=8-HAS_OUTPUT=1", (rows, ceil_div(d_ff, 256 * 8), 1), 256, [gate_up, dy, dgate_up, output],
                           [d_ff, gate_up.stride(0), dy.stride(0)])

    def qk_forward(self, qkv, weights, positions, tables, out, kv_heads, epsilon):
        tokens, heads, head_dim = qkv.shape
        copy = int(out.data_ptr() != qkv.data_ptr())
        words = [tokens, heads - 2 * kv_heads, kv_heads, qkv.stride(0), out.stride(0), tables[0].shape[0], tables[0].stride(0), f32_word(epsilon)]
        return self.launch(f"qk_norm_rope_forward-HEAD_DIM={head_dim}-COPY_V={copy}", (ceil_div(tokens, 8), 1, 1), 256,
                           [qkv, *weights, positions, *tables, out], words)

    def qk_backward(self, qkv, weights, positions, tables, dy, dqkv, dweights, kv_heads, epsilon):
        tokens, heads, head_dim = qkv.shape
        copy = int(dqkv.data_ptr() != dy.data_ptr())
        blocks = min(ceil_div(tokens, 8), MAX_BLOCKS)
        partials = torch.full((blocks, 2 * head_dim), float("nan"), device="cuda")
        words = [tokens, heads - 2 * kv_heads, kv_heads, qkv.stride(0), dy.stride(0), dqkv.stride(0), tables[0].shape[0], tables[0].stride(0),
                 f32_word(epsilon)]
        name = f"qk_norm_rope_backward-HEAD_DIM={head_dim}-COPY_V={copy}"
        return [self.launch(name, (blocks, 1, 1), 256, [qkv, *weights, positions, *tables, dy, dqkv, partials], words),
                self.column_sums(partials, *dweights)]

    def cross_entropy(self, logits, labels, losses, vocab, dlogits=None, z_loss=0.0, scale=1.0):
        gradient = dlogits is not None
        words = [vocab, logits.stride(0), dlogits.stride(0) if gradient else 0, f32_word(z_loss), f32_word(scale)]
        name = f"cross_entropy-IS_BF16={int(logits.dtype == torch.bfloat16)}-GRADIENT={int(gradient)}"
        return self.launch(name, (logits.shape[0], 1, 1), 512, [logits, labels, losses] + ([dlogits] if gradient else []), words)

    def sum_partials(self, x, partials, first, square):
        name = f"sum_partials-SQUARE={square}-IS_BF16={int(x.dtype == torch.bfloat16)}"
        return self.launch(name, (ceil_div(x.numel(), 65536), 1, 1), 256, [x, partials], [x.numel(), first])

    def finish_sum(self, partials, out, scale=None, max_norm=0.0):
        tensors = [partials, out] + ([scale] if scale is not None else [])
        return self.launch(f"finish_sum-CLIP={int(scale is not None)}", (1, 1, 1), 1024, tensors, [partials.numel(), f32_word(max_norm)])

    def split_master(self, master, leaf, rest, join=0):
        tensors = [leaf, rest, master] if join else [master, leaf, rest]
        return self.launch(f"split_master-JOIN={join}", (ceil_div(master.numel(), 1024), 1, 1), 256, tensors, [master.numel()])

    def adamw(self, p, m, v, g, scale, leaf, lr, beta1, beta2, eps, decay, c1, c2):
        words = [p.numel()] + [f32_word(x) for x in (beta1, beta2, eps, 1 - lr * decay, lr / c1, 1 / c2)]
        tensors = [p, m, v, g, scale] + ([leaf] if leaf is not None else [])
        split = "-SPLIT_MASTER=1" if p.dtype == torch.bfloat16 else ""
        return self.launch(f"adamw-HAS_LEAF={int(leaf is not None)}{split}", (ceil_div(p.numel(), 1024), 1, 1), 256, tensors, words)

    def embedding_forward(self, weight, ids, y):
        words_per_row = weight.shape[1] // 8
        words = [ids.numel(), weight.shape[0], words_per_row, weight.stride(0) // 8]
        return self.launch("embedding_forward", (ceil_div(ids.numel() * words_per_row, 256), 1, 1), 256, [weight, ids, y], words)

    def embedding_backward(self, dy, ids, dweight):
        tokens, width = dy.shape
        vocab = dweight.shape[0]
        order, scratch = (torch.full((tokens, 2), -1, device="cuda", dtype=torch.int32) for _ in range(2))
        chunks = ceil_div(tokens, 32)
        begun, ended = (torch.full((chunks, width), float("nan"), device="cuda") for _ in range(2))
        grid = (chunks, ceil_div(width, 2048), 1)
        return [self.launch("embedding_order", (1, 1, 1), 1024, [ids, order, scratch], [tokens, vocab, vocab.bit_length()]),
                self.launch("embedding_backward", grid, 256, [dy, order, dweight, begun, ended], [tokens, vocab, width, dy.stride(0), width]),
                self.launch("embedding_carry", grid, 256, [order, begun, ended, dweight], [tokens, vocab, width, width])]

    def residual_add(self, a, b, y):
        rows, width = a.shape
        bf16 = int(a.dtype == torch.bfloat16)
        vector = 8 if bf16 else 4
        return self.launch(f"residual_add-IS_BF16={bf16}-VECTOR={vector}", (rows, ceil_div(width, 256 * vector), 1), 256, [a, b, y],
                           [width, a.stride(0), b.stride(0)])

    def dma_scores_backward(self, qkv, dqkv, w_dt, a, x, dz, dw_dt, da):
        batch, seq_len, heads, head_dim = qkv.shape
        kv_heads = a.numel()
        channels, offset = kv_heads * head_dim, (heads - kv_heads) * head_dim
        blocks = min(batch * ceil_div(seq_len, 16), MAX_BLOCKS)
        partials = torch.full((blocks, (channels + 1) * kv_heads), float("nan"), device="cuda")
        per_thread = 8 if kv_heads <= 8 else 4 if kv_heads <= 16 else 2
        words = [batch, seq_len, head_dim] + 2 * [offset, qkv.stride(1), qkv.stride(0)]
        return [self.launch(f"dma_scores_backward-NUM_KV_HEADS={kv_heads}", (blocks, ceil_div(channels, 128 * per_thread), 1), 128,
                            [qkv, w_dt, a, x, dz, dqkv, partials], words, 8192 * per_thread),
                self.column_sums(partials, dw_dt, da)]


def run_all(launches):
    for launch in launches if isinstance(launches, list) else [launches]:
        launch()
