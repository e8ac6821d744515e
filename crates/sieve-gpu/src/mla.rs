//! Latent attention: heads packed for the attention kernels, and decoding on the latents.
pub(crate) mod decode;
pub(crate) mod pack;
