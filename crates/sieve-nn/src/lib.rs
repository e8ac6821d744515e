//! Qwen3-style language models as Burn modules, generic over the backend. Each layer can be used without a model.
//!
//! Weights of linear layers are stored `[out, in]`, as in PyTorch. One packed projection computes q, k and v, another
//! one gate and up.
//!
//! An attention layer without a model:
//! ```
//! use burn::tensor::{Distribution, Tensor};
//! use burn_flex::Flex;
//! use sieve_nn::{AttentionConfig, LayerContext};
//! use sieve_ops::{DmaShape, Documents};
//!
//! let device = Default::default();
//! let config = AttentionConfig::new(64, 4, 2, 16); // d_model, query heads, KV heads, head_dim
//! // A query keeps 8 keys. Or multi_head, sliding_window, native_sparse, latent.
//! let layer = config.dynamic_mask::<Flex>(DmaShape::new(8), &device);
//! let documents = Documents::whole_rows([1, 32], &device);
//! let rope = config.rope(32, &device);
//! let x: Tensor<Flex, 3> = Tensor::random([1, 32, 64], Distribution::Default, &device);
//! // The layer adds its output to a residual stream; native_sparse and latent layers return only their output.
//! let y = layer.forward(x.clone(), x.zeros_like(), &LayerContext::new(&documents, &rope)).x;
//! assert_eq!(y.dims(), [1, 32, 64]);
//! ```

mod weight_init;

mod linear;
mod qkv_projection;
mod rms_norm;
mod swiglu_mlp;

mod attention;
mod decoder_layer;
mod kv_cache;
mod prefill_hook;
mod qwen3;
mod token_step;

pub use attention::block_mlp::BlockMlp;
pub use attention::chosen_blocks::{ChosenBlocksAttention, LastChoice};
pub use attention::config::{AttentionConfig, AttentionConfigError};
pub use attention::dynamic_mask::DynamicMaskAttention;
pub use attention::indexer::Indexer;
pub use attention::latent::LatentAttention;
pub use attention::multi_head::MultiHeadAttention;
pub use attention::native_sparse::NativeSparseAttention;
pub use attention::shared_prompts::SharedPrompts;
pub use attention::{Attention, LayerContext, LayerOutput};
pub use decoder_layer::DecoderLayer;
pub use kv_cache::{BlockCache, ChosenCache, KvCache, LatentCache, LayerCache, LayerCaches, TextRows};
pub use linear::{Linear, may_be_bf16};
pub use prefill_hook::{CachedLayerAttention, HostOperands, LayerAttention, LayerOperands};
pub use qkv_projection::QkvProjection;
pub use qwen3::{LmHead, Qwen3, TokenEmbedding};
pub use rms_norm::RmsNorm;
pub use swiglu_mlp::SwigluMlp;
pub use weight_init::WeightInit;

#[cfg(test)]
mod testing;
