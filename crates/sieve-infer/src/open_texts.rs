//! Texts that are decoded as one batch while others join and leave between tokens.
use crate::continuation::{Continuation, Drawn, rows_of_texts};
use crate::input::check_row;
use crate::logits::NextLogits;
use crate::{InferError, Selection};
use sieve_core::Draw;
use sieve_nn::{Qwen3, TextRows};
use sieve_ops::DeviceBackend;

/// Texts that are being decoded, each with data of its owner, a `T`.
#[derive(Debug)]
pub struct OpenTexts<'a, B: DeviceBackend, T> {
    model: &'a Qwen3<B>,
    /// A text before its prompt; all texts use its rotary tables.
    empty: Continuation<'a, B>,
    /// The selector of each text, which then has a cache of its own.
    selection: Option<Selection>,
    /// The common KV cache, where the device has one.
    rows: Option<TextRows<B>>,
    texts: Vec<(Continuation<'a, B>, T)>,
    /// Most texts, and most tokens of each.
    size: [usize; 2],
}

impl<'a, B: DeviceBackend, T> OpenTexts<'a, B, T> {
    /// No text yet: at most `max_texts` of at most `room` tokens each.
    pub fn new(
        model: &'a Qwen3<B>,
        [max_texts, room]: [usize; 2],
        selection: Option<Selection>,
        device: &B::Device,
    ) -> Self {
        let mut this = Self {
            model,
            empty: Continuation::new(model, room, device),
            selection,
            rows: None,
            texts: Vec::new(),
            size: [max_texts, room],
        };
        this.clear();
        this
    }

    /// Drops all texts and their caches, as after a pass that failed, and returns their owner's data.
    pub fn clear(&mut self) -> Vec<T> {
        let [max_texts, room] = self.size;
        let acts_in_decode = self.selection.as_ref().is_some_and(Selection::acts_in_decode);
        self.rows = if acts_in_decode { None } else { rows_of_texts(self.model.shape(), max_texts, room) };
        self.texts.drain(..).map(|(_, owned)| owned).collect()
    }

    /// The owner's data of each open text.
    pub fn owned(&self) -> impl Iterator<Item = &T> {
        self.texts.iter().map(|(_, owned)| owned)
    }

    /// The owner's data of each open text.
    pub(crate) fn owned_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.texts.iter_mut().map(|(_, owned)| owned)
    }

    /// Number of open texts.
    pub fn len(&self) -> usize {
        self.texts.len()
    }

    /// Whether no text is open.
    pub fn is_empty(&self) -> bool {
        self.texts.is_empty()
    }

    /// Whether one more text may join.
    pub fn has_room(&self) -> bool {
        self.texts.len() < self.size[0]
    }

    /// A text that has read nothing, for a prompt that the caller reads, in parts perhaps, before the text is
    /// [added](Self::add).
    ///
    /// # Errors
    /// A prompt that is empty, too long, or has a token outside the vocabulary.
    pub fn before(&self, prompt: &[u32]) -> Result<Continuation<'a, B>, InferError> {
        check_row(prompt, prompt.len(), self.model.shape())?;
        Ok(self.empty.clone().with_copy_of(self.selection.as_ref()))
    }

    /// Adds a text that has read its prompt to the others.
    pub fn add(&mut self, mut text: Continuation<'a, B>, owned: T) {
        text.join(&mut self.rows);
        self.texts.push((text, owned));
    }

    /// Lets texts leave for which `has_ended` holds; `left` takes each with its owner's data. Where texts share the
    /// rows of one cache, the text that leaves has none of its own.
    pub fn let_leave(&mut self, mut has_ended: impl FnMut(&T) -> bool, mut left: impl FnMut(Continuation<'a, B>, T)) {
        for (mut text, owned) in std::mem::take(&mut self.texts) {
            if has_ended(&owned) {
                text.leave(&mut self.rows);
                left(text, owned);
            } else {
                self.texts.push((text, owned));
            }
        }
    }

    /// Reads the token of each text that `token_of` gives; a text without one leaves first. Then `next` takes each
    /// text's logits.
    ///
    /// # Errors
    /// Operands that the selector refuses.
    pub fn step(
        &mut self,
        token_of: impl FnMut(&T) -> Option<u32>,
        mut next: impl FnMut(&mut T, &[f32]),
    ) -> Result<(), InferError> {
        let (num_tokens, with_scores) = (self.model.shape().vocab_size, false);
        let sample = |owned: &mut T, logits: &[f32]| {
            next(owned, logits);
            None
        };
        self.step_sampling((num_tokens, with_scores), token_of, |_| None, sample, |_, _, _| {})
    }

    /// As [`step`](Self::step), but draws each text's next token: on the device, among the first `num_tokens`, where
    /// `draw_of` gives a draw; where it gives none, `sample` takes the text's logits and gives its token. `next` takes
    /// this token, with its log-probability if `with_scores`, and the logits that `sample` got, or none.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn step_sampling(
        &mut self,
        wanted: (usize, bool),
        token_of: impl FnMut(&T) -> Option<u32>,
        draw_of: impl FnMut(&mut T) -> Option<Draw>,
        sample: impl FnMut(&mut T, &[f32]) -> Option<u32>,
        next: impl FnMut(&mut T, Drawn, &[f32]),
    ) -> Result<(), InferError> {
        let tokens = self.tokens(token_of, |_, _| {});
        self.read_and_draw(&tokens, wanted, draw_of, sample, next)
    }

    /// As [`step_sampling`](Self::step_sampling), but all tokens are drawn on the device.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn step_drawing(
        &mut self,
        wanted: (usize, bool),
        token_of: impl FnMut(&T) -> Option<u32>,
        draw_of: impl FnMut(&mut T) -> Draw,
        next: impl FnMut(&mut T, Drawn),
    ) -> Result<(), InferError> {
        self.step_until_left(wanted, token_of, |_, _| {}, draw_of, next)
    }

    /// As [`step_drawing`](Self::step_drawing); `left` takes each text that leaves, with its last state.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub(crate) fn step_until_left(
        &mut self,
        wanted: (usize, bool),
        token_of: impl FnMut(&T) -> Option<u32>,
        left: impl FnMut(&Continuation<'a, B>, &mut T),
        mut draw_of: impl FnMut(&mut T) -> Draw,
        mut next: impl FnMut(&mut T, Drawn),
    ) -> Result<(), InferError> {
        let tokens = self.tokens(token_of, left);
        let draw_of = |owned: &mut T| Some(draw_of(owned));
        self.read_and_draw(&tokens, wanted, draw_of, |_, _| None, |owned, drawn, _| next(owned, drawn))
    }

    /// Reads `tokens`, one of each text, and draws the next ones as [`step_sampling`](Self::step_sampling) does.
    fn read_and_draw(
        &mut self,
        tokens: &[u32],
        (num_tokens, with_scores): (usize, bool),
        draw_of: impl FnMut(&mut T) -> Option<Draw>,
        mut sample: impl FnMut(&mut T, &[f32]) -> Option<u32>,
        mut next: impl FnMut(&mut T, Drawn, &[f32]),
    ) -> Result<(), InferError> {
        if tokens.is_empty() {
            return Ok(());
        }
        let draws: Vec<Option<Draw>> = self.owned_mut().map(draw_of).collect();
        let mut texts: Vec<_> = self.texts.iter_mut().map(|(text, _)| text).collect();
        let (logits, row_of) = Continuation::logits_each(&mut texts, tokens, &mut self.rows)?;
        let num_rows = logits.dims()[0];
        // Rows without a text, and those that the host draws from, draw a token that nobody reads.
        let mut of_rows = vec![Draw::LIKELIEST; num_rows];
        let mut on_host = Vec::new();
        for (&row, draw) in row_of.iter().zip(&draws) {
            match draw {
                Some(draw) => of_rows[row] = *draw,
                None => on_host.push(row),
            }
        }
        on_host.sort_unstable();
        let some_on_device = on_host.len() < draws.len();
        let logits = NextLogits::with_rows(logits, on_host);
        let mut drawn = if some_on_device { logits.draw(&of_rows, num_tokens) } else { vec![None; num_rows] };
        for (owned, &row) in self.owned_mut().zip(&row_of) {
            if let Some(logits) = logits.row_on_host(row) {
                drawn[row] = sample(owned, logits);
            }
        }
        let drawn = logits.scored(drawn, with_scores);
        for (owned, row) in self.owned_mut().zip(row_of) {
            next(owned, drawn[row], logits.row_on_host(row).unwrap_or_default());
        }
        Ok(())
    }

    /// The token of each text that goes on. Where `token_of` gives `None`, the text leaves, and `left` gets its data.
    fn tokens(
        &mut self,
        mut token_of: impl FnMut(&T) -> Option<u32>,
        mut left: impl FnMut(&Continuation<'a, B>, &mut T),
    ) -> Vec<u32> {
        let mut tokens = Vec::with_capacity(self.texts.len());
        let rows = &mut self.rows;
        self.texts.retain_mut(|(text, owned)| {
            let token = token_of(owned);
            match token {
                Some(token) => tokens.push(token),
                None => {
                    text.leave(rows);
                    left(text, owned);
                }
            }
            token.is_some()
        });
        tokens
    }
}
