//! Launches of `kernels/nsa_*.cu`: native sparse attention (arXiv:2502.11089). The window branch is
//! [`attention_forward`](crate::Qkv::attention_forward).
//!
//! The compressed branch places compressed keys and values at the positions of their blocks' last tokens, and DMA's
//! kernels attend to them through key lists. The selected branch computes attention block by block: each block has a
//! list of the queries that chose it, each (query, block) pair gets a partial result, and a query's partial results are
//! joined in the order of its blocks.
//!
//! A compressed block is a list entry {last token, document end}. In its keys, values and f32 sums only rows where
//! blocks end are ever written. Importance is streamed over the compressed keys with the branch's log-sum-exp, and
//! passed to the choice for some queries at a time.
//!
//! In the selected branch a thread block holds the K and V of one block and streams the queries that chose it, from
//! lists made by a counting sort. Two neighbours of 64 that are chosen together are one block of 128 in Hopper's
//! forward pass. Where every query reads many blocks next to itself, dense attention's kernels read
//! these, and lists have the others. dk and dv are f32 sums with one addition for each piece of a list. With
//! `deterministic` a semaphore per key orders the additions on Hopper; elsewhere each list is one piece.
//!
//! The list of a row's blocks lies in shared memory, so with blocks of 64 a row has at most 1,851,392 tokens on an
//! H200 and 802,816 on cards with 99 KiB; plan and launch name the limit. The queries of a launch are bounded by
//! scratch memory: 1 GiB of partial results, 256 MiB of importances.
mod blocks;
mod choose;
mod compressed;
mod decode;
mod decode_in_order;
mod gates;
mod hopper;
mod index_gradient;
mod index_scores;
mod lists;
mod local_blocks;
mod selected;
mod selected_blocks;

pub use blocks::{PackedGradient, nsa_blocks, nsa_blocks_backward, nsa_mean_pool, nsa_mean_pool_backward};
pub use choose::choose_by_scores;
pub(crate) use choose::take_largest;
pub(crate) use decode::key_logits;
pub use decode::{NsaToken, PooledStep, require_chosen_decode};
pub use gates::{nsa_gates, nsa_gates_backward};
pub use index_gradient::IndexGradient;
pub use index_scores::IndexedToken;
pub use lists::ChoiceLists;
pub use local_blocks::BlocksWithLocal;
pub use selected::AttendedBlocks;
pub use selected_blocks::{SelectedAttention, SelectedBlocks};

use crate::KernelError;
use crate::attention::{AttentionShape, Heads};
use crate::runtime::{CudaTensor, operands, require};
use sieve_core::ChoiceRule;

/// Keys of a block that queries choose.
const BLOCK_KEYS: usize = 64;

/// `[start, end]` of each token's document, i32 `[batch, seq_len]`.
type Bounds<'a> = [&'a CudaTensor; 2];

/// Checks the documents' bounds against `[batch, seq_len]`, and copies bounds with gaps.
fn require_bounds(
    kernel: &'static str,
    [start, end]: Bounds,
    shape: [usize; 2],
) -> Result<[CudaTensor; 2], KernelError> {
    operands!(kernel, doc_start: I32 shape = start, doc_end: I32 shape = end);
    Ok([doc_start, doc_end])
}

/// Most elements of a row of the batch: the Hopper kernels number its 16-byte words in 31 bits.
const MAX_ROW_ELEMENTS: usize = (1 << 31) * 8;

/// Refuses a call that has no kernel. `gap` says what the call is and what the kernels take.
fn no_gap(kernel: &'static str, gap: Option<(String, &'static str)>) -> Result<(), KernelError> {
    match gap {
        None => Ok(()),
        Some((got, supported)) => Err(KernelError::unsupported(kernel, "call:", got, supported)),
    }
}

/// Refuses rows of more than [`MAX_ROW_ELEMENTS`], of the heads that a kernel reads or of its output.
fn require_row(kernel: &'static str, shape: &AttentionShape, read: &[&Heads]) -> Result<(), KernelError> {
    let token_strides = read.iter().filter_map(|heads| heads.words());
    let outputs = shape.num_heads * shape.head_dim;
    let row = token_strides.fold(outputs, |most, [_, token, _]| most.max(token)) * shape.seq_len;
    require!(row <= MAX_ROW_ELEMENTS, kernel, "call:": format!("a row of {row} numbers"), "up to 2^34, 32 GiB");
    Ok(())
}

/// Value of the `#define RULE` of the kernels that score blocks.
fn rule_number(rule: ChoiceRule) -> u8 {
    match rule {
        ChoiceRule::WeightedProbability => 0,
        ChoiceRule::LargestProbability => 1,
        ChoiceRule::MeanKey => 2,
        ChoiceRule::LargestScore => 3,
        ChoiceRule::SumOfHeads => unreachable!("scored by GEMMs"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Hardware, Qkv, Recorder};

    #[test]
    fn a_row_beyond_31_bits_of_words_is_refused() {
        let gpu = Recorder::new(Hardware::HOPPER);
        // A token has 144 heads of 128 numbers; 2^34 numbers are 932,067 tokens and a part of one.
        let [heads, kv_heads, d] = [128, 8, 128];
        for (seq_len, fits) in [(932_067, true), (932_068, false)] {
            let packed = gpu.tensor(&[1, seq_len, heads + 2 * kv_heads, d], DType::BF16);
            let qkv = Qkv::packed(&packed, heads, kv_heads);
            let shape = qkv.shape("nsa").expect("whole heads");
            let judged = require_row("nsa", &shape, &[&qkv.q]);
            assert_eq!(judged.is_ok(), fits, "{seq_len}: {judged:?}");
        }
    }
}
