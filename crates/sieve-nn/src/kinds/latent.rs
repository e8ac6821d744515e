//! Multi-head latent attention (arXiv:2405.04434, section 2.1), without query compression, and its cache of latents.
//!
//! On a CPU the cache holds keys and values: attention over latents adds other numbers in another order than a pass
//! over the whole text, so a token would have another probability.
use super::{Attention, BuildLayer, KindCache, KindLayer, LayerCache, OTHER_CACHE};
use crate::attention_weights::by_key;
use crate::layer::{Cached, KindAttention, PerToken, Rows};
use crate::pass::{LayerContext, PassState, from_device, on_device};
use crate::{AttentionConfig, Linear, RmsNorm, WeightInit};
use burn::module::Module;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};
use sieve_core::{MlaShape, ModelShape};
use sieve_ops::{
    AttentionSpec, ContextParallel, DeviceBackend, Heads, KernelPolicy, KeyCache, MlaSpec, QkNorm, RotaryEmbedding,
    RowsOf, SieveBackend, TokenAttention, TokenBuffer, TokenCache, TokenExtra, attention_decode, mla_attention_of_last,
    mla_decode,
};

/// Dense attention that computes keys and values from a latent of `kv_lora_rank` values per token, and from one rotated
/// key that all heads share. The cache holds only latent and rotated key, and where keys are normed 1 / rms per head.
#[derive(Module, Debug)]
pub struct LatentAttention<B: Backend> {
    /// `[num_heads * (head_dim + qk_rope_head_dim), d_model]`; in each head the columns without rotation come first.
    pub q_proj: Linear<B>,
    /// Projection to the latent and the shared rotated key, `[kv_lora_rank + qk_rope_head_dim, d_model]`.
    pub kv_a_proj: Linear<B>,
    /// RMSNorm of the latent, weight `[kv_lora_rank]`.
    pub kv_a_norm: RmsNorm<B>,
    /// Projection from the latent to keys and values, `[num_heads * 2 * head_dim, kv_lora_rank]`: each head's key, then
    /// its value.
    pub kv_b_proj: Linear<B>,
    /// Output projection, `[d_model, num_heads * head_dim]`.
    pub o_proj: Linear<B>,
    /// Norm of each head's query before rotation, `[head_dim + qk_rope_head_dim]`; `None` as in the paper.
    pub q_norm: Option<RmsNorm<B>>,
    /// Norm of each head's key before rotation, `[head_dim + qk_rope_head_dim]`; `None` as in the paper.
    pub k_norm: Option<RmsNorm<B>>,
    num_heads: usize,
    head_dim: usize,
    kv_lora_rank: usize,
    rope_dim: usize,
}

impl BuildLayer for MlaShape {
    fn build<B: Backend>(&self, shape: &ModelShape, init: &mut WeightInit, device: &B::Device) -> Attention<B> {
        Attention::Latent(LatentAttention::new(shape, *self, init, device))
    }
}

impl AttentionConfig {
    /// Latent attention, which needs the rotary tables of [`latent_rope`](Self::latent_rope). Panics when
    /// [`validate`](Self::validate) fails.
    pub fn latent<B: Backend>(&self, mla: MlaShape, device: &B::Device) -> LatentAttention<B> {
        let shape = self.shape(sieve_core::Attention::Mla(mla));
        LatentAttention::new(&shape, mla, &mut self.weights(), device)
    }

    /// Rotary tables of latent attention for positions `0..max_positions`.
    pub fn latent_rope<B: Backend>(
        &self,
        mla: MlaShape,
        max_positions: usize,
        device: &B::Device,
    ) -> RotaryEmbedding<B> {
        RotaryEmbedding::new(mla.qk_rope_head_dim, max_positions, self.rope_theta, device)
    }
}

impl<B: Backend> LatentAttention<B> {
    /// Normal weights from `init`; norms with weights of 1.
    pub fn new(shape: &ModelShape, mla: MlaShape, init: &mut WeightInit, device: &B::Device) -> Self {
        let ModelShape { d_model, num_heads, head_dim, rms_norm_eps, .. } = *shape;
        let MlaShape { kv_lora_rank, qk_rope_head_dim: rope_dim, .. } = mla;
        let qk_norm_dim = mla.qk_norm_dim(head_dim);
        let mut qk_norm = || (qk_norm_dim > 0).then(|| RmsNorm::new(qk_norm_dim, rms_norm_eps, init, device));
        let (q_norm, k_norm) = (qk_norm(), qk_norm());
        Self {
            q_proj: Linear::new(d_model, num_heads * (head_dim + rope_dim), init, device),
            kv_a_proj: Linear::new(d_model, kv_lora_rank + rope_dim, init, device),
            kv_a_norm: RmsNorm::new(kv_lora_rank, rms_norm_eps, init, device),
            kv_b_proj: Linear::new(kv_lora_rank, num_heads * 2 * head_dim, init, device),
            o_proj: Linear::new(num_heads * head_dim, d_model, init, device),
            q_norm,
            k_norm,
            num_heads,
            head_dim,
            kv_lora_rank,
            rope_dim,
        }
    }

    /// Sizes of the heads and scale.
    pub(crate) fn spec(&self) -> MlaSpec {
        MlaSpec {
            num_heads: self.num_heads,
            head_dim: self.head_dim,
            rope_dim: self.rope_dim,
            softmax_scale: 1.0 / ((self.head_dim + self.rope_dim) as f64).sqrt(),
            policy: KernelPolicy::default(),
        }
    }
}

impl<B: SieveBackend> LatentAttention<B> {
    /// The normed latent, `[batch, seq_len, kv_lora_rank]`, and the shared key before its rotation,
    /// `[batch, seq_len, qk_rope_head_dim]`.
    fn latent(&self, x: Tensor<B, 3>) -> (Tensor<B, 3>, Tensor<B, 3>) {
        let down = self.kv_a_proj.forward(x);
        let latent = down.clone().narrow(2, 0, self.kv_lora_rank);
        let k_rope = down.narrow(2, self.kv_lora_rank, self.rope_dim);
        (self.kv_a_norm.forward(latent), k_rope)
    }

    /// The norms of queries and keys; `None` if the layer has none.
    fn qk_norm(&self) -> Option<QkNorm<B>> {
        Some(RmsNorm::qk_norm(self.q_norm.as_ref()?, self.k_norm.as_ref()?))
    }

    /// Packs the projections of x at the context's positions. `kv` are the keys and values of `latent` before norm and
    /// rotation.
    fn pack(
        &self,
        x: Tensor<B, 3>,
        [kv, latent, k_rope]: [Tensor<B, 3>; 3],
        context: &LayerContext<'_, B>,
    ) -> PackedLatents<B> {
        let inputs = [self.q_proj.forward(x), kv, k_rope];
        let positions = context.positions.clone();
        let (packed, keys) = sieve_ops::mla_pack(inputs, self.qk_norm(), positions, context.rope, self.spec());
        PackedLatents { packed, latent, keys }
    }
}

/// The projections of tokens: their attention reads `packed`, their cache the rest.
#[derive(Clone)]
pub(crate) struct PackedLatents<B: Backend> {
    /// Queries, keys and values, packed by [`sieve_ops::mla_pack`].
    pub(crate) packed: Tensor<B, 3>,
    /// The normed latent, `[batch, tokens, kv_lora_rank]`.
    latent: Tensor<B, 3>,
    /// Where keys are normed: the rotated key times the norm's weight, and 1 / rms of each head's key, as
    /// [`sieve_ops::mla_pack`] returns them.
    keys: Option<[Tensor<B, 3>; 2]>,
}

impl<S: Backend> PerToken<S> for PackedLatents<S> {
    type On<T: Backend> = PackedLatents<T>;

    fn change<T: Backend>(self, change: &dyn Fn(Tensor<S, 4>) -> Tensor<T, 4>) -> PackedLatents<T> {
        let change = |x: Tensor<S, 3>| change(x.unsqueeze_dim(2)).squeeze_dim(2);
        let Self { packed, latent, keys } = self;
        PackedLatents { packed: change(packed), latent: change(latent), keys: keys.map(|keys| keys.map(change)) }
    }
}

impl<B: SieveBackend> KindAttention<B> for LatentAttention<B> {
    type Packed = PackedLatents<B>;
    type Found = ();

    fn num_heads(&self) -> usize {
        self.num_heads
    }

    /// The context's rotary tables must be `qk_rope_head_dim` wide.
    fn project(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> PackedLatents<B> {
        let (latent, k_rope) = self.latent(x.clone());
        self.pack(x, [self.kv_b_proj.forward(latent.clone()), latent, k_rope], context)
    }

    /// Of a single token that attends to latents only the queries and the rotated key of the packed tensor are read,
    /// so its keys and values may be zeros. Normed keys are needed for their 1 / rms.
    fn project_cached(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> PackedLatents<B> {
        let [batch, new, _d_model] = x.dims();
        if B::Inner::ON_HOST || self.k_norm.is_some() || new > 1 {
            return self.project(x, context);
        }
        let (latent, k_rope) = self.latent(x.clone());
        let kv = Tensor::zeros([batch, new, self.num_heads * 2 * self.head_dim], (&x.device(), x.dtype()));
        self.pack(x, [kv, latent, k_rope], context)
    }

    /// Every process receives the latents of whole rows, and computes the keys and values of its own heads from them.
    fn project_own_heads(&self, x: Tensor<B, 3>, parts: &ContextParallel, rows: &Rows<'_, B>) -> PackedLatents<B> {
        let [batch, len, _] = x.dims();
        let heads = rows.heads.clone();
        let own = MlaSpec { num_heads: heads.len(), policy: rows.context.settings.policy, ..self.spec() };
        let (latent, k_rope) = self.latent(x.clone());
        let q = self.q_proj.forward(x).reshape([batch, len, self.num_heads, own.key_dim()]);
        let q = parts.to_heads(q, &[Heads::Split(self.num_heads)]).flatten(2, 3);
        let shared = Tensor::cat(vec![latent, k_rope], 2).unsqueeze_dim(2);
        let shared = parts.to_heads(shared, &[Heads::Shared(1)]).squeeze_dim::<3>(2);
        let latent = shared.clone().narrow(2, 0, self.kv_lora_rank);
        let k_rope = shared.narrow(2, self.kv_lora_rank, self.rope_dim);
        // The weight's gradient is zero in the rows of other ranks' heads; the sum over ranks completes it.
        let up = self.kv_b_proj.weight.val();
        let up = up.narrow(0, heads.start * 2 * self.head_dim, heads.len() * 2 * self.head_dim);
        let kv = sieve_ops::linear(latent.clone(), up);
        let (packed, keys) = sieve_ops::mla_pack(
            [q, kv, k_rope],
            self.qk_norm(),
            rows.documents.positions.clone(),
            rows.context.rope,
            own,
        );
        PackedLatents { packed, latent, keys }
    }

    fn attend(&self, tokens: PackedLatents<B>, rows: &Rows<'_, B>, _state: &mut PassState<B>) -> (Tensor<B, 4>, ()) {
        let spec = MlaSpec { num_heads: rows.heads.len(), policy: rows.context.settings.policy, ..self.spec() };
        (sieve_ops::mla_attention(tokens.packed, rows.documents, spec), ())
    }

    fn fill(&self, tokens: PackedLatents<B::Inner>, (): ()) -> LayerCache<B::Inner> {
        LayerCache::Latent(if B::Inner::ON_HOST {
            let [_, k, v] = self.heads(tokens.packed);
            LatentCache { stored: Stored::Keys(KeyCache::new(k, v)) }
        } else {
            LatentCache::of_latents(self.cache_entries(tokens))
        })
    }

    /// A token after the prompt attends to what the cache holds. Several attend in a row of their own: the cached
    /// tokens, with queries of zero and with keys and values that are computed from their latents again, then the new
    /// ones.
    fn attend_cached(&self, tokens: PackedLatents<B::Inner>, cached: Cached<'_, '_, B>) -> Tensor<B::Inner, 4> {
        let LayerCache::Latent(LatentCache { stored }) = cached.rows.cache else {
            panic!("a layer of latents decodes after a prompt");
        };
        let packed = tokens.packed.clone();
        let [batch, new, _] = packed.dims();
        if new > 1 {
            let earlier = match stored {
                Stored::Keys(keys) => {
                    let [k, v] = [&keys.k, &keys.v].map(|x| x.tokens().swap_dims(1, 2));
                    self.without_queries([k, v])
                }
                Stored::Latents(latents) => self.without_queries(self.keys_and_values(latents)),
            };
            let first = earlier.dims()[1];
            self.append(stored, tokens);
            let row = Tensor::cat(vec![earlier, packed], 1);
            let bounds = cached.state.rows_behind([batch, first + new], first, &row.device());
            let spec = MlaSpec { policy: cached.context.settings.policy, ..self.spec() };
            return mla_attention_of_last(row, spec, (first, bounds));
        }
        self.append(stored, tokens);
        match stored {
            Stored::Latents(latents) => self.attend_to_latents(latents, packed),
            Stored::Keys(keys) => {
                let ([q, _, _], bias) = (self.heads(packed), None);
                let scale = self.spec().softmax_scale;
                attention_decode(q.squeeze_dim(1), keys, bias, scale, cached.rows.scratch).unsqueeze_dim(1)
            }
        }
    }

    fn project_out(&self, o: Tensor<B, 3>, residual: Tensor<B, 3>, _context: &LayerContext<'_, B>) -> Tensor<B, 3> {
        residual + self.o_proj.forward(o)
    }
}

impl<B: Backend> LatentAttention<B> {
    /// Queries and keys, `[batch, tokens, num_heads, head_dim + qk_rope_head_dim]`, and values,
    /// `[batch, tokens, num_heads, head_dim]`, of a packed tensor.
    fn heads<I: Backend>(&self, packed: Tensor<I, 3>) -> [Tensor<I, 4>; 3] {
        let (heads, key_dim, d) = (self.num_heads, self.spec().key_dim(), self.head_dim);
        let [batch, tokens, _] = packed.dims();
        let parts = [(0, key_dim), (heads * key_dim, key_dim), (2 * heads * key_dim, d)];
        parts
            .map(|(first, width)| packed.clone().narrow(2, first, heads * width).reshape([batch, tokens, heads, width]))
    }

    /// A packed tensor with queries of zero; keys, `[batch, tokens, num_heads, head_dim + qk_rope_head_dim]`, and
    /// values, `[batch, tokens, num_heads, head_dim]`.
    fn without_queries<I: Backend>(&self, [k, v]: [Tensor<I, 4>; 2]) -> Tensor<I, 3> {
        let [k, v] = [k, v].map(|x| x.flatten::<3>(2, 3));
        Tensor::cat(vec![k.zeros_like(), k, v], 2)
    }

    /// Adds new tokens to a cache.
    fn append<I: Backend>(&self, stored: &mut Stored<I>, tokens: PackedLatents<I>) {
        match stored {
            Stored::Latents(latents) => latents.append(self.cache_entries(tokens)),
            Stored::Keys(keys) => {
                let [_, k, v] = self.heads(tokens.packed);
                keys.append(k, v);
            }
        }
    }

    /// The cache's entries of new tokens: `kv_lora_rank + qk_rope_head_dim` values per token, and where keys are normed
    /// one more per head.
    fn cache_entries<I: Backend>(&self, tokens: PackedLatents<I>) -> NewLatents<I> {
        let (k_rope, key_scale) = match tokens.keys {
            Some([k_rope, key_scale]) => (k_rope, Some(key_scale)),
            // All heads have the same rotated key. In the first key head it follows the columns without rotation.
            None => {
                let first_key = self.num_heads * self.spec().key_dim();
                (tokens.packed.narrow(2, first_key + self.head_dim, self.rope_dim), None)
            }
        };
        NewLatents { latents: Tensor::cat(vec![tokens.latent, k_rope], 2), key_scale }
    }
}

impl<B: SieveBackend> LatentAttention<B> {
    /// Keys, `[batch, tokens, num_heads, head_dim + qk_rope_head_dim]`, and values,
    /// `[batch, tokens, num_heads, head_dim]`, of cached tokens, as their own pass computed them: to the bit where the
    /// GEMM adds in the same order and keys are not normed. A cached rotated key has the norm's weight, and is rounded
    /// before it is divided by the rms.
    fn keys_and_values(&self, latents: &Latents<B::Inner>) -> [Tensor<B::Inner, 4>; 2] {
        let (latents, key_scale) = latents.tokens();
        let (heads, d, rank) = (self.num_heads, self.head_dim, self.kv_lora_rank);
        let [batch, tokens, _] = latents.dims();
        let latent = latents.clone().narrow(2, 0, rank);
        let kv = on_device(self.kv_b_proj.forward(from_device(latent))).reshape([batch, tokens, heads, 2 * d]);
        let k_rope = latents.narrow(2, rank, self.rope_dim).unsqueeze_dim::<4>(2).repeat_dim(2, heads);
        let (k, v) = (kv.clone().narrow(3, 0, d), kv.narrow(3, d, d));
        let k = match self.k_norm.as_ref().zip(key_scale) {
            None => Tensor::cat(vec![k, k_rope], 3),
            Some((norm, scale)) => {
                let (dtype, scale) = (k.dtype(), scale.unsqueeze_dim::<4>(3));
                let weight = on_device(norm.weight.val()).narrow(0, 0, d).cast(DType::F32).unsqueeze::<4>();
                let k = k.cast(DType::F32) * (scale.clone() * weight);
                let k_rope = k_rope.cast(DType::F32) * scale;
                Tensor::cat(vec![k.cast(dtype), k_rope.cast(dtype)], 3)
            }
        };
        [k, v]
    }

    /// Attention of one token of each row to latents instead of keys and values: queries are multiplied by the weight
    /// of the keys' norm and by W_UK, the rows of `kv_b_proj` for keys, so that their product with a latent is the
    /// logit; the attention's outputs by W_UV, its rows for values. A query head is then `kv_lora_rank +
    /// qk_rope_head_dim` wide.
    fn attend_to_latents(&self, latents: &Latents<B::Inner>, packed: Tensor<B::Inner, 3>) -> Tensor<B::Inner, 4> {
        let (latents, key_scale) = latents.tokens();
        let (heads, d, rank) = (self.num_heads, self.head_dim, self.kv_lora_rank);
        let [batch, new, _] = packed.dims();
        let key_dim = self.spec().key_dim();
        let q = packed.narrow(2, 0, heads * key_dim).reshape([batch * new, heads, key_dim]);
        let up = on_device(self.kv_b_proj.weight.val()).reshape([heads, 2 * d, rank]);
        let (w_uk, w_uv) = (up.clone().narrow(1, 0, d), up.narrow(1, d, d));
        let q_c = q.clone().narrow(2, 0, d);
        let q_c = match &self.k_norm {
            Some(norm) => q_c * on_device(norm.weight.val()).narrow(0, 0, d).unsqueeze(),
            None => q_c,
        };
        let q_c = q_c.swap_dims(0, 1).matmul(w_uk);
        let q = Tensor::cat(vec![q_c.swap_dims(0, 1), q.narrow(2, d, self.rope_dim)], 2);
        let q = q.reshape([batch, new, heads, rank + self.rope_dim]);
        let o = mla_decode(q, latents, key_scale, rank, self.spec().softmax_scale);
        let o = o.reshape([batch * new, heads, rank]).swap_dims(0, 1);
        let o = o.matmul(w_uv.swap_dims(1, 2)).swap_dims(0, 1);
        o.reshape([batch, new, heads, d])
    }
}

impl<B: SieveBackend> KindLayer<B> for LatentAttention<B> {
    /// The weights of the layer as the op for one new token takes them. A head has unrotated and rotated columns.
    fn for_token_step(&self) -> Option<TokenAttention<B>> {
        Some(TokenAttention {
            sinks: None,
            qkv: self.q_proj.weight.val(),
            qkv_bias: None,
            qk_norm: self.qk_norm(),
            dma: None,
            extra: TokenExtra::Latent {
                down: self.kv_a_proj.weight.val(),
                norm: self.kv_a_norm.weight.val(),
                up: self.kv_b_proj.weight.val(),
                rope_dim: self.rope_dim,
            },
            o: self.o_proj.weight.val(),
            spec: AttentionSpec::dense([self.num_heads; 2], self.spec().key_dim()),
        })
    }

    /// The weight of each key. It is an output of attention itself, with one-hot values in place of the values, see
    /// `attention_weights::by_key`.
    fn weights(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>, _state: &PassState<B>) -> Tensor<B, 3> {
        let (packed, spec) = (self.project(x, context).packed, self.spec());
        let [_, seq_len, width] = packed.dims();
        let v_width = spec.num_heads * spec.head_dim;
        let q_and_k = packed.narrow(2, 0, width - v_width);
        let like = Tensor::<B, 4>::zeros([1, seq_len, 1, spec.head_dim], (&q_and_k.device(), q_and_k.dtype()));
        // With one-hot values, column c of the output is the weight of key c.
        by_key(&like, |one_hot| {
            let v = one_hot.unsqueeze_dim::<4>(2).repeat_dim(2, spec.num_heads);
            let v = v.reshape([1, seq_len, v_width]);
            sieve_ops::mla_attention(Tensor::cat(vec![q_and_k.clone(), v], 2), context.documents, spec)
        })
    }
}

/// New tokens' entries of MLA's cache.
#[derive(Clone, Debug)]
struct NewLatents<B: Backend> {
    /// The normalised latent, then the rotated key, `[batch, new, kv_lora_rank + qk_rope_head_dim]`. Where keys are
    /// normed, the key is multiplied by the norm's weight.
    latents: Tensor<B, 3>,
    /// 1 / rms of each head's key, `[batch, new, num_heads]`, f32; `None` where keys are not normed.
    key_scale: Option<Tensor<B, 3>>,
}

/// What decoding reads of all tokens. The buffers can hold `room` tokens.
#[derive(Clone, Debug)]
pub struct LatentCache<B: Backend> {
    stored: Stored<B>,
}

/// Latents, or on a CPU the keys and values that are computed from them.
#[derive(Clone, Debug)]
enum Stored<B: Backend> {
    Latents(Latents<B>),
    /// Keys, `[batch, num_heads, room, head_dim + qk_rope_head_dim]`, and values, `[batch, num_heads, room, head_dim]`.
    Keys(KeyCache<B>),
}

/// Latents and rotated keys.
#[derive(Clone, Debug)]
struct Latents<B: Backend> {
    /// Latent, then rotated key, `[batch, room, kv_lora_rank + qk_rope_head_dim]`.
    latents: TokenBuffer<B, 3>,
    /// 1 / rms of each head's key, f32 `[batch, room, num_heads]`; `None` where keys are not normed.
    key_scale: Option<TokenBuffer<B, 3>>,
}

impl<B: Backend> LatentCache<B> {
    /// A cache of the prompt's latents.
    fn of_latents(new: NewLatents<B>) -> Self {
        let (token_axis, room) = (1, None);
        let buffer = |x| TokenBuffer::new(x, token_axis, room);
        let latents = Latents { latents: buffer(new.latents), key_scale: new.key_scale.map(buffer) };
        Self { stored: Stored::Latents(latents) }
    }
}

#[cfg(test)]
impl<B: SieveBackend<Inner = B>> LatentAttention<B> {
    /// The cache of these tokens as a GPU has it.
    pub(super) fn cache_of_latents(&self, packed: PackedLatents<B>) -> LayerCache<B> {
        LayerCache::Latent(LatentCache::of_latents(self.cache_entries(packed)))
    }
}

impl<B: Backend> Latents<B> {
    /// Appends the entries of new tokens.
    fn append(&mut self, new: NewLatents<B>) {
        self.latents.append(new.latents);
        if let (Some(old), Some(new)) = (&mut self.key_scale, new.key_scale) {
            old.append(new);
        }
    }

    /// Of all tokens: latents with rotated keys, `[batch, tokens, kv_lora_rank + qk_rope_head_dim]`, and, where keys
    /// are normed, 1 / rms of each head's key.
    fn tokens(&self) -> (Tensor<B, 3>, Option<Tensor<B, 3>>) {
        (self.latents.tokens(), self.key_scale.as_ref().map(TokenBuffer::tokens))
    }
}

impl<B: Backend> KindCache<B> for LatentCache<B> {
    fn num_keys(&self) -> usize {
        match &self.stored {
            Stored::Latents(latents) => latents.latents.len(),
            Stored::Keys(keys) => keys.len(),
        }
    }

    fn for_token_step(&mut self) -> Option<TokenCache<'_, B>> {
        match &mut self.stored {
            Stored::Latents(Latents { latents, key_scale }) => Some(TokenCache::Latents(latents, key_scale.as_mut())),
            Stored::Keys(_) => None,
        }
    }

    fn count_token(&mut self) {
        match &mut self.stored {
            Stored::Latents(Latents { latents, key_scale }) => {
                std::iter::once(latents).chain(key_scale).for_each(|buffer| buffer.count(1));
            }
            Stored::Keys(keys) => keys.count_token(),
        }
    }

    fn rows(&self, rows: RowsOf) -> LayerCache<B> {
        let of = |buffer: &TokenBuffer<B, 3>| buffer.rows(rows, |tokens| [tokens; 2]);
        let stored = match &self.stored {
            Stored::Latents(Latents { latents, key_scale }) => {
                Stored::Latents(Latents { latents: of(latents), key_scale: key_scale.as_ref().map(of) })
            }
            Stored::Keys(keys) => Stored::Keys(keys.rows(rows, |tokens| [tokens; 2])),
        };
        LayerCache::Latent(Self { stored })
    }

    fn put(&mut self, row: usize, text: &LayerCache<B>, tokens: usize) {
        let LayerCache::Latent(text) = text else { panic!("{OTHER_CACHE}") };
        match (&mut self.stored, &text.stored) {
            (Stored::Latents(all), Stored::Latents(text)) => {
                all.latents.put(row, &text.latents, tokens);
                if let (Some(scales), Some(text)) = (&mut all.key_scale, &text.key_scale) {
                    scales.put(row, text, tokens);
                }
            }
            (Stored::Keys(all), Stored::Keys(text)) => all.put(row, text, tokens),
            _ => panic!("{OTHER_CACHE}"),
        }
    }
}
