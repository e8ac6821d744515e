//! A selector in place of a dense model's attention, with statistics of its calls.
use crate::InferError;
use crate::chunks::{Cost, KeptMasks, calls_of, prefill, prefill_on_device};
use crate::device_steps::{self, dense};
use burn::tensor::Tensor;
use serde::Serialize;
use sieve_core::ModelShape;
use sieve_nn::{HostOperands, LayerCache, LayerOperands};
use sieve_ops::{DeviceBackend, has_sparse_attention};
use sieve_select::{DecodeSession, LayerSelectors, LayerShape, Method, Phase, Selector};
use std::ops::AddAssign;
use std::time::Instant;

/// The selectors of a model's layers, with their state while the model runs.
#[derive(Clone, Debug)]
pub struct Selection {
    selectors: LayerSelectors,
    /// The selectors for tokens after the prompt; dense in layers with a prefill method.
    steps: LayerSelectors,
    /// Tokens of a prompt's chunk; `None` reads a prompt in one call.
    chunk: Option<usize>,
    /// Whether decode methods also read the prompt, token by token; otherwise their prompts are dense.
    streams: bool,
    /// Statistics of each layer's selector.
    totals: Vec<SelectionTotals>,
    /// For each layer, the host's state of the text being generated. Layers that decode on the device have none.
    sessions: Vec<Option<DecodeSession>>,
    /// Masks of the last prompt that several layers share.
    kept: KeptMasks,
}

/// The code path that consecutive layers took.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LayerPath {
    /// Index of the first of the layers.
    pub first: usize,
    /// Index of the last of the layers.
    pub last: usize,
    /// The selector, and where the selection and the attention ran.
    pub path: String,
}

/// Statistics of a selector, summed over calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct SelectionTotals {
    /// Number of calls. A layer has one for each chunk of a prompt, and one for each generated token.
    pub calls: u64,
    /// Calls that ran dense: short calls, calls in a dense layer, and calls in which the method keeps everything.
    pub dense_calls: u64,
    /// Calls whose attention a GPU kernel computed; the others ran on the CPU.
    pub kernel_calls: u64,
    /// Calls whose masks were made on the device; other masks were made on the host.
    pub device_selections: u64,
    /// Bytes of queries, keys, values and their means that were copied from the device to the host.
    pub host_bytes: u64,
    /// Choices of a query head (with `gqa=mean`, of a group) that became dense because a score was NaN.
    pub nan_lists: u64,
    /// Computed pairs of a query and a key, of all query heads.
    pub pairs: f64,
    /// Query-key pairs that dense attention would compute.
    pub dense_pairs: f64,
    /// Seconds spent on choosing masks on the host.
    pub select_seconds: f64,
    /// Seconds of selection and attention on the host. GPU time is not included.
    pub seconds: f64,
}

impl SelectionTotals {
    /// Computed pairs over pairs of dense attention.
    pub fn density(&self) -> f64 {
        if self.dense_pairs > 0.0 { self.pairs / self.dense_pairs } else { 1.0 }
    }

    /// Adds the statistics of the calls on one prompt.
    fn add(&mut self, cost: Cost, num_tokens: usize, num_heads: usize) {
        let dense_pairs = dense_pairs(num_tokens, num_heads);
        self.dense_pairs += dense_pairs;
        self.pairs += cost.density * dense_pairs;
        self.calls += cost.calls;
        self.dense_calls += cost.dense_calls;
        self.nan_lists += cost.nan_lists;
        self.select_seconds += cost.select_seconds;
    }

    /// Reads a text token by token from its first token, and adds the statistics.
    fn stream(&mut self, session: &mut DecodeSession, operands: HostOperands<'_>) -> Result<Vec<f32>, InferError> {
        let o = session.stream(operands.q, operands.k, operands.v)?;
        self.calls += 1;
        self.pairs += session.pairs_read() as f64;
        self.dense_pairs += dense_pairs(operands.shape.num_queries, operands.shape.num_heads);
        Ok(o)
    }

    /// Adds the statistics of one generated token, or of a prompt in a dense layer.
    fn add_step(&mut self, pairs: f64, dense_pairs: f64) {
        self.calls += 1;
        self.dense_calls += u64::from(pairs >= dense_pairs);
        self.pairs += pairs;
        self.dense_pairs += dense_pairs;
    }

    /// Adds a generated token, or a text, whose attention ran on the device; with `is_chosen` the device also chose the
    /// keys.
    fn add_device_step(&mut self, is_chosen: bool, pairs: f64, dense_pairs: f64) {
        self.kernel_calls += 1;
        self.device_selections += u64::from(is_chosen);
        self.add_step(pairs, dense_pairs);
    }

    /// Adds a text that the device read token by token.
    fn add_device_stream<B: DeviceBackend>(&mut self, selector: &Selector, operands: &LayerOperands<B>, pairs: f64) {
        let is_chosen = device_steps::is_chosen(selector, operands.layer);
        let dense = dense_pairs(operands.num_tokens(), operands.num_heads);
        self.add_device_step(is_chosen, pairs, dense);
    }

    /// Words for where a layer's keys were chosen and where its attention ran.
    fn path(&self, selector: &Selector, layer: usize) -> String {
        if selector.is_dense_layer(layer) {
            let kernel = self.kernel_calls == self.calls;
            return (if kernel { "dense kernel" } else { "dense on the CPU" }).to_owned();
        }
        let name = selector.name();
        match (self.kernel_calls, self.calls) {
            (0, _) => format!("{name} on the CPU"),
            (kernel, all) if kernel < all => {
                format!("{name}, {kernel} of {all} calls by the block-sparse kernel, the others on the CPU")
            }
            _ => {
                let chosen = match (self.device_selections, self.host_bytes) {
                    (1.., 0) => "on the device",
                    (_, 1..) => "chosen on the CPU",
                    (0, 0) if self.dense_calls == self.calls => "keeping everything",
                    // The keys follow from positions alone, so nothing chose them.
                    (0, 0) => "by positions",
                };
                format!("{name} {chosen}, block-sparse kernel")
            }
        }
    }
}

impl AddAssign for SelectionTotals {
    fn add_assign(&mut self, other: Self) {
        self.calls += other.calls;
        self.dense_calls += other.dense_calls;
        self.kernel_calls += other.kernel_calls;
        self.device_selections += other.device_selections;
        self.host_bytes += other.host_bytes;
        self.nan_lists += other.nan_lists;
        self.pairs += other.pairs;
        self.dense_pairs += other.dense_pairs;
        self.select_seconds += other.select_seconds;
        self.seconds += other.seconds;
    }
}

/// Refuses selectors that rotate keys to other positions, where the model's keys have other angles than the plain ones
/// of `rope_theta`, or no rotation.
fn check_rotations(selectors: &LayerSelectors, shape: &ModelShape) -> Result<(), InferError> {
    for selector in selectors.iter() {
        if shape.rope_scaling.is_some() && selector.moves_keys() {
            let name = selector.name();
            let what = format!(
                "{name} rotates keys to other positions by the plain angles of rope_theta, and this model's are \
                 scaled (model.rope_scaling)"
            );
            let hint = "use a method that leaves keys at their positions: streamingllm without reindex, h2o, quest";
            return Err(InferError::refused(what, hint));
        }
    }
    let nope = (0..shape.num_layers).filter(|&layer| shape.has_dense_attention(layer) && !shape.has_rope(layer));
    for layer in nope {
        let selector = selectors.of(layer);
        if selector.moves_keys() {
            let name = selector.name();
            let what = format!(
                "{name} rotates keys to other positions, and layer {layer} of this model rotates none \
                 (model.rope_layers)"
            );
            let hint = format!("give that layer a method that leaves keys at their positions: {layer}=dense/…");
            return Err(InferError::refused(what, hint));
        }
    }
    Ok(())
}

impl Selection {
    /// Checks that the selectors fit the model. They act in its dense layers; other layers keep their own attention.
    ///
    /// # Errors
    /// A model without a dense layer, or with sinks; selectors for layers that do not exist, or layers without a
    /// selector; settings that no prompt within the context can meet; a method without its file; a method that rotates
    /// keys by other angles than the model.
    pub fn new(selectors: impl Into<LayerSelectors>, shape: &ModelShape) -> Result<Self, InferError> {
        let selectors = selectors.into();
        InferError::require_dense(selectors.name(), shape)?;
        let selectors = selectors.for_layers(shape.num_layers)?;
        let selectors = selectors.map(|selector| selector.for_rope_theta(shape.rope_theta));
        check_rotations(&selectors, shape)?;
        for selector in selectors.iter() {
            selector.check_context(shape.max_seq_len)?;
        }
        let steps = selectors.clone().map(|selector| match selector.phase() {
            Phase::Prefill => Selector { method: Method::Dense, ..selector },
            Phase::Decode | Phase::Both => selector,
        });
        let selection = Self {
            selectors,
            steps,
            chunk: None,
            streams: false,
            totals: vec![SelectionTotals::default(); shape.num_layers],
            sessions: vec![None; shape.num_layers],
            kept: KeptMasks::new(),
        };
        if selection.acts_in_decode() {
            let shape_of = |layer| LayerShape::new([shape.num_heads, shape.num_kv_heads], shape.head_dim, layer);
            for index in (0..shape.num_layers).filter(|&index| shape.has_dense_attention(index)) {
                // Only checks the settings: the session is dropped.
                DecodeSession::new(selection.steps.of(index), shape_of(index))?;
            }
        }
        Ok(selection)
    }

    /// Reads prompts in chunks of this many tokens. Each chunk is a call of its own: its tokens are the queries, and
    /// all tokens so far are the keys.
    ///
    /// # Errors
    /// A chunk of 0; a method that reads token by token; chunks so short that every call would be dense.
    pub fn in_chunks(self, chunk: usize) -> Result<Self, InferError> {
        let name = self.selectors.name();
        let bad = |value: String, hint| Err(InferError::setting("chunk", value, hint));
        if chunk == 0 {
            return bad("0".to_owned(), "use at least 1 token");
        }
        if self.is_token_by_token() {
            return bad(
                format!("{chunk} with {name}, which processes a prompt token by token"),
                "leave --chunk out, or use a prefill method",
            );
        }
        for selector in (self.selectors.iter()).filter(|one| one.method != Method::Dense) {
            let (name, shortest) = (selector.name(), selector.common.min_prefill_tokens);
            if chunk < shortest {
                return bad(
                    format!("{chunk} with {name}:min_prefill_tokens={shortest}, so that every call would be dense"),
                    "use longer chunks, or min_prefill_tokens=0 after the selector's colon",
                );
            }
        }
        Ok(Self { chunk: Some(chunk), ..self })
    }

    /// Lets decode methods also read prompts, token by token, as if the model had generated the prompt.
    ///
    /// # Errors
    /// No layer has a method that reads token by token.
    pub fn as_stream(self) -> Result<Self, InferError> {
        if self.is_token_by_token() {
            Ok(Self { streams: true, ..self })
        } else {
            Err(InferError::setting(
                "stream",
                format!("true with {}, which reads a prompt whole", self.selectors.name()),
                "leave --stream out, or use a decode method",
            ))
        }
    }

    /// Tokens of a prompt's chunk, if prompts are read in chunks.
    pub fn chunk(&self) -> Option<usize> {
        self.chunk
    }

    /// The selector of each layer.
    pub fn selectors(&self) -> &LayerSelectors {
        &self.selectors
    }

    /// The statistics so far, over all layers.
    pub fn totals(&self) -> SelectionTotals {
        let mut sum = SelectionTotals::default();
        for layer in &self.totals {
            sum += *layer;
        }
        sum
    }

    /// The path that each layer has taken. Consecutive layers with the same path form one entry; layers without a call
    /// have none.
    pub fn paths(&self) -> Vec<LayerPath> {
        let mut paths: Vec<LayerPath> = Vec::new();
        for (layer, totals) in self.totals.iter().enumerate() {
            if totals.calls == 0 {
                continue;
            }
            let path = totals.path(self.selectors.of(layer), layer);
            match paths.last_mut() {
                Some(before) if before.path == path && before.last + 1 == layer => before.last = layer,
                _ => paths.push(LayerPath { first: layer, last: layer, path }),
            }
        }
        paths
    }

    /// A copy with all statistics at 0.
    pub fn uncounted(&self) -> Self {
        let mut copy = self.clone();
        copy.totals.fill(SelectionTotals::default());
        copy
    }

    /// Adds the statistics of an [`uncounted`](Self::uncounted) copy.
    pub(crate) fn add_totals(&mut self, copy: &Self) {
        for (layer, more) in self.totals.iter_mut().zip(&copy.totals) {
            *layer += *more;
        }
    }

    /// Whether a layer's method can only run token by token.
    pub fn is_token_by_token(&self) -> bool {
        self.selectors.is_token_by_token()
    }

    /// Whether some layer's selector also acts on tokens after the prompt.
    pub fn acts_in_decode(&self) -> bool {
        self.selectors.acts_in_decode()
    }

    /// Whether a layer's selector acts on whole prompts.
    fn selects_prompts(&self, layer: usize) -> bool {
        let selector = self.selectors.of(layer);
        selector.phase() != Phase::Decode && !selector.is_token_by_token()
    }

    /// Whether a layer's prompt is read token by token.
    fn streams_prompts(&self, layer: usize) -> bool {
        self.streams && !self.selects_prompts(layer)
    }

    /// Whether GPU kernels take the attention of every call on this prompt.
    pub fn attends_on_device<B: DeviceBackend>(&self, operands: &LayerOperands<B>) -> bool {
        let mut calls = calls_of(operands, self.chunk);
        let selector = self.selectors.of(operands.layer);
        !selector.is_token_by_token()
            && has_sparse_attention(&operands.qkv)
            && calls.all(|call| selector.runs_on_device(call, operands.layer, operands.num_layers))
    }

    /// Attention of one document in one layer: on the device if its kernels take it, else on the host.
    ///
    /// # Errors
    /// Operands that the selector refuses.
    pub fn attend<B: DeviceBackend>(&mut self, operands: &LayerOperands<B>) -> Result<Tensor<B, 4>, InferError> {
        let (tokens, layer) = (operands.num_tokens(), operands.layer);
        if self.selectors.of(layer).is_dense_layer(layer) {
            let started = Instant::now();
            let o = dense(operands).o;
            let pairs = dense_pairs(tokens, operands.num_heads);
            let totals = &mut self.totals[layer];
            totals.add_step(pairs, pairs);
            if has_sparse_attention(&operands.qkv) {
                totals.kernel_calls += 1
            } else {
                totals.seconds += started.elapsed().as_secs_f64()
            }
            return Ok(o);
        }
        let selector = self.selectors.of(layer);
        if selector.is_token_by_token() && device_steps::streams(selector, operands) {
            let (mut cache, mut scratch) = (LayerCache::Empty, Default::default());
            let (o, pairs) = device_steps::stream(selector, operands, &mut cache, &mut scratch)?;
            self.totals[layer].add_device_stream(selector, operands, pairs);
            return Ok(o);
        }
        if !self.attends_on_device(operands) {
            self.totals[layer].host_bytes += copied_bytes(operands);
            return operands.on_host(|operands| self.attend_on_host(operands));
        }
        let selector = self.selectors.of(layer);
        let (chunk, kept) = (self.chunk, &mut self.kept);
        let has_clock = false;
        let (output, cost) = prefill_on_device(selector, operands, chunk, has_clock, kept)?;
        let totals = &mut self.totals[layer];
        totals.host_bytes += cost.host_bytes;
        totals.kernel_calls += cost.calls;
        totals.device_selections += cost.device_calls;
        totals.add(cost, tokens, operands.num_heads);
        totals.seconds += cost.select_seconds;
        Ok(output.o)
    }

    /// Attention of one document in one layer, on the host. A decode method reads it token by token.
    ///
    /// # Errors
    /// Operands that the selector refuses.
    fn attend_on_host(&mut self, operands: HostOperands<'_>) -> Result<Vec<f32>, InferError> {
        let started = Instant::now();
        let (tokens, heads) = (operands.shape.num_queries, operands.shape.num_heads);
        let selector = self.selectors.of(operands.layer);
        let totals = &mut self.totals[operands.layer];
        let o = if selector.is_token_by_token() {
            let mut session = DecodeSession::new(selector, layer_shape(operands))?;
            totals.stream(&mut session, operands)?
        } else {
            let done = prefill(selector, operands, self.chunk)?;
            totals.add(done.cost, tokens, heads);
            done.o
        };
        totals.seconds += started.elapsed().as_secs_f64();
        Ok(o)
    }

    /// Attention of the next tokens of one text, in a layer with a decode method: first its prompt, then one token at a
    /// time. `num_tokens` is the length of the text with `operands`' tokens. The prompt is dense, unless the method
    /// also acts on prompts or [`as_stream`](Self::as_stream) was asked for. `cache` receives the layer's keys if it
    /// decodes on the device.
    ///
    /// # Errors
    /// Operands that the selector, or a kernel, refuses.
    pub(crate) fn continue_text<B: DeviceBackend>(
        &mut self,
        operands: &LayerOperands<B>,
        num_tokens: usize,
        cache: &mut LayerCache<B>,
        scratch: &mut B::DecodeScratch,
    ) -> Result<Tensor<B, 4>, InferError> {
        let layer = operands.layer;
        let (steps, width) = (self.steps.of(layer), operands.qkv.dims()[3]);
        let on_device = steps.steps_on_device(width) && has_sparse_attention(&operands.qkv);
        let streams = self.streams_prompts(layer);
        if !on_device || (streams && !device_steps::streams(steps, operands)) {
            self.totals[layer].host_bytes += copied_bytes(operands);
            return operands.on_host(|operands| self.continue_on_host(operands));
        }
        // Without keys so far, these tokens are the prompt.
        if cache.is_empty() {
            if streams {
                let (o, pairs) = device_steps::stream(steps, operands, cache, scratch)?;
                self.totals[layer].add_device_stream(steps, operands, pairs);
                return Ok(o);
            }
            let o = device_steps::keep_prompt(self.steps.of(layer), operands, cache)?;
            return if self.selects_prompts(layer) {
                self.attend(operands)
            } else {
                Ok(o.unwrap_or_else(|| dense(operands).o))
            };
        }
        let (o, pairs, is_chosen) = device_steps::step(self.steps.of(layer), operands, num_tokens, cache, scratch)?;
        let dense = (num_tokens * operands.num_heads) as f64;
        self.totals[layer].add_device_step(is_chosen, pairs, dense);
        Ok(o)
    }

    /// Adds a decoded token to the statistics of each dense layer, where one call ran the whole model and no layer
    /// counted itself. The text has `num_tokens` tokens with this token, and `caches` are the layers' caches after it.
    pub(crate) fn count_call<B: DeviceBackend>(
        &mut self,
        shape: &ModelShape,
        caches: &[LayerCache<B>],
        num_tokens: usize,
    ) {
        let layers = (0..caches.len()).filter(|&layer| shape.has_dense_attention(layer));
        for layer in layers {
            let is_chosen = device_steps::is_chosen(self.steps.of(layer), layer);
            let [read, all] = [caches[layer].num_keys(), num_tokens].map(|keys| (keys * shape.num_heads) as f64);
            self.totals[layer].add_device_step(is_chosen, read, all);
        }
    }

    /// Attention of a layer on the host: the first call of a layer has its prompt, each later one a new token.
    fn continue_on_host(&mut self, operands: HostOperands<'_>) -> Result<Vec<f32>, InferError> {
        let HostOperands { q, k, v, layer, .. } = operands;
        let Some(session) = &mut self.sessions[layer] else {
            let mut session = DecodeSession::new(self.steps.of(layer), layer_shape(operands))?;
            let o = match self.selects_prompts(layer) {
                true => {
                    session.take_prompt(q, k, v)?;
                    self.attend_on_host(operands)?
                }
                false if self.streams => {
                    let started = Instant::now();
                    let totals = &mut self.totals[layer];
                    let o = totals.stream(&mut session, operands)?;
                    totals.seconds += started.elapsed().as_secs_f64();
                    o
                }
                false => session.prompt(q, k, v)?.o,
            };
            self.sessions[layer] = Some(session);
            return Ok(o);
        };
        let (started, before) = (Instant::now(), session.pairs_read());
        let o = session.step(q, k, v)?;
        let read = (session.pairs_read() - before) as f64;
        let dense = (session.len() * operands.shape.num_heads) as f64;
        let totals = &mut self.totals[layer];
        totals.add_step(read, dense);
        totals.seconds += started.elapsed().as_secs_f64();
        Ok(o)
    }
}

/// Bytes that a layer's operands take when they are copied to the host.
pub fn copied_bytes<B: DeviceBackend>(operands: &LayerOperands<B>) -> u64 {
    if has_sparse_attention(&operands.qkv) {
        (operands.qkv.shape().num_elements() * operands.qkv.dtype().size()) as u64
    } else {
        // The CPU backend's operands are in host memory already.
        0
    }
}

/// (query, key) pairs of dense causal attention, over all heads.
pub fn dense_pairs(num_tokens: usize, num_heads: usize) -> f64 {
    let tokens = num_tokens as f64;
    tokens * (tokens + 1.0) / 2.0 * num_heads as f64
}

/// Head counts, head width and index of a layer.
pub fn layer_shape(operands: HostOperands<'_>) -> LayerShape {
    let shape = operands.shape;
    LayerShape::new([shape.num_heads, shape.num_kv_heads], shape.head_dim, operands.layer)
}
