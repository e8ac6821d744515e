//! A layer's q, k and v from the dense model's forward pass: dense attention on them, and a selector's attention beside
//! it. Both run on the device that holds the operands, or on the host if the device has no kernel.
use crate::selectors::LayerMeasure;
use burn::tensor::{DType, Tensor};
use sieve_core::KeyMask;
use sieve_infer::chunks::{Cost, KeptMasks, call, prefill, prefill_on_device};
use sieve_infer::device_steps;
use sieve_infer::pass::{cosine, milliseconds, number};
use sieve_infer::{InferError, Selection, copied_bytes, dense_pairs, layer_shape};
use sieve_nn::{LayerCache, LayerOperands};
use sieve_ops::{DeviceBackend, SparseOutput, has_sparse_attention, sparse_attention, upload_mask};
use sieve_select::{DecodeSession, Selector, dense_attention, recall};
use std::time::Instant;

/// A layer's operands with its dense attention.
pub(crate) struct Captured<B: DeviceBackend> {
    pub(crate) operands: LayerOperands<B>,
    dense: Output<B>,
    /// Output of dense attention, on the device, `[1, num_tokens, num_heads, head_dim]`.
    o: Tensor<B, 4>,
    /// Milliseconds of dense attention.
    pub(crate) dense_ms: f64,
}

/// Attention output, on the device or on the host.
enum Output<B: DeviceBackend> {
    /// Computed by a GPU kernel, stays on the device.
    Device(SparseOutput<B>),
    /// o `[num_tokens, num_heads, head_dim]`, lse `[num_heads, num_tokens]`. Reading token by token gives no lse.
    Host(Vec<f32>, Option<Vec<f32>>),
}

/// Result of a selector's attention in one layer.
pub(crate) struct Done<B: DeviceBackend> {
    output: Output<B>,
    pub(crate) cost: Cost,
    /// Time of selection and attention, without copies to the host.
    pub(crate) milliseconds: f64,
}

impl<B: DeviceBackend> Captured<B> {
    /// Runs dense attention of a layer on the same path (device or host) as selectors. Also returns its output, which
    /// the model's next layer needs.
    pub(crate) fn of(operands: &LayerOperands<B>) -> Result<(Self, Tensor<B, 4>), InferError> {
        let captured =
            |dense, o: &Tensor<B, 4>, dense_ms| Self { operands: operands.clone(), dense, o: o.clone(), dense_ms };
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
            Ok::<_, InferError>(dense.o)
        })?;
        Ok((captured(Output::Host(host, Some(lse)), &o, dense_ms), o))
    }

    /// Mean cosine between the dense output and `o`, the layer's output in another pass. One row is one token's heads.
    pub(crate) fn cosine(&self, o: &Tensor<B, 4>) -> f64 {
        let rows = |x: &Tensor<B, 4>| x.clone().reshape([x.dims()[1] as i32, -1]);
        cosine(rows(&self.o), rows(o))
    }

    /// Runs a selector's attention on the layer's operands: on the device if [`Selection::attends_on_device`].
    pub(crate) fn run(&self, selection: &Selection) -> Result<Done<B>, InferError> {
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
        if selector.is_token_by_token() && device_steps::streams(selector, operands) {
            return self.stream_on_device(selector);
        }
        if selection.attends_on_device(operands) { self.run_on_device(selection) } else { self.run_on_host(selection) }
    }

    /// Reads the text token by token on the device.
    fn stream_on_device(&self, selector: &Selector) -> Result<Done<B>, InferError> {
        let (operands, started) = (&self.operands, Instant::now());
        let (mut cache, mut scratch) = (LayerCache::Empty, Default::default());
        let (o, pairs) = device_steps::stream(selector, operands, &mut cache, &mut scratch)?;
        // Reading a value back waits for the device, so that the clock measures the work.
        let _last = o.clone().narrow(1, operands.num_tokens() - 1, 1).into_data();
        let milliseconds = milliseconds(started);
        let no_lse = None;
        Ok(Done {
            output: Output::Host(o.into_data().iter::<f32>().collect(), no_lse),
            cost: Cost::of_density(pairs / dense_pairs(operands.num_tokens(), operands.num_heads)),
            milliseconds,
        })
    }

    /// Selection and attention on the device, with the time until the last value is there.
    fn run_on_device(&self, selection: &Selection) -> Result<Done<B>, InferError> {
        let selector = selection.selectors().of(self.operands.layer);
        let started = Instant::now();
        // No mask is reused from another layer: each layer's time includes its own selection.
        let mut kept = KeptMasks::new();
        let has_clock = true;
        let (output, cost) = prefill_on_device(selector, &self.operands, selection.chunk(), has_clock, &mut kept)?;
        // Reading a value back waits for the device, so that the clock measures the work.
        let _last = output.lse.clone().narrow(2, 0, 1).into_data();
        Ok(Done { output: Output::Device(output), cost, milliseconds: milliseconds(started) })
    }

    /// Selection and attention on the host, from a copy of the operands.
    fn run_on_host(&self, selection: &Selection) -> Result<Done<B>, InferError> {
        let selector = selection.selectors().of(self.operands.layer);
        let mut done = None;
        self.operands.on_host(|operands| {
            let started = Instant::now();
            let (o, lse, cost) = if selector.is_token_by_token() {
                let mut session = DecodeSession::new(selector, layer_shape(operands))?;
                let o = session.stream(operands.q, operands.k, operands.v)?;
                let shape = call(operands)?.shape;
                let pairs = shape.causal_pairs() * shape.num_heads as u64;
                let density = session.pairs_read() as f64 / pairs as f64;
                (o, None, Cost::of_density(density))
            } else {
                let prefilled = prefill(selector, operands, selection.chunk())?;
                (prefilled.o, Some(prefilled.lse), prefilled.cost)
            };
            let milliseconds = milliseconds(started);
            let output = o.clone();
            done = Some(Done { output: Output::Host(o, lse), cost, milliseconds });
            Ok::<_, InferError>(output)
        })?;
        let mut done = done.expect("the layer was attended to");
        done.cost.host_bytes += copied_bytes(&self.operands);
        Ok(done)
    }

    /// Compares a selector's attention with dense attention: density, recall and error of the output.
    pub(crate) fn compare(&self, done: &Done<B>) -> Result<LayerMeasure, InferError> {
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
                let both = lse.as_deref().zip(dense_lse.as_deref());
                (both.map(|(lse, dense)| recall(lse, dense)), relative_error(o, dense_o))
            }
            (Output::Host(o, lse), Output::Device(dense)) => {
                let host = |x: burn::tensor::TensorData| x.iter::<f32>().collect::<Vec<f32>>();
                let dense_lse = host(dense.lse.clone().into_data());
                let dense_o = host(dense.o.clone().into_data());
                (lse.as_deref().map(|lse| recall(lse, &dense_lse)), relative_error(o, &dense_o))
            }
            // Does not occur: `Self::of` uses the device whenever a selector can.
            (Output::Device(_), Output::Host(..)) => (None, f64::NAN),
        };
        Ok(LayerMeasure {
            density: done.cost.density,
            recall,
            output_error,
            // Only a pass of the whole model gives it.
            cosine: None,
        })
    }
}

/// Dense attention by the sparse kernel, with a mask that keeps every key.
fn dense_on_device<B: DeviceBackend>(operands: &LayerOperands<B>) -> Result<SparseOutput<B>, InferError> {
    let shape = operands.shape(operands.num_tokens());
    let all = KeyMask::dense(shape);
    let refused = |reason: String| InferError::kernel("dense", reason);
    let mask = upload_mask::<B>(&all, &operands.qkv.device()).map_err(|error| refused(error.to_string()))?;
    let scale = 1.0 / (shape.head_dim as f64).sqrt();
    let dense = sparse_attention(operands.qkv.clone(), &mask, scale).map_err(refused)?;
    // Reading a value back waits for the device, so that the clock measures the work.
    let _last = dense.lse.clone().narrow(2, 0, 1).into_data();
    Ok(dense)
}

/// `|a - b| / |b|` by Euclidean norms.
fn relative_error(a: &[f32], b: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let error: f64 = a.iter().zip(b).map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
    let size: f64 = b.iter().map(|b| square(f64::from(*b))).sum();
    (error / size.max(f64::MIN_POSITIVE)).sqrt()
}
