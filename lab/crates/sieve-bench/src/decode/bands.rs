//! Checks decoding over a window, first keys and a band of each KV head: all tokens of a row one after the other,
//! caches as a prefill leaves them, and the bits of whole rows.
use super::caches::{Reads, TokenCheck};
use super::{check_tokens, whole_rows};
use crate::bands::{Draw, TOKEN_WIDTHS};
use crate::device::Device;
use crate::error::Result;
use crate::extent::Extent;
use crate::report::Report;
use sieve_kernels::AttentionShape;
use sieve_testing::Random;

/// Checks the launch wrappers of decoding over bands.
pub(crate) fn check_wrappers(report: &mut Report, device: &dyn Device, extent: &Extent) -> Result<()> {
    let mut random = Random(extent.seed);
    let widths: &[usize] = if extent.is_emulated { &[32, 64] } else { &TOKEN_WIDTHS };
    let of_short_rows = Extent { longest: extent.longest.min(90), ..*extent };
    for at in 0..extent.few() {
        let draw = Draw::random(&of_short_rows, &mut random);
        let (width, seed) = (widths[at % widths.len()], random.between(0, 1 << 30) as u64);
        let case = draw.of_one_document().case(width, seed, extent)?.magnified(extent.magnitude_of(at));
        check_tokens(report, device, &case, &format!("{:?} {} seed {seed}", case.shape, case.keys));
    }
    for at in 0..extent.few().max(12) {
        let (kv_heads, group) = (random.between(1, 4), random.one_of(extent.pick(&[2, 17][..], &[1, 2, 3, 8, 16, 17])));
        let heads = [kv_heads * group, kv_heads];
        let shape = AttentionShape::new(random.between(1, 4), 1, heads, [widths[at % widths.len()]; 2]);
        let seed = random.between(0, 1 << 30) as u64;
        let mut calls = TokenCheck::new(device, shape, extent.magnitude_of(at), seed);
        let outcome = calls.check_dense([None, Some(true), Some(false)][at % 3], Reads::Bands);
        let outcome = outcome.map(|()| calls.worst);
        report.add("decode, bands, caches", "kernel", &format!("{shape:?} seed {seed}"), outcome);
    }
    whole_rows::check(report, device, extent, Reads::Bands);
    Ok(())
}
