//! Qwen3-style language models as Burn modules: each layer usable alone, generic over the backend.
//!
//! Weights of products are stored `[out, in]`, as in PyTorch; q, k and v share one packed projection, gate and up another.

mod weight_init;

mod linear;
mod qkv_projection;
mod rms_norm;
mod swiglu_mlp;

mod attention;
mod decoder_layer;
mod kv_cache;
mod qwen3;

pub use attention::dynamic_mask::DynamicMaskAttention;
pub use attention::multi_head::MultiHeadAttention;
pub use attention::sliding_window::SlidingWindowAttention;
pub use attention::{Attention, AttentionResult, LayerContext};
pub use decoder_layer::{DecoderLayer, LayerOutput};
pub use kv_cache::{KvCache, LayerCache};
pub use linear::Linear;
pub use qkv_projection::QkvProjection;
pub use qwen3::{LmHead, Qwen3, TokenEmbedding};
pub use rms_norm::RmsNorm;
pub use swiglu_mlp::SwigluMlp;
pub use weight_init::WeightInit;
