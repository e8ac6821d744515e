//! Checks that a token of a kind that chooses blocks has the choice and the bits of its whole row, in a decoding
//! step in rows of different lengths and in new tokens behind a cache: by each family of kernels, since both have whole
//! rows' own.
use crate::device::{Device, family, family_name};
use crate::error::Result;
use crate::extent::Extent;
use crate::report::{Outcome, Report, Wrong, wrong};
use sieve_core::{BlockChoice, ChoiceRule, ForcedBlocks, NsaBlocks};
use sieve_kernels::step::QkNormRope;
use sieve_kernels::{
    AttendedBlocks, AttentionNeeds, AttentionShape, CudaTensor, DType, DecodeScratch, DecodeStep, DeviceReport, Heads,
    IndexedToken, KernelPolicy, KeyOrder, KeySource, KvCache, NeededKernels, NeededKeys, PooledStep, Qkv, SumOrder,
    TokenRotation, nsa_mean_pool,
};
use sieve_testing::Random;

pub(crate) const SCALE: f32 = 0.3;
const EPSILON: f32 = 1e-6;

/// Tokens of a block, and blocks that a query reads.
const BLOCKS: &[[usize; 2]] = &[[16, 4], [64, 3], [128, 2], [16, 1], [32, 16], [64, 33]];

/// The rules that choose blocks in one order.
const RULES: [(&str, ChoiceRule); 3] = [
    ("by scores", ChoiceRule::LargestScore),
    ("by mean keys", ChoiceRule::MeanKey),
    ("by probabilities", ChoiceRule::LargestProbability),
];

/// Tokens of the rows on a GPU. With blocks of 16 the choice of the first takes a thread block for each query.
const ROWS: &[usize] = &[17_200, 700, 3000, 129, 9000, 1025];

/// The kernels that these checks launch.
pub(crate) fn kernels(gpu: &DeviceReport) -> NeededKernels {
    let mut list = NeededKernels::default();
    for width in [64, 128] {
        for group in [1, 2, 4] {
            let shape = AttentionShape::new(1, 1, [group, 1], [width; 2]);
            let needs = AttentionNeeds { shape, keys: NeededKeys::Blocks, order: SumOrder::Any, has_sinks: false };
            list.extend(needs.kernels(&gpu.arch()));
            list.extend(needs.in_order(&gpu.arch()));
        }
    }
    list
}

/// Checks random texts.
pub(crate) fn check(report: &mut Report, device: &dyn Device, extent: &Extent) -> Result<()> {
    let mut random = Random(extent.seed ^ 0x006d_7361); // "msa" in ASCII: other numbers than the other checks draw
    for at in 0..RULES.len() * extent.pick(extent.few(), extent.few().max(12)) {
        let seed = random.between(0, 1 << 30) as u64;
        let (kind, rule) = RULES[at % RULES.len()];
        let text = Text::draw(at / RULES.len(), rule, extent, seed);
        let (path, label) = (family_name(family(device, &text.shape, KeySource::Gathered)), text.label(seed));
        match text.whole(device) {
            Ok(whole) => {
                // Each is compared whatever the one before it gave: a choice says more than bits do.
                let mut outcomes = vec![
                    ("choice of a step", text.check_steps(device, &whole, Compared::Choices)),
                    ("bits of a step", text.check_steps(device, &whole, Compared::Bits)),
                    ("bits behind a cache", text.check_part(device, &whole)),
                ];
                if !rule.takes_scores() {
                    // Only nearly equal blocks change places with the last bit of a log-sum-exp.
                    outcomes.push(("log-sum-exps of a step", text.check_steps(device, &whole, Compared::LogSums)));
                }
                for (name, outcome) in outcomes {
                    report.add(&format!("{kind}, {name}"), path, &label, outcome);
                }
            }
            Err(error) => report.add(&format!("{kind}, a whole row"), path, &label, Err(error)),
        }
    }
    Ok(())
}

/// What steps are compared by.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Compared {
    Choices,
    Bits,
    LogSums,
}

/// Numbers of heads, `[batch, seq_len, heads, head_dim]`.
#[derive(Clone)]
pub(crate) struct Packed {
    pub(crate) values: Vec<f32>,
    pub(crate) sizes: [usize; 4],
}

impl Packed {
    /// Heads `heads` of token `at(row)` of each row.
    pub(crate) fn token(&self, at: &[usize], heads: std::ops::Range<usize>) -> Vec<f32> {
        let [_, seq_len, all, width] = self.sizes;
        let of_row = |(row, &at): (usize, &usize)| {
            let token = &self.values[(row * seq_len + at) * all * width..][..all * width];
            token[heads.start * width..heads.end * width].to_vec()
        };
        at.iter().enumerate().flat_map(of_row).collect()
    }

    /// The cache of heads `heads`, `[batch, heads, capacity, head_dim]`, with NaN from each row's length on.
    pub(crate) fn cache(&self, lengths: &[usize], heads: std::ops::Range<usize>, capacity: usize) -> Vec<f32> {
        let [_, seq_len, all, width] = self.sizes;
        let mut cache = Vec::new();
        for (row, &length) in lengths.iter().enumerate() {
            for head in heads.clone() {
                for token in 0..length {
                    cache.extend(&self.values[((row * seq_len + token) * all + head) * width..][..width]);
                }
                cache.resize(cache.len() + (capacity - length) * width, f32::NAN);
            }
        }
        cache
    }
}

/// A text whose tokens are computed in whole rows, in steps and behind a cache.
struct Text {
    shape: AttentionShape,
    choice: BlockChoice,
    /// Tokens before the first step, of each row.
    lengths: Vec<usize>,
    steps: usize,
    /// Queries, keys and values before norms and rotation.
    qkv: Packed,
    /// The indexer's queries and its key, twice, before norms and rotation.
    index: Packed,
    /// Weights of the norms: of queries, of keys, of the indexer's queries, of its key.
    weights: [Vec<f32>; 4],
    /// Cosines, then sines.
    tables: [Vec<f32>; 2],
}

/// A whole row's results, and its heads as they are cached.
struct Whole {
    qkv: Packed,
    index: Packed,
    /// The blocks that each token chose, `[batch, seq_len, choosers, num_selected_blocks]`.
    chosen: Vec<i32>,
    /// `[batch, seq_len, num_heads, head_dim]`.
    o: Vec<f32>,
    /// Of rules by probabilities, `[batch, num_heads, seq_len]`.
    log_sums: Option<Vec<f32>>,
}

impl Text {
    /// Text number `at`, of other sizes than its neighbours.
    fn draw(at: usize, rule: ChoiceRule, extent: &Extent, seed: u64) -> Self {
        let mut random = Random(seed);
        let rows = extent.pick(&[150, 70, 260][..], if extent.has_long_rows() { ROWS } else { &[150, 700] });
        let sizes = extent.pick(&[[16, 4], [32, 3], [16, 2], [64, 2], [16, 3], [128, 2]][..], BLOCKS);
        // After each turn rows meet the sizes after theirs.
        let (seq_len, [size, count]) = (rows[at % rows.len()], sizes[(at + at / sizes.len()) % sizes.len()]);
        let width = extent.pick(64, random.one_of(&[64, 128]));
        // The host draws every number.
        let is_long = seq_len > 4000;
        let most = if is_long || extent.is_emulated { 2 } else { 3 };
        let fewest = if extent.is_emulated { 2 } else { 1 };
        let (batch, kv_heads) =
            (random.between(1, most + 1), if is_long { 1 } else { random.between(fewest, most + 1) });
        let group = if extent.is_emulated { 2 } else { random.one_of(&[1, 2, 4]) };
        let shape = AttentionShape::new(batch, seq_len, [group * kv_heads, kv_heads], [width; 2]);
        let local = if random.chance(0.3) { count.min(2) } else { 1 };
        let choice = BlockChoice {
            blocks: NsaBlocks::of(match rule {
                ChoiceRule::MeanKey => [size, size, size, count],
                // Blocks of four strides, which Hopper has kernels for, and of eight.
                ChoiceRule::LargestProbability if at.is_multiple_of(2) => [size / 2, size / 4, size, count],
                ChoiceRule::LargestProbability => [size / 4, size / 8, size, count],
                _ => [1, 1, size, count],
            }),
            rule,
            // A block that is forced leaves others to choose.
            forced: ForcedBlocks { first: rule == ChoiceRule::LargestProbability && local + 1 < count, local },
        };
        let steps = extent.pick(3, 20).min(seq_len);
        // Rows begin at an edge of a block or of 128 keys, before it, at the first token or anywhere; the first far
        // enough for a choice.
        let lengths = (0..batch).map(|row| {
            let any = random.between(seq_len / 2, seq_len);
            let edge = any / size * size;
            let places = [any, edge + size - 1, any, edge, any / 128 * 128, 0, seq_len];
            random.one_of(&places[..if row == 0 { 2 } else { places.len() }]).min(seq_len - steps)
        });
        let lengths = lengths.collect();
        let mut heads = |count: usize| {
            let sizes = [batch, seq_len, count, width];
            Packed { values: random.bf16_normals(sizes.iter().product()), sizes }
        };
        let (mut qkv, mut index) = (heads(group * kv_heads + 2 * kv_heads), heads(kv_heads + 1));
        let is_still = at % 4 == 3;
        if is_still {
            // Keys, or means of blocks, that come again tie, where nothing rotates them.
            let (scored, first, keys, again) = match rule {
                ChoiceRule::MeanKey | ChoiceRule::LargestProbability => {
                    (&mut qkv, group * kv_heads, kv_heads, 3 * size)
                }
                _ => (&mut index, kv_heads, 1, 37),
            };
            let row = scored.sizes[2] * width;
            for at in (0..batch * seq_len).filter(|at| at % seq_len >= again) {
                let key = (at * row + first * width)..(at * row + (first + keys) * width);
                scored.values.copy_within(key.start - again * row..key.end - again * row, key.start);
            }
        }
        let weights = [(); 4].map(|()| random.bf16_normals(width).iter().map(|x| 1.0 + x * 0.125).collect());
        let angle = |at: usize| {
            let (position, pair) = ((at / (width / 2)) as f32, (at % (width / 2)) as f32);
            if is_still { 0.0 } else { position * 10_000f32.powf(-2.0 * pair / width as f32) }
        };
        let tables = [f32::cos, f32::sin].map(|of| (0..seq_len * width / 2).map(|at| of(angle(at))).collect());
        Self { shape, choice, lengths, steps, qkv, index, weights, tables }
    }

    fn label(&self, seed: u64) -> String {
        let Self { shape, choice, lengths, .. } = self;
        format!("{shape:?} {:?} {:?} behind {lengths:?} tokens, seed {seed}", choice.blocks, choice.forced)
    }

    fn tables(&self, device: &dyn Device) -> [CudaTensor; 2] {
        let sizes = [self.shape.seq_len, self.shape.head_dim / 2];
        self.tables.each_ref().map(|table| device.float(table, &sizes, DType::F32))
    }

    fn weights(&self, device: &dyn Device) -> [CudaTensor; 4] {
        self.weights.each_ref().map(|weight| device.float(weight, &[self.shape.head_dim], DType::BF16))
    }

    /// Heads of whole rows, normed and rotated.
    fn rotated(
        &self,
        device: &dyn Device,
        packed: &Packed,
        [q_weight, k_weight]: [&CudaTensor; 2],
        num_kv_heads: usize,
    ) -> Result<CudaTensor, Wrong> {
        let [batch, seq_len, ..] = packed.sizes;
        let positions: Vec<i32> = (0..batch * seq_len).map(|at| (at % seq_len) as i32).collect();
        let (positions, [cos, sin]) = (device.int(&positions, &[batch, seq_len]), self.tables(device));
        let positions = &positions;
        let call = QkNormRope { q_weight, k_weight, positions, cos: &cos, sin: &sin, num_kv_heads, epsilon: EPSILON };
        let x = device.float(&packed.values, &packed.sizes, DType::BF16);
        Ok(call.qk_norm_rope_forward(&x)?)
    }

    /// Bounds of documents that are whole rows.
    fn bounds(&self, device: &dyn Device) -> [CudaTensor; 2] {
        let AttentionShape { batch, seq_len, .. } = self.shape;
        [0, seq_len as i32].map(|bound| device.int(&vec![bound; batch * seq_len], &[batch, seq_len]))
    }

    /// Choice and output of whole rows, as a layer computes them, of the tokens from `first` on.
    fn attend(
        &self,
        device: &dyn Device,
        [qkv, index]: [&Packed; 2],
        first: usize,
    ) -> Result<(Vec<i32>, Vec<f32>), Wrong> {
        let AttentionShape { batch, seq_len, num_heads, num_kv_heads, head_dim, .. } = self.shape;
        let (bounds, choosers) = (self.bounds(device), self.choosers());
        let scored = if self.choice.has_indexer() { index } else { qkv };
        let scored = in_epochs(device.float(&scored.values, &scored.sizes, DType::BF16));
        let pooled = if self.choice.has_indexer() {
            // The pooled keys of tokens, and values that are not read.
            let at: Vec<f32> = (0..batch * seq_len)
                .flat_map(|token| &index.values[(token * (num_kv_heads + 2) + num_kv_heads) * head_dim..][..head_dim])
                .copied()
                .collect();
            device.float(&[&at[..], &vec![f32::NAN; at.len()]].concat(), &[2, batch * seq_len, head_dim], DType::BF16)
        } else {
            self.means(device, &scored)?
        };
        let queries = Heads::some(&scored, 0, self.choice.scored_heads([num_heads, num_kv_heads])[0]);
        let chosen = queries.choose_key_blocks_of_last(bounds.each_ref(), &pooled, self.choice, SCALE, first)?;
        let mut chosen = device.ints(&chosen)?;
        let count = self.choice.blocks.num_selected_blocks;
        for (list, blocks) in chosen.chunks_exact_mut(count).enumerate() {
            if list / choosers % seq_len < first {
                blocks.fill(-1);
            }
        }
        let (pieces, size) = (self.choice.pieces() as i32, self.choice.attended().select_block_size as i32);
        let lists = chosen.chunks_exact(count).enumerate();
        let attended: Vec<i32> = lists
            .flat_map(|(list, blocks)| {
                let own = (list / choosers % seq_len) as i32 / size;
                blocks.iter().flat_map(move |&block| {
                    (0..pieces).map(move |piece| {
                        let piece = block * pieces + piece;
                        if block < 0 || piece > own { -1 } else { piece }
                    })
                })
            })
            .collect();
        let sizes = [batch, seq_len, choosers, count * pieces as usize];
        // As in a layer, each chooser has keys and values of its own.
        let repeated = |token: &[f32]| {
            let (q, kv) = token.split_at(num_heads * head_dim);
            let heads = kv.chunks_exact(head_dim).flat_map(|head| vec![head; choosers / num_kv_heads]);
            [q].into_iter().chain(heads).flatten().copied().collect::<Vec<_>>()
        };
        let values: Vec<f32> = qkv.values.chunks_exact(qkv.sizes[2] * head_dim).flat_map(repeated).collect();
        let qkv = in_epochs(device.float(&values, &[batch, seq_len, num_heads + 2 * choosers, head_dim], DType::BF16));
        let qkv = Qkv::packed(&qkv, num_heads, choosers);
        let attended = device.int(&attended, &sizes);
        let in_pairs = self.choice.in_pairs();
        let blocks = AttendedBlocks { indices: &attended, size: size as usize, in_pairs };
        let (result, _) = qkv.nsa_selected_attention_forward(bounds.each_ref(), blocks, SCALE)?;
        Ok((chosen, device.floats(&result.o)?))
    }

    /// Lists of blocks that a token chooses.
    fn choosers(&self) -> usize {
        self.choice.choices_per_token([self.shape.num_heads, self.shape.num_kv_heads])
    }

    /// Means of the keys, then of the values, of whole rows of packed heads.
    fn means(&self, device: &dyn Device, qkv: &CudaTensor) -> Result<CudaTensor, Wrong> {
        let qkv = Qkv::packed(qkv, self.shape.num_heads, self.shape.num_kv_heads);
        Ok(nsa_mean_pool([&qkv.k, &qkv.v], self.bounds(device).each_ref(), self.choice.blocks)?)
    }

    /// The keys by which a step chooses blocks: the keys of each row's first `lengths` tokens, then NaN.
    fn choice_keys(
        &self,
        device: &dyn Device,
        whole: &Whole,
        lengths: &[usize],
        capacity: usize,
    ) -> Result<CudaTensor, Wrong> {
        let AttentionShape { batch, seq_len, num_kv_heads, head_dim, .. } = self.shape;
        if self.choice.has_indexer() {
            let keys = whole.index.cache(lengths, num_kv_heads..num_kv_heads + 1, capacity);
            return Ok(device.float(&keys, &[batch, 1, capacity, head_dim], DType::BF16));
        }
        let qkv = device.float(&whole.qkv.values, &whole.qkv.sizes, DType::BF16);
        let (slots, room) = (self.choice.blocks.num_slots(seq_len), self.choice.blocks.num_slots(capacity));
        let means = device.floats(&self.means(device, &qkv)?)?;
        let means = Packed { values: means[..means.len() / 2].to_vec(), sizes: [batch, slots, num_kv_heads, head_dim] };
        let ended: Vec<_> = lengths.iter().map(|&tokens| self.choice.blocks.num_compressed_blocks(tokens)).collect();
        let keys = means.cache(&ended, 0..num_kv_heads, room);
        Ok(device.float(&keys, &[batch, num_kv_heads, room, head_dim], DType::BF16))
    }

    /// Whole rows.
    fn whole(&self, device: &dyn Device) -> Result<Whole, Wrong> {
        let AttentionShape { num_kv_heads, head_dim, .. } = self.shape;
        let [q, k, index_q, index_k] = self.weights(device);
        let rotated = self.rotated(device, &self.qkv, [&q, &k], num_kv_heads)?;
        let qkv = Packed { values: device.floats(&rotated)?, ..self.qkv };
        // A layer repeats the indexer's key as its value.
        let of_token = |token: &[f32]| [token, &token[num_kv_heads * head_dim..]].concat();
        let values = self.index.values.chunks_exact((num_kv_heads + 1) * head_dim).flat_map(of_token).collect();
        let [batch, seq_len, ..] = self.index.sizes;
        let repeated = Packed { values, sizes: [batch, seq_len, num_kv_heads + 2, head_dim] };
        let rotated = self.rotated(device, &repeated, [&index_q, &index_k], 1)?;
        let index = Packed { values: device.floats(&rotated)?, ..repeated };
        let first = 0;
        let (chosen, o) = self.attend(device, [&qkv, &index], first)?;
        let log_sums = if self.choice.rule.takes_scores() {
            None
        } else {
            let packed = device.float(&qkv.values, &qkv.sizes, DType::BF16);
            let (queries, pooled) = (Heads::some(&packed, 0, self.shape.num_heads), self.means(device, &packed)?);
            let bounds = self.bounds(device);
            Some(device.floats(&queries.pooled_log_sums(bounds.each_ref(), &pooled, self.choice, SCALE)?)?)
        };
        Ok(Whole { qkv, index, chosen, o, log_sums })
    }

    /// The last tokens of the rows, with queries of zero before them, as a layer computes several tokens behind a
    /// cache.
    fn check_part(&self, device: &dyn Device, whole: &Whole) -> Outcome {
        let AttentionShape { batch, seq_len, num_heads, num_kv_heads, head_dim, .. } = self.shape;
        let first = self.lengths[0].min(seq_len - 1);
        let (mut qkv, mut index) = (whole.qkv.clone(), whole.index.clone());
        for (packed, queries) in [(&mut qkv, num_heads), (&mut index, num_kv_heads)] {
            let [.., heads, width] = packed.sizes;
            let tokens = packed.values.chunks_exact_mut(heads * width).enumerate();
            tokens.filter(|(at, _)| at % seq_len < first).for_each(|(_, token)| token[..queries * width].fill(0.0));
        }
        let (chosen, o) = self.attend(device, [&qkv, &index], first)?;
        let (lists, width) = (chosen.len() / (batch * seq_len), num_heads * head_dim);
        for at in (0..batch * seq_len).filter(|at| at % seq_len >= first) {
            let token = at % seq_len;
            same_choice(&chosen[at * lists..][..lists], &whole.chosen[at * lists..][..lists], at / seq_len, token)?;
            same_bits(&o[at * width..][..width], &whole.o[at * width..][..width], at / seq_len, token)?;
        }
        Ok(0.0)
    }

    /// Tokens one by one, in rows of different lengths.
    fn check_steps(&self, device: &dyn Device, whole: &Whole, compared: Compared) -> Outcome {
        let AttentionShape { batch, seq_len, num_heads, num_kv_heads, head_dim, .. } = self.shape;
        let (capacity, mut lengths) = (seq_len + 7, self.lengths.clone());
        let kv = [num_heads, num_heads + num_kv_heads].map(|first| {
            let cache = whole.qkv.cache(&lengths, first..first + num_kv_heads, capacity);
            device.float(&cache, &[batch, num_kv_heads, capacity, head_dim], DType::BF16)
        });
        let [k, v] = kv;
        let cache = KvCache { k, v };
        let pooled = self.choice_keys(device, whole, &lengths, capacity)?;
        let (tables, [q_weight, k_weight, index_q_weight, index_k_weight]) =
            (self.tables(device), self.weights(device));
        let one = AttentionShape { seq_len: 1, num_kv_heads: self.choosers(), ..self.shape };
        let scratch = DecodeScratch::new(&cache.k, one, capacity)?;
        for _ in 0..self.steps {
            let heads = num_heads + 2 * num_kv_heads;
            let token = self.qkv.token(&lengths, 0..heads);
            let token = device.float(&token, &[batch, 1, heads, head_dim], DType::BF16);
            let policy = KernelPolicy { sums: SumOrder::Fixed, ..token.policy() };
            let token = Qkv::packed(&token, num_heads, num_kv_heads).under(policy);
            let index = self.index.token(&lengths, 0..num_kv_heads + 1);
            let index = device.float(&index, &[batch, 1, num_kv_heads + 1, head_dim], DType::BF16);
            let index = [Heads::some(&index, 0, num_kv_heads), Heads::some(&index, num_kv_heads, 1)];
            let rotation = TokenRotation { norm: Some(([&q_weight, &k_weight], EPSILON)), tables: tables.each_ref() };
            let call = IndexedToken {
                token: &token,
                index: index.each_ref(),
                rotation,
                index_norm: ([&index_q_weight, &index_k_weight], EPSILON),
            };
            let words = |sign: i32| lengths.iter().map(|&length| sign * length as i32).collect::<Vec<_>>();
            let (length, start) = (device.int(&words(1), &[batch]), device.int(&words(-1), &[batch, 1]));
            let keys = PooledStep { pooled: &pooled, start: &start, choice: self.choice };
            let step = DecodeStep::new(capacity - 1, SCALE);
            match compared {
                Compared::Choices => {
                    let (_, chosen) = if self.choice.has_indexer() {
                        cache.indexed_choice(call, &length, step, keys)?
                    } else {
                        cache.chosen_choice(&token, rotation, &length, step, keys)?
                    };
                    let (chosen, lists) =
                        (device.ints(&chosen)?, self.choosers() * self.choice.blocks.num_selected_blocks);
                    for (row, &token) in lengths.iter().enumerate() {
                        let expected = &whole.chosen[(row * seq_len + token) * lists..][..lists];
                        same_choice(&chosen[row * lists..][..lists], expected, row, token)?;
                    }
                }
                Compared::LogSums => {
                    let (q, _) = cache.chosen_choice(&token, rotation, &length, step, keys)?;
                    let found = device.floats(&keys.log_sums(&Heads::all(&q), SCALE)?)?;
                    let all = whole.log_sums.as_deref().unwrap_or_default();
                    for (row, &token) in lengths.iter().enumerate() {
                        let expected: Vec<_> =
                            (0..num_heads).map(|head| all[(row * num_heads + head) * seq_len + token]).collect();
                        same_bits(&found[row * num_heads..][..num_heads], &expected, row, token)?;
                    }
                }
                Compared::Bits => {
                    let o = if self.choice.has_indexer() {
                        cache.indexed_decode(call, &length, step, keys, &scratch)?
                    } else {
                        cache.chosen_decode(&token, rotation, &length, step, keys, &scratch)?
                    };
                    let o = device.floats(&o)?;
                    let width = num_heads * head_dim;
                    for (row, &token) in lengths.iter().enumerate() {
                        let expected = &whole.o[(row * seq_len + token) * width..][..width];
                        same_bits(&o[row * width..][..width], expected, row, token)?;
                    }
                }
            }
            lengths.iter_mut().for_each(|length| *length += 1);
        }
        // The steps have stored the keys that whole rows have.
        let expected = device.floats(&self.choice_keys(device, whole, &lengths, capacity)?)?;
        let stored = device.floats(&pooled)?;
        let differ = stored.iter().zip(&expected).filter(|(a, b)| !b.is_nan() && a.to_bits() != b.to_bits()).count();
        if differ == 0 { Ok(0.0) } else { wrong(format!("{differ} numbers of the keys that choose differ")) }
    }
}

/// A tensor whose queries have the order of keys that steps have, too.
pub(crate) fn in_epochs(x: CudaTensor) -> CudaTensor {
    let policy = KernelPolicy { keys: KeyOrder::Epochs, ..x.policy() };
    x.under(policy)
}

/// Fails where a token's blocks are not those of its whole row.
pub(crate) fn same_choice(found: &[i32], expected: &[i32], row: usize, token: usize) -> Result<(), Wrong> {
    if found == expected {
        return Ok(());
    }
    wrong(format!("row {row}, token {token}: chose {found:?}, in its whole row {expected:?}"))
}

/// Fails where a token's output has not the bits of its whole row.
pub(crate) fn same_bits(found: &[f32], expected: &[f32], row: usize, token: usize) -> Result<(), Wrong> {
    let differ = found.iter().zip(expected).filter(|(a, b)| a.to_bits() != b.to_bits() || a.is_nan()).count();
    if differ == 0 {
        return Ok(());
    }
    let most = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    wrong(format!("row {row}, token {token}: {differ} of {} numbers differ, by {most} at most", found.len()))
}
