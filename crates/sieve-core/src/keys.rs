//! Declares each key of a recipe once: [`keys!`] generates a section's type and the list of its keys from the same
//! lines.
//!
//! The lists are used to check names, types and bounds, to fill in defaults, to decide what may change on resume, and
//! to write docs/recipe.md and the JSON schema.

use serde::Serialize;
use std::collections::BTreeMap;
use toml::Value;

// Bounds of sizes: token ids and positions are `i32` on devices, and the products of sizes that a pass computes with
// must fit `u64`.
pub(crate) const MAX_WIDTH: usize = 1 << 20;
pub(crate) const MAX_COUNT: usize = 1 << 14;
pub(crate) const MAX_HEAD_DIM: usize = 1 << 12;
pub(crate) const MAX_VOCAB: usize = 1 << 24;
/// Most tokens of a row, and of a model's context.
pub const MAX_SEQ_LEN: usize = 1 << 27;
pub(crate) const MAX_BATCH: usize = 1 << 24;
pub(crate) const MAX_STEPS: usize = 1 << 40;

// Bounds of real numbers, which are used as f32: smaller ones would become 0 or lose digits, larger ones infinite.
pub(crate) const MIN_F32: f64 = 1.2e-38;
pub(crate) const MAX_F32: f64 = 3.4e38;

// Upper bound of the rotary base. The lower bound is 1: below it, later pairs would rotate faster than the first.
pub(crate) const MAX_ROPE_THETA: f64 = 1e12;
pub(crate) const USUAL_ROPE_THETA: &str = "10000 is usual, up to 1e7 for long rows";

/// One key of a recipe section, or a section.
#[derive(Clone, Copy)]
pub(crate) struct Key {
    /// Name of the key in a recipe.
    pub(crate) name: &'static str,
    /// Doc comment of the field.
    pub(crate) doc: &'static str,
    pub(crate) kind: Kind,
    /// Whether a recipe must give the key.
    pub(crate) required: bool,
    /// The value if a recipe leaves the key out.
    pub(crate) default: Option<fn() -> Option<Value>>,
    /// Where the value of a left-out key comes from, if not from `default`.
    pub(crate) source: Option<Source>,
    /// Range of the value; `None` if any value of the kind is allowed.
    pub(crate) bound: Option<Bound>,
    /// Whether a resumed run may have another value.
    pub(crate) may_change: bool,
}

/// The type of a recipe key's value.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    /// A whole number of at least 0.
    Integer,
    /// A number, integer or not.
    Number,
    /// `true` or `false`.
    Bool,
    /// A string.
    String,
    /// A list of strings.
    Strings,
    /// A list of `true` and `false`.
    Bools,
    /// A list of whole numbers of at least 0.
    Integers,
    /// A table of whole numbers of at least 1, by names of the recipe's own.
    Sizes,
    /// A list of numbers.
    Numbers,
    /// One name out of a list.
    Choice(&'static Choices),
    /// A table with keys of its own.
    Table(&'static [Key]),
    /// An array of tables with the same keys.
    Tables(&'static [Key]),
}

/// The names that a key takes, with their doc comments.
pub(crate) struct Choices {
    pub(crate) names: &'static [&'static str],
    pub(crate) docs: &'static [&'static str],
}

/// Where the value of a key comes from if the recipe leaves the key out.
#[derive(Clone, Copy)]
pub(crate) enum Source {
    /// The value of another key, `section.key`.
    Key(&'static str),
    /// Code in `recipe/resolve.rs`, described in words.
    Words(&'static str),
}

/// The range of a number; the last field is the hint of the error. Rules between values are in `recipe/rules.rs`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Bound {
    /// A whole number from the first to the second.
    Within(usize, usize, &'static str),
    /// An integer of at least 1.
    AtLeastOne,
    /// A real number from the first to the second.
    Between(f64, f64, &'static str),
    /// A real number in one of the ranges `[0, 1]`, `[0, 1)`, `(0, 1)`.
    Share(&'static str, &'static str),
}

/// A number that is compared with its key's bound.
#[derive(Clone, Copy)]
pub(crate) enum Number {
    Whole(u64),
    Real(f64),
}

/// A type that a key's value can have.
pub(crate) trait KeyValue {
    const KIND: Kind;
    /// Whether the type has a value for a key that is left out.
    const OPTIONAL: bool = false;

    /// The number to check against the key's bound.
    fn number(&self) -> Option<Number> {
        None
    }
}

/// A section of the recipe, which [`keys!`] generated.
pub(crate) trait Section {
    const KEYS: &'static [Key];

    /// The number of each key, in the order of `KEYS`.
    fn numbers(&self) -> Vec<Option<Number>>;
}

impl Key {
    /// A key, required unless its type is optional.
    pub(crate) const fn new<T: KeyValue>(name: &'static str, doc: &'static str) -> Self {
        Self {
            name,
            doc,
            kind: T::KIND,
            required: !T::OPTIONAL,
            default: None,
            source: None,
            bound: None,
            may_change: false,
        }
    }

    pub(crate) const fn or(mut self, default: fn() -> Option<Value>) -> Self {
        self.required = false;
        self.default = Some(default);
        self
    }

    pub(crate) const fn optional(mut self) -> Self {
        self.required = false;
        self
    }

    /// Makes a left-out key take the value of another key.
    pub(crate) const fn from(mut self, key: &'static str) -> Self {
        self.required = false;
        self.source = Some(Source::Key(key));
        self
    }

    /// Declares that `recipe/resolve.rs` fills in a left-out key; `words` describe the value.
    pub(crate) const fn filled(mut self, words: &'static str) -> Self {
        self.source = Some(Source::Words(words));
        self
    }

    pub(crate) const fn size(self, most: usize) -> Self {
        self.within(1, most, "")
    }

    pub(crate) const fn within(self, least: usize, most: usize, hint: &'static str) -> Self {
        self.bound(Bound::Within(least, most, hint))
    }

    pub(crate) const fn at_least_one(self) -> Self {
        self.bound(Bound::AtLeastOne)
    }

    pub(crate) const fn between(self, least: f64, most: f64, hint: &'static str) -> Self {
        self.bound(Bound::Between(least, most, hint))
    }

    pub(crate) const fn share(self, range: &'static str, hint: &'static str) -> Self {
        self.bound(Bound::Share(range, hint))
    }

    const fn bound(mut self, bound: Bound) -> Self {
        self.bound = Some(bound);
        self
    }

    pub(crate) const fn may_change(mut self) -> Self {
        self.may_change = true;
        self
    }

    /// The keys of a table; none for other types.
    pub(crate) fn keys(&self) -> &'static [Key] {
        match self.kind {
            Kind::Table(keys) | Kind::Tables(keys) => keys,
            _ => &[],
        }
    }
}

/// A real number in short form: 0.02, 1e-50.
pub(crate) fn short_number(number: f64) -> String {
    match number.abs() {
        0.0 | 1e-4..1e6 => format!("{number}"),
        _ => format!("{number:e}"),
    }
}

/// A default as TOML; `None` for the absence of an optional value, which TOML does not write.
pub(crate) fn value_of<T: Serialize>(value: T) -> Option<Value> {
    Value::try_from(value).ok()
}

/// `kind`, then the keys of all lists as optional ones; `N` is the number of all keys. The loops are `while`, because a
/// const function cannot use iterators.
pub(crate) const fn joined<const N: usize>(kind: Key, lists: &[&[Key]]) -> [Key; N] {
    let mut keys = [kind; N];
    let mut filled = 1;
    let mut list = 0;
    while list < lists.len() {
        let mut key = 0;
        while key < lists[list].len() {
            keys[filled] = lists[list][key].optional();
            filled += 1;
            key += 1;
        }
        list += 1;
    }
    assert!(filled == N, "N is not the number of keys");
    keys
}

macro_rules! key_values {
    ($($type:ty: $kind:ident $(as $number:ident)?),+ $(,)?) => {$(
        impl KeyValue for $type {
            const KIND: Kind = Kind::$kind;
            $(
                fn number(&self) -> Option<Number> {
                    Some(Number::$number((*self) as _))
                }
            )?
        }
    )+};
}

key_values!(
    usize: Integer as Whole,
    u64: Integer as Whole,
    f64: Number as Real,
    bool: Bool,
    String: String,
    Vec<String>: Strings,
    Vec<bool>: Bools,
    Vec<usize>: Integers,
    Vec<f64>: Numbers,
    BTreeMap<String, usize>: Sizes,
);

impl<T: KeyValue> KeyValue for Option<T> {
    const KIND: Kind = T::KIND;
    const OPTIONAL: bool = true;

    fn number(&self) -> Option<Number> {
        self.as_ref()?.number()
    }
}

/// Generates a section of a recipe: its type, and the list of its keys.
///
/// A field is written as in a struct. `= value` after it is its default. `#[key(…)]` before it names methods of
/// [`Key`], which set its bound, another source of its value, or that it may change on resume. `text` instead of `pub`
/// declares a key that a recipe's text may hold but the type does not. `: Default` after the type's name implements
/// that trait.
macro_rules! keys {
    (
        $(#[$meta:meta])*
        pub struct $type:ident $(: $trait:ident)? {$(
            $(#[doc = $doc:literal])+
            $(#[key($($rule:ident $(($($argument:expr),+))?),+)])?
            $(#[serde($($serde:tt)+)])?
            $place:ident $name:ident: $value:ty $(= $default:expr)?,
        )+}
    ) => {
        keys!(
            @struct
            {
                $(#[$meta])*
                #[derive(Clone, Debug, PartialEq, ::serde::Serialize, ::serde::Deserialize)]
                #[serde(deny_unknown_fields)]
            }
            $type {}
            $({ $place { $(#[doc = $doc])+ $(#[serde($($serde)+)])? } $name $value })+
        );

        impl $crate::keys::Section for $type {
            const KEYS: &'static [$crate::keys::Key] = &[$(
                $crate::keys::Key::new::<$value>(stringify!($name), concat!($($doc, "\n"),+))
                    $(.or(|| $crate::keys::value_of::<$value>($default)))?
                    $($(.$rule($($($argument),+)?))+)?,
            )+];

            fn numbers(&self) -> Vec<Option<$crate::keys::Number>> {
                vec![$(keys!(@number $place self.$name)),+]
            }
        }

        impl $crate::keys::KeyValue for $type {
            const KIND: $crate::keys::Kind =
                $crate::keys::Kind::Table(<Self as $crate::keys::Section>::KEYS);
        }

        keys!(@default $($trait)? $type {$($name $(= $default)?,)+});
    };
    (@struct {$($head:tt)*} $type:ident {$($fields:tt)*}) => {
        $($head)*
        pub struct $type {$($fields)*}
    };
    (@struct $head:tt $type:ident {$($fields:tt)*}
        { pub {$($attribute:tt)*} $name:ident $value:ty } $($rest:tt)*) => {
        keys!(@struct $head $type {$($fields)* $($attribute)* pub $name: $value,} $($rest)*);
    };
    (@struct $head:tt $type:ident $fields:tt { text $attributes:tt $name:ident $value:ty } $($rest:tt)*) => {
        keys!(@struct $head $type $fields $($rest)*);
    };
    (@number pub $field:expr) => { $crate::keys::KeyValue::number(&$field) };
    (@number text $field:expr) => { None };
    (@default Default $type:ident {$($name:ident = $default:expr,)+}) => {
        impl Default for $type {
            fn default() -> Self {
                Self {$($name: $default),+}
            }
        }
    };
    (@default $type:ident $fields:tt) => {};
}

/// Generates a type with one variant for each name that a key can have as its value.
macro_rules! choices {
    (
        $(#[$meta:meta])*
        pub enum $type:ident {$(
            $(#[doc = $doc:literal])+
            $variant:ident = $name:literal,
        )+}
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, ::serde::Serialize, ::serde::Deserialize)]
        pub enum $type {$(
            $(#[doc = $doc])+
            #[serde(rename = $name)]
            $variant,
        )+}

        impl $crate::keys::KeyValue for $type {
            const KIND: $crate::keys::Kind = $crate::keys::Kind::Choice(&$crate::keys::Choices {
                names: &[$($name),+],
                docs: &[$(concat!($($doc, "\n"),+)),+],
            });
        }
    };
}

pub(crate) use {choices, keys};
