//! MLA's cache: the latent and the rotated key of every token; where keys are normed, also 1 / rms of each head's key.
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use sieve_ops::{RowsOf, TokenBuffer, TokenCache};

/// New tokens' entries of MLA's cache.
#[derive(Clone, Debug)]
pub(crate) struct NewLatents<B: Backend> {
    /// The normalised latent, then the rotated key, `[batch, new, kv_lora_rank + qk_rope_head_dim]`. Where keys are
    /// normed, the key is multiplied by the norm's weight.
    pub(crate) latents: Tensor<B, 3>,
    /// 1 / rms of each head's key, `[batch, new, num_heads]`, f32; `None` where keys are not normed.
    pub(crate) key_scale: Option<Tensor<B, 3>>,
}

impl<B: Backend> NewLatents<B> {
    /// The entries of `rows` rows from `row` on.
    pub(crate) fn rows(&self, row: usize, rows: usize) -> Self {
        let of = |x: &Tensor<B, 3>| x.clone().narrow(0, row, rows);
        Self { latents: of(&self.latents), key_scale: self.key_scale.as_ref().map(of) }
    }
}

/// Latents and rotated keys of all tokens. The buffers can hold `room` tokens.
#[derive(Clone, Debug)]
pub struct LatentCache<B: Backend> {
    /// Latent, then rotated key, `[batch, room, kv_lora_rank + qk_rope_head_dim]`.
    latents: TokenBuffer<B, 3>,
    /// 1 / rms of each head's key, f32 `[batch, room, num_heads]`; `None` where keys are not normed.
    key_scale: Option<TokenBuffer<B, 3>>,
}

impl<B: Backend> LatentCache<B> {
    /// A cache of the prompt's tokens.
    pub(super) fn new(new: NewLatents<B>) -> Self {
        let (token_axis, room) = (1, None);
        let buffer = |x| TokenBuffer::new(x, token_axis, room);
        Self { latents: buffer(new.latents), key_scale: new.key_scale.map(buffer) }
    }

    /// Number of tokens processed so far.
    pub(super) fn len(&self) -> usize {
        self.latents.len()
    }

    /// A copy with the rows that `rows` names. `[tokens; 2]`: entries of a text of `tokens` tokens, and their room.
    pub(super) fn rows(&self, rows: RowsOf) -> Self {
        let of = |buffer: &TokenBuffer<B, 3>| buffer.rows(rows, |tokens| [tokens; 2]);
        Self { latents: of(&self.latents), key_scale: self.key_scale.as_ref().map(of) }
    }

    /// Writes a text of `tokens` tokens into a row.
    pub(super) fn put(&mut self, row: usize, text: &Self, tokens: usize) {
        self.latents.put(row, &text.latents, tokens);
        if let (Some(scales), Some(text)) = (&mut self.key_scale, &text.key_scale) {
            scales.put(row, text, tokens);
        }
    }

    /// The cache as an operand of [`sieve_ops::token_step`].
    pub(super) fn for_token_step(&mut self) -> TokenCache<'_, B> {
        TokenCache::Latents(&mut self.latents, self.key_scale.as_mut())
    }

    /// Counts the token that [`sieve_ops::token_step`] has written.
    pub(super) fn count_token(&mut self) {
        let buffers = std::iter::once(&mut self.latents).chain(&mut self.key_scale);
        buffers.for_each(|buffer| buffer.count(1));
    }

    /// Appends the entries of new tokens.
    pub(super) fn append(&mut self, new: NewLatents<B>) {
        self.latents.append(new.latents);
        if let (Some(old), Some(new)) = (&mut self.key_scale, new.key_scale) {
            old.append(new);
        }
    }

    /// Of all tokens: latents with rotated keys, `[batch, tokens, kv_lora_rank + qk_rope_head_dim]`, and, where keys
    /// are normed, 1 / rms of each head's key.
    pub(crate) fn tokens(&self) -> (Tensor<B, 3>, Option<Tensor<B, 3>>) {
        (self.latents.tokens(), self.key_scale.as_ref().map(TokenBuffer::tokens))
    }
}
