//! Latent attention: heads packed for the attention kernels, and decoding on the latents.
pub(crate) mod decode;
pub(crate) mod pack;

pub(crate) use decode::{
    MLA_VALUES, mla_decode_join_kernel, mla_decode_kernel, mla_decode_scaled_kernel, mla_join_token_kernel,
};
pub(crate) use pack::{mla_pack_backward_kernel, mla_pack_forward_kernel};
