//! Generates several texts in one batch.
use crate::continuation::Drawn;
use crate::generator::Start;
use crate::logits::NextLogits;
use crate::{GenerateConfig, InferError, OpenTexts, Sampler};
use sieve_core::Draw;
use sieve_nn::Qwen3;
use sieve_ops::DeviceBackend;

/// Continues several prompts, or one prompt several times, as a batch: each forward pass gives one token of every text.
#[derive(Debug)]
pub struct BatchGenerator<'a, B: DeviceBackend> {
    prompts: Prompts<'a, B>,
    config: GenerateConfig,
    /// Number of tokens that each text may still get.
    remaining: usize,
    /// Token ids that end a text.
    ends: Vec<u32>,
    /// The sampler of each text.
    samplers: Vec<Sampler>,
    with_scores: bool,
    /// The last token of each text; empty before the prompt is read.
    last: Vec<Drawn>,
    is_done: Vec<bool>,
}

/// What the texts continue.
#[derive(Debug)]
enum Prompts<'a, B: DeviceBackend> {
    /// One prompt, which is read once; then its cache is repeated.
    Shared(Box<Start<'a, B>>),
    /// The prompt of each text, and the texts that still get tokens, by their indices.
    Own(Vec<Vec<u32>>, Box<OpenTexts<'a, B, usize>>),
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
    ) -> Result<Self, InferError> {
        let of_text = |text: usize| {
            let mut sampling = config.sampling;
            sampling.seed = sampling.seed.wrapping_add(text as u64);
            Sampler::new(sampling)
        };
        let start = Start::new(model, prompt, config, device)?;
        let samplers = (0..num_texts).map(of_text).collect::<Result<_, _>>()?;
        Ok(Self::with(start.config, samplers, Prompts::Shared(Box::new(start))))
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
    ) -> Result<Self, InferError> {
        let starts = prompts.iter().map(|prompt| Start::new(model, prompt, config, device));
        let starts = starts.collect::<Result<Vec<_>, _>>()?;
        let samplers = starts.iter().map(|_| Sampler::new(config.sampling)).collect::<Result<_, _>>()?;
        let longest = starts.iter().map(|start| start.prompt.len()).max().unwrap_or(0);
        let (size, no_selector) = ([starts.len(), longest + config.max_new_tokens], None);
        let open = OpenTexts::new(model, size, no_selector, device);
        let config = starts.first().map_or(config, |start| start.config);
        let prompts = starts.into_iter().map(|start| start.prompt).collect();
        Ok(Self::with(config, samplers, Prompts::Own(prompts, Box::new(open))))
    }

    /// A generator of one text a sampler, before any token.
    fn with(config: GenerateConfig, samplers: Vec<Sampler>, prompts: Prompts<'a, B>) -> Self {
        Self {
            prompts,
            remaining: config.max_new_tokens,
            ends: vec![config.eos_id],
            config,
            is_done: vec![false; samplers.len()],
            samplers,
            with_scores: false,
            last: Vec::new(),
        }
    }

    /// Also ends each text at these tokens. Such a token is not returned.
    #[must_use]
    pub fn ending_at(mut self, ids: &[u32]) -> Self {
        self.ends.extend(ids);
        self
    }

    /// Computes the log-probability of each token, too.
    #[must_use]
    pub fn with_scores(self, with_scores: bool) -> Self {
        Self { with_scores, ..self }
    }

    /// The token of a text that was drawn last, with its log-probability [if asked for](Self::with_scores): also the
    /// one that ended it. `None` before the first one.
    pub fn last_drawn(&self, text: usize) -> Option<Drawn> {
        self.last.get(text).copied()
    }

    /// Ends one of the texts: it gets no more tokens.
    pub fn end(&mut self, text: usize) {
        self.is_done[text] = true;
    }

    /// The token drawn for each text; without one after a NaN logit, and for a text that has ended.
    fn draw(&mut self) -> Result<Vec<Drawn>, InferError> {
        let num_texts = self.samplers.len();
        // If each text gets one token only, the prompt's logits suffice, and caches are not read again.
        let needs_more = self.remaining > 0;
        let Self { prompts, config, samplers, last, is_done, with_scores, .. } = self;
        let wanted = (config.num_tokens, *with_scores);
        let mut drawn = vec![Drawn::NONE; num_texts];
        // The first token of a text behind its prompt, which logits of one row give.
        let mut draw = |at: usize, logits: &NextLogits<B>| {
            if !is_done[at] {
                let token = samplers[at].sample(&logits.row(0)[..wanted.0]);
                drawn[at] = logits.scored(vec![token], wanted.1)[0];
            }
        };
        match prompts {
            Prompts::Shared(start) if last.is_empty() => {
                let Start { text, prompt, .. } = &mut **start;
                // One row of logits serves all texts.
                let logits = text.read_next(prompt)?;
                if needs_more {
                    text.repeat(num_texts);
                }
                (0..num_texts).for_each(|at| draw(at, &logits));
            }
            Prompts::Shared(start) => {
                let draws = samplers.iter_mut().zip(&*is_done).map(|(sampler, is_done)| sampler.draw_unless(*is_done));
                let draws: Vec<Draw> = draws.collect();
                let tokens: Vec<u32> = last.iter().map(|last| last.token.unwrap_or(0)).collect();
                let next = start.text.read_rows_drawn(&tokens, &draws, wanted).into_iter().zip(&*is_done);
                drawn = next.map(|(next, is_done)| if *is_done { Drawn::NONE } else { next }).collect();
            }
            Prompts::Own(prompts, open) if last.is_empty() => {
                for (at, prompt) in prompts.iter().enumerate() {
                    let mut text = open.before(prompt)?;
                    draw(at, &text.read_next(prompt)?);
                    if needs_more {
                        open.add(text, at);
                    }
                }
            }
            Prompts::Own(_, open) => {
                let token = |&at: &usize| last[at].token.filter(|_| !is_done[at]);
                let draw_of = |at: &mut usize| samplers[*at].next_draw();
                open.step_drawing(wanted, token, draw_of, |&mut at, next| drawn[at] = next)?;
            }
        }
        Ok(drawn)
    }

    /// Number of tokens that a text has read.
    fn num_read(&self, text: usize) -> usize {
        let num_later = (self.config.max_new_tokens - self.remaining).saturating_sub(1);
        num_later
            + match &self.prompts {
                Prompts::Shared(start) => start.prompt.len(),
                Prompts::Own(prompts, _) => prompts[text].len(),
            }
    }

    /// The next token of each text; `None` for a text that has ended.
    fn step(&mut self) -> Result<Vec<Option<u32>>, InferError> {
        let drawn = self.draw()?;
        self.last.resize(drawn.len(), Drawn::NONE);
        let mut tokens = vec![None; drawn.len()];
        for (at, drawn) in drawn.into_iter().enumerate() {
            if self.is_done[at] {
                continue;
            }
            let token = drawn.token.ok_or_else(|| InferError::NotFinite(self.num_read(at)))?;
            self.last[at] = drawn;
            if self.ends.contains(&token) { self.is_done[at] = true } else { tokens[at] = Some(token) }
        }
        Ok(tokens)
    }
}

impl<B: DeviceBackend> Iterator for BatchGenerator<'_, B> {
    type Item = Result<Vec<Option<u32>>, InferError>;

    /// The next token of each text, or `None` for a text that has ended. Ends when all texts have ended, after
    /// `max_new_tokens`, and after an error.
    fn next(&mut self) -> Option<Self::Item> {
        if self.is_done.iter().all(|done| *done) {
            return None;
        }
        self.remaining = self.remaining.checked_sub(1)?;
        let tokens = self.step();
        if tokens.is_err() {
            self.remaining = 0;
        }
        Some(tokens)
    }
}
