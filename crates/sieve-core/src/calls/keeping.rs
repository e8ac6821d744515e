//! Optional activations that the blocks of a model keep for their backward pass, to make it faster. The memory plan
//! chooses them, and the trainer passes the choice to the ops.
use serde::Serialize;

/// Optional activations that blocks keep for their backward pass. Without a backward pass nothing is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Keeping {
    /// In which rows `o_low` is kept: the low 16 bits of the f32 output that its bf16 `o` lacks.
    pub o_low: KeepOLow,
    /// Whether a block keeps the normed streams, rotated heads and gated activations that its backward pass would
    /// recompute. They take half as much memory as all other activations of a block, save 1 to 2 % of a step on a GPU,
    /// and do not change results.
    pub recomputable: bool,
    /// Whether a recomputed block of dense or windowed attention keeps the attention's output and the residual stream
    /// behind it, so that neither attention nor its output projection runs again. Results do not change.
    pub attention: bool,
}

impl Keeping {
    /// Keeps nothing, for passes without a backward pass.
    pub const NOTHING: Self = Self { o_low: KeepOLow::Never, recomputable: false, attention: false };
    /// Keeps all optional activations, for rows of any length.
    pub const ALL: Self = Self { o_low: KeepOLow::Always, recomputable: true, attention: true };

    /// The activations that both `self` and `other` keep.
    pub fn and(self, other: Self) -> Self {
        Self {
            o_low: self.o_low.min(other.o_low),
            recomputable: self.recomputable && other.recomputable,
            attention: self.attention && other.attention,
        }
    }
}

/// In which rows a forward pass with a bias also stores `o_low`, the 16 bits of each f32 output that its bf16 `o`
/// lacks. `o_low` takes as much memory as `o`, and saves the backward pass the row sums of P dP, a quarter of its time.
/// Only the Hopper kernels store it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KeepOLow {
    /// `o_low` is kept for no row.
    Never,
    /// In rows of up to 32,768 tokens, the default: in longer rows the memory matters more.
    #[default]
    ShortRows,
    /// `o_low` is kept for rows of any length.
    Always,
}

/// Most tokens of a row that [`KeepOLow::ShortRows`] keeps `o_low` for.
const SHORT_ROW: usize = 32768;

impl KeepOLow {
    /// Whether `o_low` is kept in rows of this many tokens.
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
    fn each_mode_says_in_which_rows_o_low_is_kept() {
        let kept = |rows: KeepOLow| [1024, 32768, 32769].map(|len| rows.in_row(len));
        assert_eq!(kept(KeepOLow::Never), [false; 3]);
        assert_eq!(kept(KeepOLow::ShortRows), [true, true, false]);
        assert_eq!(kept(KeepOLow::Always), [true; 3]);
        assert_eq!(Keeping::default().o_low, KeepOLow::ShortRows);
    }
}
