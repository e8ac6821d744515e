//! `sieve kernels run nsa | mla`: the ops that take several tensors or attentions, through the ops that models use.
use crate::case::Case;
use crate::latent;
use crate::nsa::typed;
use crate::outputs::Outputs;
use crate::place::{Place, floats, indices};
use crate::shape::{keys_of, packed_of, queries_of, values_of};
use burn::tensor::{DType, TensorData};
use sieve_hf::NamedTensor;
use sieve_kernels::AttentionShape;
use sieve_ops::{AttentionBackend, NsaBlocks, NsaCall};
use sieve_testing::Random;

/// Blocks of a call: the paper's.
pub(super) const BLOCKS: NsaBlocks = NsaBlocks {
    compress_block_size: 32,
    compress_stride: 16,
    select_block_size: 64,
    num_selected_blocks: 16,
};

/// The tensors of a file, in order.
pub(super) struct Tensors {
    pub(super) list: Vec<NamedTensor>,
    /// Type of what ops return.
    own: DType,
}

impl Tensors {
    /// None yet.
    pub(super) fn new(own: DType) -> Self {
        Self { list: Vec::new(), own }
    }

    /// The list, which ends with the bounds of the documents.
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

    /// What an op of the device's type returned.
    pub(super) fn output(&mut self, name: &str, values: &[f32], shape: &[usize]) {
        let own = self.own;
        self.floats(name, values, shape, own);
    }
}

/// Inputs, outputs and gradients of latent attention from the projections on. Keys are wider than values by their
/// rotated part.
pub(super) fn mla<B: Place>(case: Case, seed: u64, device: &B::Device) -> Vec<NamedTensor> {
    let mut tensors = Tensors::new(B::DTYPE);
    let AttentionShape { batch, seq_len, .. } = case.shape;
    let bounds = case.cu_seqlens();
    let per_head = case.shape.lse();
    let (d_o, output) = (case.d_o.clone(), case.shape.output());
    let call = latent::Written::new(case, seed);
    for (name, values) in call.inputs() {
        let width = values.len() / (batch * seq_len);
        tensors.floats(name, values, &[batch, seq_len, width], DType::BF16);
    }
    tensors.floats("do", &d_o, &output, DType::BF16);
    for (name, values) in call.run::<B>(device) {
        let width = values.len() / (batch * seq_len);
        match name {
            "o" => tensors.output(name, &values, &output),
            "lse" => tensors.floats(name, &values, &per_head, DType::F32),
            _ => tensors.output(name, &values, &[batch, seq_len, width]),
        }
    }
    tensors.finish(bounds)
}

/// Inputs, gates, chosen blocks, outputs and all gradients of native sparse attention over means of blocks.
pub(super) fn nsa<B: Place>(case: &Case, seed: u64, device: &B::Device) -> Vec<NamedTensor> {
    let mut tensors = Tensors::new(B::DTYPE);
    let (output, num_kv_heads) = (case.shape.output(), case.shape.num_kv_heads);
    let [batch, seq_len, num_heads, d] = output;
    let gates = num_heads * 3;
    let mut random = Random(seed ^ 0x0067_6174);
    let (logits, bias) = (random.bf16_normals(batch * seq_len * gates), random.bf16_normals(gates));
    tensors.floats("q", &case.q, &queries_of(case.shape), DType::BF16);
    tensors.floats("k", &case.k, &keys_of(case.shape), DType::BF16);
    tensors.floats("v", &case.v, &values_of(case.shape), DType::BF16);
    let gates_shape = [batch, seq_len, num_heads, 3];
    tensors.floats("gate_logits", &logits, &gates_shape, DType::BF16);
    tensors.floats("gate_bias", &bias, &[num_heads, 3], DType::BF16);
    tensors.floats("do", &case.d_o, &output, DType::BF16);

    let documents = case.documents::<B>(device);
    let call = NsaCall::new(&documents, case.spec(None), BLOCKS);
    let (window, bounds) = (case.spec(Some(case.window())), documents.bounds());
    let dims = packed_of(case.shape);
    let rows = crate::strided::packed(case, crate::strided::Layout::Contiguous).gathered();
    let qkv = typed::<B, 4>(&rows, dims, device);
    let d_o = typed::<B, 4>(&case.d_o, output, device);
    let logits = typed::<B, 3>(&logits, [batch, seq_len, gates], device);
    let bias = typed::<B, 1>(&bias, [gates], device);

    let means = B::nsa_mean_pool(qkv.clone(), &call);
    let coarse = B::nsa_compressed_attention(qkv.clone(), means.clone(), &call);
    let chosen = coarse.block_indices;
    let selected = B::nsa_selected_attention(qkv.clone(), chosen.clone(), &call);
    let recent = <B as AttentionBackend>::attention(qkv.clone(), &bounds, window);
    let branches = [&coarse.output, &selected.output, &recent].map(|x| x.o.clone());
    let o = B::nsa_gates(branches.clone(), logits.clone(), bias.clone());

    let means_shape = [2, batch, BLOCKS.num_slots(seq_len), num_kv_heads, d];
    let choice = [batch, seq_len, num_kv_heads, BLOCKS.num_selected_blocks];
    tensors.output("compressed", &floats::<B, 3>(means.clone()), &means_shape);
    tensors.ints("block_indices", indices::<B, 4>(chosen.clone()), &choice);
    let names = ["compressed", "selected", "window"];
    let of_branches = [&coarse.output, &selected.output, &recent];
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
    let [coarse_dqkv, d_means] =
        B::nsa_compressed_attention_backward(qkv.clone(), means, &call, coarse.output, coarse_do);
    let values = floats::<B, 3>(d_means.clone());
    tensors.output("dcompressed", &values, &means_shape);
    let parts = [
        coarse_dqkv,
        B::nsa_mean_pool_backward(dims, &call, d_means),
        B::nsa_selected_attention_backward(qkv.clone(), chosen, &call, selected, selected_do),
        B::attention_backward(qkv, &bounds, window, recent, window_do),
    ];
    // The sum of the parts as a model's autodiff makes it, but in f32.
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
