//! Settings of a method: each key with its default.

/// A struct of settings, read key by key; `= value` behind a field is its default.
macro_rules! settings {
    ($(#[$about:meta])* pub struct $name:ident {
        $($(#[$about_field:meta])* $seen:vis $field:ident: $type:ty = $default:expr,)+
    }) => {
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
    };
}
pub(crate) use settings;
