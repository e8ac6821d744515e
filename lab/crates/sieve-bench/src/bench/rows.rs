//! The standard rows of a benchmark: which kernels are timed, on which shapes.
use crate::device::Device;
use crate::error::Result;
use crate::scores::Scores;
use crate::timed::{Bench, Inputs, NO_BIAS, NO_WINDOW, Work, forward_flops, shape};
use sieve_core::{DmaBias, DmaRecency, DmaShape, DmaWindow, KeepOLow};
use sieve_kernels::{
    AttentionShape, CudaTensor, DType, DecodeScratch, DecodeStep, DmaSlots, KernelError, KvCache, Qkv, ScoreBias,
    SumOrder,
};
use sieve_testing::Random;

/// Query and KV heads of the usual rows.
pub(super) const HEADS: [usize; 2] = [16, 8];

/// Seed of the random scores.
pub(super) const SEED: u64 = 7;

/// In longer rows a DMA training run keeps `o_low` only where memory is free, so both forms are timed.
const LONG_ROW: usize = 32768;

/// A backward pass's FLOPs divided by the forward pass's: five GEMMs against two.
pub(super) const BACKWARD: f64 = 2.5;

/// [`BACKWARD`] for values narrower than keys: three of the backward pass's five GEMMs, and one of the forward pass's
/// two, are as wide as keys; the others are as wide as values.
fn backward_gemms(shape: AttentionShape) -> f64 {
    let (keys, values) = (shape.head_dim as f64, shape.head_dim_v as f64);
    (3.0 * keys + 2.0 * values) / (keys + values)
}

/// Times dense and windowed attention, DMA and decoding: rows of the table in lab/docs/benchmarks.md.
pub(crate) fn standard(bench: &mut Bench<'_>) -> Result<()> {
    for (batch, seq_len, width) in
        [(2, 8192, 128), (8, 2048, 128), (1, 16384, 128), (1, 32768, 128), (2, 8192, 64), (1, 32768, 64)]
    {
        dense(bench, shape(batch, seq_len, HEADS, width), NO_WINDOW)?;
    }
    for (seq_len, width) in [(16384, 128), (65536, 128), (16384, 64)] {
        for window in [1024, 2048] {
            dense(bench, shape(1, seq_len, HEADS, width), Some(window))?;
        }
    }
    nothing_masked(bench, shape(8, 2048, HEADS, 128))?;
    nothing_masked(bench, shape(8, 2048, HEADS, 64))?;
    for (seq_len, width, kept) in [
        (8192, 128, 1024),
        (16384, 128, 1024),
        (32768, 128, 1024),
        (131072, 128, 2048),
        (16384, 64, 1024),
        (32768, 64, 1024),
    ] {
        let form = DmaShape::published(kept);
        for scores in bench.settings.scores.clone() {
            dma_form(bench, shape(1, seq_len, HEADS, width), form, &scores)?;
        }
    }
    for batch in [16, 1] {
        decoding(bench, "decode", shape(batch, 131072, HEADS, 128))?;
        dma_decoding(bench, shape(batch, 131072, HEADS, 128), 2048)?;
    }
    Ok(())
}

/// Times dense attention, a window and DMA at the sizes that the user asked for.
pub(super) fn asked(bench: &mut Bench<'_>) -> Result<()> {
    const WINDOW: usize = 1024;
    for shape in bench.settings.shapes(&[HEADS], &[8192], 128) {
        dense(bench, shape, NO_WINDOW)?;
        if shape.seq_len > WINDOW {
            dense(bench, shape, Some(WINDOW))?;
            for scores in bench.settings.scores.clone() {
                dma_form(bench, shape, DmaShape::published(WINDOW), &scores)?;
            }
        }
    }
    Ok(())
}

/// Times both passes of dense attention, or of a sliding window.
pub(super) fn dense(bench: &mut Bench<'_>, shape: AttentionShape, window: Option<usize>) -> Result<()> {
    let Some(inputs) = bench.inputs_or_skip(shape)? else {
        return Ok(());
    };
    let what = match window {
        Some(window) => format!("window {window} "),
        None => "dense ".to_owned(),
    };
    let flops = forward_flops(shape, window.unwrap_or(shape.seq_len));
    passes(
        bench,
        (&what, shape),
        [flops, backward_gemms(shape) * flops],
        &ORDERS,
        || inputs.forward(window, NO_BIAS),
        |result, order| inputs.backward(result, window, NO_BIAS, order),
    )?;
    let result = inputs.forward(window, NO_BIAS)?;
    shared_tiles(bench, &inputs, (&what, flops * backward_gemms(shape)), |inputs| {
        inputs.backward(&result, window, NO_BIAS, SumOrder::Any)
    })
}

/// Times a backward pass with each number of blocks of threads per tile of keys that the user asked for.
fn shared_tiles<D>(
    bench: &mut Bench<'_>,
    inputs: &Inputs,
    (what, flops): (&str, f64),
    backward: impl Fn(&Inputs) -> Result<D, KernelError>,
) -> Result<()> {
    for blocks in bench.settings.blocks_per_tile.clone() {
        let inputs = inputs.with_blocks_per_tile(blocks);
        let name = format!("{what}backward, blocks {blocks}");
        bench.row(&name, inputs.shape, Work::Flops(flops), || backward(&inputs));
    }
    Ok(())
}

/// Both sum orders of a backward pass, each with the suffix of its row's name.
pub(super) const ORDERS: [(SumOrder, &str); 2] = [(SumOrder::Any, ""), (SumOrder::Fixed, ", fixed order")];

/// Times a forward pass, and the backward pass of its result in each of `orders`.
pub(super) fn passes<R, D>(
    bench: &mut Bench<'_>,
    (what, shape): (&str, AttentionShape),
    [forward_flops, backward_flops]: [f64; 2],
    orders: &[(SumOrder, &str)],
    forward: impl Fn() -> Result<R, KernelError>,
    backward: impl Fn(&R, SumOrder) -> Result<D, KernelError>,
) -> Result<()> {
    bench.row(&format!("{what}forward"), shape, Work::Flops(forward_flops), &forward);
    let result = forward()?;
    for &(order, suffix) in orders {
        let name = format!("{what}backward{suffix}");
        bench.row(&name, shape, Work::Flops(backward_flops), || backward(&result, order));
    }
    Ok(())
}

/// Times DMA whose window holds every key: it takes the dense kernel with a bias.
fn nothing_masked(bench: &mut Bench<'_>, shape: AttentionShape) -> Result<()> {
    let Some(inputs) = bench.inputs_or_skip(shape)? else {
        return Ok(());
    };
    let z = Scores::Independent.draw(shape.batch * shape.num_kv_heads, shape.seq_len, &mut Random(SEED))?;
    let [_, delta] = inputs.scores(&z, DmaBias::Exp, &bench.device);
    let flops = forward_flops(shape, shape.seq_len);
    let name = format!("dma w {} (nothing masked) ", shape.seq_len);
    passes(
        bench,
        (&name, shape),
        [flops, BACKWARD * flops],
        &ORDERS[..1],
        || inputs.forward(NO_WINDOW, Some(&delta)),
        |result, order| inputs.backward(result, NO_WINDOW, Some(&delta), order),
    )
}

/// Times DMA as published, and DMA as the recipes train it: later keys rank higher by a slope, and an eighth of the
/// kept keys are the last ones, whatever their rank. Beside them a window of as many keys, the same products without a
/// choice.
pub(crate) fn dma_forms(bench: &mut Bench<'_>) -> Result<()> {
    for shape in bench.settings.shapes(&[HEADS], &[8192, 32768, 131072], 128) {
        let kept = if shape.seq_len > 65536 { 2048 } else { 1024 };
        dense(bench, shape, Some(kept))?;
        for scores in bench.settings.scores.clone() {
            for form in [DmaShape::published(kept), trained(kept)] {
                dma_form(bench, shape, form, &scores)?;
            }
        }
    }
    Ok(())
}

/// DMA with the settings of the `dma_*` recipes.
fn trained(keep_window_size: usize) -> DmaShape {
    DmaShape {
        bias: DmaBias::Linear,
        recency: DmaRecency::Slope,
        local_window_size: keep_window_size / 8,
        ..DmaShape::published(keep_window_size)
    }
}

/// Ranks of keys: `z` plus the recency term, `[batch, num_kv_heads, seq_len]`.
fn ranks(mut z: Vec<f32>, form: DmaShape, shape: AttentionShape) -> Vec<f32> {
    let slopes = form.slopes(shape.num_kv_heads).unwrap_or_default();
    let rows = z.chunks_exact_mut(shape.seq_len);
    for (row, slope) in rows.zip(slopes.iter().cycle()) {
        for (position, z) in row.iter_mut().enumerate() {
            *z += position as f32 * *slope as f32;
        }
    }
    z
}

/// A row's name for a form of DMA.
fn form_name(form: DmaShape, scores: &Scores) -> String {
    let mut name = format!("dma w {}", form.keep_window_size);
    if form.local_window_size > 0 {
        name += &format!(", last {}", form.local_window_size);
    }
    if form.recency == DmaRecency::Slope {
        name += ", slope";
    }
    format!("{name}, {}", scores.name())
}

/// Times one form of DMA: the selection, the key lists, both passes, and for independent scores the memory between the
/// passes.
fn dma_form(bench: &mut Bench<'_>, shape: AttentionShape, form: DmaShape, scores: &Scores) -> Result<()> {
    let Some(mut inputs) = bench.inputs_or_skip(shape)? else {
        return Ok(());
    };
    let (name, window) = (form_name(form, scores), form.window());
    let rows = shape.batch * shape.num_kv_heads;
    let z = match scores.draw(rows, shape.seq_len, &mut Random(SEED)) {
        Ok(z) => z,
        Err(error) => {
            bench.skip(&name, shape, &error.to_string());
            return Ok(());
        }
    };
    let [z, delta] = inputs.scores(&ranks(z, form, shape), form.bias, &bench.device);
    // Reads f32 scores, writes i32 `expire`.
    let bytes = 8.0 * (rows * shape.seq_len) as f64;
    bench.row(&format!("{name}: select"), shape, Work::Bytes(bytes), || inputs.select(&z, window));
    bench.row(&format!("{name}: select and lists"), shape, Work::Bytes(bytes), || inputs.lists(&z, window));
    dma_passes(bench, &inputs, [&z, &delta], window, &name)?;
    if shape.seq_len > LONG_ROW {
        inputs.o_low = KeepOLow::Always;
        let name = format!("{name}, o_low kept");
        dma_passes(bench, &inputs, [&z, &delta], window, &name)?;
        inputs.o_low = KeepOLow::ShortRows;
    }
    if *scores == Scores::Independent {
        memory(bench, &inputs, [&z, &delta], window)?;
    }
    Ok(())
}

/// Times each pass of DMA over key lists made before, then selection, lists and both passes together.
fn dma_passes(
    bench: &mut Bench<'_>,
    inputs: &Inputs,
    [z, delta]: [&CudaTensor; 2],
    window: DmaWindow,
    name: &str,
) -> Result<()> {
    let shape = inputs.shape;
    let flops = forward_flops(shape, window.keep_window_size);
    let lists = inputs.lists(z, window)?;
    passes(
        bench,
        (&format!("{name}: "), shape),
        [flops, BACKWARD * flops],
        &ORDERS,
        || inputs.dma_forward(delta, &lists),
        |result, order| inputs.dma_backward(result, delta, &lists, order),
    )?;
    let result = inputs.dma_forward(delta, &lists)?;
    shared_tiles(bench, inputs, (&format!("{name}: "), BACKWARD * flops), |inputs| {
        inputs.dma_backward(&result, delta, &lists, SumOrder::Any)
    })?;
    drop((lists, result));
    let name = format!("{name}: select, lists, forward, backward");
    bench.row(&name, shape, Work::Flops((1.0 + BACKWARD) * flops), || {
        let lists = inputs.lists(z, window)?;
        let result = inputs.dma_forward(delta, &lists)?;
        inputs.dma_backward(&result, delta, &lists, SumOrder::Any)
    });
    Ok(())
}

/// Measures the memory that a forward pass keeps for the backward pass: o and lse, and for DMA the selection and the
/// key lists. Scratch that a call frees before it returns does not count.
fn memory(bench: &mut Bench<'_>, inputs: &Inputs, [z, delta]: [&CudaTensor; 2], window: DmaWindow) -> Result<()> {
    let shape = inputs.shape;
    bench.memory("dense: o, lse", shape, || inputs.forward(NO_WINDOW, NO_BIAS))?;
    let name = format!("dma w {}: selection, lists, o, lse", window.keep_window_size);
    bench.memory(&name, shape, || {
        let (selection, lists) = inputs.selection_and_lists(z, window)?;
        let result = inputs.dma_forward(delta, &lists)?;
        Ok((selection, lists, result))
    })?;
    Ok(())
}

/// Times one new token a row against `seq_len` cached keys.
pub(crate) fn decoding(bench: &mut Bench<'_>, name: &str, shape: AttentionShape) -> Result<()> {
    let keys = (shape.batch * shape.num_kv_heads * shape.seq_len * shape.head_dim) as f64;
    // K and V, two bytes an element.
    let bytes = 2.0 * 2.0 * keys;
    // While the cache is drawn, its numbers are there in f32 too.
    if !bench.fits(name, shape, 3.0 * bytes)? {
        return Ok(());
    }
    let token = token(bench, shape);
    let like = token.q.tensor();
    let sizes = [shape.batch, shape.num_kv_heads, shape.seq_len, shape.head_dim];
    let [k, v] = [(); 2].map(|()| bench.bf16(sizes));
    let cache = KvCache { k, v };
    let scratch = DecodeScratch::new(like, shape, shape.seq_len)?;
    let step = DecodeStep::new(shape.seq_len - 1, 1.0 / (shape.head_dim as f32).sqrt());
    let length = vec![shape.seq_len as i32 - 1; shape.batch];
    let length = bench.device.int(&length, &[shape.batch]);
    bench.row(name, shape, Work::Bytes(bytes), || cache.attention_decode(&token, &length, step, &scratch));
    Ok(())
}

/// Times one new token a row against DMA's slots, the eviction of a key included.
pub(crate) fn dma_decoding(bench: &mut Bench<'_>, shape: AttentionShape, kept: usize) -> Result<()> {
    let token = token(bench, shape);
    let (batch, kv_heads) = (shape.batch, shape.num_kv_heads);
    let local_window_size = 0;
    let slots = slots(bench, shape, kept, local_window_size);
    // A score above the worst slot's, so that the new key evicts that slot's key.
    let new_z = bench.device.float(&vec![0.5; batch * kv_heads], &[batch, kv_heads], DType::F32);
    let scratch = DecodeScratch::new(token.q.tensor(), shape, kept)?;
    let length = bench.device.int(&vec![shape.seq_len as i32 - 1; batch], &[batch]);
    let scale = 1.0 / (shape.head_dim as f32).sqrt();
    // Of each slot: key and value in bf16, f32 score, i32 position.
    let bytes = (batch * kv_heads * kept * (4 * shape.head_dim + 8)) as f64;
    let name = format!("dma_decode w {kept}");
    bench.row(&name, shape, Work::Bytes(bytes), || {
        slots.dma_decode(&token, &new_z, &length, scale, ScoreBias::Exp, &scratch)
    });
    Ok(())
}

/// DMA's fixed-size cache of `kept` slots, all in use, which holds the first `kept` positions of a row.
pub(super) fn slots(bench: &Bench<'_>, shape: AttentionShape, kept: usize, local_window_size: usize) -> DmaSlots {
    let (batch, kv_heads) = (shape.batch, shape.num_kv_heads);
    let per_slot = [batch, kv_heads, kept];
    let count = batch * kv_heads * kept;
    let mut numbers = Random(SEED);
    let z: Vec<f32> = (0..count).map(|_| numbers.normal_with_tails()).collect();
    let positions: Vec<i32> = (0..count).map(|at| (at % kept) as i32).collect();
    let [k, v] = [(); 2].map(|()| bench.bf16([batch, kv_heads, kept, shape.head_dim]));
    DmaSlots {
        kv: KvCache { k, v },
        z: bench.device.float(&z, &per_slot, DType::F32),
        positions: bench.device.int(&positions, &per_slot),
        local_window_size,
    }
}

/// Queries, keys and values of one new token, each `[batch, 1, heads, width]`.
pub(super) fn token(bench: &Bench<'_>, shape: AttentionShape) -> Qkv {
    let kv_heads = shape.num_kv_heads;
    let [q, k, v] =
        [shape.num_heads, kv_heads, kv_heads].map(|heads| bench.bf16([shape.batch, 1, heads, shape.head_dim]));
    Qkv::separate(&q, &k, &v)
}

/// Times the forward passes of Table 2 of arXiv:2508.02124: dense attention, and DMA with its selection, by the first
/// of the settings' scores.
pub(crate) fn table2(bench: &mut Bench<'_>) -> Result<()> {
    const KEPT: usize = 2048;
    let mut shapes: Vec<AttentionShape> = (8..16).map(|power| shape(1, 1 << power, [2, 1], 128)).collect();
    shapes.extend([1, 2, 4, 8].map(|batch| shape(batch, 4096, [2, 1], 32)));
    shapes.extend([[1, 1], [4, 1], [8, 2]].map(|heads| shape(1, 4096, heads, 32)));
    shapes.extend([64, 96, 128].map(|width| shape(1, 4096, [2, 1], width)));
    let scores = bench.settings.scores.first().cloned().unwrap_or(Scores::Independent);
    for shape in shapes {
        let Some(inputs) = bench.inputs_or_skip(shape)? else {
            continue;
        };
        let rows = shape.batch * shape.num_kv_heads;
        let z = scores.draw(rows, shape.seq_len, &mut Random(SEED))?;
        let [z, delta] = inputs.scores(&z, DmaBias::Exp, &bench.device);
        let work = Work::Flops(forward_flops(shape, shape.seq_len));
        bench.row("dense forward", shape, work, || inputs.forward(NO_WINDOW, NO_BIAS));
        let name = format!("dma w {KEPT}, {}: select, forward", scores.name());
        let work = Work::Flops(forward_flops(shape, KEPT));
        bench.row(&name, shape, work, || {
            if KEPT >= shape.seq_len {
                // The window masks nothing, so the op takes the dense kernel with a bias, without lists.
                inputs.select(&z, KEPT.into())?;
                return inputs.forward(NO_WINDOW, Some(&delta));
            }
            let lists = inputs.lists(&z, KEPT.into())?;
            inputs.dma_forward(&delta, &lists)
        });
    }
    for power in 8..17 {
        let cached = shape(1, 1 << power, [2, 1], 128);
        decoding(bench, "decode", cached)?;
        dma_decoding(bench, cached, KEPT.min(cached.seq_len))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slope_raises_later_keys_of_each_head_by_its_own_period() {
        let shape = shape(2, 5000, [4, 2], 64);
        let form = trained(1024);
        let rows = ranks(vec![0.5; 2 * 2 * 5000], form, shape);
        for (row, period) in rows.chunks_exact(5000).zip([64.0, 4096.0, 64.0, 4096.0]) {
            assert_eq!((row[0], row[4096]), (0.5, 0.5 + 4096.0 / period));
        }
        let name = form_name(form, &Scores::Rising);
        assert_eq!(name, "dma w 1024, last 128, slope, rising");
        let published = DmaShape::published(1024);
        assert_eq!(ranks(vec![0.5; 8], published, shape), vec![0.5; 8]);
        assert_eq!(form_name(published, &Scores::Tied), "dma w 1024, tied");
    }
}
