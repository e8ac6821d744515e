"""Keywords of flash-attn, fla, FlexAttention and PyTorch's SDPA, with the way here."""

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
    "alibi_slopes": "bias=slopes[:, None] * arange(tokens), f32 [batch, KV heads, tokens], gives the same softmax",
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
    "keep_window_size": "it is keep here",
    "local_window_size": "it is local here",
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


def answer(keyword, value, taken):
    """The hint for a keyword that a function does not take; empty where none is known.

    taken: names of the function's own arguments. A hint that is one of these alone is not given to other functions.
    """
    # Some packages put their name before a keyword.
    reply = ANSWERS.get(keyword) or ANSWERS.get(keyword.partition("_")[2])
    if reply is None:
        return ""
    said = reply(value) if callable(reply) else reply
    if said.startswith("it is "):
        name = said.removeprefix("it is ").split()[0].rstrip(",;:")
        if name not in taken and ";" not in said:
            return ""
    if said is DOCUMENTS and "documents" not in taken:
        return "\n  hint: it has no packed rows: call it for each document"
    return f"\n  hint: {said}"
