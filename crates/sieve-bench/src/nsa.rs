//! Native sparse attention's ops against the CPU's f32 kernels, which tests hold against f64.
use crate::bar::{Bar, Results};
use crate::case::{Case, Cuts, Keys};
use crate::device::{self, Device};
use crate::error::Result;
use crate::extent::Extent;
use crate::place::{Place, float, floats, indices};
use crate::report::{Outcome, PathWatch, Report, Wrong, wrong};
use crate::scores::Scores;
use crate::shape::{attention_shape, keys_of, packed_of};
use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, Int, Tensor, TensorData, TensorPrimitive};
use burn_flex::{Flex, FlexDevice};
use sieve_kernels::{
    AttentionGradients, AttentionNeeds, CudaTensor, DeviceReport, KernelError, KeySource, NeededKernels, NeededKeys,
    Qkv, SumOrder, nsa_blocks_backward, nsa_gates, nsa_gates_backward, nsa_mean_pool_backward,
};
use sieve_ops::{AttentionSpec, NsaBackend, NsaBlocks, NsaCall};
use sieve_testing::Random;

/// Query heads of a KV head.
const GROUPS: [usize; 6] = [1, 2, 3, 4, 8, 16];

/// Compressed block, stride, selected block, blocks a query.
const BLOCKS: [[usize; 4]; 5] = [
    [32, 16, 64, 16],
    [8, 4, 8, 3],
    [16, 8, 16, 8],
    [32, 8, 64, 5],
    [4, 4, 4, 2],
];

/// Tokens of one call on a GPU: whole items of lists, and several.
const LONG: usize = 12_345;

/// Share of the queries whose blocks may differ: two of nearly the same importance.
const NEAR_TIES: f64 = 0.01;

/// One call's inputs on the host.
struct Inputs {
    case: Case,
    qkv: Vec<f32>,
    blocks: NsaBlocks,
    positions: [Vec<f32>; 2],
    compressed: Vec<f32>,
    branches: [Vec<f32>; 3],
    logits: Vec<f32>,
    bias: Vec<f32>,
    d_blocks: Vec<f32>,
    /// Of the selected branch, `[batch, seq_len, num_kv_heads, num_selected_blocks]`.
    chosen: Vec<i32>,
}

impl Inputs {
    /// `is_long`: one row of [`LONG`] tokens, with the usual blocks.
    fn draw(random: &mut Random, extent: &Extent, is_long: bool) -> Result<(Self, String)> {
        let group = random.one_of(&GROUPS);
        let num_kv_heads = match (is_long, group < 4) {
            (false, true) => random.between(1, 4),
            _ => 1,
        };
        let head_dim = random.one_of(extent.pick(&[64], &[64, 128]));
        let [size, stride, select, count] = match is_long {
            true => BLOCKS[0],
            false => random.one_of(&BLOCKS),
        };
        let any = random.between(2, extent.longest.max(3));
        let (batch, seq_len) = match is_long {
            true => (1, LONG),
            false => (random.between(1, 3), random.one_of(&[1, 31, 64, 65, any])),
        };
        let heads = [group * num_kv_heads, num_kv_heads];
        let shape = attention_shape(batch, seq_len, heads, [head_dim, head_dim]);
        let blocks = NsaBlocks {
            compress_block_size: size,
            compress_stride: stride,
            select_block_size: select,
            num_selected_blocks: count,
        };
        let cuts = random.one_of(&[Cuts::Count(1), Cuts::Few, Cuts::Mixed, Cuts::Tokens]);
        let seed = random.between(0, 1 << 30) as u64;
        let case = Case::draw(shape, Keys::Dense, cuts, &Scores::RANDOM[0], seed)?;
        let rows = 2 * shape.batch * blocks.num_slots(shape.seq_len) * num_kv_heads;
        let outputs: usize = shape.output().iter().product();
        let gates = outputs / head_dim * 3;
        let ties = random.chance(0.25);
        let mut normals = |count| random.bf16_normals(count);
        let mut compressed = normals(rows * head_dim);
        if ties {
            // Keys of zeros: all blocks that a query sees whole are equally important.
            compressed[..rows * head_dim / 2].fill(0.0);
        }
        let inputs = Self {
            qkv: normals(packed_of(shape).iter().product()),
            positions: [normals(size * head_dim), normals(size * head_dim)],
            compressed,
            branches: [normals(outputs), normals(outputs), normals(outputs)],
            logits: normals(gates),
            bias: normals(shape.num_heads * 3),
            d_blocks: normals(rows * size * head_dim),
            chosen: Vec::new(),
            case,
            blocks,
        };
        let label = format!("{shape:?} {blocks:?} {cuts:?} ties {ties} seed {seed}");
        Ok((inputs, label))
    }

    /// The kernels that the selected branch takes.
    fn family(&self, device: &dyn Device) -> &'static str {
        let family = device::family(device, &self.case.shape, KeySource::Gathered);
        device::family_name(family)
    }

    /// Gives the selected branch a choice without every third block.
    fn leave_out(&mut self, chosen: &[i32]) {
        let count = self.blocks.num_selected_blocks;
        self.chosen.clear();
        for row in chosen.chunks_exact(count) {
            let first = self.chosen.len();
            self.chosen
                .extend(row.iter().filter(|&&block| block >= 0 && block % 3 != 1));
            self.chosen.resize(first + count, -1);
        }
    }

    fn call<B: Place>(&self, device: &B::Device) -> NsaCall<B> {
        let spec = AttentionSpec {
            softmax_scale: 1.0 / (self.case.shape.head_dim as f64).sqrt(),
            ..self.case.spec(None)
        };
        NsaCall::new(&self.case.documents::<B>(device), spec, self.blocks)
    }

    /// Rows of compressed blocks.
    fn rows(&self) -> usize {
        let [batch, seq_len, kv_heads, _] = keys_of(self.case.shape);
        batch * self.blocks.num_slots(seq_len) * kv_heads
    }

    /// The packed tensor and the compressed blocks.
    fn coarse<B: Place>(&self, device: &B::Device) -> [FloatTensor<B>; 2] {
        let (packed, d) = (packed_of(self.case.shape), self.case.shape.head_dim);
        [
            typed::<B, 4>(&self.qkv, packed, device),
            typed::<B, 3>(&self.compressed, [2, self.rows(), d], device),
        ]
    }

    /// The packed tensor with NaN for the keys and values that nobody chose.
    fn selected_qkv(&self) -> Vec<f32> {
        let (mut qkv, [_, seq_len, heads, width]) = (self.qkv.clone(), packed_of(self.case.shape));
        for (at, token) in qkv.chunks_exact_mut(heads * width).enumerate() {
            let offset = at % seq_len - self.case.doc_start[at] as usize;
            if !self.chosen.is_empty() && offset / self.blocks.select_block_size % 3 == 1 {
                token[self.case.shape.num_heads * width..].fill(f32::NAN);
            }
        }
        qkv
    }
}

/// What the ops return, in order, and the blocks that the compressed branch chose.
struct Found {
    outputs: Results,
    chosen: Vec<i32>,
}

/// A contiguous tensor of the type that the backend's attention takes.
pub(crate) fn typed<B: Place, const D: usize>(values: &[f32], shape: [usize; D], device: &B::Device) -> FloatTensor<B> {
    let x = TensorPrimitive::Float(float::<B, D>(values, shape, device));
    let x = Tensor::<B, D>::from_primitive(x).cast(B::DTYPE);
    x.into_primitive().tensor()
}

/// The blocks that the CPU chooses.
fn choice(inputs: &Inputs) -> Vec<i32> {
    let [qkv, compressed] = inputs.coarse::<Flex>(&FlexDevice);
    let coarse = Flex::nsa_compressed_attention(qkv, compressed, &inputs.call(&FlexDevice));
    indices::<Flex, 4>(coarse.block_indices)
}

/// Every op and its gradients; the selected branch reads the blocks of `inputs`, or where there are none its own
/// choice.
fn run<B: Place>(inputs: &Inputs, device: &B::Device) -> Found {
    let Case { shape, d_o, .. } = &inputs.case;
    let (dims, output, call) = (packed_of(*shape), shape.output(), inputs.call(device));
    let [batch, seq_len, num_heads, d] = output;
    let size = inputs.blocks.compress_block_size;
    let [qkv, compressed] = inputs.coarse::<B>(device);
    let d_o = typed::<B, 4>(d_o, output, device);
    let positions = inputs.positions.each_ref();
    let positions = positions.map(|x| typed::<B, 2>(x, [size, d], device));
    let d_blocks = typed::<B, 3>(&inputs.d_blocks, [2, inputs.rows(), size * d], device);
    let mut outputs = Vec::new();
    let mut add = |name, values| outputs.push((name, values));

    let blocks = B::nsa_blocks(qkv.clone(), positions, &call);
    add("blocks", floats::<B, 3>(blocks));
    let [dqkv, dk, dv] = B::nsa_blocks_backward(dims, &call, d_blocks);
    add("blocks dqkv", floats::<B, 4>(dqkv));
    add("k_positions", floats::<B, 2>(dk));
    add("v_positions", floats::<B, 2>(dv));
    let pooled = B::nsa_mean_pool(qkv.clone(), &call);
    add("mean pool", floats::<B, 3>(pooled));
    let dqkv = B::nsa_mean_pool_backward(dims, &call, compressed.clone());
    add("mean pool dqkv", floats::<B, 4>(dqkv));

    let coarse = B::nsa_compressed_attention(qkv.clone(), compressed.clone(), &call);
    let chosen = indices::<B, 4>(coarse.block_indices.clone());
    add("compressed o", floats::<B, 4>(coarse.output.o.clone()));
    let (output_of, d_of) = (coarse.output, d_o.clone());
    let [dqkv, d_compressed] = B::nsa_compressed_attention_backward(qkv, compressed, &call, output_of, d_of);
    add("compressed dqkv", floats::<B, 4>(dqkv));
    add("dcompressed", floats::<B, 3>(d_compressed));

    let block_indices = match inputs.chosen.is_empty() {
        true => coarse.block_indices,
        false => {
            let count = inputs.blocks.num_selected_blocks;
            let shape = [batch, seq_len, shape.num_kv_heads, count];
            let data = TensorData::new(inputs.chosen.clone(), shape);
            Tensor::<B, 4, Int>::from_data(data, device).into_primitive()
        }
    };
    let qkv = typed::<B, 4>(&inputs.selected_qkv(), dims, device);
    let selected = B::nsa_selected_attention(qkv.clone(), block_indices.clone(), &call);
    add("selected o", floats::<B, 4>(selected.output.o.clone()));
    let dqkv = B::nsa_selected_attention_backward(qkv, block_indices, &call, selected, d_o.clone());
    add("selected dqkv", floats::<B, 4>(dqkv));

    let branches = inputs.branches.each_ref();
    let branches = branches.map(|x| typed::<B, 4>(x, output, device));
    let gates = num_heads * 3;
    let logits = typed::<B, 3>(&inputs.logits, [batch, seq_len, gates], device);
    let bias = typed::<B, 1>(&inputs.bias, [gates], device);
    let o = B::nsa_gates(branches.clone(), logits.clone(), bias.clone());
    add("gates o", floats::<B, 4>(o));
    let [a, b, c, d_logits, d_bias] = B::nsa_gates_backward(branches, logits, bias, d_o);
    for branch in [a, b, c] {
        add("gates dbranch", floats::<B, 4>(branch));
    }
    add("gates dlogits", floats::<B, 3>(d_logits));
    add("gates dbias", floats::<B, 1>(d_bias));
    Found { outputs, chosen }
}

/// The choices that differ, as a share of what may.
fn judge_choice(chosen: &[i32], expected: &[i32], count: usize) -> Outcome {
    let all = expected.len() / count;
    let pairs = chosen.chunks_exact(count).zip(expected.chunks_exact(count));
    let differing = pairs.filter(|(a, b)| a != b).count();
    // A row or two of a short call are no share yet.
    let allowed = (NEAR_TIES * all as f64).max(2.0);
    match differing as f64 <= allowed {
        true => Ok((differing as f64 / allowed) as f32),
        false => wrong(format!("{differing} of {all} queries chose other blocks")),
    }
}

/// The same through the launch wrappers.
fn on_device(inputs: &Inputs, device: &dyn Device) -> Result<Found, KernelError> {
    let Case {
        shape,
        d_o,
        doc_start,
        doc_end,
        ..
    } = &inputs.case;
    let ([batch, seq_len, num_heads, d], num_kv_heads) = (shape.output(), shape.num_kv_heads);
    let (blocks, rows) = (inputs.blocks, inputs.rows());
    let bf16 = |values: &[f32], sizes: &[usize]| device.float(values, sizes, DType::BF16);
    let bounds = [doc_start, doc_end].map(|x| device.int(x, &[batch, seq_len]));
    let documents = [&bounds[0], &bounds[1]];
    let size = blocks.compress_block_size;
    let tensor = bf16(&inputs.qkv, &packed_of(*shape));
    let qkv = Qkv::packed(&tensor, num_heads, num_kv_heads);
    let d_o = bf16(d_o, &shape.output());
    let positions = inputs.positions.each_ref().map(|x| bf16(x, &[size, d]));
    let compressed = bf16(&inputs.compressed, &[2, rows, d]);
    let d_blocks = bf16(&inputs.d_blocks, &[2, rows, size * d]);
    let scale = 1.0 / (d as f32).sqrt();
    let order = SumOrder::Any;
    let mut outputs = Vec::new();
    let mut add = |name, tensor: &CudaTensor| {
        outputs.push((name, device.floats(tensor)?));
        Ok::<(), KernelError>(())
    };

    device.poison(*shape);
    let positions = [&positions[0], &positions[1]];
    add("blocks", &qkv.nsa_blocks(positions, documents, blocks)?)?;
    let [dqkv, dk, dv] = nsa_blocks_backward(shape, documents, blocks, &d_blocks)?;
    add("blocks dqkv", &dqkv)?;
    add("k_positions", &dk)?;
    add("v_positions", &dv)?;
    add("mean pool", &qkv.nsa_mean_pool(documents, blocks)?)?;
    let dqkv = nsa_mean_pool_backward(shape, documents, blocks, &compressed)?;
    add("mean pool dqkv", &dqkv)?;

    let (coarse, indices) = qkv.nsa_compressed_attention_forward(documents, &compressed, blocks, scale)?;
    add("compressed o", &coarse.o)?;
    let [dqkv, d_compressed] =
        qkv.nsa_compressed_attention_backward(documents, &compressed, blocks, scale, &coarse, &d_o, order)?;
    add("compressed dqkv", &dqkv)?;
    add("dcompressed", &d_compressed)?;

    let chosen = device.ints(&indices)?;
    let count = blocks.num_selected_blocks;
    let given = device.int(&inputs.chosen, &[batch, seq_len, num_kv_heads, count]);
    let tensor = bf16(&inputs.selected_qkv(), &packed_of(*shape));
    let qkv = Qkv::packed(&tensor, num_heads, num_kv_heads);
    let (selected, lists) = qkv.nsa_selected_attention_forward(documents, &given, blocks, scale)?;
    add("selected o", &selected.o)?;
    // The forward pass's lists, twice: a pass leaves them as it found them.
    for (name, order, lists) in [
        ("selected dqkv", order, &lists[..]),
        ("selected dqkv, again", order, &lists[..]),
        ("selected dqkv, new lists", order, &[][..]),
        ("selected dqkv, fixed order", SumOrder::Fixed, &lists[..]),
    ] {
        device.poison(*shape);
        let dqkv = tensor.empty_contiguous(tensor.shape(), DType::BF16);
        let grads = Qkv::packed(&dqkv, num_heads, num_kv_heads);
        let call = AttentionGradients {
            qkv: &qkv,
            result: &selected,
            d_o: &d_o,
            grads: &grads,
            softmax_scale: scale,
            order,
        };
        call.nsa_selected_attention_backward(documents, &given, blocks, lists)?;
        add(name, &dqkv)?;
    }

    let branches = inputs.branches.each_ref().map(|x| bf16(x, &shape.output()));
    let branches = [&branches[0], &branches[1], &branches[2]];
    let logits = bf16(&inputs.logits, &[batch, seq_len, num_heads * 3]);
    let bias = device.float(&inputs.bias, &[num_heads * 3], DType::F32);
    add("gates o", &nsa_gates(branches, &logits, &bias)?)?;
    let gradients = nsa_gates_backward(branches, &logits, &bias, &d_o)?;
    for branch in &gradients.branches {
        add("gates dbranch", branch)?;
    }
    add("gates dlogits", &gradients.logits)?;
    add("gates dbias", &gradients.bias)?;
    Ok(Found { outputs, chosen })
}

/// The largest errors of a run, by output.
fn judge(found: &Found, expected: &Found, inputs: &Inputs, is_bf16: bool) -> Vec<(&'static str, Outcome)> {
    let share = if is_bf16 { 1.0 / 64.0 } else { 1e-4 };
    let bar = Bar::new(0.0, Bar::FLOOR, share);
    let mut outcomes = Vec::new();
    let mut exact = expected.outputs.iter();
    for (name, found) in &found.outputs {
        // Further runs have the expectation of the first.
        if !name.contains(", ") {
            exact.next();
        }
        let at = expected.outputs.len() - exact.len() - 1;
        let (_, exact) = &expected.outputs[at];
        outcomes.push((*name, bar.judge(name, found, exact, exact)));
    }
    let count = inputs.blocks.num_selected_blocks;
    let choice = judge_choice(&found.chosen, &expected.chosen, count);
    outcomes.push(("choice", choice));
    outcomes
}

/// Cases with the CPU's results; the selected branch gets most of the CPU's choice, so that near ties do not matter and
/// some blocks are nobody's.
fn cases(extent: &Extent) -> impl Iterator<Item = Result<(Inputs, Found, String)>> {
    let mut random = Random(extent.seed ^ 0x006e_7361);
    let extent = *extent;
    (0..extent.few()).map(move |case| {
        // The reference of a long row takes the CPU seconds, and an emulator would never end.
        let is_long = case == 0 && extent.longest > 200 && !extent.is_emulated;
        let (mut inputs, label) = Inputs::draw(&mut random, &extent, is_long)?;
        inputs.leave_out(&choice(&inputs));
        let expected = run::<Flex>(&inputs, &FlexDevice);
        Ok((inputs, expected, label))
    })
}

/// Every specialisation that a check asks for.
pub(crate) fn nsa_check_kernels(gpu: &DeviceReport) -> NeededKernels {
    let mut list = NeededKernels::default();
    for head_dim in [64, 128] {
        for group in GROUPS {
            for order in [SumOrder::Any, SumOrder::Fixed] {
                let shape = attention_shape(1, 1, [group, 1], [head_dim, head_dim]);
                for keys in [NeededKeys::Blocks, NeededKeys::Neighbours] {
                    let needs = AttentionNeeds { shape, keys, order };
                    list.extend(needs.kernels(&gpu.arch()));
                }
            }
        }
    }
    list
}

/// The launch wrappers.
pub(crate) fn check_wrappers(report: &mut Report, device: &dyn Device, extent: &Extent) -> Result<()> {
    for case in cases(extent) {
        let (inputs, expected, label) = case?;
        match on_device(&inputs, device) {
            Ok(found) => {
                let path = inputs.family(device);
                for (name, outcome) in judge(&found, &expected, &inputs, true) {
                    report.add(&format!("nsa {name}"), path, &label, outcome);
                }
            }
            Err(error) => report.add("nsa", "refused", &label, Err(Wrong::from(error))),
        }
    }
    Ok(())
}

/// The ops of `B`.
pub(crate) fn check_ops<B: Place>(report: &mut Report, device: &B::Device, extent: &Extent) -> Result<()> {
    for case in cases(extent) {
        let (inputs, expected, label) = case?;
        let watch = PathWatch::start(B::IS_CUDA);
        let found = run::<B>(&inputs, device);
        let path = watch.path();
        for (name, outcome) in judge(&found, &expected, &inputs, B::IS_CUDA) {
            let name = format!("op nsa {name}");
            report.add_call(&name, &path, B::KERNEL, &label, || outcome);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_passes_and_another_choice_fails() {
        let mut report = Report::default();
        let extent = Extent::all(3, 90, 1);
        check_ops::<Flex>(&mut report, &FlexDevice, &extent).expect("cases");
        assert_eq!(report.failed(), 0);
        assert!(judge_choice(&[0, 1, 0, 2, 0, 3], &[0, 1, 0, 1, 0, 1], 2).is_ok());
        let (found, expected) = (vec![0; 40], vec![1; 40]);
        assert!(judge_choice(&found, &expected, 2).is_err());
    }
}
