//! Dynamic mask attention (arXiv:2508.02124): scores, the selection, lists of kept keys, attention over them, decoding.
pub(crate) mod attention_backward;
pub(crate) mod attention_forward;
pub(crate) mod border_keys;
pub(crate) mod decode;
pub(crate) mod lists;
pub mod oracle;
pub(crate) mod scores;
pub(crate) mod scores_backward;
pub(crate) mod select;
