//! The choice of blocks against its reference, and attention over chosen blocks against dense attention and finite
//! differences.
use super::*;
use crate::attention::attention;
use crate::reference;
use crate::testing::{
    Ad, Call, Float as AdFloat, Input, Random, RandomInput, View, assert_close, calls, check_finite_differences,
    check_parity, check_views, evaluate, float, host, host_ints,
};
use burn::tensor::TensorData;
use burn::tensor::activation::log_softmax;
use sieve_core::model::test_shapes::{infllm_v2, mean_key, msa};

/// InfLLM-V2's choice: pooled keys are means of 4 tokens, one every 2 tokens; blocks have 4 tokens, the last 2 are
/// always chosen.
fn infllm(num_selected_blocks: usize) -> BlockChoice {
    infllm_v2([4, 2, 4, num_selected_blocks], 2)
}

#[test]
fn choices_equal_the_reference() {
    for call in calls() {
        for choice in [infllm(4), mean_key(4, 3), mean_key(5, 2), msa(4, 3), msa(6, 2)] {
            let of = |dtype| {
                let qkv = float::<4>(&call.qkv(7).untracked(dtype));
                host_ints(choose_key_blocks(qkv, &call.documents, call.spec, choice))
            };
            // Calls in f64 run the reference.
            assert_eq!(of(DType::F32), of(DType::F64), "{:?} {choice:?}", call.dims);
        }
    }
}

#[test]
fn blocks_beyond_64_tokens_are_read_in_pieces() {
    let call = Call::new([1, 300], [2, 1], 8, &[140]);
    let qkv = float::<4>(&call.qkv(1).untracked(DType::F32));
    let chosen = choose_key_blocks(qkv, &call.documents, call.spec, mean_key(128, 2));
    assert_eq!(chosen.dims(), [1, 300, 2, 4]);
    for (at, chosen) in host_ints(chosen).chunks(4).enumerate() {
        let token = at / 2;
        let position = if token < 140 { token } else { token - 140 };
        // Documents have at most 160 tokens, so the two blocks of 128 tokens are all blocks.
        let mut expected: Vec<i64> = (0..=(position / 64) as i64).collect();
        expected.resize(4, -1);
        assert_eq!(chosen, expected, "token {token}");
    }
}

#[test]
fn attention_over_all_blocks_is_dense() {
    for call in calls() {
        for choice in [infllm(64), mean_key(4, 64)] {
            let inputs = [call.qkv(3)];
            let of = |inputs: &[AdFloat]| -> AdFloat {
                let qkv = float::<4>(&inputs[0]);
                let chosen = choose_key_blocks(qkv.clone(), &call.documents, call.spec, choice);
                primitive(chosen_attention(qkv, chosen, &call.documents, call.spec, choice))
            };
            check_parity("all blocks", &inputs, &of, &|inputs| {
                let call = crate::AttentionCall::new(call.documents.bounds(), call.spec);
                reference::attention::<Ad>(inputs[0].clone(), &call).o
            });
            let qkv = inputs[0].untracked(DType::F32);
            let dense = host(primitive(attention(float::<4>(&qkv), &call.documents, call.spec)).primitive);
            let chosen = host(of(&[qkv]).primitive);
            assert_close("all blocks", &chosen, &dense, 1e-5);
        }
    }
}

#[test]
fn attention_over_some_blocks_equals_the_reference() {
    let op = |call: &Call, choice: BlockChoice, chosen: &Tensor<Ad, 4, Int>, inputs: &[AdFloat]| {
        let (qkv, chosen) = (float::<4>(&inputs[0]), chosen.clone());
        primitive(chosen_attention(qkv, chosen, &call.documents, call.spec, choice))
    };
    for call in calls() {
        for choice in [infllm(3), mean_key(4, 2)] {
            let inputs = [call.qkv(4)];
            let qkv = float::<4>(&inputs[0].untracked(DType::F32));
            let chosen = choose_key_blocks(qkv, &call.documents, call.spec, choice);
            check_parity("chosen_attention", &inputs, &|inputs| op(&call, choice, &chosen, inputs), &|inputs| {
                // The reference takes one chooser per KV head, so each query head gets a KV head of its own.
                let spec = AttentionSpec { num_kv_heads: call.spec.num_heads, ..call.spec };
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
                let call = NsaCall::new(call.documents.bounds(), spec, choice.attended());
                reference::nsa_selected_attention::<Ad>(primitive(qkv), indices.into_primitive(), &call).output.o
            });
            check_views("chosen_attention", &inputs, &|inputs| op(&call, choice, &chosen, inputs));
        }
    }
    let call = Call::new([2, 13], [4, 2], 3, &[6]);
    for choice in [infllm(3), mean_key(4, 2)] {
        let input = call.qkv(4);
        let chosen = choose_key_blocks(float::<4>(&input.untracked(DType::F32)), &call.documents, call.spec, choice);
        check_finite_differences("chosen_attention", &[input], &|inputs| op(&call, choice, &chosen, inputs));
    }
}

impl Call {
    /// The packed tensor of an indexer.
    pub(super) fn index(&self, seed: u64) -> Input {
        let [batch, n] = self.dims;
        Random(seed).input(&[batch, n, self.spec.num_kv_heads + 2, self.head_dim])
    }

    /// The call of indexed attention over the blocks that the indexer's tensor `index` chooses; `None`: over all
    /// tokens.
    fn indexed(&self, choice: BlockChoice, index: Option<&Input>, loss_weight: f64) -> IndexedCall<'_, Ad> {
        let chosen = index.map(|index| {
            let (index, spec) = (float::<4>(&index.untracked(DType::F32)), indexer_spec(self.spec));
            choose_key_blocks(index, &self.documents, spec, choice)
        });
        IndexedCall { documents: &self.documents, spec: self.spec, choice, chosen, block_keys: None, loss_weight }
    }
}

/// Whether each query reads each key, `[row, KV head, query, key]`.
pub(super) fn tokens_read(call: &Call, indexed: &IndexedCall<'_, Ad>) -> Vec<bool> {
    let ([batch, n], groups) = (call.dims, call.spec.num_kv_heads);
    let starts = host_ints(call.documents.start.clone());
    let chosen = indexed.chosen.clone();
    let chosen = chosen.map(|chosen| (chosen.dims()[3], host_ints(chosen)));
    let size = indexed.choice.attended().select_block_size as i64;
    let mut read = Vec::new();
    for row in 0..batch {
        for group in 0..groups {
            for query in 0..n {
                let token = row * n + query;
                let start = starts[token];
                read.extend((0..n as i64).map(|key| {
                    let seen = start <= key && key <= query as i64;
                    seen && chosen.as_ref().is_none_or(|(k, chosen)| {
                        let of_query = &chosen[(token * groups + group) * k..][..*k];
                        of_query.contains(&((key - start) / size))
                    })
                }));
            }
        }
    }
    read
}

/// The definition of indexed attention in plain Burn, with all scores: the output, and the sum of the divergences.
fn by_definition(call: &Call, indexed: &IndexedCall<'_, Ad>, inputs: &[AdFloat]) -> (Tensor<Ad, 4>, Tensor<Ad, 1>) {
    let ([batch, n], groups, group) = (call.dims, call.spec.num_kv_heads, call.spec.group_size());
    let [q, k, v] = split_heads::<Ad>(float(&inputs[0]), groups).map(|x| x.swap_dims(1, 2));
    let [q_index, k_index, _] = split_heads::<Ad>(float(&inputs[1]), 1).map(|x| x.swap_dims(1, 2));
    let read = TensorData::new(tokens_read(call, indexed), [batch, groups, 1, n, n]);
    let unread = Tensor::<Ad, 5, burn::tensor::Bool>::from_data(read, &Default::default()).bool_not();
    let all = [batch, groups, group, n, n];
    let of_groups = |x: Tensor<Ad, 4>| {
        let x = x.unsqueeze_dim::<5>(2);
        x.expand([batch, groups, group, n, call.head_dim])
    };
    let q = q.reshape([batch, groups, group, n, call.head_dim]);
    let scale = call.spec.softmax_scale;
    // Finite, because the divergence multiplies it by probabilities of 0.
    let logits = |q: Tensor<Ad, 5>, k: Tensor<Ad, 5>, dims: [usize; 5]| {
        (q.matmul(k.swap_dims(3, 4)) * scale).mask_fill(unread.clone().expand(dims), -1e9)
    };
    let log_p = log_softmax(logits(q, of_groups(k), all), 4);
    let p = log_p.exp();
    let o = p.clone().matmul(of_groups(v)).reshape([batch, groups * group, n, call.head_dim]);
    let p = p.detach().mean_dim(2);
    let one = [batch, groups, 1, n, n];
    let k_index = k_index.unsqueeze_dim::<5>(2).expand([batch, groups, 1, n, call.head_dim]);
    let log_index = log_softmax(logits(q_index.unsqueeze_dim::<5>(2), k_index, one), 4);
    let log_p = p.clone().clamp_min(1e-300).log();
    let divergence = (p * (log_p - log_index)).mask_fill(unread, 0.0).sum();
    (o.swap_dims(1, 2), divergence)
}

pub(super) const LOSS_WEIGHT: f64 = 0.3;

/// `o` with its values unchanged, but with the gradients of [`LOSS_WEIGHT`] times the divergence added to those that
/// [`check_parity`] takes.
pub(super) fn with_loss(o: Tensor<Ad, 4>, divergence: Tensor<Ad, 1>) -> AdFloat {
    // `check_parity` takes the gradients of the sum of o times random numbers of seed 77. A term that is added to each
    // number of o is thus multiplied by the sum of these, so it is divided by it. The term's value is 0.
    let sum: f64 = Random(77).input(&o.dims()).values.iter().sum();
    let loss = (divergence.clone() - divergence.detach()) * (LOSS_WEIGHT / sum);
    primitive(o + loss.reshape([1, 1, 1, 1]))
}

#[test]
fn indexed_attention_and_its_loss_equal_the_definition() {
    // Few blocks, all blocks, and the warm-up, which reads all tokens.
    for (choice, is_warmup) in [(msa(4, 3), false), (msa(3, 64), false), (msa(4, 3), true)] {
        for call in calls() {
            let inputs = [call.qkv(4), call.index(5)];
            let chooses = (!is_warmup).then_some(&inputs[1]);
            let indexed = call.indexed(choice, chooses, LOSS_WEIGHT);
            let op = |inputs: &[AdFloat]| primitive(indexed_attention(float(&inputs[0]), float(&inputs[1]), &indexed));
            check_parity("indexed_attention", &inputs, &op, &|inputs| {
                let (o, divergence) = by_definition(&call, &indexed, inputs);
                with_loss(o, divergence)
            });
            check_views("indexed_attention", &inputs, &op);
        }
    }
}

#[test]
fn the_indexer_learns_from_its_loss_alone_and_the_attention_from_the_output_alone() {
    let call = Call::new([2, 31], [6, 2], 8, &[5, 12]);
    let inputs = [call.qkv(6), call.index(7)];
    let run = |weight: f64, seed: u64| {
        let indexed = call.indexed(msa(4, 3), Some(&inputs[1]), weight);
        let op = |inputs: &[AdFloat]| primitive(indexed_attention(float(&inputs[0]), float(&inputs[1]), &indexed));
        evaluate(&op, &inputs, seed, DType::F64, View::Contiguous)
    };
    let (one, none, other) = (run(1.0, 1), run(0.0, 1), run(1.0, 2));
    assert_eq!((&one.output, &one.gradients[0]), (&none.output, &none.gradients[0]));
    assert!(none.gradients[1].iter().all(|&x| x == 0.0));
    assert_eq!(one.gradients[1], other.gradients[1]);
    assert!(one.gradients[1].iter().any(|&x| x != 0.0));
    // Finite differences of the loss in f64.
    let indexed = call.indexed(msa(4, 3), Some(&inputs[1]), 1.0);
    let loss = |index: &Input| {
        let leaves = [&inputs[0], index].map(|input| input.untracked(DType::F64));
        let (_, divergence) = by_definition(&call, &indexed, &leaves);
        divergence.into_data().iter::<f64>().sum::<f64>()
    };
    let gradient = &one.gradients[1];
    for at in (0..gradient.len()).step_by(7) {
        let moved = |by: f64| {
            let mut index = inputs[1].clone();
            index.values[at] += by;
            loss(&index)
        };
        let difference = (moved(1e-5) - moved(-1e-5)) / 2e-5;
        let found = gradient[at];
        assert!((difference - found).abs() < 1e-7, "{at}: {difference} is not {found}");
    }
}

/// KL, recall and entropy of the queries that [`index_statistics`] measures, from every score of the first row.
fn defined_statistics(
    call: &Call,
    indexed: &IndexedCall<'_, Ad>,
    chosen: &Tensor<Ad, 4, Int>,
    inputs: &[Input],
) -> [f64; 3] {
    let ([_, n], d, groups, group) = (call.dims, call.head_dim, call.spec.num_kv_heads, call.spec.group_size());
    let starts = host_ints(call.documents.start.clone());
    let (k, all_chosen) = (chosen.dims()[3], host_ints(chosen.clone()));
    let [attended, blocks] = [indexed.choice.attended(), indexed.choice.blocks];
    let row = |x: &Input, token: usize, head: usize| x.values[(token * x.dims[2] + head) * d..][..d].to_vec();
    let (mut divergence, mut entropy, mut found, mut best) = (0.0, 0.0, 0.0, 0.0);
    // The queries that `index_statistics` measures: at most 16, in the middle of as many equal parts of the row.
    let count = n.min(16);
    for (at, kv_head) in (0..count * groups).map(|pair| (pair / groups, pair % groups)) {
        let query = (2 * at + 1) * n / (2 * count);
        let start = starts[query] as usize;
        let position = query - start;
        let chosen = &all_chosen[(query * groups + kv_head) * k..][..k];
        let is_chosen: Vec<bool> =
            (0..=position).map(|at| chosen.contains(&((at / attended.select_block_size) as i64))).collect();
        // Probabilities of a query of tensor `x` over the keys of head `key` that are read.
        let softmax = |x: &Input, head: usize, key: usize, read: &dyn Fn(usize) -> bool| -> Vec<f64> {
            let q = row(x, query, head);
            let logit = |at: usize| -> f64 {
                let products = q.iter().zip(row(x, start + at, key)).map(|(q, k)| q * k);
                products.sum::<f64>() * call.spec.softmax_scale
            };
            let weight = |at: usize| if read(at) { logit(at).exp() } else { 0.0 };
            let weights: Vec<f64> = (0..=position).map(weight).collect();
            weights.iter().map(|x| x / weights.iter().sum::<f64>()).collect()
        };
        let mean = |read: &dyn Fn(usize) -> bool| {
            let mut mean = vec![0.0; position + 1];
            for head in kv_head * group..(kv_head + 1) * group {
                let p = softmax(&inputs[0], head, groups * group + kv_head, read);
                mean.iter_mut().zip(p).for_each(|(sum, p)| *sum += p / group as f64);
            }
            mean
        };
        let dense = mean(&|_| true);
        found += (0..=position).filter(|&at| is_chosen[at]).map(|at| dense[at]).sum::<f64>();
        let mut of_blocks: Vec<f64> = dense.chunks(blocks.select_block_size).map(|x| x.iter().sum()).collect();
        best += of_blocks.pop().expect("the own block");
        of_blocks.sort_by(|a, b| b.total_cmp(a));
        best += of_blocks.iter().take(blocks.num_selected_blocks - 1).sum::<f64>();
        let read = |at: usize| indexed.chosen.is_none() || is_chosen[at];
        for (p, i) in mean(&read).into_iter().zip(softmax(&inputs[1], kv_head, groups, &read)) {
            divergence += if p > 0.0 { p * (p / i).ln() } else { 0.0 };
            entropy -= if i > 0.0 { i * i.ln() } else { 0.0 };
        }
    }
    let pairs = (count * groups) as f64;
    [divergence / pairs, found / best, entropy / pairs]
}

#[test]
fn statistics_equal_the_definition() {
    let lengths = [&[][..], &[5], &[1, 9], &[140, 33]];
    for (seed, n) in [(10, 16), (20, 5), (30, 67), (40, 300)] {
        for (lengths, heads) in lengths.into_iter().zip([[4, 2], [3, 3], [2, 1], [6, 2]]) {
            let call = Call::new([2, n], heads, 8, lengths);
            // With scores of 0 all blocks of a size have equal probabilities.
            for (scale, choice) in
                [(1.0, msa(2, 2)), (1.0, msa(3, 1)), (1.0, msa(2, 64)), (0.0, msa(7, 3)), (1.0, msa(128, 2))]
            {
                let inputs = [call.qkv(seed).affine(scale, 0.0), call.index(seed + 1).affine(scale, 0.0)];
                let leaves = inputs.clone().map(|input| input.untracked(DType::F32));
                let read = call.indexed(choice, Some(&inputs[1]), 1.0);
                let chosen = read.chosen.clone().expect("it chooses");
                // Attention in the warm-up does not read the choice.
                for indexed in [read, call.indexed(choice, None, 1.0)] {
                    let [qkv, index] = [&leaves[0], &leaves[1]].map(float::<4>);
                    let measured = host(primitive(index_statistics(qkv, index, chosen.clone(), &indexed)));
                    let defined = defined_statistics(&call, &indexed, &chosen, &inputs);
                    let what = format!("{n} tokens, documents {lengths:?}, {choice:?}");
                    assert_close(&what, &measured, &defined, 1e-5);
                }
            }
        }
    }
}
