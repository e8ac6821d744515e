//! An attention kind of one's own in a small language model: dense attention with a gate for each head, as
//! `o = sigmoid(x W) * attention(x)`. Norms, projections, the feed-forward layer and the loss are Sieve's.
//!
//! `cargo run --release --example own_attention`, from the workspace's root.

#![allow(clippy::print_stdout, reason = "this is a program")]

use burn::backend::Autodiff;
use burn::module::Module;
use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::tensor::activation::sigmoid;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor, TensorData};
use burn_flex::Flex;
use sieve_core::{Attention, LayerPattern, ModelShape, RopeLayers};
use sieve_nn::{
    LayerContext, Linear, LmHead, PassState, QkvProjection, RmsNorm, SwigluMlp, TokenEmbedding, WeightInit,
};
use sieve_ops::{Documents, Residual, RotaryEmbedding, SieveBackend};

/// Dense attention whose heads are gated by the token.
#[derive(Module, Debug)]
struct GatedAttention<B: Backend> {
    qkv: QkvProjection<B>,
    gate: Linear<B>,
    o_proj: Linear<B>,
}

impl<B: SieveBackend> GatedAttention<B> {
    /// Draws the weights, one projection after the other, from `init`.
    fn new(shape: &ModelShape, init: &mut WeightInit, device: &B::Device) -> Self {
        let width = shape.num_heads * shape.head_dim;
        Self {
            qkv: QkvProjection::new(shape, init, device),
            gate: Linear::new(shape.d_model, shape.num_heads, init, device),
            o_proj: Linear::new(width, shape.d_model, init, device),
        }
    }

    /// `residual` plus the attention's output; both `[batch, seq_len, d_model]`.
    fn forward(&self, x: Tensor<B, 3>, residual: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Tensor<B, 3> {
        let gate = sigmoid(self.gate.forward(x.clone())).unsqueeze_dim::<4>(3);
        // Projects x, norms queries and keys, and rotates them. `None` in the spec below: no sliding window.
        let qkv = self.qkv.forward(x, context);
        let o = sieve_ops::attention(qkv, context.documents, self.qkv.spec(None)) * gate;
        self.o_proj.forward_add(o.flatten(2, 3), residual)
    }
}

/// One layer between an embedding and a head that is tied to it.
#[derive(Module, Debug)]
struct Model<B: Backend> {
    embedding: TokenEmbedding<B>,
    norm: RmsNorm<B>,
    attention: GatedAttention<B>,
    mlp_norm: RmsNorm<B>,
    mlp: SwigluMlp<B>,
    head: LmHead<B>,
}

impl<B: SieveBackend> Model<B> {
    /// Draws all weights from one seed; the head is the embedding's, so it has none of its own.
    fn new(shape: &ModelShape, device: &B::Device) -> Self {
        let init = &mut WeightInit::new(0, shape.initializer_range);
        let norm = |init: &mut WeightInit| RmsNorm::new(shape.d_model, shape.rms_norm_eps, init, device);
        Self {
            embedding: TokenEmbedding { weight: init.normal([shape.vocab_size, shape.d_model], device) },
            norm: norm(init),
            attention: GatedAttention::new(shape, init, device),
            mlp_norm: norm(init),
            mlp: SwigluMlp::new(shape.d_model, shape.d_ff, init, device),
            head: LmHead { norm: norm(init), lm_head: None },
        }
    }

    /// Sum of the tokens' cross-entropies, in nats.
    fn loss(&self, ids: Tensor<B, 2, Int>, labels: Tensor<B, 2, Int>, context: &LayerContext<'_, B>) -> Tensor<B, 1> {
        let x = self.embedding.forward(ids);
        let x = self.attention.forward(self.norm.forward(x.clone()), x, context);
        let x = self.mlp.forward(x, &self.mlp_norm, Residual::Stream, context, &mut PassState::default());
        self.head.loss(x, labels, &self.embedding)
    }
}

/// Learns a text of numbers that repeats after seven tokens; returns the first and the last loss, nats per token.
fn train<B: AutodiffBackend + SieveBackend>(device: &B::Device) -> (f32, f32) {
    let shape = ModelShape {
        d_model: 64,
        d_ff: 128,
        num_layers: 1,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 16,
        vocab_size: 50,
        rope_theta: 1e4,
        rms_norm_eps: 1e-6,
        tie_word_embeddings: true,
        max_seq_len: 64,
        initializer_range: 0.1,
        residual_scale: false,
        qk_norm: true,
        qkv_bias: false,
        attention_sinks: false,
        rope_scaling: None,
        rope_layers: RopeLayers::default(),
        attention: Attention::Mha, // not read here: the layers are this program's
        layers: LayerPattern::default(),
    };
    let (batch, seq_len) = (4, shape.max_seq_len);
    let token = |row: usize, at: usize| ((at % 7) * (row + 3) % 50) as i32;
    let tokens = |shift: usize| {
        let rows = (0..batch).flat_map(|row| (0..seq_len).map(move |at| token(row, at + shift)));
        let data = TensorData::new(rows.collect::<Vec<_>>(), [batch, seq_len]);
        Tensor::<B, 2, Int>::from_data(data, device)
    };
    let documents = Documents::whole_rows([batch, seq_len], device);
    let rope = RotaryEmbedding::new(shape.head_dim, seq_len, shape.rope_theta, device);
    let context = LayerContext::new(&documents, &rope);
    let (ids, labels) = (tokens(0), tokens(1));
    let mut model = Model::<B>::new(&shape, device);
    let mut optimizer = AdamConfig::new().init();
    let mut losses = Vec::new();
    for _step in 0..40 {
        let loss = model.loss(ids.clone(), labels.clone(), &context) / (batch * seq_len) as f64;
        let value = loss.clone().into_data().iter::<f32>().next();
        losses.push(value.unwrap_or(f32::NAN));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(3e-3, model, gradients);
    }
    (losses[0], losses[losses.len() - 1])
}

fn main() {
    let (first, last) = train::<Autodiff<Flex>>(&Default::default());
    println!("loss: {first:.3} nats per token before, {last:.3} after 40 steps");
    assert!(last < first, "the gradients of the layer lead down");
}
