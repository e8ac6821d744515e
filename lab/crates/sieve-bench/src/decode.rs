//! Checks decoding: all tokens of a row, one after the other, against attention over the whole row.
pub(crate) mod bands;
mod branches;
mod caches;
mod whole_rows;

use self::caches::Reads;
use crate::case::{Case, Cuts, Keys};
use crate::device::Device;
use crate::error::Result;
use crate::extent::Extent;
use crate::on_device::OnDevice;
use crate::reference::attention;
use crate::report::{Outcome, Report, Wrong};
use crate::scores::Scores;
use crate::tolerance::{RowTolerance, lost_digits};
use sieve_cpu::reference::Rounding;
use sieve_kernels::AttentionShape;
use sieve_testing::Random;

/// Draws call number `at` of a check, with its label.
fn draw(extent: &Extent, at: usize, random: &mut Random) -> Result<(Case, String)> {
    let (head_dim, head_dim_v) = random.one_of(extent.widths);
    let group = random.one_of(extent.groups);
    let num_kv_heads = random.between(1, 4);
    let seq_len = random.between(1, 70);
    let (batch, heads) = (random.between(1, 4), [group * num_kv_heads, num_kv_heads]);
    let shape = AttentionShape::new(batch, seq_len, heads, [head_dim, head_dim_v]);
    let window = random.one_of(&[1, 5, 16, 33, 100]);
    let keys = match at % 4 {
        0 => Keys::Dense,
        1 => Keys::Window(window),
        2 => Keys::chosen(window),
        _ => Keys::local_of(window, random),
    };
    let scores = &Scores::RANDOM[random.below(Scores::RANDOM.len())];
    let seed = random.between(0, 1 << 30) as u64;
    let magnitude = extent.magnitude_of(at);
    let label = format!("{shape:?} {keys} {} q, k x {magnitude} seed {seed}", scores.name());
    let case = Case::draw(shape, keys, Cuts::Count(1), scores, seed)?;
    Ok((case.magnified(magnitude), label))
}

pub(super) fn judge(case: &Case, o: &[f32]) -> Outcome {
    let [exact, plain] = [Rounding::None, Rounding::Bf16].map(|rounding| attention(case, rounding));
    let lost_digits = lost_digits(&exact.outputs.lse);
    let (plain, exact, terms) = (&plain.outputs.o, &exact.outputs.o, &exact.terms.o);
    RowTolerance::of_bf16(lost_digits).judge("o", o, plain, exact, terms)
}

/// Checks the launch wrappers of decoding; the kernels write each new token's key into the cache.
pub(crate) fn check_wrappers(report: &mut Report, device: &dyn Device, extent: &Extent) -> Result<()> {
    let mut random = Random(extent.seed);
    for at in 0..extent.few() {
        let (case, label) = draw(extent, at, &mut random)?;
        check_tokens(report, device, &case, &label);
    }
    caches::check(report, device, extent);
    branches::check(report, device, extent);
    whole_rows::check(report, device, extent, Reads::Window);
    Ok(())
}

/// Checks all tokens of a case, one after the other.
fn check_tokens(report: &mut Report, device: &dyn Device, case: &Case, label: &str) {
    let call = OnDevice::new(case, device);
    let o = match case.keys {
        Keys::Chosen(_) => call.dma_decode(),
        _ => call.decode(),
    };
    let (path, outcome) = match o {
        Ok(o) => ("kernel", judge(case, &o)),
        Err(error) => ("refused", Err(Wrong::from(error))),
    };
    report.add(&case.keys.name_of("decode"), path, label, outcome);
}
