//! Tensors of a run on a GPU that last: from step to step, or from one micro-batch to the next. The trainer asks the
//! allocator for their sizes before the first step, and a plan counts them.
use crate::kinds::{ParamSpec, Part};
use crate::model::ModelShape;
use crate::recipe::{GradientDtype, OptimizerName, Recipe};
use std::collections::BTreeMap;

/// Bytes of an f32.
const F32: u64 = 4;

/// Bytes of a bf16 value.
const BF16: u64 = 2;

/// Elements of the smallest matrix whose whole gradient, and whole weight under ZeRO-3, gets memory of exactly its
/// size: on GPUs of 16 GiB and more it may come from the allocator's largest pages.
const MANY_ELEMENTS: u64 = 1 << 27;

/// Bytes of the smallest tensor that is listed: vectors together take no page.
const LEAST_BYTES: u64 = 1 << 20;

/// How many tensors of each size in bytes a rank holds.
pub type TensorSizes = BTreeMap<u64, usize>;

/// The lasting tensors of one of `ranks` ranks that trains `shape` by `recipe` in bf16.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lasting {
    /// Moments of the optimizer, which its first update makes.
    pub moments: TensorSizes,
    /// Gradients that are added up over micro-batches; none where a step has one micro-batch.
    pub gradients: TensorSizes,
    /// Under ZeRO-3 the largest matrices while they are whole, one of each size.
    pub wholes: TensorSizes,
}

impl Lasting {
    /// `piece` says how many elements a rank has of a parameter that ranks divide, and is `None` for the others.
    pub fn of(recipe: &Recipe, shape: &ModelShape, ranks: usize, piece: impl Fn(&ParamSpec) -> Option<u64>) -> Self {
        let training = &recipe.training;
        let degree = recipe.parallelism.context_parallel_degree.max(1);
        let has_micro_batches = training.global_batch_size * degree > training.local_batch_size * ranks;
        let shards_weights = recipe.parallelism.zero_stage == 3 && recipe.parallelism.num_shards(ranks) > 1;
        let mut found = Self::default();
        let alone = training.trains_indexers_alone();
        for spec in shape.all_parameters().into_iter().filter(|spec| !alone || spec.part == Part::Indexer) {
            let (whole, piece) = (spec.num_elements(), piece(&spec));
            let own = piece.unwrap_or(whole);
            let is_orthogonal = recipe.optimizer.name == OptimizerName::Muon && spec.orthogonal_rows().is_some();
            add(&mut found.moments, own * F32, if is_orthogonal { 1 } else { 2 });
            // From ZeRO-2 on micro-batches are added up in pieces, before in whole gradients.
            let summed = if recipe.parallelism.zero_stage > 1 { own } else { whole };
            let is_rounded = training.gradient_dtype == GradientDtype::Bf16 && spec.dims.len() > 1;
            let value_bytes = if is_rounded { BF16 } else { F32 };
            if has_micro_batches {
                add(&mut found.gradients, summed * value_bytes, 1);
            }
            if shards_weights && piece.is_some() && whole >= MANY_ELEMENTS {
                for value_bytes in [F32, BF16] {
                    found.wholes.insert(whole * value_bytes, 1);
                }
            }
        }
        found
    }

    /// All of them.
    pub fn all(&self) -> TensorSizes {
        let mut all = self.moments.clone();
        for (&bytes, &count) in self.gradients.iter().chain(&self.wholes) {
            add(&mut all, bytes, count);
        }
        all
    }
}

fn add(sizes: &mut TensorSizes, bytes: u64, count: usize) {
    if bytes < LEAST_BYTES {
        return;
    }
    *sizes.entry(bytes).or_default() += count;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lasts_follows_the_sharding_and_the_micro_batches() {
        let load = |sets: &[&str]| {
            let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
            let recipe = Recipe::load(include_str!("../../../recipes/dma_8b.toml"), "dma_8b", &sets).expect("shipped");
            let shape = recipe.model_shape(151_936).expect("a shape");
            let halves = |spec: &ParamSpec| (spec.dims.len() > 1).then_some(spec.num_elements() / 2);
            let bytes = |sizes: &TensorSizes| sizes.iter().map(|(bytes, count)| bytes * *count as u64).sum::<u64>();
            let found = Lasting::of(&recipe, &shape, 2, halves);
            let all = bytes(&found.all());
            let [moments, gradients, wholes] = [&found.moments, &found.gradients, &found.wholes].map(bytes);
            assert_eq!(all, moments + gradients + wholes);
            // In tenths of 1e9 bytes.
            [moments, gradients, wholes].map(|bytes| bytes / 100_000_000)
        };
        // 8.19B parameters, of which a rank has half; whole are the embedding's f32 gradient and its bf16 weight.
        assert_eq!(load(&[]), [327, 163, 37]);
        assert_eq!(load(&["training.gradient_dtype=bf16"]), [327, 81, 37]);
        assert_eq!(load(&["training.global_batch_size=8"]), [327, 0, 37]);
        assert_eq!(load(&["parallelism.zero_stage=1"]), [327, 327, 0]);
        assert_eq!(load(&["optimizer.name=Muon"])[1..], [163, 37]);
    }
}
