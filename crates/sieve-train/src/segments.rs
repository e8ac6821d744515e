//! Forward and backward over the model's segments: embedding, blocks, head with loss.
//!
//! Each segment is a graph of its own. The forward pass cuts the graph between segments; the backward pass walks them from
//! the last and seeds each with the gradient of its output. A block's graph is freed as soon as its gradient is known.
use crate::{DeviceBatch, GradientBuffer};
use burn::tensor::{Int, Tensor};
use sieve_nn::{LayerContext, Qwen3};
use sieve_ops::{RotaryEmbedding, TrainBackend, seed_gradient};

/// What one micro-batch yields beside its gradients.
#[derive(Clone, Debug)]
pub struct MicroBatchResult<B: TrainBackend> {
    /// Summed cross-entropy times `loss_scale`, `[1]`.
    pub loss: Tensor<B::InnerBackend, 1>,
    /// DMA's masks by layer, `[batch, num_kv_heads, seq_len]` each; empty for other kinds.
    pub expire: Vec<Tensor<B, 3, Int>>,
}

/// Adds the gradients of `loss_scale * sum of cross-entropies` of one micro-batch to `gradients`.
///
/// With `loss_scale = 1 / labels of the whole step`, micro-batches add up to the mean over the step.
pub fn accumulate_gradients<B: TrainBackend>(
    model: &Qwen3<B>,
    batch: &DeviceBatch<B>,
    rope: &RotaryEmbedding<B>,
    loss_scale: f64,
    gradients: &mut GradientBuffer<B>,
) -> MicroBatchResult<B> {
    let context = LayerContext::new(&batch.documents, rope);
    let embedded = model.embed_tokens.forward(batch.tokens.clone());

    let mut expire = Vec::new();
    let mut joints = Vec::with_capacity(model.layers.len());
    let mut stream = embedded.clone().inner();
    for layer in &model.layers {
        let input = Tensor::<B, 3>::from_inner(stream).require_grad();
        let output = layer.forward(input.clone(), &context);
        expire.extend(output.expire);
        stream = output.x.clone().inner();
        joints.push((input, output.x));
    }

    let input = Tensor::<B, 3>::from_inner(stream).require_grad();
    let loss = model
        .head
        .loss(input.clone(), batch.labels.clone(), &model.embed_tokens);
    let loss = loss.mul_scalar(loss_scale);
    let value = loss.clone().inner();
    let mut pass = loss.backward();
    gradients.collect(&model.head, &mut pass);
    // The tied embedding is a parameter of two segments.
    gradients.collect(&model.embed_tokens, &mut pass);
    let mut dy = input
        .grad_remove(&mut pass)
        .expect("the loss depends on the stream");

    for (layer, (input, output)) in model.layers.iter().zip(joints).rev() {
        let mut pass = seed_gradient(output, Tensor::from_inner(dy)).backward();
        gradients.collect(layer, &mut pass);
        dy = input
            .grad_remove(&mut pass)
            .expect("a block's output depends on its input");
    }
    let mut pass = seed_gradient(embedded, Tensor::from_inner(dy)).backward();
    gradients.collect(&model.embed_tokens, &mut pass);

    MicroBatchResult {
        loss: value,
        expire,
    }
}
