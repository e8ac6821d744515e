//! One forward pass over a prompt, with its loss and time, and the comparison of two passes.
use crate::InferError;
use crate::input::ids;
use burn::tensor::activation::log_softmax;
use burn::tensor::{DType, Int, Tensor, TensorData};
use sieve_nn::{HostOperands, LayerAttention, LayerContext, LayerOperands, Qwen3};
use sieve_ops::{DeviceBackend, Documents};
use std::time::Instant;

/// Positions whose logits are held at once.
pub const LOGIT_TOKENS: usize = 256;

/// Result of a forward pass over one window.
#[derive(Clone, Debug)]
pub struct Pass<B: DeviceBackend> {
    /// The last block's output `[1, num_tokens, d_model]`.
    pub hidden: Tensor<B, 3>,
    /// Sum of the window's cross-entropies, in nats.
    pub nats: f64,
    /// Milliseconds from token ids to the last block's output.
    pub prefill_ms: f64,
}

/// Runs the model with its own attention. All tokens of `window` but the last are inputs; all but the first are
/// predicted.
pub fn own_pass<B: DeviceBackend>(model: &Qwen3<B>, window: &[u32], device: &B::Device) -> Result<Pass<B>, InferError> {
    pass(model, window, device, |ids, context| Ok(model.hidden(ids, context)))
}

/// As [`own_pass`], with `attend` as the attention of dense layers; it gets operands on the host.
pub fn attending_pass<B: DeviceBackend>(
    model: &Qwen3<B>,
    window: &[u32],
    device: &B::Device,
    attend: &mut dyn FnMut(HostOperands<'_>) -> Result<Vec<f32>, InferError>,
) -> Result<Pass<B>, InferError> {
    let attend = &mut |operands: &LayerOperands<B>| operands.on_host(&mut *attend);
    layers_pass(model, window, device, attend)
}

/// Like [`attending_pass`], but `attend` gets the operands on the model's device.
pub fn layers_pass<B: DeviceBackend>(
    model: &Qwen3<B>,
    window: &[u32],
    device: &B::Device,
    attend: &mut LayerAttention<'_, B, InferError>,
) -> Result<Pass<B>, InferError> {
    pass(model, window, device, |ids, context| model.hidden_attending(ids, context, attend))
}

/// As [`own_pass`]; `hidden` computes the last block's output.
fn pass<B: DeviceBackend>(
    model: &Qwen3<B>,
    window: &[u32],
    device: &B::Device,
    hidden: impl FnOnce(Tensor<B, 2, Int>, &LayerContext<'_, B>) -> Result<Tensor<B, 3>, InferError>,
) -> Result<Pass<B>, InferError> {
    let num_tokens = window.len() - 1;
    let shape = [1, num_tokens];
    let documents = Documents::whole_rows(shape, device);
    let rope = model.rope(num_tokens, device);
    let context = LayerContext::new(&documents, &rope);
    let labels: Vec<i32> = window[1..].iter().map(|&token| token as i32).collect();
    let labels = Tensor::from_data(TensorData::new(labels, shape), device);
    let ids = ids(&window[..num_tokens], shape, device);
    let started = Instant::now();
    let hidden = hidden(ids, &context)?;
    // On a GPU the launches are only queued. Reading one row back waits for them.
    let _row = hidden.clone().narrow(1, num_tokens - 1, 1).into_data();
    let prefill_ms = milliseconds(started);
    let losses = model.token_losses_of(hidden.clone(), labels).into_data();
    let nats: f64 = losses.iter::<f64>().sum();
    if nats.is_finite() { Ok(Pass { hidden, nats, prefill_ms }) } else { Err(InferError::NotFinite(num_tokens)) }
}

/// How far the predictions under a selector agree with the dense model's. All fields are sums over positions.
#[derive(Clone, Copy, Debug, Default)]
pub struct Agreement {
    /// Kullback-Leibler divergence in nats: `sum p ln(p / q)`, p of the dense model, q under the selector.
    pub kl: f64,
    /// Positions whose likeliest token is the dense model's.
    pub same_first: f64,
    /// Cosine similarity of the last block's output, dense and under the selector.
    pub cosine: f64,
}

impl Agreement {
    /// Compares two passes by their last blocks' outputs, `[1, num_tokens, d_model]`.
    pub fn of<B: DeviceBackend>(model: &Qwen3<B>, dense: &Tensor<B, 3>, sparse: &Tensor<B, 3>) -> Self {
        let num_tokens = dense.dims()[1];
        let mut sum = Self::default();
        for first in (0..num_tokens).step_by(LOGIT_TOKENS) {
            let count = LOGIT_TOKENS.min(num_tokens - first);
            let [p, q] = [dense, sparse].map(|hidden| {
                let hidden = hidden.clone().narrow(1, first, count);
                let logits = model.logits_of(hidden);
                log_softmax(logits.cast(DType::F32), 2)
            });
            sum.kl += number((p.clone().exp() * (p.clone() - q.clone())).sum());
            sum.same_first += number(p.argmax(2).equal(q.argmax(2)).int().float().sum());
        }
        let rows = |x: &Tensor<B, 3>| x.clone().reshape([num_tokens as i32, -1]);
        sum.cosine = num_tokens as f64 * cosine(rows(dense), rows(sparse));
        sum
    }
}

/// Mean cosine between the rows of `a` and `b`, `[rows, width]`, in f32.
pub fn cosine<B: DeviceBackend>(a: Tensor<B, 2>, b: Tensor<B, 2>) -> f64 {
    let [a, b] = [a, b].map(|x| x.cast(DType::F32));
    let dot = |a: &Tensor<B, 2>, b: &Tensor<B, 2>| (a.clone() * b.clone()).sum_dim(1);
    let size = (dot(&a, &a).sqrt() * dot(&b, &b).sqrt()).clamp_min(f32::MIN_POSITIVE);
    number((dot(&a, &b) / size).mean())
}

/// The one number of a tensor on the device.
pub fn number<B: DeviceBackend>(x: Tensor<B, 1>) -> f64 {
    x.into_data().iter::<f64>().next().unwrap_or(f64::NAN)
}

/// Milliseconds since `started`.
pub fn milliseconds(started: Instant) -> f64 {
    started.elapsed().as_secs_f64() * 1e3
}
