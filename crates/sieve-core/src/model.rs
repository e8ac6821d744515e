//! The sizes a model is built from, in the names the Rust code uses.

mod conversion;
mod density;
mod flops;
pub mod gpu;
mod layers;
mod pairs;
mod parameters;
mod rope_layers;
mod rope_scaling;
#[doc(hidden)]
pub mod test_shapes;

pub use crate::kinds::shapes::*;
pub use crate::kinds::{
    Attention, AttentionPreset, Chooses, DmaBias, DmaForm, DmaRecency, DmaWindow, IndexScores, NUM_NSA_BRANCHES,
    NsaCompression,
};
pub use conversion::{Conversion, ConversionGap, names_of};
pub use flops::{FlopsPerToken, mean_active_keys, mean_active_keys_of_documents};
pub use gpu::peak_bf16_flops;
pub use layers::{LayerPattern, LayerType};
pub use pairs::BranchDensity;
pub(crate) use pairs::window_pairs;
pub use parameters::ParameterCounts;
pub use rope_layers::RopeLayers;
pub use rope_scaling::{RopeScaling, RopeType};

/// Everything that fixes a model's mathematics and parameter shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelShape {
    /// Columns of the residual stream.
    pub d_model: usize,
    /// Columns between the SwiGLU layer's projections.
    pub d_ff: usize,
    /// Number of transformer blocks.
    pub num_layers: usize,
    /// Number of query heads.
    pub num_heads: usize,
    /// Number of key and value heads.
    pub num_kv_heads: usize,
    /// Columns of one head.
    pub head_dim: usize,
    /// Rows of the embedding matrix.
    pub vocab_size: usize,
    /// Theta of the rotary embedding.
    pub rope_theta: f64,
    /// Added to the mean square inside RMSNorm.
    pub rms_norm_eps: f64,
    /// Whether the output projection is the embedding.
    pub tie_word_embeddings: bool,
    /// Longest sequence the rotary tables cover, in tokens.
    pub max_seq_len: usize,
    /// Standard deviation of initial weights.
    pub initializer_range: f64,
    /// Whether each block scales its residual inputs by learned vectors.
    pub residual_scale: bool,
    /// Whether each head's queries and keys go through RMSNorm before the rotation; MLA uses [`MlaShape::qk_norm`].
    pub qk_norm: bool,
    /// Whether the projections of queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether dense and window layers have attention sinks: a learned logit for each query head in the softmax, with a
    /// zero vector as its value.
    pub attention_sinks: bool,
    /// How the rotary frequencies differ from `rope_theta`'s; `None` if they do not.
    pub rope_scaling: Option<RopeScaling>,
    /// Which layers rotate queries and keys, a list repeated over the layers; empty if all do.
    pub rope_layers: RopeLayers,
    /// The model's own kind: the attention of every layer to which `layers` gives no other.
    pub attention: Attention,
    /// Which layers have another kind, or share an earlier layer's choice of blocks.
    pub layers: LayerPattern,
}

impl ModelShape {
    /// The sizes that do not depend on the attention, by their keys in `[model]`.
    pub fn sizes(&self) -> [(&'static str, usize); 7] {
        [
            ("num_hidden_layers", self.num_layers),
            ("hidden_size", self.d_model),
            ("intermediate_size", self.d_ff),
            ("num_attention_heads", self.num_heads),
            ("num_key_value_heads", self.num_kv_heads),
            ("head_dim", self.head_dim),
            ("vocab_size", self.vocab_size),
        ]
    }

    /// Query heads that share one KV head.
    pub fn group_size(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// Width of the queries, and of the attention output before its projection: `num_heads * head_dim`.
    pub fn q_width(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Width of the keys, and of the values: `num_kv_heads * head_dim`.
    pub fn kv_width(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// Whether attention has Qwen3's form: queries and keys normed and rotated in every layer, no biases, no sinks,
    /// rotary frequencies not scaled.
    pub fn is_like_qwen3(&self) -> bool {
        self.fits_one_op() && self.rope_scaling.is_none() && self.rope_layers.is_every()
    }

    /// Whether layers can compute norm, projections and attention as one op, which norms queries and keys and takes no
    /// biases and no sinks.
    pub fn fits_one_op(&self) -> bool {
        self.qk_norm && !self.qkv_bias && !self.attention_sinks
    }

    /// Rotary frequencies (radians per position) of the channel pairs of `width` rotated channels, `[width / 2]`, and a
    /// factor on cosines and sines.
    pub fn rotary_frequencies(&self, width: usize) -> (Vec<f64>, f64) {
        let plain = (0..width / 2).map(|pair| self.rope_theta.powf(-2.0 * pair as f64 / width as f64));
        match self.rope_scaling {
            None => (plain.collect(), 1.0),
            Some(scaling) => scaling.scaled(plain.collect(), self.rope_theta, self.max_seq_len),
        }
    }
}
