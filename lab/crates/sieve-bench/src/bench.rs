//! `sieve kernels bench`: times and memory of the attention kernels on this GPU.
mod bands;
mod decode;
mod fit;
mod generator;
mod latent;
mod method;
mod nsa;
mod operands;
mod rows;
mod scaling;
mod select;
mod sparse;
mod weights;

use crate::error::Result;
use crate::step;
use crate::timed::{Bench, BenchEvent, BenchResult, BenchRows, BenchSettings};
use sieve_kernels::DeviceReport;

/// Times the attention kernels on a GPU. [`short_check`](crate::short_check) comes first: times of wrong kernels are
/// worth nothing.
///
/// # Errors
/// A GPU that does not answer; a call that does not fit or does not run is a row.
pub fn bench(settings: &BenchSettings, gpu: &DeviceReport, say: &mut dyn FnMut(BenchEvent)) -> Result<BenchResult> {
    let mut bench = Bench::new(settings, gpu, say)?;
    match settings.rows {
        BenchRows::Standard if settings.has_sizes() => rows::asked(&mut bench)?,
        BenchRows::Standard => {
            rows::standard(&mut bench)?;
            latent::rows(&mut bench)?;
        }
        BenchRows::Table2 => rows::table2(&mut bench)?,
        BenchRows::Scaling => scaling::rows(&mut bench)?,
        BenchRows::Step => step::bench(&mut bench)?,
        BenchRows::Dma => rows::dma_forms(&mut bench)?,
        BenchRows::Latent => latent::rows(&mut bench)?,
        BenchRows::Sparse => sparse::rows(&mut bench)?,
        BenchRows::Selectors => select::rows(&mut bench)?,
        BenchRows::Decode => decode::rows(&mut bench)?,
        BenchRows::Nsa => nsa::rows(&mut bench)?,
        BenchRows::Bands => bands::rows(&mut bench)?,
    }
    Ok(bench.finish())
}
