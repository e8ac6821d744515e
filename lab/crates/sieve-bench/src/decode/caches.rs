//! Checks decoding against caches as a prefill leaves them: rows of different length, several KV splits, NaN wherever a
//! kernel must not read, DMA's slots in any order, more query heads a KV head than a block has rows.
use crate::case::{magnify, scaled_normals};
use crate::device::{Device, separate};
use crate::extent::Extent;
use crate::report::{Report, Wrong, wrong};
use crate::scores::Scores;
use crate::shape::{keys_of, queries_of, values_of};
use crate::tolerance::Tolerance;
use sieve_core::{BlockChoice, ChoiceRule, FarKeys, ForcedBlocks, NsaBlocks};
use sieve_cpu::nsa::{choose_blocks, overlap_weight};
use sieve_cpu::reference::{self, Rounding, attend};
use sieve_kernels::step::{QkNormRope, rope};
use sieve_kernels::{
    AttentionShape, CudaTensor, DType, DecodeScratch, DecodeStep, DmaSlots, IndexedToken, KvCache, PooledStep, Qkv,
    ScoreBias, TokenRotation,
};
use sieve_testing::{Random, round_bf16};
use std::ops::Range;

/// One cached key with its value, and its bias and rank where it has them.
#[derive(Clone)]
pub(super) struct Key {
    pub(super) k: Vec<f32>,
    pub(super) v: Vec<f32>,
    pub(super) bias: f32,
    /// What DMA evicts keys by: the score z, and among equal scores the position.
    pub(super) rank: (f32, i32),
}

/// Bias and rank of keys that have none.
pub(super) const NO_BIAS: f32 = 0.0;
pub(super) const NO_RANK: (f32, i32) = (0.0, 0);

/// Epsilon of the norms of heads.
const EPSILON: f32 = 1e-2;

/// Checks the decoding kernels over dense caches, DMA's slots and chosen blocks.
pub(super) fn check(report: &mut Report, device: &dyn Device, extent: &Extent) {
    let mut random = Random(extent.seed);
    let groups = extent.pick(&[2, 17][..], &[1, 2, 3, 8, 16, 17]);
    // Widths whose blocks have eight warps, two warps, and (on a GPU with 99 KiB of shared memory) four warps.
    let emulated_widths = [32, 256, 64];
    // At least 12 calls, so that each kind of call has several: with a single slot, any softmax weights would pass.
    for at in 0..extent.few().max(12) {
        let (head_dim, head_dim_v) =
            if extent.is_emulated { [emulated_widths[at / 4 % 3]; 2].into() } else { random.one_of(extent.widths) };
        let (kv_heads, group) = (random.between(1, 4), random.one_of(groups));
        let (batch, heads) = (random.between(1, 4), [kv_heads * group, kv_heads]);
        let shape = AttentionShape::new(batch, 1, heads, [head_dim, head_dim_v]);
        let seed = random.between(0, 1 << 30) as u64;
        let mut calls = TokenCheck::new(device, shape, extent.magnitude_of(at), seed);
        let has_local_window = at % 4 == 3;
        let (name, outcome) = match at % 4 {
            0 | 2 => {
                let rotate = [None, Some(true), Some(false)][at / 2 % 3];
                ("decode, caches", calls.check_dense(rotate, Reads::Window))
            }
            1 => ("dma_decode, caches", calls.check_dma(has_local_window)),
            _ => ("dma_decode, local window, caches", calls.check_dma(has_local_window)),
        };
        let case = format!("{shape:?} q, k x {} seed {seed}", calls.magnitude);
        let outcome = outcome.map(|()| calls.worst);
        report.add(name, "kernel", &case, outcome);
    }
    for at in 0..extent.few().max(8) {
        let (kv_heads, group) = (random.between(1, 3), random.one_of(&[1, 2, 5]));
        let heads = [kv_heads * group, kv_heads];
        let shape = AttentionShape::new(random.between(1, 3), 1, heads, [[64, 128][at / 4 % 2]; 2]);
        let seed = random.between(0, 1 << 30) as u64;
        let magnitude = 1.0;
        let mut calls = TokenCheck::new(device, shape, magnitude, seed);
        let (blocks, rule, first, local) = CHOICES[at % 4];
        let choice = BlockChoice { blocks: NsaBlocks::of(blocks), rule, forced: ForcedBlocks { first, local } };
        let outcome = calls.check_chosen(choice).map(|()| calls.worst);
        report.add("chosen_decode", "kernel", &format!("{shape:?} {choice:?} seed {seed}"), outcome);
    }
}

/// One choice of each rule: `NsaBlocks` sizes, the rule, whether the first block is always chosen, and how many of the
/// last blocks are always chosen.
const CHOICES: [([usize; 4], ChoiceRule, bool, usize); 4] = [
    ([32, 16, 64, 4], ChoiceRule::WeightedProbability, true, 2),
    ([32, 16, 32, 5], ChoiceRule::LargestProbability, true, 2),
    ([16, 16, 16, 3], ChoiceRule::MeanKey, false, 1),
    ([1, 1, 48, 3], ChoiceRule::LargestScore, true, 1),
];

/// Which keys tokens of a dense cache read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Reads {
    /// All, or the last ones.
    Window,
    /// The last ones, the first, and a band of each KV head.
    Bands,
}

impl Reads {
    /// Keys beyond a window in a cache of up to `len` keys and `kv_heads` heads.
    pub(super) fn far(self, random: &mut Random, window: usize, len: usize, kv_heads: usize) -> Option<FarKeys> {
        if self == Self::Window {
            return None;
        }
        let first = window + random.one_of(&[0, 0, 3, 200]);
        let num_bands = random.between(1, kv_heads + 1);
        Some(FarKeys {
            sink_tokens: random.one_of(&[0, 1, 4, 17, 64, 130]),
            distances: [first, first + random.one_of(&[0, 1, 30, len / 2, len, 3 * len])],
            num_bands,
            first_band: random.below(num_bands),
        })
    }
}

/// Checks new tokens of one shape: draws tokens and caches, and keeps the largest error as a share of the tolerance.
pub(super) struct TokenCheck<'a> {
    pub(super) device: &'a dyn Device,
    pub(super) shape: AttentionShape,
    /// Factor on the random queries and keys.
    pub(super) magnitude: f32,
    pub(super) random: Random,
    pub(super) worst: f32,
    /// One more logit of each query head, whose value is zero; empty: no sinks.
    sinks: Vec<f32>,
}

/// A new token of every row: the tensors, and q, k and v on the host.
#[derive(Clone)]
pub(super) struct Token {
    pub(super) on: Qkv,
    pub(super) q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

/// Operands of a launch that rotates its token.
struct Rotation {
    /// Weights of the queries' and of the keys' norm, where heads have norms.
    weights: Option<[CudaTensor; 2]>,
    /// Cosines and sines.
    tables: [CudaTensor; 2],
}

impl Rotation {
    fn of_launch(&self) -> TokenRotation<'_> {
        TokenRotation {
            norm: self.weights.as_ref().map(|weights| (weights.each_ref(), EPSILON)),
            tables: self.tables.each_ref(),
        }
    }
}

impl<'a> TokenCheck<'a> {
    pub(super) fn new(device: &'a dyn Device, shape: AttentionShape, magnitude: f32, seed: u64) -> Self {
        Self { device, shape, magnitude, random: Random(seed), worst: 0.0, sinks: Vec::new() }
    }

    pub(super) fn scale(&self) -> f32 {
        1.0 / (self.shape.head_dim as f32).sqrt()
    }

    /// Draws a new token of every row.
    pub(super) fn token(&mut self) -> Token {
        let shape = self.shape;
        let [mut q, mut k, v] = [queries_of(shape), keys_of(shape), values_of(shape)]
            .map(|sizes| self.random.bf16_normals(sizes.iter().product()));
        magnify(&mut q, self.magnitude);
        magnify(&mut k, self.magnitude);
        let on = separate(self.device, [&q, &k, &v], shape);
        Token { on, q, k, v }
    }

    /// Draws the key and value of an earlier token.
    pub(super) fn drawn_key(&mut self, bias: f32, rank: (f32, i32)) -> Key {
        let k = scaled_normals(&mut self.random, self.shape.head_dim, self.magnitude);
        Key { k, v: self.random.bf16_normals(self.shape.head_dim_v), bias, rank }
    }

    /// A cache of `room` keys a row and KV head: each key lies at the slot given with it, the other slots hold NaN.
    pub(super) fn cache(&self, room: usize, keys: &[Vec<(usize, Key)>]) -> KvCache {
        let [batch, _, kv_heads, width_v] = values_of(self.shape);
        let on = |width: usize, of: fn(&Key) -> &[f32]| {
            let mut values = vec![f32::NAN; batch * kv_heads * room * width];
            for (row, keys) in keys.iter().enumerate() {
                for (slot, key) in keys {
                    values[(row * room + slot) * width..][..width].copy_from_slice(of(key));
                }
            }
            let sizes = [batch, kv_heads, room, width];
            self.device.float(&values, &sizes, DType::BF16)
        };
        KvCache { k: on(self.shape.head_dim, |key| &key.k), v: on(width_v, |key| &key.v) }
    }

    /// The token's key for one row and KV head (`row` counts both).
    pub(super) fn key_of(&self, token: &Token, row: usize, bias: f32, rank: (f32, i32)) -> Key {
        let (head_dim, head_dim_v) = (self.shape.head_dim, self.shape.head_dim_v);
        Key {
            k: token.k[row * head_dim..][..head_dim].to_vec(),
            v: token.v[row * head_dim_v..][..head_dim_v].to_vec(),
            bias,
            rank,
        }
    }

    /// Compares the output of every query head with attention over its keys; `keys` has one list for each row and KV
    /// head, or for each row and choice of blocks.
    pub(super) fn judge(&mut self, o: &CudaTensor, token: &Token, keys: &[Vec<Key>]) -> Result<(), Wrong> {
        let (num_heads, head_dim) = (self.shape.num_heads, self.shape.head_dim);
        let (group, scale) = (self.shape.batch * num_heads / keys.len(), self.scale());
        let got = self.device.floats(o)?;
        let (mut exact, mut plain) = (Vec::new(), Vec::new());
        // A sink is a key whose bias is all of its logit.
        let nothing = [vec![0.0; head_dim], vec![0.0; self.shape.head_dim_v]];
        for (at, q) in token.q.chunks_exact(head_dim).enumerate() {
            let seen = keys[at / group].iter().map(|key| reference::Key {
                k: key.k.as_slice(),
                v: &key.v,
                bias: key.bias.into(),
            });
            let sink = self.sinks.get(at % num_heads);
            let sink = sink.map(|&sink| reference::Key { k: nothing[0].as_slice(), v: &nothing[1], bias: sink.into() });
            let seen: Vec<_> = seen.chain(sink).collect();
            for (to, rounding) in [(&mut exact, Rounding::None), (&mut plain, Rounding::Bf16)] {
                let mut o = vec![0.0; self.shape.head_dim_v];
                attend(q, &seen, scale.into(), rounding, &mut o);
                to.extend(o.into_iter().map(|x| x as f32));
            }
        }
        // The largest logit. Rounded to f32, it changes a probability by about the logit times f32's epsilon.
        let largest = self.magnitude.powi(2) * (head_dim as f32).sqrt();
        let tolerance = Tolerance::new(2.0, Tolerance::FLOOR, 1.0 / 256.0 + 2.0 * f32::EPSILON * largest);
        self.worst = self.worst.max(tolerance.judge("o", &got, &plain, &exact)?);
        Ok(())
    }

    /// A token for a launch that rotates it: the tensors before the rotation; on the host q and k after it, as the
    /// kernel for whole rows computes them.
    fn rotated_token(&mut self, positions: &CudaTensor, has_norm: bool) -> Result<(Token, Rotation), Wrong> {
        // Some texts are longer: positions past the tables take the last row.
        const POSITIONS: usize = 1200;
        let half = self.shape.head_dim / 2;
        let angles = self.random.vector(POSITIONS * half);
        let tables = [f32::cos, f32::sin].map(|function| {
            let table: Vec<f32> = angles.iter().map(|&angle| function(angle)).collect();
            self.device.float(&table, &[POSITIONS, half], DType::F32)
        });
        let (token, weights) = self.token_rotated_by(positions, &tables, has_norm)?;
        Ok((token, Rotation { weights: has_norm.then_some(weights), tables }))
    }

    /// As [`rotated_token`](Self::rotated_token), by these cosines and sines; also the weights of the norms.
    fn token_rotated_by(
        &mut self,
        positions: &CudaTensor,
        tables: &[CudaTensor; 2],
        has_norm: bool,
    ) -> Result<(Token, [CudaTensor; 2]), Wrong> {
        let AttentionShape { batch, num_heads, num_kv_heads, head_dim, .. } = self.shape;
        let heads = num_heads + 2 * num_kv_heads;
        let packed = scaled_normals(&mut self.random, batch * heads * head_dim, self.magnitude);
        let packed = self.device.float(&packed, &[batch, 1, heads, head_dim], DType::BF16);
        let weights = [0, 1].map(|_| {
            let weight = self.random.bf16_normals(head_dim);
            self.device.float(&weight, &[head_dim], DType::BF16)
        });
        let positions = positions.reshaped("decode", "positions", &[batch, 1])?;
        let rotated = if !has_norm {
            rope(&packed, &positions, tables.each_ref(), num_kv_heads)?
        } else {
            QkNormRope {
                q_weight: &weights[0],
                k_weight: &weights[1],
                positions: &positions,
                cos: &tables[0],
                sin: &tables[1],
                num_kv_heads,
                epsilon: EPSILON,
            }
            .qk_norm_rope_forward(&packed)?
        };
        let rotated = self.device.floats(&rotated)?;
        let of = |first: usize, count: usize| -> Vec<f32> {
            let rows = rotated.chunks_exact(heads * head_dim);
            rows.flat_map(|row| &row[first * head_dim..][..count * head_dim]).copied().collect()
        };
        let token = Token {
            on: Qkv::packed(&packed, num_heads, num_kv_heads),
            q: of(0, num_heads),
            k: of(num_heads, num_kv_heads),
            v: of(num_heads + num_kv_heads, num_kv_heads),
        };
        Ok((token, weights))
    }

    /// Checks one token over a dense cache after a prefill, with a window in half of the calls or with bands, and sinks
    /// in half. With `rotate` the launch rotates the token, after norms where that is true.
    pub(super) fn check_dense(&mut self, rotate: Option<bool>, reads: Reads) -> Result<(), Wrong> {
        let [batch, _, num_kv_heads, head_dim] = keys_of(self.shape);
        let capacity = self.random.between(1, 700);
        let has_window = reads == Reads::Bands || self.random.chance(0.5);
        let window = has_window.then(|| self.random.between(1, capacity + 1));
        let far = window.and_then(|window| reads.far(&mut self.random, window / 4 + 1, capacity, num_kv_heads));
        let window = window.map(|window| if far.is_some() { window / 4 + 1 } else { window });
        let lengths: Vec<usize> = (0..batch).map(|_| self.random.below(capacity)).collect();
        // A window's cache may have dropped the first tokens of a text.
        let num_dropped = match far {
            _ if !has_window => 0,
            None => self.random.below(1000),
            Some(_) => self.random.below(8) * 128,
        };
        let rows = batch * num_kv_heads;
        // What a row's head reads of its cache: the last range ends with the token itself, which is not there yet.
        let ranges = |row: usize| -> Vec<Range<usize>> {
            let seen = lengths[row / num_kv_heads] + 1;
            let window = window.unwrap_or(seen);
            let near = seen - seen.min(window)..seen - 1;
            match far.map(|far| far.ranges(row % num_kv_heads, window, seen)) {
                Some([first, band, _]) => vec![first, band, near],
                None => vec![near],
            }
        };
        let keys: Vec<Vec<_>> = (0..rows)
            .map(|row| {
                let seen = ranges(row).into_iter().flatten();
                seen.map(|slot| (slot, self.drawn_key(NO_BIAS, NO_RANK))).collect()
            })
            .collect();
        let cache = self.cache(capacity, &keys);
        let length: Vec<i32> = lengths.iter().map(|&length| (num_dropped + length) as i32).collect();
        let length = self.device.int(&length, &[batch]);
        let mut keys = without_slots(keys);
        let (token, rotation) = match rotate.filter(|_| self.shape.head_dim == self.shape.head_dim_v) {
            None => (self.token(), None),
            Some(has_norm) => {
                let (token, rotation) = self.rotated_token(&length, has_norm)?;
                (token, Some(rotation))
            }
        };
        for (row, keys) in keys.iter_mut().enumerate() {
            keys.push(self.key_of(&token, row, NO_BIAS, NO_RANK));
        }
        let scratch = DecodeScratch::new(&cache.k, self.shape, capacity)?;
        if self.random.chance(0.5) {
            self.sinks = self.random.bf16_normals(self.shape.num_heads);
            // A sink without weight, and a sink that takes all.
            self.sinks[0] = f32::NEG_INFINITY;
            *self.sinks.last_mut().expect("a head") = round_bf16(1e30);
        }
        let has_sinks = !self.sinks.is_empty();
        let sinks = has_sinks.then(|| self.device.float(&self.sinks, &[self.shape.num_heads], DType::BF16));
        let step = DecodeStep {
            window,
            far,
            num_dropped,
            sinks: sinks.as_ref(),
            ..DecodeStep::new(lengths.iter().copied().max().unwrap_or(0), self.scale())
        };
        // The second call would fail if the first left the splits' counters other than zero.
        for _ in 0..2 {
            let o = match &rotation {
                None => cache.attention_decode(&token.on, &length, step, &scratch)?,
                Some(rotation) => {
                    cache.attention_decode_rotated(&token.on, rotation.of_launch(), &length, step, &scratch)?
                }
            };
            self.judge(&o, &token, &keys)?;
        }
        let after = self.device.floats(&cache.k)?;
        // Two kernels that rotate may round a number differently, by one bit of bf16.
        let tolerance = if rotation.is_some() { 1.0 / 128.0 } else { 0.0 };
        for row in 0..rows {
            let at = (row * capacity + lengths[row / num_kv_heads]) * head_dim;
            let (stored, expected) = (&after[at..at + head_dim], &token.k[row * head_dim..][..head_dim]);
            if !stored.iter().zip(expected).all(|(a, b)| (a - b).abs() <= tolerance * b.abs()) {
                return wrong(format!("the new key of row {row} is not in the cache"));
            }
        }
        Ok(())
    }

    /// Checks some tokens after a prefill, each over the blocks that its queries choose, and the pooled keys that the
    /// tokens left in their cache.
    fn check_chosen(&mut self, choice: BlockChoice) -> Result<(), Wrong> {
        let [batch, _, num_kv_heads, head_dim] = keys_of(self.shape);
        let (blocks, rows) = (choice.blocks, batch * num_kv_heads);
        let lengths: Vec<usize> = (0..batch).map(|_| self.random.below(400)).collect();
        let steps = 2 * blocks.compress_stride.max(2);
        let capacity = lengths.iter().max().unwrap_or(&0) + steps + self.random.between(1, 20);
        let mut keys: Vec<Vec<Key>> = (0..rows).map(|row| self.drawn_keys(lengths[row / num_kv_heads])).collect();
        let placed = keys.iter().map(|keys| keys.iter().cloned().enumerate().collect());
        let cache = self.cache(capacity, &placed.collect::<Vec<_>>());
        let room = blocks.num_compressed_blocks(capacity) + 1;
        // Pooled keys are means of the attention's keys, or of an indexer's single key head.
        let scored = choice.scored_heads([self.shape.num_heads, num_kv_heads]);
        let mut index_keys: Option<Vec<Vec<Key>>> =
            choice.has_indexer().then(|| lengths.iter().map(|&len| self.drawn_keys(len)).collect());
        let pooled = self.pooled_cache(index_keys.as_ref().unwrap_or(&keys), blocks, room);
        // How many lists of blocks a token chooses, each for a group of its query heads.
        let choosers = choice.choices_per_token([self.shape.num_heads, num_kv_heads]);
        let scratch = AttentionShape::new(batch, 1, [self.shape.num_heads, choosers], [head_dim; 2]);
        let scratch = DecodeScratch::new(&cache.k, scratch, blocks.num_selected_blocks * blocks.select_block_size)?;
        for at in 0..steps {
            let lengths: Vec<i32> = lengths.iter().map(|&length| (length + at) as i32).collect();
            let starts: Vec<i32> = lengths.iter().map(|&length| -length).collect();
            let length = self.device.int(&lengths, &[batch]);
            let has_norm = at % 2 == 0;
            let (token, rotation) = self.rotated_token(&length, has_norm)?;
            for (row, keys) in keys.iter_mut().enumerate() {
                keys.push(self.key_of(&token, row, NO_BIAS, NO_RANK));
            }
            let index = match &mut index_keys {
                None => None,
                Some(index_keys) => Some(self.index_token(scored, index_keys, (&length, &rotation))?),
            };
            let step = DecodeStep::new(lengths.iter().copied().max().unwrap_or(0) as usize, self.scale());
            let of_pooled = PooledStep { pooled: &pooled, start: &self.device.int(&starts, &[batch, 1]), choice };
            let turn = rotation.of_launch();
            let o = match &index {
                None => cache.chosen_decode(&token.on, turn, &length, step, of_pooled, &scratch)?,
                Some((index, weights)) => {
                    let (heads, index_norm) = ([&index.on.q, &index.on.k], (weights.each_ref(), EPSILON));
                    let call = IndexedToken { token: &token.on, index: heads, rotation: turn, index_norm };
                    cache.indexed_decode(call, &length, step, of_pooled, &scratch)?
                }
            };
            let choosing = index.as_ref().map_or(&token, |(index, _)| index);
            // Query heads of a chooser: in the attention, and among the heads that score blocks.
            let (group, scored_group) = (self.shape.num_heads / choosers, scored[0] / choosers);
            let seen: Vec<Vec<Key>> = (0..batch * choosers)
                .map(|chooser| {
                    let keys = &keys[chooser * group / self.shape.group_size()];
                    let pooled = index_keys.as_ref().map_or(keys, |keys| &keys[chooser / choosers]);
                    let q = &choosing.q[chooser * scored_group * head_dim..][..scored_group * head_dim];
                    chosen_keys(keys, means(pooled, blocks), q, choice, self.scale())
                })
                .collect();
            self.judge(&o, &token, &seen)?;
        }
        judge_means(&self.device.floats(&pooled)?, index_keys.as_ref().unwrap_or(&keys), blocks, room * head_dim)
    }

    /// Draws the keys and values of earlier tokens, without biases and ranks.
    fn drawn_keys(&mut self, count: usize) -> Vec<Key> {
        (0..count).map(|_| self.drawn_key(NO_BIAS, NO_RANK)).collect()
    }

    /// The cache of pooled keys after a prefill, with room for `room` of each row; `keys` are the keys that are pooled.
    fn pooled_cache(&self, keys: &[Vec<Key>], blocks: NsaBlocks, room: usize) -> CudaTensor {
        let head_dim = self.shape.head_dim;
        let mut pooled = vec![f32::NAN; keys.len() * room * head_dim];
        for (row, keys) in keys.iter().enumerate() {
            for (c, mean) in means(keys, blocks).into_iter().enumerate() {
                pooled[(row * room + c) * head_dim..][..head_dim].copy_from_slice(&mean);
            }
        }
        let batch = self.shape.batch;
        self.device.float(&pooled, &[batch, keys.len() / batch, room, head_dim], DType::BF16)
    }

    /// Draws an indexer's queries and key of a new token, and adds the key to `keys`, one for each text. They are drawn
    /// as a token of a different shape, with the indexer's `[query heads, key heads]`, and rotated as the attention's.
    /// Returns the weights of their norms, too.
    fn index_token(
        &mut self,
        heads: [usize; 2],
        keys: &mut [Vec<Key>],
        (positions, rotation): (&CudaTensor, &Rotation),
    ) -> Result<(Token, [CudaTensor; 2]), Wrong> {
        let shape = AttentionShape::new(self.shape.batch, 1, heads, [self.shape.head_dim; 2]);
        let attention = std::mem::replace(&mut self.shape, shape);
        let (indexer, weights) = self.token_rotated_by(positions, &rotation.tables, true)?;
        for (row, keys) in keys.iter_mut().enumerate() {
            keys.push(self.key_of(&indexer, row, NO_BIAS, NO_RANK));
        }
        self.shape = attention;
        Ok((indexer, weights))
    }

    /// Checks some tokens after a prefill over DMA's cache of a fixed number of keys (slots): the outputs, and which
    /// keys are left. `has_local_window`: the row's last keys are never evicted.
    fn check_dma(&mut self, has_local_window: bool) -> Result<(), Wrong> {
        let [batch, num_kv_heads] = [self.shape.batch, self.shape.num_kv_heads];
        let mut text = DmaText::draw(self.shape, has_local_window, &mut self.random)?;
        let keys: Vec<Vec<(usize, Key)>> = (0..batch * num_kv_heads)
            .map(|row| {
                // A prefill may leave the best keys in its slots in any order.
                let mut best = text.best_of_prompt(row);
                for last in (1..best.len()).rev() {
                    best.swap(last, self.random.below(last + 1));
                }
                let key = |j| self.drawn_key(text.bias_of(row, j), (text.score(row, j), j as i32));
                best.into_iter().map(key).enumerate().collect()
            })
            .collect();
        let slots = self.dma_slots(&text, &keys);
        let scratch = DecodeScratch::new(&slots.z, self.shape, text.kept)?;
        let mut keys = without_slots(keys);
        for _ in 0..text.steps {
            let token = self.token();
            for (row, held) in keys.iter_mut().enumerate() {
                let position = text.length(row);
                let rank = (text.score(row, position), position as i32);
                held.push(self.key_of(&token, row, text.bias_of(row, position), rank));
                if held.len() > text.kept {
                    held.swap_remove(text.evicted(held, position));
                }
            }
            let length: Vec<i32> = text.lengths.iter().map(|&length| length as i32).collect();
            let length = self.device.int(&length, &[batch]);
            let new_z: Vec<f32> = (0..keys.len()).map(|row| text.z_of(row)[text.length(row)]).collect();
            let new_z = self.device.float(&new_z, &[batch, num_kv_heads], DType::F32);
            let o = slots.dma_decode(&token.on, &new_z, &length, self.scale(), text.bias, &scratch)?;
            self.judge(&o, &token, &keys)?;
            judge_positions(&self.device.ints(&slots.positions)?, &keys, text.kept)?;
            text.lengths.iter_mut().for_each(|length| *length += 1);
        }
        Ok(())
    }

    /// The slots after a prefill on the device: `keys` lie in their slots; free slots have no score and no position.
    fn dma_slots(&self, text: &DmaText, keys: &[Vec<(usize, Key)>]) -> DmaSlots {
        let per_slot = [self.shape.batch, self.shape.num_kv_heads, text.kept];
        let mut z = vec![f32::NAN; keys.len() * text.kept];
        let mut positions = vec![-1; keys.len() * text.kept];
        for (row, keys) in keys.iter().enumerate() {
            for (slot, key) in keys {
                let at = row * text.kept + slot;
                (z[at], positions[at]) = key.rank;
            }
        }
        DmaSlots {
            kv: self.cache(text.kept, keys),
            z: self.device.float(&z, &per_slot, DType::F32),
            positions: self.device.int(&positions, &per_slot),
            local_window_size: text.local,
        }
    }
}

/// What decides which keys DMA's cache holds. A row here is one of `batch * num_kv_heads`: a text and a KV head.
struct DmaText {
    /// Slots of a row, and so the most keys that it holds.
    kept: usize,
    /// The last keys of a row, which are never evicted.
    local: usize,
    /// Tokens of each text so far.
    lengths: Vec<usize>,
    num_kv_heads: usize,
    /// Tokens that are decoded after the prompt.
    steps: usize,
    /// Scores of a row's keys, one row after the other, each of `seq_len` tokens: all that it will have.
    z: Vec<f32>,
    seq_len: usize,
    bias: ScoreBias,
}

impl DmaText {
    /// Draws how many keys stay, prompts of fewer than twice as many tokens, and the scores of all keys. With
    /// `has_local_window` some of the last keys are never evicted.
    fn draw(shape: AttentionShape, has_local_window: bool, random: &mut Random) -> Result<Self, Wrong> {
        let (batch, num_kv_heads) = (shape.batch, shape.num_kv_heads);
        let kept: usize = random.one_of(&[1, 2, 16, 17, 63, 64, 65, 200]);
        let local = if has_local_window { random.one_of(&[1, kept.div_ceil(2), kept]) } else { 0 };
        let lengths = (0..batch).map(|_| random.below(2 * kept)).collect();
        let steps = random.between(1, 8);
        let scores = &Scores::RANDOM[random.below(Scores::RANDOM.len())];
        let seq_len = 2 * kept + steps;
        let z = scores.draw(batch * num_kv_heads, seq_len, random).map_err(|e| Wrong::from(e.to_string()))?;
        let bias = [ScoreBias::Exp, ScoreBias::Linear][random.below(2)];
        Ok(Self { kept, local, lengths, num_kv_heads, steps, z, seq_len, bias })
    }

    /// Tokens of a row's text so far.
    fn length(&self, row: usize) -> usize {
        self.lengths[row / self.num_kv_heads]
    }

    /// Scores of a row's keys.
    fn z_of(&self, row: usize) -> &[f32] {
        &self.z[row * self.seq_len..][..self.seq_len]
    }

    /// Score of a row's key j as keys are ranked by it: + 0.0 turns -0 into 0, since both rank as equal.
    fn score(&self, row: usize, j: usize) -> f32 {
        self.z_of(row)[j] + 0.0
    }

    /// What key j adds to the logits of its row's queries.
    fn bias_of(&self, row: usize, j: usize) -> f32 {
        let score = self.score(row, j);
        match self.bias {
            ScoreBias::Exp => score.min(60.0).exp(),
            ScoreBias::Linear => score,
        }
    }

    /// The keys of a row's prompt that a prefill keeps: the last ones, which are in the local window, then those of the
    /// best scores; of equal scores the later key.
    fn best_of_prompt(&self, row: usize) -> Vec<usize> {
        let length = self.length(row);
        let is_older = |j: usize| j + self.local < length;
        let mut best: Vec<usize> = (0..length).collect();
        best.sort_by(|&a, &b| {
            let by_score = self.score(row, b).total_cmp(&self.score(row, a)).then(b.cmp(&a));
            is_older(a).cmp(&is_older(b)).then(by_score)
        });
        best.truncate(self.kept);
        best
    }

    /// Which of the held keys leaves for the token at `position`, which is among them: the one of the lowest score
    /// outside the local window; of equal scores the earlier key. The first one if all are in the window.
    fn evicted(&self, held: &[Key], position: usize) -> usize {
        let is_older = |at: &usize| held[*at].rank.1 as usize + self.local <= position;
        let worst = (0..held.len()).filter(is_older).min_by(|&a, &b| {
            let ((a, a_at), (b, b_at)) = (held[a].rank, held[b].rank);
            a.total_cmp(&b).then(a_at.cmp(&b_at))
        });
        worst.unwrap_or(0)
    }
}

/// Requires that the slots of each row hold the expected `keys`, in any order; keys are compared by position.
fn judge_positions(positions: &[i32], keys: &[Vec<Key>], kept: usize) -> Result<(), Wrong> {
    for (row, held) in keys.iter().enumerate() {
        let mut got = positions[row * kept..][..held.len()].to_vec();
        let mut expected: Vec<i32> = held.iter().map(|key| key.rank.1).collect();
        got.sort_unstable();
        expected.sort_unstable();
        if got != expected {
            return wrong(format!("row {row} holds {got:?}, expected {expected:?}"));
        }
    }
    Ok(())
}

/// The keys of each row and KV head alone.
fn without_slots(keys: Vec<Vec<(usize, Key)>>) -> Vec<Vec<Key>> {
    let rows = keys.into_iter();
    let of_row = |row: Vec<(usize, Key)>| row.into_iter().map(|(_, key)| key).collect();
    rows.map(of_row).collect()
}

/// Compares a cache of pooled keys, of `row_len` numbers a row, with the means of the blocks that have ended.
fn judge_means(pooled: &[f32], keys: &[Vec<Key>], blocks: NsaBlocks, row_len: usize) -> Result<(), Wrong> {
    for (row, (keys, pooled)) in keys.iter().zip(pooled.chunks_exact(row_len)).enumerate() {
        for (c, mean) in means(keys, blocks).iter().enumerate() {
            let got = &pooled[c * mean.len()..][..mean.len()];
            // Means are below 2, where bf16 numbers are 1/128 apart; the two may round to different sides.
            if !got.iter().zip(mean).all(|(a, b)| (a - b).abs() <= 1.0 / 128.0) {
                return wrong(format!("pooled key {c} of row {row} is {got:?}, expected {mean:?}"));
            }
        }
    }
    Ok(())
}

/// The mean key of each block that has ended, rounded to bf16.
fn means(keys: &[Key], blocks: NsaBlocks) -> Vec<Vec<f32>> {
    let (size, stride) = (blocks.compress_block_size, blocks.compress_stride);
    let mean = |c: usize| {
        let of_block = &keys[c * stride..][..size];
        let sum = |at: usize| of_block.iter().map(|key| f64::from(key.k[at])).sum::<f64>();
        (0..of_block[0].k.len()).map(|at| round_bf16((sum(at) / size as f64) as f32)).collect()
    };
    (0..blocks.num_compressed_blocks(keys.len())).map(mean).collect()
}

/// The keys of the blocks that the queries `q` of the last key's token choose together by the pooled keys `means`.
pub(super) fn chosen_keys(keys: &[Key], means: Vec<Vec<f32>>, q: &[f32], choice: BlockChoice, scale: f32) -> Vec<Key> {
    let blocks = choice.blocks;
    let own = (keys.len() - 1) / blocks.select_block_size;
    let scores_of = |q: &[f32]| -> Vec<f64> {
        let score = |k: &Vec<f32>| q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        means.iter().map(score).collect()
    };
    let mut scores = vec![0.0; means.len()];
    for q in q.chunks(keys[0].k.len()) {
        let row = scores_of(q);
        let most = row.iter().fold(f64::NEG_INFINITY, |most, s| s.max(most));
        let weights: Vec<f64> = row.iter().map(|s| ((s - most) * f64::from(scale)).exp()).collect();
        let total: f64 = weights.iter().sum();
        for (at, score) in scores.iter_mut().enumerate() {
            *score += match choice.rule {
                ChoiceRule::MeanKey | ChoiceRule::LargestScore => row[at],
                ChoiceRule::SumOfHeads => row[at].max(0.0),
                _ => weights[at] / total,
            };
        }
    }
    let of_block = |block: usize| -> f32 {
        let overlapping = (0..scores.len()).map(|c| (overlap_weight(blocks, c, block), scores[c]));
        let overlapping = overlapping.filter(|(weight, _)| *weight > 0);
        let score = match choice.rule {
            ChoiceRule::MeanKey | ChoiceRule::SumOfHeads => scores.get(block).copied().unwrap_or(0.0),
            ChoiceRule::WeightedProbability => overlapping.map(|(weight, p)| weight as f64 * p).sum(),
            ChoiceRule::LargestProbability => overlapping.fold(0.0, |most, (_, p)| p.max(most)),
            ChoiceRule::LargestScore => overlapping.fold(f64::NEG_INFINITY, |most, (_, score)| score.max(most)),
        };
        score as f32
    };
    let importance: Vec<f32> = (0..=own).map(of_block).collect();
    let mut chosen = vec![-1; blocks.num_selected_blocks];
    choose_blocks(&importance, own, choice.forced, &mut chosen);
    let chosen = chosen.into_iter().filter(|block| *block >= 0);
    let tokens = chosen.flat_map(|block| {
        let first = block as usize * blocks.select_block_size;
        first..(first + blocks.select_block_size).min(keys.len())
    });
    tokens.map(|token| keys[token].clone()).collect()
}
