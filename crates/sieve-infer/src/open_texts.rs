//! Texts that are decoded as one batch while others join and leave between tokens, and texts that have ended and may go
//! on.
use crate::continuation::{Continuation, Drawn, share_a_cache};
use crate::input::check_row;
use crate::kept_texts::KeptTexts;
use crate::logits::NextLogits;
use crate::{InferError, Selection};
use sieve_core::Draw;
use sieve_nn::{Qwen3, TextRows};
use sieve_ops::DeviceBackend;

/// Tokens from which a GPU keeps a text: as many as it reads again in the time that going on from the kept text takes.
/// That time is spent on launches in each layer: 1.5 ms a layer on an H200, in which a dense layer of this width reads
/// 2.5e10 / width^2 tokens at 400 TFLOP/s. A dense model of 85M parameters read 8,000 tokens again in 14 ms, and 100
/// tokens behind as many kept ones in 19 ms.
fn least_kept_on_gpu(width: usize) -> usize {
    const LEAST: usize = 1024;
    (25_000_000_000 / (width * width).max(1)).max(LEAST)
}

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
    /// Whether there is one again after a pass that failed.
    has_rows: bool,
    texts: Vec<(Continuation<'a, B>, T)>,
    /// Texts that have ended, where a later prompt can go on from them.
    kept: KeptTexts<'a, B>,
    device: B::Device,
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
        let acts_in_decode = selection.as_ref().is_some_and(Selection::acts_in_decode);
        let mut this = Self {
            model,
            empty: Continuation::new(model, room, device),
            selection,
            rows: None,
            has_rows: !acts_in_decode && share_a_cache::<B>(model.shape(), [max_texts, room], device),
            texts: Vec::new(),
            kept: KeptTexts::default(),
            device: device.clone(),
            size: [max_texts, room],
        };
        this.clear();
        this
    }

    /// Drops all open texts and the common cache, as after a pass that failed, and returns their owner's data.
    pub fn clear(&mut self) -> Vec<T> {
        self.rows = None;
        self.drop_lost();
        let [max_texts, room] = self.size;
        self.rows = self.has_rows.then(|| TextRows::new(max_texts, room, &self.device));
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

    /// Whether texts share a cache, but after a pass that failed.
    pub fn share_a_cache(&self) -> bool {
        self.has_rows
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

    /// Whether a prompt may be read in parts. Under a selector it is read in one pass.
    pub fn reads_in_parts(&self) -> bool {
        self.selection.is_none()
    }

    /// Adds a text that has read its prompt to the others. If no row is left for it, the oldest kept text is dropped.
    pub fn add(&mut self, mut text: Continuation<'a, B>, owned: T) {
        self.free_a_row();
        text.join(&mut self.rows);
        self.texts.push((text, owned));
    }

    /// Drops the oldest kept text if no row is free and none can be added.
    fn free_a_row(&mut self) {
        if self.rows.as_ref().is_some_and(|rows| !rows.has_free()) {
            self.keep_at_most(self.kept.len().saturating_sub(1));
        }
    }

    /// Lets texts leave for which `has_ended` holds; `left` takes each one's data from its owner, and returns the
    /// tokens that the text has read if it is to be kept.
    pub fn let_leave(&mut self, mut has_ended: impl FnMut(&T) -> bool, mut left: impl FnMut(T) -> Option<Vec<u32>>) {
        for (mut text, owned) in std::mem::take(&mut self.texts) {
            if !has_ended(&owned) {
                self.texts.push((text, owned));
                continue;
            }
            match left(owned) {
                Some(tokens) => self.keep(tokens, text),
                None => text.leave(&mut self.rows),
            }
        }
    }

    /// Keeps a text that has read `tokens` and has ended, for a prompt that begins with it. A text under a selector is
    /// not kept, as its keys depend on the whole prompt, nor one that a GPU reads as soon again.
    pub fn keep(&mut self, tokens: Vec<u32>, mut text: Continuation<'a, B>) {
        let is_short = !B::ON_HOST && tokens.len() < least_kept_on_gpu(self.model.shape().d_model);
        if self.selection.is_some() || is_short {
            text.leave(&mut self.rows);
            return;
        }
        if !text.is_in_row() {
            self.free_a_row();
            if self.rows.as_ref().is_some_and(|rows| !rows.has_free()) {
                return;
            }
            text.join(&mut self.rows);
        }
        text.stay(&mut self.rows);
        self.kept.keep(tokens, text);
    }

    /// Takes the longest kept text that `prompt` begins with, and the number of tokens that it has read.
    pub fn take_kept(&mut self, prompt: &[u32]) -> Option<(usize, Continuation<'a, B>)> {
        self.drop_lost();
        let (num_read, mut text) = self.kept.take(prompt)?;
        text.go_on(&mut self.rows);
        Some((num_read, text))
    }

    /// Drops the oldest kept texts, until no more than `most` are left.
    pub fn keep_at_most(&mut self, most: usize) {
        let rows = &mut self.rows;
        self.kept.all_but(most).for_each(|mut text| text.leave(rows));
    }

    /// Whether open and kept texts would do with a quarter of the common cache or less.
    pub fn is_roomy(&self) -> bool {
        self.rows.as_ref().is_some_and(TextRows::is_roomy)
    }

    /// Tokens for which the common cache has room now, all rows together; 0 without one.
    pub fn common_room(&self) -> usize {
        self.rows.as_ref().map_or(0, TextRows::tokens_held)
    }

    /// Gives memory of the common cache back that open and kept texts do not need.
    pub fn shrink(&mut self) {
        if let Some(rows) = &mut self.rows {
            let now = rows.shrink();
            let open = self.texts.iter_mut().map(|(text, _)| text);
            open.chain(self.kept.iter_mut()).for_each(|text| text.move_row(&now));
        }
    }

    /// Drops kept texts whose common cache is gone.
    fn drop_lost(&mut self) {
        if self.rows.is_none() {
            self.kept.retain(|text| !text.is_in_row());
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_model::{tiny_model, words};
    use burn_flex::{Flex, FlexDevice};
    use sieve_core::{Attention, DmaShape};

    /// Texts of at most 3 at a time in rows of one cache, as on a GPU. A step on a CPU gives them their own caches.
    fn in_rows(model: &Qwen3<Flex>) -> OpenTexts<'_, Flex, usize> {
        let rows = TextRows::beginning_with([2, 8], [3, 40], &FlexDevice);
        OpenTexts { rows: Some(rows), ..OpenTexts::new(model, [3, 40], None, &FlexDevice) }
    }

    #[test]
    fn a_text_that_was_kept_in_its_row_goes_on_as_one_that_was_read_whole() {
        for attention in [Attention::DENSE, Attention::Dma(DmaShape::published(5)), Attention::swa(7)] {
            let model = tiny_model(attention, 64);
            let mut open = in_rows(&model);
            let prompts = [words(9), words(12).split_off(1), words(14).split_off(2)];
            for (owned, prompt) in prompts.iter().enumerate() {
                let text = read(&open, prompt);
                open.add(text, owned);
            }
            let leave = |open: &mut OpenTexts<'_, Flex, usize>, which: usize| {
                open.let_leave(|&owned| owned == which, |owned| Some(prompts[owned].clone()));
            };
            leave(&mut open, 0);
            leave(&mut open, 2);
            assert_eq!((open.len(), open.kept.len()), (1, 2));
            // The third text is longer behind its beginning, and no other is that beginning.
            let longer = [&prompts[2][..], &[3, 5]].concat();
            let (num_read, mut text) = open.take_kept(&longer).expect("it was kept");
            let mut whole = open.before(&longer).expect("a prompt");
            assert_eq!(num_read, prompts[2].len());
            assert_eq!(text.read(&longer[num_read..]).expect("it fits"), whole.read(&longer).expect("it fits"));
            assert!(open.take_kept(&longer).is_none(), "a text goes on once");
            // Two more texts: the second takes the row of the text that is kept.
            open.add(text, 7);
            assert_eq!(open.kept.len(), 1);
            open.add(whole, 8);
            assert_eq!((open.len(), open.kept.len()), (3, 0));
            leave(&mut open, 1);
            assert_eq!(open.kept.len(), 1);
            open.keep_at_most(0);
            assert!(open.rows.as_ref().is_some_and(TextRows::has_free));
        }
    }

    #[test]
    fn texts_go_on_in_a_cache_that_has_shrunk() {
        let model = tiny_model(Attention::DENSE, 64);
        let rows = TextRows::beginning_with([1, 8], [6, 40], &FlexDevice);
        let mut open = OpenTexts { rows: Some(rows), ..OpenTexts::new(&model, [6, 40], None, &FlexDevice) };
        assert!(!open.is_roomy());
        let prompts = [words(30), words(6), words(9).split_off(2)];
        for (owned, prompt) in prompts.iter().enumerate() {
            let text = read(&open, prompt);
            open.add(text, owned);
        }
        open.let_leave(|&owned| owned == 0, |_| None);
        open.let_leave(|&owned| owned == 2, |owned| Some(prompts[owned].clone()));
        let rest = |open: &mut OpenTexts<'_, Flex, usize>| {
            let (num_read, mut text) = open.take_kept(&[&prompts[2][..], &[3]].concat()).expect("it was kept");
            let whole = open.before(&[3]).expect("a prompt").read(&[&prompts[2][..], &[3]].concat()).expect("it fits");
            assert_eq!((num_read, text.read(&[3]).expect("it fits")), (prompts[2].len(), whole));
        };
        assert!(open.is_roomy(), "two texts of up to 8 tokens in 4 rows of 32");
        open.shrink();
        assert!(!open.is_roomy());
        rest(&mut open);
        let mut logits = Vec::new();
        open.step(|_| Some(3), |_, row| logits = row.to_vec()).expect("a step");
        let longer = [&prompts[1][..], &[3]].concat();
        assert_eq!(logits, open.before(&longer).expect("a prompt").read(&longer).expect("it fits"));
    }

    fn read<'a>(open: &OpenTexts<'a, Flex, usize>, prompt: &[u32]) -> Continuation<'a, Flex> {
        let mut text = open.before(prompt).expect("a prompt");
        text.read(prompt).expect("a prompt");
        text
    }

    #[test]
    fn kept_texts_end_with_the_cache_that_has_their_rows() {
        let model = tiny_model(Attention::DENSE, 64);
        let mut open = in_rows(&model);
        let [first, second] = [words(9), words(11)];
        let texts = [&first, &second].map(|prompt| read(&open, prompt));
        let [of_first, of_second] = texts;
        open.keep(first.clone(), of_first);
        open.add(of_second, 0);
        // There is no step for all rows on a CPU: the open text gets its own cache.
        open.step(|_| Some(3), |_, _| {}).expect("a step");
        assert!(open.rows.is_none());
        assert!(open.take_kept(&[&first[..], &[1]].concat()).is_none());
        open.let_leave(|_| true, |_| Some([&second[..], &[3]].concat()));
        let longer = [&second[..], &[3, 4]].concat();
        let (num_read, mut text) = open.take_kept(&longer).expect("it has its own cache");
        let whole = open.before(&longer).expect("a prompt").read(&longer).expect("it fits");
        assert_eq!((num_read, text.read(&[4]).expect("it fits")), (12, whole));
    }

    #[test]
    fn a_gpu_keeps_texts_that_take_longer_to_read_again() {
        assert_eq!([64, 768, 2048, 4096, 8192].map(least_kept_on_gpu), [6_103_515, 42_385, 5_960, 1_490, 1_024]);
    }
}
