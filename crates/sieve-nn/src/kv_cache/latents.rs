//! MLA's cache: the latent and the rotated key of every token, and a factor for each head where keys are normed.
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

/// Room for new tokens that a full cache gets: one token for `ROOM_SHARE` that it has, which a plan does not count, and
/// `LEAST_ROOM` at least.
const LEAST_ROOM: usize = 256;
const ROOM_SHARE: usize = 16;

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

/// What an MLA layer keeps of earlier tokens, in buffers with room for more, so that most tokens copy none of the
/// others.
#[derive(Clone, Debug)]
pub struct LatentCache<B: Backend> {
    /// Latent and rotated key, `[batch, room, kv_lora_rank + qk_rope_head_dim]`.
    latents: Tensor<B, 3>,
    /// `[batch, room, num_heads]`.
    key_scale: Option<Tensor<B, 3>>,
    /// Tokens in use, the first ones.
    len: usize,
}

impl<B: Backend> LatentCache<B> {
    /// Of a prompt.
    pub(super) fn of(new: NewLatents<B>) -> Self {
        let len = new.latent.dims()[1];
        Self {
            latents: Tensor::cat(vec![new.latent, new.k_rope], 2),
            key_scale: new.key_scale,
            len,
        }
    }

    /// Tokens that went through.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The cache of one row as that of several equal rows.
    pub(super) fn repeat(&mut self, rows: usize) {
        for x in std::iter::once(&mut self.latents).chain(&mut self.key_scale) {
            *x = x.clone().repeat_dim(0, rows);
        }
    }

    /// New tokens behind these; written in place where nobody else holds the buffers.
    pub(super) fn extended(self, new: NewLatents<B>) -> Self {
        let (len, [_, count, rank]) = (self.len, new.latent.dims());
        let latents = put(with_room(self.latents, len, count), [len, 0], new.latent);
        let scales = self.key_scale.zip(new.key_scale);
        Self {
            latents: put(latents, [len, rank], new.k_rope),
            key_scale: scales.map(|(old, new)| put(with_room(old, len, count), [len, 0], new)),
            len: len + count,
        }
    }

    /// Latents beside rotated keys, and factors, of the tokens in use.
    pub(crate) fn tokens(self) -> (Tensor<B, 3>, Option<Tensor<B, 3>>) {
        let used = |x: Tensor<B, 3>| x.narrow(1, 0, self.len);
        (used(self.latents), self.key_scale.map(used))
    }
}

/// `buffer`, or a larger one with its first `len` tokens where it has no room for `more` behind them.
fn with_room<B: Backend>(buffer: Tensor<B, 3>, len: usize, more: usize) -> Tensor<B, 3> {
    let [batch, room, width] = buffer.dims();
    if len + more <= room {
        return buffer;
    }
    let room = len + more + LEAST_ROOM.max(len / ROOM_SHARE);
    let larger = Tensor::empty([batch, room, width], (&buffer.device(), buffer.dtype()));
    put(larger, [0, 0], buffer.narrow(1, 0, len))
}

/// `buffer` with `x` from a token and a column on, in every row.
fn put<B: Backend>(buffer: Tensor<B, 3>, [token, column]: [usize; 2], x: Tensor<B, 3>) -> Tensor<B, 3> {
    let [batch, count, width] = x.dims();
    buffer.slice_assign([0..batch, token..token + count, column..column + width], x)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{input, values};
    use burn_flex::Flex;

    #[test]
    fn tokens_stay_where_they_are_while_the_buffers_grow_and_a_clone_keeps_its_own() {
        let (prompt, len) = (5, 700);
        let [latent, k_rope, scale] = [4, 2, 3].map(|width| input::<Flex, 3>([2, len, width], width as u64));
        let new = |first: usize, count: usize| NewLatents {
            latent: latent.clone().narrow(1, first, count),
            k_rope: k_rope.clone().narrow(1, first, count),
            key_scale: Some(scale.clone().narrow(1, first, count)),
        };
        let mut cache = LatentCache::of(new(0, prompt));
        let mut at = prompt;
        while at < len {
            let count = (len - at).min(if at % 7 == 0 { 3 } else { 1 });
            let before = cache.clone();
            cache = cache.extended(new(at, count));
            // Another end for the same tokens.
            let other = before.extended(new(0, count));
            assert_eq!([cache.len(), other.len()], [at + count; 2]);
            at += count;
        }
        let (latents, factors) = cache.tokens();
        let expected = Tensor::cat(vec![latent, k_rope], 2);
        assert_eq!(values(latents), values(expected));
        assert_eq!(values(factors.expect("there are factors")), values(scale));
    }
}
