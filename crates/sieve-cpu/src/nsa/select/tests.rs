//! The choice by pooled keys against its definition in f64, read from the keys themselves.

use super::*;
use crate::nsa::slot_starts;
use sieve_core::model::test_shapes::{infllm_v2, mean_key, msa, qsa};
use sieve_testing::{Random, threads, whole_rows, wide};

/// A packed tensor in f64 with its sizes.
#[derive(Clone, Copy)]
struct Packed<'a> {
    shape: ScaledShape,
    qkv: &'a [f64],
}

impl<'a> Packed<'a> {
    fn head(&self, token: usize, head: usize) -> &'a [f64] {
        let d = self.shape.head_dim;
        &self.qkv[token * self.shape.token_len() + head * d..][..d]
    }

    /// Mean of the keys of `len` tokens.
    fn mean_key(&self, kv_head: usize, first: usize, len: usize) -> Vec<f64> {
        let mut mean = vec![0.0; self.shape.head_dim];
        for token in first..first + len {
            let k = self.head(token, self.shape.num_heads + kv_head);
            mean.iter_mut().zip(k).for_each(|(mean, k)| *mean += k / len as f64);
        }
        mean
    }
}

/// Scores of the blocks `0..=own` of each (row, token, chooser), as the papers write them.
fn importance(packed: Packed<'_>, choice: BlockChoice, documents: Documents<'_>) -> Vec<Vec<f64>> {
    let (shape, blocks) = (packed.shape, choice.blocks);
    let (l, s, size) = (blocks.compress_block_size, blocks.compress_stride, blocks.select_block_size);
    let group = shape.group_size();
    let mut all = Vec::new();
    for token in 0..shape.batch * shape.seq_len {
        let start = documents.start[token] as usize;
        let (t, first) = (token % shape.seq_len - start, token / shape.seq_len * shape.seq_len + start);
        let mean = |kv_head: usize, at: usize, len: usize| packed.mean_key(kv_head, first + at, len);
        let dot = |head: usize, key: &[f64]| -> f64 {
            let q = packed.head(token, head);
            q.iter().zip(key).map(|(q, k)| q * k).sum()
        };
        let own = t / size;
        for kv_head in 0..shape.num_kv_heads {
            let heads = kv_head * group..(kv_head + 1) * group;
            if choice.rule == ChoiceRule::MeanKey {
                for head in heads {
                    let score = |block: usize| dot(head, &mean(kv_head, block * size, size));
                    all.push((0..own).map(score).chain([0.0]).collect());
                }
                continue;
            }
            if choice.rule == ChoiceRule::LargestScore {
                for head in heads {
                    let of_token = |at: usize| dot(head, &mean(kv_head, at, 1));
                    let tokens = |block: usize| block * size..((block + 1) * size).min(t + 1);
                    let score = |block| tokens(block).map(of_token).fold(f64::NEG_INFINITY, f64::max);
                    all.push((0..=own).map(score).collect());
                }
                continue;
            }
            let seen = (0..).take_while(|c| c * s + l <= t + 1).count();
            let mut sums = vec![0.0; seen];
            for head in heads {
                let logits = (0..seen).map(|c| f64::from(shape.softmax_scale) * dot(head, &mean(kv_head, c * s, l)));
                let exps: Vec<f64> = logits.map(f64::exp).collect();
                let total: f64 = exps.iter().sum();
                sums.iter_mut().zip(&exps).for_each(|(sum, x)| *sum += x / total);
            }
            let of_block = |block: usize| {
                if choice.rule == ChoiceRule::WeightedProbability {
                    // NSA's double sum, from 0; terms out of range are 0.
                    let per = size / s;
                    let pairs = (0..per).flat_map(|a| (0..l / s).map(move |b| (block * per + a).checked_sub(b)));
                    return pairs.flatten().filter_map(|c| sums.get(c)).sum();
                }
                let overlaps = |c: &usize| c * s < (block + 1) * size && c * s + l > block * size;
                (0..seen).filter(overlaps).map(|c| sums[c]).fold(0.0, f64::max)
            };
            all.push((0..=own).map(of_block).collect());
        }
    }
    all
}

struct Case {
    shape: ScaledShape,
    choice: BlockChoice,
    qkv: Vec<f32>,
    start: Vec<i32>,
    end: Vec<i32>,
}

impl Case {
    /// Sizes in the order batch, seq_len, num_heads, num_kv_heads, head_dim.
    fn new([batch, seq_len, num_heads, num_kv_heads, head_dim]: [usize; 5], choice: BlockChoice, seed: u64) -> Self {
        let mut random = Random(seed);
        let shape = ScaledShape::new([batch, seq_len], [num_heads, num_kv_heads], head_dim);
        let (start, end) = match seed % 2 {
            0 => random.documents(batch, seq_len),
            _ => whole_rows(batch, seq_len),
        };
        let qkv = random.vector(batch * seq_len * shape.token_len());
        Self { shape, choice, qkv, start, end }
    }

    fn documents(&self) -> Documents<'_> {
        Documents::new(&self.start, &self.end)
    }

    /// The blocks that [`choose_key_blocks`] chooses. Empty slots of pooled keys hold NaN, which it must not read.
    fn run(&self) -> Vec<i32> {
        let Self { shape, choice, .. } = *self;
        let blocks = choice.blocks;
        let qkv = wide(&self.qkv);
        let packed = Packed { shape, qkv: &qkv };
        let slots = slot_starts(blocks, shape.batch, shape.seq_len, self.documents());
        let (per_row, tokens) = (blocks.num_slots(shape.seq_len), shape.batch * shape.seq_len);
        let pooled: Vec<f64> = (0..slots.len() * shape.num_kv_heads)
            .flat_map(|at| {
                let slot = at / shape.num_kv_heads;
                match usize::try_from(slots[slot]) {
                    Ok(start) => {
                        let first = slot / per_row * shape.seq_len + start;
                        packed.mean_key(at % shape.num_kv_heads, first, blocks.compress_block_size)
                    }
                    Err(_) => vec![f64::NAN; shape.head_dim],
                }
            })
            .collect();
        let heads = (0..tokens).flat_map(|token| (0..shape.num_heads).map(move |head| (token, head)));
        let q: Vec<f64> = heads.flat_map(|(token, head)| packed.head(token, head)).copied().collect();
        let choosers = choice.num_choosers(shape.num_heads, shape.num_kv_heads);
        let mut chosen = vec![i32::MIN; tokens * choosers * blocks.num_selected_blocks];
        choose_key_blocks(shape, choice, &q, self.documents(), &pooled, &mut chosen);
        chosen
    }

    /// Checks that forced blocks are chosen, and that no other block left out is more important than a chosen one.
    fn check(&self) {
        let qkv = wide(&self.qkv);
        let (shape, k) = (self.shape, self.choice.blocks.num_selected_blocks);
        let packed = Packed { shape, qkv: &qkv };
        let expected = importance(packed, self.choice, self.documents());
        let chosen = self.run();
        let what = format!("{shape:?} {:?}", self.choice);
        assert_eq!(chosen.len(), expected.len() * k, "{what}");
        for (chosen, importance) in chosen.chunks_exact(k).zip(&expected) {
            let own = importance.len() - 1;
            let count = k.min(own + 1);
            let kept: Vec<usize> = chosen[..count].iter().map(|&block| block as usize).collect();
            assert!(kept.is_sorted_by(|a, b| a < b) && kept[count - 1] == own, "{what}: {kept:?} of {own}");
            assert!(chosen[count..].iter().all(|&block| block == -1), "{what}: {chosen:?}");
            let free = self.choice.forced.free(own);
            let forced = (0..=own).filter(|block| !free.contains(block));
            if self.choice.forced.count() <= k {
                forced.for_each(|block| assert!(kept.contains(&block), "{what}: {kept:?} without {block}"));
            }
            let of = |block: &usize| importance[*block];
            let worst = kept.iter().filter(|block| free.contains(block)).map(of).fold(f64::INFINITY, f64::min);
            let best = free.clone().filter(|block| !kept.contains(block)).map(|block| importance[block]);
            let best = best.fold(f64::NEG_INFINITY, f64::max);
            assert!(best <= worst + 1e-9 * (1.0 + worst.abs()), "{what}: {best} above {worst}");
        }
    }
}

/// Choices of several rules and sizes; some blocks are longer than some rows.
fn choices() -> [BlockChoice; 14] {
    let nsa = |sizes| BlockChoice::nsa(NsaBlocks::of(sizes));
    [
        nsa([4, 2, 4, 6]),
        nsa([8, 8, 16, 5]),
        nsa([6, 2, 4, 5]),
        nsa([32, 16, 112, 1]),
        infllm_v2([4, 2, 4, 3], 1),
        infllm_v2([8, 4, 16, 5], 3),
        infllm_v2([12, 4, 4, 4], 2),
        infllm_v2([32, 16, 64, 4], 2),
        mean_key(4, 3),
        mean_key(7, 1),
        mean_key(64, 2),
        msa(4, 3),
        msa(64, 2),
        msa(5, 1),
    ]
}

#[test]
fn choices_equal_the_definition() {
    let sizes = [
        [2, 63, 6, 3, 24],
        [1, 1, 2, 1, 16],
        [3, 65, 2, 2, 64],
        [1, 201, 8, 1, 72],
        [1, 3, 1, 1, 5],
        [1, 700, 4, 2, 8],
    ];
    for (n, sizes) in sizes.into_iter().enumerate() {
        for (c, choice) in choices().into_iter().enumerate() {
            Case::new(sizes, choice, (7 * n + c) as u64).check();
        }
    }
    // Random sizes.
    let mut random = Random(5);
    for seed in 0..120 {
        let kv_heads = 1 + random.below(3);
        let sizes = [1 + random.below(2), 1 + random.below(150), kv_heads * (1 + random.below(4)), kv_heads, 8];
        let k = 1 + random.below(6);
        let choice = match seed % 3 {
            0 => mean_key(1 + random.below(20), k),
            1 => msa(1 + random.below(20), k),
            _ => {
                let stride = 1 + random.below(4);
                let blocks = [stride * (1 + random.below(4)), stride, stride * (1 + random.below(4)), k + 1];
                infllm_v2(blocks, 1 + random.below(k))
            }
        };
        Case::new(sizes, choice, seed).check();
    }
}

#[test]
fn a_token_alone_chooses_as_among_the_others() {
    let (batch, n, heads, d) = (2, 130, 4, 24);
    for (seed, choice) in (0..).zip(choices().into_iter().chain([qsa(4, 3), qsa(16, 2)])) {
        let kv_heads = if choice.rule == ChoiceRule::SumOfHeads { 1 } else { 2 };
        let (mut random, blocks) = (Random(seed), choice.blocks);
        let (slots, shape) = (blocks.num_slots(n), ScaledShape::new([batch, n], [heads, kv_heads], d));
        let (q, keys) = (random.vector(batch * n * heads * d), random.vector(batch * slots * kv_heads * d));
        let (start, end) = whole_rows(batch, n);
        let (choosers, k) = (choice.num_choosers(heads, kv_heads), blocks.num_selected_blocks);
        let mut all = vec![0; batch * n * choosers * k];
        choose_key_blocks(shape, choice, &wide(&q), Documents::new(&start, &end), &wide(&keys), &mut all);
        for token in [0, 1, 3, 4, 17, 63, 64, 100, n - 1] {
            let count = blocks.num_compressed_blocks(token + 1);
            let of_rows = |row: usize| &q[(row * n + token) * heads * d..][..heads * d];
            let q: Vec<f32> = (0..batch).flat_map(of_rows).copied().collect();
            let key = |list: usize, c: usize| {
                let (row, head) = (list / kv_heads, list % kv_heads);
                &keys[((row * slots + c) * kv_heads + head) * d..][..d]
            };
            let lists = (0..batch * kv_heads).flat_map(|list| (0..count).map(move |c| (list, c)));
            let keys: Vec<f32> = lists.flat_map(|(list, c)| key(list, c)).copied().collect();
            let chosen =
                choose_token_blocks(ScaledShape::new([batch, 1], [heads, kv_heads], d), choice, &q, &keys, token + 1);
            for (list, chosen) in chosen.iter().enumerate() {
                let (row, chooser) = (list / choosers, list % choosers);
                let at = ((row * n + token) * choosers + chooser) * k;
                assert_eq!(chosen, &all[at..at + k], "{choice:?}, token {token}, row {row}, chooser {chooser}");
            }
        }
    }
}

#[test]
fn a_choice_neither_sees_later_tokens_nor_depends_on_threads() {
    for choice in choices() {
        let case = Case::new([1, 230, 4, 2, 16], choice, 9);
        let chosen = case.run();
        let per_token = chosen.len() / 230;
        for from in [1, 8, 64, 200, 229] {
            let mut other = Case::new([1, 230, 4, 2, 16], choice, 9);
            other.qkv[from * case.shape.token_len()..].iter_mut().for_each(|x| *x = 3.0 - 2.0 * *x);
            assert_eq!(other.run()[..from * per_token], chosen[..from * per_token], "{choice:?} from {from}");
        }
        for num_threads in [1, 3] {
            assert_eq!(threads(num_threads).install(|| case.run()), chosen, "{choice:?}");
        }
    }
}

#[test]
fn extreme_scores_still_choose_the_largest() {
    for factor in [1e-20_f32, 1e18] {
        for choice in [mean_key(4, 3), msa(4, 3), infllm_v2([4, 2, 4, 4], 1)] {
            let mut case = Case::new([1, 61, 2, 1, 8], choice, 3);
            case.qkv.iter_mut().for_each(|x| *x *= factor);
            let chosen = case.run();
            let k = choice.blocks.num_selected_blocks;
            for (at, chosen) in chosen.chunks_exact(k).enumerate() {
                let choosers = choice.num_choosers(2, 1);
                let own = at / choosers / 4;
                let count = chosen.iter().filter(|&&block| block >= 0).count();
                assert_eq!(count, k.min(own + 1), "{choice:?} {factor}: {chosen:?}");
                assert!(chosen[..count].is_sorted_by(|a, b| a < b) && chosen[count - 1] == own as i32);
            }
        }
    }
}

#[test]
fn nsa_choice_of_blocks_prefers_forced_then_large_then_late() {
    let chosen = |importance: &[f32], own, k| {
        let mut chosen = vec![7; k];
        choose_blocks(importance, own, ForcedBlocks::NSA, &mut chosen);
        chosen
    };
    assert_eq!(chosen(&[0.0], 0, 3), [0, -1, -1]);
    assert_eq!(chosen(&[0.0; 2], 1, 3), [0, 1, -1]);
    assert_eq!(chosen(&[0.0; 9], 8, 3), [0, 7, 8]);
    assert_eq!(chosen(&[0.0; 9], 8, 5), [0, 5, 6, 7, 8]);
    let importance = [0.0, 3.0, 1.0, 3.0, 2.0, 3.0, 0.0, 0.0, 0.0];
    assert_eq!(chosen(&importance, 8, 5), [0, 3, 5, 7, 8]);
    assert_eq!(chosen(&importance, 8, 6), [0, 1, 3, 5, 7, 8]);
    assert_eq!(chosen(&importance, 8, 20)[..9], [0, 1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(chosen(&[1.0; 9], 8, 1), [8]);
    assert_eq!(chosen(&[1.0; 9], 8, 2), [7, 8]);
}
