//! Multi-head latent attention (arXiv:2405.04434): packing of heads for the attention kernels, and decoding on latents.
pub(crate) mod decode;
pub(crate) mod pack;

pub(crate) use decode::{MLA_VALUES, mla_decode_join_kernel, mla_decode_kernel, mla_join_token_kernel};
pub(crate) use pack::mla_pack_kernels;
