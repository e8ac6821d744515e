//! QSA's scores and loss against their definitions, which compute all scores.
use super::tests::{LOSS_WEIGHT, tokens_read, with_loss};
use super::*;
use crate::testing::{
    Ad, Call, Float as AdFloat, Input, Random, RandomInput, calls, check_parity, check_views, float, host, host_ints,
};
use burn::tensor::TensorData;
use burn::tensor::activation::log_softmax;
use burn_flex::Flex;
use sieve_core::model::test_shapes::qsa;

/// The attention's packed tensor, the indexer's packed tensor, and a key for each slot.
fn inputs_of(call: &Call, choice: BlockChoice, seed: u64) -> [Input; 3] {
    let [batch, n] = call.dims;
    let keys = Random(seed + 2).input(&[batch, choice.blocks.num_slots(n), call.head_dim]);
    [call.qkv(seed), call.index(seed + 1), keys]
}

/// The call of attention over the blocks that the indexer chooses from these inputs, or over all tokens in a warm-up.
fn indexed<'a>(
    call: &'a Call,
    choice: BlockChoice,
    [_, index, keys]: &[AdFloat; 3],
    (is_warmup, loss_weight): (bool, f64),
) -> IndexedCall<'a, Ad> {
    let (index, keys) = (float::<4>(index), float::<3>(keys));
    let chosen = (!is_warmup).then(|| choose_scored_blocks(index, keys.clone(), &call.documents, call.spec, choice));
    IndexedCall { documents: &call.documents, spec: call.spec, choice, chosen, block_keys: Some(keys), loss_weight }
}

/// The first token of each slot's block, or -1.
fn slot_starts(call: &Call, choice: BlockChoice) -> Vec<i32> {
    crate::documents::HostBounds::new::<Ad>(&call.documents.bounds()).slot_starts(choice.blocks)
}

/// The sum of the queries' divergences `KL(T || softmax(I))` over the blocks that `indexed` reads, from all scores.
fn total_divergence(call: &Call, indexed: &IndexedCall<'_, Ad>, inputs: &[AdFloat]) -> Tensor<Ad, 1> {
    let ([batch, n], groups, size) = (call.dims, call.spec.num_kv_heads, indexed.choice.blocks.select_block_size);
    let (starts, group) = (slot_starts(call, indexed.choice), call.spec.group_size());
    let (num_slots, tokens) = (starts.len() / batch, tokens_read(call, indexed));
    let [q, k, _] = split_heads::<Ad>(float(&inputs[0]), groups).map(|x| x.swap_dims(1, 2));
    let k = Tensor::cat((0..groups * group).map(|head| k.clone().narrow(1, head / group, 1)).collect(), 1);
    let unread = |heads: usize| {
        let of_row = |row: usize| tokens[row * groups * n * n..][..n * n].iter().map(|read| !read).collect::<Vec<_>>();
        let all: Vec<bool> = (0..batch).flat_map(|row| vec![of_row(row); heads].concat()).collect();
        Tensor::<Ad, 4, burn::tensor::Bool>::from_data(TensorData::new(all, [batch, heads, n, n]), &Default::default())
    };
    let logits = q.matmul(k.swap_dims(2, 3)) * call.spec.softmax_scale;
    let p = log_softmax(logits.mask_fill(unread(groups * group), -1e9), 3).exp().sum_dim(1);
    let p = host(primitive(p).primitive);
    // The largest probability of each complete block that the query reads.
    let (mut teacher, mut read) = (vec![0.0; batch * n * num_slots], vec![false; batch * n * num_slots]);
    for at in 0..teacher.len() {
        let (row, query, slot) = (at / num_slots / n, at / num_slots % n, at % num_slots);
        let first = starts[row * num_slots + slot];
        if first >= 0 && first as usize + size <= query + 1 && tokens[row * groups * n * n + query * n + first as usize]
        {
            read[at] = true;
            let of_block = &p[(row * n + query) * n + first as usize..][..size];
            teacher[at] = of_block.iter().copied().fold(0.0, f64::max);
        }
    }
    for row in teacher.chunks_mut(num_slots) {
        let sum: f64 = row.iter().sum();
        row.iter_mut().for_each(|x| *x /= sum.max(1e-300));
    }
    let sizes = [batch, n, num_slots];
    let dtype = inputs[1].primitive.dtype();
    let of =
        |values: Vec<f64>| Tensor::<Ad, 3>::from_data(TensorData::new(values, sizes), (&Default::default(), dtype));
    let unread = Tensor::<Ad, 3, burn::tensor::Bool>::from_data(TensorData::new(read, sizes), &Default::default());
    let unread = unread.bool_not();
    let q = float::<4>(&inputs[1]).narrow(2, 0, groups).swap_dims(1, 2);
    let keys = float::<3>(&inputs[2]).unsqueeze_dim::<4>(1).repeat_dim(1, groups);
    let scores = q.matmul(keys.swap_dims(2, 3)).clamp_min(0.0).sum_dim(1).reshape(sizes) * call.spec.softmax_scale;
    let student = log_softmax(scores.mask_fill(unread.clone(), -1e9), 2).mask_fill(unread, 0.0);
    let entropy: f64 = teacher.iter().map(|&x| if x > 0.0 { x * x.ln() } else { 0.0 }).sum();
    (of(teacher) * student).sum().neg() + entropy
}

/// Calls with chosen blocks, and calls in the warm-up.
fn all_calls() -> Vec<(Call, BlockChoice, bool)> {
    let mut all = Vec::new();
    for (choice, is_warmup) in [(qsa(4, 3), false), (qsa(3, 64), false), (qsa(1, 4), false), (qsa(4, 3), true)] {
        all.extend(calls().into_iter().map(|call| (call, choice, is_warmup)));
    }
    all
}

#[test]
fn gemms_choose_as_the_definition_does_and_each_query_reads_its_own_block() {
    for (call, choice, _) in all_calls() {
        let [batch, n] = call.dims;
        let inputs = inputs_of(&call, choice, 20).map(|input| input.untracked(DType::F32));
        let chosen = indexed(&call, choice, &inputs, (false, 0.0)).chosen.expect("no warm-up");
        let defined = host_ints(chosen);
        let (count, groups) = (choice.blocks.num_selected_blocks, call.spec.num_kv_heads);
        let positions = host_ints(call.documents.positions.clone());
        for (at, blocks) in defined.chunks(count).enumerate() {
            let own = positions[at / groups] / choice.blocks.select_block_size as i64;
            assert_eq!(blocks.iter().filter(|&&block| block >= 0).max(), Some(&own), "{:?}", call.dims);
        }
        let [_, index, keys] = inputs.map(|x| x.primitive);
        let (index, keys) = (tensor::<Flex, 4>(index), tensor::<Flex, 3>(keys));
        let slots = pooled::Slots::<Flex>::new(&call.documents.bounds(), choice.blocks);
        for row in 0..batch {
            pooled::block_scores(&index, &keys, &slots, row, |first, scores| {
                let num_slots = scores.dims()[1];
                let scores: Vec<f32> = scores.into_data().iter::<f32>().collect();
                for (query, scores) in (first..).zip(scores.chunks(num_slots)) {
                    let own = positions[row * n + query] as usize / choice.blocks.select_block_size;
                    let mut found = vec![-1; count];
                    sieve_cpu::nsa::choose_blocks(scores, own, choice.forced, &mut found);
                    let found: Vec<i64> = found.into_iter().map(i64::from).collect();
                    let expected = &defined[(row * n + query) * groups * count..][..groups * count];
                    assert_eq!(found.repeat(groups), expected, "{:?} {choice:?} {row} {query}", call.dims);
                }
            });
        }
    }
}

#[test]
fn block_positions_are_those_of_the_first_tokens() {
    for (call, choice, _) in all_calls() {
        let positions = host_ints(block_positions(&call.documents, choice.blocks));
        let in_document = host_ints(call.documents.positions.clone());
        let starts = slot_starts(&call, choice);
        let of = |(at, &first): (usize, &i32)| match first {
            -1 => 0,
            _ => in_document[at / (starts.len() / call.dims[0]) * call.dims[1] + first as usize],
        };
        assert_eq!(positions, starts.iter().enumerate().map(of).collect::<Vec<_>>(), "{:?} {choice:?}", call.dims);
    }
}

#[test]
fn attention_and_the_loss_of_pooled_scores_equal_the_definition() {
    for (call, choice, is_warmup) in all_calls() {
        let inputs = inputs_of(&call, choice, 30);
        let leaves = inputs.clone().map(|input| input.untracked(DType::F32));
        let given = indexed(&call, choice, &leaves, (is_warmup, LOSS_WEIGHT));
        let op = |inputs: &[AdFloat]| {
            let call = IndexedCall { block_keys: Some(float(&inputs[2])), ..given.clone() };
            primitive(indexed_attention(float(&inputs[0]), float(&inputs[1]), &call))
        };
        check_parity("pooled indexed_attention", &inputs, &op, &|inputs| {
            let o = match &given.chosen {
                Some(chosen) => chosen_attention(float(&inputs[0]), chosen.clone(), &call.documents, call.spec, choice),
                None => crate::attention(float::<4>(&inputs[0]), &call.documents, call.spec),
            };
            with_loss(o, total_divergence(&call, &given, inputs))
        });
        check_views("pooled indexed_attention", &inputs, &op);
    }
}

#[test]
fn statistics_of_pooled_scores_have_the_divergence_of_the_definition() {
    // As many tokens as the number of queries that are measured, so that the mean is over all queries.
    for (lengths, heads) in [(&[][..], [4, 2]), (&[5][..], [3, 3]), (&[1, 9][..], [2, 1])] {
        let call = Call::new([1, 16], heads, 8, lengths);
        for (choice, is_warmup) in [(qsa(2, 2), false), (qsa(3, 1), false), (qsa(2, 64), false), (qsa(2, 2), true)] {
            let leaves = inputs_of(&call, choice, 50).map(|input| input.untracked(DType::F32));
            let chosen = indexed(&call, choice, &leaves, (false, 1.0)).chosen.expect("no warm-up");
            let given = indexed(&call, choice, &leaves, (is_warmup, 1.0));
            let measured = index_statistics(float::<4>(&leaves[0]), float::<4>(&leaves[1]), chosen, &given);
            let measured = host(primitive(measured));
            let divergence = host(primitive(total_divergence(&call, &given, &leaves)).primitive)[0] / 16.0;
            assert!((measured[0] - divergence).abs() < 1e-4, "{measured:?}, KL {divergence}");
            // A recall of at most 1, and the entropy of at most 8 blocks of 2 of the 16 tokens.
            assert!(measured[1] <= 1.0 + 1e-5 && measured[1] > 0.0, "{measured:?}");
            assert!(measured[2] >= 0.0 && measured[2] <= 8f64.ln(), "{measured:?}");
        }
    }
}
