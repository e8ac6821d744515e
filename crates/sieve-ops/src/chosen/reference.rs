//! The choice query by query on the host, in f64.
use super::ChoiceCall;
use crate::tensors::{Float, Ints, tensor};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use sieve_core::ChoiceRule;
use sieve_cpu::nsa::{choose_blocks, overlap_weight};

/// See [`crate::choose_key_blocks`]; `pooled` is `[2, batch * num_slots * num_kv_heads, head_dim]`, keys first.
pub fn choose_key_blocks<B: Backend>(qkv: Float<B>, pooled: Float<B>, call: &ChoiceCall<B>) -> Ints<B> {
    let (spec, choice) = (call.spec, call.choice);
    let blocks = choice.blocks;
    let qkv = tensor::<B, 4>(qkv);
    let ([batch, n, heads, d], device) = (qkv.dims(), qkv.device());
    let host = |x: TensorData| x.iter::<f64>().collect::<Vec<f64>>();
    let (q, pooled) = (host(qkv.into_data()), host(tensor::<B, 3>(pooled).into_data()));
    let [starts, _] = call.documents.clone().map(Tensor::<B, 2, Int>::from_primitive);
    let starts: Vec<i64> = starts.into_data().iter::<i64>().collect();
    let (num_slots, kv_heads) = (blocks.num_slots(n), spec.num_kv_heads);
    let group = spec.num_heads / kv_heads;
    let choosers = choice.num_choosers(spec.num_heads, kv_heads);
    let k = blocks.num_selected_blocks;
    let mut chosen = vec![0i32; batch * n * choosers * k];
    for (at, chosen) in chosen.chunks_exact_mut(k).enumerate() {
        let (token, chooser) = (at / choosers, at % choosers);
        let (row, start) = (token / n, starts[token] as usize);
        let position = token % n - start;
        let own = position / blocks.select_block_size;
        let seen = blocks.num_compressed_blocks(position + 1);
        let scores = |head: usize| -> Vec<f64> {
            let q = &q[(token * heads + head) * d..][..d];
            let score = |c: usize| -> f64 {
                let slot = row * num_slots + blocks.first_slot(start) + c;
                let key = &pooled[(slot * kv_heads + head / group) * d..][..d];
                q.iter().zip(key).map(|(q, k)| q * k).sum()
            };
            (0..seen).map(score).collect()
        };
        let importance: Vec<f32> = match choice.rule {
            ChoiceRule::MeanKey | ChoiceRule::LargestScore => {
                let (scores, per_block) = (scores(chooser), blocks.select_block_size / blocks.compress_stride);
                let of_block = |scores: &[f64]| scores.iter().fold(f64::NEG_INFINITY, |most, &x| x.max(most)) as f32;
                // The own block is chosen whatever its score.
                let earlier = scores.chunks_exact(per_block).take(own).map(of_block);
                earlier.chain([0.0]).collect()
            }
            rule => {
                let mut p = vec![0.0; seen];
                for head in chooser * group..(chooser + 1) * group {
                    let scores = scores(head);
                    let largest = scores.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
                    let exp = |x: &f64| ((x - largest) * spec.softmax_scale).exp();
                    let sum: f64 = scores.iter().map(exp).sum();
                    p.iter_mut().zip(&scores).for_each(|(p, x)| *p += exp(x) / sum);
                }
                let of_block = |block: usize| -> f64 {
                    let weighted = p.iter().enumerate().map(|(c, p)| (overlap_weight(blocks, c, block), p));
                    match rule {
                        ChoiceRule::WeightedProbability => weighted.map(|(weight, p)| weight as f64 * p).sum(),
                        _ => weighted
                            .filter(|(weight, _)| *weight > 0)
                            .fold(0.0, |most, (_, p)| p.max(most)),
                    }
                };
                (0..=own).map(|block| of_block(block) as f32).collect()
            }
        };
        choose_blocks(&importance, own, choice.forced, chosen);
    }
    let chosen = TensorData::new(chosen, [batch, n, choosers, k]);
    Tensor::<B, 4, Int>::from_data(chosen, &device).into_primitive()
}
