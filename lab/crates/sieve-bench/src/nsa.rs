//! Checks the kernels of native sparse attention against their definition in f64 and a plain bf16 computation.
mod expected;
mod given;
mod selected_blocks;

use crate::attention::{ORDERS, repeat};
use crate::case::{Case, Cuts, Keys, magnify};
use crate::device::{self, Device};
use crate::error::Result;
use crate::extent::{Extent, add_attention};
use crate::report::{Outcome, Report, Wrong, wrong};
use crate::scores::Scores;
use crate::shape::{keys_of, packed_of};
use crate::strided::packed;
use crate::tensors::{cast, floats, indices};
use crate::tolerance::Results;
use burn::tensor::DType;
use burn::tensor::ops::FloatTensor;
use burn_flex::{Flex, FlexDevice};
use expected::Expected;
use sieve_core::{BlockChoice, ChoiceRule, ForcedBlocks, LocalBlocks};
use sieve_cpu::nsa::overlap_weight;
use sieve_kernels::{
    AttendedBlocks, AttentionGradients, AttentionNeeds, AttentionShape, BlocksWithLocal, CudaTensor, DeviceReport,
    IndexGradient, KernelError, KernelPolicy, KeyOrder, KeySource, NeededKernels, NeededKeys, PackedGradient, Qkv,
    SumOrder, nsa_blocks, nsa_blocks_backward, nsa_gates, nsa_gates_backward, nsa_mean_pool, nsa_mean_pool_backward,
};
use sieve_ops::{AttentionSpec, ChoiceCall, DeviceBackend, NsaBlocks, NsaCall};
use sieve_testing::Random;

/// Numbers of query heads for each KV head.
const GROUPS: [usize; 6] = [1, 2, 3, 4, 8, 16];

/// Query heads of a KV head of the long call; few, since the host computes its reference.
const LONG_GROUPS: [usize; 6] = [1, 2, 3, 4, 2, 4];

/// Tokens of a compressed block, its stride, tokens of a selected block, selected blocks a query.
const BLOCKS: [[usize; 4]; 5] = [[32, 16, 64, 16], [8, 4, 8, 3], [16, 8, 16, 8], [32, 8, 64, 5], [4, 4, 4, 2]];

/// Tokens of the long call on a GPU, whose lists of queries by block take several work items each.
const LONG: usize = 12_345;

/// Share of the queries whose chosen blocks may differ, where two blocks are nearly equally important.
const NEAR_TIES: f64 = 0.01;

/// Inputs of one call of native sparse attention, on the host.
struct Inputs {
    case: Case,
    qkv: Vec<f32>,
    blocks: NsaBlocks,
    /// Position embeddings of keys and of values, `[compress_block_size, head_dim]`.
    positions: [Vec<f32>; 2],
    /// A compressed key and value of each block: `[2, batch * slots * num_kv_heads, head_dim]`, where slots are the
    /// places for compressed blocks in a row of the batch ([`NsaBlocks::num_slots`]).
    compressed: Vec<f32>,
    /// A pooled key and value of each block that can be selected: `[2, batch * blocks of a row * num_kv_heads,
    /// head_dim]`.
    means: Vec<f32>,
    /// A pooled key and value of each token: `[2, batch * seq_len * num_kv_heads, head_dim]`.
    tokens: Vec<f32>,
    /// Outputs of the three branches, which the gates weigh by `logits` and `bias`.
    branches: [Vec<f32>; 3],
    logits: Vec<f32>,
    bias: Vec<f32>,
    /// Gradient of the blocks that an MLP compresses.
    d_blocks: Vec<f32>,
    /// An indexer's packed tensor: one query head a KV head, one key head, and a head that no kernel may read.
    index: Vec<f32>,
    /// Blocks of the selected branch, `[batch, seq_len, num_kv_heads, num_selected_blocks]`.
    chosen: Vec<i32>,
    /// Whether these come in pairs.
    in_pairs: bool,
    /// The local blocks of every query in `with_local`, which has the shape of `chosen`.
    local: LocalBlocks,
    with_local: Vec<i32>,
}

impl Inputs {
    /// Draws call number `at`; `is_long`: one row of [`LONG`] tokens with the paper's blocks.
    fn draw(random: &mut Random, extent: &Extent, at: usize, is_long: bool) -> Result<(Self, String)> {
        let group = random.one_of(if is_long { &LONG_GROUPS } else { &GROUPS });
        let num_kv_heads = match (is_long, group < 4) {
            (false, true) => random.between(1, 4),
            _ => 1,
        };
        let head_dim = random.one_of(extent.pick(&[64], &[64, 128]));
        let blocks = NsaBlocks::of(if is_long { BLOCKS[0] } else { random.one_of(&BLOCKS) });
        let any = random.between(2, extent.longest.max(3));
        let (batch, seq_len) =
            if is_long { (1, LONG) } else { (random.between(1, 3), random.one_of(&[1, 31, 64, 65, any])) };
        let heads = [group * num_kv_heads, num_kv_heads];
        let shape = AttentionShape::new(batch, seq_len, heads, [head_dim, head_dim]);
        let cuts = random.one_of(&[Cuts::Count(1), Cuts::Few, Cuts::Mixed, Cuts::Tokens]);
        let seed = random.between(0, 1 << 30) as u64;
        let magnitude = extent.magnitude_of(at);
        let case = Case::draw(shape, Keys::Dense, cuts, &Scores::RANDOM[0], seed)?;
        let case = case.under(extent.policy).magnified(magnitude);
        let ties = random.chance(0.25);
        let mut inputs = Self::of(case, blocks, random);
        let keys = inputs.compressed.len() / 2;
        if ties {
            // With pooled keys of zero all blocks that a query sees whole are equally important.
            inputs.compressed[..keys].fill(0.0);
            inputs.means.fill(0.0);
            inputs.tokens.fill(0.0);
        }
        magnify(&mut inputs.compressed[..keys], magnitude);
        if blocks.num_selected_blocks > 2 && random.chance(0.5) {
            // Blocks that attention reads in two pieces, as those of 128 tokens.
            inputs.local =
                LocalBlocks { size: 2 * blocks.select_block_size, count: (blocks.num_selected_blocks / 4).max(1) };
        }
        inputs.in_pairs = blocks.num_selected_blocks.is_multiple_of(2) && random.chance(0.5);
        let pairs = if inputs.in_pairs { " in pairs" } else { "" };
        let label = format!("{shape:?} {blocks:?}{pairs} {cuts:?} ties {ties} q, k x {magnitude} seed {seed}");
        Ok((inputs, label))
    }

    /// Draws NSA's operands that a dense case lacks.
    fn of(case: Case, blocks: NsaBlocks, random: &mut Random) -> Self {
        let (shape, size) = (case.shape, blocks.compress_block_size);
        let head_dim = shape.head_dim;
        let rows = 2 * shape.batch * blocks.num_slots(shape.seq_len) * shape.num_kv_heads;
        let means = 2 * shape.batch * shape.seq_len.div_ceil(blocks.select_block_size) * shape.num_kv_heads;
        let outputs: usize = shape.output().iter().product();
        let mut normals = |count| random.bf16_normals(count);
        Self {
            qkv: packed(&case),
            positions: [normals(size * head_dim), normals(size * head_dim)],
            compressed: normals(rows * head_dim),
            means: normals(means * head_dim),
            branches: [normals(outputs), normals(outputs), normals(outputs)],
            logits: normals(outputs / head_dim * 3),
            bias: normals(shape.num_heads * 3),
            d_blocks: normals(rows * size * head_dim),
            index: normals(shape.batch * shape.seq_len * (shape.num_kv_heads + 2) * head_dim),
            tokens: normals(2 * shape.batch * shape.seq_len * shape.num_kv_heads * head_dim),
            chosen: Vec::new(),
            in_pairs: false,
            local: LocalBlocks { size: blocks.select_block_size, count: (blocks.num_selected_blocks / 2).max(1) },
            with_local: Vec::new(),
            case,
            blocks,
        }
    }

    /// The kernel family of the selected branch, in words.
    fn family(&self, device: &dyn Device) -> &'static str {
        let family = device::family(device, &self.case.shape, KeySource::Gathered);
        device::family_name(family)
    }

    /// Fills `chosen` with the blocks that the CPU chooses, so that ties between blocks do not matter, but for those
    /// that no query reads. Returns the expected results.
    fn expected(&mut self) -> Expected {
        let choices = self.chosen_by_cpu();
        self.chosen = self.read_of(&choices[0].blocks);
        self.with_local = self.choice_with_local(&choices[0].blocks);
        Expected::of(self, choices)
    }

    fn call(&self) -> NsaCall<Flex> {
        let spec =
            AttentionSpec { softmax_scale: 1.0 / (self.case.shape.head_dim as f64).sqrt(), ..self.case.spec(None) };
        NsaCall::new(self.case.documents::<Flex>(&FlexDevice).bounds(), spec, self.blocks)
    }

    /// A choice by the compressed keys (InfLLM-V2), by a mean key of each block, and by each token's key (MSA): name,
    /// rule and pooled keys.
    fn choices(&self) -> [(&'static str, BlockChoice, &[f32]); 3] {
        let pooled_by = |size| NsaBlocks { compress_block_size: size, compress_stride: size, ..self.blocks };
        let largest = BlockChoice {
            blocks: self.blocks,
            rule: ChoiceRule::LargestProbability,
            forced: ForcedBlocks { first: true, local: (self.blocks.num_selected_blocks / 2).max(1) },
        };
        let mean = BlockChoice {
            blocks: pooled_by(self.blocks.select_block_size),
            rule: ChoiceRule::MeanKey,
            forced: ForcedBlocks { first: false, local: 1 },
        };
        let score = BlockChoice {
            blocks: pooled_by(1),
            rule: ChoiceRule::LargestScore,
            forced: ForcedBlocks { first: false, local: self.blocks.num_selected_blocks.min(2) },
        };
        [
            ("choice by the largest", largest, &self.compressed),
            ("choice by means", mean, &self.means),
            ("choice by scores", score, &self.tokens),
        ]
    }

    /// The blocks that the CPU chooses: by NSA's compressed branch, then by each rule of [`choices`](Self::choices).
    fn chosen_by_cpu(&self) -> Vec<Choice> {
        let (shape, call) = (self.case.shape, self.call());
        let [qkv, compressed] = self.packed_and_compressed(DType::F32);
        let coarse = Flex::nsa_compressed_attention(qkv.clone(), compressed, &call);
        let blocks = indices::<Flex, 4>(coarse.block_indices);
        let of_nsa = Choice { name: "choice", rule: ChoiceRule::WeightedProbability, blocks };
        let of = |(name, choice, pooled): (&'static str, BlockChoice, &[f32])| {
            let rows = pooled.len() / 2 / shape.head_dim;
            let pooled = cast::<Flex, 3>(pooled, [2, rows, shape.head_dim], DType::F32, &FlexDevice);
            let call = ChoiceCall { documents: call.documents.clone(), spec: call.spec, choice, first: 0 };
            let blocks = indices::<Flex, 4>(Flex::choose_key_blocks(qkv.clone(), pooled, &call));
            Choice { name, rule: choice.rule, blocks }
        };
        std::iter::once(of_nsa).chain(self.choices().map(of)).collect()
    }

    /// Weight of an indexer's divergence in the loss.
    const INDEX_WEIGHT: f32 = 0.3;

    /// The indexer's packed tensor. Keys that no query chose, and the unread head, are NaN.
    fn indexer(&self) -> Vec<f32> {
        let (shape, d) = (self.case.shape, self.case.shape.head_dim);
        let (mut index, groups) = (self.index.clone(), shape.num_kv_heads);
        for (at, token) in index.chunks_exact_mut((groups + 2) * d).enumerate() {
            let offset = at % shape.seq_len - self.case.doc_start[at] as usize;
            let (key, unread) = token[groups * d..].split_at_mut(d);
            unread.fill(f32::NAN);
            if self.is_unread(offset) {
                key.fill(f32::NAN);
            }
        }
        index
    }

    /// Rows of the compressed keys: batch x slots x KV heads.
    fn rows(&self) -> usize {
        let [batch, seq_len, kv_heads, _] = keys_of(self.case.shape);
        batch * self.blocks.num_slots(seq_len) * kv_heads
    }

    /// The packed q, k, v and the compressed keys and values as tensors on the CPU.
    fn packed_and_compressed(&self, dtype: DType) -> [FloatTensor<Flex>; 2] {
        let (packed, d) = (packed_of(self.case.shape), self.case.shape.head_dim);
        [
            cast::<Flex, 4>(&self.qkv, packed, dtype, &FlexDevice),
            cast::<Flex, 3>(&self.compressed, [2, self.rows(), d], dtype, &FlexDevice),
        ]
    }

    /// The packed q, k, v with NaN for keys and values that no query chose.
    fn selected_qkv(&self) -> Vec<f32> {
        let (mut qkv, [_, seq_len, heads, width]) = (self.qkv.clone(), packed_of(self.case.shape));
        for (at, token) in qkv.chunks_exact_mut(heads * width).enumerate() {
            let offset = at % seq_len - self.case.doc_start[at] as usize;
            if self.is_unread(offset) {
                token[self.case.shape.num_heads * width..].fill(f32::NAN);
            }
        }
        qkv
    }
}

/// The blocks that each query and KV head chooses by a rule, and the rule's name in reports.
struct Choice {
    name: &'static str,
    rule: ChoiceRule,
    /// `[batch, seq_len, num_kv_heads, num_selected_blocks]`.
    blocks: Vec<i32>,
}

/// The kernels' outputs, and the blocks that they chose, in the order of [`Inputs::chosen_by_cpu`].
struct Found {
    outputs: Results,
    chosen: Vec<Vec<i32>>,
}

/// Names of the gates' gradients for the three branches.
const GATED: [&str; 3] = ["gates dcompressed", "gates dselected", "gates dwindow"];

/// Results of the ops without a softmax and of their backward passes: blocks, means and gates.
fn linear_ops(inputs: &Inputs, dtype: DType) -> Results {
    let Case { shape, d_o, .. } = &inputs.case;
    let (dims, output, call) = (packed_of(*shape), shape.output(), inputs.call());
    let [batch, seq_len, num_heads, d] = output;
    let size = inputs.blocks.compress_block_size;
    let [qkv, compressed] = inputs.packed_and_compressed(dtype);
    let d_o = cast::<Flex, 4>(d_o, output, dtype, &FlexDevice);
    let positions = inputs.positions.each_ref();
    let positions = positions.map(|x| cast::<Flex, 2>(x, [size, d], dtype, &FlexDevice));
    let d_blocks = cast::<Flex, 3>(&inputs.d_blocks, [2, inputs.rows(), size * d], dtype, &FlexDevice);
    let mut outputs = Vec::new();
    let mut add = |name, values| outputs.push((name, values));

    let blocks = Flex::nsa_blocks(qkv.clone(), positions, &call);
    add("blocks", floats::<Flex, 3>(blocks));
    let [dqkv, dk, dv] = Flex::nsa_blocks_backward(dims, &call, d_blocks);
    add("blocks dqkv", floats::<Flex, 4>(dqkv));
    add("k_positions", floats::<Flex, 2>(dk));
    add("v_positions", floats::<Flex, 2>(dv));
    add("mean pool", floats::<Flex, 3>(Flex::nsa_mean_pool(qkv, &call)));
    let dqkv = Flex::nsa_mean_pool_backward(dims, &call, compressed);
    add("mean pool dqkv", floats::<Flex, 4>(dqkv));

    let branches = inputs.branches.each_ref();
    let branches = branches.map(|x| cast::<Flex, 4>(x, output, dtype, &FlexDevice));
    let gates = num_heads * 3;
    let logits = cast::<Flex, 3>(&inputs.logits, [batch, seq_len, gates], dtype, &FlexDevice);
    let bias = cast::<Flex, 1>(&inputs.bias, [gates], dtype, &FlexDevice);
    let o = Flex::nsa_gates(branches.clone(), logits.clone(), bias.clone());
    add("gates o", floats::<Flex, 4>(o));
    let [a, b, c, d_logits, d_bias] = Flex::nsa_gates_backward(branches, logits, bias, d_o);
    for (name, branch) in GATED.into_iter().zip([a, b, c]) {
        add(name, floats::<Flex, 4>(branch));
    }
    add("gates dlogits", floats::<Flex, 3>(d_logits));
    add("gates dbias", floats::<Flex, 1>(d_bias));
    outputs
}

/// Counts the queries whose choice differs; returns the count as a share of the tolerance. Lists have `count` blocks. A
/// query does not count when both lists are ascending blocks, as long as each other, and `tied` says that all blocks in
/// which they differ are equally important to it.
fn judge_choice(chosen: &[i32], expected: &[i32], count: usize, tied: impl Fn(usize, &[usize]) -> bool) -> Outcome {
    let all = expected.len() / count;
    let pairs = chosen.chunks_exact(count).zip(expected.chunks_exact(count));
    let differs = |(at, (found, expected)): &(usize, (&[i32], &[i32]))| {
        let is_tied = |blocks: Vec<usize>| tied(*at, &blocks);
        found != expected && !exchanged_blocks(found, expected).is_some_and(is_tied)
    };
    let differing = pairs.enumerate().filter(differs).count();
    // Short calls have few queries: two may differ there.
    let allowed = (NEAR_TIES * all as f64).max(2.0);
    if differing as f64 <= allowed {
        Ok((differing as f64 / allowed) as f32)
    } else {
        wrong(format!("{differing} of {all} queries chose other blocks"))
    }
}

/// The blocks that are in only one of two choices; `None` where `found` is not a valid choice of as many blocks:
/// ascending indices, then -1.
fn exchanged_blocks(found: &[i32], expected: &[i32]) -> Option<Vec<usize>> {
    let only_in = |a: &[i32], b: &[i32]| -> Vec<i32> {
        let blocks = a.iter().copied();
        blocks.filter(|block| !b.contains(block)).collect()
    };
    let [new, missing] = [only_in(found, expected), only_in(expected, found)];
    let is_ascending = found.windows(2).all(|two| two[1] < 0 || two[0] < two[1]);
    if !is_ascending || new.len() != missing.len() {
        return None;
    }
    let blocks = new.into_iter().chain(missing);
    blocks.map(|block| usize::try_from(block).ok()).collect()
}

/// Smallest probability that counts: GPU exponentials flush subnormal results to 0.
const LOST: f64 = 1e-36;

/// Relative error of a logit computed in f32 from bf16 numbers.
const LOGIT_ERROR: f64 = 4.0 * f32::EPSILON as f64;

impl Inputs {
    /// Whether the blocks `of` are equally important to query and KV head number `at` under `rule`, up to the rounding
    /// of f32 logits and probabilities. Where each head's probability lies on one key, several blocks have importance
    /// 1.
    fn are_tied(&self, at: usize, rule: ChoiceRule, of: &[usize]) -> bool {
        let (probabilities, largest_logit) = self.probabilities(at);
        let importance = |&block: &usize| {
            let weighted =
                probabilities.iter().enumerate().map(|(c, p)| (overlap_weight(self.blocks, c, block) as f64, p));
            match rule {
                ChoiceRule::WeightedProbability => weighted.map(|(weight, p)| weight * p).sum(),
                _ => weighted.filter(|(weight, _)| *weight > 0.0).fold(0.0, |most, (_, &p)| p.max(most)),
            }
        };
        let all: Vec<f64> = of.iter().map(importance).collect();
        let [least, largest] = [f64::min, f64::max].map(|of| all.iter().copied().reduce(of).unwrap_or(0.0));
        largest - least <= LOST + LOGIT_ERROR * (1.0 + largest_logit) * largest
    }

    /// Attention probabilities of the compressed keys that query and KV head number `at` sees, summed over the query
    /// heads of the KV head, and the largest magnitude of a logit.
    fn probabilities(&self, at: usize) -> (Vec<f64>, f64) {
        let (shape, blocks) = (self.case.shape, self.blocks);
        let (kv_heads, d, group) = (shape.num_kv_heads, shape.head_dim, shape.group_size());
        let (token, kv_head) = (at / kv_heads, at % kv_heads);
        let (row, i) = (token / shape.seq_len, token % shape.seq_len);
        let start = self.case.doc_start[token] as usize;
        let ends = |c: &usize| start + c * blocks.compress_stride + blocks.compress_block_size <= i + 1;
        let seen = (0..).take_while(ends).count();
        let first = row * blocks.num_slots(shape.seq_len) + blocks.first_slot(start);
        let token_len = (shape.num_heads + 2 * kv_heads) * d;
        let (mut probabilities, mut largest_logit) = (vec![0.0; seen], 0.0f64);
        for head in kv_head * group..(kv_head + 1) * group {
            let q = &self.qkv[token * token_len + head * d..][..d];
            let logit = |c: usize| {
                let k = &self.compressed[((first + c) * kv_heads + kv_head) * d..][..d];
                let pairs = q.iter().zip(k).map(|(&q, &k)| f64::from(q) * f64::from(k));
                f64::from(self.case.scale) * pairs.sum::<f64>()
            };
            let logits: Vec<f64> = (0..seen).map(logit).collect();
            let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            largest_logit = logits.iter().fold(largest_logit, |most, x| most.max(x.abs()));
            let sum: f64 = logits.iter().map(|x| (x - largest).exp()).sum();
            let of_head = logits.iter().map(|x| (x - largest).exp() / sum);
            probabilities.iter_mut().zip(of_head).for_each(|(sum, p)| *sum += p);
        }
        (probabilities, largest_logit)
    }
}

/// Runs every kernel and its backward pass on a device; the selected branch reads the blocks `inputs.chosen`.
fn on_device(inputs: &Inputs, device: &dyn Device) -> Result<Found, KernelError> {
    let mut run = Run::new(inputs, device);
    let qkv = run.packed(&run.bf16(&inputs.qkv, &packed_of(inputs.case.shape)));
    device.poison(inputs.case.shape);
    run.blocks_and_means(&qkv)?;
    let mut chosen = vec![run.compressed(&qkv)?];
    for (_, choice, pooled) in inputs.choices() {
        let d = inputs.case.shape.head_dim;
        let pooled = run.bf16(pooled, &[2, pooled.len() / 2 / d, d]);
        let indices = qkv.q.choose_key_blocks(run.documents.each_ref(), &pooled, choice, run.scale)?;
        chosen.push(device.ints(&indices)?);
    }
    run.selected()?;
    run.with_local()?;
    run.gates()?;
    Ok(Found { outputs: run.outputs, chosen })
}

/// The kernels' runs on a device: what all of them read, and the outputs so far.
struct Run<'a> {
    inputs: &'a Inputs,
    device: &'a dyn Device,
    /// The first token of each token's document, and its end.
    documents: [CudaTensor; 2],
    /// Gradient of every branch's output.
    d_o: CudaTensor,
    scale: f32,
    outputs: Results,
}

impl<'a> Run<'a> {
    fn new(inputs: &'a Inputs, device: &'a dyn Device) -> Self {
        let Case { shape, d_o, doc_start, doc_end, .. } = &inputs.case;
        let documents = [doc_start, doc_end].map(|x| device.int(x, &[shape.batch, shape.seq_len]));
        let d_o = device.float(d_o, &shape.output(), sieve_kernels::DType::BF16);
        let scale = 1.0 / (shape.head_dim as f32).sqrt();
        Self { inputs, device, documents, d_o, scale, outputs: Vec::new() }
    }

    fn bf16(&self, values: &[f32], sizes: &[usize]) -> CudaTensor {
        self.device.float(values, sizes, sieve_kernels::DType::BF16)
    }

    /// The heads of a packed tensor.
    fn packed(&self, tensor: &CudaTensor) -> Qkv {
        Qkv::packed(tensor, self.inputs.case.shape.num_heads, self.inputs.case.shape.num_kv_heads)
    }

    fn add(&mut self, name: &'static str, tensor: &CudaTensor) -> Result<(), KernelError> {
        self.outputs.push((name, self.device.floats(tensor)?));
        Ok(())
    }

    /// The blocks that MLPs compress and the means of blocks, with their gradients.
    fn blocks_and_means(&mut self, qkv: &Qkv) -> Result<(), KernelError> {
        let (inputs, documents) = (self.inputs, self.documents.clone());
        let (shape, blocks, rows, documents) = (&inputs.case.shape, inputs.blocks, inputs.rows(), documents.each_ref());
        let (size, d) = (blocks.compress_block_size, shape.head_dim);
        let positions = inputs.positions.each_ref().map(|x| self.bf16(x, &[size, d]));
        let d_blocks = self.bf16(&inputs.d_blocks, &[2, rows, size * d]);
        let keys_and_values = [&qkv.k, &qkv.v];
        let packed = PackedGradient { dims: packed_of(*shape), num_kv_heads: shape.num_kv_heads };
        self.add("blocks", &nsa_blocks(keys_and_values, positions.each_ref(), documents, blocks)?)?;
        let [dqkv, dk_positions, dv_positions] = nsa_blocks_backward(packed, documents, blocks, &d_blocks)?;
        self.add("blocks dqkv", &dqkv)?;
        self.add("k_positions", &dk_positions)?;
        self.add("v_positions", &dv_positions)?;
        self.add("mean pool", &nsa_mean_pool(keys_and_values, documents, blocks)?)?;
        let d_means = self.bf16(&inputs.compressed, &[2, rows, d]);
        self.add("mean pool dqkv", &nsa_mean_pool_backward(packed, documents, blocks, &d_means)?)
    }

    /// The compressed branch with its gradients. Returns the blocks that queries chose by it.
    fn compressed(&mut self, qkv: &Qkv) -> Result<Vec<i32>, KernelError> {
        let (inputs, scale, documents) = (self.inputs, self.scale, self.documents.clone());
        let (blocks, documents, d_o) = (inputs.blocks, documents.each_ref(), self.d_o.clone());
        let compressed = self.bf16(&inputs.compressed, &[2, inputs.rows(), inputs.case.shape.head_dim]);
        let (result, indices) = qkv.q.nsa_compressed_attention_forward(documents, &compressed, blocks, scale)?;
        self.add("compressed o", &result.o)?;
        self.add("compressed lse", &result.lse)?;
        let in_order = qkv.q.pooled_log_sums(documents, &compressed, BlockChoice::nsa(blocks), scale)?;
        self.add("compressed lse, in order", &in_order)?;
        let [dqkv, d_compressed] =
            qkv.q.nsa_compressed_attention_backward(documents, &compressed, blocks, scale, &result, &d_o)?;
        self.add("compressed dqkv", &dqkv)?;
        self.add("dcompressed", &d_compressed)?;
        let q = qkv.under(KernelPolicy { keys: KeyOrder::Epochs, ..qkv.policy() }).q;
        let (result, _) = q.nsa_compressed_attention_forward(documents, &compressed, blocks, scale)?;
        self.add("compressed o, in order", &result.o)?;
        let [dqkv, d_compressed] =
            q.nsa_compressed_attention_backward(documents, &compressed, blocks, scale, &result, &d_o)?;
        self.add("compressed dqkv, in order", &dqkv)?;
        self.add("dcompressed, in order", &d_compressed)?;
        self.device.ints(&indices)
    }

    /// The selected branch over `inputs.chosen`, with its gradients and those of an indexer.
    fn selected(&mut self) -> Result<(), KernelError> {
        let (inputs, scale, documents) = (self.inputs, self.scale, self.documents.clone());
        let (shape, blocks, documents) = (inputs.case.shape, inputs.blocks, documents.each_ref());
        let sizes = [shape.batch, shape.seq_len, shape.num_kv_heads, blocks.num_selected_blocks];
        let given = self.device.int(&inputs.chosen, &sizes);
        let attended = AttendedBlocks { indices: &given, size: blocks.select_block_size, in_pairs: inputs.in_pairs };
        let qkv = self.packed(&self.bf16(&inputs.selected_qkv(), &packed_of(shape)));
        let (result, lists) = qkv.nsa_selected_attention_forward(documents, attended, scale)?;
        self.add("selected o", &result.o)?;
        self.add("selected lse", &result.lse)?;
        // Two runs over the forward pass's lists show that a backward pass leaves them unchanged.
        for (name, order, lists) in [
            ("selected dqkv", SumOrder::Any, &lists[..]),
            ("selected dqkv, again", SumOrder::Any, &lists[..]),
            ("selected dqkv, new lists", SumOrder::Any, &[][..]),
            ("selected dqkv, fixed order", SumOrder::Fixed, &lists[..]),
        ] {
            self.device.poison(shape);
            let dqkv = given.empty_contiguous(&packed_of(shape), sieve_kernels::DType::BF16);
            let call = AttentionGradients {
                qkv: &qkv.in_order(order),
                result: &result,
                d_o: &self.d_o,
                grads: &self.packed(&dqkv),
                softmax_scale: scale,
            };
            call.nsa_selected_attention_backward(documents, attended, lists)?;
            self.add(name, &dqkv)?;
        }
        // The index gradient has a kernel on Hopper alone; elsewhere it is computed by attention, which is checked
        // above.
        let index = self.bf16(&inputs.indexer(), &[shape.batch, shape.seq_len, shape.num_kv_heads + 2, shape.head_dim]);
        // Two runs show that the kernel leaves the lists unchanged.
        for (name, order) in [
            ("index gradient", SumOrder::Any),
            ("index gradient, again", SumOrder::Any),
            ("index gradient, fixed order", SumOrder::Fixed),
        ] {
            let qkv = qkv.in_order(order);
            let call = IndexGradient {
                queries_and_keys: [&qkv.q, &qkv.k],
                index: &index,
                lse: &result.lse,
                blocks: attended,
                lists: &lists,
                weight: Inputs::INDEX_WEIGHT,
            };
            self.device.poison(shape);
            if let Some(gradient) = call.index_gradient(documents, scale)? {
                self.add(name, &gradient)?;
            }
        }
        Ok(())
    }

    /// Attention over `inputs.with_local`, which reads the local blocks as a run of neighbours, with its gradients.
    fn with_local(&mut self) -> Result<(), KernelError> {
        let (inputs, scale, documents) = (self.inputs, self.scale, self.documents.clone());
        let (shape, documents) = (inputs.case.shape, documents.each_ref());
        let sizes = [shape.batch, shape.seq_len, shape.num_kv_heads, inputs.blocks.num_selected_blocks];
        let indices = self.device.int(&inputs.with_local, &sizes);
        let blocks = BlocksWithLocal { indices: &indices, size: inputs.blocks.select_block_size, local: inputs.local };
        let qkv = self.packed(&self.bf16(&inputs.qkv, &packed_of(shape)));
        let (result, lists) = qkv.local_and_selected_attention_forward(documents, blocks, scale)?;
        self.add("with local o", &result.o)?;
        self.add("with local lse", &result.lse)?;
        for (name, order, lists) in [
            ("with local dqkv", SumOrder::Any, &lists[..]),
            ("with local dqkv, new lists", SumOrder::Any, &[][..]),
            ("with local dqkv, fixed order", SumOrder::Fixed, &lists[..]),
        ] {
            self.device.poison(shape);
            let dqkv = indices.empty_contiguous(&packed_of(shape), sieve_kernels::DType::BF16);
            let call = AttentionGradients {
                qkv: &qkv.in_order(order),
                result: &result,
                d_o: &self.d_o,
                grads: &self.packed(&dqkv),
                softmax_scale: scale,
            };
            call.local_and_selected_attention_backward(documents, blocks, lists)?;
            self.add(name, &dqkv)?;
        }
        Ok(())
    }

    /// The gates that add up the branches, with their gradients.
    fn gates(&mut self) -> Result<(), KernelError> {
        let (inputs, shape) = (self.inputs, self.inputs.case.shape);
        let branches = inputs.branches.each_ref().map(|x| self.bf16(x, &shape.output()));
        let branches = branches.each_ref();
        let logits = self.bf16(&inputs.logits, &[shape.batch, shape.seq_len, shape.num_heads * 3]);
        let bias = self.device.float(&inputs.bias, &[shape.num_heads * 3], sieve_kernels::DType::F32);
        self.add("gates o", &nsa_gates(branches, &logits, &bias)?)?;
        let gradients = nsa_gates_backward(branches, &logits, &bias, &self.d_o)?;
        for (name, branch) in GATED.into_iter().zip(&gradients.branches) {
            self.add(name, branch)?;
        }
        self.add("gates dlogits", &gradients.logits)?;
        self.add("gates dbias", &gradients.bias)
    }
}

/// Compares every output and every choice of a run with the expected ones.
fn judge(found: &Found, expected: &Expected, inputs: &Inputs) -> Vec<(&'static str, Outcome)> {
    let mut outcomes: Vec<_> = found
        .outputs
        .iter()
        .map(|(name, values)| {
            // "selected dqkv, again" is compared with the reference of "selected dqkv".
            let of = name.split(',').next().unwrap_or_default();
            (*name, expected.judge(of, values))
        })
        .collect();
    let count = inputs.blocks.num_selected_blocks;
    for (found, Choice { name, rule, blocks }) in found.chosen.iter().zip(&expected.choices) {
        let by_probability = matches!(rule, ChoiceRule::WeightedProbability | ChoiceRule::LargestProbability);
        let tied = |at, of: &[usize]| by_probability && inputs.are_tied(at, *rule, of);
        outcomes.push((*name, judge_choice(found, blocks, count, tied)));
    }
    outcomes
}

/// Every specialisation that a check of NSA launches.
pub(crate) fn nsa_check_kernels(gpu: &DeviceReport) -> NeededKernels {
    let mut list = NeededKernels::default();
    for head_dim in [64, 128] {
        for group in GROUPS {
            // An indexer's gradient in a fixed order has a form of its own for several KV heads.
            let shape = AttentionShape::new(1, 1, [2 * group, 2], [head_dim, head_dim]);
            add_attention(&mut list, gpu, shape, &[NeededKeys::Blocks, NeededKeys::Neighbours]);
            let (keys, order, has_sinks) = (NeededKeys::Blocks, SumOrder::Any, false);
            list.extend(AttentionNeeds { shape, keys, order, has_sinks }.in_order(&gpu.arch()));
        }
    }
    list
}

/// Checks the launch wrappers of native sparse attention.
pub(crate) fn check_wrappers(report: &mut Report, device: &dyn Device, extent: &Extent) -> Result<()> {
    selected_blocks::check(report, device, extent)?;
    let mut random = Random(extent.seed ^ 0x006e_7361); // "nsa" in ASCII: other numbers than the other checks draw
    for at in 0..extent.few() {
        // One long call: its reference takes the CPU seconds, and the emulator would take hours.
        let is_long = at == 0 && extent.has_long_rows();
        let (mut inputs, label) = Inputs::draw(&mut random, extent, at, is_long)?;
        let expected = inputs.expected();
        match on_device(&inputs, device) {
            Ok(found) => {
                let path = inputs.family(device);
                for (name, outcome) in judge(&found, &expected, &inputs) {
                    report.add(&format!("nsa {name}"), path, &label, outcome);
                }
            }
            Err(error) => report.add("nsa", "refused", &label, Err(Wrong::from(error))),
        }
    }
    if extent.has_long_rows() {
        // Not on the emulator: it runs blocks of threads one after the other, so no run can differ from another.
        check_repeats(report, device, extent)
    } else {
        Ok(())
    }
}

/// Repeats long backward passes in a fixed order, where work items wait for each other, and requires equal bits.
fn check_repeats(report: &mut Report, device: &dyn Device, extent: &Extent) -> Result<()> {
    for (heads, width, cuts) in [([8, 2], 128, Cuts::Count(1)), ([3, 3], 64, Cuts::Count(4)), ([16, 1], 128, Cuts::Few)]
    {
        let shape = AttentionShape::new(1, LONG / 2, heads, [width; 2]);
        let case = Case::draw(shape, Keys::Dense, cuts, &Scores::RANDOM[0], extent.seed)?;
        let blocks = NsaBlocks::of(BLOCKS[0]);
        let mut inputs = Inputs::of(case.under(extent.policy), blocks, &mut Random(extent.seed));
        for (in_pairs, pairs) in [(false, ""), (true, " in pairs")] {
            inputs.in_pairs = in_pairs;
            let (label, outcome) = (format!("{shape:?} {cuts:?}{pairs}"), repeated_gradients(&inputs, device));
            report.add_wrapper("nsa, fixed order, repeated", inputs.family(device), &label, outcome);
        }
    }
    Ok(())
}

/// Repeats the backward passes of one call in the fixed order, whose gradients must have equal bits, and compares them
/// with the gradients in any order.
fn repeated_gradients(inputs: &Inputs, device: &dyn Device) -> Outcome {
    let Case { shape, d_o, doc_start, doc_end, .. } = &inputs.case;
    let ([batch, seq_len, num_heads, d], blocks) = (shape.output(), inputs.blocks);
    let bf16 = |values: &[f32], sizes: &[usize]| device.float(values, sizes, sieve_kernels::DType::BF16);
    let bounds = [doc_start, doc_end].map(|x| device.int(x, &[batch, seq_len]));
    let (documents, softmax_scale) = (bounds.each_ref(), 1.0 / (d as f32).sqrt());
    let tensor = bf16(&inputs.qkv, &packed_of(*shape));
    let qkv = Qkv::packed(&tensor, num_heads, shape.num_kv_heads);
    let d_o = bf16(d_o, &shape.output());
    let compressed = bf16(&inputs.compressed, &[2, inputs.rows(), d]);
    let (coarse, chosen) = qkv.q.nsa_compressed_attention_forward(documents, &compressed, blocks, softmax_scale)?;
    let given = device.int(&inputs.read_of(&device.ints(&chosen)?), chosen.shape());
    let attended = AttendedBlocks { indices: &given, size: blocks.select_block_size, in_pairs: inputs.in_pairs };
    let (selected, lists) = qkv.nsa_selected_attention_forward(documents, attended, softmax_scale)?;
    let groups = shape.num_kv_heads;
    let index = bf16(&inputs.index, &[batch, seq_len, groups + 2, d]);
    let gradients = |order| {
        let qkv = qkv.in_order(order);
        let [of_coarse, of_compressed] =
            qkv.q.nsa_compressed_attention_backward(documents, &compressed, blocks, softmax_scale, &coarse, &d_o)?;
        let of_selected = tensor.empty_contiguous(tensor.shape(), sieve_kernels::DType::BF16);
        let call = AttentionGradients {
            qkv: &qkv,
            result: &selected,
            d_o: &d_o,
            grads: &Qkv::packed(&of_selected, num_heads, shape.num_kv_heads),
            softmax_scale,
        };
        call.nsa_selected_attention_backward(documents, attended, &lists)?;
        let of_index = IndexGradient {
            queries_and_keys: [&qkv.q, &qkv.k],
            index: &index,
            lse: &selected.lse,
            blocks: attended,
            lists: &lists,
            weight: Inputs::INDEX_WEIGHT,
        };
        let of_index = of_index.index_gradient(documents, softmax_scale)?;
        let all = [of_coarse, of_compressed, of_selected].into_iter().chain(of_index);
        let floats = all.map(|x| device.floats(&x));
        floats.collect::<Result<Vec<_>, KernelError>>()
    };
    repeat(|| gradients(SumOrder::Fixed))?;
    // No exact values here: the fixed order stands for them.
    let pairs = gradients(SumOrder::Any)?.into_iter().zip(gradients(SumOrder::Fixed)?);
    let errors = pairs.map(|(any, fixed)| ORDERS.judge("a gradient in any order", &any, &fixed, &fixed));
    errors.reduce(|a, b| Ok(a?.max(b?))).unwrap_or(Ok(0.0))
}

#[cfg(test)]
mod tests;
