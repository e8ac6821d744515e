//! The thread that owns the model: takes texts from the queue and decodes all open ones as one batch.
//!
//! A prompt is read in parts between the tokens of the open texts, so that these go on, and the caches of texts that
//! have ended are kept for prompts that begin with them. On a CPU the logits of a text are the same however it is read;
//! docs/serving.md says for which kinds they are on a GPU.
use crate::error::ApiError;
use crate::metrics::Metrics;
use crate::queue::{Piece, Taken, Text, Waiting};
use crate::server::Engine;
use sieve_data::Tokenizer;
use sieve_infer::{
    Continuation, Drawn, InferError, NextLogits, OpenTexts, Sampler, StoppedText, TokenScore, score_prompts,
};
use sieve_ops::DeviceBackend;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedSender;

/// Tokens of prompts that are read before the open texts get their next token, where prompts are read whole.
const PROMPT_TOKENS: usize = 2048;
/// The time that the open texts wait for a part of a prompt, in steps of their own, and at least.
const WAIT_STEPS: f64 = 3.0;

/// No part is longer than so many times the wait because shorter ones would take nearly as long.
const LONGEST_WAIT: f64 = 4.0;

/// No fewer tokens are left for a last part: a GPU has kernels of their own for up to four, which add in another order.
const LEAST_REST: usize = 8;

/// The common cache shrinks when open and kept texts have needed a quarter of it or less for so long. Growing again
/// copies them and captures a step anew.
const ROOMY_FOR: Duration = Duration::from_secs(5);

/// How long parts of prompts are.
#[derive(Clone, Copy, Debug)]
struct Parts {
    /// The open texts may always wait for so long.
    least_wait: Duration,
    /// Fewest and most tokens of a prompt that are read at a time.
    tokens: [usize; 2],
    /// Whether parts begin with the fewest tokens and double while they end soon, instead of following from the time of
    /// a token: a part takes a GPU a time of its own, whatever its tokens. Few sizes occur so, and a GPU prepares the
    /// GEMMs of each.
    doubles: bool,
}

impl Parts {
    /// A part of few tokens takes nearly as long as one of many, because the weights are read for either: parts that
    /// end within 0.1 s made a prompt of 1,500 tokens take eight times as long as one that is read alone.
    const ON_HOST: Self = Self { least_wait: Duration::from_millis(400), tokens: [16, 512], doubles: false };
    /// A pause of 50 ms is hardly seen in a text that streams. Each part reads the keys before it once more.
    const ON_GPU: Self = Self { least_wait: Duration::from_millis(50), tokens: [256, 8192], doubles: true };
}

/// Decodes the texts that requests send through the queue.
pub(crate) struct Worker<'a, B: DeviceBackend> {
    engine: &'a Engine<'a, B>,
    metrics: &'a Metrics,
    texts: Taken,
    num_waiting: Waiting,
    waiting: VecDeque<Text>,
    /// The prompt that is being read.
    reading: Option<Reading<'a, B>>,
    /// Whether its last part was the last one of all, so that a short prompt is next.
    short_is_next: bool,
    /// The texts that are decoded, and those that have ended and are kept.
    open: OpenTexts<'a, B, Writing<'a>>,
    /// Most open and kept texts.
    most_texts: usize,
    /// Since when the common cache has been too large; `None` where it is not.
    roomy_since: Option<Instant>,
    pace: Pace,
}

/// A prompt that is being read, and the texts that begin with it: the samples of one request.
struct Reading<'a, B: DeviceBackend> {
    prompt: Arc<[u32]>,
    text: Continuation<'a, B>,
    num_read: usize,
    texts: Vec<Writing<'a>>,
}

/// How long the last steps and parts of prompts took, and how long a part is that follows from it.
#[derive(Debug)]
struct Pace {
    parts: Parts,
    /// Seconds of a step.
    step: f64,
    /// Seconds of a prompt's token.
    token: f64,
    /// Where parts double: how often a part of the fewest tokens is doubled, and the seconds of parts by this number; 0
    /// for sizes that were not read.
    doubled: usize,
    seconds: Vec<f64>,
}

impl Pace {
    fn new(parts: Parts) -> Self {
        let sizes = (parts.tokens[1] / parts.tokens[0]).ilog2() as usize + 1;
        Self { parts, step: 0.0, token: 0.0, doubled: 0, seconds: vec![0.0; sizes] }
    }

    /// Moves a guess a quarter of the way to a new time. The first time is taken whole, and so is one that is far
    /// shorter: a GPU's kernels are compiled in the first call.
    fn note(guess: &mut f64, seconds: f64) {
        let is_new = *guess == 0.0 || seconds < *guess / 4.0;
        *guess = if is_new { seconds } else { 0.75 * *guess + 0.25 * seconds };
    }

    /// Begins a new prompt, which tries larger parts again than the last one settled on. The first part of a size
    /// compiles kernels and prepares GEMMs, so that it may exceed the wait though later parts of that size would not.
    fn begin_prompt(&mut self) {
        self.seconds[self.doubled + 1..].fill(0.0);
    }

    /// Takes the time of a part. One as long as parts are may make the next one twice as long, or half; a prompt that
    /// was read whole is none.
    fn note_part(&mut self, tokens: usize, seconds: f64) {
        Self::note(&mut self.token, seconds / tokens.max(1) as f64);
        if !self.parts.doubles || !(self.part()..=self.part() + LEAST_REST).contains(&tokens) {
            return;
        }
        let now = self.doubled;
        Self::note(&mut self.seconds[now], seconds);
        if now + 1 < self.seconds.len() && self.is_worth(now + 1) {
            self.doubled += 1;
        } else if now > 0 && !self.is_worth(now) {
            self.doubled -= 1;
            // So much longer than half of it is no part, but one for which kernels were compiled.
            if self.seconds[now] > LONGEST_WAIT * self.seconds[now - 1] {
                self.seconds[now] = 0.0;
            }
        }
    }

    /// Whether parts are doubled so often: they end within [`wait`](Self::wait), or take hardly longer than parts of
    /// half the size, because a part takes a time of its own. Smaller ones would then let the open texts wait as long
    /// and more often.
    fn is_worth(&self, doubled: usize) -> bool {
        let (half, wait) = (self.seconds[doubled - 1], self.wait());
        let is_cheap = |at: usize| at == 0 || self.seconds[at] <= 1.5 * self.seconds[at - 1];
        match self.seconds[doubled] {
            0.0 => half < wait / 1.5 || (is_cheap(doubled - 1) && half < LONGEST_WAIT * wait),
            seconds => seconds <= wait || (is_cheap(doubled) && seconds < LONGEST_WAIT * wait),
        }
    }

    /// The seconds that open texts wait for prompts.
    fn wait(&self) -> f64 {
        (WAIT_STEPS * self.step).max(self.parts.least_wait.as_secs_f64())
    }

    /// Tokens of a prompt that are read while the open texts wait.
    fn part(&self) -> usize {
        let [fewest, most] = self.parts.tokens;
        match self.token {
            _ if self.parts.doubles => fewest << self.doubled,
            0.0 => fewest,
            token => ((self.wait() / token) as usize).clamp(fewest, most),
        }
    }

    /// How many of the last `rest` tokens of a prompt are read next, where `left` tokens may be read before the open
    /// texts go on. 0: the prompt waits, because so few are not worth a part.
    fn of_rest(&self, rest: usize, left: usize) -> usize {
        match rest {
            _ if left < rest.min(self.parts.tokens[0]) => 0,
            rest if rest <= left + LEAST_REST => rest,
            _ => left,
        }
    }
}

impl<'a, B: DeviceBackend> Worker<'a, B> {
    /// A worker without an open text. `size`: texts at once, and tokens of each.
    pub(crate) fn new(
        engine: &'a Engine<'a, B>,
        size: [usize; 2],
        metrics: &'a Metrics,
        (texts, num_waiting): (Taken, Waiting),
    ) -> Self {
        let open = OpenTexts::new(engine.model, size, engine.selection.clone(), engine.device);
        if !B::ON_HOST && size[0] > 1 && !open.share_a_cache() {
            log::warn!(
                "a cache of all sequences would take more than half of the free memory, because it keeps a window's \
                 old keys too, so each sequence has its own, and a token of several takes many times longer\n  hint: \
                 lower --max-texts or --max-context"
            );
        }
        Self {
            open,
            waiting: VecDeque::new(),
            reading: None,
            short_is_next: false,
            most_texts: size[0],
            roomy_since: None,
            pace: Pace::new(if B::ON_HOST { Parts::ON_HOST } else { Parts::ON_GPU }),
            engine,
            metrics,
            texts,
            num_waiting,
        }
    }

    /// Whether the next prompt is read in parts. A GPU reads it whole while no text waits for it.
    fn reads_in_parts(&self) -> bool {
        self.open.reads_in_parts() && (B::ON_HOST || !self.open.is_empty())
    }

    /// Decodes until the queue has ended. Texts that are open then are dropped, which tells their requests that the
    /// server is stopping.
    pub(crate) fn run(mut self) {
        loop {
            if self.open.is_empty() && self.waiting.is_empty() && self.reading.is_none() {
                match self.next_text() {
                    Some(text) => self.waiting.push_back(text),
                    None => return,
                }
            }
            self.waiting.extend(self.texts.arrived());
            if self.texts.has_ended() {
                return;
            }
            self.drop_abandoned();
            // Before the next prompts: a client that has the end of a text may have sent one that goes on from it.
            self.let_leave();
            self.shrink_if_roomy();
            self.begin_waiting();
            self.step();
            self.metrics.open.store(self.open.len() as u64, Relaxed);
            self.metrics.cache_room.store(self.open.common_room() as u64, Relaxed);
        }
    }

    /// Waits for the next text, and meanwhile gives the memory back that the last ones took; `None` once the queue has
    /// ended.
    fn next_text(&mut self) -> Option<Text> {
        if self.open.is_roomy() {
            let next = self.texts.within(ROOMY_FOR);
            if next.is_some() {
                return next;
            }
            self.shrink();
        }
        self.texts.wait()
    }

    /// Shrinks the common cache where it has been too large for some time.
    fn shrink_if_roomy(&mut self) {
        // A prompt that is being read may need the room.
        if !self.open.is_roomy() || self.reading.is_some() {
            self.roomy_since = None;
        } else if self.roomy_since.get_or_insert_with(Instant::now).elapsed() >= ROOMY_FOR {
            self.shrink();
            self.roomy_since = None;
        }
    }

    /// Shrinks the common cache. Texts fail with it, as they do with a step.
    fn shrink(&mut self) {
        let open = &mut self.open;
        let done = caught(|| {
            open.shrink();
            Ok(())
        });
        if let Err(error) = done {
            self.open.clear().iter_mut().for_each(|writing| writing.fail(error.clone()));
        }
        self.metrics.cache_room.store(self.open.common_room() as u64, Relaxed);
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

    /// Reads prompts while texts may join. The open texts wait for no more than about [`PROMPT_TOKENS`], or for a part
    /// of a prompt, and for no prompt after [`Pace::wait`].
    fn begin_waiting(&mut self) {
        let begun = Instant::now();
        let mut left = match self.reads_in_parts() {
            true if self.open.is_empty() => self.pace.parts.tokens[1],
            true => self.pace.part(),
            false => PROMPT_TOKENS,
        };
        while left > 0 && (self.open.is_empty() || begun.elapsed().as_secs_f64() < self.pace.wait()) {
            let Some(reading) = self.next_reading(&mut left) else {
                return;
            };
            let mut num_tokens = reading.prompt.len() - reading.num_read;
            if self.reads_in_parts() {
                match self.pace.of_rest(num_tokens, left) {
                    0 => {
                        self.reading = Some(reading);
                        return;
                    }
                    some => num_tokens = some,
                }
            }
            left = left.saturating_sub(num_tokens);
            let senders = senders(reading.texts.iter().map(|writing| &writing.text));
            self.or_fail(senders, |this| this.read_part(reading, num_tokens));
        }
    }

    /// Takes the prompt whose part is read next. One that fits into a part does not wait for all of a long one: it is
    /// read between two parts of it.
    fn next_reading(&mut self, left: &mut usize) -> Option<Reading<'a, B>> {
        let is_turn = self.reading.is_some() && std::mem::take(&mut self.short_is_next) && self.has_room();
        let is_short = |text: &Text| text.prompt.len() <= *left && !text.scores_prompt && text.max_tokens > 0;
        let is_of_one = |one: &Text, next: &Text| Arc::ptr_eq(&one.prompt, &next.prompt);
        if is_turn && to_front(&mut self.waiting, is_short, is_of_one) {
            return self.next_prompt(left);
        }
        self.reading.take().or_else(|| self.next_prompt(left))
    }

    /// Whether a text may join those that are open and those whose prompt is being read.
    fn has_room(&self) -> bool {
        self.open.len() + self.num_reading() < self.most_texts
    }

    /// Texts of the prompt that is being read.
    fn num_reading(&self) -> usize {
        self.reading.as_ref().map_or(0, |reading| reading.texts.len())
    }

    /// Takes the next prompt that is to be read. Prompts that are only scored are done here; `left` becomes less by
    /// their tokens. `None` where no text waits, or may join.
    fn next_prompt(&mut self, left: &mut usize) -> Option<Reading<'a, B>> {
        let is_score = |text: &Text| text.scores_prompt && text.max_tokens <= 1;
        while *left > 0 && self.has_room() {
            let first = self.waiting.pop_front()?;
            let mut some = vec![first];
            let mut room = self.most_texts - self.open.len() - self.num_reading();
            let mut num_tokens = some[0].prompt.len();
            // Scores and one token after them need no cache, so that many prompts share a pass. Texts of one prompt are
            // read once.
            let is_scored = is_score(&some[0]);
            while let Some(next) = self.waiting.front() {
                let is_next = if is_scored {
                    is_score(next) && num_tokens < PROMPT_TOKENS
                } else {
                    Arc::ptr_eq(&next.prompt, &some[0].prompt) && !next.scores_prompt && room > 1
                };
                if !is_next {
                    break;
                }
                num_tokens += if is_scored { next.prompt.len() } else { 0 };
                room -= usize::from(!is_scored);
                some.extend(self.waiting.pop_front());
            }
            some.iter().for_each(|_| self.num_waiting.has_left());
            self.metrics.prompt_tokens.fetch_add(num_tokens as u64, Relaxed);
            let mut reading = None;
            self.or_fail(senders(some.iter()), |this| {
                if is_scored {
                    *left = left.saturating_sub(num_tokens);
                    return this.score(some);
                }
                reading = this.begin(some)?;
                Ok(())
            });
            // Beside a prompt that is being read there is one more.
            if reading.is_some() || self.reading.is_some() {
                return reading;
            }
        }
        None
    }

    /// Does a part of the work; an error of it is sent to its texts.
    fn or_fail(&mut self, senders: Senders, work: impl FnOnce(&mut Self) -> Result<(), InferError>) {
        if let Err(error) = caught(|| work(self)) {
            for (index, pieces) in senders {
                // A client that has gone needs no error.
                let _ = pieces.send((index, Piece::Failed(error.clone())));
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
                writing.draw_first(&scores.next, self.engine, self.metrics)?;
            }
            writing.end();
        }
        Ok(())
    }

    /// Begins texts of one prompt. `None` if they are done, because they have no tokens of their own.
    fn begin(&mut self, texts: Vec<Text>) -> Result<Option<Reading<'a, B>>, InferError> {
        let engine = self.engine;
        let prompt = texts[0].prompt.clone();
        let mut begun = Vec::with_capacity(texts.len());
        for text in texts {
            if text.scores_prompt {
                let num_top = text.num_top.unwrap_or(0);
                let scores = score_prompts(engine.model, &[&text.prompt], num_top, engine.device)?;
                let tokens = scores.into_iter().next().map_or_else(Vec::new, |scores| scores.tokens);
                let _ = text.pieces.send((text.index, Piece::Prompt(tokens)));
            }
            let mut writing = Writing::new(text, &engine.tokenizer)?;
            match writing.text.max_tokens {
                0 => writing.end(),
                _ => begun.push(writing),
            }
        }
        if begun.is_empty() {
            return Ok(None);
        }
        let (num_read, text) = match self.open.take_kept(&prompt) {
            Some(kept) => kept,
            None => (0, self.open.before(&prompt)?),
        };
        self.metrics.kept_tokens.fetch_add(num_read as u64, Relaxed);
        begun.iter_mut().for_each(|writing| writing.num_kept = num_read);
        self.pace.begin_prompt();
        // Open and kept texts together have the caches that were planned.
        let others = self.open.len() + self.num_reading();
        self.open.keep_at_most(self.most_texts.saturating_sub(others + begun.len()));
        Ok(Some(Reading { prompt, text, num_read, texts: begun }))
    }

    /// Reads more tokens of a prompt, and draws the first token of its texts after the last.
    fn read_part(&mut self, mut reading: Reading<'a, B>, num_tokens: usize) -> Result<(), InferError> {
        let (engine, metrics) = (self.engine, self.metrics);
        reading.texts.retain(|writing| writing.is_wanted(metrics));
        if reading.texts.is_empty() {
            return Ok(());
        }
        let begun = Instant::now();
        let part = reading.num_read..reading.num_read + num_tokens;
        let logits = reading.text.read_next(&reading.prompt[part.clone()])?;
        // A GPU is still reading: without the wait the next step would seem to take the part's time.
        B::sync(engine.device).unwrap_or_else(|error| panic!("{error}"));
        self.pace.note_part(num_tokens, begun.elapsed().as_secs_f64());
        reading.num_read = part.end;
        if part.end < reading.prompt.len() {
            (self.reading, self.short_is_next) = (Some(reading), true);
            return Ok(());
        }
        let Reading { prompt, text, texts, .. } = reading;
        let (mut going_on, mut has_failed) = (Vec::with_capacity(texts.len()), false);
        for mut writing in texts {
            match writing.draw_first(&logits, engine, metrics).map(|()| writing.has_ended) {
                Ok(true) => writing.end(),
                Ok(false) => going_on.push(writing),
                Err(error) => {
                    writing.fail(error.into());
                    has_failed = true;
                }
            }
        }
        // The last text takes the cache, those before it have copies.
        let Some(last) = going_on.pop() else {
            if !has_failed {
                self.open.keep(prompt.to_vec(), text);
            }
            return Ok(());
        };
        going_on.into_iter().for_each(|writing| self.open.add(text.clone(), writing));
        self.open.add(text, last);
        Ok(())
    }

    /// Lets texts leave that have ended, or whose clients have gone; keeps what a later prompt can go on from.
    fn let_leave(&mut self) {
        let metrics = self.metrics;
        self.open.let_leave(
            |writing| writing.has_ended || !writing.is_wanted(metrics),
            |writing| (!writing.has_failed).then(|| writing.into_read_tokens()),
        );
        self.open.keep_at_most(self.most_texts.saturating_sub(self.open.len() + self.num_reading()));
    }

    /// Gives each open text its next token.
    fn step(&mut self) {
        if self.open.is_empty() {
            return;
        }
        let begun = Instant::now();
        let (engine, metrics, open) = (self.engine, self.metrics, &mut self.open);
        let done = caught(|| {
            let token = |writing: &Writing<'_>| Some(writing.last);
            let settled = |writing: &mut Writing<'_>, done: Result<(), InferError>| match done {
                Ok(()) if writing.has_ended => writing.end(),
                Ok(()) => {}
                Err(error) => writing.fail(error.into()),
            };
            let with_scores = open.owned().any(|writing| writing.text.num_top.is_some());
            let wanted = (engine.num_tokens(), with_scores);
            // The likeliest tokens, penalties and structures need a text's logits on the host. The same draw gives the
            // same token there.
            let draw_of = |writing: &mut Writing<'_>| {
                let on_host = writing.text.num_top > Some(0) || writing.sampler.needs_logits();
                (!on_host).then(|| writing.sampler.next_draw())
            };
            let sample = |writing: &mut Writing<'_>, logits: &[f32]| writing.sample(logits, engine);
            open.step_sampling(wanted, token, draw_of, sample, |writing, next, logits| {
                let done = writing.take(next, logits, engine, metrics);
                settled(writing, done);
            })
        });
        match done {
            Ok(()) => Pace::note(&mut self.pace.step, begun.elapsed().as_secs_f64()),
            Err(error) => self.open.clear().iter_mut().for_each(|writing| writing.fail(error.clone())),
        }
    }
}

/// Moves the first element that `is_first` finds, with those behind it that go with it, to the front of a queue.
/// Returns whether there was one.
fn to_front<T>(
    queue: &mut VecDeque<T>,
    is_first: impl FnMut(&T) -> bool,
    go_together: impl Fn(&T, &T) -> bool,
) -> bool {
    let Some(at) = queue.iter().position(is_first) else {
        return false;
    };
    let count = queue.iter().skip(at).take_while(|one| go_together(&queue[at], one)).count();
    let moved: Vec<T> = queue.drain(at..at + count).collect();
    moved.into_iter().rev().for_each(|one| queue.push_front(one));
    true
}

/// Where the pieces of texts go.
type Senders = Vec<(usize, UnboundedSender<(usize, Piece)>)>;

fn senders<'t>(texts: impl Iterator<Item = &'t Text>) -> Senders {
    texts.map(|text| (text.index, text.pieces.clone())).collect()
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
    /// The tokens before it that were drawn.
    read: Vec<u32>,
    /// Tokens of the prompt that were kept from an earlier text.
    num_kept: usize,
    num_tokens: usize,
    has_stopped: bool,
    has_ended: bool,
    /// Whether it has ended with an error.
    has_failed: bool,
}

impl<'t> Writing<'t> {
    /// The text before its first token. Its grammar moves to the sampler.
    fn new(mut text: Text, tokenizer: &'t Tokenizer) -> Result<Self, InferError> {
        Ok(Self {
            sampler: Sampler::with_rules(text.sampling, text.rules, &text.prompt)?.within(text.grammar.take()),
            stream: Some(text.stop.until(tokenizer.decode_stream(&text.prompt)?)),
            last: 0,
            read: Vec::new(),
            num_kept: 0,
            num_tokens: 0,
            has_stopped: false,
            has_ended: false,
            has_failed: false,
            text,
        })
    }

    /// Whether a client still waits for the text; one that has gone is counted.
    fn is_wanted(&self, metrics: &Metrics) -> bool {
        let is_wanted = !self.text.pieces.is_closed();
        if !is_wanted && !self.has_ended {
            metrics.cancelled.fetch_add(1, Relaxed);
        }
        is_wanted
    }

    /// The tokens that the model has read: the prompt, and all that were drawn but the last.
    fn into_read_tokens(self) -> Vec<u32> {
        self.text.prompt.iter().copied().chain(self.read).collect()
    }

    fn send(&self, piece: Piece) {
        // A client that has gone is seen before the next token.
        let _ = self.text.pieces.send((self.text.index, piece));
    }

    /// The next token. Rows beyond the tokenizer's vocabulary are padding: no such token is drawn, but its probability
    /// counts.
    fn sample<B: DeviceBackend>(&mut self, logits: &[f32], engine: &Engine<'_, B>) -> Option<u32> {
        self.sampler.sample(&logits[..engine.num_tokens()])
    }

    /// Draws the first token after a prompt and sends the text that it adds; `logits` are one row.
    fn draw_first<B: DeviceBackend>(
        &mut self,
        logits: &NextLogits<B>,
        engine: &Engine<'_, B>,
        metrics: &Metrics,
    ) -> Result<(), InferError> {
        let token = self.sample(logits.row(0), engine);
        let next = logits.scored(vec![token], self.text.num_top.is_some())[0];
        self.take(next, logits.row(0), engine, metrics)
    }

    /// Takes a drawn token and sends the text that it adds, with its scores if the request wants them: `logits` are
    /// read where it wants the likeliest tokens, too.
    fn take<B: DeviceBackend>(
        &mut self,
        next: Drawn,
        logits: &[f32],
        engine: &Engine<'_, B>,
        metrics: &Metrics,
    ) -> Result<(), InferError> {
        let num_read = self.text.prompt.len() + self.num_tokens;
        let token = next.token.ok_or_else(|| self.sampler.failure(num_read))?;
        let scores = self.text.num_top.map(|num_top| match num_top {
            0 => TokenScore::alone(token, next.log_probability),
            _ => TokenScore::beside(token, next.log_probability, logits, num_top),
        });
        metrics.new_tokens.fetch_add(1, Relaxed);
        if self.num_tokens > 0 {
            self.read.push(self.last);
        }
        (self.last, self.num_tokens) = (token, self.num_tokens + 1);
        let mut shown = String::new();
        if engine.ends.contains(&token) && !self.text.ignores_ends {
            (self.has_ended, self.has_stopped) = (true, true);
        } else if let Some(stream) = &mut self.stream {
            (shown, self.has_stopped) = stream.push(token)?;
            self.has_stopped |= self.sampler.has_ended();
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
        let Self { has_stopped, num_tokens, num_kept, .. } = *self;
        self.send(Piece::End { has_stopped, num_tokens, num_kept });
    }

    fn fail(&mut self, error: ApiError) {
        (self.has_ended, self.has_failed) = (true, true);
        self.send(Piece::Failed(error));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_prompts_take_the_time_that_open_texts_may_wait() {
        // Each case: seconds of a step and of a prompt's token, and the tokens of a part.
        for (step, token, expected) in [(0.01, 0.001, 400), (0.2, 0.002, 300), (0.01, 1.0, 16), (0.01, 1e-5, 512)] {
            let mut pace = Pace::new(Parts::ON_HOST);
            assert_eq!(pace.part(), 16, "nothing was read yet");
            Pace::note(&mut pace.step, step);
            pace.note_part(16, 16.0 * token);
            assert_eq!(pace.part(), expected, "{step} {token}");
        }
    }

    #[test]
    fn parts_double_while_they_end_soon_also_where_each_takes_a_time_of_its_own() {
        // Each case: seconds of a step, of any part, and of a prompt's token; the tokens of parts one after another.
        for (step, of_part, token, expected) in [
            (0.002, 0.025, 1e-6, [256, 512, 1024, 2048, 4096, 8192, 8192]),
            (0.002, 0.0, 1e-5, [256, 512, 1024, 2048, 4096, 4096, 4096]),
            (0.002, 0.0, 1e-3, [256; 7]),
            // Where a part takes longer than the wait whatever its tokens, small ones would make the texts wait often.
            (0.002, 0.06, 1e-6, [256, 512, 1024, 2048, 4096, 8192, 8192]),
            (0.002, 0.06, 1e-5, [256, 512, 1024, 2048, 4096, 8192, 8192]),
            (0.002, 0.06, 1e-4, [256, 512, 1024, 2048, 1024, 1024, 1024]),
            (0.04, 0.0, 2e-5, [256, 512, 1024, 2048, 4096, 4096, 4096]),
        ] {
            let mut pace = Pace::new(Parts::ON_GPU);
            Pace::note(&mut pace.step, step);
            let mut next = || {
                let tokens = pace.part();
                pace.note_part(tokens, of_part + token * tokens as f64);
                tokens
            };
            assert_eq!(std::array::from_fn(|_| next()), expected, "{step} {of_part} {token}");
            // A short prompt and one that was read whole say nothing about parts, and a part that compiles kernels
            // makes the next one shorter.
            let size = pace.part();
            pace.note_part(100, 1.0);
            pace.note_part(30_000, 0.09);
            assert_eq!(pace.part(), size);
            pace.note_part(size, 2.0);
            assert_eq!(pace.part(), (size / 2).max(256));
        }
    }

    #[test]
    fn a_size_whose_first_part_compiled_kernels_is_tried_again_by_the_next_prompt() {
        let (mut pace, mut read) = (Pace::new(Parts::ON_GPU), Vec::new());
        let mut next = |is_new: bool| {
            if is_new {
                pace.begin_prompt();
            }
            let tokens = pace.part();
            // 20 ms, and 60 in the first part of each size but the least, which shorter prompts compiled.
            let seconds = if tokens == 256 || read.contains(&tokens) { 0.02 } else { 0.06 };
            read.push(tokens);
            pace.note_part(tokens, seconds);
            tokens
        };
        assert_eq!([true, false, false, false].map(&mut next), [256, 512, 256, 256], "the first prompt");
        assert_eq!([true, false, false, false].map(&mut next), [256, 512, 1024, 512], "the second");
        assert_eq!([true, false, false, false].map(&mut next), [512, 1024, 2048, 1024], "the third");
    }

    #[test]
    fn a_short_prompt_goes_to_the_front_with_its_samples() {
        let mut queue = VecDeque::from([90, 71, 40, 41, 42, 50, 43]);
        let same_tens = |a: &i32, b: &i32| a / 10 == b / 10;
        assert!(to_front(&mut queue, |one| *one < 45, same_tens));
        assert_eq!(queue, [40, 41, 42, 90, 71, 50, 43]);
        assert!(!to_front(&mut queue, |one| *one < 40, same_tens));
        assert_eq!(queue, [40, 41, 42, 90, 71, 50, 43]);
    }

    #[test]
    fn no_part_is_so_short_that_kernels_for_few_tokens_read_it() {
        let pace = Pace::new(Parts::ON_GPU);
        // Each case: tokens of the rest, tokens that may be read, tokens that are read.
        for (rest, left, expected) in [
            (30_000, 8192, 8192),
            (8192, 8192, 8192),
            (8200, 8192, 8200),
            (8201, 8192, 8192),
            (30_000, 255, 0),
            (100, 255, 100),
            (100, 99, 0),
            (1, 1, 1),
        ] {
            assert_eq!(pace.of_rest(rest, left), expected, "{rest} {left}");
        }
    }

    #[test]
    fn a_first_call_that_compiled_kernels_is_forgotten_at_once_and_others_slowly() {
        let mut guess = 0.0;
        let mut noted = |seconds| {
            Pace::note(&mut guess, seconds);
            guess
        };
        assert_eq!([4.0, 0.5, 0.75, 0.25].map(&mut noted), [4.0, 0.5, 0.5625, 0.484_375]);
    }
}
