//! Seeded draws of the samples of needles and long tasks.
use chacha20::ChaCha8Rng;
use chacha20::rand_core::SeedableRng;

/// `count` different results of `draw`, in the order drawn.
pub(crate) fn different(count: usize, mut draw: impl FnMut() -> String) -> Vec<String> {
    let mut found: Vec<String> = Vec::with_capacity(count);
    while found.len() < count {
        let one = draw();
        if !found.contains(&one) {
            found.push(one);
        }
    }
    found
}

/// A random generator seeded by four numbers.
pub(crate) fn seeded(parts: [u64; 4]) -> ChaCha8Rng {
    let mut seed = [0; 32];
    for (to, from) in seed.chunks_mut(8).zip(parts) {
        to.copy_from_slice(&from.to_le_bytes());
    }
    ChaCha8Rng::from_seed(seed)
}
