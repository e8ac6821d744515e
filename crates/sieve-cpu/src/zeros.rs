//! Large vectors of zeros, for the outputs of kernels.
use rayon::prelude::*;
use std::mem::MaybeUninit;

/// f32 numbers that a thread clears at a time: 64 KiB, which its caches hold.
const CLEARED: usize = 1 << 14;

/// Shorter vectors are cleared by the calling thread: they fit into its caches, and waking other threads takes as long.
const MIN_SHARED: usize = 1 << 20;

/// `len` zeros, cleared by all threads of the current rayon pool where they are many.
///
/// `vec![0.0; len]` clears memory that was in use before on the calling thread alone, and the kernels' threads wait.
pub fn zeros(len: usize) -> Vec<f32> {
    if len < MIN_SHARED {
        return vec![0.0; len];
    }
    let mut zeros = Vec::with_capacity(len);
    let pieces = zeros.spare_capacity_mut()[..len].par_chunks_mut(CLEARED);
    pieces.for_each(|piece| piece.fill(MaybeUninit::new(0.0)));
    // SAFETY: the capacity is at least `len`, and the pieces, which are all of its first `len` numbers, were written.
    unsafe { zeros.set_len(len) };
    zeros
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_of_any_length_hold_zeros_alone() {
        for len in [0, 1, MIN_SHARED - 1, MIN_SHARED, MIN_SHARED + 1, 3 * MIN_SHARED + CLEARED - 1] {
            // Memory of this size that held other numbers before.
            drop(vec![f32::NAN; len]);
            let found = zeros(len);
            assert!(found.len() == len && found.iter().all(|&x| x == 0.0), "{len}");
        }
    }
}
