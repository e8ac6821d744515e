//! What the blocks of a model keep for their backward pass beyond the minimum, to be faster: the memory plan decides
//! it, and the trainer passes it to the ops.
use serde::Serialize;

/// What blocks keep for their backward pass beside the least. Nothing of it is kept where nothing is differentiated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Keeping {
    /// For which rows `o_low`, the low bits that the bf16 o lacks, is kept.
    #[serde(rename = "rest")]
    pub o_low: KeepOLow,
    /// Whether a block keeps what its backward pass would recompute: normed streams, rotated heads and gated
    /// activations. It takes half as much memory as everything else that a block keeps, saves 1 to 2 % of a step on a
    /// GPU, and does not change results.
    #[serde(rename = "made_again")]
    pub recomputable: bool,
}

impl Keeping {
    /// Where nothing is differentiated.
    pub const NOTHING: Self = Self {
        o_low: KeepOLow::Never,
        recomputable: false,
    };
}

/// In which rows a forward pass with a bias also stores the lower 16 bits of o, which takes as much memory as o itself
/// and spares the backward pass the row sums, a quarter of its time. Only the Hopper kernels do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KeepOLow {
    /// In none.
    Never,
    /// In rows of up to 32,768 tokens. The default: longer rows skip it, as it doubles the memory of o.
    #[default]
    ShortRows,
    /// In all.
    Always,
}

/// The longest row of [`KeepOLow::ShortRows`].
const SHORT_ROW: usize = 32768;

impl KeepOLow {
    /// Whether it is kept in rows of this many tokens.
    pub fn in_row(self, seq_len: usize) -> bool {
        match self {
            Self::Never => false,
            Self::ShortRows => seq_len <= SHORT_ROW,
            Self::Always => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn o_low_is_kept_in_rows_of_the_mode() {
        let kept = |rows: KeepOLow| [1024, 32768, 32769].map(|len| rows.in_row(len));
        assert_eq!(kept(KeepOLow::Never), [false; 3]);
        assert_eq!(kept(KeepOLow::ShortRows), [true, true, false]);
        assert_eq!(kept(KeepOLow::Always), [true; 3]);
        assert_eq!(Keeping::default().o_low, KeepOLow::ShortRows);
    }
}
