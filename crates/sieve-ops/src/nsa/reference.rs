//! NSA's ops in plain Burn operations, with a mask over all pairs of tokens. Blocks are chosen on the host.
mod attention;
mod blocks;
mod gates;

pub(crate) use attention::{compressed_attention, compressed_attention_backward};
pub use attention::{
    nsa_compressed_attention, nsa_compressed_attention_backward, nsa_selected_attention,
    nsa_selected_attention_backward,
};
pub use blocks::{nsa_blocks, nsa_blocks_backward, nsa_mean_pool, nsa_mean_pool_backward};
pub use gates::{nsa_gates, nsa_gates_backward};
