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
use sieve_ops::{AttentionCall, DeviceBackend, NsaBlocks, NsaCall};
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
    let NsaForm { blocks, pool } = form;
    let mut tensors = Tensors::new(B::DTYPE);
    let (output, num_kv_heads) = (case.shape.output(), case.shape.num_kv_heads);
    let [batch, seq_len, num_heads, d] = output;
    let gates = num_heads * 3;
    let mut random = Random(seed ^ 0x0067_6174); // "gat" (gates) in ASCII: other numbers than the case's
    let (logits, bias) = (random.bf16_normals(batch * seq_len * gates), random.bf16_normals(gates));
    tensors.qkv(case);
    let gates_shape = [batch, seq_len, num_heads, 3];
    tensors.floats("gate_logits", &logits, &gates_shape, DType::BF16);
    tensors.floats("gate_bias", &bias, &[num_heads, 3], DType::BF16);
    tensors.floats("do", &case.d_o, &output, DType::BF16);
    let weights = (pool == NsaCompression::Mlp).then(|| mlp_weights(blocks, d, &mut random));
    for Weight { name, sizes, values } in weights.iter().flatten().flatten() {
        tensors.floats(name, values, sizes, DType::BF16);
    }

    let documents = case.documents::<B>(device).bounds();
    let call = NsaCall::new(documents.clone(), case.spec(None), blocks);
    let window = AttentionCall::new(documents, case.spec(Some(case.window())));
    let dims = packed_of(case.shape);
    let qkv = typed::<B, 4>(&packed(case), dims, device);
    let d_o = typed::<B, 4>(&case.d_o, output, device);
    let logits = typed::<B, 3>(&logits, [batch, seq_len, gates], device);
    let bias = typed::<B, 1>(&bias, [gates], device);

    let leaf_of = |weight: &Weight| leaf(typed::<B, 2>(&weight.values, weight.sizes, device));
    let leaves = weights.as_ref().map(|weights| weights.each_ref().map(|mlp| mlp.each_ref().map(leaf_of)));
    let pooled_from = leaf(qkv.clone());
    let compressed_graph = pooled::<B>(&pooled_from, leaves.as_ref(), &call);
    let compressed = primitive(compressed_graph.clone().inner());
    let coarse = B::nsa_compressed_attention(qkv.clone(), compressed.clone(), &call);
    let chosen = coarse.block_indices;
    let selected = B::nsa_selected_attention(qkv.clone(), chosen.clone(), &call);
    let recent = <B as DeviceBackend>::attention(qkv.clone(), &window);
    let of_branches = [&coarse.output, &selected.output, &recent];
    let branches = of_branches.map(|x| x.o.clone());
    let o = B::nsa_gates(branches.clone(), logits.clone(), bias.clone());

    // A slot holds one block's compressed key and value.
    let slots_shape = [2, batch, blocks.num_slots(seq_len), num_kv_heads, d];
    let choice = [batch, seq_len, num_kv_heads, blocks.num_selected_blocks];
    tensors.output("compressed", &floats::<B, 3>(compressed.clone()), &slots_shape);
    tensors.ints("block_indices", indices::<B, 4>(chosen.clone()), &choice);
    let names = ["compressed", "selected", "window"];
    for (name, x) in names.iter().zip(of_branches) {
        tensors.output(&format!("{name}_o"), &floats::<B, 4>(x.o.clone()), &output);
        let lse = floats::<B, 3>(x.lse.clone());
        tensors.floats(&format!("{name}_lse"), &lse, &case.shape.lse(), DType::F32);
    }
    tensors.output("o", &floats::<B, 4>(o), &output);

    let [coarse_do, selected_do, window_do, d_logits, d_bias] = B::nsa_gates_backward(branches, logits, bias, d_o);
    let gradients = [&coarse_do, &selected_do, &window_do];
    for (name, x) in names.iter().zip(gradients) {
        tensors.output(&format!("{name}_do"), &floats::<B, 4>(x.clone()), &output);
    }
    tensors.output("dgate_logits", &floats::<B, 3>(d_logits), &gates_shape);
    let d_bias = floats::<B, 1>(d_bias);
    tensors.floats("dgate_bias", &d_bias, &[num_heads, 3], DType::F32);
    let [coarse_dqkv, d_compressed] =
        B::nsa_compressed_attention_backward(qkv.clone(), compressed, &call, coarse.output, coarse_do);
    let values = floats::<B, 3>(d_compressed.clone());
    tensors.output("dcompressed", &values, &slots_shape);
    let d_compressed = Tensor::from_inner(wrapped(d_compressed));
    let mut of_graph = sieve_ops::seed_gradient(compressed_graph, d_compressed).backward();
    let blocks_dqkv = primitive(pooled_from.grad_remove(&mut of_graph).expect("keys are pooled"));
    let weights = weights.iter().flatten().flatten();
    for (Weight { name, sizes, .. }, leaf) in weights.zip(leaves.iter().flatten().flatten()) {
        let gradient = leaf.grad_remove(&mut of_graph).expect("every weight is used");
        let values = floats::<B, 2>(primitive(gradient));
        tensors.floats(&format!("d{name}"), &values, sizes, DType::F32);
    }
    let parts = [
        coarse_dqkv,
        blocks_dqkv,
        B::nsa_selected_attention_backward(qkv.clone(), chosen, &call, selected, selected_do),
        B::attention_backward(qkv, &window, recent, window_do),
    ];
    // The gradients of the three branches and of the compression are added, in f32.
    let mut sum = vec![0.0f32; dims.iter().product()];
    for part in parts {
        let values = floats::<B, 4>(part);
        sum.iter_mut().zip(values).for_each(|(sum, x)| *sum += x);
    }
    let mut gradients = Outputs::default();
    gradients.set_packed_gradient(case.shape, &sum);
    tensors.floats("dq", &gradients.dq, &queries_of(case.shape), DType::F32);
    tensors.floats("dk", &gradients.dk, &keys_of(case.shape), DType::F32);
    tensors.floats("dv", &gradients.dv, &values_of(case.shape), DType::F32);
    tensors.finish(case.cu_seqlens())
}
