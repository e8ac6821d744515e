//! Multi-head latent attention (arXiv:2405.04434): packing of heads for the attention kernels, and decoding on latents.
pub(crate) mod decode;
pub(crate) mod pack;
