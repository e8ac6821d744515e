//! Multi-query associative recall (MQAR, arXiv:2312.04927): alternating keys and values, then the keys again at random
//! places, where the model must answer each with its value. Also the hard variant of arXiv:2508.02124, section 5.2.
//!
//! A sample is a pure function of configuration, split and index: nothing is stored, and no file is read.
//!
//! With vocabulary V, length L and D pairs, a sample is
//!
//! - tokens `0..2D`: key, value, key, value, …; D different keys of `1..V/2` and D different values of `V/2..V`;
//! - then `(L - 2D) / 2` query slots of two tokens. D different slots are drawn one after another, with weight
//!   `x^(a-1)` for slot `x`, counted from 1. The first token of the r-th drawn slot is key `r`, and its label, *at the
//!   same position*, is the key's value;
//! - all other tokens are 0 or noise and have no label.

mod draw;
mod packed;

use crate::error::DataError;
use crate::loader::IGNORE_LABEL;
pub(crate) use draw::Draws;
pub use packed::{MqarMixture, MqarPart};

/// Tokens at positions without a key or value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MqarNoise {
    /// Token 0, as with `random_non_queries = false` in the published code.
    #[default]
    Zeros,
    /// A uniform token of the whole vocabulary, which may be a key (`random_non_queries = true`).
    Uniform,
    /// A uniform token other than this sample's keys. An extension of ours: with [`Uniform`](Self::Uniform), noise may
    /// be a key whose query has no label.
    Disjoint,
}

/// Settings of one kind of MQAR samples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MqarConfig {
    /// V: token ids are below it. Keys are from the lower half, values from the upper.
    pub vocab_size: usize,
    /// Tokens of a sample, L in the paper.
    pub seq_len: usize,
    /// D: pairs of key and value, and also the number of queries.
    pub num_pairs: usize,
    /// a of the weight `x^(a-1)`: at 0.01 most queries come soon after the pairs; at 1 all slots are equally likely.
    pub power: f64,
    /// Tokens at positions without a key or value.
    pub noise: MqarNoise,
    /// Seed of the random samples.
    pub seed: u64,
}

impl MqarConfig {
    /// The paper's settings: vocabulary 8192, a = 0.01, zeros between the queries.
    pub fn new(seq_len: usize, num_pairs: usize, seed: u64) -> Self {
        Self { vocab_size: 8192, seq_len, num_pairs, power: 0.01, noise: MqarNoise::Zeros, seed }
    }

    /// Checks that samples of these sizes can be drawn.
    ///
    /// # Errors
    /// An odd length, more pairs than fit (`4 D > L`) or than there are keys, a vocabulary that is odd or not larger
    /// than the length, a power that is not positive.
    pub fn validate(&self) -> Result<(), DataError> {
        let Self { vocab_size, seq_len, num_pairs, power, .. } = *self;
        let bad = |name, reason| Err(DataError::BadSetting { name, reason });
        if vocab_size % 2 != 0 || vocab_size <= seq_len || vocab_size > i32::MAX as usize {
            return bad(
                "mqar vocab_size",
                format!("{vocab_size} is not an even number above seq_len = {seq_len} and below 2^31"),
            );
        }
        if seq_len % 2 != 0 {
            return bad("mqar seq_len", format!("{seq_len} is odd; use an even one"));
        }
        if num_pairs == 0 || num_pairs > seq_len / 4 {
            let hint = match num_pairs {
                0 => "use at least one pair",
                _ => "use fewer pairs, or longer samples",
            };
            return bad(
                "mqar num_pairs",
                format!(
                    "{num_pairs} pairs do not fit: with seq_len {seq_len} the number of pairs must be from 1 to {}, \
                     because each pair takes two tokens and its query two more\n  hint: {hint}",
                    seq_len / 4
                ),
            );
        }
        if num_pairs > vocab_size / 2 - 1 {
            return bad(
                "mqar num_pairs",
                format!(
                    "{num_pairs} pairs need as many different keys; vocab_size {vocab_size} has {}",
                    vocab_size / 2 - 1
                ),
            );
        }
        if !(power.is_finite() && power > 0.0) {
            return bad("mqar power", format!("{power} is not a positive number"));
        }
        Ok(())
    }

    /// Number of query slots of a sample.
    pub fn num_slots(&self) -> usize {
        (self.seq_len - 2 * self.num_pairs) / 2
    }
}

/// A stream of samples. The samples of both streams are drawn independently, each by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MqarSplit {
    /// Samples for training.
    Train = 0,
    /// Samples for validation.
    Test = 1,
}

/// One query of a sample, and its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MqarQuery {
    /// Index of the queried key-value pair, from 0.
    pub pair: usize,
    /// Position of the repeated key and of the label.
    pub position: usize,
    /// The value that the model has to predict.
    pub value: u32,
}

impl MqarQuery {
    /// Distance in tokens from the pair's value, which is at `2 * pair + 1`, to the query.
    pub fn distance(&self) -> usize {
        self.position - (2 * self.pair + 1)
    }
}

/// One sample, with its queries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MqarSample {
    /// Token ids, `[seq_len]`.
    pub tokens: Vec<u32>,
    /// The queries, in the order of the pairs.
    pub queries: Vec<MqarQuery>,
}

impl MqarSample {
    /// The values at the positions of the queries, [`IGNORE_LABEL`] elsewhere; `[seq_len]`.
    pub fn labels(&self) -> Vec<i32> {
        let mut labels = vec![IGNORE_LABEL; self.tokens.len()];
        for query in &self.queries {
            labels[query.position] = query.value as i32;
        }
        labels
    }
}

/// Generates samples with one configuration. Threads can share it by reference.
#[derive(Debug, Clone)]
pub struct Mqar {
    config: MqarConfig,
    /// `1 / weight` of each query slot.
    inverse_weights: Vec<f64>,
}

impl Mqar {
    /// Checks the settings and computes the slots' weights.
    ///
    /// # Errors
    /// The errors of [`MqarConfig::validate`].
    pub fn new(config: MqarConfig) -> Result<Self, DataError> {
        config.validate()?;
        let slots = 1..=config.num_slots();
        Ok(Self { config, inverse_weights: slots.map(|slot| (slot as f64).powf(1.0 - config.power)).collect() })
    }

    /// Settings of the samples.
    pub fn config(&self) -> &MqarConfig {
        &self.config
    }

    /// Sample `index` of a split. The result depends on these two and the settings.
    pub fn sample(&self, split: MqarSplit, index: u64) -> MqarSample {
        let MqarConfig { vocab_size, seq_len, num_pairs, noise, seed, .. } = self.config;
        let shape = (vocab_size as u64) << 40 ^ (seq_len as u64) << 20 ^ num_pairs as u64;
        let mut draws = Draws::new([seed, shape, split as u64, index]);
        let half = vocab_size as u64 / 2;
        let keys = draws.different(half - 1, num_pairs);
        let values = draws.different(half, num_pairs);
        let slots = draws.weighted_slots(&self.inverse_weights, num_pairs);

        let mut tokens = vec![0; seq_len];
        let mut is_set = vec![false; seq_len];
        let mut queries = Vec::with_capacity(num_pairs);
        for pair in 0..num_pairs {
            // No key is 0, which would look like a token of padding.
            let (key, value) = (keys[pair] as u32 + 1, (values[pair] + half) as u32);
            let position = 2 * num_pairs + 2 * slots[pair];
            for (place, token) in [(2 * pair, key), (2 * pair + 1, value), (position, key)] {
                tokens[place] = token;
                is_set[place] = true;
            }
            queries.push(MqarQuery { pair, position, value });
        }
        if noise != MqarNoise::Zeros {
            let mut forbidden = keys.iter().map(|key| key + 1).collect::<Vec<_>>();
            forbidden.sort_unstable();
            // Keys ascend, so `index` of the numbers below `key` are forbidden too.
            let allowed_before = (0..).zip(forbidden).map(|(index, key)| key - index).collect::<Vec<u64>>();
            for (token, _) in tokens.iter_mut().zip(is_set).filter(|(_, set)| !set) {
                *token = match noise {
                    MqarNoise::Disjoint => draws.below_without(vocab_size as u64, &allowed_before) as u32,
                    _ => draws.below(vocab_size as u64) as u32,
                };
            }
        }
        MqarSample { tokens, queries }
    }
}

#[cfg(test)]
mod tests;
