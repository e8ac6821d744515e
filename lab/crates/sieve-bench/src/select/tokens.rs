//! Decode selectors that evict nothing: the keys that decoded tokens read, and their attention, compared with decode
//! sessions on the CPU.
use crate::device::{Device, separate};
use crate::report::{Outcome, wrong};
use crate::tolerance::Tolerance;
use sieve_core::ForcedBlocks;
use sieve_cpu::nsa::choose_blocks;
use sieve_kernels::{
    AttentionShape, CudaTensor, DType, DecodeScratch, DecodeStep, KernelError, KvCache, Qkv, SelectorStep,
    choose_by_scores,
};
use sieve_select::{DecodeSession, LayerShape, Selector, TokenKeys};
use sieve_testing::Random;
use std::ops::Range;

/// Tolerance of an output that was rounded to bf16 three times; values are normal numbers.
pub(super) const NEAR: Tolerance = Tolerance::new(0.0, 0.05, 0.0);

/// Decode selectors that choose keys for each new token.
pub(super) const STEPS: &[&str] = &[
    "exact_top:k=21",
    "exact_top:k=1000",
    "exact_top:k=0.3",
    "quest:page=8,budget=64,dense_layers=0",
    "quest:page=16,budget=64,dense_layers=0",
    "quest:page=16,budget=0.3,dense_layers=0",
    "quest:page=32,budget=1000,dense_layers=0",
    "streamingllm:n_init=5,n_local=70",
    "streamingllm:n_init=33,n_local=7",
    "streamingllm:n_init=100,n_local=60",
];

/// Tokens of the prompt, and tokens decoded after it.
const PROMPT: usize = 150;
const DECODED: usize = 54;

/// Sizes of the calls here and in `heavy.rs`: query heads, KV heads, columns of a head.
pub(super) const HEADS: usize = 4;
pub(super) const KV_HEADS: usize = 2;
pub(super) const WIDTH: usize = 64;

/// Queries, keys and values of a text's tokens, `[tokens, heads, WIDTH]` each.
pub(super) struct Operands {
    pub(super) q: Vec<f32>,
    pub(super) k: Vec<f32>,
    pub(super) v: Vec<f32>,
}

impl Operands {
    pub(super) fn draw(tokens: usize, random: &mut Random) -> Self {
        let [q, k, v] = [HEADS, KV_HEADS, KV_HEADS].map(|heads| random.bf16_normals(tokens * heads * WIDTH));
        Self { q, k, v }
    }

    /// q, k and v of some tokens.
    pub(super) fn rows(&self, tokens: Range<usize>) -> [&[f32]; 3] {
        [(&self.q, HEADS), (&self.k, KV_HEADS), (&self.v, KV_HEADS)]
            .map(|(x, heads)| &x[tokens.start * heads * WIDTH..tokens.end * heads * WIDTH])
    }

    pub(super) fn upload(&self, device: &dyn Device, tokens: Range<usize>) -> Qkv {
        let shape = AttentionShape::new(1, tokens.len(), [HEADS, KV_HEADS], [WIDTH; 2]);
        separate(device, self.rows(tokens), shape)
    }
}

/// Decodes tokens with the launches that a CUDA graph repeats for each token: their sizes fit the first token and a
/// full cache, and only what lies on the device changes. Where the selector reads a share of the keys, a token's
/// launches have a number of keys of their own.
pub(super) fn check(device: &dyn Device, text: &str, random: &mut Random) -> Outcome {
    let (all, layer, scale, heads) = (PROMPT + DECODED, 0, 0.125, [HEADS, KV_HEADS]);
    let drawn = Operands::draw(all, random);
    let selector = Selector::parse(text).expect("the names above are right");
    let mut session = DecodeSession::new(&selector, LayerShape::new(heads, WIDTH, layer)).expect("a decode method");
    let [q, k, v] = drawn.rows(0..PROMPT);
    session.take_prompt(q, k, v).expect("sizes fit");
    let keys_of = |num_keys| selector.token_keys(num_keys, layer).expect("a device takes these");
    let shape = AttentionShape::new(1, 1, heads, [WIDTH; 2]);
    // With room for more than 1024 keys one thread block chooses among a head's keys.
    let room = if text.ends_with("k=0.3") { 1100 } else { all + 3 };
    let cache = Text::new(device, [k, v], shape, [PROMPT, room], keys_of(PROMPT));
    let mut worst = 0.0f32;
    for token in PROMPT..all {
        let [q, k, v] = drawn.rows(token..token + 1);
        let expected = session.step(q, k, v).expect("sizes fit");
        let keys = keys_of(token + 1);
        if session.kept().iter().any(|kept| kept.len() != keys.num_read(token + 1)) {
            return wrong(format!("token {token}: {keys:?} read a different number of keys on the CPU"));
        }
        let new = drawn.upload(device, token..token + 1);
        if let Some(found) = cache.choose(&new, token, keys)?
            && found != session.kept()
        {
            return wrong(format!("token {token} reads {found:?}; on the CPU {:?}", session.kept()));
        }
        let o = cache.decode(&new, token, keys, scale)?;
        worst = worst.max(NEAR.judge("output", &device.floats(&o)?, &expected, &expected)?);
    }
    Ok(worst)
}

/// Chooses among the scores of long rows, for one query and for each of two, whose kernels differ: (blocks, chosen).
pub(super) fn long_rows(device: &dyn Device, random: &mut Random) -> Outcome {
    for (num_blocks, num_chosen) in
        [(1025, 4), (8192, 1), (8192, 16), (8191, 700), (8200, 8199), (20_003, 33), (131_072, 2000)]
    {
        // Kinds of scores: normal numbers, few values, zeros of both signs, some that are not finite, nearly equal
        // ones.
        for kind in 0..5 {
            let mut scores = random.bf16_normals(num_blocks);
            for (at, score) in scores.iter_mut().enumerate() {
                match kind {
                    0 => {}
                    1 => *score = random.between(0, 4) as f32,
                    2 => *score = [0.0, -0.0][at % 2],
                    3 if random.chance(0.1) => *score = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][at % 3],
                    // Scores that differ in their lowest bits alone.
                    _ => *score = 1.0 + score.abs() * 1e-5,
                }
            }
            // The query's own block is the last one, or the blocks behind it are left out: their scores are NaN.
            let own = num_blocks - 1 - kind % 3 * (num_blocks / 5);
            scores[own + 1..].fill(f32::NAN);
            let forced = ForcedBlocks { first: kind % 2 == 1, local: 1 + kind / 2 };
            let mut expected = vec![0; num_chosen];
            choose_blocks(&scores, own, forced, &mut expected);
            for num_queries in [1, 2] {
                let importance =
                    device.float(&scores.repeat(num_queries), &[1, 1, num_queries, num_blocks], DType::F32);
                let start: Vec<i32> = (0..num_queries).map(|query| query as i32 - own as i32).collect();
                let start = device.int(&start, &[1, num_queries]);
                let indices = start.empty_contiguous(&[1, num_queries, 1, num_chosen], DType::I32);
                let block_size = 1;
                choose_by_scores(&importance, &start, &indices, block_size, forced, 0)?;
                if device.ints(&indices)? != expected.repeat(num_queries) {
                    let words = format!("{num_chosen} of {num_blocks} blocks, own {own}, {forced:?}");
                    return wrong(format!("{words}, scores of kind {kind}, {num_queries} queries"));
                }
            }
        }
    }
    Ok(0.0)
}

/// A text in a device's cache under a selector.
pub(super) struct Text<'a> {
    device: &'a dyn Device,
    cache: KvCache,
    bounds: Option<CudaTensor>,
    shape: AttentionShape,
    /// Tokens of the prompt, and for how many tokens there is room.
    sizes: [usize; 2],
}

impl<'a> Text<'a> {
    /// The cache of a prompt, k and v `[tokens, num_kv_heads, head_dim]`; `sizes` are its tokens and the cache's room.
    pub(super) fn new(
        device: &'a dyn Device,
        [k, v]: [&[f32]; 2],
        shape: AttentionShape,
        sizes: [usize; 2],
        keys: TokenKeys,
    ) -> Self {
        let (heads, width, [tokens, room]) = (shape.num_kv_heads, shape.head_dim, sizes);
        let put = |x: &[f32]| {
            let mut values = vec![f32::NAN; heads * room * width];
            for (at, row) in x.chunks_exact(width).enumerate() {
                values[(at % heads * room + at / heads) * width..][..width].copy_from_slice(row);
            }
            device.float(&values, &[1, heads, room, width], DType::BF16)
        };
        let bounds_of = |page: usize| {
            let pages = room.div_ceil(page);
            let mut values = vec![f32::NAN; heads * pages * 2 * width];
            for (at, bounds) in values.chunks_exact_mut(2 * width).enumerate() {
                let (head, first) = (at / pages, at % pages * page);
                for token in first..(first + page).min(tokens) {
                    for column in 0..width {
                        let x = k[(token * heads + head) * width + column];
                        // `min` and `max` of NaN, which unset bounds hold, and a number are the number.
                        bounds[column] = bounds[column].min(x);
                        bounds[width + column] = bounds[width + column].max(x);
                    }
                }
            }
            device.float(&values, &[1, heads, pages, 2 * width], DType::F32)
        };
        let bounds = match keys {
            TokenKeys::Pages { page, .. } => Some(bounds_of(page)),
            TokenKeys::Ends { .. } | TokenKeys::Largest(_) => None,
        };
        Self { device, cache: KvCache { k: put(k), v: put(v) }, bounds, shape, sizes }
    }

    /// Calls `run` with the operands of the decoding step of token number `token`.
    fn step<T>(
        &self,
        token: usize,
        keys: TokenKeys,
        run: impl FnOnce(DecodeStep<'_>, SelectorStep<'_>) -> Result<T, KernelError>,
    ) -> Result<T, KernelError> {
        let choice = SelectorStep {
            length: &self.device.int(&[token as i32], &[1]),
            start: &self.device.int(&[-(token as i32)], &[1, 1]),
            keys,
            bounds: self.bounds.as_ref(),
        };
        let step = DecodeStep::new(self.sizes[0], 1.0);
        run(step, choice)
    }

    /// The keys that the token number `token` chooses, ascending, a list for each KV head or query head; `None` where
    /// it reads keys by position.
    pub(super) fn choose(
        &self,
        new: &Qkv,
        token: usize,
        keys: TokenKeys,
    ) -> Result<Option<Vec<Vec<u32>>>, KernelError> {
        let size = match keys {
            TokenKeys::Ends { .. } => return Ok(None),
            TokenKeys::Pages { page, .. } => page,
            TokenKeys::Largest(_) => 1,
        };
        let chosen = self.step(token, keys, |step, choice| self.cache.selected_blocks(new, step, choice))?;
        let count = chosen.shape()[2];
        let keys_of = |block: i32| {
            let first = block as usize * size;
            (first..(first + size).min(token + 1)).map(|key| key as u32)
        };
        let list = |list: &[i32]| list.iter().filter(|&&block| block >= 0).flat_map(|&block| keys_of(block)).collect();
        Ok(Some(self.device.ints(&chosen)?.chunks_exact(count).map(list).collect()))
    }

    /// Attention of the token number `token` over the keys that it chooses.
    fn decode(&self, new: &Qkv, token: usize, keys: TokenKeys, scale: f32) -> Result<CudaTensor, KernelError> {
        let (shape, most) = SelectorStep::scratch(keys, self.shape, self.sizes[1]);
        let scratch = DecodeScratch::new(&self.cache.k, shape, most)?;
        self.step(token, keys, |step, choice| {
            let step = DecodeStep { softmax_scale: scale, ..step };
            self.cache.selector_decode(new, step, choice, &scratch)
        })
    }
}
