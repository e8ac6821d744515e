//! Qwen3-style language models as Burn modules, generic over the backend. Each layer can be used without a model.
//!
//! Weights of linear layers are stored `[out, in]`, as in PyTorch. One packed projection computes q, k and v, another
//! one gate and up.
//!
//! An attention layer without a model:
//! ```
//! use burn::tensor::{Distribution, Tensor};
//! use burn_flex::Flex;
//! use sieve_nn::{AttentionConfig, Forward, LayerContext, PassState};
//! use sieve_ops::{DmaShape, Documents};
//!
//! let device = Default::default();
//! let config = AttentionConfig::new(64, 4, 2, 16); // d_model, query heads, KV heads, head_dim
//! // A query keeps 8 keys. Or multi_head, sliding_window, native_sparse, latent.
//! let layer = config.dynamic_mask::<Flex>(DmaShape::new(8), &device);
//! let documents = Documents::whole_rows([1, 32], &device);
//! let rope = config.rope(32, &device);
//! let x: Tensor<Flex, 3> = Tensor::random([1, 32, 64], Distribution::Default, &device);
//! // The layer adds its output to a residual stream. Layers of a model share one state; `None`: no caches.
//! let (context, mut state) = (LayerContext::new(&documents, &rope), PassState::default());
//! let y = layer.forward(x.clone(), x.zeros_like(), &context, &mut state, None).x;
//! assert_eq!(y.dims(), [1, 32, 64]);
//! ```

mod weight_init;

mod linear;
mod qkv_projection;
mod rms_norm;
mod swiglu_mlp;

mod shared_prompts;

mod pass;

mod attention_config;
mod attention_weights;
mod kinds;
mod kv_cache;
mod layer;

mod decoder_layer;
mod prefill_hook;
mod qwen3;
mod token_step;
mod whole_weights;

pub use attention_config::{AttentionConfig, AttentionConfigError};
pub use decoder_layer::DecoderLayer;
pub use kinds::{
    Attention, BlockCache, BlockMlp, ChosenBlocksAttention, ChosenCache, DynamicMaskAttention, Forward, Indexer,
    KindLayer, LatentAttention, LatentCache, LayerCache, MultiHeadAttention, NativeSparseAttention, RecentCache,
    SlotCache,
};
pub use kv_cache::{KvCache, LayerCaches, TextRows};
pub use linear::{Linear, may_be_bf16};
pub use pass::{HandedIndex, IndexTensors, LastChoice, LayerContext, LayerOutput, PassSettings, PassState};
pub use prefill_hook::{CachedLayerAttention, HostOperands, LayerAttention, LayerOperands};
pub use qkv_projection::QkvProjection;
pub use qwen3::{LmHead, Qwen3, TokenEmbedding};
pub use rms_norm::RmsNorm;
pub use shared_prompts::SharedPrompts;
pub use swiglu_mlp::SwigluMlp;
pub use weight_init::{WeightInit, drawing_only};
pub use whole_weights::WholeWeights;

#[cfg(test)]
mod testing;
