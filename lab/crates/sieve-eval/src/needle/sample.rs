//! Needles: a sentence with a number, the question for it, and wrong numbers.
use super::haystack::pick;
use super::{NUM_DISTRACTORS, NeedleConfig};
use crate::EvalError;
use crate::seeded::{different, seeded};
use chacha20::rand_core::Rng;
use sieve_data::Tokenizer;

const COLOURS: [&str; 10] =
    ["red", "blue", "green", "yellow", "orange", "purple", "silver", "golden", "white", "black"];
const ANIMALS: [&str; 12] = [
    "falcon", "tiger", "rabbit", "salmon", "beetle", "badger", "camel", "dolphin", "spider", "parrot", "lizard",
    "otter",
];

/// A greedy continuation may take this many tokens more than the longest answer has.
const SPARE_TOKENS: usize = 8;

/// Sentence, question and answers of one needle.
pub(super) struct Texts {
    /// The sentence that is hidden in the haystack.
    pub(super) statement: String,
    /// The beginning of that sentence, after the haystack; the answer comes next.
    pub(super) question: String,
    /// The answer: a number of seven digits.
    pub(super) answer: String,
    /// Wrong answers: other numbers of seven digits.
    pub(super) distractors: Vec<String>,
}

/// A needle in tokens, with its place in the grid.
pub(super) struct Sample {
    pub(super) length: usize,
    pub(super) depth: f64,
    pub(super) statement: Vec<u32>,
    pub(super) question: Vec<u32>,
    pub(super) answer: String,
    /// Tokens of the answer, then of the distractors, each with the space before it.
    pub(super) candidates: Vec<Vec<u32>>,
}

/// The needle of a cell of the grid. It depends only on the arguments.
pub(super) fn texts(seed: u64, length: usize, depth: f64, number: usize) -> Texts {
    let mut random = seeded([seed, length as u64, depth.to_bits(), number as u64]);
    let key = format!("{} {}", pick(&mut random, &COLOURS), pick(&mut random, &ANIMALS));
    let number = || (1_000_000 + random.next_u64() % 9_000_000).to_string();
    let mut distractors = different(NUM_DISTRACTORS + 1, number);
    let answer = distractors.remove(0);
    Texts {
        statement: format!("\nThe secret number of the {key} is {answer}.\n"),
        question: format!("\nThe secret number of the {key} is"),
        answer,
        distractors,
    }
}

impl Sample {
    /// Tokenises the texts of one needle. The first of the candidates is the right answer.
    fn new(texts: Texts, length: usize, depth: f64, tokenizer: &Tokenizer) -> Result<Self, EvalError> {
        let numbers = std::iter::once(&texts.answer).chain(&texts.distractors);
        let candidates =
            numbers.map(|number| Ok(tokenizer.encode(&format!(" {number}"))?)).collect::<Result<_, EvalError>>()?;
        Ok(Self {
            length,
            depth,
            statement: tokenizer.encode(&texts.statement)?,
            question: tokenizer.encode(&texts.question)?,
            answer: texts.answer,
            candidates,
        })
    }

    /// Index of the statement's first token that has a digit: the number's first token.
    ///
    /// # Errors
    /// A statement that cannot be decoded.
    pub(super) fn number_at(&self, tokenizer: &Tokenizer) -> Result<usize, EvalError> {
        for at in 0..self.statement.len() {
            if tokenizer.decode(&self.statement[..=at])?.contains(|letter: char| letter.is_ascii_digit()) {
                return Ok(at);
            }
        }
        // A tokenizer without digits: the place of the last token is as good as another.
        Ok(self.statement.len().saturating_sub(1))
    }

    /// Tokens of a greedy continuation, at most.
    pub(super) fn max_new_tokens(&self) -> usize {
        let longest = self.candidates.iter().map(Vec::len).max().unwrap_or(0);
        longest + SPARE_TOKENS
    }

    /// Number of the sample's tokens besides the haystack and a BOS token.
    fn num_tokens(&self) -> usize {
        self.statement.len() + self.question.len() + self.max_new_tokens()
    }
}

/// `num_needles` needles for each cell, in the order of lengths, then depths.
pub(super) fn samples(config: &NeedleConfig, tokenizer: &Tokenizer) -> Result<Vec<Sample>, EvalError> {
    let mut samples = Vec::new();
    for &length in &config.lengths {
        for &depth in &config.depths {
            for number in 0..config.num_needles {
                let texts = texts(config.seed, length, depth, number);
                samples.push(Sample::new(texts, length, depth, tokenizer)?);
            }
        }
    }
    let longest = samples.iter().map(Sample::num_tokens).max().unwrap_or(0);
    let needed = longest + usize::from(tokenizer.bos_id().is_some());
    if needed > config.buffer {
        return Err(EvalError::NeedleTooLong { needed, buffer: config.buffer });
    }
    Ok(samples)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::needle::tests::tokenizer;

    #[test]
    fn a_needle_has_one_right_answer_and_ten_wrong_ones() {
        let (a, b) = (texts(3, 512, 50.0, 0), texts(3, 512, 50.0, 1));
        assert_ne!(a.answer, b.answer);
        assert_eq!(a.answer, texts(3, 512, 50.0, 0).answer);
        for other in [texts(4, 512, 50.0, 0), texts(3, 513, 50.0, 0), texts(3, 512, 50.5, 0)] {
            assert_ne!(a.answer, other.answer);
        }
        let mut all = a.distractors.clone();
        all.push(a.answer.clone());
        all.sort();
        all.dedup();
        assert_eq!(all.len(), NUM_DISTRACTORS + 1);
        assert!(all.iter().all(|n| n.len() == 7 && n.parse::<u32>().is_ok()));
        assert!(a.statement.contains(&format!("is {}.", a.answer)));
        assert!(a.statement.starts_with(&a.question) && !a.question.contains(&a.answer));
    }

    #[test]
    fn a_buffer_that_is_too_small_is_refused_with_the_tokens_it_needs() {
        let config = NeedleConfig { lengths: vec![300], depths: vec![0.0], num_needles: 1, buffer: 30, seed: 0 };
        let error = samples(&config, &tokenizer()).err().expect("too little");
        let EvalError::NeedleTooLong { needed, buffer: 30 } = error else {
            panic!("{error}");
        };
        let enough = NeedleConfig { buffer: needed, ..config };
        assert_eq!(samples(&enough, &tokenizer()).expect("it fits").len(), 1);
    }
}
