//! Checks that a query of dynamic mask attention goes through its keys in one order, in a whole row, in new tokens
//! behind a cache and in a decoding step, and on Hopper that its output has the same bits in all three.
use crate::device::{Device, family};
use crate::error::Result;
use crate::extent::Extent;
use crate::report::{Outcome, Report, Wrong, wrong};
use sieve_core::{DmaWindow, KeepOLow};
use sieve_kernels::{
    AfterCache, AttentionNeeds, AttentionShape, CudaTensor, DType, DeviceReport, DmaSlots, KernelFamily, KernelPolicy,
    KeyLists, KeyOrder, KeySource, KvCache, NeededKernels, NeededKeys, Qkv, ScoreBias, SumOrder, dma_select,
};
use sieve_testing::Random;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Keys of a stage, and queries of an epoch.
const STAGE: usize = KeyOrder::EPOCH;

const SCALE: f32 = 0.3;

/// The kernels that these checks launch.
pub(crate) fn kernels(gpu: &DeviceReport) -> NeededKernels {
    let mut list = NeededKernels::default();
    for (width, group) in [(64, 1), (64, 2), (128, 1), (128, 2)] {
        let shape = AttentionShape::new(1, 1, [group, 1], [width; 2]);
        for bias in [ScoreBias::Exp, ScoreBias::Linear] {
            let keys = NeededKeys::Chosen(bias);
            let needs = AttentionNeeds { shape, keys, order: SumOrder::Any, has_sinks: false };
            list.extend(needs.in_order(&gpu.arch()));
        }
    }
    list
}

/// Checks random texts.
pub(crate) fn check(report: &mut Report, device: &dyn Device, extent: &Extent) -> Result<()> {
    let mut random = Random(extent.seed);
    for at in 0..extent.few().max(10) {
        let seed = random.between(0, 1 << 30) as u64;
        let text = Text::draw(at, extent, seed);
        report.add("dma, order of keys", "kernel", &text.label(seed), text.check(device));
    }
    Ok(())
}

/// The key at each place of a query's order; `None` where no key lies that it sees.
type Places = Vec<Option<i32>>;

/// A text whose last tokens are computed in three ways.
struct Text {
    shape: AttentionShape,
    window: DmaWindow,
    bias: ScoreBias,
    /// Tokens before the new ones, of the first row; later rows have fewer in a step.
    prompt: usize,
    /// Tokens that are decoded one by one.
    steps: usize,
    /// Queries, keys and values, `[batch, seq_len, num_heads + 2 num_kv_heads, head_dim]`.
    packed: Vec<f32>,
    /// Ranks of the keys, `[batch, num_kv_heads, seq_len]`.
    rank: Vec<f32>,
}

/// Ranks and lists of a row on the device.
struct Listed {
    rank: CudaTensor,
    lists: KeyLists,
    expire: Vec<i32>,
    entries: Vec<i32>,
    windows: Vec<i32>,
}

impl Listed {
    /// The keys that query `query` of row and KV head `row` sees, by place.
    fn places(&self, row: usize, query: usize) -> Places {
        let [_, _, epochs, capacity, _] = self.lists.list.shape() else { panic!("five dimensions") };
        let tiles = self.lists.tile_window.shape()[2];
        let window = (row * tiles + query / self.lists.tile_queries) * 2;
        let [begin, end] = [self.windows[window], self.windows[window + 1]].map(|x| x as usize);
        let first = (row * epochs + query / STAGE) * capacity;
        let entries = self.entries[(first + begin) * 2..(first + end) * 2].as_chunks::<2>().0;
        let seen = |&[key, expire]: &[i32; 2]| (key <= query as i32 && (query as i32) < expire).then_some(key);
        entries.iter().map(seen).collect()
    }
}

impl Text {
    /// Tokens and kept keys of text number `at`.
    fn sizes(at: usize, extent: &Extent) -> [usize; 2] {
        let long = if extent.has_long_rows() { &[300, 1025, 2500, 9000, 17_000, 140][..] } else { &[300, 140, 400] };
        let lengths = extent.pick(&[300, 430, 200, 130][..], long);
        let windows = extent.pick(&[70, 100, 5, 128][..], &[31, 128, 300, 1000, 1024, 1500, 5]);
        [lengths[at % lengths.len()], windows[at / 2 % windows.len()]]
    }

    /// Text number `at`, of other sizes than its neighbours.
    fn draw(at: usize, extent: &Extent, seed: u64) -> Self {
        let mut random = Random(seed);
        let [seq_len, kept] = Self::sizes(at, extent);
        let local = random.one_of(&[0, 0, 1, kept / 8, kept / 2, kept]);
        // The host draws every number.
        let most = if seq_len > 4000 { 2 } else { 3 };
        let kv_heads = random.between(1, most);
        let width = if extent.is_emulated { 32 } else { random.one_of(&[64, 128]) };
        let heads = [kv_heads * random.one_of(&[1, 2, 4]), kv_heads];
        let shape = AttentionShape::new(random.between(1, most), seq_len, heads, [width; 2]);
        let rising = random.one_of(&[0.0, 0.02, 1.0]);
        let steps = random.one_of(&[1.0, 4.0]);
        let rank = (0..shape.batch * kv_heads * seq_len).map(|key| {
            let z = random.normal();
            // Rounded scores tie.
            if rising == 0.0 { (z * steps).round() / steps } else { z + rising * (key % seq_len) as f32 }
        });
        let rank = rank.collect();
        let steps = seq_len.min(extent.pick(3, 40));
        let near_epoch = random.between(1, seq_len.div_ceil(STAGE) + 1) * STAGE;
        let prompt = if random.chance(0.4) { near_epoch - 1 } else { random.between(seq_len / 2, seq_len) };
        Self {
            shape,
            window: DmaWindow { keep_window_size: kept, local_window_size: local },
            bias: [ScoreBias::Linear, ScoreBias::Exp][at % 3 / 2],
            prompt: prompt.min(seq_len - steps).max(1),
            steps: steps.min(seq_len - 1),
            packed: random.bf16_normals(shape.batch * seq_len * (heads[0] + 2 * heads[1]) * width),
            rank,
        }
    }

    fn label(&self, seed: u64) -> String {
        let Self { shape, window, prompt, .. } = self;
        format!("{shape:?} {window:?} behind {prompt} tokens, seed {seed}")
    }

    fn rows(&self) -> usize {
        self.shape.batch * self.shape.num_kv_heads
    }

    /// Compares the whole row with its definition, and the other two ways with the whole row.
    fn check(&self, device: &dyn Device) -> Outcome {
        let whole = self.whole(device)?;
        self.check_whole(&whole)?;
        self.check_again(device, &whole)?;
        // Lists first: where they differ, the place says more than bits do.
        self.check_part(device, &whole, &[])?;
        self.check_steps(device, &whole, &[])?;
        if !self.has_bits(device) {
            return Ok(0.0);
        }
        let o = self.output(device, &whole)?;
        self.check_part(device, &whole, &o)?;
        self.check_steps(device, &whole, &o)
    }

    /// Whether all three ways take Hopper's kernel, so that outputs have the same bits.
    fn has_bits(&self, device: &dyn Device) -> bool {
        family(device, &self.shape, KeySource::Gathered) == KernelFamily::Hopper && self.bias == ScoreBias::Linear
    }

    /// Lists of the whole row.
    fn whole(&self, device: &dyn Device) -> Result<Listed, Wrong> {
        self.list(device, &self.rank, self.shape.seq_len, None)
    }

    /// Outputs of the whole row.
    fn output(&self, device: &dyn Device, whole: &Listed) -> Result<Vec<f32>, Wrong> {
        // Where every key is kept, whole rows take the kernel of consecutive keys.
        if self.window.keep_window_size < self.shape.seq_len {
            return self.attend(device, &self.packed, whole);
        }
        let rows = [self.shape.batch, self.shape.seq_len];
        let start = device.int(&vec![0; rows[0] * rows[1]], &rows);
        let bias = Some((&whole.rank, KeepOLow::Never));
        Ok(device.floats(&self.qkv(device, &self.packed).attention_forward(&start, None, SCALE, bias)?.o)?)
    }

    /// Compares the whole row's lists with those of more launches.
    fn check_again(&self, device: &dyn Device, whole: &Listed) -> Result<(), Wrong> {
        for again in 1..=3 {
            let other = self.whole(device)?;
            if other.expire != whole.expire {
                return wrong(format!("launch {again}: another `expire`"));
            }
            for row in 0..self.rows() {
                for query in (0..self.shape.seq_len).step_by(STAGE / 2) {
                    let sides = ("once more", "at first");
                    same(&other.places(row, query), &whole.places(row, query), row, query, sides)?;
                }
            }
        }
        Ok(())
    }

    /// Compares lists of the whole row with their definition on the host.
    fn check_whole(&self, whole: &Listed) -> Result<(), Wrong> {
        let seq_len = self.shape.seq_len;
        for row in 0..self.rows() {
            let expire = self.expire(row);
            let found = &whole.expire[row * seq_len..][..seq_len];
            if let Some(key) = (0..seq_len).find(|&key| found[key] != expire[key]) {
                let near = key.saturating_sub(8)..(key + 9).min(seq_len);
                let (found, expected) = (&found[near.clone()], &expire[near]);
                return wrong(format!("row {row}, key {key}: leaves at {found:?}, by its definition at {expected:?}"));
            }
            for query in (0..seq_len).step_by(1 + seq_len / 2000) {
                let defined = self.defined(row, &expire, query);
                same(&whole.places(row, query), &defined, row, query, ("in its whole row", "by its definition"))?;
            }
        }
        Ok(())
    }

    /// The first query that does not see each key of row and KV head `row`, by the heap that defines it.
    fn expire(&self, row: usize) -> Vec<i32> {
        let (seq_len, DmaWindow { keep_window_size, local_window_size }) = (self.shape.seq_len, self.window);
        let mut expire = vec![seq_len as i32; seq_len];
        let mut kept = BinaryHeap::new();
        for token in 0..seq_len {
            kept.push(Reverse((self.order(row, token), token)));
            if kept.len() > keep_window_size - local_window_size
                && let Some(Reverse((_, smallest))) = kept.pop()
            {
                expire[smallest] = (token + local_window_size).min(seq_len) as i32;
            }
        }
        expire
    }

    /// A number that grows with the rank of a key; -0 is 0.
    fn order(&self, row: usize, key: usize) -> i32 {
        let bits = (self.rank[row * self.shape.seq_len + key] + 0.0).to_bits() as i32;
        bits ^ (((bits >> 31) as u32) >> 1) as i32
    }

    /// The order of keys of a query by its definition (`kernels/common/epoch_order.cuh`).
    fn defined(&self, row: usize, expire: &[i32], query: usize) -> Places {
        let first = query / STAGE * STAGE;
        let local = self.window.local_window_size.next_multiple_of(STAGE);
        let near_first = if first <= self.window.keep_window_size { 0 } else { first - local };
        let sees = |key: usize| (key <= query && expire[key] > query as i32).then_some(key as i32);
        let near = (near_first..first + STAGE).step_by(STAGE).rev().flat_map(|stage| stage..stage + STAGE);
        let mut old: Vec<usize> = (0..near_first).filter(|&key| expire[key] > first as i32).collect();
        old.sort_by_key(|&key| Reverse((self.order(row, key), key)));
        near.map(|key| if key < expire.len() { sees(key) } else { None }).chain(old.into_iter().map(sees)).collect()
    }

    /// Selects keys and lists them.
    fn list(
        &self,
        device: &dyn Device,
        rank: &[f32],
        seq_len: usize,
        behind: Option<(&[i32], [usize; 3])>,
    ) -> Result<Listed, Wrong> {
        let (batch, kv_heads) = (self.shape.batch, self.shape.num_kv_heads);
        let rank = device.float(rank, &[batch, kv_heads, seq_len], DType::F32);
        let pad = behind.map_or(0, |(_, [pad, ..])| pad);
        let bounds = |of: [usize; 2]| {
            let row = (0..seq_len).map(|token| of[usize::from(token >= pad)] as i32);
            device.int(&row.collect::<Vec<_>>().repeat(batch), &[batch, seq_len])
        };
        let (start, end) = (bounds([0, pad]), bounds([pad, seq_len]));
        let selection = dma_select(&rank, &start, &end, self.window)?;
        let positions = behind.map(|(positions, _)| device.int(positions, &[batch, kv_heads, seq_len]));
        let after = positions.as_ref().zip(behind).map(|(positions, (_, [_, first_query, first_position]))| {
            AfterCache { positions, first_query, first_position }
        });
        let lists = selection.dma_ordered_lists(&rank, &start, self.window, after)?;
        Ok(Listed {
            expire: device.ints(&selection.expire)?,
            entries: device.ints(&lists.list)?,
            windows: device.ints(&lists.tile_window)?,
            rank,
            lists,
        })
    }

    /// Attention of a row of packed heads over its lists.
    fn attend(&self, device: &dyn Device, packed: &[f32], listed: &Listed) -> Result<Vec<f32>, Wrong> {
        let qkv = self.qkv(device, packed);
        let result = qkv.dma_attention_forward(&listed.rank, &listed.lists, SCALE, KeepOLow::Never)?;
        Ok(device.floats(&result.o)?)
    }

    /// Heads of rows of packed tokens.
    fn qkv(&self, device: &dyn Device, packed: &[f32]) -> Qkv {
        let AttentionShape { batch, num_heads, num_kv_heads, head_dim, .. } = self.shape;
        let heads = num_heads + 2 * num_kv_heads;
        let sizes = [batch, packed.len() / (batch * heads * head_dim), heads, head_dim];
        let policy = KernelPolicy { keys: KeyOrder::Epochs, ..KernelPolicy::default() };
        Qkv::packed(&device.float(packed, &sizes, DType::BF16), num_heads, num_kv_heads).under(policy)
    }

    /// Numbers of one head of one token, counted among queries, keys and values.
    fn head(&self, text: usize, token: usize, head: usize) -> &[f32] {
        let AttentionShape { seq_len, num_heads, num_kv_heads, head_dim, .. } = self.shape;
        let heads = num_heads + 2 * num_kv_heads;
        &self.packed[((text * seq_len + token) * heads + head) * head_dim..][..head_dim]
    }

    /// The keys of row and KV head `row` that a cache of its first `tokens` tokens holds, by rising position.
    fn held(&self, whole: &Listed, row: usize, tokens: usize) -> Vec<usize> {
        let expire = &whole.expire[row * self.shape.seq_len..];
        (0..tokens).filter(|&key| expire[key] as usize >= tokens).collect()
    }

    /// The new tokens in a row behind the keys that a cache holds.
    fn check_part(&self, device: &dyn Device, whole: &Listed, o: &[f32]) -> Result<(), Wrong> {
        let AttentionShape { batch, seq_len, num_heads, num_kv_heads, head_dim, .. } = self.shape;
        let earlier = self.prompt.min(self.window.keep_window_size);
        let pad = (self.prompt - earlier) % STAGE;
        let (first, len) = (pad + earlier, pad + earlier + seq_len - self.prompt);
        if (0..self.rows()).any(|row| self.held(whole, row, self.prompt).len() != earlier) {
            return wrong(format!("a cache of {} tokens does not hold {earlier} keys", self.prompt));
        }
        // The token of the text at each place of the row, for each KV head; `None` before the row.
        let tokens: Vec<Vec<Option<usize>>> = (0..self.rows())
            .map(|row| {
                let held = self.held(whole, row, self.prompt);
                let keys = held.into_iter().chain(self.prompt..seq_len).map(Some);
                std::iter::repeat_n(None, pad).chain(keys).collect()
            })
            .collect();
        let positions: Vec<i32> = tokens.iter().flatten().map(|token| token.map_or(0, |at| at as i32)).collect();
        let rank_of = |(row, tokens): (usize, &Vec<Option<usize>>)| -> Vec<f32> {
            tokens.iter().map(|token| token.map_or(0.0, |at| self.rank[row * seq_len + at])).collect()
        };
        let rank: Vec<f32> = tokens.iter().enumerate().flat_map(rank_of).collect();
        let part = self.list(device, &rank, len, Some((&positions, [pad, first, self.prompt])))?;
        for (row, tokens) in tokens.iter().enumerate() {
            for query in first..len {
                let places = part
                    .places(row, query)
                    .into_iter()
                    .map(|key| key.map(|key| tokens[key as usize].map_or(-1, |token| token as i32)));
                let text_query = self.prompt + query - first;
                same(&places.collect(), &whole.places(row, text_query), row, text_query, BEHIND)?;
            }
        }
        if o.is_empty() {
            return Ok(());
        }
        let mut packed = Vec::new();
        for (text, at) in (0..batch).flat_map(|text| (0..len).map(move |at| (text, at))) {
            for head in 0..num_heads + 2 * num_kv_heads {
                let kv_head = head.saturating_sub(num_heads) % num_kv_heads;
                match tokens[text * num_kv_heads + kv_head][at] {
                    Some(token) => packed.extend(self.head(text, token, head)),
                    None => packed.extend(vec![0.0; head_dim]),
                }
            }
        }
        let found = self.attend(device, &packed, &part)?;
        let width = num_heads * head_dim;
        for (text, query) in (0..batch).flat_map(|text| (first..len).map(move |query| (text, query))) {
            let token = self.prompt + query - first;
            let expected = &o[(text * seq_len + token) * width..][..width];
            if &found[(text * len + query) * width..][..width] != expected {
                return wrong(format!("row {text}, token {token} behind a cache: other bits than in its whole row"));
            }
        }
        Ok(())
    }

    /// The new tokens one by one, in rows of different lengths.
    fn check_steps(&self, device: &dyn Device, whole: &Listed, o: &[f32]) -> Outcome {
        let AttentionShape { batch, seq_len, num_heads, num_kv_heads, head_dim, .. } = self.shape;
        let kept = self.window.keep_window_size;
        let mut lengths: Vec<usize> = (0..batch).map(|text| (self.prompt - text.min(self.prompt - 1)).max(1)).collect();
        let per_slot = [batch, num_kv_heads, kept];
        let (mut z, mut positions) = (vec![f32::NAN; self.rows() * kept], vec![-1; self.rows() * kept]);
        let mut cache = [(); 2].map(|()| vec![f32::NAN; self.rows() * kept * head_dim]);
        for row in 0..self.rows() {
            let (text, kv_head) = (row / num_kv_heads, row % num_kv_heads);
            let held = self.held(whole, row, lengths[text]);
            for (at, &token) in held.iter().enumerate() {
                // In another order than that of positions.
                let slot = row * kept + (at + held.len() / 2) % held.len();
                (z[slot], positions[slot]) = (self.rank[row * seq_len + token], token as i32);
                for (part, cache) in cache.iter_mut().enumerate() {
                    let head = num_heads + part * num_kv_heads + kv_head;
                    cache[slot * head_dim..][..head_dim].copy_from_slice(self.head(text, token, head));
                }
            }
        }
        let [k, v] = cache.map(|x| device.float(&x, &[batch, num_kv_heads, kept, head_dim], DType::BF16));
        let slots = DmaSlots {
            kv: KvCache { k, v },
            z: device.float(&z, &per_slot, DType::F32),
            positions: device.int(&positions, &per_slot),
            local_window_size: self.window.local_window_size,
        };
        for _ in 0..self.steps {
            let packed: Vec<f32> = (0..batch)
                .flat_map(|text| (0..num_heads + 2 * num_kv_heads).map(move |head| (text, head)))
                .flat_map(|(text, head)| self.head(text, lengths[text], head))
                .copied()
                .collect();
            let token = self.qkv(device, &packed);
            let new_z = (0..self.rows()).map(|row| self.rank[row * seq_len + lengths[row / num_kv_heads]]);
            let new_z = device.float(&new_z.collect::<Vec<_>>(), &[batch, num_kv_heads], DType::F32);
            let length: Vec<i32> = lengths.iter().map(|&length| length as i32).collect();
            let length = device.int(&length, &[batch]);
            if o.is_empty() {
                self.check_step(device, (&slots, whole), &lengths, || {
                    let keys = slots.join_token(&token, &new_z, &length, self.bias)?;
                    Ok([device.ints(&keys.list)?, device.ints(&keys.tile_window)?])
                })?;
            } else {
                let found = slots.dma_decode_in_order(&token, &new_z, &length, SCALE, self.bias)?;
                let (found, width) = (device.floats(&found)?, num_heads * head_dim);
                for (text, &query) in lengths.iter().enumerate() {
                    if found[text * width..][..width] != o[(text * seq_len + query) * width..][..width] {
                        return wrong(format!("row {text}, token {query}: other bits than in its whole row"));
                    }
                }
            }
            lengths.iter_mut().for_each(|length| *length += 1);
        }
        Ok(0.0)
    }

    /// One token of each text, whose position is the text's length.
    fn check_step(
        &self,
        device: &dyn Device,
        (slots, whole): (&DmaSlots, &Listed),
        lengths: &[usize],
        list: impl FnOnce() -> Result<[Vec<i32>; 2], Wrong>,
    ) -> Result<(), Wrong> {
        let [entries, windows] = list()?;
        let positions = device.ints(&slots.positions)?;
        let (capacity, kept) = (entries.len() / 2 / self.rows(), self.window.keep_window_size);
        for row in 0..self.rows() {
            let query = lengths[row / self.shape.num_kv_heads];
            let listed = &entries[row * capacity * 2..][..windows[row * 2 + 1] as usize * 2];
            let position = |&[slot, sees]: &[i32; 2]| (sees > 0).then(|| positions[row * kept + slot as usize]);
            let places: Places = listed.as_chunks::<2>().0.iter().map(position).collect();
            same(&places, &whole.places(row, query), row, query, STEP)?;
        }
        Ok(())
    }
}

/// What is compared, and with what.
type Sides = (&'static str, &'static str);

const BEHIND: Sides = ("behind a cache", "in its whole row");
const STEP: Sides = ("in a step", "in its whole row");

/// Fails where two orders differ in more than stages without a key at their ends.
fn same(found: &Places, expected: &Places, row: usize, query: usize, sides: Sides) -> Result<(), Wrong> {
    let stages = |places: &Places| {
        let used = places.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
        let mut places = places[..used].to_vec();
        places.resize(used.next_multiple_of(STAGE), None);
        places
    };
    let (found, expected) = (stages(found), stages(expected));
    let Some(at) = (0..found.len().max(expected.len())).find(|&at| found.get(at) != expected.get(at)) else {
        return Ok(());
    };
    // With eight neighbours; a place without a key is a point.
    let near = |places: &Places| {
        let places = places.iter().enumerate().skip(at.saturating_sub(8)).take(8 + at.min(8) + 1);
        let word = |(place, key): (usize, &Option<i32>)| {
            let key = key.map_or(".".to_owned(), |key| key.to_string());
            if place == at { format!("[{key}]") } else { key }
        };
        places.map(word).collect::<Vec<_>>().join(" ")
    };
    let (how, other) = sides;
    let (found, expected) = (near(&found), near(&expected));
    wrong(format!("row {row}, token {query} {how}: place {at} has {found}, {other} {expected}"))
}
