//! Dynamic mask attention (arXiv:2508.02124): scores, the selection, lists of kept keys, attention over them, decoding.
mod attention_backward;
mod attention_forward;
mod backward_lists;
pub(crate) mod decode;
pub(crate) mod halo_keys;
pub(crate) mod lists;
pub mod oracle;
pub(crate) mod ordered;
pub(crate) mod scores;
pub(crate) mod scores_backward;
pub(crate) mod select;

pub(crate) use attention_backward::{ConvertedSums, SumRows, convert_rows, listed_key_sums};
pub(crate) use attention_forward::{listed_attention_forward, listed_bias, listed_source, require_lists};
pub(crate) use backward_lists::{BackwardLists, with_whole_keys};
pub(crate) use decode::{DmaSlots, slots_decode};
pub(crate) use lists::{KeyLists, LIST_ALIGNMENT};
pub(crate) use scores::{ScoreBias, require_kv_heads};
pub(crate) use select::{PREFIX_BLOCK, Selection, require_local_window, require_sequence, survivors_shape};
