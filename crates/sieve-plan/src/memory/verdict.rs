//! Whether the needed memory fits into the free memory.

use serde::Serialize;

/// Comparison of the needed memory with the free memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryVerdict {
    /// The run needs less than the free memory.
    Fits,
    /// It needs up to a fifth more than is free, which is within the plan's error: a warning.
    MayNotFit,
    /// The run needs even more: the command is refused.
    DoesNotFit,
    /// The free memory is not known.
    Unknown,
}

impl MemoryVerdict {
    /// Compares `needed` with `available` bytes; 0 available bytes mean unknown.
    pub fn of(needed: u64, available: u64) -> Self {
        if available == 0 {
            Self::Unknown
        } else if needed < available {
            Self::Fits
        } else if needed / 6 <= available / 5 {
            Self::MayNotFit
        } else {
            Self::DoesNotFit
        }
    }

    /// The verdict in words, for the user.
    pub fn words(self) -> &'static str {
        match self {
            Self::Fits => "fits",
            Self::MayNotFit => "may not fit",
            Self::DoesNotFit => "does not fit",
            Self::Unknown => "may or may not fit: free memory is not known",
        }
    }

    /// Whether the memory may be too small.
    pub fn needs_advice(self) -> bool {
        matches!(self, Self::MayNotFit | Self::DoesNotFit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fifth_more_than_what_is_free_is_warned_of_and_more_is_refused() {
        use MemoryVerdict::{DoesNotFit, Fits, MayNotFit, Unknown};
        for (needed, available, expected) in [
            (999, 1000, Fits),
            (1000, 1000, MayNotFit),
            (1200, 1000, MayNotFit),
            (1207, 1000, DoesNotFit),
            (u64::MAX, u64::MAX / 2, DoesNotFit),
            (1, 0, Unknown),
        ] {
            let verdict = MemoryVerdict::of(needed, available);
            assert_eq!(verdict, expected, "{needed} of {available}");
        }
    }
}
