//! Texts of the tasks that fill a number of tokens.
use super::random::{Random, Split};
use super::{LongSample, LongSource, LongTask, Size};
use crate::EvalError;
use sieve_data::Tokenizer;

/// Samples of a task at one length.
#[derive(Clone, Debug)]
pub struct LongTexts {
    /// The task.
    pub task: LongTask,
    /// Tokens that a prompt and the tokens generated after it may take.
    pub length: usize,
    /// The samples, with their prompts in tokens.
    pub samples: Vec<(LongSample, Vec<u32>)>,
}

/// Generates `count` samples, numbered from `first`, of `length` tokens or a little less, including the tokens to be
/// generated. The same arguments give the same samples.
///
/// # Errors
/// A length without room for the shortest text, a question task without its file.
pub fn long_texts(
    task: LongTask,
    source: &LongSource,
    tokenizer: &Tokenizer,
    (split, seed): (Split, u64),
    length: usize,
    numbers: std::ops::Range<u64>,
) -> Result<LongTexts, EvalError> {
    if let super::Kind::Qa(which) = task.kind
        && source.qa[which].is_none()
    {
        let (name, option) = (task.name(), ["--qa-1", "--qa-2"][which]);
        let what = format!("{name} asks the questions of a published file, which is not inside the program");
        let hint = format!("give the file with {option}, or leave the task out of --tasks");
        return Err(EvalError::refused(what, hint));
    }
    let maker = Maker {
        task,
        source,
        tokenizer,
        split,
        seed,
        length,
    };
    let room = length.saturating_sub(task.max_new_tokens());
    let [fewest, most] = task.bounds(source);
    let parts = maker.largest(numbers.start, room, fewest, most)?;
    let mut samples = Vec::new();
    for number in numbers {
        let mut parts = parts;
        samples.push(loop {
            let (sample, tokens) = maker.make(number, parts)?;
            if tokens.len() <= room {
                break (sample, tokens);
            }
            if parts == fewest {
                return Err(maker.too_short(tokens.len()));
            }
            let surplus = parts * (tokens.len() - room) / tokens.len();
            parts = parts.saturating_sub(surplus.max(1)).max(fewest);
        });
    }
    Ok(LongTexts { task, length, samples })
}

struct Maker<'a> {
    task: LongTask,
    source: &'a LongSource,
    tokenizer: &'a Tokenizer,
    split: Split,
    seed: u64,
    length: usize,
}

impl Maker<'_> {
    fn make(&self, number: u64, parts: usize) -> Result<(LongSample, Vec<u32>), EvalError> {
        let name = self.task.name();
        let mut random = Random::new(self.split, self.seed, name, self.length, number);
        let size = Size {
            parts,
            length: self.length,
        };
        let sample = self.task.sample(self.source, &mut random, size);
        let tokens = match self.split {
            Split::Test => self.tokenizer.encode_with_bos(&sample.prompt)?,
            // Training puts no token before a text.
            Split::Train => self.tokenizer.encode(&sample.prompt)?,
        };
        Ok((sample, tokens))
    }

    /// Parts of the longest text with room, to within 1 %.
    fn largest(&self, number: u64, room: usize, fewest: usize, most: usize) -> Result<usize, EvalError> {
        let tokens = |parts| Ok::<_, EvalError>(self.make(number, parts)?.1.len());
        let first = tokens(fewest)?;
        if first > room {
            return Err(self.too_short(first));
        }
        // `fits` does, `not` does not.
        let (mut fits, mut fits_tokens) = (fewest, first);
        let (mut not, mut not_tokens) = (fewest, first);
        while not_tokens <= room {
            if not == most {
                return Ok(most);
            }
            (fits, fits_tokens) = (not, not_tokens);
            not = (2 * not + 4).min(most);
            not_tokens = tokens(not)?;
        }
        while not - fits > 1 + fits / 100 {
            let share = (room - fits_tokens) as f64 / (not_tokens - fits_tokens) as f64;
            let step = (share * (not - fits) as f64) as usize;
            let middle = fits + step.clamp(1, not - fits - 1);
            let middle_tokens = tokens(middle)?;
            if middle_tokens <= room {
                (fits, fits_tokens) = (middle, middle_tokens);
                // What is right above is tried next, so that the guess ends.
                let above = fits + 1 + fits / 100;
                if above < not {
                    let above_tokens = tokens(above)?;
                    if above_tokens > room {
                        (not, not_tokens) = (above, above_tokens);
                    }
                }
            } else {
                (not, not_tokens) = (middle, middle_tokens);
            }
        }
        Ok(fits)
    }

    fn too_short(&self, needed: usize) -> EvalError {
        let needed = needed + self.task.max_new_tokens();
        let (task, length) = (self.task.name(), self.length);
        let what =
            format!("the shortest text of {task} takes {needed} tokens of this tokenizer, and the length is {length}");
        let option = match self.split {
            Split::Test => "--lengths",
            Split::Train => "--min-length",
        };
        let hint = format!("use {option} {needed} or more for it, or leave the task out");
        EvalError::refused(what, hint)
    }
}
