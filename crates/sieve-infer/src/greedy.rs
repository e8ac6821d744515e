//! Greedy answers to several prompts, decoded as one batch.
use crate::continuation::Continuation;
use crate::stop::{StopTexts, StoppedText};
use crate::{InferError, OpenTexts, Selection, TaskModel};
use sieve_core::Draw;
use sieve_ops::{DeviceBackend, first_of_largest};

/// Called with a prompt's index, its text once the prompt is read, and the logits of its next token.
pub type AfterPrompt<'x, B> = dyn FnMut(usize, &mut Continuation<'_, B>, &[f32]) -> Result<(), InferError> + 'x;

/// How prompts are answered.
pub struct Greedy<'x, B: DeviceBackend> {
    /// Tokens of the answer to a prompt, given by its index, at most.
    pub max_new_tokens: &'x dyn Fn(usize) -> usize,
    /// Tokens that a text has room for after its prompt, at least as many as an answer's.
    pub room: usize,
    /// Texts that are decoded as one batch, at most.
    pub together: usize,
    /// Texts before which an answer ends.
    pub stop: &'x StopTexts,
    /// Whether the text of the answer to a prompt, given by its index, is complete.
    pub is_enough: &'x dyn Fn(usize, &str) -> bool,
    /// Called with each text after its prompt was read, to ask the model more of it.
    pub after_prompt: &'x mut AfterPrompt<'x, B>,
}

impl<B: DeviceBackend> Greedy<'_, B> {
    /// The greedy continuation of each prompt. It ends where the answer is complete, before a stop text or an end token
    /// of the model, or after `max_new_tokens` tokens. Prompts are read one by one; `observe` is called with the number
    /// of finished answers.
    ///
    /// # Errors
    /// Tokens outside the vocabulary, a NaN logit, operands that the selector refuses, an error of `after_prompt`.
    pub fn answers(
        self,
        model: &TaskModel<'_, B>,
        prompts: &[impl AsRef<[u32]>],
        mut selection: Option<&mut Selection>,
        observe: &mut dyn FnMut(usize),
    ) -> Result<Vec<String>, InferError> {
        let prefix_id = model.tokenizer.prefix_id()?;
        // Logits beyond the tokenizer's vocabulary are padding.
        let num_tokens = model.tokenizer.vocab_size().min(model.model.shape().vocab_size);
        let longest = prompts.iter().map(|prompt| prompt.as_ref().len()).max();
        let room = longest.unwrap_or(0).max(1) + self.room;
        let size = [self.together.min(prompts.len()), room];
        let mut open = OpenTexts::new(model.model, size, selection.as_deref().cloned(), model.device);
        let mut answers = vec![String::new(); prompts.len()];
        let mut num_done = 0;
        let mut unread = prompts.iter().enumerate();
        while num_done < prompts.len() {
            for (prompt_idx, prompt) in unread.by_ref().take(size[0] - open.len()) {
                let asked = prompt.as_ref();
                let prompt = match asked {
                    [] => std::slice::from_ref(&prefix_id),
                    prompt => prompt,
                };
                let mut text = open.before(prompt)?;
                let logits = text.read(prompt)?;
                (self.after_prompt)(prompt_idx, &mut text, &logits)?;
                let answer = OpenAnswer {
                    prompt_idx,
                    num_read: prompt.len(),
                    next: first_of_largest(&logits[..num_tokens]),
                    last: None,
                    stream: Some(self.stop.until(model.tokenizer.decode_stream(asked)?)),
                    answer: String::new(),
                    num_tokens: 0,
                };
                open.add(text, answer);
            }
            for answer in open.owned_mut() {
                let max_new_tokens = (self.max_new_tokens)(answer.prompt_idx);
                let (prompt_idx, is_enough) = (answer.prompt_idx, self.is_enough);
                answer.last = answer.next_token(model.ends, max_new_tokens, |text| is_enough(prompt_idx, text))?;
                if answer.last.is_none()
                    && let Some(stream) = answer.stream.take()
                {
                    answers[answer.prompt_idx] = std::mem::take(&mut answer.answer) + &stream.finish()?.0;
                }
            }
            open.step_until_left(
                (num_tokens, false),
                |answer| answer.last,
                |text, _| {
                    text.add_totals_to(selection.as_deref_mut());
                    num_done += 1;
                    observe(num_done);
                },
                |_| Draw::LIKELIEST,
                |answer, next| answer.next = next.token,
            )?;
        }
        Ok(answers)
    }
}

/// A text whose answer is still being generated.
struct OpenAnswer<'t> {
    prompt_idx: usize,
    /// Number of tokens of the prompt.
    num_read: usize,
    /// The likeliest next token; `None` after a NaN logit.
    next: Option<u32>,
    /// The last token, which the model has not read yet; `None` once the answer is complete.
    last: Option<u32>,
    /// `None` once the answer is complete.
    stream: Option<StoppedText<'t>>,
    answer: String,
    /// Number of tokens generated so far.
    num_tokens: usize,
}

impl OpenAnswer<'_> {
    /// Appends the likeliest token to the answer and returns it; `None` if the answer is complete.
    fn next_token(
        &mut self,
        ends: &[u32],
        max_new_tokens: usize,
        is_enough: impl Fn(&str) -> bool,
    ) -> Result<Option<u32>, InferError> {
        let token = self.next.ok_or(InferError::NotFinite(self.num_read + self.num_tokens))?;
        if ends.contains(&token) || self.num_tokens == max_new_tokens {
            return Ok(None);
        }
        self.num_tokens += 1;
        if let Some(stream) = &mut self.stream {
            let (text, is_met) = stream.push(token)?;
            self.answer += &text;
            if is_met {
                return Ok(None);
            }
        }
        let continues = !is_enough(&self.answer) && self.num_tokens < max_new_tokens;
        Ok(continues.then_some(token))
    }
}
