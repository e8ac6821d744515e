//! Statistics of the attention masks for the log: density, ages of the visible keys, fit of MSA's indexers.
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use rayon::prelude::*;
use serde::Serialize;
use sieve_core::kinds::KeyReads;
use sieve_core::model::mean_active_keys_of_documents;
use sieve_core::{Attention, ModelShape};
use sieve_data::Batch;
use sieve_ops::DMA_SCORE_CLAMP;

/// Statistics of the attention masks of one micro-batch, over all layers and heads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct AttentionStatistics {
    /// Active (query, key) pairs divided by the causal pairs of the same documents. NSA's three branches are added, and
    /// a compressed block counts as one key.
    pub density: f64,
    /// Mean number of active keys per query.
    pub mean_active_keys: f64,
    /// Share of keys, over all KV heads of DMA's layers, that no query sees, because they expire at their own position.
    pub never_active: f64,
    /// Share of queries that see their own key in no KV head of their layer, over DMA's layers.
    pub not_self_visible: f64,
    /// Share of the keys of DMA's layers with a score above 60, where the bias `exp(min(z, 60))` is clamped and the
    /// score has no gradient; absent for other biases.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clamped: Option<f64>,
    /// Ages of the active keys in DMA's layers; `None` without such layers.
    #[serde(flatten)]
    pub ages: Option<KeyAges>,
    /// How well the indexers of MSA's layers predict attention; `None` without such layers.
    #[serde(flatten)]
    pub indexer: Option<IndexerFit>,
}

/// How well the indexers of MSA's layers predict attention: means over layers, KV heads and sampled queries of one row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct IndexerFit {
    /// KL divergence, in nats, between the attention probabilities (mean over the KV head's query heads) and the
    /// indexer's, over the tokens that the query attends to. The indexer is trained on this loss.
    pub index_kl: f64,
    /// Dense attention's probability in the chosen blocks, divided by its probability in the same number of best
    /// blocks.
    pub index_recall: f64,
    /// Entropy of the indexer's probabilities, in nats.
    pub index_entropy: f64,
}

impl IndexerFit {
    /// The mean of the `[3]` statistics that [`sieve_ops::index_statistics`] returned for each layer; `None` without
    /// layers.
    pub(crate) fn of_layers<B: Backend>(layers: &[Tensor<B, 1>]) -> Option<Self> {
        if layers.is_empty() {
            return None;
        }
        // Reduced on the device first: every copy to the host waits for the device.
        let mean = Tensor::stack::<2>(layers.to_vec(), 0).mean_dim(0);
        let mean: Vec<f64> = mean.into_data().iter::<f64>().collect();
        let [index_kl, index_recall, index_entropy] = mean[..] else { unreachable!("three numbers a layer") };
        Some(Self { index_kl, index_recall, index_entropy })
    }
}

/// Ages of the active keys of DMA's layers, over all (query, key) pairs. A query's own key has age 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct KeyAges {
    /// Median age of an active key, in tokens.
    pub median_key_age: u64,
    /// 95th percentile of the ages, in tokens.
    pub late_key_age: u64,
    /// Share of the pairs outside a sliding window of as many keys as DMA keeps. DMA and that window have the same
    /// number of pairs, so one minus this share is their overlap.
    pub beyond_window: f64,
}

impl KeyAges {
    /// `keys_by_lifetime[t]` keys are active for t queries each, at the ages 0 to t - 1. DMA keeps `num_kept` keys a
    /// query.
    fn of(keys_by_lifetime: &[u64], num_kept: usize) -> Self {
        // Every key with a lifetime above `age` has one pair of that age.
        let mut pairs_by_age = vec![0; keys_by_lifetime.len()];
        let mut num_longer = 0;
        for (pairs, keys) in pairs_by_age.iter_mut().zip(keys_by_lifetime).rev() {
            *pairs = num_longer;
            num_longer += keys;
        }
        let total: u64 = pairs_by_age.iter().sum();
        let percentile = |share: f64| {
            let mut num_pairs = 0;
            let age = pairs_by_age.iter().position(|&pairs| {
                num_pairs += pairs;
                num_pairs as f64 >= share * total as f64
            });
            age.unwrap_or(0) as u64
        };
        let beyond: u64 = pairs_by_age.iter().skip(num_kept).sum();
        Self {
            median_key_age: percentile(0.5),
            late_key_age: percentile(0.95),
            beyond_window: beyond as f64 / total.max(1) as f64,
        }
    }
}

/// Counts over the keys of some rows. A key's lifetime is the number of queries that see it.
struct Lifetimes {
    /// Number of keys with each lifetime.
    keys: Vec<u64>,
    active_pairs: u64,
    /// Queries that see their own key in no head.
    blind_queries: u64,
}

impl Lifetimes {
    fn new(seq_len: usize) -> Self {
        Self { keys: vec![0; seq_len + 1], active_pairs: 0, blind_queries: 0 }
    }

    /// Adds the key lifetimes of one row in one layer. `expire`, `[num_kv_heads, seq_len]`, has for each key the first
    /// query that no longer sees it.
    fn and_row(mut self, expire: &[i32]) -> Self {
        let seq_len = self.keys.len() - 1;
        let mut sees_itself = vec![false; seq_len];
        for head in expire.chunks_exact(seq_len) {
            for ((token, &expire), sees) in head.iter().enumerate().zip(&mut sees_itself) {
                let lifetime = (expire as usize).saturating_sub(token);
                self.active_pairs += lifetime as u64;
                self.keys[lifetime] += 1;
                *sees |= lifetime > 0;
            }
        }
        self.blind_queries += sees_itself.iter().filter(|sees| !**sees).count() as u64;
        self
    }

    /// The counts of both together; both must be of rows of one length.
    fn and(mut self, other: Self) -> Self {
        for (keys, more) in self.keys.iter_mut().zip(other.keys) {
            *keys += more;
        }
        self.active_pairs += other.active_pairs;
        self.blind_queries += other.blind_queries;
        self
    }
}

/// Share of the scores above [`DMA_SCORE_CLAMP`], over all layers; `None` without scores.
fn clamped_share<B: Backend>(scores: &[Tensor<B, 3>]) -> Option<f64> {
    let all: usize = scores.iter().map(|z| z.shape().num_elements()).sum();
    let above = scores.iter().map(|z| z.clone().greater_elem(DMA_SCORE_CLAMP).int().sum());
    let above = above.reduce(|sum, more| sum + more)?;
    // Reduced on the device first: every copy to the host waits for the device.
    let above = above.into_data().iter::<i64>().next()?;
    Some(above as f64 / all.max(1) as f64)
}

impl AttentionStatistics {
    /// Statistics of one micro-batch over all layers of a model, from DMA's masks by layer (`expire`, `[batch,
    /// num_kv_heads, seq_len]` each) and, where the bias clamps large scores, DMA's scores of the same shape.
    ///
    /// `dense_steps` is the share of steps with dense attention
    /// ([`TrainingSection::dense_steps`](sieve_core::recipe::TrainingSection::dense_steps)): density and mean active
    /// keys are means over all layers and both kinds of step. The other statistics are those of DMA's layers, if any.
    pub fn of_model<B: Backend, S: Backend>(
        shape: &ModelShape,
        dense_steps: f64,
        batch: &Batch,
        expire: &[Tensor<B, 3, Int>],
        clamped_scores: &[Tensor<S, 3>],
    ) -> Self {
        let dense = Self::of::<B>(Attention::DENSE, batch, &[]);
        // One mask for each layer whose keys are listed, in the order of the layers.
        let is_listed = |layer: &usize| {
            let reads = shape.attention_of(*layer).as_kind().reads();
            reads.iter().any(|reads| matches!(reads, KeyReads::Listed(_)))
        };
        let masks = (0..shape.num_layers).filter(is_listed).zip(expire);
        let of_kind = |attention: Attention| {
            let own = masks.clone().filter(|(layer, _)| shape.attention_of(*layer) == attention);
            Self::of(attention, batch, &own.map(|(_, mask)| mask.clone()).collect::<Vec<_>>())
        };
        let kinds = shape.attentions().into_iter().map(|(attention, _)| (attention, of_kind(attention)));
        let kinds = kinds.collect::<Vec<_>>();
        let statistics_of = |attention: Attention| {
            let found = kinds.iter().find(|(kind, _)| *kind == attention);
            found.map_or(&kinds[0].1, |(_, statistics)| statistics)
        };
        // In the share `dense_steps` of the steps, queries read all keys.
        let mean = |number: fn(&Self) -> f64| {
            let dense = number(&dense);
            shape.mean_over_layers(|attention| {
                let own = number(statistics_of(attention));
                own + (dense - own) * dense_steps
            })
        };
        let masked = kinds.iter().find(|(_, statistics)| statistics.ages.is_some());
        Self {
            density: mean(|statistics| statistics.density),
            mean_active_keys: mean(|statistics| statistics.mean_active_keys),
            clamped: clamped_share(clamped_scores),
            ..*masked.map_or(&kinds[0].1, |(_, statistics)| statistics)
        }
    }

    /// Statistics of one micro-batch over layers of one kind: counted in DMA's masks, one per layer, or computed from
    /// the lengths of the documents where `expire` is empty.
    pub fn of<B: Backend>(attention: Attention, batch: &Batch, expire: &[Tensor<B, 3, Int>]) -> Self {
        let causal: u64 = batch.positions.iter().map(|&p| u64::from(p) + 1).sum();
        let tokens = batch.positions.len() as f64;
        if expire.is_empty() {
            // One length for each document, at its first token.
            let lengths = batch.doc_start.iter().zip(&batch.doc_end).enumerate();
            let lengths = lengths
                .filter(|(token, (start, _))| token % batch.seq_len == **start as usize)
                .map(|(_, (start, end))| (end - start) as usize);
            let mean_active_keys = mean_active_keys_of_documents(attention, lengths);
            return Self { density: mean_active_keys * tokens / causal as f64, mean_active_keys, ..Self::default() };
        }
        // All layers in one tensor: every copy to the host waits for the device.
        let all = Tensor::cat(expire.to_vec(), 0);
        let [rows, kv_heads, seq_len] = all.dims();
        let all = all.into_data().convert::<i32>();
        let all = all.as_slice::<i32>().expect("they were converted");
        let none = || Lifetimes::new(seq_len);
        let counts = all.par_chunks(kv_heads * seq_len).fold(none, Lifetimes::and_row).reduce(none, Lifetimes::and);
        // Over all layers: `rows` counts the batch once for each layer.
        let num_heads = (rows / batch.batch * kv_heads) as f64;
        let num_kept = attention.as_kind().num_kept();
        Self {
            density: counts.active_pairs as f64 / (causal as f64 * num_heads),
            mean_active_keys: counts.active_pairs as f64 / (tokens * num_heads),
            never_active: counts.keys[0] as f64 / (tokens * num_heads),
            not_self_visible: counts.blind_queries as f64 / (tokens * expire.len() as f64),
            ages: num_kept.map(|num_kept| KeyAges::of(&counts.keys, num_kept)),
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::TensorData;
    use burn_flex::Flex;

    fn batch() -> Batch {
        Batch {
            first_sample: 0,
            batch: 1,
            seq_len: 5,
            tokens: vec![1; 5],
            labels: vec![1; 5],
            doc_start: vec![0, 0, 0, 3, 3],
            doc_end: vec![3, 3, 3, 5, 5],
            positions: vec![0, 1, 2, 0, 1],
            documents: vec![0, 0, 0, 1, 1],
        }
    }

    #[test]
    fn dense_and_window_follow_from_positions() {
        // Documents of 3 and 2 tokens have 6 + 3 causal pairs, of which a window of two keys lacks one.
        let dense = AttentionStatistics::of::<Flex>(Attention::Mha, &batch(), &[]);
        assert_eq!((dense.density, dense.mean_active_keys), (1.0, 9.0 / 5.0));
        let window = Attention::swa(2);
        let window = AttentionStatistics::of::<Flex>(window, &batch(), &[]);
        assert_eq!((window.density, window.mean_active_keys), (8.0 / 9.0, 8.0 / 5.0));
    }

    #[test]
    fn dma_counts_lifetimes() {
        // No query sees key 1, which expires at its own position; queries 0 to 2 see key 0.
        let expire = TensorData::new(vec![3i32, 1, 3, 5, 5], [1, 1, 5]);
        let expire = Tensor::<Flex, 3, Int>::from_data(expire, &Default::default());
        let kind = Attention::Dma(sieve_core::DmaShape::published(2));
        let found = AttentionStatistics::of(kind, &batch(), &[expire]);
        assert_eq!(found.density, 7.0 / 9.0);
        assert_eq!(found.never_active, 1.0 / 5.0);
        assert_eq!(found.not_self_visible, 1.0 / 5.0);
        // Ages by query: 0; 1; 0 and 2; 0; 0 and 1. A window of two keys lacks the age 2.
        let ages = KeyAges { median_key_age: 0, late_key_age: 2, beyond_window: 1.0 / 7.0 };
        assert_eq!(found.ages, Some(ages));
    }

    #[test]
    fn ages_equal_those_counted_pair_by_pair() {
        let lifetimes = [7usize, 0, 3, 3, 1, 5, 2];
        let mut keys = vec![0; 8];
        let mut ages = Vec::new();
        for lifetime in lifetimes {
            keys[lifetime] += 1;
            ages.extend(0..lifetime as u64);
        }
        ages.sort_unstable();
        for window in [1, 2, 4, 9] {
            let found = KeyAges::of(&keys, window);
            // 21 pairs: 11 are half of them, 20 are 95 %.
            assert_eq!((found.median_key_age, found.late_key_age), (ages[10], ages[19]));
            let beyond = ages.iter().filter(|&&age| age >= window as u64).count();
            assert_eq!(found.beyond_window, beyond as f64 / 21.0);
        }
        assert_eq!(KeyAges::of(&[3, 0], 1), KeyAges::default());
    }

    #[test]
    fn scores_above_the_clamp_are_counted() {
        let layer = |scores: [f32; 5]| {
            let scores = TensorData::new(scores.to_vec(), [1, 1, 5]);
            Tensor::<Flex, 3>::from_data(scores, &Default::default())
        };
        // Of ten keys three are above 60; 60 itself still has a gradient.
        let scores = [layer([0.0, 60.0, 60.1, 400.0, -1e4]), layer([1.0, 2.0, 3.0, 4.0, 61.0])];
        assert_eq!(clamped_share(&scores), Some(0.3));
        assert_eq!(clamped_share::<Flex>(&[]), None);
    }

    #[test]
    fn a_query_sees_itself_if_one_head_keeps_its_key() {
        // Two layers of two heads: in the first both leave out key 1, one leaves out key 2; in the second nothing is
        // left out.
        let expire = |heads: [[i32; 5]; 2]| {
            let expire = TensorData::new(heads.concat(), [1, 2, 5]);
            Tensor::<Flex, 3, Int>::from_data(expire, &Default::default())
        };
        let layers = [expire([[3, 1, 3, 5, 5], [3, 1, 2, 5, 5]]), expire([[3, 3, 3, 5, 5]; 2])];
        let kind = Attention::Dma(sieve_core::DmaShape::published(2));
        let found = AttentionStatistics::of(kind, &batch(), &layers);
        assert_eq!(found.never_active, 3.0 / 20.0);
        assert_eq!(found.not_self_visible, 1.0 / 10.0);
        // A batch with the same row twice has the same statistics.
        let one = batch();
        let two = Batch { batch: 2, positions: one.positions.repeat(2), ..batch() };
        let layers = layers.map(|layer| Tensor::cat(vec![layer.clone(), layer], 0));
        assert_eq!(AttentionStatistics::of(kind, &two, &layers), found);
    }
}
