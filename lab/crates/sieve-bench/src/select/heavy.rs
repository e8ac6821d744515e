//! Compares selectors that keep the keys of a prompt with the most attention (SnapKV, H2O), and the tokens after it,
//! with decode sessions on the CPU.
use super::tokens::{HEADS, KV_HEADS, NEAR, Operands, WIDTH};
use crate::device::Device;
use crate::report::{Outcome, Wrong, wrong};
use sieve_core::HeavyKeys;
use sieve_kernels::{AttentionShape, DType, DecodeScratch, DmaSlots, KeptKeys, KvCache};
use sieve_select::{CallShape, DecodeSession, LayerShape, Selector};
use sieve_testing::Random;
use std::ops::Range;

/// Selectors that choose keys after the prompt. SnapKV keeps the chosen keys and all later ones; under H2O later tokens
/// evict keys.
pub(super) const HEAVY: &[&str] = &[
    "snapkv:capacity=70,window=9,kernel=7",
    "snapkv:capacity=41,window=40,kernel=1,pool=max",
    "snapkv:capacity=120,window=16,pool=max",
    "snapkv:capacity=500",
    "h2o",
    "h2o:heavy=60,recent=0.05",
    // More slots than prompt keys are kept; later tokens fill the rest.
    "h2o:heavy=190,recent=18",
];

/// Tokens of the prompt: more queries than the kernel sums the attention of in one pass, so several are checked.
const PROMPT: usize = 203;
/// Number of tokens decoded after the prompt.
const WRITTEN: usize = 12;

/// Compares the keys that each decoded token reads. H2O's tokens are decoded over the kept keys as slots, and their
/// outputs are compared too. Of SnapKV only the prompt's kept keys are compared: its tokens read all later keys.
/// Returns the largest ratio of error to tolerance.
pub(super) fn check(device: &dyn Device, text: &str, random: &mut Random) -> Outcome {
    let all = PROMPT + WRITTEN;
    let drawn = Operands::draw(all, random);
    let layer = 0;
    let layer_shape = LayerShape::new([HEADS, KV_HEADS], WIDTH, layer);
    let shape = CallShape::new([PROMPT; 2], [HEADS, KV_HEADS], WIDTH);
    let selector = Selector::parse(text).expect("the names above are right");
    let heavy = selector.heavy_keys(shape, layer).expect("a device takes these");
    let mut session = DecodeSession::new(&selector, layer_shape).expect("a decode method");
    let [q, k, v] = drawn.rows(0..PROMPT);
    session.take_prompt(q, k, v).expect("sizes fit");
    let prompt = drawn.upload(device, 0..PROMPT);
    let doc_start = device.int(&[0; PROMPT], &[1, PROMPT]);
    let (no_window, no_bias) = (None, None);
    let dense = prompt.attention_forward(&doc_start, no_window, shape.softmax_scale(), no_bias)?;
    let kept = prompt.keep_heavy_keys(&heavy, &dense.lse)?;
    let slots = slots(&drawn, device, &kept, &heavy)?;
    let token_shape = AttentionShape::new(1, 1, [HEADS, KV_HEADS], [WIDTH; 2]);
    let mut worst = 0.0_f32;
    for token in PROMPT..all {
        let [q, k, v] = drawn.rows(token..token + 1);
        let expected = session.step(q, k, v).expect("sizes fit");
        let positions = match &slots {
            Some(slots) => {
                let length = device.int(&[token as i32], &[1]);
                let scratch = DecodeScratch::new(&length, token_shape, slots.z.shape()[2])?;
                let new = drawn.upload(device, token..token + 1);
                let o = slots.heavy_decode(&new, &length, token, shape.softmax_scale(), &scratch)?;
                let ratio = NEAR.judge("output", &device.floats(&o)?, &expected, &expected)?;
                worst = worst.max(ratio);
                device.ints(&slots.positions)?
            }
            None => device.ints(&kept.positions)?,
        };
        let also_read = match &slots {
            Some(_) => 0..0,
            None => PROMPT as u32..token as u32 + 1,
        };
        let read = read_positions(&positions, also_read);
        for (head, (found, expected)) in read.iter().zip(session.kept()).enumerate() {
            if found != expected {
                return wrong(format!("token {token}, KV head {head}: {found:?}; the CPU reads {expected:?}"));
            }
        }
    }
    Ok(worst)
}

/// The positions of the keys that each KV head reads, ascending: the positions in its slots (an empty slot has -1), and
/// the positions in `also_read`.
fn read_positions(positions: &[i32], also_read: Range<u32>) -> Vec<Vec<u32>> {
    let of_head = |slots: &[i32]| {
        let filled = slots.iter().filter_map(|&position| u32::try_from(position).ok());
        let mut read: Vec<u32> = filled.chain(also_read.clone()).collect();
        read.sort_unstable();
        read
    };
    positions.chunks_exact(positions.len() / KV_HEADS).map(of_head).collect()
}

/// Checks that the kept keys are rows of the prompt; returns them as slots for selectors whose later tokens evict
/// keys.
fn slots(drawn: &Operands, device: &dyn Device, kept: &KeptKeys, heavy: &HeavyKeys) -> Result<Option<DmaSlots>, Wrong> {
    let [k, v, z] = [device.floats(&kept.k)?, device.floats(&kept.v)?, device.floats(&kept.received)?];
    let positions = device.ints(&kept.positions)?;
    let num_kept = positions.len() / KV_HEADS;
    for (at, &position) in positions.iter().enumerate() {
        let token = position as usize * KV_HEADS + at / num_kept;
        for (name, found, all) in [("k", &k, &drawn.k), ("v", &v, &drawn.v)] {
            if found[at * WIDTH..][..WIDTH] != all[token * WIDTH..][..WIDTH] {
                return wrong(format!("{name} of slot {at} differs from {name} of position {position}"));
            }
        }
    }
    let Some(window) = heavy.slots else {
        return Ok(None);
    };
    // The slots beyond the kept keys are empty: NaN, with position -1.
    let room = window.keep_window_size;
    let put = |values: &[f32]| {
        let values = padded(values, room * WIDTH, f32::NAN);
        device.float(&values, &[1, KV_HEADS, room, WIDTH], DType::BF16)
    };
    let kv = KvCache { k: put(&k), v: put(&v) };
    Ok(Some(DmaSlots {
        kv,
        z: device.float(&padded(&z, room, f32::NAN), &[1, KV_HEADS, room], DType::F32),
        positions: device.int(&padded(&positions, room, -1), &[1, KV_HEADS, room]),
        local_window_size: window.local_window_size,
    }))
}

/// Pads the part of each KV head to `len` values.
fn padded<T: Copy>(values: &[T], len: usize, empty: T) -> Vec<T> {
    let of_head = |part: &[T]| {
        let mut part = part.to_vec();
        part.resize(len, empty);
        part
    };
    values.chunks_exact(values.len() / KV_HEADS).flat_map(of_head).collect()
}
