//! `sieve kernels run nsa | mla`: layers that consist of several ops, computed by the ops that models use.
use crate::case::{Case, scaled_normals};
use crate::latent;
use crate::outputs::Outputs;
use crate::shape::{keys_of, packed_of, queries_of, values_of};
use crate::strided::packed;
use crate::tensors::{Computes, floats, indices, typed, wrapped};
use burn::backend::Autodiff;
use burn::tensor::activation::relu;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, Tensor, TensorData};
use sieve_core::model::NsaCompression;
use sieve_hf::NamedTensor;
use sieve_kernels::AttentionShape;
use sieve_ops::{AttentionCall, AttentionOutput, DeviceBackend, NsaBlocks, NsaCall, NsaCompressed, NsaSelected};
use sieve_testing::Random;

/// Blocks of native sparse attention, and how a block is compressed to one key and one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NsaForm {
    /// Block sizes of the compressed and the selected branch.
    pub blocks: NsaBlocks,
    /// Whether blocks are compressed by their mean or by an MLP.
    pub pool: NsaCompression,
}

/// The block sizes of arXiv:2502.11089, compressed by their mean.
impl Default for NsaForm {
    fn default() -> Self {
        Self { blocks: NsaBlocks::PUBLISHED, pool: NsaCompression::Mean }
    }
}

impl NsaForm {
    /// The form as metadata of a file.
    pub(super) fn words(&self) -> [(&'static str, String); 2] {
        let NsaForm { blocks, pool } = self;
        let sizes =
            [blocks.compress_block_size, blocks.compress_stride, blocks.select_block_size, blocks.num_selected_blocks];
        let pool = match pool {
            NsaCompression::Mean => "mean",
            NsaCompression::Mlp => "mlp",
        };
        [("blocks", sizes.map(|x| x.to_string()).join(" ")), ("pool", pool.to_owned())]
    }
}

fn primitive<B: Computes, const D: usize>(x: Tensor<B, D>) -> FloatTensor<B> {
    x.into_primitive().tensor()
}

/// A weight of a compression MLP, exact in bf16.
struct Weight {
    name: String,
    sizes: [usize; 2],
    values: Vec<f32>,
}

/// Draws the weights of the compression MLPs of keys and of values: position embeddings, first matrix, second matrix.
/// Their products with normal numbers are normal again; the hidden layer is twice as wide as a head.
fn mlp_weights(blocks: NsaBlocks, head_dim: usize, random: &mut Random) -> [[Weight; 3]; 2] {
    let (size, hidden) = (blocks.compress_block_size, 2 * head_dim);
    let [[k_positions, v_positions], [k_up, v_up], [k_down, v_down]] = [
        ("positions", [size, head_dim], 1),
        ("up", [hidden, size * head_dim], size * head_dim),
        ("down", [head_dim, hidden], hidden),
    ]
    .map(|(what, sizes, inner): (_, [usize; 2], usize)| {
        ["k", "v"].map(|of| Weight {
            name: format!("{of}_{what}"),
            sizes,
            values: scaled_normals(random, sizes.iter().product(), 1.0 / (inner as f32).sqrt()),
        })
    });
    [[k_positions, k_up, k_down], [v_positions, v_up, v_down]]
}

/// An autodiff leaf that requires a gradient.
fn leaf<B: Computes, const D: usize>(x: FloatTensor<B>) -> Tensor<Autodiff<B>, D> {
    Tensor::from_inner(wrapped::<B, D>(x)).require_grad()
}

/// One key and one value of each block: their mean where `weights` is `None`, otherwise
/// `W_2 relu(W_1 flatten(block + positions))`.
fn pooled<B: Computes>(
    qkv: &Tensor<Autodiff<B>, 4>,
    weights: Option<&[[Tensor<Autodiff<B>, 2>; 3]; 2]>,
    call: &NsaCall<B>,
) -> Tensor<Autodiff<B>, 3> {
    let Some([k, v]) = weights else {
        return sieve_ops::nsa_mean_pool(qkv.clone(), call);
    };
    let blocks = sieve_ops::nsa_blocks(qkv.clone(), k[0].clone(), v[0].clone(), call);
    let [_, rows, width] = blocks.dims();
    // Of keys (`at` = 0) or of values (1).
    let of = |(at, [_, up, down]): (usize, &[Tensor<Autodiff<B>, 2>; 3])| {
        let blocks = blocks.clone().narrow(0, at, 1).reshape([rows, width]);
        sieve_ops::linear(relu(sieve_ops::linear(blocks, up.clone())), down.clone())
    };
    Tensor::stack::<3>([k, v].into_iter().enumerate().map(of).collect(), 0)
}

/// The tensors of a file, in order.
pub(super) struct Tensors {
    pub(super) list: Vec<NamedTensor>,
    /// Element type of the ops' outputs.
    own: DType,
}

impl Tensors {
    /// A list without tensors.
    pub(super) fn new(own: DType) -> Self {
        Self { list: Vec::new(), own }
    }

    /// Adds the queries, keys and values of a case.
    pub(super) fn qkv(&mut self, case: &Case) {
        self.floats("q", &case.q, &queries_of(case.shape), DType::BF16);
        self.floats("k", &case.k, &keys_of(case.shape), DType::BF16);
        self.floats("v", &case.v, &values_of(case.shape), DType::BF16);
    }

    /// Appends the documents' bounds and returns the list.
    pub(super) fn finish(mut self, cu_seqlens: Vec<i32>) -> Vec<NamedTensor> {
        let count = cu_seqlens.len();
        self.ints("cu_seqlens", cu_seqlens, &[count]);
        self.list
    }

    pub(super) fn floats(&mut self, name: &str, values: &[f32], shape: &[usize], dtype: DType) {
        let data = TensorData::new(values.to_vec(), shape.to_vec()).convert_dtype(dtype);
        let name = name.to_owned();
        self.list.push(NamedTensor { name, data });
    }

    pub(super) fn ints(&mut self, name: &str, values: Vec<i32>, shape: &[usize]) {
        let data = TensorData::new(values, shape.to_vec());
        let name = name.to_owned();
        self.list.push(NamedTensor { name, data });
    }

    /// Adds an op's output in the type of the ops' outputs.
    pub(super) fn output(&mut self, name: &str, values: &[f32], shape: &[usize]) {
        self.floats(name, values, shape, self.own);
    }
}

/// Inputs, outputs and gradients of latent attention from the projections on. Keys are wider than values by their
/// rotated part.
pub(super) fn mla<B: Computes>(case: Case, seed: u64, device: &B::Device) -> Vec<NamedTensor> {
    let mut tensors = Tensors::new(B::DTYPE);
    let AttentionShape { batch, seq_len, .. } = case.shape;
    let bounds = case.cu_seqlens();
    let per_head = case.shape.lse();
    let (d_o, output) = (case.d_o.clone(), case.shape.output());
    let call = latent::Call::written(case, seed);
    for (name, values) in call.inputs() {
        let width = values.len() / (batch * seq_len);
        tensors.floats(name, values, &[batch, seq_len, width], DType::BF16);
    }
    tensors.floats("do", &d_o, &output, DType::BF16);
    for (name, values) in call.on::<B>(device, B::DTYPE) {
        let width = values.len() / (batch * seq_len);
        match name {
            "o" => tensors.output(name, &values, &output),
            "lse" => tensors.floats(name, &values, &per_head, DType::F32),
            _ => tensors.output(name, &values, &[batch, seq_len, width]),
        }
    }
    tensors.finish(bounds)
}

/// Inputs, gates, chosen blocks, outputs and all gradients of native sparse attention; with an MLP also its weights and
/// their gradients.
pub(super) fn nsa<B: Computes>(case: &Case, form: NsaForm, seed: u64, device: &B::Device) -> Vec<NamedTensor> {
    let mut tensors = Tensors::new(B::DTYPE);
    let layer = NsaLayer::<B>::draw(case, form, seed, device, &mut tensors);
    let forward = layer.forward(device, &mut tensors);
    let sum = layer.backward(forward, &mut tensors);
    let mut gradients = Outputs::default();
    gradients.set_packed_gradient(case.shape, &sum);
    tensors.floats("dq", &gradients.dq, &queries_of(case.shape), DType::F32);
    tensors.floats("dk", &gradients.dk, &keys_of(case.shape), DType::F32);
    tensors.floats("dv", &gradients.dv, &values_of(case.shape), DType::F32);
    tensors.finish(case.cu_seqlens())
}

/// The three branches, in the order of the gates.
const BRANCHES: [&str; 3] = ["compressed", "selected", "window"];

/// The operands of native sparse attention's ops.
struct NsaLayer<'a, B: Computes> {
    case: &'a Case,
    /// Calls of the compressed and selected branch, and of the window branch.
    call: NsaCall<B>,
    window: AttentionCall<B>,
    /// Packed queries, keys and values.
    qkv: FloatTensor<B>,
    /// Gradient of the output.
    d_o: FloatTensor<B>,
    /// Logits and bias of the gates.
    gates: [FloatTensor<B>; 2],
    /// Weights of the MLPs that compress keys and values; `None` where blocks are compressed by their mean.
    weights: Option<[[Weight; 3]; 2]>,
}

/// What the backward pass reads of the forward pass.
struct NsaForward<B: Computes> {
    /// The leaves of autodiff: the packed tensor whose keys and values were compressed, and the MLPs' weights.
    compressed_from: Tensor<Autodiff<B>, 4>,
    weights: Option<[[Tensor<Autodiff<B>, 2>; 3]; 2]>,
    /// Compressed keys and values, with the graph behind them.
    compressed: Tensor<Autodiff<B>, 3>,
    coarse: NsaCompressed<B>,
    selected: NsaSelected<B>,
    recent: AttentionOutput<B>,
}

impl<'a, B: Computes> NsaLayer<'a, B> {
    /// Draws what the case does not have, gates and weights, and adds all inputs to `tensors`.
    fn draw(case: &'a Case, form: NsaForm, seed: u64, device: &B::Device, tensors: &mut Tensors) -> Self {
        let NsaForm { blocks, pool } = form;
        let output = case.shape.output();
        let [batch, seq_len, num_heads, d] = output;
        let num_gates = num_heads * BRANCHES.len();
        let mut random = Random(seed ^ 0x0067_6174); // "gat" (gates) in ASCII: other numbers than the case's
        let (logits, bias) = (random.bf16_normals(batch * seq_len * num_gates), random.bf16_normals(num_gates));
        tensors.qkv(case);
        tensors.floats("gate_logits", &logits, &[batch, seq_len, num_heads, BRANCHES.len()], DType::BF16);
        tensors.floats("gate_bias", &bias, &[num_heads, BRANCHES.len()], DType::BF16);
        tensors.floats("do", &case.d_o, &output, DType::BF16);
        let weights = (pool == NsaCompression::Mlp).then(|| mlp_weights(blocks, d, &mut random));
        for Weight { name, sizes, values } in weights.iter().flatten().flatten() {
            tensors.floats(name, values, sizes, DType::BF16);
        }
        let documents = case.documents::<B>(device).bounds();
        let logits = typed::<B, 3>(&logits, [batch, seq_len, num_gates], device);
        Self {
            case,
            call: NsaCall::new(documents.clone(), case.spec(None), blocks),
            window: AttentionCall::new(documents, case.spec(Some(case.window()))),
            qkv: typed::<B, 4>(&packed(case), packed_of(case.shape), device),
            d_o: typed::<B, 4>(&case.d_o, output, device),
            gates: [logits, typed::<B, 1>(&bias, [num_gates], device)],
            weights,
        }
    }

    /// Shape of the compressed keys and values: a slot holds one block's key, or value.
    fn slots(&self) -> [usize; 5] {
        let [batch, seq_len, _, head_dim] = self.case.shape.output();
        [2, batch, self.call.blocks.num_slots(seq_len), self.case.shape.num_kv_heads, head_dim]
    }

    /// Runs the branches and their gates, and adds what they return to `tensors`.
    fn forward(&self, device: &B::Device, tensors: &mut Tensors) -> NsaForward<B> {
        let leaf_of = |weight: &Weight| leaf(typed::<B, 2>(&weight.values, weight.sizes, device));
        let weights = self.weights.as_ref().map(|weights| weights.each_ref().map(|mlp| mlp.each_ref().map(leaf_of)));
        let compressed_from = leaf(self.qkv.clone());
        let compressed = pooled::<B>(&compressed_from, weights.as_ref(), &self.call);
        let keys_and_values = primitive(compressed.clone().inner());
        let coarse = B::nsa_compressed_attention(self.qkv.clone(), keys_and_values.clone(), &self.call);
        let selected = B::nsa_selected_attention(self.qkv.clone(), coarse.block_indices.clone(), &self.call);
        let recent = <B as DeviceBackend>::attention(self.qkv.clone(), &self.window);
        let forward = NsaForward { compressed_from, weights, compressed, coarse, selected, recent };
        let [logits, bias] = self.gates.clone();
        let o = B::nsa_gates(forward.outputs().map(|branch| branch.o.clone()), logits, bias);

        let output = self.case.shape.output();
        let [batch, seq_len, ..] = output;
        let choice = [batch, seq_len, self.case.shape.num_kv_heads, self.call.blocks.num_selected_blocks];
        tensors.output("compressed", &floats::<B, 3>(keys_and_values), &self.slots());
        tensors.ints("block_indices", indices::<B, 4>(forward.coarse.block_indices.clone()), &choice);
        for (name, branch) in BRANCHES.iter().zip(forward.outputs()) {
            tensors.output(&format!("{name}_o"), &floats::<B, 4>(branch.o.clone()), &output);
            let lse = floats::<B, 3>(branch.lse.clone());
            tensors.floats(&format!("{name}_lse"), &lse, &self.case.shape.lse(), DType::F32);
        }
        tensors.output("o", &floats::<B, 4>(o), &output);
        forward
    }

    /// Adds the gradients of the gates, of each branch's output and of the compression to `tensors`. Returns the
    /// gradient of the packed tensor: the sum, in f32, over the three branches and the compression.
    fn backward(&self, forward: NsaForward<B>, tensors: &mut Tensors) -> Vec<f32> {
        let output = self.case.shape.output();
        let [batch, seq_len, num_heads, _] = output;
        let branches = forward.outputs().map(|branch| branch.o.clone());
        let [logits, bias] = self.gates.clone();
        let [coarse_do, selected_do, window_do, d_logits, d_bias] =
            B::nsa_gates_backward(branches, logits, bias, self.d_o.clone());
        for (name, d_branch) in BRANCHES.iter().zip([&coarse_do, &selected_do, &window_do]) {
            tensors.output(&format!("{name}_do"), &floats::<B, 4>(d_branch.clone()), &output);
        }
        tensors.output("dgate_logits", &floats::<B, 3>(d_logits), &[batch, seq_len, num_heads, BRANCHES.len()]);
        tensors.floats("dgate_bias", &floats::<B, 1>(d_bias), &[num_heads, BRANCHES.len()], DType::F32);

        let NsaForward { compressed_from, weights, compressed, coarse, selected, recent } = forward;
        let (qkv, chosen) = (self.qkv.clone(), coarse.block_indices);
        let keys_and_values = primitive(compressed.clone().inner());
        let [of_coarse, d_compressed] =
            B::nsa_compressed_attention_backward(qkv.clone(), keys_and_values, &self.call, coarse.output, coarse_do);
        tensors.output("dcompressed", &floats::<B, 3>(d_compressed.clone()), &self.slots());
        let d_compressed = Tensor::from_inner(wrapped(d_compressed));
        let mut of_graph = sieve_ops::seed_gradient(compressed, d_compressed).backward();
        let of_compression = compressed_from.grad_remove(&mut of_graph).expect("keys are compressed");
        let leaves = weights.iter().flatten().flatten();
        for (Weight { name, sizes, .. }, leaf) in self.weights.iter().flatten().flatten().zip(leaves) {
            let gradient = leaf.grad_remove(&mut of_graph).expect("every weight is used");
            tensors.floats(&format!("d{name}"), &floats::<B, 2>(primitive(gradient)), sizes, DType::F32);
        }
        let parts = [
            of_coarse,
            primitive(of_compression),
            B::nsa_selected_attention_backward(qkv.clone(), chosen, &self.call, selected, selected_do),
            B::attention_backward(qkv, &self.window, recent, window_do),
        ];
        let mut sum = vec![0.0f32; packed_of(self.case.shape).iter().product()];
        for part in parts {
            let values = floats::<B, 4>(part);
            sum.iter_mut().zip(values).for_each(|(sum, x)| *sum += x);
        }
        sum
    }
}

impl<B: Computes> NsaForward<B> {
    /// The outputs of the three branches.
    fn outputs(&self) -> [&AttentionOutput<B>; 3] {
        [&self.coarse.output, &self.selected.output, &self.recent]
    }
}
