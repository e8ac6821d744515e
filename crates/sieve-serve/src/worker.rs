//! The thread that owns the model: takes texts from the queue and decodes all open ones as one batch.
use crate::error::ApiError;
use crate::metrics::Metrics;
use crate::queue::{Piece, Taken, Text, Waiting};
use crate::server::Engine;
use sieve_data::Tokenizer;
use sieve_infer::{InferError, OpenTexts, Sampler, StoppedText, TokenScore, score_prompts};
use sieve_ops::DeviceBackend;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::Relaxed;

/// Tokens of prompts that are read before the open texts get their next token.
const PROMPT_TOKENS: usize = 2048;

/// Decodes the texts that requests send through the queue.
pub(crate) struct Worker<'a, B: DeviceBackend> {
    engine: &'a Engine<'a, B>,
    metrics: &'a Metrics,
    texts: Taken,
    num_waiting: Waiting,
    waiting: VecDeque<Text>,
    open: OpenTexts<'a, B, Writing<'a>>,
}

impl<'a, B: DeviceBackend> Worker<'a, B> {
    pub(crate) fn new(
        engine: &'a Engine<'a, B>,
        size: [usize; 2],
        metrics: &'a Metrics,
        (texts, num_waiting): (Taken, Waiting),
    ) -> Self {
        let open = OpenTexts::new(engine.model, size, engine.selection.clone(), engine.device);
        Self { engine, metrics, texts, num_waiting, waiting: VecDeque::new(), open }
    }

    /// Decodes until the queue has ended. Texts that are open then are dropped, which tells their requests that the
    /// server is stopping.
    pub(crate) fn run(mut self) {
        loop {
            if self.open.is_empty() && self.waiting.is_empty() {
                match self.texts.wait() {
                    Some(text) => self.waiting.push_back(text),
                    None => return,
                }
            }
            self.waiting.extend(self.texts.arrived());
            if self.texts.has_ended() {
                return;
            }
            self.drop_abandoned();
            self.begin_waiting();
            self.step();
            self.metrics.open.store(self.open.len() as u64, Relaxed);
        }
    }

    /// Drops waiting texts whose clients have gone.
    fn drop_abandoned(&mut self) {
        let (num_waiting, metrics) = (&self.num_waiting, self.metrics);
        self.waiting.retain(|text| {
            let is_wanted = !text.pieces.is_closed();
            if !is_wanted {
                num_waiting.has_left();
                metrics.cancelled.fetch_add(1, Relaxed);
            }
            is_wanted
        });
    }

    /// Reads prompts while texts may join. The open texts wait for no more than about [`PROMPT_TOKENS`].
    fn begin_waiting(&mut self) {
        let mut num_read = 0;
        while num_read < PROMPT_TOKENS && self.open.has_room() {
            let is_score = |text: &Text| text.scores_prompt && text.max_tokens <= 1;
            let Some(first) = self.waiting.pop_front() else {
                return;
            };
            let mut some = vec![first];
            num_read += some[0].prompt.len();
            // Scores and one token after them need no cache, so that many prompts share a pass.
            while is_score(&some[0]) && num_read < PROMPT_TOKENS {
                let is_next = self.waiting.front().is_some_and(is_score);
                let Some(next) = is_next.then(|| self.waiting.pop_front()).flatten() else {
                    break;
                };
                num_read += next.prompt.len();
                some.push(next);
            }
            some.iter().for_each(|_| self.num_waiting.has_left());
            self.metrics.prompt_tokens.fetch_add(some.iter().map(|text| text.prompt.len() as u64).sum(), Relaxed);
            let senders: Vec<_> = some.iter().map(|text| (text.index, text.pieces.clone())).collect();
            let done = caught(|| match is_score(&some[0]) {
                true => self.score(some),
                false => some.into_iter().try_for_each(|text| self.begin(text)),
            });
            if let Err(error) = done {
                for (index, pieces) in senders {
                    // A client that has gone needs no error.
                    let _ = pieces.send((index, Piece::Failed(error.clone())));
                }
            }
        }
    }

    /// Scores prompts, and draws one token after each that asks for it.
    fn score(&self, texts: Vec<Text>) -> Result<(), InferError> {
        let Engine { model, device, .. } = *self.engine;
        let num_top = texts.iter().filter_map(|text| text.num_top).max().unwrap_or(0);
        let prompts: Vec<&[u32]> = texts.iter().map(|text| &*text.prompt).collect();
        let scores = score_prompts(model, &prompts, num_top, device)?;
        for (text, mut scores) in texts.into_iter().zip(scores) {
            let num_top = text.num_top.unwrap_or(0);
            scores.tokens.iter_mut().for_each(|score| score.top.truncate(num_top));
            let mut writing = Writing::new(text, &self.engine.tokenizer)?;
            writing.send(Piece::Prompt(scores.tokens));
            if writing.text.max_tokens > 0 {
                writing.draw(&scores.next, self.engine, self.metrics)?;
            }
            writing.end();
        }
        Ok(())
    }

    /// Reads a text's prompt and draws its first token.
    fn begin(&mut self, text: Text) -> Result<(), InferError> {
        let (engine, metrics) = (self.engine, self.metrics);
        if text.scores_prompt {
            let num_top = text.num_top.unwrap_or(0);
            let scores = score_prompts(engine.model, &[&text.prompt], num_top, engine.device)?;
            let tokens = scores.into_iter().next().map_or_else(Vec::new, |scores| scores.tokens);
            let _ = text.pieces.send((text.index, Piece::Prompt(tokens)));
        }
        let prompt = text.prompt.clone();
        let mut writing = Writing::new(text, &engine.tokenizer)?;
        if writing.text.max_tokens == 0 {
            writing.end();
            return Ok(());
        }
        self.open.join(&prompt, |logits| {
            writing.draw(logits, engine, metrics)?;
            match writing.has_ended {
                true => writing.end(),
                false => return Ok(Some(writing)),
            }
            Ok(None)
        })
    }

    /// Gives each open text its next token. Texts that have ended, or whose clients have gone, leave first.
    fn step(&mut self) {
        let (engine, metrics, open) = (self.engine, self.metrics, &mut self.open);
        let done = caught(|| {
            let token = |writing: &Writing<'_>| {
                let is_wanted = !writing.text.pieces.is_closed();
                if !is_wanted && !writing.has_ended {
                    metrics.cancelled.fetch_add(1, Relaxed);
                }
                // A text without a token to read leaves.
                (is_wanted && !writing.has_ended).then_some(writing.last)
            };
            let settled = |writing: &mut Writing<'_>, done: Result<(), InferError>| match done {
                Ok(()) if writing.has_ended => writing.end(),
                Ok(()) => {}
                Err(error) => writing.fail(error.into()),
            };
            // Log-probabilities and rules need the logits on the host. The same draw gives the same token there.
            if open.owned().any(|writing| writing.text.num_top.is_some() || writing.sampler.needs_logits()) {
                return open.step(token, |writing, logits| {
                    let done = writing.draw(logits, engine, metrics);
                    settled(writing, done);
                });
            }
            let draw_of = |writing: &mut Writing<'_>| writing.sampler.next_draw();
            open.step_drawing(engine.num_tokens(), token, draw_of, |writing, token| {
                let done = writing.take(token, None, engine, metrics);
                settled(writing, done);
            })
        });
        if let Err(error) = done {
            self.open.clear().iter_mut().for_each(|writing| writing.fail(error.clone()));
        }
    }
}

/// Runs a part of the work. A panic in it becomes an error of the requests it was for.
fn caught(work: impl FnOnce() -> Result<(), InferError>) -> Result<(), ApiError> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => done.map_err(ApiError::from),
        Err(_) => Err(ApiError::server("the model failed on this request; the server's output shows where")),
    }
}

/// A text that is being written.
struct Writing<'t> {
    text: Text,
    sampler: Sampler,
    /// `None` once the text has ended.
    stream: Option<StoppedText<'t>>,
    /// The last token, which the model has not read yet.
    last: u32,
    num_tokens: usize,
    has_stopped: bool,
    has_ended: bool,
}

impl<'t> Writing<'t> {
    fn new(text: Text, tokenizer: &'t Tokenizer) -> Result<Self, InferError> {
        Ok(Self {
            sampler: Sampler::with_rules(text.sampling, text.rules, &text.prompt)?,
            stream: Some(text.stop.until(tokenizer.decode_stream(&text.prompt)?)),
            last: 0,
            num_tokens: 0,
            has_stopped: false,
            has_ended: false,
            text,
        })
    }

    fn send(&self, piece: Piece) {
        // A client that has gone is seen before the next token.
        let _ = self.text.pieces.send((self.text.index, piece));
    }

    /// Draws the next token and sends the text that it adds.
    fn draw<B: DeviceBackend>(
        &mut self,
        logits: &[f32],
        engine: &Engine<'_, B>,
        metrics: &Metrics,
    ) -> Result<(), InferError> {
        // Rows beyond the tokenizer's vocabulary are padding: no such token is drawn, but its probability counts.
        let token = self.sampler.sample(&logits[..engine.num_tokens()]);
        let scores = token.zip(self.text.num_top).map(|(token, num_top)| TokenScore::new(token, logits, num_top));
        self.take(token, scores, engine, metrics)
    }

    /// Takes a drawn token, with its scores if the request wants them, and sends the text that it adds.
    fn take<B: DeviceBackend>(
        &mut self,
        token: Option<u32>,
        scores: Option<TokenScore>,
        engine: &Engine<'_, B>,
        metrics: &Metrics,
    ) -> Result<(), InferError> {
        let num_read = self.text.prompt.len() + self.num_tokens;
        let token = token.ok_or(InferError::NotFinite(num_read))?;
        metrics.new_tokens.fetch_add(1, Relaxed);
        (self.last, self.num_tokens) = (token, self.num_tokens + 1);
        let mut shown = String::new();
        if engine.ends.contains(&token) {
            (self.has_ended, self.has_stopped) = (true, true);
        } else if let Some(stream) = &mut self.stream {
            (shown, self.has_stopped) = stream.push(token)?;
            self.has_ended = self.has_stopped || self.num_tokens == self.text.max_tokens;
        }
        if !shown.is_empty() || scores.is_some() {
            self.send(Piece::More(shown, scores.into_iter().collect()));
        }
        Ok(())
    }

    /// Sends the end of the text, with what was held back as the beginning of a character or of a stop text.
    fn end(&mut self) {
        self.has_ended = true;
        if let Some(stream) = self.stream.take() {
            let (shown, is_met) = match stream.finish() {
                Ok(rest) => rest,
                Err(error) => return self.fail(error.into()),
            };
            self.has_stopped |= is_met;
            if !shown.is_empty() {
                self.send(Piece::More(shown, Vec::new()));
            }
        }
        self.send(Piece::End { has_stopped: self.has_stopped, num_tokens: self.num_tokens });
    }

    fn fail(&mut self, error: ApiError) {
        self.has_ended = true;
        self.send(Piece::Failed(error));
    }
}
