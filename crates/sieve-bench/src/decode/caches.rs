//! Decoding against caches that some prefill left: rows of different length, several splits, NaN wherever a kernel
//! has no business, DMA's slots in any order, groups of more query heads than a block has rows.
use crate::bar::Bar;
use crate::device::Device;
use crate::extent::Extent;
use crate::reference::{Rounding, one_query};
use crate::report::Report;
use crate::scores::Scores;
use crate::shape::{attention_shape, sizes};
use burn::tensor::DType;
use sieve_kernels::{
    AttentionShape, CudaTensor, DecodeScratch, DecodeStep, DmaSlots, KernelError, KvCache, Qkv, ScoreBias,
};
use sieve_testing::Random;

/// One key as a query meets it.
struct Key {
    k: Vec<f32>,
    v: Vec<f32>,
    bias: f32,
    /// Score and position of DMA.
    rank: (f32, i32),
}

/// Checks both kernels.
pub(super) fn check(report: &mut Report, device: &dyn Device, extent: &Extent) {
    let mut random = Random(extent.seed);
    let groups: &[usize] = if extent.is_emulated {
        &[2, 17]
    } else {
        &[1, 2, 3, 8, 16, 17]
    };
    // Blocks of eight warps, of two, and of four where a block may have 99 KiB.
    let emulated_widths = [32, 256, 64];
    // Two of the rarest kind at least: with a single slot, any weights would do.
    for at in 0..extent.few().max(12) {
        let (head_dim, head_dim_v) = match extent.is_emulated {
            true => [emulated_widths[at / 4 % 3]; 2].into(),
            false => random.one_of(extent.widths),
        };
        let (kv_heads, group) = (random.between(1, 4), random.one_of(groups));
        let shape = attention_shape(
            random.between(1, 4),
            1,
            [kv_heads * group, kv_heads],
            [head_dim, head_dim_v],
        );
        let seed = random.between(0, 1 << 30) as u64;
        let mut calls = Calls {
            device,
            shape,
            random: Random(seed),
            worst: 0.0,
        };
        let (name, outcome) = match at % 4 {
            0 | 2 => ("decode, caches", calls.dense()),
            1 => ("dma_decode, caches", calls.dma(false)),
            _ => ("dma_decode, local window, caches", calls.dma(true)),
        };
        report.add(
            name,
            "kernel",
            &format!("{shape:?} seed {seed}"),
            outcome.map(|()| calls.worst),
        );
    }
}

struct Calls<'a> {
    device: &'a dyn Device,
    shape: AttentionShape,
    random: Random,
    worst: f32,
}

/// A new token of every row: the tensors, and q, k and v on the host.
struct Token {
    on: Qkv,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Calls<'_> {
    fn scale(&self) -> f32 {
        1.0 / (self.shape.head_dim as f32).sqrt()
    }

    fn token(&mut self) -> Token {
        let [batch, _, num_heads, num_kv_heads, head_dim, head_dim_v] = sizes(self.shape);
        let mut draw = |heads: usize, width: usize| {
            let values = self.random.bf16_normals(batch * heads * width);
            let on = self.device.float(&values, &[batch, 1, heads, width], DType::BF16);
            (values, on)
        };
        let ((q, q_on), (k, k_on)) = (draw(num_heads, head_dim), draw(num_kv_heads, head_dim));
        let (v, v_on) = draw(num_kv_heads, head_dim_v);
        Token {
            on: Qkv::separate(&q_on, &k_on, &v_on),
            q,
            k,
            v,
        }
    }

    /// The new key of a row and KV head.
    fn key_of(&self, token: &Token, row: usize, bias: f32, rank: (f32, i32)) -> Key {
        let (head_dim, head_dim_v) = (self.shape.head_dim, self.shape.head_dim_v);
        Key {
            k: token.k[row * head_dim..][..head_dim].to_vec(),
            v: token.v[row * head_dim_v..][..head_dim_v].to_vec(),
            bias,
            rank,
        }
    }

    /// Compares the output of every query head with attention over the keys of its row and KV head.
    fn judge(&mut self, o: &CudaTensor, token: &Token, keys: &[Vec<Key>]) -> Result<(), String> {
        let (num_heads, head_dim) = (self.shape.num_heads, self.shape.head_dim);
        let (group, scale) = (self.shape.group_size(), self.scale());
        let got = self.device.floats(o).map_err(text)?;
        let (mut exact, mut plain) = (Vec::new(), Vec::new());
        for (at, q) in token.q.chunks_exact(head_dim).enumerate() {
            let row = at / num_heads * self.shape.num_kv_heads + at % num_heads / group;
            let of = |values: fn(&Key) -> &[f32]| keys[row].iter().flat_map(values).copied();
            let (k, v): (Vec<f32>, Vec<f32>) = (of(|key| &key.k).collect(), of(|key| &key.v).collect());
            let delta: Vec<f32> = keys[row].iter().map(|key| key.bias).collect();
            let o = |rounding| one_query(q, &k, &v, &delta, scale, rounding);
            exact.extend(o(Rounding::None));
            plain.extend(o(Rounding::Bf16));
        }
        let bar = Bar::new(2.0, Bar::FLOOR, 1.0 / 256.0);
        self.worst = self.worst.max(bar.judge("o", &got, &plain, &exact)?);
        Ok(())
    }

    fn dense(&mut self) -> Result<(), String> {
        let [batch, _, _, num_kv_heads, head_dim, head_dim_v] = sizes(self.shape);
        let capacity = self.random.between(1, 700);
        let window = self.random.chance(0.5).then(|| self.random.between(1, capacity + 1));
        let lengths: Vec<usize> = (0..batch).map(|_| self.random.below(capacity)).collect();
        let rows = batch * num_kv_heads;
        let first = |row: usize| {
            let seen = lengths[row / num_kv_heads] + 1;
            seen - seen.min(window.unwrap_or(seen))
        };
        let mut k = vec![f32::NAN; rows * capacity * head_dim];
        let mut v = vec![f32::NAN; rows * capacity * head_dim_v];
        let mut keys: Vec<Vec<Key>> = Vec::new();
        for row in 0..rows {
            let mut seen = Vec::new();
            for slot in first(row)..lengths[row / num_kv_heads] {
                let key = Key {
                    k: self.random.bf16_normals(head_dim),
                    v: self.random.bf16_normals(head_dim_v),
                    bias: 0.0,
                    rank: (0.0, 0),
                };
                let at = row * capacity + slot;
                k[at * head_dim..][..head_dim].copy_from_slice(&key.k);
                v[at * head_dim_v..][..head_dim_v].copy_from_slice(&key.v);
                seen.push(key);
            }
            keys.push(seen);
        }
        let token = self.token();
        for (row, keys) in keys.iter_mut().enumerate() {
            keys.push(self.key_of(&token, row, 0.0, (0.0, 0)));
        }
        let on = |values: &[f32], width: usize| {
            self.device
                .float(values, &[batch, num_kv_heads, capacity, width], DType::BF16)
        };
        let cache = KvCache {
            k: on(&k, head_dim),
            v: on(&v, head_dim_v),
        };
        let scratch = DecodeScratch::new(&cache.k, self.shape, capacity).map_err(text)?;
        let length: Vec<i32> = lengths.iter().map(|&length| length as i32).collect();
        let length = self.device.int(&length, &[batch]);
        let step = DecodeStep {
            window,
            softmax_scale: self.scale(),
            max_length: lengths.iter().copied().max().unwrap_or(0),
        };
        // Twice: the second call finds the counters of the splits at zero, and writes the same key again.
        for _ in 0..2 {
            let o = cache
                .attention_decode(&token.on, &length, step, &scratch)
                .map_err(text)?;
            self.judge(&o, &token, &keys)?;
        }
        let after = self.device.floats(&cache.k).map_err(text)?;
        for row in 0..rows {
            let at = (row * capacity + lengths[row / num_kv_heads]) * head_dim;
            if after[at..at + head_dim] != token.k[row * head_dim..][..head_dim] {
                return Err(format!("the new key of row {row} is not in the cache"));
            }
        }
        Ok(())
    }

    /// Some tokens after a prefill, against slots of which the last of the row keep theirs where `has_local_window`.
    fn dma(&mut self, has_local_window: bool) -> Result<(), String> {
        let [batch, _, _, num_kv_heads, head_dim, head_dim_v] = sizes(self.shape);
        let kept: usize = self.random.one_of(&[1, 2, 16, 17, 63, 64, 65, 200]);
        let local = match has_local_window {
            true => self.random.one_of(&[1, kept.div_ceil(2), kept]),
            false => 0,
        };
        let rows = batch * num_kv_heads;
        let mut lengths: Vec<usize> = (0..batch).map(|_| self.random.below(2 * kept)).collect();
        let steps = self.random.between(1, 8);
        let scores = &Scores::RANDOM[self.random.below(Scores::RANDOM.len())];
        let seq_len = 2 * kept + steps;
        let z = scores
            .draw(rows, seq_len, &mut self.random)
            .map_err(|e| e.to_string())?;
        // Slots as a prefill may leave them, in any order.
        let mut k = vec![f32::NAN; rows * kept * head_dim];
        let mut v = vec![f32::NAN; rows * kept * head_dim_v];
        let mut slot_z = vec![f32::NAN; rows * kept];
        let mut slot_position = vec![-1; rows * kept];
        let mut keys: Vec<Vec<Key>> = Vec::new();
        for row in 0..rows {
            let score = |j: usize| z[row * seq_len + j] + 0.0;
            let length = lengths[row / num_kv_heads];
            let mut best: Vec<usize> = (0..length).collect();
            let is_older = |j: usize| j + local < length;
            best.sort_by(|&a, &b| {
                let by_score = score(b).total_cmp(&score(a)).then(b.cmp(&a));
                is_older(a).cmp(&is_older(b)).then(by_score)
            });
            best.truncate(kept);
            for last in (1..best.len()).rev() {
                best.swap(last, self.random.below(last + 1));
            }
            let mut held = Vec::new();
            for (slot, &j) in best.iter().enumerate() {
                let key = Key {
                    k: self.random.bf16_normals(head_dim),
                    v: self.random.bf16_normals(head_dim_v),
                    bias: score(j).min(60.0).exp(),
                    rank: (score(j), j as i32),
                };
                let at = row * kept + slot;
                k[at * head_dim..][..head_dim].copy_from_slice(&key.k);
                v[at * head_dim_v..][..head_dim_v].copy_from_slice(&key.v);
                (slot_z[at], slot_position[at]) = key.rank;
                held.push(key);
            }
            keys.push(held);
        }
        let per_slot = [batch, num_kv_heads, kept];
        let on = |values: &[f32], width: usize| {
            self.device
                .float(values, &[batch, num_kv_heads, kept, width], DType::BF16)
        };
        let slots = DmaSlots {
            kv: KvCache {
                k: on(&k, head_dim),
                v: on(&v, head_dim_v),
            },
            z: self.device.float(&slot_z, &per_slot, DType::F32),
            positions: self.device.int(&slot_position, &per_slot),
            local_window_size: local,
        };
        let scratch = DecodeScratch::new(&slots.z, self.shape, kept).map_err(text)?;
        for _ in 0..steps {
            let token = self.token();
            let mut new_z = Vec::new();
            for (row, held) in keys.iter_mut().enumerate() {
                let position = lengths[row / num_kv_heads];
                let score = z[row * seq_len + position];
                new_z.push(score);
                let score = score + 0.0;
                held.push(self.key_of(&token, row, score.min(60.0).exp(), (score, position as i32)));
                if held.len() > kept {
                    let rank = |at: &usize| held[*at].rank;
                    let older = (0..held.len()).filter(|at| rank(at).1 as usize + local <= position);
                    let worst = older.min_by(|a, b| rank(a).0.total_cmp(&rank(b).0).then(rank(a).1.cmp(&rank(b).1)));
                    held.swap_remove(worst.unwrap_or(0));
                }
            }
            let length: Vec<i32> = lengths.iter().map(|&length| length as i32).collect();
            let o = slots
                .dma_decode(
                    &token.on,
                    &self.device.float(&new_z, &[batch, num_kv_heads], DType::F32),
                    &self.device.int(&length, &[batch]),
                    self.scale(),
                    ScoreBias::Exp,
                    &scratch,
                )
                .map_err(text)?;
            self.judge(&o, &token, &keys)?;
            let positions = self.device.ints(&slots.positions).map_err(text)?;
            for (row, held) in keys.iter().enumerate() {
                let mut got = positions[row * kept..][..held.len()].to_vec();
                let mut expected: Vec<i32> = held.iter().map(|key| key.rank.1).collect();
                got.sort_unstable();
                expected.sort_unstable();
                if got != expected {
                    return Err(format!("row {row} holds {got:?}, expected {expected:?}"));
                }
            }
            lengths.iter_mut().for_each(|length| *length += 1);
        }
        Ok(())
    }
}

fn text(error: KernelError) -> String {
    error.to_string()
}
