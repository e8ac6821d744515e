//! The list of the kinds, from which every dispatch on a kind's name is generated.

use serde::{Deserialize, Serialize};
use toml::Table;

use super::dense::Dense;
use super::exported::{FULL_ATTENTION, SLIDING_ATTENTION};
use super::facts::{Chooses, HasFacts, KindFacts, Projections};
use super::kind::Kind;
use super::settings::{Settings, Sizes};
use crate::keys::{Key, Section, choices, joined};
use crate::recipe::{ModelSection, Rules};
use shapes::*;

/// Defines from one list of attention kinds: [`Attention`], the section with a kind's keys; [`AttentionKind`], the bare
/// kind; and the keys of each kind.
macro_rules! attention_kinds {
    ($($(#[doc = $doc:literal])+ $kind:ident $(($shape:ident))? = $name:literal,)+) => {
        /// `[attention]`: the kind and the values of its keys.
        #[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
        pub enum Attention {$(
            $(#[doc = $doc])+
            $kind $(($shape))?,
        )+}

        /// The sizes of each kind that has some.
        pub mod shapes {
            $($(pub use crate::kinds::$shape;)?)+
        }

        choices! {
            /// The kinds of attention a recipe can name.
            #[derive(Hash)]
            pub enum AttentionKind {$($(#[doc = $doc])+ $kind = $name,)+}
        }

        /// `kind`, and the keys of every kind.
        pub(crate) static ATTENTION_KEYS: [Key; 1 $($(+ $shape::KEYS.len())?)+] = joined(
            Key::new::<AttentionKind>("kind", "Which attention."),
            &[$($($shape::KEYS,)?)+],
        );

        impl Attention {
            /// The kind without its settings.
            pub fn kind(self) -> AttentionKind {
                match self {
                    $(Self::$kind { .. } => AttentionKind::$kind,)+
                }
            }

            /// Checks the numbers of the kind's keys against their bounds.
            pub(crate) fn check_bounds(&self, rules: &mut Rules<'_>) {
                match self {
                    $($(Self::$kind(shape) => rules.bounds::<$shape>("attention", shape),)?)+
                    _ => {}
                }
            }
        }

        impl Attention {
            /// The kind with its sizes: the one place that leads from a kind's name to its file.
            pub fn as_kind(&self) -> &dyn Kind {
                match self {
                    $($(Self::$kind(shape) => shape as &$shape,)?)+
                    _ => &Dense,
                }
            }

            /// The kind, to change its sizes; `None` for dense attention, which has none.
            pub(super) fn as_kind_mut(&mut self) -> Option<&mut dyn Kind> {
                match self {
                    $($(Self::$kind(shape) => Some(shape as &mut $shape),)?)+
                    _ => None,
                }
            }

            /// Checks the rules between the values of the kind's keys.
            pub(crate) fn check(&self, model: Option<&ModelSection>, rules: &mut Rules<'_>) {
                match self {
                    $($(Self::$kind(shape) => <$shape as Settings>::check(shape, model, rules),)?)+
                    _ => {}
                }
            }
        }

        impl AttentionKind {
            /// The published form, for heads of width `head_dim`; any sizes for a kind without one.
            pub(crate) fn published(self, head_dim: usize) -> Attention {
                match self {
                    $(Self::$kind => Attention::$kind $((<$shape as Settings>::example(head_dim)))?,)+
                }
            }

            /// What holds of the kind whatever its sizes.
            pub fn facts(self) -> KindFacts {
                match self {
                    $($(Self::$kind => $shape::FACTS,)?)+
                    _ => Dense::FACTS,
                }
            }

            /// The kind with some sizes.
            pub fn example(self) -> Attention {
                let head_dim = 2;
                self.published(head_dim)
            }

            /// Writes out the keys of a recipe's table that follow from others.
            pub(crate) fn resolve(self, table: &mut Table, sizes: Sizes) {
                match self {
                    $($(Self::$kind => <$shape as Settings>::resolve(table, sizes),)?)+
                    _ => {}
                }
            }

            /// All kinds, in the order of the documentation.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$kind),+];

            /// Name of the kind in recipes.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$kind => $name,)+
                }
            }

            /// The kind with this name.
            pub fn named(name: &str) -> Option<Self> {
                Self::ALL.into_iter().find(|kind| kind.name() == name)
            }

            /// The recipe keys of `[attention]` that the kind has, besides `kind`.
            pub(crate) fn keys(self) -> &'static [Key] {
                match self {
                    $($(Self::$kind => $shape::KEYS,)?)+
                    _ => &[],
                }
            }
        }
    };
}

attention_kinds! {
    /// Dense causal attention with grouped queries.
    Mha = "mha",
    /// Sliding window: each query sees the `sliding_window` latest keys, itself included.
    Swa(SwaShape) = "swa",
    /// Multi-head latent attention.
    Mla(MlaShape) = "mla",
    /// Native sparse attention: compressed, selected and window branches.
    Nsa(NsaShape) = "nsa",
    /// Dynamic mask attention: each query sees the `keep_window_size` best-scored keys before it.
    Dma(DmaShape) = "dma",
    /// InfLLM-V2: each query sees the blocks whose pooled keys are most probable; a dense model's parameters.
    InfllmV2(InfllmV2Shape) = "infllm_v2",
    /// MoBA: each query head sees the blocks whose mean keys fit it best; a dense model's parameters.
    Moba(MobaShape) = "moba",
    /// MSA: each query sees the blocks that a small learned indexer scores highest.
    Msa(MsaShape) = "msa",
    /// CoWindow: each query sees the latest keys, the document's first tokens, and its KV head's band of the far past.
    Cowa(CowaShape) = "cowa",
}

impl Attention {
    /// Dense causal attention.
    pub const DENSE: Self = Self::Mha;

    /// A sliding window of `sliding_window` keys, the query's own included.
    pub const fn swa(sliding_window: usize) -> Self {
        Self::Swa(SwaShape { sliding_window })
    }
}

impl AttentionKind {
    /// The kinds that the weights of grouped-query attention can become.
    pub fn of_grouped_weights() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|kind| kind.facts().projections == Projections::Grouped)
    }

    /// The kinds whose softmax can have a learned logit of each query head.
    pub(crate) fn takers_of_sinks() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|kind| kind.facts().takes_sinks)
    }

    /// Why no weights pass between layers of this kind and of `other`, in either direction; `None` where they do.
    pub(crate) fn parted_from(self, other: Self) -> Option<&'static str> {
        let is_parted = self.facts().projections != other.facts().projections;
        is_parted.then_some(
            "latent attention makes keys and values from a latent, whose weights no grouped-query attention has",
        )
    }

    /// The kinds whose queries choose blocks in a step of its own.
    pub(crate) fn choosers_of_blocks() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|kind| kind.facts().chooses == Chooses::Blocks)
    }
}

/// The names of kinds, as a list in words: `swa, dma or nsa`.
pub fn names_of_kinds(kinds: impl Iterator<Item = AttentionKind>) -> String {
    let names: Vec<&str> = kinds.map(AttentionKind::name).collect();
    match names.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => names.concat(),
    }
}

/// The kind of this name in `model.layer_types`: a recipe's, or `full_attention` and `sliding_attention`, as in
/// `transformers`.
pub(crate) fn kind_of_layer_type(name: &str) -> Option<AttentionKind> {
    match name {
        FULL_ATTENTION => Some(AttentionKind::Mha),
        SLIDING_ATTENTION => Some(AttentionKind::Swa),
        name => AttentionKind::named(name),
    }
}

/// The name by which a table `[attention.NAME]` is stored: `swa` for `sliding_attention`, `mha` for `full_attention`,
/// else NAME.
pub(crate) fn table_name(name: &str) -> &str {
    kind_of_layer_type(name).map_or(name, |kind| kind.name())
}
