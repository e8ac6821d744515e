//! The choice by pooled keys against its definition in f64, read from the keys themselves.

use super::*;
use crate::nsa::nsa_mean_pool_forward;
use crate::nsa::reference::{Packed, for_each_token};
use crate::simd::tests::on_every_arch;
use sieve_testing::{Random, threads, whole_rows, wide};

/// Scores of the blocks `0..=own` of each (row, token, chooser), as the papers write them.
fn importance(packed: Packed<'_>, choice: BlockChoice, documents: Documents<'_>) -> Vec<Vec<f64>> {
    let (shape, blocks) = (packed.shape, choice.blocks);
    let (l, s, size) = (
        blocks.compress_block_size,
        blocks.compress_stride,
        blocks.select_block_size,
    );
    let group = shape.group_size();
    let mut all = Vec::new();
    for_each_token(shape, documents, |row, document, token| {
        let t = token - document.start;
        let mean = |kv_head: usize, first: usize, len: usize| -> Vec<f64> {
            let mut mean = vec![0.0; shape.head_dim];
            for at in first..first + len {
                for (mean, k) in mean.iter_mut().zip(packed.k(row, document.start + at, kv_head)) {
                    *mean += k / len as f64;
                }
            }
            mean
        };
        let dot = |head: usize, key: &[f64]| -> f64 {
            let q = packed.head(row, token, head);
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
            let seen = (0..).take_while(|c| c * s + l <= t + 1).count();
            let mut sums = vec![0.0; seen];
            for head in heads {
                let logits = (0..seen).map(|c| f64::from(shape.softmax_scale) * dot(head, &mean(kv_head, c * s, l)));
                let exps: Vec<f64> = logits.map(f64::exp).collect();
                let total: f64 = exps.iter().sum();
                sums.iter_mut().zip(&exps).for_each(|(sum, x)| *sum += x / total);
            }
            let of_block = |block: usize| {
                let overlaps = |c: &usize| c * s < (block + 1) * size && c * s + l > block * size;
                (0..seen).filter(overlaps).map(|c| sums[c]).fold(0.0, f64::max)
            };
            all.push((0..=own).map(of_block).collect());
        }
    });
    all
}

struct Case {
    shape: AttentionShape,
    choice: BlockChoice,
    qkv: Vec<f32>,
    start: Vec<i32>,
    end: Vec<i32>,
}

impl Case {
    /// Sizes in the order batch, seq_len, num_heads, num_kv_heads, head_dim.
    fn new([batch, seq_len, num_heads, num_kv_heads, head_dim]: [usize; 5], choice: BlockChoice, seed: u64) -> Self {
        let mut random = Random(seed);
        let shape = AttentionShape {
            batch,
            seq_len,
            num_heads,
            num_kv_heads,
            head_dim,
            softmax_scale: 1.0 / (head_dim as f32).sqrt(),
        };
        let (start, end) = match seed % 2 {
            0 => random.documents(batch, seq_len),
            _ => whole_rows(batch, seq_len),
        };
        let qkv = random.vector(batch * seq_len * shape.token_len());
        Self {
            shape,
            choice,
            qkv,
            start,
            end,
        }
    }

    fn documents(&self) -> Documents<'_> {
        Documents::new(&self.start, &self.end)
    }

    fn run(&self) -> Vec<i32> {
        let Self { shape, choice, .. } = *self;
        let blocks = choice.blocks;
        let rows = shape.batch * blocks.num_slots(shape.seq_len) * shape.num_kv_heads;
        let mut pooled = vec![f32::NAN; 2 * rows * shape.head_dim];
        nsa_mean_pool_forward(shape, blocks, &self.qkv, self.documents(), &mut pooled);
        let choosers = choice.num_choosers(shape.num_heads, shape.num_kv_heads);
        let mut chosen = vec![i32::MIN; shape.batch * shape.seq_len * choosers * blocks.num_selected_blocks];
        let keys = &pooled[..rows * shape.head_dim];
        choose_key_blocks(shape, choice, &self.qkv, self.documents(), keys, None, &mut chosen);
        chosen
    }

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
            assert!(
                kept.is_sorted_by(|a, b| a < b) && kept[count - 1] == own,
                "{what}: {kept:?} of {own}"
            );
            assert!(chosen[count..].iter().all(|&block| block == -1), "{what}: {chosen:?}");
            let free = self.choice.forced.free(own);
            let forced = (0..=own).filter(|block| !free.contains(block));
            if self.choice.forced.count() <= k {
                forced.for_each(|block| assert!(kept.contains(&block), "{what}: {kept:?} without {block}"));
            }
            let of = |block: &usize| importance[*block];
            let worst = kept
                .iter()
                .filter(|block| free.contains(block))
                .map(of)
                .fold(f64::INFINITY, f64::min);
            let best = free
                .clone()
                .filter(|block| !kept.contains(block))
                .map(|block| importance[block]);
            let best = best.fold(f64::NEG_INFINITY, f64::max);
            assert!(
                best <= worst + 1e-5 * (1.0 + worst.abs()),
                "{what}: {best} above {worst}"
            );
        }
    }
}

fn infllm(blocks: [usize; 4], local: usize) -> BlockChoice {
    BlockChoice {
        blocks: NsaBlocks::of(blocks),
        rule: ChoiceRule::LargestProbability,
        forced: ForcedBlocks { first: true, local },
    }
}

fn moba(size: usize, num_selected_blocks: usize) -> BlockChoice {
    BlockChoice {
        blocks: NsaBlocks::of([size, size, size, num_selected_blocks]),
        rule: ChoiceRule::MeanKey,
        forced: ForcedBlocks { first: false, local: 1 },
    }
}

fn choices() -> [BlockChoice; 7] {
    [
        infllm([4, 2, 4, 3], 1),
        infllm([8, 4, 16, 5], 3),
        infllm([12, 4, 4, 4], 2),
        infllm([32, 16, 64, 4], 2),
        moba(4, 3),
        moba(7, 1),
        moba(64, 2),
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
    on_every_arch(|| {
        for (n, sizes) in sizes.into_iter().enumerate() {
            for (c, choice) in choices().into_iter().enumerate() {
                Case::new(sizes, choice, (7 * n + c) as u64).check();
            }
        }
    });
    // Any sizes.
    let mut random = Random(5);
    for seed in 0..120 {
        let kv_heads = 1 + random.below(3);
        let sizes = [
            1 + random.below(2),
            1 + random.below(150),
            kv_heads * (1 + random.below(4)),
            kv_heads,
            8,
        ];
        let k = 1 + random.below(6);
        let choice = match seed % 2 {
            0 => moba(1 + random.below(20), k),
            _ => {
                let stride = 1 + random.below(4);
                let blocks = [
                    stride * (1 + random.below(4)),
                    stride,
                    stride * (1 + random.below(4)),
                    k + 1,
                ];
                infllm(blocks, 1 + random.below(k))
            }
        };
        Case::new(sizes, choice, seed).check();
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
            other.qkv[from * case.shape.token_len()..]
                .iter_mut()
                .for_each(|x| *x = 3.0 - 2.0 * *x);
            assert_eq!(
                other.run()[..from * per_token],
                chosen[..from * per_token],
                "{choice:?} from {from}"
            );
        }
        for num_threads in [1, 3] {
            assert_eq!(threads(num_threads).install(|| case.run()), chosen, "{choice:?}");
        }
    }
}

#[test]
fn extreme_scores_still_choose_the_largest() {
    for factor in [1e-20_f32, 1e18] {
        for choice in [moba(4, 3), infllm([4, 2, 4, 4], 1)] {
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
