//! What a prefill method is.

use sieve_core::BlockSelection;

use crate::call::{Call, Reads};
use crate::error::SelectError;
use crate::gqa::GqaPolicy;
use crate::mask::Selected;

/// The key of a setting that trades density for recall, and its values along a curve.
pub(crate) type Knob = (&'static str, &'static [&'static str]);

/// Values of a knob that is a share.
pub(crate) const SHARES: &[&str] = &["0.5", "0.7", "0.9", "0.95", "0.99"];

/// Values of a knob that is a number of tokens.
pub(crate) const TOKENS: &[&str] = &["64", "128", "256", "512", "1024"];

/// A prefill method, implemented by its settings.
pub(crate) trait PrefillMethod {
    /// Refuses settings outside their range.
    fn check(&self, _: GqaPolicy) -> Result<(), SelectError> {
        Ok(())
    }

    /// Refuses a call that the settings do not fit.
    fn check_call(&self, _: &Call<'_>) -> Result<(), SelectError> {
        Ok(())
    }

    /// The mask that the method chooses for a call.
    fn select(&self, call: &Call<'_>, gqa: GqaPolicy) -> Selected;

    /// The selection as device steps, so that queries and keys stay on the device. It depends on the call's sizes and
    /// layer only. `None` if the method, or one of its settings, selects on the host.
    fn steps(&self, _: &Call<'_>, _: GqaPolicy) -> Option<BlockSelection> {
        None
    }

    /// What the selection reads of a call.
    fn reads(&self) -> Reads {
        Reads::Tokens
    }

    /// Whether the setting `gqa` has an effect; it has none if one list serves all heads.
    fn takes_gqa(&self) -> bool {
        self.reads() != Reads::Nothing
    }

    /// Whether no row's choice depends on a later token.
    fn is_causal_map(&self) -> bool {
        false
    }

    /// The setting that a speed-quality curve varies.
    fn knob(&self) -> Option<Knob> {
        None
    }
}
