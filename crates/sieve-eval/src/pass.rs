//! One pass over a prompt, with its loss and its time.
use crate::EvalError;
use crate::input::ids;
use crate::selection::Selection;
use burn::tensor::{Int, Tensor, TensorData};
use sieve_nn::{HostOperands, LayerAttention, LayerContext, LayerOperands, Qwen3};
use sieve_ops::{DeviceBackend, Documents};
use std::time::Instant;

/// What a pass gave.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pass {
    /// Cross-entropy of the window's predictions, summed.
    pub(crate) nats: f64,
    /// Milliseconds from token ids to the last block's output.
    pub(crate) prefill_ms: f64,
}

/// A window through the model with its own attention: all its tokens but the last go in.
pub(crate) fn own_pass<B: DeviceBackend>(
    model: &Qwen3<B>,
    window: &[u32],
    device: &B::Device,
) -> Result<Pass, EvalError> {
    pass(model, window, device, |ids, context| Ok(model.hidden(ids, context)))
}

/// The same with `attend` on the host as the attention of dense layers.
pub(crate) fn attending_pass<B: DeviceBackend>(
    model: &Qwen3<B>,
    window: &[u32],
    device: &B::Device,
    attend: &mut dyn FnMut(HostOperands<'_>) -> Result<Vec<f32>, EvalError>,
) -> Result<Pass, EvalError> {
    let attend = &mut |operands: &LayerOperands<B>| operands.on_host(&mut *attend);
    layers_pass(model, window, device, attend)
}

/// The same with a selector, which computes where its device does.
pub(crate) fn selecting_pass<B: DeviceBackend>(
    model: &Qwen3<B>,
    window: &[u32],
    device: &B::Device,
    selection: &mut Selection,
) -> Result<Pass, EvalError> {
    layers_pass(model, window, device, &mut |operands| selection.attend(operands))
}

/// The same with `attend`, which is given a layer's operands where they are.
pub(crate) fn layers_pass<B: DeviceBackend>(
    model: &Qwen3<B>,
    window: &[u32],
    device: &B::Device,
    attend: &mut LayerAttention<'_, B, EvalError>,
) -> Result<Pass, EvalError> {
    pass(model, window, device, |ids, context| {
        model.hidden_attending(ids, context, attend)
    })
}

fn pass<B: DeviceBackend>(
    model: &Qwen3<B>,
    window: &[u32],
    device: &B::Device,
    hidden: impl FnOnce(Tensor<B, 2, Int>, &LayerContext<'_, B>) -> Result<Tensor<B, 3>, EvalError>,
) -> Result<Pass, EvalError> {
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
    // A GPU has only been told what to do: wait for one row.
    let _row = hidden.clone().narrow(1, num_tokens - 1, 1).into_data();
    let prefill_ms = milliseconds(started);
    let losses = model.head.token_losses(hidden, labels, &model.embed_tokens).into_data();
    let nats: f64 = losses.iter::<f64>().sum();
    match nats.is_finite() {
        true => Ok(Pass { nats, prefill_ms }),
        false => Err(EvalError::NotFinite { num_tokens }),
    }
}

pub(crate) fn milliseconds(started: Instant) -> f64 {
    started.elapsed().as_secs_f64() * 1e3
}
