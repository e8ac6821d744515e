//! Rows of one new token after a long text, in one layer: how long each method takes to choose the token's keys and to
//! attend to them.
use super::rows::{HEADS, decoding, dma_decoding, slots, token};
use crate::device::Device;
use crate::error::Result;
use crate::timed::{Bench, Work, shape};
use sieve_core::KeepBlocks;
use sieve_kernels::{AttentionShape, DecodeScratch, DecodeStep, KvCache, SelectorStep};
use sieve_select::{CallShape, Selector, TokenKeys};

/// Tokens of a decoded text, the new token among them.
const TOKENS: usize = 131_072;

/// Keys that DMA's cache holds for each KV head.
const KEPT: usize = 2048;

/// Decode selectors that are timed, at their papers' settings.
const SELECTORS: [&str; 5] = ["streamingllm", "quest", "exact_top", "snapkv", "h2o"];

/// Index of the layer: some methods leave the first layers dense, none this one.
const LAYER: usize = 8;

/// Times dense attention and DMA with 16 texts and with one, then each selector, which takes one text only.
pub(super) fn rows(bench: &mut Bench<'_>) -> Result<()> {
    for batch in [16, 1] {
        let shape = shape(batch, TOKENS, HEADS, 128);
        decoding(bench, "dense", shape)?;
        dma_decoding(bench, shape, KEPT)?;
    }
    let shape = shape(1, TOKENS, HEADS, 128);
    // Bytes an element: two f32 tensors and two bf16 tensors while the numbers are drawn.
    let bytes = 12.0 * (TOKENS * 2 * HEADS[1] * 128) as f64;
    if bench.fits("selectors", shape, bytes)? {
        for name in SELECTORS {
            selector(bench, name)?;
        }
    }
    Ok(())
}

/// Times one token under a decode selector. Methods without `heavy_keys` choose keys for each token; H2O's cache evicts
/// keys; SnapKV's cache has chosen its keys after the prompt.
fn selector(bench: &mut Bench<'_>, name: &str) -> Result<()> {
    let selector = Selector::parse(name).expect("the names above are right");
    let shape = shape(1, TOKENS, HEADS, 128);
    let call = CallShape::new([1, TOKENS], HEADS, 128);
    let scale = call.softmax_scale();
    let Some(heavy) = selector.heavy_keys(call, LAYER) else {
        let keys = selector.token_keys(TOKENS, LAYER).expect("it decodes on a device");
        return time_token_keys(bench, name, shape, keys, scale);
    };
    match (heavy.slots, heavy.selection.keep.by) {
        (Some(window), _) => {
            let (token, room) = (token(bench, shape), window.keep_window_size);
            let slots = slots(bench, shape, room, window.local_window_size);
            let scratch = DecodeScratch::new(token.q.tensor(), shape, room)?;
            let length = bench.device.int(&[TOKENS as i32], &[1]);
            let name = format!("{name}, {room} slots");
            bench.row(&name, shape, Work::Time, || slots.heavy_decode(&token, &length, TOKENS, scale, &scratch));
        }
        // SnapKV: dense attention over the keys that it kept of the text.
        (None, KeepBlocks::Top(top)) => {
            let kept = crate::timed::shape(1, top + heavy.last + 1, HEADS, 128);
            decoding(bench, &format!("{name}, of {TOKENS} tokens"), kept)?;
        }
        _ => unreachable!("it keeps a number of keys"),
    }
    Ok(())
}

/// Times one token that reads these keys of a cache of [`TOKENS`] tokens, itself included.
fn time_token_keys(
    bench: &mut Bench<'_>,
    name: &str,
    shape: AttentionShape,
    keys: TokenKeys,
    softmax_scale: f32,
) -> Result<()> {
    let (token, device) = (token(bench, shape), bench.device.clone());
    let [k, v] = [(); 2].map(|()| bench.bf16([1, HEADS[1], TOKENS, shape.head_dim]));
    let kv = KvCache { k, v };
    let bounds = match keys {
        TokenKeys::Pages { page, .. } => Some(bench.f32([1, HEADS[1], TOKENS.div_ceil(page), 2 * shape.head_dim])),
        TokenKeys::Ends { .. } | TokenKeys::Largest(_) => None,
    };
    let (choosers, most) = SelectorStep::scratch(keys, shape, TOKENS);
    let scratch = DecodeScratch::new(token.q.tensor(), choosers, most)?;
    let choice = SelectorStep {
        length: &device.int(&[TOKENS as i32 - 1], &[1]),
        start: &device.int(&[1 - TOKENS as i32], &[1, 1]),
        keys,
        bounds: bounds.as_ref(),
    };
    let step = DecodeStep::new(TOKENS - 1, softmax_scale);
    bench.row(name, shape, Work::Time, || kv.selector_decode(&token, step, choice, &scratch));
    Ok(())
}
