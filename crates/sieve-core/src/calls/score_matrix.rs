//! Limits the size of the score matrix that an attention op without a kernel holds.
use std::fmt;

/// The most scores that one call of an attention reference may hold: 256 MiB in f32. A backward pass holds several such
/// matrices.
pub const MOST_REFERENCE_SCORES: u64 = 1 << 26;

/// One score for each row, head, query and key of an attention call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScoreMatrix {
    /// Sequences in the batch.
    pub batch: usize,
    /// Number of query heads.
    pub num_heads: usize,
    /// Tokens of a row, the number of its queries and of its keys.
    pub seq_len: usize,
}

impl ScoreMatrix {
    /// Number of scores in the matrix.
    pub fn num_scores(&self) -> u64 {
        let sizes = [self.batch, self.num_heads, self.seq_len, self.seq_len];
        sizes.iter().fold(1, |product, &size| product.saturating_mul(size as u64))
    }

    /// Refuses a matrix of more than [`MOST_REFERENCE_SCORES`]. `op` has no kernel on `device`, for `reason`.
    ///
    /// # Errors
    /// [`ReferenceTooLarge`].
    pub fn check(&self, op: &str, device: &str, reason: &str) -> Result<(), ReferenceTooLarge> {
        if self.num_scores() <= MOST_REFERENCE_SCORES {
            return Ok(());
        }
        Err(ReferenceTooLarge {
            op: op.to_owned(),
            device: device.to_owned(),
            reason: reason.to_owned(),
            scores: *self,
        })
    }
}

impl fmt::Display for ScoreMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { batch, num_heads, seq_len } = self;
        write!(f, "{batch} rows x {num_heads} heads x {seq_len} x {seq_len} tokens")
    }
}

/// The reference of an attention op without a kernel would need too much memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{op} has no kernel on {device} ({reason}), and its plain-Burn reference would hold {} scores ({scores}); at most \
     {MOST_REFERENCE_SCORES} are allowed\n  \
     hint: use --device cpu, whose f32 kernels hold no such matrix, or fewer or shorter rows \
     (training.local_batch_size, \
     training.seq_len)",
    .scores.num_scores()
)]
pub struct ReferenceTooLarge {
    /// Name of the op whose reference was called.
    pub op: String,
    /// Name of the device that has no kernel for it.
    pub device: String,
    /// Why there is no kernel for the call.
    pub reason: String,
    /// Sizes of the score matrix that would be too large.
    pub scores: ScoreMatrix,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_above_the_limit_is_refused_with_op_device_and_hint() {
        let largest = ScoreMatrix { batch: 4, num_heads: 16, seq_len: 1024 };
        assert_eq!(largest.num_scores(), MOST_REFERENCE_SCORES);
        assert_eq!(largest.check("mla_attention", "cuda", "no kernel"), Ok(()));
        let larger = ScoreMatrix { seq_len: 1025, ..largest };
        let error = larger.check("mla_attention", "cuda", "no CUDA kernel yet");
        let text = error.expect_err("too large").to_string();
        for word in [
            "mla_attention has no kernel on cuda (no CUDA kernel yet)",
            "4 rows x 16 heads x 1025 x 1025 tokens",
            "67108864 are allowed",
            "hint: use --device cpu",
        ] {
            assert!(text.contains(word), "no {word:?} in {text}");
        }
        // Sizes that no machine holds are refused too, and do not wrap around.
        let huge = ScoreMatrix { batch: 1 << 20, num_heads: 1 << 20, seq_len: 1 << 20 };
        assert!(huge.check("attention", "cuda", "no kernel").is_err());
    }
}
