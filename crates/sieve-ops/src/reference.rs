//! Every op in plain Burn operations: the definition the fast paths are measured against.
//!
//! Intermediate values are f32, or f64 for f64 inputs, whatever the dtype of the input; outputs have the input's dtype.
//! No fast library is called and nothing is skipped: attention builds its full score matrix.

pub use crate::attention::reference::{attention, attention_backward};
pub use crate::block::reference::{attention_layer, feed_forward};
pub use crate::decode::reference::{attention_decode, mla_decode};
pub use crate::dma::reference::{
    dma_attention, dma_attention_backward, dma_scores, dma_scores_backward, dma_select,
};
pub use crate::embedding::reference::{embedding, embedding_backward};
pub use crate::linear::reference::{linear, linear_input_gradient, linear_weight_gradient};
pub use crate::loss::reference::{
    linear_cross_entropy, linear_cross_entropy_with_gradients, scale, token_losses,
};
pub use crate::mla::reference::{
    mla_attention, mla_attention_backward, mla_pack, mla_pack_backward,
};
pub use crate::norm::reference::{rms_norm, rms_norm_backward};
pub use crate::nsa::reference::{
    nsa_blocks, nsa_blocks_backward, nsa_compressed_attention, nsa_compressed_attention_backward,
    nsa_gates, nsa_gates_backward, nsa_mean_pool, nsa_mean_pool_backward, nsa_selected_attention,
    nsa_selected_attention_backward,
};
pub use crate::optimizer::reference::{adamw, global_norm, sum_of_squares};
pub use crate::rope::reference::{qk_norm_rope, qk_norm_rope_backward};
pub use crate::swiglu::reference::{swiglu, swiglu_backward};
