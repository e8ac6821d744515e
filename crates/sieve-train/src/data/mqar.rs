//! Converts a recipe's `data.mqar` into the settings of the sample generator.
use crate::TrainError;
use sieve_core::Recipe;
use sieve_core::recipe::MqarNoise as Noise;
use sieve_data::{MqarConfig, MqarNoise, MqarPart};

/// The training samples and the validation samples of a recipe.
///
/// # Errors
/// A recipe without `data.mqar`.
pub(super) fn parts(recipe: &Recipe) -> Result<(Vec<MqarPart>, Vec<MqarPart>), TrainError> {
    let mqar = recipe.data.mqar.as_ref().ok_or(TrainError::NoText)?;
    let shapes = mqar.seq_lens.iter().zip(&mqar.num_pairs);
    let kinds = shapes.zip(mqar.vocab_size_of_kinds());
    let part = |(((&seq_len, &num_pairs), vocab_size), num_samples)| MqarPart {
        config: MqarConfig {
            vocab_size,
            seq_len,
            num_pairs,
            power: mqar.power,
            noise: match mqar.noise {
                Noise::Zeros => MqarNoise::Zeros,
                Noise::Uniform => MqarNoise::Uniform,
                Noise::Disjoint => MqarNoise::Disjoint,
            },
            seed: mqar.seed,
        },
        num_samples,
    };
    let count = |&num_samples: &usize| num_samples as u64;
    let train = kinds.clone().zip(mqar.num_samples.iter().map(count));
    let test = kinds.zip(std::iter::repeat(mqar.num_test_samples as u64));
    Ok((train.map(part).collect(), test.map(part).collect()))
}
