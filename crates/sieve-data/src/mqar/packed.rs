//! Packs several kinds of MQAR samples into rows of one length.

use xxhash_rust::xxh3::Xxh3;

use super::{Mqar, MqarConfig, MqarSplit};
use crate::error::DataError;
use crate::loader::{Batch, PAD_DOCUMENT};
use crate::mixture::Schedule;
use crate::permutation::Permutation;

/// One kind of sample in a mixture, and the number of its samples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MqarPart {
    /// Settings of the samples.
    pub config: MqarConfig,
    /// An epoch of this part has the samples `0..num_samples` of the split.
    pub num_samples: u64,
}

impl MqarPart {
    /// Hash of the settings of all parts.
    pub fn fingerprint(parts: &[Self]) -> String {
        let mut hash = Xxh3::new();
        for part in parts {
            let MqarConfig { vocab_size, seq_len, num_pairs, power, noise, seed } = part.config;
            for number in [
                vocab_size as u64,
                seq_len as u64,
                num_pairs as u64,
                power.to_bits(),
                noise as u64,
                seed,
                part.num_samples,
            ] {
                hash.update(&number.to_le_bytes());
            }
        }
        format!("mqar-{:032x}", hash.digest128())
    }
}

/// Several kinds of samples, mixed in proportion to their numbers and packed into rows.
///
/// A row holds as many samples of *one* kind as fit, then padding. Each sample is a document of its own, so that
/// attention does not reach from one to the next.
#[derive(Debug, Clone)]
pub struct MqarMixture {
    parts: Vec<Part>,
    split: MqarSplit,
    seq_len: usize,
    /// The shuffled order; `None` reads part after part, for validation.
    shuffled: Option<Shuffled>,
}

#[derive(Debug, Clone)]
struct Part {
    mqar: Mqar,
    num_samples: u64,
    /// Samples that fit into one row.
    per_row: u64,
    /// Document id of the part's first sample; ids count over all parts.
    first_document: u64,
}

#[derive(Debug, Clone)]
struct Shuffled {
    schedule: Schedule,
    seed: u64,
}

impl MqarMixture {
    /// For training: an endless mixed order of rows, determined by `seed`. Each part has another permutation in each of
    /// its epochs.
    ///
    /// # Errors
    /// No parts, a part without samples or with samples longer than `seq_len`, and the errors of
    /// [`MqarConfig::validate`].
    pub fn shuffled(parts: &[MqarPart], split: MqarSplit, seq_len: usize, seed: u64) -> Result<Self, DataError> {
        let mut mixture = Self::sequential(parts, split, seq_len)?;
        let rows = |part: &Part| part.num_samples as f64 / part.per_row as f64;
        let weights = mixture.parts.iter().map(rows).collect::<Vec<_>>();
        let schedule = Schedule::new(&weights)?;
        mixture.shuffled = Some(Shuffled { schedule, seed });
        Ok(mixture)
    }

    /// For validation: every sample once, part after part, and then from the beginning.
    ///
    /// # Errors
    /// The errors of [`shuffled`](Self::shuffled).
    pub fn sequential(parts: &[MqarPart], split: MqarSplit, seq_len: usize) -> Result<Self, DataError> {
        let bad = |reason| Err(DataError::BadSetting { name: "mqar", reason });
        if parts.is_empty() {
            return bad("no kind of sample is named".to_owned());
        }
        let mut first_document = 0;
        let mut checked = Vec::with_capacity(parts.len());
        for part in parts {
            let mqar = Mqar::new(part.config)?;
            let len = part.config.seq_len;
            if part.num_samples == 0 {
                return bad(format!("0 samples of {len} tokens; leave the kind out"));
            }
            if len > seq_len {
                return bad(format!("samples of {len} tokens do not fit rows of {seq_len}\n  hint: raise seq_len"));
            }
            checked.push(Part { mqar, num_samples: part.num_samples, per_row: (seq_len / len) as u64, first_document });
            first_document += part.num_samples;
        }
        Ok(Self { parts: checked, split, seq_len, shuffled: None })
    }

    /// Tokens of each row.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// The largest vocabulary of the parts.
    pub fn vocab_size(&self) -> usize {
        let sizes = self.parts.iter().map(|part| part.mqar.config().vocab_size);
        sizes.max().expect("there is a part")
    }

    /// Number of rows that hold every sample once; in a shuffled order, about once.
    pub fn rows_per_epoch(&self) -> u64 {
        self.parts.iter().map(Part::num_rows).sum()
    }

    /// The rows `first_row..first_row + count`, padded with `pad_id`. The result depends on nothing else.
    pub fn batch(&self, first_row: u64, count: usize, pad_id: u32) -> Batch {
        let mut batch = Batch::empty(first_row, count, self.seq_len);
        (first_row..first_row + count as u64).for_each(|row| self.push(row, pad_id, &mut batch));
        batch
    }

    /// Appends the samples of one row, and its padding, to the batch.
    pub(crate) fn push(&self, row: u64, pad_id: u32, batch: &mut Batch) {
        let (part, samples) = match &self.shuffled {
            Some(shuffled) => {
                let (part, row_of_part) = shuffled.schedule.get(row);
                let part = &self.parts[part];
                // Each part has a seed of its own.
                let seed = shuffled.seed ^ part.first_document.wrapping_mul(0x9E37_79B9_7F4A_7C15);
                let first = row_of_part * part.per_row;
                let sample = |number: u64| {
                    let (epoch, place) = (number / part.num_samples, number % part.num_samples);
                    Permutation::new(part.num_samples, seed, epoch).get(place)
                };
                (part, (first..first + part.per_row).map(sample).collect::<Vec<_>>())
            }
            None => {
                let mut row = row % self.rows_per_epoch();
                let mut parts = self.parts.iter();
                let mut part = parts.next().expect("there is a part");
                while row >= part.num_rows() {
                    row -= part.num_rows();
                    part = parts.next().expect("the row is one of the epoch's");
                }
                let first = row * part.per_row;
                (part, (first..part.num_samples.min(first + part.per_row)).collect())
            }
        };
        let len = part.mqar.config().seq_len;
        for (place, &index) in samples.iter().enumerate() {
            let sample = part.mqar.sample(self.split, index);
            batch.tokens.extend_from_slice(&sample.tokens);
            batch.labels.extend(sample.labels());
            // Document ids have 32 bits, so large indices wrap; the largest id means padding.
            let document = (part.first_document + index) as u32;
            batch.push_segment(document.min(PAD_DOCUMENT - 1), place * len, len);
        }
        batch.push_padding(pad_id, samples.len() * len);
    }
}

impl Part {
    fn num_rows(&self) -> u64 {
        self.num_samples.div_ceil(self.per_row)
    }
}
