//! Rows of one new token after a long text, in one layer: how long each method takes to choose the token's keys and to
//! attend to them.
use super::rows::{HEADS, decoding, dma_decoding, shape, slots, token};
use super::{Bench, Work};
use crate::device::{Device, upload_mask};
use crate::error::Result;
use sieve_core::KeepBlocks;
use sieve_kernels::DType;
use sieve_kernels::{DecodeScratch, KernelError, Qkv};
use sieve_select::{CallShape, Selector, Step};

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
    let bytes = 12.0 * (TOKENS * (HEADS[0] + 2 * HEADS[1]) * 128) as f64;
    if bench.fits("selectors", shape, bytes)? {
        let text = bench.bf16([1, TOKENS, HEADS[0] + 2 * HEADS[1], 128]);
        let text = Qkv::packed(&text, HEADS[0], HEADS[1]);
        for name in SELECTORS {
            selector(bench, name, &text)?;
        }
    }
    Ok(())
}

/// Times one token under a decode selector. Methods without `heavy_keys` choose keys for each token; H2O's cache evicts
/// keys; SnapKV's cache has chosen its keys after the prompt.
fn selector(bench: &mut Bench<'_>, name: &str, text: &Qkv) -> Result<()> {
    let selector = Selector::parse(name).expect("the names above are right");
    let (shape, device) = (shape(1, TOKENS, HEADS, 128), bench.device.clone());
    let call = CallShape::new([1, TOKENS], HEADS, 128);
    let (like, scale) = (text.q.tensor(), call.softmax_scale());
    match selector.heavy_keys(call, LAYER) {
        None => {
            let page = selector.page();
            let bounds = page.map(|page| {
                let size = [shape.num_kv_heads, TOKENS.div_ceil(page), 2, shape.head_dim];
                like.zeros_contiguous(&size, DType::F32)
            });
            let token = |known_pages: usize| -> Result<(), KernelError> {
                let mask = match selector.step(call, LAYER, known_pages) {
                    Some(Step::Mask(mask)) => upload_mask(&device, &mask).expect("its own arrays"),
                    Some(Step::Blocks(selection, _)) => text.select_blocks(&selection, bounds.as_ref())?,
                    None => unreachable!("it decodes on a device"),
                };
                text.sparse_attention_forward(&mask, scale).map(drop)
            };
            // The first call computes the bounds of all pages; a later token finds the bounds of whole pages.
            token(0)?;
            let known_pages = page.map_or(0, |page| (TOKENS - 1) / page);
            bench.row(name, shape, Work::Time, || token(known_pages));
        }
        Some(heavy) => match (heavy.slots, heavy.selection.keep.by) {
            (Some(window), _) => {
                let room = window.keep_window_size;
                let slots = slots(bench, shape, room, window.local_window_size);
                let (token, scratch) = (token(bench, shape), DecodeScratch::new(like, shape, room)?);
                let length = device.int(&[TOKENS as i32], &[1]);
                let name = format!("{name}, {room} slots");
                bench.row(&name, shape, Work::Time, || {
                    slots.heavy_decode(&token, &length, TOKENS, scale, &scratch)
                });
            }
            // SnapKV: dense attention over the keys that it kept of the text.
            (None, KeepBlocks::Top(top)) => {
                let kept = super::rows::shape(1, top + heavy.last + 1, HEADS, 128);
                decoding(bench, &format!("{name}, of {TOKENS} tokens"), kept)?;
            }
            _ => unreachable!("it keeps a number of keys"),
        },
    }
    Ok(())
}
