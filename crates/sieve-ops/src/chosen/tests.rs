//! The choice against its reference, and attention over it against dense attention and differences.
use super::*;
use crate::attention::attention;
use crate::reference;
use crate::testing::{
    Ad, Float as AdFloat, Random, RandomInput, assert_close, check_finite_differences, check_parity, check_views,
    documents, float, host, primitive as of_ad,
};
use burn_flex::Flex;
use sieve_core::{ChoiceRule, ForcedBlocks, NsaBlocks};

fn infllm(num_selected_blocks: usize) -> BlockChoice {
    BlockChoice {
        blocks: NsaBlocks {
            compress_block_size: 4,
            compress_stride: 2,
            select_block_size: 4,
            num_selected_blocks,
        },
        rule: ChoiceRule::LargestProbability,
        forced: ForcedBlocks { first: true, local: 2 },
    }
}

fn moba(size: usize, num_selected_blocks: usize) -> BlockChoice {
    BlockChoice {
        blocks: NsaBlocks {
            compress_block_size: size,
            compress_stride: size,
            select_block_size: size,
            num_selected_blocks,
        },
        rule: ChoiceRule::MeanKey,
        forced: ForcedBlocks { first: false, local: 1 },
    }
}

struct Call {
    dims: [usize; 2],
    spec: AttentionSpec,
    head_dim: usize,
    documents: Documents<Ad>,
}

impl Call {
    fn new(dims: [usize; 2], heads: [usize; 2], head_dim: usize, lengths: &[usize]) -> Self {
        Self {
            dims,
            spec: AttentionSpec::dense(heads, head_dim),
            head_dim,
            documents: documents(lengths, dims),
        }
    }

    fn qkv(&self, seed: u64) -> crate::testing::Input {
        let [batch, n] = self.dims;
        Random(seed).input(&[batch, n, self.spec.packed_heads(), self.head_dim])
    }

    fn documents_of<B: Backend<IntTensorPrimitive = burn_flex::FlexTensor>>(&self) -> Documents<B> {
        let of = |x: &Tensor<Ad, 2, Int>| Tensor::<B, 2, Int>::from_primitive(x.clone().into_primitive());
        Documents {
            start: of(&self.documents.start),
            end: of(&self.documents.end),
            positions: of(&self.documents.positions),
        }
    }
}

fn calls() -> Vec<Call> {
    vec![
        Call::new([2, 23], [4, 2], 6, &[]),
        Call::new([2, 31], [3, 3], 16, &[5, 1, 3, 12]),
        Call::new([1, 1], [2, 1], 4, &[]),
        Call::new([1, 3], [2, 2], 8, &[2]),
        Call::new([1, 70], [6, 2], 20, &[33]),
    ]
}

#[test]
fn choices_equal_the_reference() {
    for call in calls() {
        for choice in [infllm(4), moba(4, 3), moba(5, 2)] {
            let documents = call.documents_of::<Flex>();
            let of = |dtype| -> Vec<i64> {
                let qkv =
                    Tensor::<Flex, 4>::from_primitive(burn::tensor::TensorPrimitive::Float(call.qkv(7).tensor(dtype)));
                let chosen = choose_key_blocks(qkv, &documents, call.spec, choice);
                chosen.into_data().iter::<i64>().collect()
            };
            // f64 takes the reference.
            assert_eq!(of(DType::F32), of(DType::F64), "{:?} {choice:?}", call.dims);
        }
    }
}

#[test]
fn blocks_beyond_64_tokens_are_read_in_pieces() {
    let call = Call::new([1, 300], [2, 1], 8, &[140]);
    let documents = call.documents_of::<Flex>();
    let choice = moba(128, 2);
    let qkv = Tensor::<Flex, 4>::from_primitive(burn::tensor::TensorPrimitive::Float(call.qkv(1).tensor(DType::F32)));
    let chosen = choose_key_blocks(qkv, &documents, call.spec, choice);
    assert_eq!(chosen.dims(), [1, 300, 2, 4]);
    let chosen: Vec<i64> = chosen.into_data().iter::<i64>().collect();
    for (at, chosen) in chosen.chunks(4).enumerate() {
        let token = at / 2;
        let position = if token < 140 { token } else { token - 140 };
        // Up to 256 tokens two blocks are all there are.
        let mut expected: Vec<i64> = (0..=(position / 64) as i64).collect();
        expected.resize(4, -1);
        assert_eq!(chosen, expected, "token {token}");
    }
}

#[test]
fn attention_over_all_blocks_is_dense() {
    for call in calls() {
        for choice in [infllm(64), moba(4, 64)] {
            let inputs = [call.qkv(3)];
            let of = |inputs: &[AdFloat]| -> AdFloat {
                let qkv = float::<4>(&inputs[0]);
                let chosen = choose_key_blocks(qkv.clone(), &call.documents, call.spec, choice);
                of_ad(chosen_attention(qkv, chosen, &call.documents, call.spec, choice))
            };
            check_parity("all blocks", &inputs, &of, &|inputs| {
                let call = crate::AttentionCall::new(call.documents.bounds(), call.spec);
                reference::attention::<Ad>(inputs[0].clone(), &call).o
            });
            let dense = host(of_ad(attention(float::<4>(&of_leaf(&inputs[0])), &call.documents, call.spec)).primitive);
            let chosen = host(of(&[of_leaf(&inputs[0])]).primitive);
            assert_close("all blocks", &chosen, &dense, 1e-5);
        }
    }
}

fn of_leaf(input: &crate::testing::Input) -> AdFloat {
    use burn::tensor::backend::AutodiffBackend;
    Ad::from_inner(input.tensor(DType::F32))
}

#[test]
fn attention_over_some_blocks_equals_the_reference() {
    let op = |call: &Call, choice: BlockChoice, chosen: &Tensor<Ad, 4, Int>, inputs: &[AdFloat]| {
        let qkv = float::<4>(&inputs[0]);
        of_ad(chosen_attention(
            qkv,
            chosen.clone(),
            &call.documents,
            call.spec,
            choice,
        ))
    };
    for call in calls() {
        for choice in [infllm(3), moba(4, 2)] {
            let inputs = [call.qkv(4)];
            let chosen = choose_key_blocks(float::<4>(&of_leaf(&inputs[0])), &call.documents, call.spec, choice);
            check_parity(
                "chosen_attention",
                &inputs,
                &|inputs| op(&call, choice, &chosen, inputs),
                &|inputs| {
                    // Each query head with a key head of its own.
                    let spec = AttentionSpec {
                        num_kv_heads: call.spec.num_heads,
                        ..call.spec
                    };
                    let [q, k, v] = split_heads::<Ad>(float(&inputs[0]), call.spec.num_kv_heads);
                    let group = call.spec.num_heads / call.spec.num_kv_heads;
                    let heads = |x: Tensor<Ad, 4>| {
                        let one = |head| x.clone().narrow(2, head / group, 1);
                        Tensor::cat((0..call.spec.num_heads).map(one).collect(), 2)
                    };
                    let qkv = Tensor::cat(vec![q, heads(k), heads(v)], 2);
                    let choosers = chosen.dims()[2];
                    let of_head = |head| chosen.clone().narrow(2, head * choosers / call.spec.num_heads, 1);
                    let indices = Tensor::cat((0..call.spec.num_heads).map(of_head).collect(), 2);
                    let call = NsaCall::new(&call.documents, spec, choice.attended());
                    reference::nsa_selected_attention::<Ad>(of_ad(qkv), indices.into_primitive(), &call)
                        .output
                        .o
                },
            );
            check_views("chosen_attention", &inputs, &|inputs| {
                op(&call, choice, &chosen, inputs)
            });
        }
    }
    let call = Call::new([2, 13], [4, 2], 3, &[6]);
    for choice in [infllm(3), moba(4, 2)] {
        let input = call.qkv(4);
        let chosen = choose_key_blocks(float::<4>(&of_leaf(&input)), &call.documents, call.spec, choice);
        check_finite_differences("chosen_attention", &[input], &|inputs| {
            op(&call, choice, &chosen, inputs)
        });
    }
}
