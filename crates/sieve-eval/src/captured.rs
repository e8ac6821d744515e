//! A layer's operands as the dense model made them, and what a selector makes of them; where the operands are.
use crate::EvalError;
use crate::chunks::{Cost, KeptMasks, call, prefill, prefill_on_device};
use crate::pass::{cosine, milliseconds, number};
use crate::selection::{Selection, layer_shape};
use crate::selectors::LayerMeasure;
use burn::tensor::{DType, Tensor};
use sieve_core::KeyMask;
use sieve_nn::LayerOperands;
use sieve_ops::{DeviceBackend, SparseOutput, has_sparse_attention, sparse_attention, upload_mask};
use sieve_select::{CallShape, DecodeSession, dense_attention, recall};
use std::time::Instant;

/// A layer with what dense attention says.
pub(crate) struct Captured<B: DeviceBackend> {
    pub(crate) operands: LayerOperands<B>,
    dense: Output<B>,
    /// Its output on the device, `[1, num_tokens, num_heads, head_dim]`.
    o: Tensor<B, 4>,
    /// Milliseconds of dense attention.
    pub(crate) dense_ms: f64,
}

/// What attention gave: on the device where its kernels took the call, else on the host.
enum Output<B: DeviceBackend> {
    Device(SparseOutput<B>),
    /// o `[num_tokens, num_heads, head_dim]`, lse `[num_heads, num_tokens]`; a stream has no lse.
    Host(Vec<f32>, Option<Vec<f32>>),
}

/// A selector's attention of a layer.
pub(crate) struct Done<B: DeviceBackend> {
    output: Output<B>,
    pub(crate) cost: Cost,
    /// Of selection and attention; copies to the host are not part of it.
    pub(crate) milliseconds: f64,
}

impl<B: DeviceBackend> Captured<B> {
    /// Dense attention of a layer by the path that selectors take, and its output for the next layer.
    pub(crate) fn of(operands: &LayerOperands<B>) -> Result<(Self, Tensor<B, 4>), EvalError> {
        let captured = |dense, o: &Tensor<B, 4>, dense_ms| Self {
            operands: operands.clone(),
            dense,
            o: o.clone(),
            dense_ms,
        };
        if has_sparse_attention(&operands.qkv) {
            let started = Instant::now();
            let dense = dense_on_device(operands)?;
            let o = dense.o.clone();
            return Ok((captured(Output::Device(dense), &o, milliseconds(started)), o));
        }
        let (mut lse, mut host, mut dense_ms) = (Vec::new(), Vec::new(), 0.0);
        let o = operands.on_host(|operands| {
            let started = Instant::now();
            let dense = dense_attention(&call(operands)?)?;
            dense_ms = milliseconds(started);
            lse = dense.lse;
            host.clone_from(&dense.o);
            Ok::<_, EvalError>(dense.o)
        })?;
        Ok((captured(Output::Host(host, Some(lse)), &o, dense_ms), o))
    }

    /// Mean cosine of the layer's attention in another pass to the dense one, a token's heads as one row.
    pub(crate) fn cosine(&self, o: &Tensor<B, 4>) -> f64 {
        let rows = |x: &Tensor<B, 4>| x.clone().reshape([x.dims()[1] as i32, -1]);
        cosine(rows(&self.o), rows(o))
    }

    /// A selector's attention of the layer: on the device where [`Selection::attends_on_device`].
    pub(crate) fn run(&self, selection: &Selection) -> Result<Done<B>, EvalError> {
        let operands = &self.operands;
        let selector = selection.selectors().of(operands.layer);
        if selector.is_dense_layer(operands.layer) && has_sparse_attention(&operands.qkv) {
            let started = Instant::now();
            return Ok(Done {
                output: Output::Device(dense_on_device(operands)?),
                cost: Cost::of_density(1.0),
                milliseconds: milliseconds(started),
            });
        }
        if selection.attends_on_device(operands) {
            let started = Instant::now();
            // A layer's clock has its own selection.
            let (chunk, mut kept) = (selection.chunk(), KeptMasks::new());
            let (output, cost) = prefill_on_device(selector, operands, chunk, true, &mut kept)?;
            // The clock waits for the device.
            let _last = output.lse.clone().narrow(2, 0, 1).into_data();
            return Ok(Done {
                output: Output::Device(output),
                cost,
                milliseconds: milliseconds(started),
            });
        }
        let mut done = None;
        operands.on_host(|operands| {
            let started = Instant::now();
            let (o, lse, cost) = match selector.is_token_by_token() {
                true => {
                    let mut session = DecodeSession::new(selector, layer_shape(operands))?;
                    let o = session.stream(operands.q, operands.k, operands.v)?;
                    let shape = call(operands)?.shape;
                    let pairs = shape.causal_pairs() * shape.num_heads as u64;
                    let density = session.pairs_read() as f64 / pairs as f64;
                    (o, None, Cost::of_density(density))
                }
                false => {
                    let done = prefill(selector, operands, selection.chunk())?;
                    (done.o, Some(done.lse), done.cost)
                }
            };
            let milliseconds = milliseconds(started);
            let output = o.clone();
            done = Some(Done {
                output: Output::Host(o, lse),
                cost,
                milliseconds,
            });
            Ok::<_, EvalError>(output)
        })?;
        let mut done = done.expect("the layer was attended to");
        // Copies of a host's own memory are none.
        if has_sparse_attention(&operands.qkv) {
            let elements: usize = operands.qkv.dims().into_iter().product();
            done.cost.host_bytes += (elements * operands.qkv.dtype().size()) as u64;
        }
        Ok(done)
    }

    /// Compares a selector's attention with dense attention: density, recall and error of the output.
    pub(crate) fn compare(&self, done: &Done<B>) -> Result<LayerMeasure, EvalError> {
        let (recall, output_error) = match (&done.output, &self.dense) {
            (Output::Device(sparse), Output::Device(dense)) => {
                let mass = (sparse.lse.clone() - dense.lse.clone()).exp().clamp_max(1.0);
                let [o, dense] = [&sparse.o, &dense.o].map(|o| o.clone().cast(DType::F32));
                let square = |x: Tensor<B, 4>| number((x.clone() * x).sum());
                let size = square(dense.clone()).max(f64::MIN_POSITIVE);
                let error = (square(o - dense) / size).sqrt();
                (Some(number(mass.mean())), error)
            }
            (Output::Host(o, lse), Output::Host(dense_o, dense_lse)) => {
                let kept = lse.as_deref().zip(dense_lse.as_deref());
                let kept = kept.map(|(lse, dense)| recall(lse, dense));
                (kept, relative_error(o, dense_o))
            }
            (Output::Host(o, lse), Output::Device(dense)) => {
                let host = |x: burn::tensor::TensorData| x.iter::<f32>().collect::<Vec<f32>>();
                let dense_lse = host(dense.lse.clone().into_data());
                let kept = lse.as_deref().map(|lse| recall(lse, &dense_lse));
                let dense_o = host(dense.o.clone().into_data());
                (kept, relative_error(o, &dense_o))
            }
            // The dense attention of a layer is on the device wherever a selector's is.
            (Output::Device(_), Output::Host(..)) => (None, f64::NAN),
        };
        Ok(LayerMeasure {
            density: done.cost.density,
            recall,
            output_error,
            cosine: None,
        })
    }
}

/// Dense attention by the kernel of masks, with every key kept.
fn dense_on_device<B: DeviceBackend>(operands: &LayerOperands<B>) -> Result<SparseOutput<B>, EvalError> {
    let [_, tokens, _, head_dim] = operands.qkv.dims();
    let all = KeyMask::dense(CallShape::new(
        [tokens; 2],
        [operands.num_heads, operands.num_kv_heads],
        head_dim,
    ));
    let refused = |reason: String| EvalError::kernel("dense", reason);
    let mask = upload_mask::<B>(&all, &operands.qkv.device()).map_err(|error| refused(error.to_string()))?;
    let scale = 1.0 / (head_dim as f64).sqrt();
    let dense = sparse_attention(operands.qkv.clone(), &mask, scale).map_err(refused)?;
    // The clock waits for the device.
    let _last = dense.lse.clone().narrow(2, 0, 1).into_data();
    Ok(dense)
}

fn relative_error(a: &[f32], b: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let error: f64 = a
        .iter()
        .zip(b)
        .map(|(a, b)| square(f64::from(*a) - f64::from(*b)))
        .sum();
    let size: f64 = b.iter().map(|b| square(f64::from(*b))).sum();
    (error / size.max(f64::MIN_POSITIVE)).sqrt()
}
