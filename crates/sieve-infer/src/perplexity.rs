//! Perplexity over whole documents. A document longer than the context is read in overlapping windows.
//!
//! Every token of a document but its first is predicted exactly once, including the end-of-document token, as in
//! training. Windows of several documents share a row; document bounds keep attention within a document.

mod breakdown;
mod extrapolation;
mod windows;

use crate::input::{check_vocabulary, ids};
use crate::rows::Rows;
use crate::words::WordUse;
use crate::{EvalDocument, InferError, Selection};
use breakdown::Breakdown;
pub use breakdown::{LossByDistance, MeanLoss, PositionLoss, WordLoss};
use burn::tensor::{Tensor, TensorData};
pub use extrapolation::{Extrapolation, extrapolation};
use serde::Serialize;
use sieve_nn::{LayerContext, LayerOperands, Qwen3};
use sieve_ops::{DeviceBackend, Documents, IGNORE_LABEL, RotaryEmbedding};
use std::time::{Duration, Instant};
use windows::{Place, Scored, Window, push, rolling_windows, windows};

/// How documents are divided into windows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PerplexityConfig {
    /// Most tokens that the model sees at once.
    pub context: usize,
    /// Distance in tokens between the beginnings of neighbouring windows: from the second window on, each prediction
    /// sees at least `context - stride` tokens.
    pub stride: usize,
    /// Most tokens of one forward pass.
    pub batch_tokens: usize,
    /// For each of these distances in tokens, words used before are counted as near or far.
    pub far: Vec<usize>,
    /// The token before each text, to also measure [`RollingPerplexity`]. It is not measured with a selector.
    pub rolling_prefix: Option<u32>,
    /// The tokenizer's BOS token, if its template has one. In lm-evaluation-harness it is the first predicted token of
    /// a text.
    pub rolling_bos: Option<u32>,
}

impl PerplexityConfig {
    /// Checks context and stride for a model of this many positions.
    ///
    /// # Errors
    /// One of them is out of range.
    pub fn check(&self, max_seq_len: usize) -> Result<(), InferError> {
        check(self.context, self.stride, max_seq_len)
    }
}

/// Losses and perplexities of all documents, by several definitions.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PerplexityReport {
    /// Number of documents read.
    pub num_documents: u64,
    /// Tokens predicted: all but the first of each document, or those of its answers.
    pub num_tokens: u64,
    /// Tokens of the documents where only a part of them is predicted: [`num_tokens`](Self::num_tokens) and those that
    /// the model only reads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_read_tokens: Option<u64>,
    /// Number of words of the documents.
    pub num_words: u64,
    /// Bytes of text of the predicted tokens.
    pub num_bytes: u64,
    /// Sum of the predictions' cross-entropies, in nats.
    pub nats: f64,
    /// Mean cross-entropy of a token, in nats.
    pub loss: f64,
    /// Perplexity per token: `exp(nats / num_tokens)`.
    pub token_perplexity: f64,
    /// Perplexity per word: `exp(nats / num_words)`; `None` without words.
    pub word_perplexity: Option<f64>,
    /// Perplexity per byte: `exp(nats / num_bytes)`; `None` if the predicted tokens have no text, as an
    /// end-of-document token alone.
    pub byte_perplexity: Option<f64>,
    /// Bits per byte: `nats / ln(2) / num_bytes`; `None` as for `byte_perplexity`.
    pub bits_per_byte: Option<f64>,
    /// Most tokens that the model saw at once.
    pub context: usize,
    /// Tokens between the starts of two windows.
    pub stride: usize,
    /// Predictions per second without the first forward pass, which loads kernels. `None` for a single pass.
    pub tokens_per_second: Option<f64>,
    /// Perplexity as lm-evaluation-harness defines it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lm_eval_rolling: Option<RollingPerplexity>,
    /// The loss by the number of tokens that a prediction sees, in powers of two.
    pub by_position: Vec<PositionLoss>,
    /// The loss by how far back a token's word was last used.
    pub by_word: WordLoss,
}

/// Perplexity by lm-evaluation-harness's definition (`loglikelihood_rolling`). A prefix token precedes each text, and
/// all tokens of the text are predicted, without an end-of-document token. Windows of the context's length do not
/// overlap, except that the last one begins earlier to be full. Names and the counts of words and bytes are the
/// harness's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RollingPerplexity {
    /// Number of predicted tokens.
    pub num_tokens: u64,
    /// Number of words, as Python's `re.split(r"\s+", text)` counts them.
    pub num_words: u64,
    /// Number of bytes of the texts.
    pub num_bytes: u64,
    /// Natural logarithm of the probability of all texts.
    pub log_likelihood: f64,
    /// Perplexity per word: `exp(-log_likelihood / num_words)`; `None` without words.
    pub word_perplexity: Option<f64>,
    /// Perplexity per byte: `exp(-log_likelihood / num_bytes)`; `None` without text.
    pub byte_perplexity: Option<f64>,
    /// Bits per byte: `-log_likelihood / num_bytes / ln(2)`; `None` without text.
    pub bits_per_byte: Option<f64>,
}

/// Predicts every document of `documents`; `observe` is called after each forward pass with the number of tokens
/// predicted so far, and their mean loss.
///
/// Where documents have answers, only their tokens are predicted, and [`RollingPerplexity`], which is defined over
/// whole texts, is not measured.
///
/// With a selector, each window is a prompt of its own. If the selector is not causal (a row's keys depend on later
/// rows), the result is a "prefill perplexity", not a likelihood.
///
/// # Errors
/// A context or stride out of range, a token outside the vocabulary, a document that cannot be read, nothing to
/// predict, a loss that is not finite, a selector that refuses a call.
pub fn perplexity<B: DeviceBackend>(
    model: &Qwen3<B>,
    documents: impl Iterator<Item = Result<EvalDocument, InferError>>,
    config: &PerplexityConfig,
    device: &B::Device,
    selection: Option<&mut Selection>,
    observe: &mut dyn FnMut(u64, f64),
) -> Result<PerplexityReport, InferError> {
    let vocab_size = model.shape().vocab_size;
    let PerplexityConfig { context, stride, .. } = *config;
    config.check(model.shape().max_seq_len)?;
    let with_bos = |prefix: u32| [prefix].into_iter().chain(config.rolling_bos).collect::<Vec<_>>();
    let mut rolling = config
        .rolling_prefix
        .map(with_bos)
        .filter(|prefix| selection.is_none() && check_vocabulary(prefix, vocab_size).is_ok())
        .map(|prefix| Rolling {
            prefix,
            pass: Pass::new(model, context, config.batch_tokens, device),
            num_words: 0,
            num_bytes: 0,
        });
    let mut pass =
        Pass { selection, sums: Breakdown::new(&config.far), ..Pass::new(model, context, config.batch_tokens, device) };
    let mut read = Read::default();
    for document in documents {
        let document = document?;
        check_vocabulary(&document.tokens, vocab_size)?;
        read.add(&document);
        rolling = rolling.filter(|_| !read.has_answers);
        let text = document.scored();
        for window in windows(document.tokens.len(), context, stride).filter(|window| text.counts_in(window)) {
            if pass.predict(text, &window)? {
                let num_tokens = pass.sums.num_tokens();
                observe(num_tokens, pass.sums.nats() / num_tokens.max(1) as f64);
            }
        }
        if let Some(rolling) = &mut rolling {
            rolling.add(&document, context)?;
        }
    }
    pass.run()?;
    let num_tokens = pass.sums.num_tokens();
    observe(num_tokens, pass.sums.nats() / num_tokens.max(1) as f64);
    let lm_eval_rolling = rolling.map(Rolling::finish).transpose()?;
    read.report(config, &pass.sums, pass.speed.tokens_per_second(), lm_eval_rolling)
}

/// Counts of the documents that were read.
#[derive(Default)]
struct Read {
    num_documents: u64,
    num_tokens: u64,
    num_words: u64,
    num_bytes: u64,
    /// Whether only a part of the tokens is predicted.
    has_answers: bool,
}

impl Read {
    fn add(&mut self, document: &EvalDocument) {
        self.num_documents += 1;
        self.num_tokens += document.tokens.len() as u64;
        self.num_words += document.num_words;
        self.num_bytes += document.num_bytes;
        self.has_answers |= document.predicted.is_some();
    }

    /// The report of these documents, whose predictions have the losses `sums`.
    fn report(
        self,
        config: &PerplexityConfig,
        sums: &Breakdown,
        tokens_per_second: Option<f64>,
        lm_eval_rolling: Option<RollingPerplexity>,
    ) -> Result<PerplexityReport, InferError> {
        let Self { num_documents, num_words, num_bytes, .. } = self;
        let (nats, num_tokens) = (sums.nats(), sums.num_tokens());
        if num_tokens == 0 {
            let what = format!("no document holds a token to predict ({num_documents} in all)");
            return Err(InferError::refused(what, "give longer documents"));
        }
        let [word_perplexity, byte_perplexity, bits_per_byte] = per_word_and_byte(nats, num_words, num_bytes);
        let loss = nats / num_tokens as f64;
        Ok(PerplexityReport {
            num_documents,
            num_tokens,
            num_read_tokens: self.has_answers.then_some(self.num_tokens),
            num_words,
            num_bytes,
            nats,
            loss,
            token_perplexity: loss.exp(),
            word_perplexity,
            byte_perplexity,
            bits_per_byte,
            context: config.context,
            stride: config.stride,
            tokens_per_second,
            lm_eval_rolling,
            by_position: sums.by_position(),
            by_word: sums.words(),
        })
    }
}

impl EvalDocument {
    fn scored(&self) -> Scored<'_> {
        Scored { tokens: &self.tokens, uses: &self.word_uses, predicted: self.predicted.as_deref() }
    }
}

/// Refuses a context longer than the model's, and a stride of 0 or longer than the context.
fn check(context: usize, stride: usize, max_seq_len: usize) -> Result<(), InferError> {
    if context == 0 || context > max_seq_len {
        return Err(InferError::setting(
            "context",
            format!("{context}, the model's positions end at {max_seq_len}"),
            "use 1 up to the model's max_position_embeddings",
        ));
    }
    if stride == 0 || stride > context {
        return Err(InferError::setting(
            "stride",
            format!("{stride} with a context of {context}"),
            "use 1 up to the context; smaller is slower and sees more",
        ));
    }
    Ok(())
}

/// Packs windows into forward passes, runs the passes, and sums up the losses.
struct Pass<'a, B: DeviceBackend> {
    model: &'a Qwen3<B>,
    rope: RotaryEmbedding<B>,
    device: &'a B::Device,
    selection: Option<&'a mut Selection>,
    /// The windows of the next forward pass.
    rows: Rows<Place>,
    sums: Breakdown,
    speed: Speed,
}

/// Tokens and time of the forward passes after the first.
#[derive(Debug, Default)]
struct Speed {
    num_passes: usize,
    num_tokens: u64,
    time: Duration,
}

impl Speed {
    fn add(&mut self, num_tokens: u64, time: Duration) {
        if self.num_passes > 0 {
            self.num_tokens += num_tokens;
            self.time += time;
        }
        self.num_passes += 1;
    }

    fn tokens_per_second(&self) -> Option<f64> {
        (self.num_tokens > 0).then(|| self.num_tokens as f64 / self.time.as_secs_f64())
    }
}

/// Measures [`RollingPerplexity`] while the usual one is measured.
struct Rolling<'a, B: DeviceBackend> {
    prefix: Vec<u32>,
    pass: Pass<'a, B>,
    num_words: u64,
    num_bytes: u64,
}

/// Perplexity per word and per byte, and bits per byte; `None` where there is no word or no byte.
fn per_word_and_byte(nats: f64, num_words: u64, num_bytes: u64) -> [Option<f64>; 3] {
    let per = |count: u64| (count > 0).then(|| nats / count as f64);
    let bits = per(num_bytes).map(|nats| nats / std::f64::consts::LN_2);
    [per(num_words).map(f64::exp), per(num_bytes).map(f64::exp), bits]
}

impl<B: DeviceBackend> Rolling<'_, B> {
    /// Predicts a document's text, window by window.
    fn add(&mut self, document: &EvalDocument, context: usize) -> Result<(), InferError> {
        let text = document.text;
        self.num_words += text.num_words;
        self.num_bytes += text.num_bytes;
        let tokens = [&self.prefix, &document.tokens[..text.num_tokens]].concat();
        let uses = vec![WordUse::NoWord; tokens.len()];
        let text = Scored { tokens: &tokens, uses: &uses, predicted: None };
        for window in rolling_windows(tokens.len(), context) {
            self.pass.predict(text, &window)?;
        }
        Ok(())
    }

    /// Runs the last forward pass; returns the perplexities of all texts.
    fn finish(mut self) -> Result<RollingPerplexity, InferError> {
        self.pass.run()?;
        let Self { pass: Pass { sums, .. }, num_words, num_bytes, .. } = self;
        let [word_perplexity, byte_perplexity, bits_per_byte] = per_word_and_byte(sums.nats(), num_words, num_bytes);
        Ok(RollingPerplexity {
            num_tokens: sums.num_tokens(),
            num_words,
            num_bytes,
            log_likelihood: -sums.nats(),
            word_perplexity,
            byte_perplexity,
            bits_per_byte,
        })
    }
}

impl<'a, B: DeviceBackend> Pass<'a, B> {
    /// Forward passes of `batch_tokens` tokens in rows of `context`, without a selector.
    fn new(model: &'a Qwen3<B>, context: usize, batch_tokens: usize, device: &'a B::Device) -> Self {
        Self {
            model,
            rope: model.rope(context, device),
            device,
            selection: None,
            rows: Rows::new(context, (batch_tokens / context).max(1)),
            sums: Breakdown::new(&[]),
            speed: Speed::default(),
        }
    }

    /// Adds a window. If the rows are full, first runs the forward pass of the windows before it, and returns true.
    fn predict(&mut self, text: Scored<'_>, window: &Window) -> Result<bool, InferError> {
        if push(&mut self.rows, text, window) {
            return Ok(false);
        }
        self.run()?;
        let fits = push(&mut self.rows, text, window);
        assert!(fits, "a window fits an empty row");
        Ok(true)
    }

    /// Runs the forward pass of the windows added so far.
    fn run(&mut self) -> Result<(), InferError> {
        let Some(batch) = self.rows.batch() else {
            return Ok(());
        };
        self.rows.clear();
        let (shape, started, before) = (batch.shape, Instant::now(), self.sums.num_tokens());
        let documents = Documents::new(&batch.start, &batch.end, shape, self.device);
        let context = LayerContext::new(&documents, &self.rope);
        let labels = TensorData::new(batch.labels.clone(), shape);
        let ids = ids(&batch.tokens, shape, self.device);
        let labels = Tensor::from_data(labels, self.device);
        let losses = match &mut self.selection {
            None => self.model.token_losses(ids, labels, &context),
            Some(selection) => {
                let attend = &mut |operands: &LayerOperands<B>| selection.attend(operands);
                self.model.token_losses_attending(ids, labels, &context, attend)?
            }
        };
        let losses = losses.into_data();
        let labelled = losses.iter::<f64>().zip(&batch.labels);
        let scored = labelled.filter(|(_, label)| **label != IGNORE_LABEL);
        for ((loss, _), place) in scored.zip(&batch.places) {
            self.sums.add(place, loss);
        }
        self.speed.add(self.sums.num_tokens() - before, started.elapsed());
        if self.sums.nats().is_finite() { Ok(()) } else { Err(InferError::NotFinite(self.sums.num_tokens() as usize)) }
    }
}

#[cfg(test)]
mod tests;
