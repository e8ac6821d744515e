//! Rows of selectors from end to end: selection, and selection with attention under its mask; beside dense attention
//! of the same operands, which are a trained model's or generated.
use super::fit::{Fit, Masses, PROBES, fit, mean_error};
use super::generator::{Generated, PARTS, STEP, Weights};
use super::method::{Method, masses};
use super::operands::{Operands, wait};
use super::rows::{forward_flops, shape};
use super::weights::FITTED;
use super::{Bench, Work};
use crate::device::Device;
use crate::error::Result;
use burn::tensor::backend::Backend;
use serde_json::json;
use sieve_kernels::KernelError;
use sieve_ops::Cuda;
use sieve_select::Selector;
use std::path::Path;
use std::time::Instant;

/// Tokens of a generated prompt where none are asked for.
const LENGTHS: [usize; 8] = [8_192, 16_384, 32_768, 65_536, 131_072, 262_144, 524_288, 1_048_576];

/// Up to this many tokens there are 32 query and 8 KV heads, beyond it 8 and 2: a tensor must not have more elements
/// than Burn can count.
const MANY_HEADS_UP_TO: usize = 524_288;

/// Up to this many tokens a row is timed as often as all else; after that once, on the host's clock.
const OFTEN_UP_TO: usize = 131_072;

/// From this length on, XAttention samples every 16th token instead of every 8th, as its paper does.
const LONG: usize = 131_072;

/// Settings are the papers', but that no layer is dense and that BA-Att has a sparser row too.
const SELECTORS: [&str; 15] = [
    "streamingllm",
    "a_shape",
    "tri_shape",
    "bfla",
    "meanpool",
    "block_sparse",
    "xattention",
    "flexprefill",
    "vertical_slash",
    "minference",
    "pbs",
    "ba_att",
    "ba_att:sparsity=0.9",
    "momo:first_dense_layers=0",
    "delta:base=xattention",
];

/// All rows; with captured operands their own first, and the generated ones as they fit them.
pub(crate) fn rows(bench: &mut Bench<'_>) -> Result<()> {
    let mut weights = FITTED.to_vec();
    if let Some(path) = bench.settings.operands.clone() {
        let captured = Operands::captured(&path, &bench.device)?;
        weights = fitted(bench, &captured, &path)?;
        methods(bench, "captured", &captured)?;
    }
    let asked = bench.settings.lengths.clone();
    for seq_len in if asked.is_empty() { LENGTHS.to_vec() } else { asked } {
        let seq_len = seq_len.next_multiple_of(STEP);
        let heads = if seq_len <= MANY_HEADS_UP_TO { [32, 8] } else { [8, 2] };
        // What is drawn in f32, twice, and in bf16; scores and lists take no more than the rest.
        let bytes = 24.0 * (seq_len * (heads[0] + 2 * heads[1]) * 128) as f64 + 6e9;
        if bench.fits("selectors", shape(1, seq_len, heads, 128), bytes)? {
            Cuda::seed(&bench.device, 11);
            let drawn = Generated::<Cuda>::draw(seq_len, heads, &bench.device);
            let operands = Operands::weighted(&drawn, &weights, &bench.device);
            drop(drawn);
            if let Err(error) = methods(bench, "generated", &operands) {
                bench.fail("generated", operands.shape, &error.to_string());
            }
        }
    }
    Ok(())
}

/// Weights under which fixed masks keep as much of generated operands as of captured ones.
fn fitted(bench: &mut Bench<'_>, captured: &Operands, path: &Path) -> Result<Vec<Weights>> {
    let device = bench.device.clone();
    let probes = PROBES.map(|name| Selector::parse(name).expect("the names above are right"));
    let measure = |operands: &Operands| -> Result<Vec<Masses>> {
        let heads = operands.shape.num_heads;
        let dense_lse = device.floats(&operands.dense()?.lse)?;
        let mut found = vec![Masses::default(); heads];
        for (at, probe) in probes.iter().enumerate() {
            let kept = match Method::of(probe, operands, &device)? {
                Some(method) => {
                    let done = method.attend(&method.select()?)?;
                    masses(&device, &done.lse, &dense_lse, heads)?
                }
                None => vec![1.0; heads],
            };
            found.iter_mut().zip(kept).for_each(|(of, kept)| of[at] = kept);
        }
        Ok(found)
    };
    let target = measure(captured)?;
    let of = captured.shape;
    Cuda::seed(&device, 11);
    let heads = [of.num_heads, of.num_kv_heads];
    let drawn = Generated::<Cuda>::draw(of.seq_len, heads, &device);
    let Fit { weights, masses } = fit(&target, &mut |weights| {
        measure(&Operands::weighted(&drawn, weights, &device))
    })?;
    let mean = |masses: &[Masses], at: usize| masses.iter().map(|of| of[at]).sum::<f64>() / masses.len() as f64;
    for (at, probe) in PROBES.iter().enumerate() {
        let [captured, generated] = [mean(&target, at), mean(&masses, at)];
        let text = format!("keeps {captured:.4} of the captured mass, {generated:.4} of the generated");
        bench.skip(&format!("{}, by {probe}", PARTS[at]), of, &text);
    }
    let error = mean_error(&target, &masses);
    bench.skip("captured and generated", of, &format!("differ by {error:.4} a head"));
    bench.json["fit"] = json!({
        "operands": path.display().to_string(), "tokens": of.seq_len, "parts": PARTS, "probes": PROBES,
        "weights": weights, "captured": target, "generated": masses, "error": error,
    });
    Ok(weights)
}

/// Every method on some operands.
fn methods(bench: &mut Bench<'_>, of: &str, operands: &Operands) -> Result<()> {
    let shape = operands.shape;
    let seq_len = shape.seq_len;
    let device = bench.device.clone();
    let dense_row = format!("{of}, dense");
    let mut lse = None;
    let dense_ms = timed(bench, &dense_row, operands, &mut || {
        lse = Some(operands.dense()?.lse);
        Ok(())
    })?;
    let Some(lse) = lse else {
        return Ok(());
    };
    let dense_lse = device.floats(&lse)?;
    bench.say_kept(
        &dense_row,
        shape,
        None,
        json!({
            "operands": of, "tokens": seq_len, "heads": shape.num_heads, "method": "dense", "whole_ms": dense_ms,
            "tflops": dense_ms.map(|ms| forward_flops(shape, seq_len) / ms * 1e-9),
        }),
    );
    for name in SELECTORS {
        let name = match name {
            "xattention" if seq_len >= LONG => "xattention:stride=16",
            "delta:base=xattention" if seq_len >= LONG => "delta:base=xattention,base.stride=16",
            name => name,
        };
        let selector = Selector::parse(name).expect("the names above are right");
        let row = |part: &str| format!("{of}, {name}: {part}");
        let Some(method) = Method::of(&selector, operands, &device)? else {
            bench.skip(&row("whole"), shape, "dense at this length");
            continue;
        };
        let lists = match method.select() {
            Ok(lists) => lists,
            Err(error) => {
                bench.skip(&row("whole"), shape, &error.to_string());
                continue;
            }
        };
        let density = method.density(&lists)?;
        let select_ms = match method.host_ms() {
            Some(_) => Some(0.0),
            None => timed(bench, &row("selection"), operands, &mut || method.select().map(drop))?,
        };
        let mut last = None;
        let whole_ms = timed(bench, &row("whole"), operands, &mut || {
            // What was kept before goes first: at the longest lengths there is no room for two.
            last = None;
            last = Some(method.attend(&method.select()?)?.lse);
            Ok(())
        })?;
        let Some(lse) = last else {
            continue;
        };
        let mass = masses(&device, &lse, &dense_lse, shape.num_heads)?;
        let mass = mass.iter().sum::<f64>() / mass.len() as f64;
        bench.say_kept(
            &row("whole"),
            shape,
            Some([density, mass]),
            json!({
                "operands": of, "tokens": seq_len, "heads": shape.num_heads, "method": name, "density": density,
                "mass": mass, "selection_ms": select_ms, "whole_ms": whole_ms, "dense_ms": dense_ms,
                "host_ms": method.host_ms(),
            }),
        );
    }
    Ok(())
}

/// Milliseconds by the GPU's clock, or of one run by the host's where the operands are long.
fn timed(
    bench: &mut Bench<'_>,
    row: &str,
    operands: &Operands,
    work: &mut dyn FnMut() -> Result<(), KernelError>,
) -> Result<Option<f64>> {
    if operands.shape.seq_len <= OFTEN_UP_TO {
        return Ok(bench.row(row, operands.shape, Work::Time, work));
    }
    wait(&bench.device)?;
    let started = Instant::now();
    work()?;
    wait(&bench.device)?;
    let ms = 1e3 * started.elapsed().as_secs_f64();
    bench.skip(row, operands.shape, &format!("{ms:.1} ms, once, on the host's clock"));
    Ok(Some(ms))
}
