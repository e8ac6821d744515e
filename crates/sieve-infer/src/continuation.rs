//! A text with its KV cache: a prompt is read (in chunks, if all layers keep few keys), then one token after another.
//!
//! `generate` and `eval needle` read texts through this file.
use crate::input::{check_vocabulary, ids};
use crate::logits::{NextLogits, log_probability, on_host, scored};
use crate::{InferError, Selection};
use burn::tensor::Tensor;
use sieve_core::{Draw, ModelShape};
use sieve_nn::{KvCache, LayerCache, LayerOperands, Qwen3, TextRows};
use sieve_ops::{DeviceBackend, RotaryEmbedding};
use std::num::NonZeroUsize;

/// Tokens in the caches of texts that are decoded as one batch, at most. More would take memory and save little time.
const TOGETHER_TOKENS: usize = 65_536;
/// Texts that are decoded as one batch, at most.
const TOGETHER: usize = 32;

/// Number of texts of `num_tokens` tokens that are decoded as one batch. All their caches are in memory at once.
pub fn texts_together(num_tokens: usize) -> usize {
    (TOGETHER_TOKENS / num_tokens.max(1)).clamp(1, TOGETHER)
}

/// Sizes of batches where answers are decoded and endings of the same texts are scored.
#[derive(Clone, Copy, Debug)]
pub struct TextsWithEndings {
    /// Texts whose answers are decoded as one batch.
    pub texts: usize,
    /// Endings of a text that are scored as one batch.
    pub endings: usize,
}

impl TextsWithEndings {
    /// The sizes of the two batches, of texts and of a text's endings, for texts of `num_tokens` tokens with
    /// `num_endings` each. Both batches together hold at most one cache more than the smaller of `num_endings` and
    /// [`texts_together`].
    pub fn new(num_tokens: usize, num_endings: usize) -> Self {
        let most = texts_together(num_tokens).min(num_endings);
        Self { texts: (most / 2).max(1), endings: most.div_ceil(2) }
    }

    /// Caches in memory at once. In a batch, a prompt is read into one more cache, and then moved into its row.
    pub fn num_caches(self) -> usize {
        self.texts + usize::from(self.texts > 1) + self.endings
    }
}

/// Tokens of a chunk of a prompt, for models whose layers all have windows or DMA. It bounds the activations' memory,
/// however long the prompt is.
const PROMPT_PART: usize = 8192;
/// A chunk has at least this many times the keys that a layer keeps, since each chunk attends to the kept keys again.
const PARTS_OF_KEPT: usize = 4;

/// Tokens of a chunk of a prompt of `num_tokens`. It is the whole prompt unless every layer keeps a bounded number of
/// keys: other layers (dense, latent, native sparse) cache every token anyway and are fastest in one pass.
pub fn prompt_part(shape: &ModelShape, num_tokens: usize) -> usize {
    let parts = shape.by_kind().into_iter();
    let kept = parts.map(|part| part.attention.as_kind().num_kept());
    let most = kept.reduce(|a, b| a.zip(b).map(|(a, b)| a.max(b))).flatten();
    most.map_or(num_tokens, |most| num_tokens.min(PROMPT_PART.max(PARTS_OF_KEPT * most)))
}

/// Whether texts of at most `room` tokens each share a cache, so that one captured call takes a token of each: not a
/// single text, not on a device without such a call, and not where the memory for it is short.
pub(crate) fn share_a_cache<B: DeviceBackend>(
    shape: &ModelShape,
    [texts, room]: [usize; 2],
    device: &B::Device,
) -> bool {
    !B::ON_HOST && texts > 1 && fits_in_rows(shape, [texts, room], B::free_memory(device))
}

/// Whether a cache that texts share may be as large as it can become: no larger than the texts' own caches, or than
/// half of the `free` bytes. In a layer with a window it is larger, because it holds all tokens.
fn fits_in_rows(shape: &ModelShape, [texts, room]: [usize; 2], free: u64) -> bool {
    let value_bytes = 2; // of bf16, in which a GPU computes
    let of_layers = |bytes: fn(&ModelShape, usize, u64) -> u64| {
        shape.by_kind().iter().map(|part| part.num_layers as u64 * bytes(part, room, value_bytes)).sum::<u64>()
    };
    let own = of_layers(|part, room, value| part.attention.as_kind().cache(part, room, value)[1]);
    let shared = of_layers(|part, room, value| part.attention.as_kind().cache_in_row(part, room, value));
    shared <= own || shared.saturating_mul(texts as u64) <= free / 2
}

/// A text with its KV cache. A clone continues independently.
#[derive(Clone, Debug)]
pub struct Continuation<'a, B: DeviceBackend> {
    model: &'a Qwen3<B>,
    device: B::Device,
    rope: RotaryEmbedding<B>,
    cache: KvCache<B>,
    /// The row of [`TextRows`] that has the text's keys; `None`: `cache` has them.
    row: Option<usize>,
    /// The selector in place of the model's own attention; `None` without one.
    selection: Option<Selection>,
}

impl<'a, B: DeviceBackend> Continuation<'a, B> {
    /// An empty text with positions for `max_tokens`.
    pub fn new(model: &'a Qwen3<B>, max_tokens: usize, device: &B::Device) -> Self {
        Self {
            rope: model.rope(max_tokens, device),
            cache: KvCache::new(model.layers.len()),
            row: None,
            selection: None,
            model,
            device: device.clone(),
        }
    }

    /// Adds a selector. A prefill method acts on the prompt, and later tokens attend to all keys; a decode method acts
    /// on the tokens after a dense prompt.
    #[must_use]
    pub(crate) fn with_selection(self, selection: Option<Selection>) -> Self {
        Self { selection, ..self }
    }

    /// As `with_selection`, with a copy of the selector whose statistics are at 0.
    #[must_use]
    pub fn with_copy_of(self, selection: Option<&Selection>) -> Self {
        self.with_selection(selection.map(Selection::uncounted))
    }

    /// Adds the statistics of this text's selector to `original`, whose copy [`with_copy_of`](Self::with_copy_of)
    /// made.
    pub fn add_totals_to(&self, original: Option<&mut Selection>) {
        if let (Some(original), Some(copy)) = (original, &self.selection) {
            original.add_totals(copy);
        }
    }

    /// The selector, with the statistics of its calls.
    pub fn selection(&self) -> Option<&Selection> {
        self.selection.as_ref()
    }

    /// The model's KV cache after the tokens so far.
    pub(crate) fn cache(&self) -> &KvCache<B> {
        &self.cache
    }

    /// Reads the prompt, or one more token; returns the logits of the next token, f32 `[vocab_size]`. Without a
    /// selector it takes any number of tokens behind those read before.
    ///
    /// # Errors
    /// No token; operands that the selector refuses.
    pub fn read(&mut self, tokens: &[u32]) -> Result<Vec<f32>, InferError> {
        self.logits(tokens).map(on_host)
    }

    /// As [`read`](Self::read); the logits are on the device, too, for log-probabilities.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_next(&mut self, tokens: &[u32]) -> Result<NextLogits<B>, InferError> {
        self.logits(tokens).map(NextLogits::new)
    }

    /// As [`read`](Self::read), at most `part` tokens at a time, behind the tokens read before: for a prompt that
    /// arrives in pieces, or whose activations must not take the memory of all its tokens. On a CPU the logits are the
    /// same for any parts, to the bit, and equal those of one pass over the whole text. Dense layers, latent ones and
    /// those that choose blocks attend to all earlier tokens in each part, so that small parts cost more than one pass.
    ///
    /// # Errors
    /// No token; a text with a selector, which takes its prompt whole.
    pub fn read_in_parts(&mut self, tokens: &[u32], part: NonZeroUsize) -> Result<Vec<f32>, InferError> {
        if self.selection.is_some() {
            let what = "a text under a selector takes its prompt whole".to_owned();
            return Err(InferError::refused(what, "read it in one piece, or leave the selector out"));
        }
        let mut logits = Err(InferError::NoTokens);
        for part in tokens.chunks(part.get()) {
            logits = self.read(part);
        }
        logits
    }

    /// As [`read`](Self::read), but returns the token drawn among the first `num_tokens`, on the device, with its
    /// log-probability if `with_score`.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub(crate) fn read_drawn(
        &mut self,
        tokens: &[u32],
        draw: Draw,
        (num_tokens, with_score): (usize, bool),
    ) -> Result<Drawn, InferError> {
        Ok(drawn(self.logits(tokens)?, &[draw], (num_tokens, with_score))[0])
    }

    /// The logits after `tokens`. A selector that acts in decoding computes the attention of every call, a prefill
    /// method the attention of the prompt only.
    fn logits(&mut self, tokens: &[u32]) -> Result<Tensor<B, 2>, InferError> {
        if tokens.is_empty() {
            return Err(InferError::NoTokens);
        }
        let ids_of = |tokens: &[u32], device: &B::Device| ids(tokens, [1, tokens.len()], device);
        let (model, cache, rope) = (self.model, &mut self.cache, &self.rope);
        let num_tokens = cache.num_tokens + tokens.len();
        type Operands<'a, B> = &'a LayerOperands<B>;
        let logits = match &mut self.selection {
            Some(selection) if selection.acts_in_decode() => {
                let ids = ids_of(tokens, &self.device);
                // After the prompt, one call on the device can run all layers on a token. It adds the token to the
                // selector's caches as it would to the model's own.
                let in_one_call = match tokens {
                    [_] => model.token_step(&ids, cache, rope),
                    _ => None,
                };
                if let Some(logits) = in_one_call {
                    selection.count_call(model.shape(), &cache.layers, num_tokens);
                    return Ok(logits);
                }
                let attend = &mut |operands: Operands<'_, B>, cache: &mut LayerCache<B>, scratch: &mut _| {
                    selection.continue_text(operands, num_tokens, cache, scratch)
                };
                model.next_logits_attending(ids, cache, rope, attend)?
            }
            Some(selection) if cache.num_tokens == 0 => {
                let attend = &mut |operands: Operands<'_, B>, cache: &mut LayerCache<B>, _: &mut _| {
                    cache.keep_recent(&operands.qkv, operands.spec());
                    selection.attend(operands)
                };
                model.next_logits_attending(ids_of(tokens, &self.device), cache, rope, attend)?
            }
            _ => {
                let part = prompt_part(model.shape(), tokens.len());
                let mut logits = None;
                for part in tokens.chunks(part.max(1)) {
                    let ids = ids_of(part, &self.device);
                    logits = Some(model.next_logits(ids, cache, rope));
                }
                logits.expect("at least one token")
            }
        };
        Ok(logits)
    }

    /// Repeats the text `num_texts` times in the cache; then [`read_rows`](Self::read_rows) continues all copies.
    pub(crate) fn repeat(&mut self, num_texts: usize) {
        self.cache.repeat(num_texts);
    }

    /// Reads one more token of each copy. Returns the logits of each copy's next token, concatenated.
    pub(crate) fn read_rows(&mut self, tokens: &[u32]) -> Vec<f32> {
        on_host(self.logits_of_rows(tokens))
    }

    /// As [`read_rows`](Self::read_rows), but returns the token drawn for each copy among the first `num_tokens`, as
    /// [`read_drawn`](Self::read_drawn).
    pub(crate) fn read_rows_drawn(
        &mut self,
        tokens: &[u32],
        draws: &[Draw],
        (num_tokens, with_scores): (usize, bool),
    ) -> Vec<Drawn> {
        drawn(self.logits_of_rows(tokens), draws, (num_tokens, with_scores))
    }

    fn logits_of_rows(&mut self, tokens: &[u32]) -> Tensor<B, 2> {
        let ids = ids(tokens, [tokens.len(), 1], &self.device);
        self.model.next_logits(ids, &mut self.cache, &self.rope)
    }

    /// Moves a text that has read its prompt into a row of `rows`, if there are rows.
    pub(crate) fn join(&mut self, rows: &mut Option<TextRows<B>>) {
        self.row = rows.as_mut().map(|rows| rows.put(&mut self.cache));
    }

    /// Frees the row of a text that has ended.
    pub(crate) fn leave(&mut self, rows: &mut Option<TextRows<B>>) {
        if let (Some(rows), Some(row)) = (rows, self.row.take()) {
            rows.free(row);
        }
    }

    /// Whether the text has a row.
    pub(crate) fn is_in_row(&self) -> bool {
        self.row.is_some()
    }

    /// Takes the row that a text has now, by the row that it had.
    pub(crate) fn move_row(&mut self, now: &[usize]) {
        self.row = self.row.map(|row| now[row]);
    }

    /// Keeps a text that has ended in its row, if it has one.
    pub(crate) fn stay(&self, rows: &mut Option<TextRows<B>>) {
        if let (Some(rows), Some(row)) = (rows, self.row) {
            rows.keep(row);
        }
    }

    /// Moves the keys of a text that stayed in its row into a cache of its own.
    pub(crate) fn go_on(&mut self, rows: &mut Option<TextRows<B>>) {
        if let (Some(rows), Some(row)) = (rows, self.row.take()) {
            self.cache = rows.take(row);
        }
    }

    /// The logits after one more token of each text, and for each text the index of its row of logits. All texts have
    /// the same number of positions. It is one forward pass unless a selector acts in decoding. With `rows`, each text
    /// has its keys in a row of them, and a single device call runs the pass. A device without such a call moves the
    /// keys back into a cache of each text, and sets `rows` to `None`.
    ///
    /// Panics without a text.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub(crate) fn logits_each(
        texts: &mut [&mut Self],
        tokens: &[u32],
        rows: &mut Option<TextRows<B>>,
    ) -> Result<(Tensor<B, 2>, Vec<usize>), InferError> {
        let in_order = (0..texts.len()).collect();
        if texts.iter().any(|text| text.selection.as_ref().is_some_and(Selection::acts_in_decode)) {
            let each = texts.iter_mut().zip(tokens).map(|(text, token)| text.logits(&[*token]));
            return Ok((Tensor::cat(each.collect::<Result<_, _>>()?, 0), in_order));
        }
        let first = &texts[0];
        let (model, rope, device) = (first.model, first.rope.clone(), first.device.clone());
        if let Some(in_rows) = rows {
            let row_of = texts.iter().map(|text| text.row.expect("every text has joined"));
            let row_of: Vec<usize> = row_of.collect();
            let mut next = vec![0; in_rows.num_rows()];
            for (&row, &token) in row_of.iter().zip(tokens) {
                next[row] = token;
            }
            let next = ids(&next, [next.len(), 1], &device);
            if let Some(logits) = model.next_logits_of_texts(&next, in_rows, &rope) {
                texts.iter_mut().for_each(|text| text.cache.num_tokens += 1);
                return Ok((logits, row_of));
            }
            for (text, row) in texts.iter_mut().zip(row_of) {
                text.cache = in_rows.take(row);
                text.row = None;
            }
            *rows = None;
        }
        let ids = ids(tokens, [texts.len(), 1], &device);
        let mut caches: Vec<_> = texts.iter_mut().map(|text| &mut text.cache).collect();
        Ok((model.next_logits_of_rows(ids, &mut caches, &rope), in_order))
    }

    /// The likelihood of each ending after this text, `together` of them as one batch. `logits` belong to the text's
    /// next token; no ending is empty.
    ///
    /// # Errors
    /// A token outside the vocabulary, an output that is not finite, operands that the selector refuses.
    pub fn endings(
        &mut self,
        logits: &[f32],
        endings: &[impl AsRef<[u32]>],
        together: usize,
    ) -> Result<Vec<Ending>, InferError> {
        let endings: Vec<&[u32]> = endings.iter().map(AsRef::as_ref).collect();
        let vocab_size = self.model.shape().vocab_size;
        for ending in &endings {
            check_vocabulary(ending, vocab_size)?;
        }
        let mut found: Vec<Ending> = (endings.iter()).map(|ending| Ending::default().and(logits, ending[0])).collect();
        // Sorted from the longest, so that the endings of one batch have similar lengths.
        let mut order: Vec<usize> = (0..endings.len()).collect();
        order.sort_by_key(|&n| std::cmp::Reverse(endings[n].len()));
        // Copies of the text are one batch, but a selector that acts in decoding has caches for one text.
        let together = if self.selection.as_ref().is_some_and(Selection::acts_in_decode) { 1 } else { together };
        for some in order.chunks(together) {
            // The other endings are single tokens, which `logits` has scored.
            if endings[some[0]].len() == 1 {
                break;
            }
            let mut copies = self.clone().with_copy_of(self.selection.as_ref());
            if some.len() > 1 {
                copies.repeat(some.len());
            }
            for step in 1..endings[some[0]].len() {
                // An ending that is complete repeats its last token, whose logits are not used.
                let token = |&n: &usize| endings[n][step.min(endings[n].len()) - 1];
                let tokens: Vec<u32> = some.iter().map(token).collect();
                let logits = match tokens[..] {
                    [_] => copies.read(&tokens)?,
                    _ => copies.read_rows(&tokens),
                };
                let num_longer = some.partition_point(|&n| endings[n].len() > step);
                for (&n, logits) in some[..num_longer].iter().zip(logits.chunks(vocab_size)) {
                    found[n] = found[n].and(logits, endings[n][step]);
                }
            }
            copies.add_totals_to(self.selection.as_mut());
        }
        if found.iter().all(|ending| ending.log_likelihood.is_finite()) {
            Ok(found)
        } else {
            Err(InferError::NotFinite(self.cache.num_tokens))
        }
    }
}

/// The token that each draw takes among the first `num_tokens` of its row of logits, on the device, and its
/// log-probability if `with_scores`.
fn drawn<B: DeviceBackend>(
    logits: Tensor<B, 2>,
    draws: &[Draw],
    (num_tokens, with_scores): (usize, bool),
) -> Vec<Drawn> {
    let tokens = sieve_ops::draw(logits.clone(), draws, num_tokens);
    scored(logits, tokens, with_scores)
}

/// A token that was drawn.
#[derive(Clone, Copy, Debug)]
pub struct Drawn {
    /// `None` after a NaN logit.
    pub token: Option<u32>,
    /// The natural logarithm of its probability; NaN where it was not asked for, or there is no token.
    pub log_probability: f64,
}

impl Drawn {
    /// No token.
    pub(crate) const NONE: Self = Self { token: None, log_probability: f64::NAN };
}

/// A model's likelihood of a text's ending.
#[derive(Clone, Copy, Debug)]
pub struct Ending {
    /// Natural logarithm of the ending's probability.
    pub log_likelihood: f64,
    /// Whether greedy decoding gives this ending. Of equal logits the first token counts.
    pub is_greedy: bool,
}

impl Default for Ending {
    fn default() -> Self {
        Self { log_likelihood: 0.0, is_greedy: true }
    }
}

impl Ending {
    /// The likelihood of the ending with one more token, given the logits that predict it.
    fn and(self, logits: &[f32], token: u32) -> Self {
        let max = logits.iter().fold(f32::NEG_INFINITY, |max, &x| max.max(x));
        let first = logits.iter().position(|&x| x == max);
        Self {
            log_likelihood: self.log_likelihood + log_probability(logits, token),
            is_greedy: self.is_greedy && first == Some(token as usize),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_model::{tiny_model, tiny_shape, words};
    use sieve_core::{Attention, DmaShape, LayerPattern, LayerType};
    use sieve_select::{LayerSelectors, Selector};
    use sieve_testing::wide;

    #[test]
    fn texts_with_windows_share_a_cache_where_half_of_the_memory_has_room_for_it() {
        let (texts, room) = (4, 1000);
        let fits = |attention, free| fits_in_rows(&tiny_shape(attention, 64), [texts, room], free);
        // Bytes of K and V of all tokens of all texts, in bf16.
        let shape = tiny_shape(Attention::Mha, 64);
        let all = (texts * room * shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * 2) as u64;
        assert!(fits(Attention::Mha, 0) && fits(Attention::Dma(DmaShape::published(7)), 0), "no larger than their own");
        assert!(fits(Attention::swa(room), 0), "all tokens are in the window");
        assert_eq!([2 * all - 1, 2 * all].map(|free| fits(Attention::swa(7), free)), [false, true]);
        let nsa = sieve_core::model::test_shapes::tiny_nsa().attention;
        // Its selected and window branches, the tokens before compression, and its blocks.
        assert_eq!([6 * all, 8 * all].map(|free| fits(nsa, free)), [false, true]);
    }

    #[test]
    fn a_prompt_in_chunks_gives_the_logits_of_one_pass() {
        let dma = |kept| Attention::Dma(DmaShape::published(kept));
        let part = |attention, num_tokens| prompt_part(&tiny_shape(attention, 64), num_tokens);
        // With 3000 kept keys a chunk has 4 x 3000 tokens; a prompt of 70 tokens is one chunk.
        assert_eq!([part(dma(5), 9000), part(dma(3000), 90_000), part(dma(5), 70)], [8192, 12_000, 70]);
        assert_eq!([part(Attention::swa(7), 8193), part(Attention::Mha, 9000)], [8192, 9000]);
        // The dense layer caches every token, so the prompt is one chunk.
        let hybrid = ModelShape {
            layers: LayerPattern::new(dma(5), [LayerType::of(Attention::DENSE), LayerType::OWN]),
            ..tiny_shape(dma(5), 64)
        };
        assert_eq!(prompt_part(&hybrid, 9000), 9000);

        let (len, device) = (8192 + 300, Default::default());
        for attention in [dma(5), Attention::swa(7)] {
            let model = tiny_model(attention, len + 8);
            let (mut text, rope) = (Continuation::new(&model, len + 8, &device), model.rope(len + 8, &device));
            let mut cache = KvCache::new(model.layers.len());
            let prompt = words(len);
            let parted = text.read(&prompt).expect("a prompt");
            let whole = on_host(model.next_logits(ids(&prompt, [1, len], &device), &mut cache, &rope));
            sieve_testing::assert_close("prompt", &wide(&parted), &wide(&whole), 1e-4);
            for token in [3, 11, 7] {
                let parted = text.read(&[token]).expect("a token");
                let whole = on_host(model.next_logits(ids(&[token], [1, 1], &device), &mut cache, &rope));
                sieve_testing::assert_close("token", &wide(&parted), &wide(&whole), 1e-4);
            }
            assert_eq!(text.cache().num_tokens, cache.num_tokens);
        }
    }

    #[test]
    fn a_streamed_prompt_gives_the_logits_of_its_tokens_read_one_by_one() {
        let model = tiny_model(Attention::Mha, 64);
        let shape = tiny_shape(Attention::Mha, 64);
        let device = Default::default();
        for (selector, keeps_all) in [
            ("quest:page=4,budget=8,dense_layers=0", false),
            ("h2o:heavy=4,recent=4", false),
            ("exact_top:k=6", false),
            ("0=dense/1-=exact_top:k=6", false),
            ("exact_top:k=64", true),
        ] {
            let selectors = LayerSelectors::parse(selector).expect("valid");
            let selection = Selection::new(selectors, &shape).expect("it fits");
            let text = |selection| Continuation::new(&model, 40, &device).with_selection(Some(selection));
            let mut streamed = text(selection.clone().as_stream().expect("a decode method"));
            // Here the first token is a dense prompt of one token, and each later token is a step.
            let (mut steps, prompt) = (text(selection.clone()), words(30));
            let mut dense = Continuation::new(&model, 40, &device);
            let mut whole = streamed.read(&prompt).expect("a prompt");
            let mut last = Vec::new();
            for token in &prompt {
                last = steps.read(&[*token]).expect("a token");
            }
            for token in [3, 11] {
                sieve_testing::assert_close(selector, &wide(&whole), &wide(&last), 1e-4);
                whole = streamed.read(&[token]).expect("a token");
                last = steps.read(&[token]).expect("a token");
            }
            let pieces = [&prompt[..], &[3], &[11]].map(|piece| dense.read(piece).expect("tokens"));
            let [.., own] = pieces;
            let differs = wide(&own).iter().zip(wide(&whole)).any(|(a, b)| (a - b).abs() > 1e-3);
            assert_eq!(differs, !keeps_all, "{selector}");
            let totals = streamed.selection().expect("it has one").totals();
            // Two layers, each with one call for the prompt and one for each of the two tokens.
            assert_eq!(totals.calls, 2 * 3, "{selector}");
            assert_eq!(totals.density() < 1.0, !keeps_all, "{selector} {totals:?}");
        }
        let whole = Selection::new(Selector::parse("meanpool").expect("valid"), &shape).expect("it fits");
        sieve_testing::refusal(whole.as_stream(), "meanpool, which reads a prompt whole | hint: leave --stream out");
    }

    #[test]
    fn a_token_decoded_by_one_device_call_is_counted_in_each_layer() {
        let (model, shape) = (tiny_model(Attention::Mha, 64), tiny_shape(Attention::Mha, 64));
        let mut text = Continuation::new(&model, 40, &Default::default());
        text.read(&words(7)).expect("a prompt");
        // Each case: selectors, and the number of layers whose keys the device chooses.
        for (selector, chosen) in [("0=dense/1-=snapkv", 1), ("h2o:heavy=4,recent=4", 2)] {
            let selectors = LayerSelectors::parse(selector).expect("valid");
            let mut selection = Selection::new(selectors, &shape).expect("it fits");
            selection.count_call(&shape, &text.cache().layers, 30);
            let totals = selection.totals();
            let counts = [totals.calls, totals.kernel_calls, totals.device_selections, totals.dense_calls];
            assert_eq!(counts, [2, 2, chosen, 0], "{selector}");
            // Each of the two layers read the 7 cached keys; dense attention would read all 30.
            assert_eq!([totals.pairs, totals.dense_pairs], [7, 30].map(|keys| (2 * keys * shape.num_heads) as f64));
        }
    }

    #[test]
    fn the_models_cache_stays_empty_where_a_decode_method_keeps_the_prompt() {
        let model = tiny_model(Attention::Mha, 64);
        let shape = tiny_shape(Attention::Mha, 64);
        // Each case: a selector, and the number of layers of the model's cache with keys.
        for (selector, layers) in [
            ("snapkv:window=2,capacity=8", 0),
            ("quest:page=4,budget=8,dense_layers=0", 0),
            ("meanpool:block=8,min_prefill_tokens=0", 2),
        ] {
            let selection = Selection::new(Selector::parse(selector).expect("valid"), &shape);
            let text = Continuation::new(&model, 40, &Default::default());
            let mut text = text.with_selection(Some(selection.expect("it fits")));
            text.read(&words(30)).expect("a prompt");
            text.read(&[3]).expect("a token");
            let cache = text.cache();
            let filled = cache.layers.iter().filter(|layer| !layer.is_empty());
            assert_eq!((filled.count(), cache.num_tokens), (layers, 31), "{selector}");
        }
    }
}
