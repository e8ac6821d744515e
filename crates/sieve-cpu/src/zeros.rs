//! Large vectors of zeros, for the outputs of kernels.
use rayon::prelude::*;

/// f32 numbers of one memory page of 4 KiB, which a thread clears at a time.
const PAGE: usize = 1024;

/// Shorter vectors are cleared by the calling thread: they fit into its caches, and waking other threads takes as long.
const MIN_SHARED: usize = 1 << 20;

/// `len` zeros, cleared by all threads of the current rayon pool where they are many.
///
/// `vec![0.0; len]` clears memory that was in use before on the calling thread alone, and the kernels' threads wait.
pub fn zeros(len: usize) -> Vec<f32> {
    if len < MIN_SHARED {
        return vec![0.0; len];
    }
    let pages = (0..len.div_ceil(PAGE)).into_par_iter().with_min_len(16);
    let mut zeros = pages.map(|_| [0.0; PAGE]).collect::<Vec<_>>().into_flattened();
    zeros.truncate(len);
    zeros
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_of_any_length_hold_zeros_alone() {
        for len in [0, 1, MIN_SHARED - 1, MIN_SHARED, MIN_SHARED + 1, 3 * MIN_SHARED + PAGE - 1] {
            // Memory of this size that held other numbers before.
            drop(vec![f32::NAN; len]);
            let found = zeros(len);
            assert!(found.len() == len && found.iter().all(|&x| x == 0.0), "{len}");
        }
    }
}
