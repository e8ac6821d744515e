"""An export for vLLM's class of MiniMax-M3, read by that class's own Python code on a CPU, in float32.

usage: vllm_m3.py WHEEL FOLDER LOGITS TOKENS

WHEEL is a wheel of vLLM (pip download vllm --no-deps), FOLDER an export with --form m3-vllm, LOGITS what `sieve logits`
wrote of it for TOKENS, a list of token ids separated by commas. vLLM itself needs a GPU and is not run. Of the wheel the
configuration class, the model (its layers, the names and shapes of its parameters, how it loads weights) and the
activation are executed; linear layers, the embedding, norms, rotary tables, and the kernels of attention and of the
choice of blocks are stand-ins in this file, which compute what vLLM's sources say of them.

Prints one JSON line: the parameters that got no weight, the tensors of the folder that none took, and the largest
difference of the logits.
"""

import importlib.abc
import importlib.machinery
import json
import sys
import types
import zipfile
from pathlib import Path
from unittest.mock import MagicMock

CONFIG = "vllm.transformers_utils.configs.minimax_m3"
MODEL = "vllm.models.minimax_m3.nvidia.model"
EXECUTED = [CONFIG, MODEL, "vllm.model_executor.layers.activation"]


class Wheel(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The modules of vLLM: EXECUTED ones from the wheel, others with the stand-ins, and empty classes for the rest."""

    def __init__(self, path, stand_ins):
        self.files, self.stand_ins = zipfile.ZipFile(path), stand_ins

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("vllm", "flashinfer"):
            return importlib.machinery.ModuleSpec(name, self, is_package=name not in EXECUTED)

    def create_module(self, spec):
        return types.ModuleType(spec.name) if spec.name in EXECUTED else StandIn(spec.name, self.stand_ins)

    def exec_module(self, module):
        if module.__name__ in EXECUTED:
            file = module.__name__.replace(".", "/") + ".py"
            exec(compile(self.files.read(file), file, "exec"), module.__dict__)


class Unused:
    """A class that no text model uses, but of which the modules make others."""

    def __init__(self, *_, **__):
        pass

    def __class_getitem__(cls, _):
        return cls


class StandIn(types.ModuleType):
    """A module whose names are the stand-ins, or unused classes."""

    def __init__(self, name, stand_ins):
        super().__init__(name)
        self.__dict__["stand_ins"] = stand_ins

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = self.stand_ins.get(name) or type(name, (Unused,), {})
        setattr(self, name, value)
        return value


def stand_ins(context):
    """What the model imports, by name. `context` holds what kernels would find in caches."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Weight(nn.Module):
        """A weight [rows, columns] whose named parts are loaded one by one."""

        def __init__(self, rows, columns):
            super().__init__()
            self.rows = rows
            self.weight = nn.Parameter(torch.full((sum(rows.values()), columns), float("nan")))
            self.weight.weight_loader = self.load

        def load(self, parameter, loaded, part=None):
            if part is None:
                part = next(iter(self.rows))
            start = sum(rows for name, rows in list(self.rows.items())[: list(self.rows).index(part)])
            place = parameter.data[start : start + self.rows[part]]
            assert place.shape == loaded.shape, (part, place.shape, loaded.shape)
            place.copy_(loaded)

        def forward(self, x):
            return x @ self.weight.T, None

    class MergedColumnParallelLinear(Weight):
        def __init__(self, columns, rows, **_):
            super().__init__(dict(enumerate(rows)), columns)

    class RowParallelLinear(Weight):
        def __init__(self, columns, rows, reduce_results=True, **_):
            super().__init__({"": rows}, columns)
            self.reduce_results = reduce_results

    class QKVParallelLinear(Weight):
        def __init__(self, columns, width, heads, kv_heads, *index, **_):
            rows = {"q": heads * width, "k": kv_heads * width, "v": kv_heads * width}
            if index:
                index_heads, index_width = index
                assert index_heads == kv_heads and index_width == width
                rows |= {"index_q": index_heads * index_width, "index_k": index_width}
            super().__init__(rows, columns)

    class Table(Weight):
        def __init__(self, rows, columns, **_):
            super().__init__({"": rows}, columns)

        def forward(self, ids):
            return self.weight[ids]

    def get_rope(width, max_position, rope_parameters):
        rotated = int(width * rope_parameters["partial_rotary_factor"])
        frequencies = rope_parameters["rope_theta"] ** (-torch.arange(0, rotated, 2).float() / rotated)
        angles = torch.arange(max_position).float()[:, None] * frequencies
        table = torch.cat([angles.cos(), angles.sin()], -1)
        return types.SimpleNamespace(rotary_dim=rotated, cos_sin_cache=table)

    def gemma_rmsnorm(x, weight, eps):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + weight)

    def gemma_fused_add_rmsnorm(x, residual, weight, eps):
        residual += x
        x.copy_(gemma_rmsnorm(residual, weight, eps))

    def norm_and_rope(heads, weight, table, positions, eps):
        heads = gemma_rmsnorm(heads, weight, eps)
        half = table.shape[1] // 2
        cos, sin = (table[positions][:, None, part] for part in (slice(0, half), slice(half, None)))
        a, b, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def fused(qkv, q_norm, k_norm, table, positions, heads, kv_heads, rotary_dim, eps, *index, **_):
        width = q_norm.shape[0]
        assert rotary_dim == table.shape[1]
        tokens = qkv.view(qkv.shape[0], -1, width)
        k = slice(heads, heads + kv_heads)
        tokens[:, :heads] = norm_and_rope(tokens[:, :heads], q_norm, table, positions, eps)
        tokens[:, k] = norm_and_rope(tokens[:, k], k_norm, table, positions, eps)
        if not index:
            return
        index_q_norm, index_k_norm, index_heads, *_slots_and_caches, _size, q_out, index_q_out, _dtype = index
        first = heads + 2 * kv_heads
        index_q = tokens[:, first : first + index_heads]
        q_out.copy_(tokens[:, :heads].flatten(1))
        index_q_out.copy_(norm_and_rope(index_q, index_q_norm, table, positions, eps).flatten(1))
        context.k, context.v = tokens[:, k], tokens[:, heads + kv_heads : first]
        context.index_k = norm_and_rope(tokens[:, first + index_heads :], index_k_norm, table, positions, eps)

    def attend(q, k, v, seen, scale):
        """q [tokens, heads, width]; seen [kv heads, tokens, tokens]."""
        group = q.shape[1] // k.shape[1]
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        k, v, seen = (x.repeat_interleave(group, 0) for x in (k, v, seen))
        weights = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, float("-inf")).softmax(-1)
        return (weights @ v).transpose(0, 1).flatten(1)

    class Attention(nn.Module):
        def __init__(self, heads, width, scale, num_kv_heads, **_):
            super().__init__()
            self.sizes = heads, num_kv_heads, width, scale

        def forward(self, q, k, v):
            heads, kv_heads, width, scale = self.sizes
            q, k, v = (x.reshape(len(x), -1, width) for x in (q, k, v))
            seen = torch.ones(kv_heads, len(q), len(q), dtype=torch.bool).tril()
            return attend(q, k, v, seen, scale)

    class Impl:
        def __init__(self, heads, width, scale, kv_heads, sparse_block_size, **_):
            self.width, self.scale, self.size = width, scale, sparse_block_size

        def forward(self, layer, query, kv_cache, output, query_fp8):
            causal = torch.ones(len(query), len(query), dtype=torch.bool).tril()
            seen = context.chosen.repeat_interleave(self.size, -1)[..., : len(query)] & causal
            return attend(query.view(len(query), -1, self.width), context.k, context.v, seen, self.scale)

    class MiniMaxM3Indexer(nn.Module):
        def __init__(self, *, prefix, score_type, **sizes):
            super().__init__()
            assert score_type == "max"
            self.sizes = sizes
            self.index_cache = types.SimpleNamespace(prefix=f"{prefix}.index", dtype=torch.float32, kv_cache=None)

        def forward(self, index_query):
            """Chosen blocks, [heads, tokens, blocks]: a block's score is its largest q . k."""
            size, tokens = self.sizes["sparse_block_size"], len(index_query)
            q = index_query.view(tokens, self.sizes["num_index_heads"], self.sizes["index_head_dim"]).transpose(0, 1)
            scores = q @ context.index_k[:, 0].T
            scores = scores.masked_fill(~torch.ones(tokens, tokens, dtype=torch.bool).tril(), float("-inf"))
            scores = F.pad(scores, (0, -tokens % size), value=float("-inf"))
            scores = scores.view(*scores.shape[:2], -1, size).amax(-1)
            own = torch.arange(tokens)[:, None] // size
            block = torch.arange(scores.shape[-1])
            scores[:, (block <= own) & (block < self.sizes["init_blocks"])] = 1e30
            scores[:, (block <= own) & (block > own - self.sizes["local_blocks"])] = 1e29
            best = scores.topk(min(self.sizes["topk_blocks"], scores.shape[-1])).indices
            context.chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)

    class CustomOp(nn.Module):
        def __init__(self, **_):
            super().__init__()

        def forward(self, x):
            return self.forward_native(x)

        @staticmethod
        def register(_name, **_):
            return lambda cls: cls

    class EagleModelMixin:
        def collect_remote_aux_hidden_states(self, _):
            return []

        def _maybe_add_hidden_state(self, *_):
            pass

    class AutoWeightsLoader:
        def __init__(self, model):
            self.model = model

        def load_weights(self, weights):
            weights = dict(weights)
            inside = {name[6:]: tensor for name, tensor in weights.items() if name.startswith("model.")}
            loaded = {f"model.{name}" for name in self.model.model.load_weights(inside.items())}
            self.model.lm_head.load(self.model.lm_head.weight, weights["lm_head.weight"])
            return loaded | {"lm_head.weight"}

    def default_weight_loader(parameter, loaded):
        assert parameter.shape == loaded.shape, (parameter.shape, loaded.shape)
        parameter.data.copy_(loaded)

    def make_layers(number, layer, prefix):
        return 0, number, nn.ModuleList([layer(prefix=f"{prefix}.{n}") for n in range(number)])

    return {
        "MergedColumnParallelLinear": MergedColumnParallelLinear, "RowParallelLinear": RowParallelLinear,
        "QKVParallelLinear": QKVParallelLinear, "MinimaxM3QKVParallelLinearWithIndexer": QKVParallelLinear,
        "VocabParallelEmbedding": Table, "ParallelLMHead": Table, "Attention": Attention,
        "MiniMaxM3Indexer": MiniMaxM3Indexer, "CustomOp": CustomOp, "EagleModelMixin": EagleModelMixin,
        "AutoWeightsLoader": AutoWeightsLoader, "default_weight_loader": default_weight_loader,
        "make_layers": make_layers, "get_rope": get_rope, "gemma_rmsnorm": gemma_rmsnorm,
        "gemma_fused_add_rmsnorm": gemma_fused_add_rmsnorm,
        "_custom_ops": types.SimpleNamespace(fused_minimax_m3_qknorm_rope_kv_insert=fused),
        "fused_allreduce_gemma_rms_norm": lambda x, residual, norm: norm(x, residual),
        "select_main_backend_and_impl_cls": lambda **_: (None, Impl),
        "get_pp_group": lambda: types.SimpleNamespace(is_first_rank=True, is_last_rank=True),
        "get_tensor_model_parallel_world_size": lambda: 1, "get_current_vllm_config": lambda: context.config,
        "get_forward_context": lambda: types.SimpleNamespace(slot_mapping=context.slots),
        "eager_break_during_capture": lambda function: function, "is_pp_missing_parameter": lambda *_: False,
        "maybe_prefix": lambda prefix, name: f"{prefix}.{name}" if prefix else name,
        "spec_decode_needs_target_embed": lambda *_, **__: False, "maybe_remap_kv_scale_name": lambda name, _: name,
        "make_empty_intermediate_tensors_factory": lambda *_: None,
        "set_default_quant_scales": lambda layer, **_: setattr(layer, "_q_scale_float", 1.0),
        "fused_moe_make_expert_params_mapping": lambda *_, **__: [],
        "get_kv_quant_mode": lambda _: types.SimpleNamespace(is_nvfp4=False),
        "kv_cache_dtype_str_to_dtype": lambda *_: torch.float32, "WeightsMapper": lambda **_: None,
        "LogitsProcessor": lambda _: lambda head, hidden: hidden @ head.weight.T,
        "MULTIMODAL_REGISTRY": types.SimpleNamespace(register_processor=lambda *_, **__: lambda cls: cls),
        "init_logger": lambda _: None, "triton": MagicMock(), "tl": MagicMock(),
        "current_platform": types.SimpleNamespace(is_cuda_alike=lambda: False, is_rocm=lambda: False),
    }  # fmt: skip


class Slots(dict):
    """A slot for every layer: the stand-ins keep what they are given."""

    def __missing__(self, layer):
        return None

    def __contains__(self, layer):
        return True


def main() -> None:
    if len(sys.argv) != 5 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    import torch
    from safetensors.torch import load_file

    wheel, folder, logits, tokens = sys.argv[1:]
    context = types.SimpleNamespace(slots=Slots())
    sys.meta_path.insert(0, Wheel(wheel, stand_ins(context)))
    config = importlib.import_module(CONFIG).MiniMaxM3Config.from_pretrained(folder).get_text_config()
    context.config = types.SimpleNamespace(
        model_config=types.SimpleNamespace(hf_text_config=config),
        cache_config=None, quant_config=None,
        attention_config=types.SimpleNamespace(
            resolve_indexer_kv_dtype=lambda _: "bf16", minimax_m3_msa_decode_backend=None
        ),
        compilation_config=types.SimpleNamespace(static_forward_context={}),
        scheduler_config=types.SimpleNamespace(max_num_batched_tokens=8),
        parallel_config=types.SimpleNamespace(pipeline_parallel_size=1),
        use_v2_model_runner=False,
    )  # fmt: skip
    (name,) = json.loads(Path(folder, "config.json").read_text())["architectures"]
    with torch.no_grad():
        model = getattr(importlib.import_module(MODEL), name)(vllm_config=context.config)
        for layer in model.model.layers:
            layer.self_attn.kv_cache = torch.empty(1, 1, 128)
        # Parameters that get no weight stay NaN.
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        weights = load_file(f"{folder}/model.safetensors")
        loaded = model.load_weights({name: tensor.float() for name, tensor in weights.items()}.items())
        names = {name for name, _ in model.named_parameters()}
        ids = torch.tensor([int(token) for token in tokens.split(",")])
        ours = load_file(logits)["logits"][0]
        theirs = model.compute_logits(model(ids, torch.arange(len(ids))))
    difference = float((ours - theirs).abs().max())
    report = {
        "class": name, "without weight": sorted(names - loaded), "without parameter": sorted(loaded - names),
        "parameters": len(names), "tensors": len(weights), "largest difference": difference,
        "largest logit": float(ours.abs().max()),
    }  # fmt: skip
    print(json.dumps(report))
    sys.exit(0 if difference <= 1e-5 and names == loaded else 1)


if __name__ == "__main__":
    main()
