//! Multi-head latent attention (arXiv:2405.04434): packing of heads for the attention kernels, and decoding on latents.
//!
//! q, k and v of a token are packed side by side, with the one rotated key behind every head, and the attention
//! kernels walk that tensor by strides. Packing includes the norms of queries and keys. For decoding, the weight of
//! the keys' norm is multiplied into the query and the cached rotated key, and 1 / rms of each head is cached
//! beside the latent.
pub(crate) mod decode;
pub(crate) mod pack;
