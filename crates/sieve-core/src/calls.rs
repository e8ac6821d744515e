//! What an op is called with: the sizes of a call, which keys its queries see, how blocks are chosen, and the options
//! of its kernels. Every crate that computes takes these; no recipe is read here.

mod adamw_step;
mod attention_shape;
mod block_choice;
mod block_selection;
mod call_shape;
mod draw;
mod far_keys;
mod fp8_format;
mod gemm_kind;
mod keeping;
mod kernel_policy;
mod key_mask;
mod nsa_blocks;
mod score_matrix;

pub use adamw_step::AdamWStep;
pub use attention_shape::AttentionShape;
pub use block_choice::{
    BlockChoice, ChoiceRule, ForcedBlocks, LocalBlocks, SCORES_AT_ONCE, SELECTED_SIZES, selected_in_pairs,
    selected_pieces,
};
pub use block_selection::{
    BlockScores, BlockSelection, HeadRule, HeavyKeys, KeepBlocks, KeptBlocks, KeyScores, ProbeCorrection, Rescue,
    ScoredBlocks, SlotOrder, TokenKeys,
};
pub use call_shape::{CallShape, Tiles};
pub use draw::Draw;
pub use far_keys::FarKeys;
pub use fp8_format::Fp8Format;
pub use gemm_kind::GemmKind;
pub use keeping::{KeepOLow, Keeping};
pub use kernel_policy::{Arrivals, KernelFamilies, KernelPolicy, KeyOrder, SumOrder};
pub use key_mask::{ChosenKeys, KeptRows, KeyMask, MaskCounts, MaskError, MaskPlaces, TokenWindow};
pub use nsa_blocks::{NsaBlocks, selected_gap};
pub use score_matrix::{MOST_REFERENCE_SCORES, ReferenceTooLarge, ScoreMatrix};
