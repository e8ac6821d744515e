//! Scores by which DMA ranks keys: random ones, hard cases, and those captured from a trained model.
use crate::error::{BenchError, Result, refused};
use sieve_core::ShownPath;
use sieve_hf::TensorFile;
use sieve_testing::Random;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// How DMA's scores of a case are drawn.
#[derive(Clone, Debug, PartialEq)]
pub enum Scores {
    /// Independent normal numbers: query i keeps its own key with probability `w / i`, where w keys are kept.
    Independent,
    /// Nearly every key has a higher score than all before it, so all are kept: the worst case.
    Rising,
    /// Falling scores: nearly every key has a lower one than all before it.
    Falling,
    /// All scores are equal: DMA becomes a sliding window.
    Tied,
    /// Three values, so that most keys tie.
    FewValues,
    /// Zeros of both signs, which rank as equal.
    SignedZeros,
    /// Close to each other, all above 0, as a trained model's scores.
    Narrow,
    /// Constant over 37 tokens at a time, rising or falling from step to step.
    Steps,
    /// A slow wave over positions, with some noise.
    Drifting,
    /// Tensor `z` of a safetensors file, `[…, seq_len]`.
    Captured(PathBuf),
}

impl Scores {
    /// The kinds that are drawn without a file.
    pub const RANDOM: [Self; 9] = [
        Self::Independent,
        Self::Rising,
        Self::Falling,
        Self::Tied,
        Self::FewValues,
        Self::SignedZeros,
        Self::Narrow,
        Self::Steps,
        Self::Drifting,
    ];

    /// Name of the kind, as `--scores` takes it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Independent => "independent",
            Self::Rising => "rising",
            Self::Falling => "falling",
            Self::Tied => "tied",
            Self::FewValues => "few-values",
            Self::SignedZeros => "signed-zeros",
            Self::Narrow => "narrow",
            Self::Steps => "steps",
            Self::Drifting => "drifting",
            Self::Captured(_) => "captured",
        }
    }

    /// Draws scores `[rows, seq_len]`.
    pub(crate) fn draw(&self, rows: usize, seq_len: usize, random: &mut Random) -> Result<Vec<f32>> {
        if let Self::Captured(path) = self {
            return captured(path, rows, seq_len);
        }
        let ramp = |i: usize| 2.5 * (i as f32 + 0.5) / seq_len as f32 - 1.0;
        let step = match self {
            Self::Steps if random.chance(0.5) => -0.01,
            _ => 0.01,
        };
        let mut score = |i: usize| match self {
            Self::Independent => 0.7 * random.normal_with_tails(),
            Self::Rising => ramp(i) + 0.01 * random.normal_with_tails(),
            Self::Falling => -ramp(i) + 0.01 * random.normal_with_tails(),
            Self::FewValues => 0.5 * (random.below(3) as f32 - 1.0),
            Self::SignedZeros => random.one_of(&[0.0, -0.0]),
            Self::Narrow => 0.3 * random.normal_with_tails().exp().ln_1p(),
            Self::Steps => step * (i / 37) as f32,
            Self::Drifting => (i as f32 / 300.0).sin() + 0.1 * random.normal_with_tails(),
            Self::Tied | Self::Captured(_) => 0.0,
        };
        Ok((0..rows * seq_len).map(|at| score(at % seq_len)).collect())
    }
}

impl FromStr for Scores {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("captured:") {
            return Ok(Self::Captured(path.into()));
        }
        Self::RANDOM.into_iter().find(|scores| scores.name() == text).ok_or_else(|| {
            let names: Vec<_> = Self::RANDOM.iter().map(Self::name).collect();
            format!("there are no scores '{text}'; use {} or captured:FILE", names.join(", "))
        })
    }
}

/// The first `seq_len` scores of `rows` rows of the file's `z`; its rows repeat when there are fewer.
fn captured(path: &Path, rows: usize, seq_len: usize) -> Result<Vec<f32>> {
    let file = TensorFile::open(path)?;
    let z = file.any_tensor("z")?;
    let shape = z.shape.to_vec();
    let length = shape.last().copied().unwrap_or(0);
    if length < seq_len {
        return refused(format!(
            "{}: z is {shape:?}, too short for seq_len={seq_len}\n  hint: give a shape with seq_len={length} at most",
            path.shown()
        ));
    }
    let values =
        z.convert::<f32>().to_vec::<f32>().map_err(|e| BenchError::Refused(format!("{}: z: {e:?}", path.shown())))?;
    if !values.iter().all(|z| z.is_finite()) {
        return refused(format!("{}: z has numbers that are not finite", path.shown()));
    }
    let stored = values.len() / length.max(1);
    if stored == 0 {
        return refused(format!("{}: z is empty", path.shown()));
    }
    Ok((0..rows).flat_map(|row| values[(row % stored) * length..][..seq_len].to_vec()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_is_parsed_from_its_name() {
        for scores in Scores::RANDOM {
            assert_eq!(scores.name().parse(), Ok(scores));
        }
        assert_eq!("captured:a/b".parse(), Ok(Scores::Captured("a/b".into())));
        let error = "random".parse::<Scores>().expect_err("no such kind");
        assert!(error.contains("independent") && error.contains("captured:FILE"), "{error}");
    }
}
