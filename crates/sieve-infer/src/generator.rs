//! Generates text token by token.
use crate::continuation::{Continuation, Drawn};
use crate::input::check_vocabulary;
use crate::{InferError, Sampler, Sampling, Selection};
use sieve_core::counted;
use sieve_nn::Qwen3;
use sieve_ops::DeviceBackend;

/// Settings of text generation.
#[derive(Clone, Copy, Debug)]
pub struct GenerateConfig {
    /// Most tokens that are generated after the prompt.
    pub max_new_tokens: usize,
    /// How the next token is drawn: greedily or at random.
    pub sampling: Sampling,
    /// The token that ends a document: generation stops at it, and begins with it when the prompt is empty (the model
    /// was never trained to predict what follows it, so such text starts anywhere).
    pub eos_id: u32,
    /// Tokens of the tokenizer. Embedding rows from this one on are padding: their tokens are never sampled.
    pub num_tokens: usize,
}

/// A checked prompt that the model has not read yet.
#[derive(Debug)]
pub(crate) struct Start<'a, B: DeviceBackend> {
    pub(crate) text: Continuation<'a, B>,
    pub(crate) prompt: Vec<u32>,
    /// The settings, with `num_tokens` limited to the model's vocabulary.
    pub(crate) config: GenerateConfig,
    /// Number of tokens that may still be generated.
    pub(crate) remaining: usize,
    /// Token ids that end the text.
    pub(crate) ends: Vec<u32>,
}

impl<'a, B: DeviceBackend> Start<'a, B> {
    /// Checks a prompt and its settings. An empty prompt becomes the end-of-document token.
    pub(crate) fn new(
        model: &'a Qwen3<B>,
        prompt: &[u32],
        config: GenerateConfig,
        device: &B::Device,
    ) -> Result<Self, InferError> {
        let prompt = match prompt {
            [] => vec![config.eos_id],
            tokens => tokens.to_vec(),
        };
        let context = model.shape().max_seq_len;
        if prompt.len().saturating_add(config.max_new_tokens) > context {
            return Err(no_room(prompt.len(), config.max_new_tokens, context));
        }
        check_vocabulary(&prompt, model.shape().vocab_size)?;
        Ok(Self {
            text: Continuation::new(model, prompt.len() + config.max_new_tokens, device),
            prompt,
            config: GenerateConfig { num_tokens: config.num_tokens.min(model.shape().vocab_size), ..config },
            remaining: config.max_new_tokens,
            ends: vec![config.eos_id],
        })
    }
}

/// The error of a prompt that leaves no room for `new` tokens.
fn no_room(prompt: usize, new: usize, context: usize) -> InferError {
    let counted = |count: usize, noun: &str| counted(count as u64, noun);
    let hint = match context.saturating_sub(prompt) {
        // An empty prompt is one token, the end of a document.
        0 if context < 2 => "use a model with a longer context: this one has no room behind a prompt".to_owned(),
        0 if new < context => format!("shorten the prompt to at most {}", counted(context - new, "token")),
        0 => format!("shorten the prompt to at most {}, and ask for fewer new ones", counted(context - 1, "token")),
        room => format!("ask for at most {}, or shorten the prompt", counted(room, "new token")),
    };
    let (prompt, new) = (counted(prompt, "token"), counted(new, "new one"));
    let what = format!(
        "a prompt of {prompt} and {new} do not fit into the model's context of {context} (max_position_embeddings)"
    );
    InferError::refused(what, hint)
}

/// An iterator over the tokens that continue a prompt.
#[derive(Debug)]
pub struct Generator<'a, B: DeviceBackend> {
    /// Its `prompt` holds the tokens that the cache lacks: first the prompt, later the last token.
    start: Start<'a, B>,
    sampler: Sampler,
    with_scores: bool,
    last: Option<Drawn>,
}

impl<'a, B: DeviceBackend> Generator<'a, B> {
    /// Checks everything before the model runs.
    ///
    /// # Errors
    /// A prompt that leaves no room for `max_new_tokens` in the model's context, a token outside the vocabulary, a bad
    /// sampling setting.
    pub fn new(
        model: &'a Qwen3<B>,
        prompt: &[u32],
        config: GenerateConfig,
        device: &B::Device,
    ) -> Result<Self, InferError> {
        let start = Start::new(model, prompt, config, device)?;
        Ok(Self { start, sampler: Sampler::new(config.sampling)?, with_scores: false, last: None })
    }

    /// Computes the log-probability of each token, too.
    #[must_use]
    pub fn with_scores(self, with_scores: bool) -> Self {
        Self { with_scores, ..self }
    }

    /// The token that was drawn last, with its log-probability [if asked for](Self::with_scores): also the one that
    /// ended the text. `None` before the first one.
    pub fn last_drawn(&self) -> Option<Drawn> {
        self.last
    }

    /// Adds a selector. A prefill method acts on the prompt, and later tokens attend to all keys; a decode method acts
    /// on the tokens after a dense prompt.
    #[must_use]
    pub fn with_selection(mut self, selection: Selection) -> Self {
        self.start.text = self.start.text.with_selection(Some(selection));
        self
    }

    /// Also ends the text at each of these tokens. Such a token is not returned.
    #[must_use]
    pub fn ending_at(mut self, ids: &[u32]) -> Self {
        self.start.ends.extend(ids);
        self
    }

    /// Most tokens that are generated after the prompt.
    pub fn max_new_tokens(&self) -> usize {
        self.start.config.max_new_tokens
    }

    /// The selector, with the statistics of its calls.
    pub fn selection(&self) -> Option<&Selection> {
        self.start.text.selection()
    }

    /// Reads the tokens that the cache lacks and draws the next one.
    fn step(&mut self) -> Result<u32, InferError> {
        let Start { text, prompt, config, .. } = &mut self.start;
        let drawn = text.read_drawn(prompt, self.sampler.next_draw(), (config.num_tokens, self.with_scores))?;
        let token = drawn.token.ok_or(InferError::NotFinite(text.cache().num_tokens))?;
        self.last = Some(drawn);
        *prompt = vec![token];
        Ok(token)
    }
}

impl<B: DeviceBackend> Iterator for Generator<'_, B> {
    type Item = Result<u32, InferError>;

    /// The next token. `None` after `max_new_tokens`, after an error, and instead of a token that ends the text.
    fn next(&mut self) -> Option<Self::Item> {
        self.start.remaining = self.start.remaining.checked_sub(1)?;
        let token = self.step();
        let is_end = |token: &u32| self.start.ends.contains(token);
        let has_ended = token.as_ref().is_ok_and(is_end);
        if has_ended || token.is_err() {
            self.start.remaining = 0;
        }
        (!has_ended).then_some(token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hint_about_room_can_be_followed() {
        for (prompt, new, context, words) in [
            (1, 1, 1, "a prompt of 1 token and 1 new one | context of 1 | use a model with a longer context"),
            (2, 5, 2, "a prompt of 2 tokens and 5 new ones | to at most 1 token"),
            (9, 5, 8, "to at most 3 tokens"),
            (8, 8, 8, "to at most 7 tokens, and ask for fewer new ones"),
            (7, 5, 8, "ask for at most 1 new token, or"),
            (6, 5, 8, "ask for at most 2 new tokens, or"),
        ] {
            sieve_testing::refusal(Err::<(), _>(no_room(prompt, new, context)), words);
        }
    }
}
