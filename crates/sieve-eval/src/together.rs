//! Generates several texts in one batch.
use crate::continuation::{Continuation, rows_of_texts};
use crate::generator::Start;
use crate::{EvalError, GenerateConfig, Sampler};
use sieve_nn::{Qwen3, TextRows};
use sieve_ops::DeviceBackend;

/// Continues several prompts, or one prompt several times, as a batch: each forward pass gives one token of every text.
#[derive(Debug)]
pub struct BatchGenerator<'a, B: DeviceBackend> {
    /// The prompt of all texts, or one prompt for each text.
    starts: Vec<Start<'a, B>>,
    /// The common KV cache of texts with prompts of their own; `None` without such a cache.
    rows: Option<TextRows<B>>,
    /// The sampler of each text.
    samplers: Vec<Sampler>,
    /// The last token of each text; empty before the prompt is read.
    last: Vec<u32>,
    is_done: Vec<bool>,
}

impl<'a, B: DeviceBackend> BatchGenerator<'a, B> {
    /// Prepares `num_texts` texts of one prompt: the first has the seed of `config`, each later one the next seed.
    /// Checks everything before the model runs.
    ///
    /// # Errors
    /// As [`Generator::new`](crate::Generator::new).
    pub fn new(
        model: &'a Qwen3<B>,
        prompt: &[u32],
        config: GenerateConfig,
        num_texts: usize,
        device: &B::Device,
    ) -> Result<Self, EvalError> {
        let of_text = |text: usize| {
            let mut sampling = config.sampling;
            sampling.seed = sampling.seed.wrapping_add(text as u64);
            Sampler::new(sampling)
        };
        Ok(Self {
            starts: vec![Start::new(model, prompt, config, device)?],
            rows: None,
            samplers: (0..num_texts).map(of_text).collect::<Result<_, _>>()?,
            last: Vec::new(),
            is_done: vec![false; num_texts],
        })
    }

    /// Prepares a text of each of several prompts, all with the seed of `config`. Checks everything before the model
    /// runs.
    ///
    /// # Errors
    /// As [`Generator::new`](crate::Generator::new).
    pub fn of_prompts(
        model: &'a Qwen3<B>,
        prompts: &[Vec<u32>],
        config: GenerateConfig,
        device: &B::Device,
    ) -> Result<Self, EvalError> {
        let starts = prompts.iter().map(|prompt| Start::new(model, prompt, config, device));
        let mut starts = starts.collect::<Result<Vec<_>, _>>()?;
        let longest = starts.iter().map(|start| start.prompt.len()).max().unwrap_or(0);
        // All texts use the rotary tables of one.
        let room = longest + config.max_new_tokens;
        let empty = Continuation::new(model, room, device);
        starts.iter_mut().for_each(|start| start.text = empty.clone());
        let num_texts = starts.len();
        Ok(Self {
            starts,
            rows: rows_of_texts(model.shape(), num_texts, room),
            samplers: (0..num_texts).map(|_| Sampler::new(config.sampling)).collect::<Result<_, _>>()?,
            last: Vec::new(),
            is_done: vec![false; num_texts],
        })
    }

    /// Also ends each text at these tokens. Such a token is not returned.
    #[must_use]
    pub fn ending_at(mut self, ids: &[u32]) -> Self {
        self.starts.iter_mut().for_each(|start| start.ends.extend(ids));
        self
    }

    /// Ends one of the texts: it gets no more tokens.
    pub fn end(&mut self, text: usize) {
        self.is_done[text] = true;
    }

    /// The logits of each text's next token, one row for each text. After a prompt that all texts share, there is one
    /// row for all. With prompts of their own, the row of a text that has ended is empty.
    fn logits(&mut self) -> Result<Vec<Vec<f32>>, EvalError> {
        let num_texts = self.samplers.len();
        let is_prompt = self.last.is_empty();
        self.last.resize(num_texts, 0);
        // If each text gets one token only, the prompt's logits suffice, and caches are not read again.
        let needs_more = self.starts[0].remaining > 0;
        if let [Start { text, prompt, .. }] = &mut self.starts[..] {
            let logits = match is_prompt {
                true => text.read(prompt)?,
                false => text.read_rows(&self.last),
            };
            if is_prompt && needs_more {
                text.repeat(num_texts);
            }
            return Ok(logits.chunks(text.vocab_size()).map(<[f32]>::to_vec).collect());
        }
        if is_prompt {
            let read = |Start { text, prompt, .. }: &mut Start<'a, B>| {
                let logits = text.read(prompt)?;
                if needs_more {
                    text.join(&mut self.rows);
                }
                Ok(logits)
            };
            return self.starts.iter_mut().map(read).collect();
        }
        let (mut open, mut texts, mut tokens) = (Vec::new(), Vec::new(), Vec::new());
        for (at, Start { text, .. }) in self.starts.iter_mut().enumerate() {
            match self.is_done[at] {
                true => text.leave(&mut self.rows),
                false => {
                    open.push(at);
                    texts.push(text);
                    tokens.push(self.last[at]);
                }
            }
        }
        let mut logits = vec![Vec::new(); num_texts];
        for (at, row) in open.into_iter().zip(Continuation::read_each(&mut texts, &tokens, &mut self.rows)?) {
            logits[at] = row;
        }
        Ok(logits)
    }

    /// The next token of each text; `None` for a text that has ended.
    fn step(&mut self) -> Result<Vec<Option<u32>>, EvalError> {
        let rows = self.logits()?;
        let Start { text, config, ends, .. } = &self.starts[0];
        let mut tokens = vec![None; self.samplers.len()];
        // A single row, after a shared prompt, serves all texts.
        for (at, logits) in (0..tokens.len()).zip(rows.iter().cycle()) {
            if self.is_done[at] {
                continue;
            }
            let logits = &logits[..config.num_tokens];
            let token = self.samplers[at].sample(logits);
            let token = token.ok_or(EvalError::NotFinite(text.cache().num_tokens))?;
            self.last[at] = token;
            match ends.contains(&token) {
                true => self.is_done[at] = true,
                false => tokens[at] = Some(token),
            }
        }
        Ok(tokens)
    }
}

impl<B: DeviceBackend> Iterator for BatchGenerator<'_, B> {
    type Item = Result<Vec<Option<u32>>, EvalError>;

    /// The next token of each text, or `None` for a text that has ended. Ends when all texts have ended, after
    /// `max_new_tokens`, and after an error.
    fn next(&mut self) -> Option<Self::Item> {
        if self.is_done.iter().all(|done| *done) {
            return None;
        }
        let remaining = &mut self.starts[0].remaining;
        *remaining = remaining.checked_sub(1)?;
        let tokens = self.step();
        if tokens.is_err() {
            self.starts[0].remaining = 0;
        }
        Some(tokens)
    }
}
