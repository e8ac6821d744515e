//! Greedy answers to several prompts, decoded as one batch.
use crate::continuation::{Continuation, rows_of_texts};
use crate::input::check_vocabulary;
use crate::{EvalError, Selection, TaskModel};
use sieve_data::DecodeStream;
use sieve_ops::{DeviceBackend, first_of_largest};

/// Called with a prompt's index, its text once the prompt is read, and the logits of its next token.
pub(crate) type AfterPrompt<'x, B> = dyn FnMut(usize, &mut Continuation<'_, B>, &[f32]) -> Result<(), EvalError> + 'x;

/// How prompts are answered.
pub(crate) struct Greedy<'x, B: DeviceBackend> {
    /// Tokens of the answer to a prompt, given by its index, at most.
    pub(crate) max_new_tokens: &'x dyn Fn(usize) -> usize,
    /// Tokens that a text has room for after its prompt, at least as many as an answer's.
    pub(crate) room: usize,
    /// Texts that are decoded as one batch, at most.
    pub(crate) together: usize,
    /// Whether the text of the answer to a prompt, given by its index, is complete.
    pub(crate) is_enough: &'x dyn Fn(usize, &str) -> bool,
    /// What else is asked of each text.
    pub(crate) after_prompt: &'x mut AfterPrompt<'x, B>,
}

impl<B: DeviceBackend> Greedy<'_, B> {
    /// The greedy continuation of each prompt. It ends where the answer is complete, before an end token of the model,
    /// or after `max_new_tokens` tokens. Prompts are read one by one; `observe` is called with the number of finished
    /// answers.
    ///
    /// # Errors
    /// Tokens outside the vocabulary, a NaN logit, operands that the selector refuses, an error of `after_prompt`.
    pub(crate) fn answers(
        self,
        model: &TaskModel<'_, B>,
        prompts: &[impl AsRef<[u32]>],
        mut selection: Option<&mut Selection>,
        observe: &mut dyn FnMut(usize),
    ) -> Result<Vec<String>, EvalError> {
        let prefix_id = model.tokenizer.prefix_id()?;
        // Logits beyond the tokenizer's vocabulary are padding.
        let num_tokens = model.tokenizer.vocab_size().min(model.model.shape().vocab_size);
        let longest = prompts.iter().map(|prompt| prompt.as_ref().len()).max();
        let room = longest.unwrap_or(0).max(1) + self.room;
        let empty = Continuation::new(model.model, room, model.device);
        let acts_in_decode = selection.as_ref().is_some_and(|selection| selection.acts_in_decode());
        let mut rows = match acts_in_decode {
            // The texts then have caches of their own.
            true => None,
            false => rows_of_texts(model.model.shape(), self.together.min(prompts.len()), room),
        };
        let mut answers = vec![String::new(); prompts.len()];
        let (mut open, mut num_done) = (Vec::<OpenAnswer<'_, '_, B>>::new(), 0);
        let mut unread = prompts.iter().enumerate();
        while num_done < prompts.len() {
            for (prompt_idx, prompt) in unread.by_ref().take(self.together - open.len()) {
                let asked = prompt.as_ref();
                let prompt = match asked {
                    [] => std::slice::from_ref(&prefix_id),
                    prompt => prompt,
                };
                check_vocabulary(prompt, model.model.shape().vocab_size)?;
                let mut text = empty.clone().with_copy_of(selection.as_deref());
                let logits = text.read(prompt)?;
                (self.after_prompt)(prompt_idx, &mut text, &logits)?;
                text.join(&mut rows);
                open.push(OpenAnswer {
                    prompt_idx,
                    text,
                    next: first_of_largest(&logits[..num_tokens]),
                    stream: model.tokenizer.decode_stream(asked)?,
                    answer: String::new(),
                    num_tokens: 0,
                });
            }
            let (mut tokens, mut still_open) = (Vec::new(), Vec::new());
            for mut answer in open {
                let prompt_idx = answer.prompt_idx;
                let is_enough = |text: &str| (self.is_enough)(prompt_idx, text);
                let max_new_tokens = (self.max_new_tokens)(prompt_idx);
                if let Some(token) = answer.next_token(model.ends, max_new_tokens, is_enough)? {
                    tokens.push(token);
                    still_open.push(answer);
                    continue;
                }
                answer.text.leave(&mut rows);
                answer.text.add_totals_to(selection.as_deref_mut());
                answers[prompt_idx] = answer.answer + &answer.stream.finish()?;
                num_done += 1;
                observe(num_done);
            }
            open = still_open;
            if open.is_empty() {
                continue;
            }
            let mut texts: Vec<_> = open.iter_mut().map(|answer| &mut answer.text).collect();
            let next = Continuation::read_each_likeliest(&mut texts, &tokens, &mut rows, num_tokens)?;
            for (answer, next) in open.iter_mut().zip(next) {
                answer.next = next;
            }
        }
        Ok(answers)
    }
}

/// A text whose answer is still being generated.
struct OpenAnswer<'a, 't, B: DeviceBackend> {
    prompt_idx: usize,
    /// Prompt and answer, without the answer's last token.
    text: Continuation<'a, B>,
    /// The likeliest next token; `None` after a NaN logit.
    next: Option<u32>,
    stream: DecodeStream<'t>,
    answer: String,
    /// Number of tokens generated so far.
    num_tokens: usize,
}

impl<B: DeviceBackend> OpenAnswer<'_, '_, B> {
    /// Appends the likeliest token to the answer and returns it; `None` if the answer is complete.
    fn next_token(
        &mut self,
        ends: &[u32],
        max_new_tokens: usize,
        is_enough: impl Fn(&str) -> bool,
    ) -> Result<Option<u32>, EvalError> {
        let token = self.next.ok_or(EvalError::NotFinite(self.text.cache().num_tokens))?;
        if ends.contains(&token) || self.num_tokens == max_new_tokens {
            return Ok(None);
        }
        self.num_tokens += 1;
        self.answer += &self.stream.push(token)?;
        let continues = !is_enough(&self.answer) && self.num_tokens < max_new_tokens;
        Ok(continues.then_some(token))
    }
}
