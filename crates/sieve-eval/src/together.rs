//! Generates several texts from one prompt as a batch.
use crate::generator::Start;
use crate::{EvalError, GenerateConfig, Sampler};
use sieve_nn::Qwen3;
use sieve_ops::DeviceBackend;

/// Samples several continuations of a prompt as a batch: each forward pass gives one token of every text.
#[derive(Debug)]
pub struct BatchGenerator<'a, B: DeviceBackend> {
    start: Start<'a, B>,
    /// A sampler for each text.
    samplers: Vec<Sampler>,
    /// The last token of each text; empty before the prompt is read.
    last: Vec<u32>,
    is_done: Vec<bool>,
}

impl<'a, B: DeviceBackend> BatchGenerator<'a, B> {
    /// Prepares `num_texts` texts: the first has the seed of `config`, each later one the next seed. Checks everything
    /// before the model runs.
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
            start: Start::new(model, prompt, config, device)?,
            samplers: (0..num_texts).map(of_text).collect::<Result<_, _>>()?,
            last: Vec::new(),
            is_done: vec![false; num_texts],
        })
    }

    /// As [`Generator::ending_at`](crate::Generator::ending_at).
    #[must_use]
    pub fn ending_at(mut self, ids: &[u32]) -> Self {
        self.start.ends.extend(ids);
        self
    }

    /// Ends one of the texts: it gets no more tokens.
    pub fn end(&mut self, text: usize) {
        self.is_done[text] = true;
    }

    fn step(&mut self) -> Result<Vec<Option<u32>>, EvalError> {
        let Start {
            text,
            prompt,
            config,
            ends,
            remaining,
            ..
        } = &mut self.start;
        let (num_texts, vocab_size) = (self.samplers.len(), text.vocab_size());
        let logits = match self.last.is_empty() {
            true => {
                let logits = text.read(prompt)?;
                // The caches of texts of one token are never read.
                if *remaining > 0 {
                    text.repeat(num_texts);
                }
                self.last = vec![0; num_texts];
                logits
            }
            false => text.read_rows(&self.last),
        };
        // After the prompt there is one row of logits for all texts; `cycle` repeats it.
        let rows = logits.chunks(vocab_size).cycle();
        let mut tokens = vec![None; num_texts];
        for (at, logits) in (0..num_texts).zip(rows) {
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
        self.start.remaining = self.start.remaining.checked_sub(1)?;
        let tokens = self.step();
        if tokens.is_err() {
            self.start.remaining = 0;
        }
        Some(tokens)
    }
}
