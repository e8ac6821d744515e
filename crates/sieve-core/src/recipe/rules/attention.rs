//! Rules of `[attention]`.

use super::Rules;
use crate::model::{
    DmaBias, DmaRecency, DmaShape, IndexScores, InfllmV2Shape, MlaShape, MsaShape, NsaCompression, NsaShape,
};
use crate::recipe::sections::SHARED_LAYER;
use crate::recipe::{Attention, ModelSection};

pub(super) fn check_attention(attention: &Attention, model: Option<&ModelSection>, rules: &mut Rules<'_>) {
    attention.check_bounds(rules);
    match attention {
        Attention::Mla(mla) => check_mla(mla, model, rules),
        Attention::Nsa(nsa) => check_nsa(nsa, rules),
        Attention::Dma(dma) => check_dma(dma, rules),
        Attention::InfllmV2(infllm) => check_infllm_v2(infllm, rules),
        Attention::Moba(moba) => check_pieces(moba.select_block_size, rules),
        Attention::Msa(msa) => check_msa(msa, rules),
        _ => {}
    }
}

/// Checks that `model.layer_types` names kinds that go with `[attention]`, begins with no shared choice, and divides
/// the layers.
pub(super) fn check_layer_types(model: &ModelSection, attention: &Attention, rules: &mut Rules<'_>) {
    let Some(types) = &model.layer_types else {
        return;
    };
    const KEY: &str = "model.layer_types";
    let kind = attention.kind().name();
    let chooses = |name: &String| name == "sparse" || name == kind;
    let is_own = |name: &String| chooses(name) || name == SHARED_LAYER;
    rules.require(
        !matches!(attention, Attention::Mla(_)) || types.iter().all(is_own),
        KEY,
        format!("holds \"mha\", but attention.kind = \"{kind}\" shares no model with dense layers"),
        "leave it out, or take kind swa, nsa, dma, infllm_v2, moba or msa",
    );
    for name in types {
        rules.require(
            is_own(name) || name == "mha",
            KEY,
            format!("holds \"{name}\", which is neither \"sparse\", attention.kind, \"shared\" nor \"mha\""),
            "[\"sparse\", \"sparse\", \"sparse\", \"mha\"] makes every fourth layer dense",
        );
    }
    let has_shared = types.iter().any(|name| name == SHARED_LAYER);
    let reason = attention.as_kind().no_shared_choice();
    rules.require(
        !has_shared || attention.as_kind().chooses_blocks(),
        KEY,
        format!("holds \"shared\", but layers of attention.kind = \"{kind}\" {reason}"),
        "take kind infllm_v2, moba or msa, or name \"sparse\" in its place",
    );
    let first = types.iter().find(|name| is_own(name));
    rules.require(
        first.is_none_or(chooses),
        KEY,
        "begins with \"shared\", and no layer before it chooses blocks",
        "[\"sparse\", \"shared\"] makes every second layer read the blocks of the one before",
    );
    if types.is_empty() {
        let hint = "leave it out: every layer then has the kind of [attention]";
        return rules.require(false, KEY, "is an empty list", hint);
    }
    rules.require(
        types.iter().any(is_own),
        KEY,
        "holds dense layers alone",
        "name \"sparse\" at least once, or set attention.kind to \"mha\"",
    );
    let (layers, length) = (model.num_hidden_layers, types.len());
    rules.require(
        layers.is_multiple_of(length),
        KEY,
        format!("has {length} entries, which do not divide num_hidden_layers = {layers}"),
        "the list is repeated over the layers",
    );
}

fn check_dma(dma: &DmaShape, rules: &mut Rules<'_>) {
    let window = dma.keep_window_size;
    rules.require(
        dma.local_window_size <= window,
        "attention.local_window_size",
        format!("is {}, more than keep_window_size = {window}", dma.local_window_size),
        format!("{window} keeps the last {window} keys and no other: a sliding window"),
    );
    let has_slopes = dma.recency == DmaRecency::Slope;
    rules.require(
        !has_slopes || dma.bias == DmaBias::Linear,
        "attention.bias",
        "is \"exp\", but recency = \"slope\" adds to the logit itself",
        "set attention.bias = \"linear\"",
    );
    for (key, period) in
        [("attention.shortest_period", dma.shortest_period), ("attention.longest_period", dma.longest_period)]
    {
        rules.require(
            has_slopes || period.is_none(),
            key,
            "needs recency = \"slope\"",
            "set attention.recency = \"slope\", or leave the period out",
        );
    }
    let [first, last] = dma.periods();
    let is_default = dma.shortest_period.is_none() && dma.longest_period.is_none();
    rules.require(
        !has_slopes || is_default || first <= last,
        match dma.longest_period {
            Some(_) => "attention.longest_period",
            None => "attention.shortest_period",
        },
        format!("makes periods of {first} tokens for the first KV head and {last} for the last, which are reversed"),
        format!("shortest_period is 64 by default, longest_period four times keep_window_size = {window}"),
    );
}

fn check_mla(mla: &MlaShape, model: Option<&ModelSection>, rules: &mut Rules<'_>) {
    rules.require(
        mla.qk_rope_head_dim.is_multiple_of(2),
        "attention.qk_rope_head_dim",
        format!("is {}, but rotary embedding turns pairs", mla.qk_rope_head_dim),
        format!("use {}", mla.qk_rope_head_dim + 1),
    );
    // Without `[model]`, which could not be read, there is nothing more to compare.
    let Some(model) = model else { return };
    for (key, given) in [
        ("model.qk_norm", !model.qk_norm),
        ("model.qkv_bias", model.qkv_bias),
        ("model.rope_scaling", model.rope_scaling.is_some()),
    ] {
        rules.require(
            !given,
            key,
            "does not go with kind = \"mla\"",
            "leave it out; attention.qk_norm says whether MLA norms queries and keys",
        );
    }
    let (heads, kv_heads) = (model.num_attention_heads, model.num_key_value_heads);
    rules.require(
        heads == kv_heads,
        "model.num_key_value_heads",
        format!("is {kv_heads}, but kind = \"mla\" has keys and values for each of its {heads} heads"),
        format!("set model.num_key_value_heads to {heads}; the cache holds the latent alone"),
    );
}

fn check_infllm_v2(infllm: &InfllmV2Shape, rules: &mut Rules<'_>) {
    let InfllmV2Shape { num_selected_blocks: selected, num_local_blocks: local, .. } = *infllm;
    check_strides(infllm.compress_stride, infllm.compress_block_size, infllm.select_block_size, rules);
    check_pieces(infllm.select_block_size, rules);
    rules.require(
        local < selected,
        "attention.num_local_blocks",
        format!("is {local}, and with the document's first block more than num_selected_blocks = {selected}"),
        "half of num_selected_blocks is usual; the first block is one of them, too",
    );
}

fn check_msa(msa: &MsaShape, rules: &mut Rules<'_>) {
    let (selected, local) = (msa.num_selected_blocks, msa.num_local_blocks);
    rules.require(
        local <= selected,
        "attention.num_local_blocks",
        format!("is {local}, more than num_selected_blocks = {selected}"),
        "1 is the published form, the query's own block",
    );
    if msa.indexer == IndexScores::Msa {
        return check_pieces(msa.select_block_size, rules);
    }
    rules.require(
        msa.select_block_size <= 64,
        "attention.select_block_size",
        format!("is {}, and indexer = \"qsa\" scores blocks of up to 64 tokens", msa.select_block_size),
        "64 is the largest, or set attention.indexer = \"msa\"",
    );
}

/// Checks that attention can read a block in equal pieces of at most 64 tokens.
fn check_pieces(select_block_size: usize, rules: &mut Rules<'_>) {
    rules.require(
        select_block_size <= 64 || select_block_size.is_multiple_of(64),
        "attention.select_block_size",
        format!("is {select_block_size}, more than 64 and no multiple of it"),
        format!("{} is; larger blocks are read 64 tokens at a time", select_block_size / 64 * 64),
    );
}

fn check_strides(stride: usize, compress_block_size: usize, select_block_size: usize, rules: &mut Rules<'_>) {
    for (key, size) in
        [("attention.compress_block_size", compress_block_size), ("attention.select_block_size", select_block_size)]
    {
        rules.require(
            stride == 0 || size.is_multiple_of(stride),
            key,
            format!("is {size}, not a multiple of compress_stride = {stride}"),
            format!(
                "{} is; block sizes are multiples of the stride so that compressed blocks map onto selected ones",
                size.div_ceil(stride.max(1)).saturating_mul(stride)
            ),
        );
    }
}

fn check_nsa(nsa: &NsaShape, rules: &mut Rules<'_>) {
    check_strides(nsa.compress_stride, nsa.compress_block_size, nsa.select_block_size, rules);
    match (nsa.compress, nsa.compress_hidden_size) {
        (NsaCompression::Mlp, hidden) => rules.require(
            hidden.is_some(),
            "attention.compress_hidden_size",
            "is missing; compress = \"mlp\" needs it",
            "give the hidden width, like 192, or set compress = \"mean\"",
        ),
        (NsaCompression::Mean, hidden) => rules.require(
            hidden.is_none(),
            "attention.compress_hidden_size",
            "does not go with compress = \"mean\"",
            "leave it out, or set compress = \"mlp\"",
        ),
    }
}
