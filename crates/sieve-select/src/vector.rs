//! Vector arithmetic that several selectors use.

/// Dot product, by eight partial sums: it vectorises, and the order of additions is fixed.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0_f32; 8];
    let ((a8, a1), (b8, b1)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    for (a, b) in a8.iter().zip(b8) {
        for lane in 0..8 {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    let tail: f32 = a1.iter().zip(b1).map(|(a, b)| a * b).sum();
    lanes.iter().sum::<f32>() + tail
}

/// Sum, by eight partial sums: it vectorises, and the order of additions is fixed.
pub(crate) fn sum(x: &[f32]) -> f32 {
    let mut lanes = [0.0_f32; 8];
    let (x8, x1) = x.as_chunks::<8>();
    for x in x8 {
        for lane in 0..8 {
            lanes[lane] += x[lane];
        }
    }
    lanes.iter().sum::<f32>() + x1.iter().sum::<f32>()
}

/// Euclidean norm of a vector.
pub(crate) fn norm(x: &[f32]) -> f32 {
    x.iter().map(|x| x * x).sum::<f32>().sqrt()
}

/// `sum += x`, where an empty sum is zero.
pub(crate) fn add(sum: &mut Vec<f32>, x: Vec<f32>) {
    if sum.is_empty() {
        *sum = x;
    } else {
        sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
    }
}

/// One step of splitmix64, as a hash of `x`.
pub(crate) fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mix_gives_the_first_value_of_splitmix64_from_seed_0() {
        assert_eq!(mix(0), 0xe220_a839_7b1d_cdaf);
    }

    #[test]
    fn sums_of_any_length() {
        for len in [1, 7, 8, 19] {
            let a: Vec<f32> = (0..len).map(|i| i as f32).collect();
            let expected: f32 = (0..len).map(|i| (i * i) as f32).sum();
            assert_eq!(dot(&a, &a), expected);
            assert_eq!(norm(&a), expected.sqrt());
            assert_eq!(sum(&a), (len * (len - 1) / 2) as f32);
        }
    }
}
