//! NSA's ops against their references and finite differences, for contiguous inputs and views.
use super::*;
use crate::documents::HostBounds;
use crate::reference;
use crate::testing::{
    Ad, Call, Float, Input, Random, RandomInput, View, assert_close, calls, check_calls, check_finite_differences,
    check_parity, evaluate, float, host_ints, ints,
};
use burn::tensor::DType;
use burn::tensor::ops::IntTensor;
use burn_flex::Flex;

const BLOCKS: NsaBlocks =
    NsaBlocks { compress_block_size: 4, compress_stride: 2, select_block_size: 4, num_selected_blocks: 3 };

impl Call {
    fn call<B: Backend<IntTensorPrimitive = IntTensor<Ad>>>(&self) -> NsaCall<B> {
        NsaCall::new(self.documents.bounds(), self.spec, BLOCKS)
    }

    /// Random compressed keys and values, one per slot and KV head.
    fn compressed(&self, seed: u64) -> Input {
        let [batch, n] = self.dims;
        let rows = batch * BLOCKS.num_slots(n) * self.spec.num_kv_heads;
        Random(seed).input(&[2, rows, self.head_dim])
    }

    /// For each query and KV head its own block and a random earlier one.
    fn chosen(&self, seed: u64) -> Tensor<Ad, 4, Int> {
        let [batch, n] = self.dims;
        let (kv_heads, k) = (self.spec.num_kv_heads, BLOCKS.num_selected_blocks);
        let mut random = Random(seed);
        let mut all = Vec::new();
        for (token, start) in host_ints(self.documents.start.clone()).into_iter().enumerate() {
            let own = (token % n - start as usize) / BLOCKS.select_block_size;
            for _ in 0..kv_heads {
                let mut chosen = vec![own as i32, random.below(own + 1) as i32];
                chosen.sort_unstable();
                chosen.dedup();
                chosen.resize(k, -1);
                all.extend(chosen);
            }
        }
        ints(all, [batch, n, kv_heads, k])
    }
}

fn blocks_op(call: &Call, inputs: &[Float]) -> Float {
    let (qkv, k, v) = (float(&inputs[0]), float(&inputs[1]), float(&inputs[2]));
    primitive(nsa_blocks(qkv, k, v, &call.call()))
}

/// The result of `nsa_blocks` by its definition, token by token.
fn defined_blocks(call: &Call, inputs: &[Input]) -> Vec<f64> {
    let ([_, n], d, spec) = (call.dims, call.head_dim, call.spec);
    let (size, stride, kv_heads) = (BLOCKS.compress_block_size, BLOCKS.compress_stride, spec.num_kv_heads);
    let host = HostBounds::new::<Ad>(&call.documents.bounds());
    let rows = call.dims[0] * n.div_ceil(stride) * kv_heads;
    let mut all = vec![0.0; 2 * rows * size * d];
    for token in 0..call.dims[0] * n {
        let (start, end) = (host.start[token] as usize, host.end[token] as usize);
        let inside = token % n - start;
        if inside % stride != 0 || token % n + size > end {
            continue;
        }
        let slot = token / n * n.div_ceil(stride) + start.div_ceil(stride) + inside / stride;
        for (at, which) in (0..kv_heads * size * d).flat_map(|at| [(at, 0), (at, 1)]) {
            let (kv_head, in_block) = (at / (size * d), at % (size * d));
            let head = spec.num_heads + which * kv_heads + kv_head;
            let x = ((token + in_block / d) * spec.packed_heads() + head) * d + in_block % d;
            let to = ((which * rows + slot * kv_heads + kv_head) * size) * d + in_block;
            all[to] = inputs[0].values[x] + inputs[1 + which].values[in_block];
        }
    }
    all
}

/// Random position embeddings of the compression MLP.
fn positions(call: &Call, seed: u64) -> Input {
    Random(seed).input(&[BLOCKS.compress_block_size, call.head_dim])
}

#[test]
fn nsa_blocks_equal_the_reference() {
    let inputs = |call: &Call| [call.qkv(1), positions(call, 2), positions(call, 3)];
    check_calls("nsa_blocks", inputs, blocks_op, |call, inputs| {
        let positions = [inputs[1].clone(), inputs[2].clone()];
        reference::nsa_blocks::<Ad>(inputs[0].clone(), positions, &call.call())
    });
    let pool = |call: &Call, inputs: &[Float]| primitive::<Ad, 3>(nsa_mean_pool(float(&inputs[0]), &call.call()));
    check_calls(
        "nsa_mean_pool",
        |call| [call.qkv(1)],
        pool,
        |call, inputs| reference::nsa_mean_pool::<Ad>(inputs[0].clone(), &call.call()),
    );
    for call in calls() {
        let mut inputs = inputs(&call);
        let defined = defined_blocks(&call, &inputs);
        let of = |op: &dyn Fn(&[Float]) -> Float, inputs: &[Input]| {
            evaluate(op, inputs, 1, DType::F64, View::Contiguous).output
        };
        assert_close("nsa_blocks", &of(&|inputs| blocks_op(&call, inputs), &inputs), &defined, 1e-12);
        inputs[1..].iter_mut().for_each(|position| position.values.fill(0.0));
        let (l, d) = (BLOCKS.compress_block_size, call.head_dim);
        let defined = defined_blocks(&call, &inputs);
        let mean = |block: &[f64], c: usize| block[c..].iter().step_by(d).sum::<f64>() / l as f64;
        let means = defined.chunks_exact(l * d).flat_map(|block| (0..d).map(move |c| mean(block, c)));
        assert_close(
            "nsa_mean_pool",
            &of(&|inputs| pool(&call, inputs), &inputs[..1]),
            &means.collect::<Vec<_>>(),
            1e-12,
        );
    }
}

#[test]
fn nsa_compressed_attention_equals_the_reference() {
    let op = |call: &Call, inputs: &[Float]| {
        let (qkv, compressed) = (float(&inputs[0]), float(&inputs[1]));
        primitive::<Ad, 4>(nsa_compressed_attention(qkv, compressed, &call.call()).o)
    };
    check_calls(
        "nsa_compressed_attention",
        |call| [call.qkv(1), call.compressed(2)],
        op,
        |call, inputs| {
            let (qkv, compressed) = (inputs[0].clone(), inputs[1].clone());
            reference::nsa_compressed_attention::<Ad>(qkv, compressed, &call.call()).output.o
        },
    );
}

#[test]
fn nsa_choice_of_blocks_equals_the_reference() {
    for call in calls() {
        for seed in 0..3 {
            let [qkv, compressed] = [call.qkv(seed), call.compressed(seed + 9)].map(|input| input.tensor(DType::F32));
            let call = call.call::<Flex>();
            let run = |reference: bool| {
                let (qkv, compressed) = (qkv.clone(), compressed.clone());
                let result = if reference {
                    reference::nsa_compressed_attention::<Flex>(qkv, compressed, &call)
                } else {
                    Flex::nsa_compressed_attention(qkv, compressed, &call)
                };
                host_ints::<Flex, 4>(Tensor::from_primitive(result.block_indices))
            };
            assert_eq!(run(false), run(true));
        }
    }
}

#[test]
fn nsa_selected_attention_equals_the_reference() {
    let op = |call: &Call, inputs: &[Float]| {
        let qkv = float(&inputs[0]);
        primitive::<Ad, 4>(nsa_selected_attention(qkv, call.chosen(2), &call.call()))
    };
    check_calls(
        "nsa_selected_attention",
        |call| [call.qkv(1)],
        op,
        |call, inputs| {
            let (qkv, indices) = (inputs[0].clone(), call.chosen(2).into_primitive());
            reference::nsa_selected_attention::<Ad>(qkv, indices, &call.call()).output.o
        },
    );
}

#[test]
fn nsa_gates_equal_the_reference() {
    for [batch, n, heads, d] in [[2, 9, 3, 5], [1, 1, 1, 16], [1, 70, 2, 33]] {
        let mut random = Random(3);
        let branch = [batch, n, heads, d];
        let mut inputs: Vec<Input> = (0..3).map(|_| random.input(&branch)).collect();
        inputs.push(random.input(&[batch, n, heads * 3]));
        inputs.push(random.input(&[heads * 3]));
        let op = |inputs: &[Float]| {
            let branches = [0, 1, 2].map(|c| float::<4>(&inputs[c]));
            let gated = nsa_gates(branches, float(&inputs[3]), float(&inputs[4]));
            primitive::<Ad, 4>(gated)
        };
        check_parity("nsa_gates", &inputs, &op, &|inputs| {
            let branches = [0, 1, 2].map(|c| inputs[c].clone());
            reference::nsa_gates::<Ad>(branches, inputs[3].clone(), inputs[4].clone())
        });
        if n < 20 {
            check_finite_differences("nsa_gates", &inputs, &op);
        }
    }
}
