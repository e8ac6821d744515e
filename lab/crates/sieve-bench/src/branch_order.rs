//! Checks that a token of native sparse attention has the choice and the bits of its whole row in each branch, in a
//! decoding step in rows of different lengths and in new tokens behind a cache: by each family of kernels, but in the
//! window branch on Hopper alone.
use crate::block_order::{Packed, SCALE, in_epochs, same_bits, same_choice};
use crate::device::{Device, family, family_name};
use crate::error::Result;
use crate::extent::Extent;
use crate::report::{Outcome, Report, Wrong, wrong};
use sieve_core::NsaBlocks;
use sieve_kernels::step::linear_in_order;
use sieve_kernels::{
    AttendedBlocks, AttentionNeeds, AttentionShape, CudaTensor, DType, DecodeScratch, DecodeStep, DeviceReport,
    KernelFamily, KernelPolicy, KeySource, KvCache, NeededKernels, NeededKeys, NsaToken, Qkv, SumOrder, nsa_blocks,
    nsa_mean_pool,
};
use sieve_testing::{Random, round_bf16};

/// Tokens of a compressed block, of its stride and of a selected block, and blocks that a query selects: with kernels
/// of Hopper's own for importance, and without.
const BLOCKS: &[[usize; 4]] = &[[8, 4, 16, 5], [32, 16, 64, 4], [16, 16, 32, 4], [32, 8, 64, 16], [32, 16, 64, 16]];

/// Tokens of the rows on a GPU.
const ROWS: &[usize] = &[700, 9000, 1025, 129, 3000, 17_200];

/// The kernels that these checks launch.
pub(crate) fn kernels(gpu: &DeviceReport) -> NeededKernels {
    let mut list = NeededKernels::default();
    for width in [64, 128] {
        for group in [1, 2, 4, 16] {
            let shape = AttentionShape::new(1, 1, [group, 1], [width; 2]);
            for keys in [NeededKeys::Blocks, NeededKeys::Neighbours] {
                let needs = AttentionNeeds { shape, keys, order: SumOrder::Any, has_sinks: false };
                list.extend(needs.kernels(&gpu.arch()));
                list.extend(needs.in_order(&gpu.arch()));
            }
        }
    }
    list
}

/// Checks random texts: every second one compresses blocks by an MLP, the others by their mean.
pub(crate) fn check(report: &mut Report, device: &dyn Device, extent: &Extent) -> Result<()> {
    let mut random = Random(extent.seed ^ 0x6272_616e); // "bran" in ASCII: other numbers than the other checks draw
    for at in 0..extent.pick(extent.few(), extent.few().max(12)) {
        let seed = random.between(0, 1 << 30) as u64;
        let text = Text::draw(at, extent, seed);
        let (path, label) = (family_name(family(device, &text.shape, KeySource::Gathered)), text.label(seed));
        match text.whole(device) {
            Ok(whole) => {
                for (name, outcome) in [
                    ("choice of a step", text.check_steps(device, &whole, Compared::Choices)),
                    ("bits of a step", text.check_steps(device, &whole, Compared::Bits)),
                    ("bits behind a cache", text.check_part(device, &whole)),
                    ("bits of gates", text.check_gates(device)),
                ] {
                    report.add(&format!("nsa, {name}"), path, &label, outcome);
                }
            }
            Err(error) => report.add("nsa, a whole row", path, &label, Err(error)),
        }
    }
    Ok(())
}

/// What steps are compared by.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Compared {
    Choices,
    Bits,
}

/// The compression MLP of keys, or of values: position embeddings, first and second weight.
type Mlp<T> = [T; 3];

/// A text whose tokens are computed in whole rows, in steps and behind a cache.
struct Text {
    shape: AttentionShape,
    blocks: NsaBlocks,
    /// Keys that a query of the window branch sees.
    window: usize,
    /// Tokens before the first step, of each row.
    lengths: Vec<usize>,
    steps: usize,
    /// Queries, keys and values of the compressed branch, and of the selected and the window branch.
    coarse: Packed,
    fine: Packed,
    /// `None` compresses by the mean.
    mlp: Option<[Mlp<Vec<f32>>; 2]>,
    hidden: usize,
    /// Rows of hidden states, and the gates' weight.
    gates: [Vec<f32>; 2],
}

/// Columns of the hidden states that gates are computed from, and numbers of gates.
const GATES: [usize; 2] = [96, 18];

/// A whole row's results.
struct Whole {
    /// Compressed keys, and compressed values, `[batch, slots, num_kv_heads, head_dim]`.
    compressed: [Packed; 2],
    /// The blocks that each token chose, `[batch, seq_len, num_kv_heads, num_selected_blocks]`.
    chosen: Vec<i32>,
    /// Outputs of the branches, `[batch, seq_len, num_heads, head_dim]`.
    o: Outputs,
}

/// Names of branches and their outputs.
type Outputs = Vec<(&'static str, Vec<f32>)>;

impl Text {
    /// Text number `at`, of other sizes than its neighbours.
    fn draw(at: usize, extent: &Extent, seed: u64) -> Self {
        let mut random = Random(seed);
        let rows = extent.pick(&[150, 70, 300][..], if extent.has_long_rows() { ROWS } else { &[150, 700] });
        let sizes = extent.pick(&BLOCKS[..3], BLOCKS);
        let (seq_len, sizes) = (rows[at % rows.len()], sizes[(at + at / sizes.len()) % sizes.len()]);
        let (blocks, width) = (NsaBlocks::of(sizes), extent.pick(64, random.one_of(&[64, 128])));
        let is_long = seq_len > 4000;
        let batch = random.between(1, if is_long || extent.is_emulated { 3 } else { 4 });
        let kv_heads = if is_long { 1 } else { random.between(extent.pick(2, 1), 3) };
        let group = if extent.is_emulated { 2 } else { random.one_of(&[1, 2, 4, 16]) };
        let shape = AttentionShape::new(batch, seq_len, [group * kv_heads, kv_heads], [width; 2]);
        // A step in which a compressed block ends is among them.
        let steps = blocks.compress_stride.max(extent.pick(3, 20)).min(seq_len);
        // Rows begin where a selected or a compressed block ends, at the first token or anywhere; the first far enough
        // for a choice.
        let lengths = (0..batch).map(|row| {
            let any = random.between(seq_len / 2, seq_len);
            let ended = blocks.num_compressed_blocks(any).saturating_sub(1) * blocks.compress_stride
                + blocks.compress_block_size;
            let edge = any / blocks.select_block_size * blocks.select_block_size;
            let first_end = blocks.compress_block_size - 1;
            let places = [any, ended.saturating_sub(1), edge, edge.saturating_sub(1), 0, first_end];
            random.one_of(&places[..if row == 0 { 2 } else { places.len() }]).min(seq_len - steps)
        });
        let lengths = lengths.collect();
        let mut heads = || {
            let sizes = [batch, seq_len, (group + 2) * kv_heads, width];
            Packed { values: random.bf16_normals(sizes.iter().product()), sizes }
        };
        let (coarse, fine) = (heads(), heads());
        // A hidden width that is no whole word, too.
        let hidden = [width, 20][at / 2 % 2];
        let mut scaled = |count: usize, columns: usize| -> Vec<f32> {
            let factor = 1.0 / (columns as f32).sqrt().log2().round().exp2();
            random.bf16_normals(count).iter().map(|x| x * factor).collect()
        };
        let mlp = at.is_multiple_of(2).then(|| {
            let columns = blocks.compress_block_size * width;
            [(); 2]
                .map(|()| [scaled(columns, 1), scaled(hidden * columns, columns), scaled(width * hidden, hidden / 4)])
        });
        // The second half of a row almost cancels the first, so that the order of sums shows in rounded numbers.
        let half = GATES[0] / 2;
        let [x, weights] = [seq_len.min(300), GATES[1]].map(|rows| scaled(rows * half, 1));
        let rows = |of: &[f32], second: &dyn Fn(usize, f32) -> f32| -> Vec<f32> {
            let row = |row: &[f32]| {
                let others = row.iter().enumerate().map(|(at, &x)| second(at, x)).collect();
                [row.to_vec(), others].concat()
            };
            of.chunks_exact(half).flat_map(row).collect()
        };
        let near = |at: usize, x: f32| round_bf16(x * if at.is_multiple_of(2) { 1.0078125 } else { 0.9921875 });
        let gates = [rows(&x, &near), rows(&weights, &|_, x| -x)];
        Self { shape, blocks, window: 40, lengths, steps, coarse, fine, mlp, hidden, gates }
    }

    fn label(&self, seed: u64) -> String {
        let Self { shape, blocks, lengths, mlp, hidden, .. } = self;
        let by = if mlp.is_some() { format!("an MLP of {hidden}") } else { "means".to_owned() };
        format!("{shape:?} {blocks:?} by {by} behind {lengths:?} tokens, seed {seed}")
    }

    /// Bounds of documents that are whole rows.
    fn bounds(&self, device: &dyn Device) -> [CudaTensor; 2] {
        let AttentionShape { batch, seq_len, .. } = self.shape;
        [0, seq_len as i32].map(|bound| device.int(&vec![bound; batch * seq_len], &[batch, seq_len]))
    }

    fn mlp_tensors(&self, device: &dyn Device) -> Option<[Mlp<CudaTensor>; 2]> {
        let (size, width) = (self.blocks.compress_block_size, self.shape.head_dim);
        let sizes = [[size, width], [self.hidden, size * width], [width, self.hidden]];
        let of = |mlp: &Mlp<Vec<f32>>| [0, 1, 2].map(|n| device.float(&mlp[n], &sizes[n], DType::BF16));
        self.mlp.as_ref().map(|mlp| mlp.each_ref().map(of))
    }

    /// Compressed keys and values of whole rows, `[2, batch * slots * num_kv_heads, head_dim]`.
    fn compressed(&self, device: &dyn Device) -> Result<CudaTensor, Wrong> {
        let (bounds, AttentionShape { num_heads, num_kv_heads, head_dim, .. }) = (self.bounds(device), self.shape);
        let qkv = device.float(&self.coarse.values, &self.coarse.sizes, DType::BF16);
        let qkv = Qkv::packed(&qkv, num_heads, num_kv_heads);
        let Some(mlp) = self.mlp_tensors(device) else {
            return Ok(nsa_mean_pool([&qkv.k, &qkv.v], bounds.each_ref(), self.blocks)?);
        };
        let positions = mlp.each_ref().map(|[positions, ..]| positions);
        let inputs = nsa_blocks([&qkv.k, &qkv.v], positions, bounds.each_ref(), self.blocks)?;
        let [_, rows, columns] = inputs.dims("nsa_blocks", "blocks")?;
        let mut all = Vec::new();
        for (which, [_, up, down]) in mlp.iter().enumerate() {
            let x = inputs.row_range("nsa_blocks", "blocks", which, 1)?;
            let hidden = linear_in_order(&x.reshaped("nsa_blocks", "blocks", &[rows, columns])?, up)?;
            let hidden: Vec<f32> = device.floats(&hidden)?.into_iter().map(|x| x.max(0.0)).collect();
            let hidden = device.float(&hidden, &[rows, self.hidden], DType::BF16);
            all.extend(device.floats(&linear_in_order(&hidden, down)?)?);
        }
        Ok(device.float(&all, &[2, rows, head_dim], DType::BF16))
    }

    /// Choice and outputs of whole rows, as a layer computes them, of the tokens from `first` on.
    fn attend(
        &self,
        device: &dyn Device,
        [coarse, fine]: [&Packed; 2],
        compressed: &CudaTensor,
        first: usize,
    ) -> Result<(Vec<i32>, Outputs), Wrong> {
        let AttentionShape { batch, seq_len, num_heads, num_kv_heads, .. } = self.shape;
        let (bounds, count) = (self.bounds(device), self.blocks.num_selected_blocks);
        let [coarse, fine] = [coarse, fine].map(|packed| {
            let packed = in_epochs(device.float(&packed.values, &packed.sizes, DType::BF16));
            Qkv::packed(&packed, num_heads, num_kv_heads)
        });
        let found = coarse.q.nsa_compressed_attention_of_last(bounds.each_ref(), compressed, self.blocks, SCALE, first);
        let (result, chosen) = found?;
        let mut chosen = device.ints(&chosen)?;
        for (list, blocks) in chosen.chunks_exact_mut(count).enumerate() {
            if list / num_kv_heads % seq_len < first {
                blocks.fill(-1);
            }
        }
        let lists = device.int(&chosen, &[batch, seq_len, num_kv_heads, count]);
        let lists = AttendedBlocks::single(&lists, self.blocks.select_block_size);
        let (selected, _) = fine.nsa_selected_attention_forward(bounds.each_ref(), lists, SCALE)?;
        let mut o = vec![("compressed", device.floats(&result.o)?), ("selected", device.floats(&selected.o)?)];
        if self.compares_windows(device) {
            let window = fine.attention_forward(&bounds[0], Some(self.window), SCALE, None)?;
            o.push(("window", device.floats(&window.o)?));
        }
        Ok((chosen, o))
    }

    /// Whether steps and whole rows have one order in the window branch.
    fn compares_windows(&self, device: &dyn Device) -> bool {
        family(device, &self.shape, KeySource::Dense) == KernelFamily::Hopper
    }

    /// Whole rows.
    fn whole(&self, device: &dyn Device) -> Result<Whole, Wrong> {
        let AttentionShape { batch, seq_len, num_kv_heads, head_dim, .. } = self.shape;
        let compressed = self.compressed(device)?;
        let (chosen, o) = self.attend(device, [&self.coarse, &self.fine], &compressed, 0)?;
        let values = device.floats(&compressed)?;
        let sizes = [batch, self.blocks.num_slots(seq_len), num_kv_heads, head_dim];
        let (k, v) = values.split_at(values.len() / 2);
        Ok(Whole { compressed: [k, v].map(|values| Packed { values: values.to_vec(), sizes }), chosen, o })
    }

    /// The last tokens of the rows, with queries of zero before them, as a layer computes several tokens behind a
    /// cache. The window branch has a row of its own there, which other checks compare.
    fn check_part(&self, device: &dyn Device, whole: &Whole) -> Outcome {
        let AttentionShape { batch, seq_len, num_heads, num_kv_heads, head_dim, .. } = self.shape;
        let first = self.lengths[0].min(seq_len - 1);
        let [coarse, fine] = [&self.coarse, &self.fine].map(|packed| {
            let mut packed = packed.clone();
            let [.., heads, width] = packed.sizes;
            let tokens = packed.values.chunks_exact_mut(heads * width).enumerate();
            tokens.filter(|(at, _)| at % seq_len < first).for_each(|(_, token)| token[..num_heads * width].fill(0.0));
            packed
        });
        let compressed = self.compressed(device)?;
        let (chosen, o) = self.attend(device, [&coarse, &fine], &compressed, first)?;
        let (lists, width) = (num_kv_heads * self.blocks.num_selected_blocks, num_heads * head_dim);
        for at in (0..batch * seq_len).filter(|at| at % seq_len >= first) {
            let (row, token) = (at / seq_len, at % seq_len);
            same_choice(&chosen[at * lists..][..lists], &whole.chosen[at * lists..][..lists], row, token)?;
            for ((name, o), (_, expected)) in o.iter().zip(&whole.o) {
                let outcome = same_bits(&o[at * width..][..width], &expected[at * width..][..width], row, token);
                outcome.map_err(|error| format!("{name} branch: {error}"))?;
            }
        }
        Ok(0.0)
    }

    /// A cache with room for `capacity` of the heads' keys and values, those of each row's `lengths` tokens, then NaN.
    fn cache(&self, device: &dyn Device, packed: &Packed, lengths: &[usize], capacity: usize) -> KvCache {
        let AttentionShape { batch, num_heads, num_kv_heads, head_dim, .. } = self.shape;
        let [k, v] = [num_heads, num_heads + num_kv_heads].map(|first| {
            let cache = packed.cache(lengths, first..first + num_kv_heads, capacity);
            device.float(&cache, &[batch, num_kv_heads, capacity, head_dim], DType::BF16)
        });
        KvCache { k, v }
    }

    /// The cache of compressed keys and values behind `lengths` tokens.
    fn compressed_cache(&self, device: &dyn Device, whole: &Whole, lengths: &[usize], room: usize) -> KvCache {
        let AttentionShape { batch, num_kv_heads, head_dim, .. } = self.shape;
        let ended: Vec<_> = lengths.iter().map(|&tokens| self.blocks.num_compressed_blocks(tokens)).collect();
        let [k, v] = whole.compressed.each_ref().map(|packed| {
            let cache = packed.cache(&ended, 0..num_kv_heads, room);
            device.float(&cache, &[batch, num_kv_heads, room, head_dim], DType::BF16)
        });
        KvCache { k, v }
    }

    /// Tokens one by one, in rows of different lengths.
    fn check_steps(&self, device: &dyn Device, whole: &Whole, compared: Compared) -> Outcome {
        let AttentionShape { batch, seq_len, num_heads, num_kv_heads, head_dim, .. } = self.shape;
        let (capacity, mut lengths) = (seq_len + 7, self.lengths.clone());
        let room = self.blocks.num_slots(capacity) + 1;
        let [tail, selected, near] =
            [&self.coarse, &self.fine, &self.fine].map(|packed| self.cache(device, packed, &lengths, capacity));
        let compressed = self.compressed_cache(device, whole, &lengths, room);
        let mlp = self.mlp_tensors(device);
        let one = AttentionShape { seq_len: 1, ..self.shape };
        let scratch = DecodeScratch::new(&selected.k, one, capacity)?;
        let (lists, width) = (num_kv_heads * self.blocks.num_selected_blocks, num_heads * head_dim);
        for _ in 0..self.steps {
            let heads = num_heads + 2 * num_kv_heads;
            let [coarse, fine] = [&self.coarse, &self.fine].map(|packed| {
                let token = device.float(&packed.token(&lengths, 0..heads), &[batch, 1, heads, head_dim], DType::BF16);
                let policy = KernelPolicy { sums: SumOrder::Fixed, ..token.policy() };
                Qkv::packed(&token, num_heads, num_kv_heads).under(policy)
            });
            let words = |sign: i32| lengths.iter().map(|&length| sign * length as i32).collect::<Vec<_>>();
            let (length, start) = (device.int(&words(1), &[batch]), device.int(&words(-1), &[batch, 1]));
            let token = NsaToken {
                branches: [&coarse, &fine, &fine],
                caches: [&compressed, &selected, &near],
                tail: (&tail, 0),
                mlp: mlp.as_ref().map(|mlp| mlp.each_ref().map(|mlp| mlp.each_ref())),
                start: &start,
                blocks: self.blocks,
            };
            let step = DecodeStep::new(capacity - 1, SCALE);
            match compared {
                Compared::Choices => {
                    let (_, [_, chosen]) = token.choice(&length, step, &scratch)?;
                    let chosen = device.ints(&chosen)?;
                    for (row, &token) in lengths.iter().enumerate() {
                        let expected = &whole.chosen[(row * seq_len + token) * lists..][..lists];
                        same_choice(&chosen[row * lists..][..lists], expected, row, token)?;
                    }
                }
                Compared::Bits => {
                    let window = DecodeStep { window: Some(self.window), ..step };
                    let branches = token.decode(&length, [step, window], [&scratch; 3])?;
                    for (o, (name, expected)) in branches.iter().zip(&whole.o) {
                        let o = device.floats(o)?;
                        for (row, &token) in lengths.iter().enumerate() {
                            let expected = &expected[(row * seq_len + token) * width..][..width];
                            let outcome = same_bits(&o[row * width..][..width], expected, row, token);
                            outcome.map_err(|error| format!("{name} branch: {error}"))?;
                        }
                    }
                }
            }
            lengths.iter_mut().for_each(|length| *length += 1);
        }
        // The compressed keys and values that the steps have stored are those of whole rows, too.
        let expected = self.compressed_cache(device, whole, &lengths, room);
        for (name, stored, expected) in [("keys", &compressed.k, &expected.k), ("values", &compressed.v, &expected.v)] {
            let (stored, expected) = (device.floats(stored)?, device.floats(expected)?);
            let differ = stored.iter().zip(&expected).filter(|(a, b)| !b.is_nan() && a.to_bits() != b.to_bits());
            let differ = differ.count();
            if differ > 0 {
                return wrong(format!("{differ} numbers of the compressed {name} differ"));
            }
        }
        Ok(0.0)
    }

    /// Logits of the gates of a whole row, and of each of its tokens alone.
    fn check_gates(&self, device: &dyn Device) -> Outcome {
        let ([columns, count], [x, weight]) = (GATES, &self.gates);
        let (rows, weight) = (x.len() / columns, device.float(weight, &[count, columns], DType::BF16));
        let logits = |x: &[f32]| -> Result<Vec<f32>, Wrong> {
            let x = device.float(x, &[x.len() / columns, columns], DType::BF16);
            Ok(device.floats(&linear_in_order(&x, &weight)?)?)
        };
        let all = logits(x)?;
        for token in (0..rows).step_by(7) {
            let found = logits(&x[token * columns..][..columns])?;
            same_bits(&found, &all[token * count..][..count], 0, token)?;
        }
        Ok(0.0)
    }
}
