//! Macros that declare the settings of a method: each key with its default.

/// Declares a struct of settings; `= value` after a field is its default. A prefill method adds two lists of selectors
/// for the tests of all methods: `small` ones suit a few hundred tokens, `everything` ones keep every key.
macro_rules! settings {
    ($(#[$about:meta])* pub struct $name:ident {
        $($(#[$about_field:meta])* $seen:vis $field:ident: $type:ty = $default:expr,)+
    } $(small $($small:literal),+; everything $($everything:literal),+;)?) => {
        $(#[$about])*
        #[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name {
            $($(#[$about_field])* $seen $field: $type,)+
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)+ }
            }
        }

        $(#[cfg(test)]
        impl $name {
            pub(crate) const SMALL: &[&str] = &[$($small),+];
            pub(crate) const EVERYTHING: &[&str] = &[$($everything),+];
        })?
    };
}

/// Declares enums of setting values; the command line takes the names in snake_case.
macro_rules! choices {
    ($($(#[$about:meta])* pub enum $name:ident { $($values:tt)+ })+) => {$(
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum $name { $($values)+ }
    )+};
}
pub(crate) use {choices, settings};
