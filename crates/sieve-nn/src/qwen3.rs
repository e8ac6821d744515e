//! The language model: embedding, blocks, norm and output projection.
//!
//! `Qwen3::through_layers` is the one loop over the layers, with a hook that takes the residual stream through a
//! layer. Only training has a loop of its own, which cuts the graph between layers. Decoding as a CUDA graph
//! (`token_step.rs`) does not take models with residual scales, which run layer by layer.
use crate::pass::rope_dim;
use crate::whole_weights::{WeightSource, WholeWeights};
use crate::{DecoderLayer, KvCache, LayerCaches, LayerContext, Linear, PassSettings, PassState, RmsNorm, WeightInit};
use burn::module::{Module, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, TensorData};
use sieve_core::ModelShape;
use sieve_ops::{DeviceBackend, Documents, KernelPolicy, KeyOrder, RotaryEmbedding, SieveBackend, SumOrder};
use std::convert::Infallible;

/// Embedding of token ids as rows of a matrix.
#[derive(Module, Debug)]
pub struct TokenEmbedding<B: Backend> {
    /// One row for each token id, `[vocab_size, d_model]`.
    pub weight: Param<Tensor<B, 2>>,
}

impl<B: SieveBackend> TokenEmbedding<B> {
    /// `[batch, seq_len]` ids to `[batch, seq_len, d_model]`.
    pub fn forward(&self, ids: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        sieve_ops::embedding(self.weight.val(), ids)
    }
}

/// Final norm and projection to logits.
#[derive(Module, Debug)]
pub struct LmHead<B: Backend> {
    /// RMSNorm before the projection.
    pub norm: RmsNorm<B>,
    /// `[vocab_size, d_model]`; `None`: the embedding's weight is used (tied).
    pub lm_head: Option<Linear<B>>,
}

impl<B: SieveBackend> LmHead<B> {
    /// Summed cross-entropy in nats over the labelled tokens, `[1]`; `tied` is the embedding's weight.
    pub fn loss(&self, x: Tensor<B, 3>, labels: Tensor<B, 2, Int>, tied: &TokenEmbedding<B>) -> Tensor<B, 1> {
        let h = self.norm.forward(x).flatten(0, 1);
        sieve_ops::linear_cross_entropy(h, self.weight(tied), labels.flatten(0, 1))
    }

    /// Cross-entropy of each token in nats, `[batch, seq_len]`; zero where there is no label.
    pub fn token_losses(&self, x: Tensor<B, 3>, labels: Tensor<B, 2, Int>, tied: &TokenEmbedding<B>) -> Tensor<B, 2> {
        let [batch, seq_len] = labels.dims();
        let h = self.norm.forward(x).flatten(0, 1);
        sieve_ops::token_losses(h, self.weight(tied), labels.flatten(0, 1)).reshape([batch, seq_len])
    }

    /// Logits of all tokens, `[batch, seq_len, vocab_size]`.
    pub fn logits(&self, x: Tensor<B, 3>, tied: &TokenEmbedding<B>) -> Tensor<B, 3> {
        sieve_ops::linear(self.norm.forward(x), self.weight(tied))
    }

    /// The weight of the projection: its own, or the embedding's if they are tied.
    pub(crate) fn weight(&self, tied: &TokenEmbedding<B>) -> Tensor<B, 2> {
        match &self.lm_head {
            Some(lm_head) => lm_head.weight.val(),
            None => tied.weight.val(),
        }
    }
}

/// A Qwen3-style causal language model, each of whose layers has the kind of attention that its shape says.
#[derive(Module, Debug)]
pub struct Qwen3<B: Backend> {
    /// Token embedding. Training cuts the graph into segments, of which this is the first.
    pub embed_tokens: TokenEmbedding<B>,
    /// The decoder layers, each a segment in training.
    pub layers: Vec<DecoderLayer<B>>,
    /// Final norm and output projection, the last segment in training.
    pub head: LmHead<B>,
    #[module(skip)]
    shape: ModelShape,
    #[module(skip)]
    weights: WeightSource,
    /// Which kernels passes with a cache may use.
    #[module(skip)]
    pub(crate) cached: KernelPolicy,
}

impl<B: Backend> Qwen3<B> {
    /// Weights drawn from `seed`: normal with standard deviation `shape.initializer_range`; norms with weights of 1.
    pub fn new(shape: &ModelShape, seed: u64, device: &B::Device) -> Self {
        let mut init = WeightInit::new(seed, shape.initializer_range);
        let init = &mut init;
        let ModelShape { d_model, vocab_size, num_layers, .. } = *shape;
        let embed_tokens = TokenEmbedding { weight: init.normal([vocab_size, d_model], device) };
        let layers = (0..num_layers).map(|layer| DecoderLayer::new(&shape.of_layer(layer), init, device)).collect();
        let norm = RmsNorm::new(d_model, shape.rms_norm_eps, init, device);
        let lm_head = (!shape.tie_word_embeddings).then(|| Linear::new(d_model, vocab_size, init, device));
        Self {
            embed_tokens,
            layers,
            head: LmHead { norm, lm_head },
            shape: shape.clone(),
            weights: WeightSource::default(),
            cached: KernelPolicy::default(),
        }
    }

    /// The model that adds a new token's sums in the order of whole rows, whatever the number of texts and the length
    /// of their caches, where a GPU would take a faster kernel with another order. Where keys are chosen one by one,
    /// whole rows then have an order that a step can have, too. On a CPU every model does.
    pub fn with_same_bits(self) -> Self {
        let cached = KernelPolicy { sums: SumOrder::Fixed, keys: KeyOrder::Epochs, ..self.cached };
        Self { cached, ..self }
    }

    /// The model with whole weights from `source` in every pass. Its own parameters are then read for their types and
    /// sizes alone, except those that `source` leaves as they are.
    pub fn with_whole_weights(self, source: Box<dyn WholeWeights<B>>) -> Self {
        Self { weights: WeightSource::new(source), ..self }
    }

    /// Whether each pass gathers the weights that it reads.
    pub(crate) fn gathers_weights(&self) -> bool {
        self.weights.of::<B>().is_some()
    }

    /// The sizes this model was built from.
    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// RoPE tables for `max_positions` positions.
    pub fn rope(&self, max_positions: usize, device: &B::Device) -> RotaryEmbedding<B> {
        let (frequencies, amplitude) = self.shape.rotary_frequencies(rope_dim(&self.shape));
        let rope = RotaryEmbedding::of_frequencies((&frequencies, amplitude), max_positions, device, DType::F32);
        if self.shape.rope_layers.is_every() { rope } else { rope.with_still() }
    }
}

impl<B: SieveBackend> Qwen3<B> {
    /// Embeds `ids` and calls `step` for each layer, with its index and the residual stream; returns the stream after
    /// the last block, `[batch, seq_len, d_model]`. All passes except training use this loop; training cuts the graph
    /// between layers.
    ///
    /// # Errors
    /// The first error of `step`.
    pub fn through_layers<E>(
        &self,
        ids: Tensor<B, 2, Int>,
        mut step: impl FnMut(usize, &DecoderLayer<B>, Tensor<B, 3>) -> Result<Tensor<B, 3>, E>,
    ) -> Result<Tensor<B, 3>, E> {
        // On a CPU the embedding's weight may be bf16, while the residual stream is f32 like the norms.
        let dtype = self.head.norm.weight.val().dtype();
        let mut layers = self.layers.iter().enumerate();
        let Some(source) = self.weights.of::<B>() else {
            let x = self.embed_tokens.forward(ids).cast(dtype);
            return layers.try_fold(x, |x, (index, layer)| step(index, layer, x));
        };
        let x = source.embedding(&self.embed_tokens).forward(ids).cast(dtype);
        layers.try_fold(x, |x, (index, layer)| step(index, &source.layer(layer), x))
    }

    /// Logits of the residual stream `x` after the last block, `[batch, seq_len, vocab_size]`.
    pub fn logits_of(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let logits = self.with_head(|head, embedding| head.logits(x, embedding));
        match self.weights.of::<B>() {
            None => logits,
            Some(source) => source.agreed(logits),
        }
    }

    /// Cross-entropy of each token in nats, `[batch, seq_len]`, from the residual stream `x` after the last block; zero
    /// where there is no label.
    pub fn token_losses_of(&self, x: Tensor<B, 3>, labels: Tensor<B, 2, Int>) -> Tensor<B, 2> {
        self.with_head(|head, embedding| head.token_losses(x, labels, embedding))
    }

    /// Calls `compute` with the whole weights of the head, and of the embedding if the head reads them.
    fn with_head<T>(&self, compute: impl FnOnce(&LmHead<B>, &TokenEmbedding<B>) -> T) -> T {
        match self.weights.of::<B>() {
            None => compute(&self.head, &self.embed_tokens),
            Some(source) if self.head.lm_head.is_some() => compute(&source.head(&self.head), &self.embed_tokens),
            Some(source) => compute(&self.head, &source.embedding(&self.embed_tokens)),
        }
    }

    /// The residual stream after the last block, `[batch, seq_len, d_model]`.
    pub fn hidden(&self, ids: Tensor<B, 2, Int>, context: &LayerContext<'_, B>) -> Tensor<B, 3> {
        let mut state = PassState::default();
        let mut context = context.clone();
        context.settings.policy.keys = self.cached.keys;
        let Ok(x) = self.through_layers(ids, |_, layer, x| {
            let no_caches = None;
            Ok::<_, Infallible>(layer.forward(x, &context, &mut state, no_caches).x)
        });
        x
    }

    /// Logits of all tokens, `[batch, seq_len, vocab_size]`.
    pub fn logits(&self, ids: Tensor<B, 2, Int>, context: &LayerContext<'_, B>) -> Tensor<B, 3> {
        self.logits_of(self.hidden(ids, context))
    }

    /// Cross-entropy of each token in nats, `[batch, seq_len]`.
    pub fn token_losses(
        &self,
        ids: Tensor<B, 2, Int>,
        labels: Tensor<B, 2, Int>,
        context: &LayerContext<'_, B>,
    ) -> Tensor<B, 2> {
        self.token_losses_of(self.hidden(ids, context), labels)
    }

    /// Logits of the last token, `[batch, vocab_size]`; adds the tokens to the cache. A text may be passed in chunks of
    /// any sizes: the logits equal the logits of one pass. NSA layers take the tokens of later chunks one by one, and
    /// latent ones on a GPU attend over latents there, so that such chunks cost more than one pass over all tokens.
    pub fn next_logits(&self, ids: Tensor<B, 2, Int>, cache: &mut KvCache<B>, rope: &RotaryEmbedding<B>) -> Tensor<B, 2>
    where
        B: DeviceBackend,
    {
        self.next_logits_of_rows(ids, &mut [cache], rope)
    }

    /// As [`next_logits`](Self::next_logits) with one cache per row, whose lengths may differ, or one cache of all
    /// rows.
    ///
    /// Panics when a cache is empty, unless it is one cache of all rows.
    pub fn next_logits_of_rows(
        &self,
        ids: Tensor<B, 2, Int>,
        caches: &mut [&mut KvCache<B>],
        rope: &RotaryEmbedding<B>,
    ) -> Tensor<B, 2>
    where
        B: DeviceBackend,
    {
        // One new token in one cache may run as a single op.
        match (&mut *caches, ids.dims()) {
            ([cache], [_, 1]) => {
                if let Some(logits) = self.token_step(&ids, cache, rope) {
                    return logits;
                }
            }
            _ => caches.iter_mut().for_each(|cache| cache.single_tokens = 0),
        }
        let Ok(logits) = self.cached_pass(ids, caches, rope, |_, layer, x, context, state, mut caches| {
            Ok::<_, Infallible>(layer.forward(x, context, state, Some(&mut caches)).x)
        });
        logits
    }

    /// Runs `step` in each layer, with the layer's caches, and returns the logits of the last token. Adds the tokens to
    /// the caches' lengths.
    pub(crate) fn cached_pass<E>(
        &self,
        ids: Tensor<B, 2, Int>,
        caches: &mut [&mut KvCache<B>],
        rope: &RotaryEmbedding<B>,
        mut step: impl FnMut(
            usize,
            &DecoderLayer<B>,
            Tensor<B, 3>,
            &LayerContext<'_, B>,
            &mut PassState<B>,
            LayerCaches<'_, B>,
        ) -> Result<Tensor<B, 3>, E>,
    ) -> Result<Tensor<B, 2>, E>
    where
        B: DeviceBackend,
    {
        let [batch, new] = ids.dims();
        let device = ids.device();
        let documents = Documents::whole_rows([batch, new], &device);
        let seen: Vec<i32> = caches.iter().map(|cache| cache.num_tokens as i32).collect();
        let seen = TensorData::new(seen, [caches.len(), 1]);
        let context = LayerContext {
            positions: documents.positions.clone() + Tensor::from_data(seen, &device),
            settings: PassSettings { policy: self.cached, ..PassSettings::default() },
            ..LayerContext::new(&documents, rope)
        };
        let mut state = PassState::default();
        let x = self.through_layers(ids, |index, layer, x| {
            step(index, layer, x, &context, &mut state, LayerCaches::of_layer(caches, index))
        })?;
        for cache in caches {
            cache.num_tokens += new;
        }
        let last = x.narrow(1, new - 1, 1);
        Ok(self.logits_of(last).flatten(1, 2))
    }
}

#[cfg(test)]
mod tests;
