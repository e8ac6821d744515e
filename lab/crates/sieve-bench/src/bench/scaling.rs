//! How time and memory of a forward and backward pass grow: every kind with the length of a row, DMA with the keys it
//! keeps.
use super::rows::{BACKWARD, HEADS, SEED};
use super::{latent, nsa};
use crate::error::Result;
use crate::scores::Scores;
use crate::timed::{Bench, Growth, NO_BIAS, NO_WINDOW, Work, forward_flops, shape};
use sieve_core::DmaShape;
use sieve_kernels::{AttentionShape, KernelError, SumOrder};
use sieve_testing::Random;

/// Tokens of a row: 512 to 131,072, in powers of two.
const LENGTHS: std::ops::Range<u32> = 9..18;

/// Keys that a window and DMA keep while the length grows.
const KEPT: usize = 1024;

/// DMA's kept keys while the length stays at [`LONG`]: 256 to 4096, in powers of two.
const KEPTS: std::ops::Range<u32> = 8..13;
const LONG: usize = 32768;

/// Shorter rows are not in the fit: launches cost more there than work does.
const FIT_FROM: usize = 8192;

const WIDTH: usize = 128;

/// Time and memory of a forward and backward pass at one size.
struct Point {
    /// Tokens of a row, or DMA's kept keys.
    at: usize,
    milliseconds: f64,
    bytes: u64,
}

/// A function that times one kind of attention at a length; `None` where it does not fit.
type PointOf = fn(&mut Bench<'_>, usize) -> Result<Option<Point>>;

/// Times every kind over all lengths and DMA over all numbers of kept keys, and reports how each grows.
pub(super) fn rows(bench: &mut Bench<'_>) -> Result<()> {
    let lengths = || LENGTHS.map(|power| 1 << power);
    let long = |points: Vec<Point>| points.into_iter().filter(|point| point.at >= FIT_FROM);
    let dma_name = format!("dma w {KEPT}");
    let kinds: [(&str, PointOf); 5] = [
        ("dense", |bench, len| dense(bench, "dense", shape(1, len, HEADS, WIDTH), NO_WINDOW)),
        ("window 1024", |bench, len| dense(bench, "window 1024", shape(1, len, HEADS, WIDTH), Some(KEPT))),
        (&dma_name, |bench, len| dma_point(bench, len, KEPT)),
        ("nsa", nsa_point),
        ("mla", |bench, len| dense(bench, "mla", latent::shape(1, len), NO_WINDOW)),
    ];
    for (name, point) in kinds {
        let points = points(lengths(), |len| point(bench, len))?;
        growth(bench, name, "tokens", long(points).collect());
    }
    let kept = points(KEPTS.map(|power| 1 << power), |kept| {
        let point = dma_point(bench, LONG, kept)?;
        Ok(point.map(|point| Point { at: kept, ..point }))
    })?;
    growth(bench, "dma", "kept keys", kept);
    Ok(())
}

/// Times each size of `at`; sizes that do not fit are left out.
fn points(
    at: impl Iterator<Item = usize>,
    mut point: impl FnMut(usize) -> Result<Option<Point>>,
) -> Result<Vec<Point>> {
    let points: Result<Vec<_>> = at.map(&mut point).collect();
    Ok(points?.into_iter().flatten().collect())
}

/// Times dense attention, or a sliding window; `None` if it does not fit.
fn dense(bench: &mut Bench<'_>, name: &str, shape: AttentionShape, window: Option<usize>) -> Result<Option<Point>> {
    let Some(inputs) = bench.inputs_or_skip(shape)? else {
        return Ok(None);
    };
    let flops = forward_flops(shape, window.unwrap_or(shape.seq_len));
    let forward = || inputs.forward(window, NO_BIAS);
    let backward = |result: &_| inputs.backward(result, window, NO_BIAS, SumOrder::Any);
    pass(bench, name, shape, flops, forward, backward)
}

/// Times DMA that keeps `kept` keys in a row of `len`; `None` if it does not fit.
fn dma_point(bench: &mut Bench<'_>, len: usize, kept: usize) -> Result<Option<Point>> {
    let shape = shape(1, len, HEADS, WIDTH);
    let Some(inputs) = bench.inputs_or_skip(shape)? else {
        return Ok(None);
    };
    let z = Scores::Independent.draw(shape.num_kv_heads, len, &mut Random(SEED))?;
    let form = DmaShape::published(kept);
    let [z, delta] = inputs.scores(&z, form.bias, &bench.device);
    let name = format!("dma w {kept}");
    let flops = forward_flops(shape, kept);
    if kept >= len {
        // The window masks nothing, so the op takes the dense kernel with a bias, without lists.
        let forward = || -> Result<_, KernelError> {
            // Selects every key, to no effect; the op does so too, so its time counts.
            inputs.select(&z, form.window())?;
            inputs.forward(NO_WINDOW, Some(&delta))
        };
        let backward = |result: &_| inputs.backward(result, NO_WINDOW, Some(&delta), SumOrder::Any);
        return pass(bench, &name, shape, flops, forward, backward);
    }
    let forward = || {
        let (selection, lists) = inputs.selection_and_lists(&z, form.window())?;
        let result = inputs.dma_forward(&delta, &lists)?;
        Ok((selection, lists, result))
    };
    let backward = |(_, lists, result): &(_, _, _)| inputs.dma_backward(result, &delta, lists, SumOrder::Any);
    pass(bench, &name, shape, flops, forward, backward)
}

/// Times NSA in a row of `len`; `None` if it does not fit.
fn nsa_point(bench: &mut Bench<'_>, len: usize) -> Result<Option<Point>> {
    let shape = shape(1, len, HEADS, WIDTH);
    let Some(inputs) = bench.inputs_or_skip(shape)? else {
        return Ok(None);
    };
    let call = nsa::Call::new(inputs, bench);
    let (forward, backward) = (|| call.forward(), |branches: &_| call.backward(branches, SumOrder::Any));
    pass(bench, "nsa", shape, nsa::flops(shape), forward, backward)
}

/// Times a forward pass with its backward pass, and measures the memory that the forward pass keeps for it.
fn pass<R, D>(
    bench: &mut Bench<'_>,
    name: &str,
    shape: AttentionShape,
    forward_flops: f64,
    forward: impl Fn() -> Result<R, KernelError>,
    backward: impl Fn(&R) -> Result<D, KernelError>,
) -> Result<Option<Point>> {
    let both = format!("{name}: forward, backward");
    let work = Work::Flops((1.0 + BACKWARD) * forward_flops);
    let milliseconds = bench.row(&both, shape, work, || backward(&forward()?));
    let kept = format!("{name}: kept for the backward pass");
    let bytes = bench.memory(&kept, shape, &forward)?;
    Ok(milliseconds.map(|milliseconds| Point { at: shape.seq_len, milliseconds, bytes }))
}

/// Reports by which power of the size time and memory grow; nothing where no point was measured.
fn growth(bench: &mut Bench<'_>, name: &str, with: &'static str, points: Vec<Point>) {
    let [Some(first), Some(last)] = [points.first(), points.last()] else {
        return;
    };
    let power = |of: fn(&Point) -> f64| {
        let pairs: Vec<_> = points.iter().map(|point| (point.at as f64, of(point))).collect();
        log_log_slope(&pairs)
    };
    let growth = Growth {
        with,
        from: first.at,
        to: last.at,
        time: power(|point| point.milliseconds),
        memory: power(|point| point.bytes as f64),
    };
    bench.growth(name, growth);
}

/// Slope of the least-squares line through (ln x, ln y): `p` where y grows as x to the power of p.
fn log_log_slope(points: &[(f64, f64)]) -> f64 {
    let logs: Vec<_> = points.iter().map(|(x, y)| (x.ln(), y.ln())).collect();
    let mean = |of: fn(&(f64, f64)) -> f64| logs.iter().map(of).sum::<f64>() / logs.len() as f64;
    let (x, y) = (mean(|log| log.0), mean(|log| log.1));
    let along: f64 = logs.iter().map(|log| (log.0 - x) * (log.1 - y)).sum();
    along / logs.iter().map(|log| (log.0 - x).powi(2)).sum::<f64>()
}
