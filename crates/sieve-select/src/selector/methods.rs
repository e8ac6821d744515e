//! The table of all methods and of their properties.

use serde_json::{Map, Value};

use super::Selector;
use super::parse::{Item, delta, fields, own};
use crate::error::SelectError;
use crate::prefill::PrefillMethod;

/// Whether a method acts on prompts or on new tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The method acts on whole prompts or chunks of them.
    Prefill,
    /// The method acts on one new token at a time.
    Decode,
    /// The method acts on a prompt and on the tokens after it.
    Both,
}

/// A method's name, phase and description.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The method's name in a selector's text.
    pub name: &'static str,
    /// Whether the method acts on prompts or on new tokens.
    pub phase: Phase,
    /// Which keys the method keeps, in a few words.
    pub about: &'static str,
    /// The paper that describes the method.
    pub paper: &'static str,
}

/// Calls a macro with one row for each method: phase, name, `module::Variant`, settings, what it chooses, its source.
/// Brackets name data that a method reads from a file, and the function that reads it. The
/// tests of all prefill methods are generated from this table too.
macro_rules! all_methods {
    ($then:ident) => { $then! { prefill {
    Prefill bfla in bfla::Bfla(BflaConfig, "tiles, by flattened groups of coarse blocks", "BFLA");
    Prefill momo in momo::Momo(MomoConfig, "blocks per dense probe row, corrected by it", "MOMO");
    Prefill delta in delta::Delta(DeltaConfig [Box<Selector>; delta],
        "any base, corrected by dense probe rows", "Delta Attention, arXiv:2505.11254");
    Prefill ba_att in ba_att::BaAtt(BaAttConfig, "blocks of tokens sorted by norm", "BA-Att, arXiv:2605.19726");
    Prefill pbs in pbs::Pbs(PbsConfig, "blocks of keys sorted by importance in segments", "PBS-Attn, arXiv:2510.21270");
    Prefill xattention in xattention::Xattention(XattentionConfig,
        "blocks, by antidiagonal sums", "XAttention, arXiv:2503.16428");
    Prefill minference in minference::Minference(MinferenceConfig,
        "a pattern per head, from a file", "MInference, arXiv:2407.02490");
    Prefill vertical_slash in vertical_slash::VerticalSlash(VerticalSlashConfig,
        "columns and diagonals of the last queries", "MInference, arXiv:2407.02490");
    Prefill block_sparse in block_sparse::BlockSparse(BlockSparseConfig,
        "the best blocks of 64 by their means", "MInference, arXiv:2407.02490");
    Prefill a_shape in a_shape::AShape(AShapeConfig, "first and last tokens", "MInference, arXiv:2407.02490");
    Prefill tri_shape in tri_shape::TriShape(TriShapeConfig,
        "first and last tokens, a dense end", "SCBench, arXiv:2412.10319");
    Prefill flexprefill in flexprefill::Flexprefill(FlexprefillConfig,
        "a pattern and a budget per head", "FlexPrefill, arXiv:2502.20766");
    Prefill meanpool in meanpool::Meanpool(MeanpoolConfig,
        "blocks, by the products of their means", "PBS-Attn; MOMO (top_k)");
    Both streamingllm in streaming::Streamingllm(StreamingConfig,
        "first and last tokens", "StreamingLLM, arXiv:2309.17453");
    Both infinitehip in infinitehip::Infinitehip(InfinitehipConfig,
        "chunks of 8 keys, in three stages", "InfiniteHiP, arXiv:2502.08910");
    Prefill oracle_topk in oracle_topk::OracleTopk(OracleTopkConfig,
        "the best blocks by dense mass; no speed", "MOMO, fig. 2");
    } decode {
    Decode h2o in h2o::H2o(H2oConfig, "keys with the most attention so far, and the last", "H2O, arXiv:2306.14048");
    Decode snapkv in snapkv::Snapkv(SnapkvConfig,
        "keys the end of the prompt looks at, once", "SnapKV, arXiv:2404.14469");
    Decode quest in quest::Quest(QuestConfig, "pages by an upper bound of their products", "Quest, arXiv:2406.10774");
    Decode infllm in infllm::Infllm(InfllmConfig,
        "blocks by representative keys, in addition to a window", "InfLLM, arXiv:2402.04617");
    Decode dam in dam::Dam(DamConfig,
        "a map per head, of a file or the text's beginning", "DAM, arXiv:2506.11104; our reading");
    Decode exact_top in exact_top::ExactTop(ExactTopConfig,
        "the largest logits; no speed", "DMA, arXiv:2508.02124, table 3");
    Decode dma in dma::Dma(DmaConfig, "slots; the key of smallest z goes, without recency", "DMA, arXiv:2508.02124");
    } } };
}
#[cfg(test)]
pub(crate) use all_methods;

macro_rules! methods {
    (@read $kind:ident $name:ident $items:ident) => {
        Self::$kind(own($name, $items)?)
    };
    (@read $kind:ident $name:ident $items:ident $read:ident) => {
        $read($items)?
    };
    (@of_prefill prefill $settings:ident) => {
        Some($settings)
    };
    // Decode methods; and delta, which needs its base beside its settings.
    (@of_prefill $group:ident $settings:ident $($read:ident)?) => {{
        let _ = $settings;
        None
    }};
    ($($group:ident { $($phase:ident $name:ident in $module:ident::$kind:ident(
        $settings:ident $([$base:ty; $read:ident])?, $about:literal, $paper:literal);)+ })+) => {
        /// All methods, each with its settings.
        #[derive(Clone, Debug, PartialEq)]
        #[allow(missing_docs, reason = "each is documented by its settings")]
        pub enum Method {
            /// Every query reads every key before it; for layers without a sparse method.
            Dense,
            $($($kind(crate::$group::$module::$settings $(, $base)?),)+)+
        }

        /// All methods, in the order of the help.
        pub const ENTRIES: [Entry; [$($($about),+),+].len()] =
            [$($(Entry { name: stringify!($name), phase: Phase::$phase, about: $about, paper: $paper }),+),+];

        impl Method {
            /// The method's name in `--selector`.
            pub(super) fn name(&self) -> &'static str {
                match self {
                    Self::Dense => "dense",
                    $($(Self::$kind(..) => stringify!($name),)+)+
                }
            }

            /// Whether the method acts on prompts or on new tokens.
            pub(super) fn phase(&self) -> Phase {
                match self {
                    Self::Dense => Phase::Prefill,
                    $($(Self::$kind(..) => Phase::$phase,)+)+
                }
            }

            /// The settings as a prefill method; `None` for dense, decode methods and delta (which needs its base too).
            pub(super) fn of_prefill(&self) -> Option<&dyn PrefillMethod> {
                match self {
                    Self::Dense => None,
                    $($(Self::$kind(settings, ..) => methods!(@of_prefill $group settings $($read)?),)+)+
                }
            }

            /// The method's settings as JSON.
            pub(super) fn settings(&self) -> Map<String, Value> {
                match self {
                    Self::Dense => Map::new(),
                    $($(Self::$kind(settings, ..) => fields(settings),)+)+
                }
            }

            /// Reads the method `name` and takes its keys out of `items`; `None` if there is no such method.
            pub(super) fn read(
                name: &str,
                items: &mut Vec<Item<'_>>,
            ) -> Result<Option<Self>, SelectError> {
                Ok(Some(match name {
                    "dense" => Self::Dense,
                    $($(stringify!($name) => methods!(@read $kind name items $($read)?),)+)+
                    _ => return Ok(None),
                }))
            }
        }
    };
}

all_methods! { methods }
