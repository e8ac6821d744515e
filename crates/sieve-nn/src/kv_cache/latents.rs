//! MLA's cache: the latent and the rotated key of every token, and a factor for each head where keys are normed.
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use sieve_ops::{TokenBuffer, TokenCache};

/// What MLA keeps of new tokens.
#[derive(Clone, Debug)]
pub(crate) struct NewLatents<B: Backend> {
    /// The normalised latent, `[batch, new, kv_lora_rank]`.
    pub(crate) latent: Tensor<B, 3>,
    /// The rotated key, `[batch, new, qk_rope_head_dim]`; where keys are normed, with the weight of the norm in it.
    pub(crate) k_rope: Tensor<B, 3>,
    /// 1 / rms of each head's key, `[batch, new, num_heads]`, f32; `None` where keys are not normed.
    pub(crate) key_scale: Option<Tensor<B, 3>>,
}

impl<B: Backend> NewLatents<B> {
    /// Those of `rows` rows from `row` on.
    pub(crate) fn rows(&self, row: usize, rows: usize) -> Self {
        let of = |x: &Tensor<B, 3>| x.clone().narrow(0, row, rows);
        Self {
            latent: of(&self.latent),
            k_rope: of(&self.k_rope),
            key_scale: self.key_scale.as_ref().map(of),
        }
    }
}

/// What an MLA layer keeps of earlier tokens.
#[derive(Clone, Debug)]
pub struct LatentCache<B: Backend> {
    /// Latent and rotated key, `[batch, room, kv_lora_rank + qk_rope_head_dim]`.
    latents: TokenBuffer<B, 3>,
    /// `[batch, room, num_heads]`.
    key_scale: Option<TokenBuffer<B, 3>>,
}

impl<B: Backend> LatentCache<B> {
    /// Of a prompt.
    pub(super) fn new(new: NewLatents<B>) -> Self {
        let buffer = |x| TokenBuffer::new(x, 1, None);
        Self {
            latents: buffer(Tensor::cat(vec![new.latent, new.k_rope], 2)),
            key_scale: new.key_scale.map(buffer),
        }
    }

    /// Tokens that went through.
    pub(super) fn len(&self) -> usize {
        self.latents.len()
    }

    /// Makes each row several equal ones.
    pub(super) fn repeat(&mut self, rows: usize) {
        let buffers = std::iter::once(&mut self.latents).chain(&mut self.key_scale);
        buffers.for_each(|buffer| buffer.repeat(rows));
    }

    /// The cache as a step of one token takes it.
    pub(super) fn for_token_step(&mut self) -> TokenCache<'_, B> {
        TokenCache::Latents(&mut self.latents, self.key_scale.as_mut())
    }

    /// Counts the token that such a step has written.
    pub(super) fn count_token(&mut self) {
        let buffers = std::iter::once(&mut self.latents).chain(&mut self.key_scale);
        buffers.for_each(|buffer| buffer.count(1));
    }

    /// Adds new tokens.
    pub(super) fn append(&mut self, new: NewLatents<B>) {
        self.latents.append(Tensor::cat(vec![new.latent, new.k_rope], 2));
        if let (Some(old), Some(new)) = (&mut self.key_scale, new.key_scale) {
            old.append(new);
        }
    }

    /// Latents beside rotated keys, and factors, of all tokens.
    pub(crate) fn tokens(&self) -> (Tensor<B, 3>, Option<Tensor<B, 3>>) {
        (self.latents.tokens(), self.key_scale.as_ref().map(TokenBuffer::tokens))
    }
}
