//! Scaled rotary frequencies, for rows longer than a model's first training rows.
use crate::keys::{MAX_SEQ_LEN, choices, keys};
use std::f64::consts::TAU;

choices! {
    /// How frequencies are scaled.
    #[derive(Hash)]
    pub enum RopeType {
        /// Every frequency is divided by `factor` (arXiv:2306.15595).
        Linear = "linear",
        /// Frequencies that turn less than `low_freq_factor` times in `original_max_position_embeddings` are divided by
        /// `factor`, those that turn more than `high_freq_factor` times stay, and between them a linear mix
        /// (Llama 3.1).
        Llama3 = "llama3",
        /// Frequencies between `beta_slow` and `beta_fast` turns in `original_max_position_embeddings` are mixed by
        /// their index; cosines and sines are multiplied by `attention_factor` (YaRN, arXiv:2309.00071).
        Yarn = "yarn",
    }
}

const FACTORS: [f64; 2] = [1.0, 1e6];
const A_FACTOR: &str = "the longest row divided by the positions trained on: 2, 4 and 8 are usual";
const TURNS: [f64; 2] = [1e-3, 1e6];
const A_NUMBER_OF_TURNS: &str = "a number of turns: llama3 has 1 and 4, yarn 1 and 32";

keys! {
    /// `[model] rope_scaling = {…}`, in the names of `transformers`.
    #[derive(Copy)]
    pub struct RopeScaling {
        /// Which formula.
        pub rope_type: RopeType,
        /// What frequencies are divided by: all with `"linear"`, the low ones with `"llama3"` and `"yarn"`.
        #[key(between(FACTORS[0], FACTORS[1], A_FACTOR))]
        pub factor: f64,
        /// Positions of the first training, of `"llama3"` and `"yarn"`. Absent: `max_position_embeddings`.
        #[key(size(MAX_SEQ_LEN))]
        pub original_max_position_embeddings: Option<usize>,
        /// Turns below which a frequency is divided, of `"llama3"`. Absent: 1.
        #[key(between(TURNS[0], TURNS[1], A_NUMBER_OF_TURNS))]
        pub low_freq_factor: Option<f64>,
        /// Turns above which a frequency stays, of `"llama3"`. Absent: 4.
        #[key(between(TURNS[0], TURNS[1], A_NUMBER_OF_TURNS))]
        pub high_freq_factor: Option<f64>,
        /// Turns above which a frequency stays, of `"yarn"`. Absent: 32.
        #[key(between(TURNS[0], TURNS[1], A_NUMBER_OF_TURNS))]
        pub beta_fast: Option<f64>,
        /// Turns below which a frequency is divided, of `"yarn"`. Absent: 1.
        #[key(between(TURNS[0], TURNS[1], A_NUMBER_OF_TURNS))]
        pub beta_slow: Option<f64>,
        /// Factor of cosines and sines, of `"yarn"`. Absent: `0.1 ln(factor) + 1`.
        #[key(between(1e-3, 1e3, "leave it out for the paper's"))]
        pub attention_factor: Option<f64>,
    }
}

impl RopeScaling {
    /// The first given key that this type does not use; `None` if it uses all given keys.
    pub(crate) fn foreign(&self) -> Option<&'static str> {
        let (llama3, yarn) = (RopeType::Llama3, RopeType::Yarn);
        // Each key, whether it is given, and the types that use it.
        let keys = [
            ("original_max_position_embeddings", self.original_max_position_embeddings.is_some(), &[llama3, yarn][..]),
            ("low_freq_factor", self.low_freq_factor.is_some(), &[llama3]),
            ("high_freq_factor", self.high_freq_factor.is_some(), &[llama3]),
            ("beta_fast", self.beta_fast.is_some(), &[yarn]),
            ("beta_slow", self.beta_slow.is_some(), &[yarn]),
            ("attention_factor", self.attention_factor.is_some(), &[yarn]),
        ];
        let is_foreign =
            |(_, is_given, types): &(&str, bool, &[RopeType])| *is_given && !types.contains(&self.rope_type);
        keys.into_iter().find(is_foreign).map(|(key, ..)| key)
    }

    /// The numbers of turns between which frequencies are mixed, the smaller first; `None` for `"linear"`.
    pub(crate) fn turns(&self) -> Option<[f64; 2]> {
        match self.rope_type {
            RopeType::Linear => None,
            RopeType::Llama3 => Some([self.low_freq_factor.unwrap_or(1.0), self.high_freq_factor.unwrap_or(4.0)]),
            RopeType::Yarn => Some([self.beta_slow.unwrap_or(1.0), self.beta_fast.unwrap_or(32.0)]),
        }
    }

    /// For `"llama3"`, fills in the fields that are left out, because `transformers` requires them; `max_positions`
    /// becomes `original_max_position_embeddings`.
    #[must_use]
    pub fn filled(self, max_positions: usize) -> Self {
        match (self.rope_type, self.turns()) {
            (RopeType::Llama3, Some([low, high])) => Self {
                original_max_position_embeddings: self.original_max_position_embeddings.or(Some(max_positions)),
                low_freq_factor: Some(low),
                high_freq_factor: Some(high),
                ..self
            },
            _ => self,
        }
    }

    /// The scaled frequencies and the factor on cosines and sines, as `transformers` computes them. `plain` are the
    /// unscaled frequencies of `theta`; `max_positions` stands in for an absent `original_max_position_embeddings`.
    pub(crate) fn scaled(&self, plain: Vec<f64>, theta: f64, max_positions: usize) -> (Vec<f64>, f64) {
        let original = self.original_max_position_embeddings.unwrap_or(max_positions) as f64;
        let width = 2.0 * plain.len() as f64;
        let turns = self.turns();
        // The share of a frequency that is not divided by `factor`, before it is clamped to 0 and 1.
        let unclamped = |pair: usize, frequency: f64| match (self.rope_type, turns) {
            (RopeType::Llama3, Some([low, high])) => (original * frequency / TAU - low) / (high - low),
            (RopeType::Yarn, Some([slow, fast])) => {
                // Index of the channel pair that makes this many turns over the original positions.
                let index = |turns: f64| width * (original / (turns * TAU)).ln() / (2.0 * theta.ln());
                let first = index(fast).floor().max(0.0);
                let last = index(slow).ceil().min(width - 1.0);
                let length = if first == last { 1e-3 } else { last - first };
                1.0 - (pair as f64 - first) / length
            }
            _ => 0.0,
        };
        let scaled = |(pair, frequency): (usize, f64)| {
            let kept = unclamped(pair, frequency).clamp(0.0, 1.0);
            frequency * (kept + (1.0 - kept) / self.factor)
        };
        let amplitude = match self.rope_type {
            RopeType::Yarn => self.attention_factor.unwrap_or(0.1 * self.factor.ln() + 1.0),
            _ => 1.0,
        };
        (plain.into_iter().enumerate().map(scaled).collect(), amplitude)
    }
}
