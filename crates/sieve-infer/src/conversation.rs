//! A conversation: what the model has read of it stays in a cache from one answer to the next.
use crate::continuation::Continuation;
use crate::input::check_vocabulary;
use crate::{InferError, LogitRules, Sampler, Sampling};
use sieve_nn::Qwen3;
use sieve_ops::DeviceBackend;

/// How the answers of a [`Conversation`] are written.
#[derive(Clone, Debug)]
pub struct AnswerConfig {
    /// Most tokens of an answer.
    pub max_new_tokens: usize,
    /// How its tokens are drawn.
    pub sampling: Sampling,
    /// What changes their logits.
    pub rules: LogitRules,
    /// Token ids that end an answer; they are not returned.
    pub ends: Vec<u32>,
    /// Tokens of the tokenizer. Embedding rows from this one on are padding: their tokens are never drawn.
    pub num_tokens: usize,
}

/// A conversation of at most `context` tokens with a model.
#[derive(Debug)]
pub struct Conversation<'a, B: DeviceBackend> {
    model: &'a Qwen3<B>,
    device: B::Device,
    context: usize,
    text: Continuation<'a, B>,
    /// The tokens that `text` has read.
    read: Vec<u32>,
}

impl<'a, B: DeviceBackend> Conversation<'a, B> {
    /// A conversation in which nothing was said.
    pub fn new(model: &'a Qwen3<B>, context: usize, device: &B::Device) -> Self {
        let context = context.min(model.shape().max_seq_len);
        let text = Continuation::new(model, context, device);
        Self { model, device: device.clone(), context, text, read: Vec::new() }
    }

    /// Most tokens of the conversation.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Begins an answer to `tokens`, the whole conversation so far. If it begins with what was read, the model reads
    /// only the rest; otherwise it reads all again, since a cache cannot be taken back.
    ///
    /// # Errors
    /// No token; a conversation that fills the context; a token outside the vocabulary; a bad sampling setting.
    pub fn answer(&mut self, tokens: &[u32], config: &AnswerConfig) -> Result<Answer<'_, 'a, B>, InferError> {
        if tokens.is_empty() {
            return Err(InferError::NoTokens);
        }
        let room = self.context.checked_sub(tokens.len()).filter(|room| *room > 0);
        let room = room.ok_or_else(|| match (tokens.len() + 1, self.context) {
            (num_tokens, context) if context < self.model.shape().max_seq_len => InferError::refused(
                format!("{num_tokens} tokens do not fit into a conversation of at most {context}"),
                "shorten the input, or allow a longer conversation",
            ),
            (num_tokens, context) => InferError::TooLong { num_tokens, context },
        })?;
        check_vocabulary(tokens, self.model.shape().vocab_size)?;
        let sampler = Sampler::with_rules(config.sampling, config.rules, tokens)?;
        let unread = match tokens.strip_prefix(self.read.as_slice()) {
            Some(rest) if !rest.is_empty() => rest.to_vec(),
            _ => {
                self.text = Continuation::new(self.model, self.context, &self.device);
                self.read.clear();
                tokens.to_vec()
            }
        };
        Ok(Answer {
            num_unread: unread.len(),
            unread,
            sampler,
            remaining: config.max_new_tokens.min(room),
            num_tokens: config.num_tokens.min(self.model.shape().vocab_size),
            ends: config.ends.clone(),
            conversation: self,
        })
    }
}

/// An iterator over the tokens of an answer. It may be dropped before its end.
#[derive(Debug)]
pub struct Answer<'c, 'a, B: DeviceBackend> {
    conversation: &'c mut Conversation<'a, B>,
    /// The tokens that the model has not read yet: first those of the conversation, later the last token.
    unread: Vec<u32>,
    num_unread: usize,
    sampler: Sampler,
    remaining: usize,
    num_tokens: usize,
    ends: Vec<u32>,
}

impl<B: DeviceBackend> Answer<'_, '_, B> {
    /// Number of the conversation's tokens that the model has to read before the first token of the answer.
    pub fn num_unread(&self) -> usize {
        self.num_unread
    }

    /// Most tokens that may still come.
    pub fn remaining(&self) -> usize {
        self.remaining
    }

    /// Reads the tokens that the model has not read yet, and draws the next one, which may end the answer.
    fn step(&mut self) -> Result<u32, InferError> {
        let Self { conversation, unread, sampler, num_tokens, .. } = self;
        let token = if sampler.needs_logits() {
            sampler.sample(&conversation.text.read(unread)?[..*num_tokens])
        } else {
            conversation.text.read_drawn(unread, sampler.next_draw(), (*num_tokens, false))?.token
        };
        conversation.read.append(unread);
        let token = token.ok_or(InferError::NotFinite(conversation.read.len()))?;
        unread.push(token);
        Ok(token)
    }
}

impl<B: DeviceBackend> Iterator for Answer<'_, '_, B> {
    type Item = Result<u32, InferError>;

    /// The next token. `None` at the answer's end, after an error, and instead of a token that ends the answer.
    fn next(&mut self) -> Option<Self::Item> {
        self.remaining = self.remaining.checked_sub(1)?;
        let token = self.step();
        let is_end = token.as_ref().is_ok_and(|token| self.ends.contains(token));
        if is_end || token.is_err() {
            self.remaining = 0;
        }
        (!is_end).then_some(token)
    }
}
