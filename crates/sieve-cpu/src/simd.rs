//! Vector code that kernels share.
//!
//! The build targets baseline x86-64, so every hot loop is a function that [`on_arch`] calls through a
//! `pulp::WithSimd`. That function and all it calls must be `#[inline(always)]`: only then are they compiled for the
//! instruction set found at run time. (A closure given to `Arch::dispatch` is compiled separately, for the baseline.)

use pulp::{Arch, Simd};
#[cfg(target_arch = "x86_64")]
use std::sync::LazyLock;

/// The best instruction set of this CPU.
#[cfg(not(test))]
pub(crate) fn arch() -> Arch {
    Arch::new()
}

/// The best instruction set of this CPU, or the one that [`tests::on_every_arch`] chose.
#[cfg(test)]
pub(crate) fn arch() -> Arch {
    tests::CHOSEN.get().unwrap_or_default()
}

/// Shows that this CPU has `vdpbf16ps` (AVX512_BF16), which adds products of bf16 pairs to f32 lanes. `pulp` has no
/// such instruction, so functions for it are `#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]`.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bf16Pairs(());

#[cfg(target_arch = "x86_64")]
impl Bf16Pairs {
    /// `None`: the CPU, or the instruction set that a test chose, lacks `vdpbf16ps`.
    pub(crate) fn of_this_cpu() -> Option<Self> {
        #[cfg(test)]
        if tests::WITHOUT_BF16_PAIRS.get() {
            return None;
        }
        // `V4` means that AVX512F and AVX512BW are there too, and that the system saves their registers.
        let is_there = matches!(arch(), Arch::V4(_)) && std::arch::is_x86_feature_detected!("avx512bf16");
        is_there.then_some(Self(()))
    }
}

/// Shows that this CPU has Intel's tile unit for bf16 (AMX) beside `vdpbf16ps`, and that the system lets this process
/// use it. Rust has no stable functions for it, so `linear/bf16_tiles.rs` has its instructions as assembly.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bf16Tiles {
    /// AVX-512, which every CPU with the unit has.
    pub(crate) simd: pulp::x86::V4,
    /// Whether plain code takes the unit's place.
    #[cfg(test)]
    pub(crate) is_emulated: bool,
}

#[cfg(target_arch = "x86_64")]
impl Bf16Tiles {
    /// `None`: the CPU, the system or the instruction set that a test chose has no such unit.
    pub(crate) fn of_this_cpu() -> Option<Self> {
        Bf16Pairs::of_this_cpu()?;
        let Arch::V4(simd) = arch() else { return None };
        #[cfg(test)]
        match tests::TILES.get() {
            tests::Tiles::Emulated => return Some(Self { simd, is_emulated: true }),
            tests::Tiles::None => return None,
            tests::Tiles::OfTheCpu => {}
        }
        static IS_THERE: LazyLock<bool> = LazyLock::new(tiles_are_there);
        IS_THERE.then_some(Self {
            simd,
            #[cfg(test)]
            is_emulated: false,
        })
    }
}

/// Whether the CPU has the unit; asks the system to save its registers, 8 KB a thread, which it does for processes that
/// ask. `SIEVE_AMX=0` says no.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn tiles_are_there() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_ulong = 18;
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    let features = std::arch::x86_64::__cpuid_count(7, 0).edx;
    if features & AMX_BF16 == 0 || features & AMX_TILE == 0 || std::env::var_os("SIEVE_AMX").is_some_and(|is| is == "0")
    {
        return false;
    }
    // SAFETY: this call reads and writes no memory of the process.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

/// Only Linux is asked for the unit's registers.
#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn tiles_are_there() -> bool {
    false
}

/// `fn name(arguments) -> output = inner;` defines `name`, which calls `inner(simd, arguments)` compiled for the best
/// instruction set.
macro_rules! on_arch {
    ($(#[$about:meta])* $seen:vis fn $name:ident<$($life:lifetime),+ $(; const $width:ident)?>(
        $($argument:ident: $type:ty),+ $(,)?
    ) -> $output:ty = $inner:ident;) => {
        $(#[$about])*
        #[allow(clippy::too_many_arguments, reason = "the operands of one op, all slices")]
        $seen fn $name<$($life,)+ $(const $width: usize)?>($($argument: $type),+) -> $output {
            struct Call<$($life,)+ $(const $width: usize)?> {
                $($argument: $type,)+
            }

            impl<$($life,)+ $(const $width: usize)?> pulp::WithSimd for Call<$($life,)+ $($width)?> {
                type Output = $output;

                #[inline(always)]
                fn with_simd<S: pulp::Simd>(self, simd: S) -> $output {
                    $inner(simd, $(self.$argument),+)
                }
            }

            $crate::simd::arch().dispatch(Call { $($argument),+ })
        }
    };
}
pub(crate) use on_arch;

/// `sum a_i b_i`; the order of the sum depends only on the length and on the instruction set.
#[inline(always)]
pub(crate) fn dot<S: Simd>(simd: S, a: &[f32], b: &[f32]) -> f32 {
    let ((a, a_tail), (b, b_tail)) = (S::as_simd_f32s(a), S::as_simd_f32s(b));
    let mut sums = [simd.splat_f32s(0.0); 4];
    let ((a4, a1), (b4, b1)) = (a.as_chunks::<4>(), b.as_chunks::<4>());
    for (a, b) in a4.iter().zip(b4) {
        for v in 0..4 {
            sums[v] = simd.mul_add_e_f32s(a[v], b[v], sums[v]);
        }
    }
    for (&a, &b) in a1.iter().zip(b1) {
        sums[0] = simd.mul_add_e_f32s(a, b, sums[0]);
    }
    if !a_tail.is_empty() {
        sums[1] = simd.mul_add_e_f32s(simd.partial_load_f32s(a_tail), simd.partial_load_f32s(b_tail), sums[1]);
    }
    reduce_sum(simd, sums)
}

/// The sum of all elements of four vectors.
#[inline(always)]
pub(crate) fn reduce_sum<S: Simd>(simd: S, sums: [S::f32s; 4]) -> f32 {
    simd.reduce_sum_f32s(simd.add_f32s(simd.add_f32s(sums[0], sums[1]), simd.add_f32s(sums[2], sums[3])))
}

/// 1.5 * 2^23: adding it rounds a small f32 to an integer, which is then in the low bits of the sum.
pub(crate) const ROUND: f32 = 12_582_912.0;
/// ln 2 as a sum of two numbers. The first has so few bits that its product with a small integer is exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// Coefficients of a polynomial for (e^r - 1) / r on |r| <= ln(2) / 2, highest power first: a least-squares fit whose
/// relative error in e^r is 1.7e-8 everywhere, an eighth of an ulp.
const EXP_POLY: [f32; 6] = [1.384_365_1e-3, 8.374_156e-3, 4.166_8e-2, 0.166_664_32, 0.499_999_94, 1.0];
/// Bits of an f32 below its exponent, and the bits of 1.0.
pub(crate) const EXPONENT: u32 = 23;
pub(crate) const ONE: u32 = 0x3f80_0000;
const EXP_UNDERFLOW: f32 = -87.33;
const EXP_OVERFLOW: f32 = 88.37;

/// `e^x` within 2 ulp. Below -87.33 the result is 0, above 88.37 infinity; NaN stays NaN.
#[inline(always)]
pub(crate) fn exp<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let overflow = simd.greater_than_f32s(x, simd.splat_f32s(EXP_OVERFLOW));
    simd.select_f32s(overflow, simd.splat_f32s(f32::INFINITY), exp_below(simd, x))
}

/// As [`exp`] for x up to 88.37; the result for larger x is undefined.
#[inline(always)]
pub(crate) fn exp_below<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let (y, shifted) = exp_parts(simd, x);
    // The low bits of `shifted` are n: shifted to the exponent and added to the bits of 1.0, they make 2^n.
    let bits = simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(shifted), simd.splat_u32s(EXPONENT));
    let scale = simd.transmute_f32s_u32s(simd.add_u32s(bits, simd.splat_u32s(ONE)));
    let y = simd.mul_f32s(y, scale);
    simd.select_f32s(simd.less_than_f32s(x, simd.splat_f32s(EXP_UNDERFLOW)), simd.splat_f32s(0.0), y)
}

/// `e^x = 2^n e^r` with `x = n ln 2 + r`: returns e^r, and n + [`ROUND`], whose low bits are n. Both depend on x alone.
#[inline(always)]
pub(crate) fn exp_parts<S: Simd>(simd: S, x: S::f32s) -> (S::f32s, S::f32s) {
    let splat = |value| simd.splat_f32s(value);
    let shifted = power_of(simd, x);
    let n = simd.sub_f32s(shifted, splat(ROUND));
    let r = simd.mul_add_e_f32s(n, splat(-LN2_HIGH), x);
    let r = simd.mul_add_e_f32s(n, splat(-LN2_LOW), r);
    let mut p = splat(EXP_POLY[0]);
    for &coefficient in &EXP_POLY[1..] {
        p = simd.mul_add_e_f32s(p, r, splat(coefficient));
    }
    (simd.mul_add_e_f32s(p, r, splat(1.0)), shifted)
}

/// The power of two nearest to `e^x`, as its exponent plus [`ROUND`]. A larger x has no smaller result.
#[inline(always)]
pub(crate) fn power_of<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    simd.mul_add_e_f32s(x, simd.splat_f32s(std::f32::consts::LOG2_E), simd.splat_f32s(ROUND))
}

/// Turns the row into `exp(row - max)` and returns its sum; no element may exceed `max`.
#[inline(always)]
pub(crate) fn exp_and_sum<S: Simd>(simd: S, row: &mut [f32], max: f32) -> f32 {
    let (row, tail) = S::as_mut_simd_f32s(row);
    let max_vector = simd.splat_f32s(max);
    let mut sums = [simd.splat_f32s(0.0); 4];
    let (row4, row1) = row.as_chunks_mut::<4>();
    for x in row4 {
        for v in 0..4 {
            x[v] = exp_below(simd, simd.sub_f32s(x[v], max_vector));
            sums[v] = simd.add_f32s(sums[v], x[v]);
        }
    }
    for x in row1 {
        *x = exp_below(simd, simd.sub_f32s(*x, max_vector));
        sums[0] = simd.add_f32s(sums[0], *x);
    }
    if !tail.is_empty() {
        let last = exp(simd, simd.sub_f32s(simd.partial_load_f32s(tail), max_vector));
        simd.partial_store_f32s(tail, last);
        // The stored values are loaded again, because unused lanes of a partial load are 0.
        sums[1] = simd.add_f32s(sums[1], simd.partial_load_f32s(tail));
    }
    reduce_sum(simd, sums)
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let one = simd.splat_f32s(1.0);
    simd.div_f32s(one, simd.add_f32s(one, exp(simd, simd.neg_f32s(x))))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::Cell;

    use pulp::WithSimd;

    use super::*;
    use sieve_testing::threads;

    thread_local! {
        pub(super) static CHOSEN: Cell<Option<Arch>> = const { Cell::new(None) };
        pub(super) static WITHOUT_BF16_PAIRS: Cell<bool> = const { Cell::new(false) };
        pub(super) static TILES: Cell<Tiles> = const { Cell::new(Tiles::OfTheCpu) };
    }

    /// Which tile unit a test sees.
    #[derive(Clone, Copy, Debug)]
    pub(crate) enum Tiles {
        /// The CPU's, if it has one.
        OfTheCpu,
        /// Plain code in its place, on CPUs with `vdpbf16ps`.
        Emulated,
        /// None.
        None,
    }

    /// Runs a test with each instruction set this CPU has, not only the best.
    pub(crate) fn on_every_arch(test: impl Fn() + Sync) {
        let mut all = vec![Arch::Scalar, Arch::new()];
        #[cfg(target_arch = "x86_64")]
        all.extend(pulp::x86::V3::try_new().map(Arch::V3));
        for arch in all {
            // One thread, so that all tasks of the test see its choice.
            threads(1).install(|| {
                CHOSEN.set(Some(arch));
                test();
            });
        }
        without_bf16_pairs(1, &test);
        with_tiles(Tiles::Emulated, 1, &test);
        with_tiles(Tiles::None, 1, &test);
    }

    /// Runs a test on `count` threads with this tile unit.
    pub(crate) fn with_tiles<T: Send>(tiles: Tiles, count: usize, test: impl FnOnce() -> T + Send) -> T {
        let pool = threads(count);
        pool.broadcast(|_| TILES.set(tiles));
        pool.install(test)
    }

    /// Runs a test on `count` threads as a CPU without `vdpbf16ps` does.
    pub(crate) fn without_bf16_pairs<T: Send>(count: usize, test: impl FnOnce() -> T + Send) -> T {
        let pool = threads(count);
        pool.broadcast(|_| WITHOUT_BF16_PAIRS.set(true));
        pool.install(test)
    }

    struct Exp<'x>(&'x mut [f32]);

    impl WithSimd for Exp<'_> {
        type Output = ();

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) {
            let (head, tail) = S::as_mut_simd_f32s(self.0);
            for x in head {
                *x = exp(simd, *x);
            }
            let last = exp(simd, simd.partial_load_f32s(tail));
            simd.partial_store_f32s(tail, last);
        }
    }

    fn exp_of(x: &[f32]) -> Vec<f32> {
        let mut y = x.to_vec();
        arch().dispatch(Exp(&mut y));
        y
    }

    #[test]
    fn exp_is_within_two_ulp() {
        on_every_arch(|| {
            // Every 997th float from -87.33 to 88.37.
            let negative = (0..(87.33_f32).to_bits()).step_by(997).map(|bits| -f32::from_bits(bits));
            let positive = (0..(88.37_f32).to_bits()).step_by(997).map(f32::from_bits);
            let x: Vec<f32> = negative.chain(positive).collect();
            for (&x, y) in x.iter().zip(exp_of(&x)) {
                let exact = f64::from(x).exp();
                let ulp = f64::from(f32::from_bits(y.to_bits() + 1)) - f64::from(y);
                assert!((f64::from(y) - exact).abs() <= 2.0 * ulp, "exp({x}) = {y}, exact {exact}");
            }
        });
    }

    #[test]
    fn exp_is_0_or_infinity_outside_its_range() {
        on_every_arch(|| {
            let y = exp_of(&[f32::NEG_INFINITY, -1.0e30, -87.34, 88.38, 1.0e30, f32::INFINITY, 0.0, -0.0, f32::NAN]);
            assert_eq!(y[..3], [0.0; 3]);
            assert_eq!(y[3..6], [f32::INFINITY; 3]);
            assert_eq!(y[6..8], [1.0; 2]);
            assert!(y[8].is_nan());
        });
    }

    struct Dot<'x>(&'x [f32], &'x [f32]);

    impl WithSimd for Dot<'_> {
        type Output = f32;

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> f32 {
            dot(simd, self.0, self.1)
        }
    }

    #[test]
    fn dot_at_every_length() {
        on_every_arch(|| {
            for len in 0..200 {
                let a: Vec<f32> = (0..len).map(|i| i as f32 + 1.0).collect();
                let b: Vec<f32> = (0..len).map(|i| (i % 3) as f32 - 1.0).collect();
                let exact: f32 = a.iter().zip(&b).map(|(a, b)| a * b).sum();
                assert_eq!(arch().dispatch(Dot(&a, &b)), exact);
            }
        });
    }
}
