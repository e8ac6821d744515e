"""Keywords that nothing here takes: those of flash-attn, fla, FlexAttention and PyTorch, with the way here, and
misspelt ones, with the nearest that is taken."""

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

DOCUMENTS = "pass documents=cu_seqlens, or documents(cu_seqlens, tokens) made once for all layers"
LEFT_OUT = "leave it out"
BACKWARD = "deterministic=True is the argument here"
MASK = "attention is causal; window, documents, select and block_mask say what a query sees, selected_attention takes \
its blocks"
CACHES = "decode(q, k, v, k_cache, v_cache, length) writes caches [batch, KV heads, capacity, width] in place"
# What to do instead of a keyword: a sentence, or a function of the value that gives one.
ANSWERS = {
    **dict.fromkeys(
        ["causal", "is_causal"],
        lambda x: (
            "attention is always causal: leave it out"
            if x
            else "there is causal attention only; torch.nn.functional.scaled_dot_product_attention reads both ways"
        ),
    ),
    **dict.fromkeys(["softmax_scale", "sm_scale", "scaling"], "it is scale here"),
    "window_size": lambda x: _window(x),
    **dict.fromkeys(["sliding_window", "local_window"], "it is window here, the query's own key included"),
    **dict.fromkeys(
        ["cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seq_lens_q", "offsets", "document_id", "seq_idx"], DOCUMENTS
    ),
    **dict.fromkeys(["max_seqlen", "max_seqlen_q", "max_seqlen_k"], "the row's length is known: leave it out"),
    **dict.fromkeys(
        ["dropout", "dropout_p"],
        lambda x: LEFT_OUT if not x else "no kernel drops probabilities; nn.functional.dropout(o, p) drops outputs",
    ),
    "alibi_slopes": "bias=(slopes[:, None] * torch.arange(tokens)).expand(batch, -1, -1) gives the same softmax; "
    "slopes are f32, one a KV head",
    **dict.fromkeys(["softcap", "logits_soft_cap"], lambda x: LEFT_OUT if not x else "soft caps have no kernel"),
    **dict.fromkeys(
        ["return_attn_probs", "return_softmax_lse", "return_softmax"], "return_lse=True of attention gives log-sum-exps"
    ),
    **dict.fromkeys(["mask_mod", "attn_mask", "attention_mask", "mask"], MASK),
    "block_mask": "block_sparse(q, k, v, block_mask(bools, 128)) reads blocks of keys that a query block sees",
    "score_mod": "bias=, f32 [batch, KV heads, tokens], is added to each key's logits; other changes have no kernel",
    **dict.fromkeys(["attn_bias", "key_bias"], "bias=, f32 [batch, KV heads, tokens], is added to each key's logits"),
    **dict.fromkeys(["enable_gqa", "kernel_options", "num_splits", "pack_gqa", "head_first"], LEFT_OUT),
    **dict.fromkeys(["s_aux", "learnable_sink"], "sinks=, one logit a query head, of attention"),
    **dict.fromkeys(["cache_seqlens", "cache_leftpad"], f"length= of decode: {CACHES}"),
    **dict.fromkeys(["block_table", "page_table"], f"caches are not in pages: {CACHES}"),
    **dict.fromkeys(["g_cmp", "g_slc", "g_swa"], "nsa takes the three gates' logits as one tensor, [.., heads, 3]"),
    "block_size": "it is block here; of nsa and infllm_v2 blocks=NsaBlocks(compressed, stride, selected, num_selected)",
    "block_indices": "it is indices here",
    "block_counts": "counts= of selected_attention, or num_selected of NsaBlocks(...)",
    **dict.fromkeys(["topk", "top_k", "select_num"], "it is num_selected here"),
    "chunk_size": "it is block here",
    **dict.fromkeys(["keep_window_size", "keep_window"], "it is keep here"),
    **dict.fromkeys(["local_window_size", "num_local_blocks"], "it is local here"),
    "select_block_size": "it is block here",
    "num_selected_blocks": "it is num_selected here",
}  # fmt: skip
CHOOSERS = "layers that choose blocks"
OF_THE_CALL = "documents=cu_seqlens belongs to the layer's call"
# The same of the constructors of layers: keywords of fla's layers, flash-attn's MHA, torch.nn.MultiheadAttention, and
# of the functions here.
OF_LAYERS = {
    **{name: ANSWERS[name] for name in ("causal", "is_causal", "dropout", "dropout_p", "softcap", "logits_soft_cap")},
    **dict.fromkeys(["dim", "d_model", "embed_dim"], "it is hidden_size here"),
    **dict.fromkeys(["num_heads", "n_heads", "n_head", "nhead"], "it is num_attention_heads here"),
    **dict.fromkeys(["num_kv_heads", "num_heads_kv", "n_kv_heads"], "it is num_key_value_heads here"),
    **dict.fromkeys(["bias", "qkv_proj_bias", "use_bias"], "it is qkv_bias here"),
    **dict.fromkeys(["rope_base", "rotary_emb_base", "base"], "it is rope_theta here"),
    "norm_eps": "it is rms_norm_eps here",
    **dict.fromkeys(
        ["window", "window_size", "sliding_window"],
        "it is window_size of WindowAttention, near_window of CoWindowAttention",
    ),
    "bands": "they are sink_tokens, far_reach and num_bands of CoWindowAttention",
    **dict.fromkeys(["keep", "keep_window"], "it is keep_window_size of DynamicMaskAttention"),
    **dict.fromkeys(["local", "local_window"], "it is local_window_size of DynamicMaskAttention"),
    **dict.fromkeys(["block", "block_size", "chunk_size"], f"it is select_block_size of {CHOOSERS}"),
    **dict.fromkeys(["num_selected", "block_counts", "topk", "top_k"], f"it is num_selected_blocks of {CHOOSERS}"),
    "attention_sinks": "sinks are of DenseAttention and WindowAttention",
    **dict.fromkeys(["layer_idx", "layer_index"], f"{LEFT_OUT}: each layer has a Cache of its own"),
    "max_position_embeddings": f"{LEFT_OUT}: positions have no table",
    "batch_first": f"{LEFT_OUT}: hidden states are [batch, tokens, hidden_size]",
    **dict.fromkeys(["device", "dtype"], "layer.to(device, dtype), or make it in `with torch.device(...):`"),
    **dict.fromkeys(["documents", "cu_seqlens"], OF_THE_CALL),
}  # fmt: skip
CACHE = "cache=Cache(capacity), one for each layer, is filled by the calls"
# The same of a layer's call.
OF_CALLS = {
    **{name: ANSWERS[name] for name in ("causal", "is_causal", "cu_seqlens", "cu_seqlens_q", "cu_seq_lens_q",
                                        "max_seqlen", "max_seqlen_q", "max_seqlen_k")},
    **dict.fromkeys(
        ["attention_mask", "attn_mask", "key_padding_mask", "mask"],
        "padding behind a row needs none; of padding before it each token is a document of its own, by documents=",
    ),
    **dict.fromkeys(["past_key_values", "past_key_value", "layer_past", "inference_params", "use_cache"], CACHE),
    **dict.fromkeys(["position_ids", "seqlen_offset"], f"{LEFT_OUT}: positions begin at 0 in each document"),
    **dict.fromkeys(["output_attentions", "need_weights"], f"{LEFT_OUT}: no kernel keeps probabilities"),
    "hidden_states": "it is x here",
}  # fmt: skip


def _window(x):
    """What to pass for `window_size`: a number of keys, or flash-attn's (left, right), without the query's own key."""
    if type(x) is int and x > 0:
        return f"pass window={x}, the query's own key included"
    if isinstance(x, (tuple, list)) and len(x) == 2 and all(type(n) is int for n in x):
        left, right = x
        if right > 0:
            return "a query sees no later key: there is no kernel for a right window"
        if left >= 0:
            return f"pass window={left + 1}: the query's own key is counted here"
    return "leave it out, or pass window=, the number of keys that a query sees, its own included"


def answer(keyword, value, taken, answers=ANSWERS):
    """What to do instead of a keyword that is not taken; empty where nothing is known.

    taken: names of the function's own arguments. An answer that is one of these alone is not given to other functions.
    """
    # Some packages put their name before a keyword.
    reply = answers.get(keyword) or answers.get(keyword.partition("_")[2])
    if reply is not None:
        said = reply(value) if callable(reply) else reply
        name = said.removeprefix("it is ").split()[0].rstrip(",;:")
        if said is DOCUMENTS and "documents" not in taken:
            return "it has no packed rows: call it for each document"
        if not said.startswith("it is ") or " of " in said or name in taken or ";" in said:
            return said
    near = difflib.get_close_matches(keyword, taken, n=1)
    return f"did you mean {near[0]}?" if near else ""


def refuse(called, given, taken, answers=ANSWERS):
    """A TypeError that names each keyword of `given` that is not in `taken`, and what to do instead.

    called: what was called, in Python's words for it.
    """
    others = [keyword for keyword in given if keyword not in taken]
    if not others:
        return
    *first, last = map(repr, others)
    what = f"keyword arguments {', '.join(first)} and {last}" if first else f"an unexpected keyword argument {last}"
    hints = {keyword: answer(keyword, given[keyword], taken, answers) for keyword in others}
    said = [f"\n  hint: {f'{keyword}: ' if first else ''}{hint}" for keyword, hint in hints.items() if hint]
    raise TypeError(f"{called}() got {'unexpected ' if first else ''}{what}{''.join(said)}")


F = TypeVar("F", bound=Callable[..., Any])


def taken_by(layer):
    """Names of the arguments of a layer's constructor, with those that it hands on to the dense layer's; sinks are of
    constructors that name them.
    """
    names, own = set(), None
    for constructor in (vars(x)["__init__"] for x in layer.__mro__ if "__init__" in vars(x)):
        parameters = list(inspect.signature(constructor).parameters.values())[1:]
        names |= {x.name for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)}
        own = own or set(names)
        if all(x.kind != x.VAR_KEYWORD for x in parameters):
            break
    return names - ({"attention_sinks"} - own)


def refusing(forward: F) -> F:
    """A layer's `forward`, whose TypeError of keywords that it does not take names the layer and the way here."""
    taken = set(inspect.signature(forward).parameters) - {"self"}

    @functools.wraps(forward)
    def run(self, *args, **kwargs):
        if not torch.compiler.is_compiling():
            refuse(f"{type(self).__name__}.forward", kwargs, taken, OF_CALLS)
        return forward(self, *args, **kwargs)

    return run  # type: ignore[return-value]
