//! Draws a token from logits: greedily, or with temperature and nucleus sampling (arXiv:1904.09751).
use crate::InferError;
use crate::grammar::Grammar;
use crate::logit_rules::{LogitRules, TextRules};
use chacha20::ChaCha8Rng;
use chacha20::rand_core::{Rng, SeedableRng};
use sieve_core::Draw;

/// How the next token is drawn from the logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Logits are divided by this. At 0, decoding is greedy.
    pub temperature: f64,
    /// Draw only from the likeliest tokens that together have this probability, in `(0, 1]`.
    pub top_p: f64,
    /// Draw only from this number of likeliest tokens; `None` draws from all.
    pub top_k: Option<usize>,
    /// Seed of the random number generator.
    pub seed: u64,
}

impl Sampling {
    /// Always the token with the largest logit.
    pub const GREEDY: Self = Self { temperature: 0.0, top_p: 1.0, top_k: None, seed: 0 };
}

/// Draws the tokens of a text one after another.
#[derive(Debug)]
pub struct Sampler {
    sampling: Sampling,
    random: ChaCha8Rng,
    /// The least probability of a token, as a share of the likeliest one's; 0 draws from all.
    min_p: f64,
    /// `None` where logits are drawn from as they are.
    rules: Option<TextRules>,
    /// What the text must be; `None` where it may be anything.
    grammar: Option<Grammar>,
}

impl Sampler {
    /// Checks the settings.
    ///
    /// # Errors
    /// A temperature that is negative, infinite or NaN; a `top_p` outside `(0, 1]`.
    pub fn new(sampling: Sampling) -> Result<Self, InferError> {
        let Sampling { temperature, top_p, top_k, seed } = sampling;
        let bad = |name, value: f64, hint| Err(InferError::setting(name, value, hint));
        if !(temperature >= 0.0 && temperature.is_finite()) {
            return bad(
                "temperature",
                temperature,
                "use 0 for the most likely token, or a positive number such as 0.8",
            );
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return bad("top-p", top_p, "use a number above 0 and up to 1, such as 0.95");
        }
        if top_k == Some(0) {
            return bad("top-k", 0.0, "use 1 or more, or leave it out to draw from all tokens");
        }
        Ok(Self { sampling, random: ChaCha8Rng::seed_from_u64(seed), min_p: 0.0, rules: None, grammar: None })
    }

    /// As [`new`](Self::new), with rules for the logits of a text that begins with `prompt`.
    ///
    /// # Errors
    /// As [`new`](Self::new), and the errors of [`LogitRules::check`].
    pub fn with_rules(sampling: Sampling, rules: LogitRules, prompt: &[u32]) -> Result<Self, InferError> {
        rules.check()?;
        Ok(Self { min_p: rules.min_p, rules: TextRules::new(rules, prompt), ..Self::new(sampling)? })
    }

    /// Draws only tokens with which the text goes on as `grammar` has it; any token without one.
    #[must_use]
    pub fn within(self, grammar: Option<Grammar>) -> Self {
        Self { grammar, ..self }
    }

    /// Whether tokens are drawn by [`sample`](Self::sample) alone, because penalties change the logits, or a grammar
    /// leaves tokens out.
    pub fn needs_logits(&self) -> bool {
        self.rules.is_some() || self.grammar.is_some()
    }

    /// Whether the text is complete by its grammar, so that nothing may follow.
    pub fn has_ended(&self) -> bool {
        self.grammar.as_ref().is_some_and(Grammar::has_ended)
    }

    /// Why there was no token after `num_read` tokens: the text's grammar allows none, or a logit is not finite.
    pub fn failure(&self, num_read: usize) -> InferError {
        let of_grammar = self.grammar.as_ref().and_then(Grammar::failure);
        of_grammar.unwrap_or(InferError::NotFinite(num_read))
    }

    /// Whether the token with the largest logit is always taken.
    pub(crate) fn is_greedy(&self) -> bool {
        self.sampling.temperature == 0.0
    }

    /// The next draw, which takes the next random number. A greedy draw takes none. A device that is given it follows
    /// no [penalties](Self::needs_logits).
    pub fn next_draw(&mut self) -> Draw {
        let Sampling { temperature, top_p, top_k, .. } = self.sampling;
        if self.is_greedy() {
            return Draw::LIKELIEST;
        }
        Draw::new(temperature, top_k, top_p, self.random.next_u64()).above(self.min_p)
    }

    /// The next draw; for a text that has ended any draw, without taking a random number.
    pub(crate) fn draw_unless(&mut self, has_ended: bool) -> Draw {
        if has_ended { Draw::LIKELIEST } else { self.next_draw() }
    }

    /// Draws one token from logits on the host; `None` if a logit is NaN or infinite, or the grammar allows no token,
    /// of which [`failure`](Self::failure) tells. Of equal logits the lower id counts as likelier.
    ///
    /// Panics on an empty slice.
    pub fn sample(&mut self, logits: &[f32]) -> Option<u32> {
        let draw = self.next_draw();
        if !self.needs_logits() {
            return sieve_ops::draw_on_host(logits, &draw);
        }
        let penalised = self.rules.as_ref().map(|rules| rules.penalised(logits));
        let logits = penalised.as_deref().unwrap_or(logits);
        let token = match &mut self.grammar {
            None => sieve_ops::draw_on_host(logits, &draw),
            // A logit that is not finite means a damaged model, wherever it is.
            Some(_) if !logits.iter().all(|logit| logit.is_finite()) => None,
            Some(grammar) => {
                let allowed = grammar.allowed()?;
                let of_allowed: Vec<f32> = allowed.iter().map(|token| logits[*token as usize]).collect();
                let token = sieve_ops::draw_on_host(&of_allowed, &draw).map(|at| allowed[at as usize]);
                self.grammar.iter_mut().zip(token).for_each(|(grammar, token)| grammar.take(token));
                token
            }
        };
        self.rules.iter_mut().zip(token).for_each(|(rules, token)| rules.count(token));
        token
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new(temperature: f64, top_p: f64, top_k: Option<usize>, seed: u64) -> Result<Sampler, InferError> {
        Sampler::new(Sampling { temperature, top_p, top_k, seed })
    }

    fn sampler(temperature: f64, top_p: f64, seed: u64) -> Sampler {
        new(temperature, top_p, None, seed).expect("valid settings")
    }

    fn frequencies(mut sampler: Sampler, logits: &[f32]) -> Vec<f64> {
        const DRAWS: usize = 20_000;
        let mut counts = vec![0usize; logits.len()];
        for _ in 0..DRAWS {
            counts[sampler.sample(logits).expect("finite") as usize] += 1;
        }
        counts.iter().map(|&n| n as f64 / DRAWS as f64).collect()
    }

    #[test]
    fn temperature_zero_takes_the_first_of_the_largest() {
        assert_eq!(sampler(0.0, 1.0, 0).sample(&[-1.0, 3.0, 3.0, 2.0]), Some(1));
    }

    #[test]
    fn frequencies_follow_the_softmax_at_the_temperature() {
        let logits = [0.0, 1.0, -0.5, 2.0];
        for temperature in [0.5, 1.0, 2.0] {
            let weights = logits.map(|logit| (f64::from(logit) / temperature).exp());
            let total: f64 = weights.iter().sum();
            let found = frequencies(sampler(temperature, 1.0, 3), &logits);
            for (weight, found) in weights.iter().zip(found) {
                // 0.015 is at least four standard deviations of a frequency in 20,000 draws.
                assert!((weight / total - found).abs() < 0.015, "{found}");
            }
        }
    }

    #[test]
    fn top_p_keeps_the_fewest_that_reach_it() {
        // The probabilities are 0.3, 0.5 and 0.2.
        let logits = [0.3f32.ln(), 0.5f32.ln(), 0.2f32.ln()];
        let found = frequencies(sampler(1.0, 0.7, 5), &logits);
        assert_eq!(found[2], 0.0);
        assert!((found[1] - 0.625).abs() < 0.015, "{found:?}");
        let alone = frequencies(sampler(1.0, 0.4, 5), &logits);
        assert_eq!(alone, [0.0, 1.0, 0.0]);
    }

    #[test]
    fn top_k_keeps_the_likeliest_before_top_p_looks() {
        let logits = [0.3f32.ln(), 0.5f32.ln(), 0.2f32.ln()];
        let draw = |top_k, top_p| new(1.0, top_p, Some(top_k), 5).map(|sampler| frequencies(sampler, &logits));
        assert_eq!(draw(1, 1.0).expect("valid"), [0.0, 1.0, 0.0]);
        let two = draw(2, 1.0).expect("valid");
        assert!(two[2] == 0.0 && (two[1] - 0.625).abs() < 0.015, "{two:?}");
        // top_k = 2 leaves 0.625 and 0.375, and the first alone reaches top_p = 0.6.
        assert_eq!(draw(2, 0.6).expect("valid"), [0.0, 1.0, 0.0]);
        assert!(draw(0, 1.0).is_err());
    }

    #[test]
    fn rules_leave_out_unlikely_tokens_and_penalise_repeated_ones() {
        let logits = [0.3f32.ln(), 0.5f32.ln(), 0.2f32.ln()];
        let with = |rules, sampling| Sampler::with_rules(sampling, rules, &[]).expect("valid settings");
        let drawn = Sampling { temperature: 1.0, top_p: 1.0, top_k: None, seed: 5 };
        // The least probability is 0.5 * 0.5, which leaves 0.3 and 0.5.
        let likely = frequencies(with(LogitRules { min_p: 0.5, ..LogitRules::NONE }, drawn), &logits);
        assert!(likely[2] == 0.0 && (likely[1] - 0.625).abs() < 0.015, "{likely:?}");
        // Greedy: each token is so much less likely after it was drawn that all take turns.
        let rules = LogitRules { presence_penalty: 2.0, frequency_penalty: 2.0, ..LogitRules::NONE };
        let mut turns = with(rules, Sampling::GREEDY);
        let tokens = (0..6).map(|_| turns.sample(&logits).expect("finite")).collect::<Vec<_>>();
        assert_eq!(tokens, [1, 0, 2, 1, 0, 2]);
        let plain = with(LogitRules::NONE, drawn);
        assert!(!plain.needs_logits() && turns.needs_logits());
        // A device follows `min_p`.
        assert!(!with(LogitRules { min_p: 0.5, ..LogitRules::NONE }, drawn).needs_logits());
        assert_eq!(frequencies(plain, &logits), frequencies(sampler(1.0, 1.0, 5), &logits));
    }

    #[test]
    fn a_seed_repeats_and_another_does_not() {
        let draw = |seed| {
            let mut sampler = sampler(1.0, 1.0, seed);
            (0..40).map(|_| sampler.sample(&[0.0; 50])).collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    #[test]
    fn bad_temperatures_top_p_and_nan_logits_are_refused() {
        for (temperature, top_p) in [(-1.0, 1.0), (f64::NAN, 1.0), (1.0, 0.0), (1.0, 1.5)] {
            assert!(new(temperature, top_p, None, 0).is_err(), "{temperature} {top_p}");
        }
        assert_eq!(sampler(1.0, 1.0, 0).sample(&[0.0, f32::NAN]), None);
    }
}
