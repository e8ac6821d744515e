//! Whether what a command needs fits into the memory that is free.

use serde::Serialize;

/// The need beside the memory that is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryVerdict {
    /// Less than what is free.
    Fits,
    /// Up to a fifth more than what is free, which is how far a prediction may be off: worth a warning.
    MayNotFit,
    /// More than that: refused.
    DoesNotFit,
    /// Nothing says what is free.
    Unknown,
}

impl MemoryVerdict {
    /// The verdict on `needed` bytes where `available` are free; 0 stands for unknown.
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

    /// The verdict in words.
    pub fn words(self) -> &'static str {
        match self {
            Self::Fits => "fits",
            Self::MayNotFit => "may not fit",
            Self::DoesNotFit => "does not fit",
            Self::Unknown => "may or may not fit: nothing says how much memory is free",
        }
    }

    /// Whether something has to change for the command to be sure of its memory.
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
