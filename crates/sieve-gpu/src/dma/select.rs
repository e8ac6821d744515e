//! Launches of `kernels/dma_select_prefix.cu` and `kernels/dma_select.cu`: which keys DMA keeps, and up to which query.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, SourceKernel, operands, params, require, require_non_empty};
use sieve_core::DmaWindow;

const NAME: &str = "dma_select";

/// Tokens between two boundaries at which survivors are stored; the kernels' `PREFIX_BLOCK`.
pub(crate) const PREFIX_BLOCK: usize = 8192;

/// Sequences of up to this many tokens need no survivors: every thread block reads all keys before it.
const SHORT_SEQUENCE: usize = 2 * PREFIX_BLOCK;

/// Keys of a thread block of `dma_select`, one for each thread.
const BLOCK: usize = 1024;

/// Positions must fit the kernels' 22-bit fields.
const MAX_SEQ_LEN: usize = 1 << 22;

/// The keys that [`dma_select`] chose.
#[derive(Debug, Clone)]
pub struct Selection {
    /// Query i sees key j exactly when `j <= i < expire[j]`; i32 `[batch, num_kv_heads, seq_len]`.
    pub expire: CudaTensor,
    /// The keys that are kept at each multiple of 8192 tokens, 64-bit words
    /// `[batch, num_kv_heads, boundaries, keep_window_size]`. [`dma_lists`](crate::Selection::dma_lists) reads them for
    /// sequences of more than 16384 tokens.
    pub survivors: CudaTensor,
    /// Most keys that a query sees.
    pub keep_window_size: usize,
}

/// Per document and KV head, keeps for each query the last `local_window_size` keys and the older keys with the largest
/// `(rank_j, j)`, `keep_window_size` in all (arXiv:2508.02124, eq. 3, which has no local window; of equal ranks the
/// later key is kept). `rank` is f32 `[batch, num_kv_heads, seq_len]`, the documents' bounds i32 `[batch, seq_len]`.
/// The result is exact.
///
/// # Errors
/// Other types or shapes, an empty sequence, one of 2^22 tokens or more, a window of 0 or smaller than its local part.
pub fn dma_select(
    rank: &CudaTensor,
    doc_start: &CudaTensor,
    doc_end: &CudaTensor,
    window: DmaWindow,
) -> Result<Selection, KernelError> {
    let DmaWindow { keep_window_size, local_window_size } = window;
    let [batch, num_kv_heads, seq_len] = rank.dims(NAME, "rank")?;
    operands!(NAME, rank: F32[batch, num_kv_heads, seq_len]);
    require_non_empty(NAME, "the number of KV heads", num_kv_heads)?;
    require_non_empty(NAME, "keep_window_size", keep_window_size)?;
    require_local_window(NAME, local_window_size, keep_window_size)?;
    require_sequence(NAME, batch, seq_len)?;
    operands!(NAME, doc_start: I32[batch, seq_len], doc_end: I32[batch, seq_len]);
    let expire = rank.empty_contiguous(&[batch, num_kv_heads, seq_len], DType::I32);
    // No query sees more than seq_len keys; a larger window would only take more memory.
    let kept = keep_window_size.min(seq_len);
    // Keys that are kept for their rank; the kernel adds the local window.
    let num_ranked = window.num_ranked().min(seq_len);
    let survivors_of = |window: usize| {
        let shape = survivors_shape(batch, num_kv_heads, seq_len, window);
        rank.empty_contiguous(&shape, DType::I64)
    };
    let survivors = survivors_of(num_ranked.max(1));
    let [prefix, select] = dma_select_kernels();
    if seq_len > SHORT_SEQUENCE && num_ranked > 0 {
        let grid = [seq_len.div_ceil(PREFIX_BLOCK) - 1, num_kv_heads, batch];
        let params = params!(DmaSelectPrefixParams { seq_len, num_kv_heads, num_ranked });
        // SAFETY: reads rank and the documents' starts, writes some of survivors; sizes checked above.
        unsafe { prefix.launch(grid, &[&rank, &doc_start, &survivors], &params) }?;
    }
    let grid = [seq_len.div_ceil(BLOCK), num_kv_heads, batch];
    let tensors = [&rank, &doc_start, &doc_end, &survivors, &expire];
    let params = params!(DmaSelectParams { seq_len, num_kv_heads, num_ranked, local_window_size });
    // SAFETY: reads rank, the bounds and what the launch before wrote, writes every element of expire.
    unsafe { select.launch(grid, &tensors, &params) }?;
    let survivors = match local_window_size {
        0 => survivors,
        // `survivors` holds the best-ranked keys alone, but `dma_lists` also needs the keys of the local window, so all
        // survivors are found again from `expire`.
        _ if seq_len > SHORT_SEQUENCE => return Selection::of_expire(&expire, &doc_start, kept),
        // Nothing reads the survivors of a short sequence; only their shape must fit.
        _ => survivors_of(kept),
    };
    Ok(Selection { expire, survivors, keep_window_size: kept })
}

/// The two kernels of a selection, in the order of their launches; short sequences need the second alone.
fn dma_select_kernels() -> [SourceKernel; 2] {
    // The second kernel holds the scores of all keys before its thread block in shared memory.
    const STAGED_BYTES: usize = 4 * (SHORT_SEQUENCE - BLOCK);
    [("dma_select_prefix", 0), (NAME, STAGED_BYTES)].map(|(name, shared_bytes)| {
        SourceKernel::new(name).define("PREFIX_BLOCK", PREFIX_BLOCK).threads(BLOCK).shared_bytes(shared_bytes)
    })
}

/// Shape of the tensor of survivors, the best keys before each boundary.
pub(crate) fn survivors_shape(batch: usize, num_kv_heads: usize, seq_len: usize, window: usize) -> [usize; 4] {
    let boundaries = seq_len.div_ceil(PREFIX_BLOCK) - 1;
    [batch, num_kv_heads, boundaries.max(1), window]
}

/// Refuses a local window larger than the window it is a part of.
pub(crate) fn require_local_window(
    kernel: &'static str,
    local_window_size: usize,
    keep_window_size: usize,
) -> Result<(), KernelError> {
    let fits = local_window_size <= keep_window_size;
    require!(fits, kernel, "local_window_size": local_window_size, "at most keep_window_size, {keep_window_size}");
    Ok(())
}

/// Refuses an empty batch and sequences whose positions the selection cannot hold.
pub(crate) fn require_sequence(kernel: &'static str, batch: usize, seq_len: usize) -> Result<(), KernelError> {
    require_non_empty(kernel, "batch", batch)?;
    require_non_empty(kernel, "seq_len", seq_len)?;
    require!(seq_len < MAX_SEQ_LEN, kernel, "seq_len": seq_len, "below {MAX_SEQ_LEN}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn survivors_have_room_for_every_boundary() {
        assert_eq!(survivors_shape(2, 3, 8192, 7), [2, 3, 1, 7], "one block: a place that no kernel writes");
        assert_eq!(survivors_shape(2, 3, 8193, 7), [2, 3, 1, 7]);
        assert_eq!(survivors_shape(2, 3, 16385, 7), [2, 3, 2, 7]);
    }

    #[test]
    fn sequences_out_of_range_are_refused() {
        assert!(require_sequence("k", 1, 0).is_err());
        assert!(require_sequence("k", 0, 5).is_err());
        assert!(require_sequence("k", 1, MAX_SEQ_LEN - 1).is_ok());
        let error = require_sequence("k", 1, MAX_SEQ_LEN).expect_err("22 bits").to_string();
        assert!(error.contains("4194304"), "{error}");
    }
}
