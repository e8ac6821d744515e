//! Selectors for prefill: each turns q, k and v of a call into a mask.

use sieve_core::BlockSelection;

use crate::call::Call;
use crate::error::SelectError;
use crate::gqa::GqaPolicy;
use crate::mask::Selected;
use crate::selector::{Reads, all_methods};

/// A key that trades density for recall, and its values over a curve.
pub(crate) type Knob = (&'static str, &'static [&'static str]);

/// Values of a knob that is a share.
pub(crate) const SHARES: &[&str] = &["0.5", "0.7", "0.9", "0.95", "0.99"];
/// Values of a knob that is a number of tokens.
pub(crate) const TOKENS: &[&str] = &["64", "128", "256", "512", "1024"];

/// What a method of prefill is, beside its settings.
pub(crate) trait PrefillMethod {
    /// Refuses settings outside their range.
    fn check(&self, _: GqaPolicy) -> Result<(), SelectError> {
        Ok(())
    }

    /// Refuses a call that the settings do not fit.
    fn check_call(&self, _: &Call<'_>) -> Result<(), SelectError> {
        Ok(())
    }

    /// What the call keeps.
    fn select(&self, call: &Call<'_>, gqa: GqaPolicy) -> Selected;

    /// The choice as steps of a device, from the call's sizes and layer alone, so that queries and keys stay on the
    /// device. `None` where the method, or one of its settings, selects on the host.
    fn steps(&self, _: &Call<'_>, _: GqaPolicy) -> Option<BlockSelection> {
        None
    }

    /// What selecting reads of a call.
    fn reads(&self) -> Reads {
        Reads::Tokens
    }

    /// Whether it has a policy for the heads of a group: not where one list serves all heads.
    fn takes_gqa(&self) -> bool {
        self.reads() != Reads::Nothing
    }

    /// Whether no row's choice depends on a later token.
    fn is_causal_map(&self) -> bool {
        false
    }

    /// The setting to draw curves over.
    fn knob(&self) -> Option<Knob> {
        None
    }
}

/// The modules of the methods of prefill. `cargo fmt` does not find modules that a macro declares; `cargo xtask check`
/// names their files to it.
macro_rules! modules {
    (prefill { $($phase:ident $name:ident in $module:ident::$kind:ident $row:tt;)+ } $($decode:tt)*) => {
        $(pub mod $module;)+
    };
}

all_methods! { modules }
