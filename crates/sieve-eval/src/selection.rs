//! A selector in place of a dense model's attention: what it computes, and what it cost.
use crate::EvalError;
use crate::captured::dense_on_device;
use crate::chunks::{Cost, calls_of, prefill, prefill_on_device};
use crate::device_cache::DeviceCache;
use burn::tensor::Tensor;
use serde::Serialize;
use sieve_core::{Attention, ModelShape};
use sieve_nn::{HostOperands, LayerOperands};
use sieve_ops::{SieveBackend, has_sparse_attention};
use sieve_select::{DecodeSession, LayerShape, Phase, Selector};
use std::ops::AddAssign;
use std::time::Instant;

/// A selector at work in the layers of a model.
#[derive(Clone, Debug)]
pub struct Selection {
    selector: Selector,
    /// Tokens of a call; a prompt is one call where absent.
    chunk: Option<usize>,
    totals: SelectionTotals,
    /// One per layer, of the text that is being generated.
    sessions: Vec<DecodeSession>,
}

/// Sums over all calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct SelectionTotals {
    /// Calls: layers times documents, and times their chunks; of a text that is written, layers times its new tokens.
    pub calls: u64,
    /// Calls that ran dense: they are short, in a dense layer, or the method keeps everything.
    pub dense_calls: u64,
    /// Calls whose attention a kernel of the device computed; the others ran on the host's cores.
    pub kernel_calls: u64,
    /// Calls whose masks were made on the device; the others' were made on the host.
    pub device_selections: u64,
    /// Bytes of queries, keys, values and their means that were copied from the device to the host.
    pub host_bytes: u64,
    /// Lists that ran dense because a score was no number.
    pub nan_lists: u64,
    /// Computed pairs of a query and a key, over query heads.
    pub pairs: f64,
    /// Pairs of dense attention.
    pub dense_pairs: f64,
    /// Seconds until the masks were ready.
    pub select_seconds: f64,
    /// Seconds of selection and attention together.
    pub seconds: f64,
}

impl SelectionTotals {
    /// Computed pairs over those of dense attention.
    pub fn density(&self) -> f64 {
        if self.dense_pairs > 0.0 {
            self.pairs / self.dense_pairs
        } else {
            1.0
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

impl Selection {
    /// Checks that the selector fits the model.
    ///
    /// # Errors
    /// A model whose attention is not dense; settings that no context of the model can meet; a method that lacks its
    /// file.
    pub fn new(selector: Selector, shape: &ModelShape) -> Result<Self, EvalError> {
        if shape.attention != Attention::Mha {
            return Err(EvalError::NotDense {
                selector: selector.name(),
            });
        }
        let selector = selector.for_rope_theta(shape.rope_theta);
        selector.check_context(shape.max_seq_len)?;
        let selection = Self {
            selector,
            chunk: None,
            totals: SelectionTotals::default(),
            sessions: Vec::new(),
        };
        if selection.acts_in_decode() {
            let layer = |layer| LayerShape {
                num_heads: shape.num_heads,
                num_kv_heads: shape.num_kv_heads,
                head_dim: shape.head_dim,
                layer,
            };
            for index in 0..shape.num_layers {
                DecodeSession::new(&selection.selector, layer(index))?;
            }
        }
        Ok(selection)
    }

    /// The same with prompts read in chunks of this many tokens: each is a call of its own, whose queries are its
    /// tokens and whose keys are all up to them.
    ///
    /// # Errors
    /// No token; a method that reads token by token; chunks so short that every call would be dense.
    pub fn in_chunks(self, chunk: usize) -> Result<Self, EvalError> {
        let name = self.selector.name();
        let bad = |value, hint| {
            Err(EvalError::BadSetting {
                name: "chunk",
                value,
                hint,
            })
        };
        if chunk == 0 {
            return bad("0".to_owned(), "use at least 1 token");
        }
        if self.is_token_by_token() {
            return bad(
                format!("{chunk} with {name}, which reads a text token by token"),
                "leave --chunk out, or use a prefill method",
            );
        }
        let shortest = self.selector.common.min_prefill_tokens;
        if chunk < shortest {
            return bad(
                format!(
                    "{chunk} with {name}:min_prefill_tokens={shortest}, so that every call would be dense"
                ),
                "use longer chunks, or min_prefill_tokens=0 behind the selector's colon",
            );
        }
        Ok(Self {
            chunk: Some(chunk),
            ..self
        })
    }

    /// Tokens of a chunk, where prompts are read in chunks.
    pub fn chunk(&self) -> Option<usize> {
        self.chunk
    }

    /// The selector.
    pub fn selector(&self) -> &Selector {
        &self.selector
    }

    /// What it has computed so far.
    pub fn totals(&self) -> SelectionTotals {
        self.totals
    }

    /// A copy that has computed nothing yet.
    pub(crate) fn uncounted(&self) -> Self {
        Self {
            totals: SelectionTotals::default(),
            ..self.clone()
        }
    }

    /// Adds what an [`uncounted`](Self::uncounted) copy has computed.
    pub(crate) fn add_totals(&mut self, copy: &Self) {
        self.totals += copy.totals;
    }

    /// Whether it runs token by token only.
    pub fn is_token_by_token(&self) -> bool {
        self.selector.is_token_by_token()
    }

    /// Whether tokens after a prompt read less than everything.
    pub fn acts_in_decode(&self) -> bool {
        self.selector.phase() != Phase::Prefill
    }

    /// Whether kernels of the device attend to every call.
    pub(crate) fn attends_on_device<B: SieveBackend>(&self, operands: &LayerOperands<B>) -> bool {
        let mut calls = calls_of(operands, self.chunk);
        !self.is_token_by_token()
            && has_sparse_attention(&operands.qkv)
            && calls.all(|call| {
                let LayerOperands {
                    layer, num_layers, ..
                } = *operands;
                self.selector.runs_on_device(call, layer, num_layers)
            })
    }

    /// Attention of one document in one layer: by the device's kernels where they take it, else on the host.
    ///
    /// # Errors
    /// Operands that the selector refuses.
    pub fn attend<B: SieveBackend>(
        &mut self,
        operands: &LayerOperands<B>,
    ) -> Result<Tensor<B, 4>, EvalError> {
        let [_, tokens, heads, head_dim] = operands.qkv.dims();
        if !self.attends_on_device(operands) {
            let all = tokens * heads * head_dim * operands.qkv.dtype().size();
            self.totals.host_bytes += all as u64;
            return operands.on_host(|operands| self.attend_on_host(operands));
        }
        let started = Instant::now();
        let (output, cost) = prefill_on_device(&self.selector, operands, self.chunk)?;
        self.totals.host_bytes += cost.host_bytes;
        self.totals.kernel_calls += cost.calls;
        self.totals.device_selections += cost.device_calls;
        self.add(cost, tokens, operands.num_heads);
        self.totals.seconds += started.elapsed().as_secs_f64();
        Ok(output.o)
    }

    fn add(&mut self, cost: Cost, num_tokens: usize, num_heads: usize) {
        let dense_pairs = dense_pairs(num_tokens, num_heads);
        self.totals.dense_pairs += dense_pairs;
        self.totals.pairs += cost.density * dense_pairs;
        self.totals.calls += cost.calls;
        self.totals.dense_calls += cost.dense_calls;
        self.totals.nan_lists += cost.nan_lists;
        self.totals.select_seconds += cost.select_seconds;
    }

    /// Attention of one document in one layer, on the host. A decode method reads it as a stream from its first token.
    ///
    /// # Errors
    /// Operands that the selector refuses.
    fn attend_on_host(&mut self, operands: HostOperands<'_>) -> Result<Vec<f32>, EvalError> {
        let started = Instant::now();
        let (tokens, heads) = (operands.num_tokens, operands.num_heads);
        let o = if self.is_token_by_token() {
            let mut session = DecodeSession::new(&self.selector, layer_shape(operands))?;
            let o = session.stream(operands.q, operands.k, operands.v)?;
            self.totals.dense_pairs += dense_pairs(tokens, heads);
            self.totals.calls += 1;
            self.totals.pairs += session.pairs_read() as f64;
            o
        } else {
            let done = prefill(&self.selector, operands, self.chunk)?;
            self.add(done.cost, tokens, heads);
            done.o
        };
        self.totals.seconds += started.elapsed().as_secs_f64();
        Ok(o)
    }

    /// Whether the tokens of a text that goes on are read by kernels of the device.
    pub(crate) fn decodes_on_device<B: SieveBackend>(&self, operands: &LayerOperands<B>) -> bool {
        self.selector.steps_on_device() && has_sparse_attention(&operands.qkv)
    }

    /// Bytes that the host is about to be handed.
    pub(crate) fn count_copied<B: SieveBackend>(&mut self, operands: &LayerOperands<B>) {
        // Copies of a host's own memory are none.
        if has_sparse_attention(&operands.qkv) {
            let elements: usize = operands.qkv.dims().into_iter().product();
            self.totals.host_bytes += (elements * operands.qkv.dtype().size()) as u64;
        }
    }

    /// As [`continue_text`](Self::continue_text) on the device; `caches` has the layers before this one, and this one
    /// after its prompt.
    ///
    /// # Errors
    /// Operands that the kernels refuse.
    pub(crate) fn continue_on_device<B: SieveBackend>(
        &mut self,
        caches: &mut Vec<DeviceCache<B>>,
        operands: &LayerOperands<B>,
    ) -> Result<Tensor<B, 4>, EvalError> {
        let Some(cache) = caches.get_mut(operands.layer) else {
            caches.push(DeviceCache::of(operands));
            if self.selector.phase() == Phase::Both {
                return self.attend(operands);
            }
            return Ok(dense_on_device(operands)?.o);
        };
        let started = Instant::now();
        let (o, pairs, is_chosen) = cache.step(&self.selector, operands)?;
        let dense = (cache.num_tokens() * operands.num_heads) as f64;
        self.totals.calls += 1;
        self.totals.kernel_calls += 1;
        self.totals.device_selections += u64::from(is_chosen);
        self.totals.dense_calls += u64::from(pairs >= dense);
        self.totals.pairs += pairs;
        self.totals.dense_pairs += dense;
        self.totals.seconds += started.elapsed().as_secs_f64();
        Ok(o)
    }

    /// Attention of the next tokens of one text: its prompt (densely, but for methods that act on prompts too), then
    /// one token at a time. Only for methods that act in decode.
    ///
    /// # Errors
    /// Operands that the selector refuses.
    pub(crate) fn continue_text(
        &mut self,
        operands: HostOperands<'_>,
    ) -> Result<Vec<f32>, EvalError> {
        if self.sessions.len() == operands.layer {
            self.sessions
                .push(DecodeSession::new(&self.selector, layer_shape(operands))?);
        }
        let HostOperands { q, k, v, layer, .. } = operands;
        if self.sessions[layer].is_empty()
            && self.selector.phase() == Phase::Both
            && !self.is_token_by_token()
        {
            self.sessions[layer].take_prompt(q, k, v)?;
            return self.attend_on_host(operands);
        }
        let session = &mut self.sessions[layer];
        if session.is_empty() {
            return Ok(session.prompt(q, k, v)?.o);
        }
        let (started, before) = (Instant::now(), session.pairs_read());
        let o = session.step(q, k, v)?;
        let read = session.pairs_read() - before;
        let dense = (session.len() * operands.num_heads) as u64;
        self.totals.calls += 1;
        self.totals.dense_calls += u64::from(read >= dense);
        self.totals.pairs += read as f64;
        self.totals.dense_pairs += dense as f64;
        self.totals.seconds += started.elapsed().as_secs_f64();
        Ok(o)
    }
}

/// Pairs of dense causal attention.
fn dense_pairs(num_tokens: usize, num_heads: usize) -> f64 {
    let tokens = num_tokens as f64;
    tokens * (tokens + 1.0) / 2.0 * num_heads as f64
}

/// A layer's sizes.
pub(crate) fn layer_shape(operands: HostOperands<'_>) -> LayerShape {
    LayerShape {
        num_heads: operands.num_heads,
        num_kv_heads: operands.num_kv_heads,
        head_dim: operands.head_dim,
        layer: operands.layer,
    }
}
