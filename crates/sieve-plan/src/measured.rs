//! What was measured of each kind of attention on cards, and is no property of the kind: how near its kernels come to a
//! card's peak, and where the estimates of a plan were wrong.

use sieve_core::Attention;
use sieve_core::recipe::AttentionKind;

/// Dense attention over 8192, 16,384 and 32,768 keys on an H200 (lab/docs/benchmarks.md), as a share of its peak
/// FLOP/s.
const DENSE: f64 = 0.6;
/// In longer rows than this, dense attention reaches [`LONG_DENSE`]: its launches last tens of milliseconds, and the
/// card's power limits them as it limits GEMMs.
const LONG_ROW: usize = 32_768;
/// Dense attention over 131,072 keys, in a step on four H200s (lab/docs/scale.md), as a share of the peak FLOP/s.
const LONG_DENSE: f64 = 0.51;

/// Share of the peak FLOP/s that attention's kernels reach over the pairs that they compute, in rows of `seq_len`
/// tokens, measured on an H200 (lab/docs/benchmarks.md). Traffic around attention is counted apart.
pub(crate) fn pairs_rate(attention: Attention, seq_len: usize) -> f64 {
    let dense = if seq_len <= LONG_ROW { DENSE } else { LONG_DENSE };
    // Queries that read all keys take the dense kernels.
    let reads_all = match attention {
        Attention::Swa(swa) => swa.sliding_window >= seq_len,
        Attention::Cowa(cowa) => cowa.near_window >= seq_len,
        Attention::Dma(dma) => dma.keep_window_size >= seq_len,
        Attention::Msa(msa) => msa.index_warmup,
        _ => false,
    };
    match attention.kind() {
        _ if reads_all => dense,
        AttentionKind::Mha => dense,
        // No kernel reads bands: of those that will, a window's are the nearest that were measured.
        AttentionKind::Swa | AttentionKind::Cowa => 0.62,
        // Keys are wider than values.
        AttentionKind::Mla => 0.6,
        // All three branches, with the time of choosing blocks, making key lists and joining partial o and dq.
        AttentionKind::Nsa => 0.3,
        // Over gathered keys.
        AttentionKind::Dma => 0.52,
        // Chosen blocks, with the time of choosing them, making key lists and joining partial results: one choice for
        // each group of heads, or for each head.
        AttentionKind::InfllmV2 | AttentionKind::Msa => 0.22,
        AttentionKind::Moba => 0.14,
    }
}

/// Whether training may be faster than with dense attention in long rows only; a plan then says from which length on.
pub(crate) fn pays_late(kind: AttentionKind) -> bool {
    kind == AttentionKind::Nsa
}

/// By how much the estimated speeds of processes that share rows exceeded the measured ones on two H200s, with rows of
/// 65,536 and 131,072 tokens (lab/docs/scale.md); `None` if by at most 6 %.
pub(crate) fn shared_rows_too_fast(kind: AttentionKind) -> Option<&'static str> {
    match kind {
        AttentionKind::Mla => Some("32 to 38 %"),
        AttentionKind::Nsa => Some("7 to 14 %"),
        AttentionKind::Moba => Some("10 %"),
        AttentionKind::Msa => Some("72 to 102 %"),
        AttentionKind::Mha
        | AttentionKind::Swa
        | AttentionKind::Dma
        | AttentionKind::InfllmV2
        | AttentionKind::Cowa => None,
    }
}
