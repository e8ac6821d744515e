//! Shapes for the tests of this crate and of the crates that use it.

use super::{
    Attention, DmaShape, IndexScores, InfllmV2Shape, LayerPattern, MlaShape, ModelShape, MsaShape, NsaCompression,
    NsaShape, RopeLayers,
};
use crate::recipe::AttentionKind;
use crate::{BlockChoice, ChoiceRule, NsaBlocks};

/// Qwen3-0.6B, as its published config.json says.
pub fn qwen3_0_6b() -> ModelShape {
    ModelShape {
        d_model: 1024,
        d_ff: 3072,
        num_layers: 28,
        num_heads: 16,
        num_kv_heads: 8,
        head_dim: 128,
        vocab_size: 151_936,
        rope_theta: 1e6,
        tie_word_embeddings: true,
        max_seq_len: 40_960,
        residual_scale: false,
        attention: Attention::Mha,
        ..tiny_dma()
    }
}

/// A small DMA model in which every part is present and sizes differ.
pub fn tiny_dma() -> ModelShape {
    ModelShape {
        d_model: 12,
        d_ff: 20,
        num_layers: 3,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 6,
        vocab_size: 50,
        rope_theta: 1e4,
        rms_norm_eps: 1e-6,
        tie_word_embeddings: false,
        max_seq_len: 64,
        initializer_range: 0.02,
        residual_scale: true,
        qk_norm: true,
        qkv_bias: false,
        attention_sinks: false,
        rope_scaling: None,
        rope_layers: RopeLayers::default(),
        attention: Attention::Dma(DmaShape::published(4)),
        layers: LayerPattern::default(),
    }
}

/// The small model with latent attention: 4 heads of width 6, a latent of width 8, 2 rotated channels.
pub fn tiny_mla() -> ModelShape {
    ModelShape {
        num_kv_heads: 4,
        residual_scale: false,
        attention: Attention::Mla(MlaShape { kv_lora_rank: 8, qk_rope_head_dim: 2, qk_norm: true }),
        ..tiny_dma()
    }
}

/// The small model with native sparse attention, and a key and value projection per branch.
pub fn tiny_nsa() -> ModelShape {
    ModelShape {
        residual_scale: false,
        attention: Attention::Nsa(NsaShape {
            compress_block_size: 4,
            compress_stride: 2,
            compress: NsaCompression::Mlp,
            compress_hidden_size: Some(5),
            select_block_size: 6,
            num_selected_blocks: 3,
            window_size: 7,
            shared_kv: false,
        }),
        ..tiny_dma()
    }
}

/// `attention` with these values. A key that its kind does not have is passed over.
pub fn with_keys(attention: Attention, keys: &[(&str, usize)]) -> Attention {
    let mut table = toml::Table::try_from(attention).expect("a table of keys");
    for (key, value) in keys {
        if let Some(own) = table.get_mut(*key) {
            *own = toml::Value::Integer(*value as i64);
        }
    }
    table.try_into().expect("the kind's own keys")
}

/// The kinds whose queries choose blocks, with these values of their keys, in the order of the documentation.
pub fn block_kinds(keys: &[(&str, usize)]) -> [Attention; 3] {
    let kinds = AttentionKind::ALL.into_iter().map(AttentionKind::example);
    let kinds = kinds.filter(|kind| kind.as_kind().block_choice().is_some()).map(|kind| with_keys(kind, keys));
    kinds.collect::<Vec<_>>().try_into().expect("three kinds")
}

/// InfLLM-V2's choice by `[compress_block_size, compress_stride, select_block_size, num_selected_blocks]`.
pub fn infllm_v2(sizes: [usize; 4], num_local_blocks: usize) -> BlockChoice {
    let published = InfllmV2Shape::published();
    let shape = InfllmV2Shape { num_local_blocks, ..published };
    BlockChoice { blocks: NsaBlocks::of(sizes), ..shape.choice() }
}

/// The kind whose queries choose blocks by `rule`, with these values of its keys.
pub fn kind_that_chooses_by(rule: ChoiceRule, keys: &[(&str, usize)]) -> Attention {
    let has_rule = |kind: &Attention| kind.as_kind().block_choice().is_some_and(|choice| choice.rule == rule);
    block_kinds(keys).into_iter().find(has_rule).expect("a kind with this rule")
}

/// The kind in which each query head compares mean keys (arXiv:2502.13189).
pub fn mean_key_kind(select_block_size: usize, num_selected_blocks: usize) -> Attention {
    let keys = [("select_block_size", select_block_size), ("num_selected_blocks", num_selected_blocks)];
    kind_that_chooses_by(ChoiceRule::MeanKey, &keys)
}

/// The choice of [`mean_key_kind`].
pub fn mean_key(select_block_size: usize, num_selected_blocks: usize) -> BlockChoice {
    mean_key_kind(select_block_size, num_selected_blocks).as_kind().block_choice().expect("it chooses blocks")
}

/// QSA's choice.
pub fn qsa(select_block_size: usize, num_selected_blocks: usize) -> BlockChoice {
    MsaShape { indexer: IndexScores::Qsa, select_block_size, num_selected_blocks, ..MsaShape::published() }.choice()
}

/// MSA's choice.
pub fn msa(select_block_size: usize, num_selected_blocks: usize) -> BlockChoice {
    MsaShape { select_block_size, num_selected_blocks, ..MsaShape::published() }.choice()
}
