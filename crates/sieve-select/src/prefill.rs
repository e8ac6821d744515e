//! Selectors for prefill: each turns q, k and v of a call into a mask.

pub(crate) mod method;

pub(crate) use method::{Knob, PrefillMethod, SHARES, TOKENS};

use crate::selector::all_methods;

/// Declares the modules of the prefill methods. `cargo fmt` does not find modules that a macro declares; `cargo xtask
/// check` passes it their files.
macro_rules! modules {
    (prefill { $($phase:ident $name:ident in $module:ident::$kind:ident $row:tt;)+ } $($decode:tt)*) => {
        $(pub mod $module;)+
    };
}

all_methods! { modules }
