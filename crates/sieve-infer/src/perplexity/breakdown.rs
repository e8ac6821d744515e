//! The mean loss by the number of tokens that a prediction sees, and by how far back its word was last used.
use super::windows::Place;
use crate::words::WordUse;
use serde::Serialize;

/// Number and mean loss of a group of predictions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct MeanLoss {
    /// Number of predicted tokens.
    pub num_tokens: u64,
    /// Mean cross-entropy, nats per token; 0 without predictions.
    pub loss: f64,
    /// Standard error of the mean, in nats, as if the losses of tokens were independent; 0 below two predictions.
    pub standard_error: f64,
}

/// The loss of predictions that see at least `from` and fewer than `to` tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PositionLoss {
    /// Fewest tokens that a prediction sees.
    pub from: usize,
    /// Largest number of tokens seen, plus 1.
    pub to: usize,
    /// Number and mean loss of these predictions.
    #[serde(flatten)]
    pub mean: MeanLoss,
}

/// The loss on words that occurred before in the text that the model sees, by the distance to their last use.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LossByDistance {
    /// The distance, in tokens, that divides far words from near ones.
    pub more_than: usize,
    /// Words last used more than `more_than` tokens back.
    pub far: MeanLoss,
    /// Words last used at most `more_than` tokens back.
    pub near: MeanLoss,
}

/// The loss by the kind of word that a token belongs to.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WordLoss {
    /// Words used before, split at each distance.
    pub again: Vec<LossByDistance>,
    /// Words that do not occur before in the text that the model sees.
    pub new: MeanLoss,
    /// Tokens of white space, punctuation, or words of fewer than three characters.
    pub no_word: MeanLoss,
}

/// Number of predictions, and the sums of their losses and of the losses' squares.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    num_tokens: u64,
    nats: f64,
    squares: f64,
}

impl Sum {
    fn add(&mut self, nats: f64) {
        self.num_tokens += 1;
        self.nats += nats;
        self.squares += nats * nats;
    }

    /// The mean loss and its standard error, as if losses were independent; 0 without a token.
    fn mean(self) -> MeanLoss {
        let count = self.num_tokens.max(1) as f64;
        let loss = self.nats / count;
        // Rounding may leave a variance of 0 slightly negative.
        let variance = (self.squares / count - loss * loss).max(0.0);
        let standard_error = if self.num_tokens > 1 { (variance / (count - 1.0)).sqrt() } else { 0.0 };
        MeanLoss { num_tokens: self.num_tokens, loss, standard_error }
    }
}

/// Sums up the losses of predictions by group.
#[derive(Debug)]
pub(super) struct Breakdown {
    all: Sum,
    /// Sums by the binary logarithm of the number of tokens seen, rounded down.
    by_power: Vec<Sum>,
    /// For each of `borders`, in tokens: words last used at most that far back, and words last used farther back.
    again: Vec<[Sum; 2]>,
    new: Sum,
    no_word: Sum,
    borders: Vec<usize>,
}

impl Breakdown {
    /// Without a prediction. `borders`: distances in tokens at which repeated words are told apart.
    pub(super) fn new(borders: &[usize]) -> Self {
        Self {
            all: Sum::default(),
            by_power: Vec::new(),
            again: vec![[Sum::default(); 2]; borders.len()],
            new: Sum::default(),
            no_word: Sum::default(),
            borders: borders.to_vec(),
        }
    }

    /// Adds the loss of one prediction to the groups that it belongs to.
    pub(super) fn add(&mut self, place: &Place, nats: f64) {
        self.all.add(nats);
        let power = place.num_seen.max(1).ilog2() as usize;
        if self.by_power.len() <= power {
            self.by_power.resize(power + 1, Sum::default());
        }
        self.by_power[power].add(nats);
        match place.word {
            WordUse::NoWord => self.no_word.add(nats),
            WordUse::New => self.new.add(nats),
            WordUse::Again { distance } => {
                for (sums, &border) in self.again.iter_mut().zip(&self.borders) {
                    sums[usize::from(distance as usize > border)].add(nats);
                }
            }
        }
    }

    pub(super) fn num_tokens(&self) -> u64 {
        self.all.num_tokens
    }

    /// Summed loss of all predictions, in nats.
    pub(super) fn nats(&self) -> f64 {
        self.all.nats
    }

    /// The loss by the number of tokens seen, from each power of two to the next. Empty ranges are left out.
    pub(super) fn by_position(&self) -> Vec<PositionLoss> {
        let filled = self.by_power.iter().enumerate().filter(|(_, sum)| sum.num_tokens > 0);
        filled.map(|(power, sum)| PositionLoss { from: 1 << power, to: 2 << power, mean: sum.mean() }).collect()
    }

    /// The loss of words used before (near or far, at each border), of new words, and of tokens that are no words.
    pub(super) fn words(&self) -> WordLoss {
        let used_before = self.again.iter().zip(&self.borders);
        WordLoss {
            again: used_before
                .map(|([near, far], &more_than)| LossByDistance { more_than, far: far.mean(), near: near.mean() })
                .collect(),
            new: self.new.mean(),
            no_word: self.no_word.mean(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Sum;

    #[test]
    fn the_standard_error_is_that_of_the_mean() {
        let of = |losses: &[f64]| {
            let mut sum = Sum::default();
            losses.iter().for_each(|&nats| sum.add(nats));
            sum.mean()
        };
        // Sample variance 5/3 of four losses.
        let mean = of(&[1.0, 2.0, 3.0, 4.0]);
        assert_eq!((mean.num_tokens, mean.loss), (4, 2.5));
        assert!((mean.standard_error - (5.0f64 / 3.0 / 4.0).sqrt()).abs() < 1e-12, "{mean:?}");
        assert_eq!([of(&[]), of(&[7.0]), of(&[0.1; 9])].map(|mean| mean.standard_error < 1e-7), [true; 3]);
    }
}
