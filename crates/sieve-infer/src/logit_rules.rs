//! Rules that change a token's logits by the text before it, or leave out unlikely tokens, before one is drawn.
use crate::InferError;
use std::collections::{HashMap, HashSet};

/// Penalties of tokens that a text has already, and the least probability of a drawn token, as vLLM has them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitRules {
    /// Draw only from tokens whose probability, at the temperature, is at least this share of the likeliest token's; in
    /// `[0, 1]`. It is applied before `top_k` and `top_p`.
    pub min_p: f64,
    /// A positive logit of a token of the prompt or the text is divided by it, a negative one multiplied
    /// (arXiv:1909.05858). Above 0.
    pub repetition_penalty: f64,
    /// Subtracted from the logit of a generated token.
    pub presence_penalty: f64,
    /// Subtracted from the logit of a generated token once for each time that it was generated.
    pub frequency_penalty: f64,
}

impl LogitRules {
    /// The rules that change nothing.
    pub const NONE: Self = Self { min_p: 0.0, repetition_penalty: 1.0, presence_penalty: 0.0, frequency_penalty: 0.0 };

    /// Checks the numbers.
    ///
    /// # Errors
    /// A number outside its range, or not finite.
    pub fn check(&self) -> Result<(), InferError> {
        let Self { min_p, repetition_penalty, presence_penalty, frequency_penalty } = *self;
        if !(0.0..=1.0).contains(&min_p) {
            return Err(InferError::setting("min-p", min_p, "use a number from 0 to 1, such as 0.05"));
        }
        if !(repetition_penalty > 0.0 && repetition_penalty.is_finite()) {
            return Err(InferError::setting(
                "repetition-penalty",
                repetition_penalty,
                "use a number above 0, such as 1.1",
            ));
        }
        for (name, penalty) in [("presence-penalty", presence_penalty), ("frequency-penalty", frequency_penalty)] {
            if !penalty.is_finite() {
                return Err(InferError::setting(name, penalty, "use a number such as 0.5"));
            }
        }
        Ok(())
    }
}

/// The rules of one text, with the tokens that they look at.
#[derive(Debug)]
pub(crate) struct TextRules {
    rules: LogitRules,
    prompt: HashSet<u32>,
    /// How often each token was generated.
    generated: HashMap<u32, u32>,
}

impl TextRules {
    /// `None` for rules that change nothing.
    pub(crate) fn new(rules: LogitRules, prompt: &[u32]) -> Option<Self> {
        let prompt = if rules.repetition_penalty == 1.0 { HashSet::new() } else { prompt.iter().copied().collect() };
        (rules != LogitRules { min_p: rules.min_p, ..LogitRules::NONE }).then(|| Self {
            rules,
            prompt,
            generated: HashMap::new(),
        })
    }

    /// Counts a generated token.
    pub(crate) fn count(&mut self, token: u32) {
        *self.generated.entry(token).or_default() += 1;
    }

    /// The logits after the penalties. Tokens beyond `logits` have none.
    pub(crate) fn penalised(&self, logits: &[f32]) -> Vec<f32> {
        let LogitRules { repetition_penalty, presence_penalty, frequency_penalty, .. } = self.rules;
        let mut logits = logits.to_vec();
        let of_prompt = self.prompt.iter().filter(|token| !self.generated.contains_key(token));
        for (&token, times) in of_prompt.map(|token| (token, 0)).chain(self.generated.iter().map(|(t, n)| (t, *n))) {
            let Some(logit) = logits.get_mut(token as usize) else {
                continue;
            };
            // Damaged weights stay visible.
            if !logit.is_finite() {
                continue;
            }
            let mut penalised = f64::from(*logit);
            if penalised > 0.0 {
                penalised /= repetition_penalty;
            } else {
                penalised *= repetition_penalty;
            }
            if times > 0 {
                penalised -= presence_penalty + frequency_penalty * f64::from(times);
            }
            // A penalty of any size leaves a number.
            *logit = penalised.clamp(f64::from(f32::MIN), f64::from(f32::MAX)) as f32;
        }
        logits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn penalties_of_any_size_leave_numbers_and_hide_no_damage() {
        for (repetition_penalty, others) in [(1e300, 0.0), (1e-300, 0.0), (1.0, 1e300), (1.0, -1e300), (1e38, 1e38)] {
            let rules =
                LogitRules { repetition_penalty, presence_penalty: others, frequency_penalty: others, min_p: 0.0 };
            rules.check().expect("numbers");
            let mut text = TextRules::new(rules, &[0, 1]).expect("it has rules");
            text.count(1);
            text.count(2);
            let found = text.penalised(&[3.0, -3.0, 0.0, f32::NAN]);
            assert!(found[..3].iter().all(|logit| logit.is_finite()) && found[3].is_nan(), "{found:?}");
            text.count(3);
            assert!(text.penalised(&[0.0, 0.0, 0.0, f32::INFINITY])[3].is_infinite());
        }
    }

    #[test]
    fn penalties_are_those_of_their_formulas() {
        let rules = LogitRules { repetition_penalty: 2.0, presence_penalty: 0.5, frequency_penalty: 0.25, min_p: 0.0 };
        let mut text = TextRules::new(rules, &[1, 2, 9]).expect("it has rules");
        assert_eq!(text.penalised(&[1.0, 4.0, -3.0, 2.0]), [1.0, 2.0, -6.0, 2.0]);
        for token in [3, 3, 1] {
            text.count(token);
        }
        // Token 3: 2 / 2 - 0.5 - 2 * 0.25; token 1: 4 / 2 - 0.5 - 0.25.
        assert_eq!(text.penalised(&[1.0, 4.0, -3.0, 2.0]), [1.0, 1.25, -6.0, 0.0]);
    }

    #[test]
    fn min_p_alone_changes_no_logit() {
        assert!(TextRules::new(LogitRules { min_p: 0.1, ..LogitRules::NONE }, &[]).is_none());
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        for bad in [
            LogitRules { min_p: 1.5, ..LogitRules::NONE },
            LogitRules { repetition_penalty: 0.0, ..LogitRules::NONE },
            LogitRules { presence_penalty: f64::NAN, ..LogitRules::NONE },
            LogitRules { frequency_penalty: f64::INFINITY, ..LogitRules::NONE },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
        LogitRules::NONE.check().expect("nothing is wrong");
    }
}
