//! Checks and times the kernels around attention, one file for each family: `check_launches` compares their launches
//! with the plain-Burn references in f32, `bench` times them.
mod activation;
mod embedding;
mod fp8;
mod gemms;
mod losses;
mod matrix_vector;
mod optimizer;
mod queue;
mod rotation;
mod scores;
mod sinks;
mod stream;
mod wrappers;

pub(crate) use fp8::check_gemms as check_fp8_gemms;
pub(crate) use gemms::check_gemms;
pub(crate) use queue::check_order;
pub(crate) use scores::KV_HEADS as SCORED_KV_HEADS;

use crate::device::Device;
use crate::error::Result;
use crate::extent::{Extent, WIDTHS};
use crate::report::Report;
use crate::timed::Bench;
use sieve_kernels::{DeviceReport, NeededKernels};
use wrappers::VOCAB;

/// Specialisations that no model of usual widths launches, for the checks: for heads of every checked width, and for
/// DMA's scores with these numbers of KV heads. They are not among [`NeededKernels::shipped_for`].
pub(crate) fn rare_kernels(gpu: &DeviceReport, kv_heads: &[usize]) -> NeededKernels {
    let head_dims: Vec<usize> = WIDTHS.iter().map(|&(head_dim, _)| head_dim).collect();
    NeededKernels::step_rarely(&gpu.arch(), &head_dims, kv_heads)
}

/// Checks every launch; on the emulator with small sizes only.
pub(crate) fn check_wrappers(report: &mut Report, device: &dyn Device, extent: &Extent) -> Result<()> {
    for check in [
        stream::check_launches,
        activation::check_launches,
        matrix_vector::check_launches,
        matrix_vector::check_likeliest,
        matrix_vector::check_draw,
        rotation::check_launches,
        embedding::check_launches,
        optimizer::check_launches,
        scores::check_launches,
        sinks::check_launches,
        fp8::check_rounding,
        losses::check_launches,
    ] {
        check(report, device, extent);
    }
    Ok(())
}

/// Checks on Hopper that a row's product does not depend on the number of rows.
pub(crate) fn check_same_bits(report: &mut Report, device: &dyn Device, extent: &Extent) -> Result<()> {
    matrix_vector::check_same_bits(report, device, extent);
    Ok(())
}

/// Checks the kernels of sinks alone.
pub(crate) fn check_sinks(report: &mut Report, device: &dyn Device, extent: &Extent) -> Result<()> {
    sinks::check_launches(report, device, extent);
    Ok(())
}

/// Times all kernels at the sizes of a training step of two models: 1.7B parameters (`d_model` 2048) and 80M (768).
pub(crate) fn bench(bench: &mut Bench<'_>) -> Result<()> {
    for (tokens, width, d_ff) in [(16384, 2048, 6144), (65536, 768, 2048)] {
        stream::bench(bench, tokens, width);
        activation::bench(bench, tokens, d_ff);
        embedding::bench(bench, tokens, width);
        matrix_vector::bench(bench, width, d_ff, VOCAB);
    }
    for (tokens, heads, kv_heads, head_dim) in [(16384, 16, 8, 128), (65536, 12, 4, 64)] {
        rotation::bench(bench, tokens, [heads, kv_heads], head_dim);
        scores::bench(bench, tokens, [heads, kv_heads], head_dim)?;
        sinks::bench(bench, tokens, heads, head_dim);
    }
    for (rows, vocab) in [(4096, VOCAB), (1664, 151_936)] {
        losses::bench(bench, rows, vocab)?;
    }
    for size in [VOCAB * 2048, 2048] {
        optimizer::bench(bench, size);
    }
    gemms::bench(bench);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emulator::tests::{AMPERE, emulated};

    #[test]
    fn emulated_launches_pass() {
        let extent = Extent::emulated(1, 64, 3);
        emulated("step", AMPERE, 4, |device, report| {
            activation::check_launches(report, device, &extent);
            sinks::check_launches(report, device, &extent);
            matrix_vector::check_launches(report, device, &extent);
            matrix_vector::check_likeliest(report, device, &extent);
            matrix_vector::check_draw(report, device, &extent);
            fp8::check_rounding(report, device, &extent);
            Ok(())
        });
    }
}
