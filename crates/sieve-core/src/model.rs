//! The sizes a model is built from, in the names the Rust code uses.

mod attention;
mod flops;
pub mod gpu;
mod layers;
mod parameters;
mod rope_scaling;
#[doc(hidden)]
pub mod test_shapes;

pub use crate::recipe::Attention;
pub(crate) use attention::{A_QUARTER_OF_THE_ROW, MAX_CHOSEN_BLOCKS};
pub use attention::{
    AttentionForm, AttentionPreset, DmaBias, DmaRecency, DmaShape, DmaWindow, IndexScores, InfllmV2Shape, MlaShape,
    MobaShape, MsaShape, NUM_NSA_BRANCHES, NsaCompression, NsaShape,
};
pub use flops::{FlopsPerToken, mean_active_keys, mean_active_keys_of_documents};
pub use gpu::peak_bf16_flops;
pub use parameters::ParameterCounts;
pub use rope_scaling::{RopeScaling, RopeType};

/// Everything that fixes a model's mathematics and parameter shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelShape {
    /// Width of the residual stream.
    pub d_model: usize,
    /// Width of the SwiGLU layer.
    pub d_ff: usize,
    /// Number of transformer blocks.
    pub num_layers: usize,
    /// Number of query heads.
    pub num_heads: usize,
    /// Number of key and value heads.
    pub num_kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Added to the mean square inside RMSNorm.
    pub rms_norm_eps: f64,
    /// Whether the output projection is the embedding.
    pub tie_word_embeddings: bool,
    /// Longest sequence the rotary tables cover, in tokens.
    pub max_seq_len: usize,
    /// Standard deviation of the normal initialisation.
    pub initializer_range: f64,
    /// Whether each block scales its residual inputs by learned vectors.
    pub residual_scale: bool,
    /// Whether each head's queries and keys go through RMSNorm before the rotation; MLA has a setting of its own.
    pub qk_norm: bool,
    /// Whether the projections of queries, keys and values have biases.
    pub qkv_bias: bool,
    /// How the rotary frequencies differ from those of `rope_theta`.
    pub rope_scaling: Option<RopeScaling>,
    /// The attention of every layer that is not dense by `dense_layers`.
    pub attention: Attention,
    /// A pattern that is repeated over the layers: true where a layer is dense (MHA) instead. Empty: none is.
    pub dense_layers: Vec<bool>,
    /// A pattern of the same form: true where a layer reads the blocks that the last choosing layer before it chose.
    /// Empty: none does.
    pub shared_layers: Vec<bool>,
}

impl ModelShape {
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

    /// Whether queries and keys are normed, without biases, and rotated by unscaled angles.
    pub fn is_like_qwen3(&self) -> bool {
        self.qk_norm && !self.qkv_bias && self.rope_scaling.is_none()
    }

    /// Angle per position of each channel pair of `width` rotated channels, and what cosines and sines are multiplied
    /// by.
    pub fn rotary_frequencies(&self, width: usize) -> (Vec<f64>, f64) {
        let plain = (0..width / 2).map(|pair| self.rope_theta.powf(-2.0 * pair as f64 / width as f64));
        match self.rope_scaling {
            None => (plain.collect(), 1.0),
            Some(scaling) => scaling.scaled(plain.collect(), self.rope_theta, self.max_seq_len),
        }
    }
}
