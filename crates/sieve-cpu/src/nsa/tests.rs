//! The fast path against the definition in f64, gradients against differences, and what must not change.

use super::reference::{self, Packed};
use super::*;
use crate::attention::{AttentionShape, Mask, attention_backward, attention_forward};
use crate::simd::tests::on_every_arch;
use sieve_core::ForcedBlocks;
use sieve_testing::{
    Random, assert_close_relative, assert_lse_close, finite_differences, inner, threads, whole_rows, wide,
};

struct Case {
    shape: AttentionShape,
    blocks: NsaBlocks,
    qkv: Vec<f32>,
    compressed: Vec<f32>,
    start: Vec<i32>,
    end: Vec<i32>,
    d_o: Vec<f32>,
}

struct Branches {
    compressed: [Vec<f32>; 2],
    block_indices: Vec<i32>,
    selected: [Vec<f32>; 2],
}

fn blocks(l: usize, s: usize, select: usize, k: usize) -> NsaBlocks {
    NsaBlocks::of([l, s, select, k])
}

impl Case {
    /// Sizes in the order batch, seq_len, num_heads, num_kv_heads, head_dim.
    fn new(sizes: [usize; 5], blocks: NsaBlocks, packed: bool, seed: u64) -> Self {
        let mut random = Random(seed);
        let [batch, seq_len, num_heads, num_kv_heads, head_dim] = sizes;
        let shape = AttentionShape {
            batch,
            seq_len,
            num_heads,
            num_kv_heads,
            head_dim,
            softmax_scale: 1.0 / (head_dim as f32).sqrt(),
        };
        let (start, end) = match packed {
            true => random.documents(batch, seq_len),
            false => whole_rows(batch, seq_len),
        };
        let rows = batch * blocks.num_slots(seq_len) * num_kv_heads;
        Self {
            shape,
            blocks,
            qkv: random.vector(batch * seq_len * shape.token_len()),
            compressed: random.vector(2 * rows * head_dim),
            start,
            end,
            d_o: random.vector(batch * seq_len * num_heads * head_dim),
        }
    }

    fn documents(&self) -> Documents<'_> {
        Documents::new(&self.start, &self.end)
    }

    fn outputs(&self) -> [Vec<f32>; 2] {
        let tokens = self.shape.batch * self.shape.seq_len;
        [
            vec![f32::NAN; self.d_o.len()],
            vec![f32::NAN; tokens * self.shape.num_heads],
        ]
    }

    fn run(&self) -> Branches {
        let Self { shape, blocks, .. } = self;
        let tokens = shape.batch * shape.seq_len;
        let mut block_indices = vec![i32::MIN; tokens * shape.num_kv_heads * blocks.num_selected_blocks];
        let [mut o, mut lse] = self.outputs();
        nsa_compressed_attention_forward(
            *shape,
            *blocks,
            &self.qkv,
            self.documents(),
            &self.compressed,
            &mut o,
            &mut lse,
            &mut block_indices,
        );
        let compressed = [o, lse];
        let [mut o, mut lse] = self.outputs();
        let documents = self.documents();
        nsa_selected_attention_forward(*shape, *blocks, &self.qkv, documents, &block_indices, &mut o, &mut lse);
        Branches {
            compressed,
            block_indices,
            selected: [o, lse],
        }
    }

    fn selected_backward(&self, branches: &Branches) -> Vec<f32> {
        let mut d_qkv = vec![f32::NAN; self.qkv.len()];
        let [o, lse] = &branches.selected;
        nsa_selected_attention_backward(
            self.shape,
            self.blocks,
            &self.qkv,
            self.documents(),
            &branches.block_indices,
            o,
            lse,
            &self.d_o,
            &mut d_qkv,
        );
        d_qkv
    }

    fn compressed_backward(&self, branches: &Branches) -> [Vec<f32>; 2] {
        let mut d_qkv = vec![f32::NAN; self.qkv.len()];
        let mut d_compressed = vec![f32::NAN; self.compressed.len()];
        let [o, lse] = &branches.compressed;
        nsa_compressed_attention_backward(
            self.shape,
            self.blocks,
            &self.qkv,
            self.documents(),
            &self.compressed,
            o,
            lse,
            &self.d_o,
            &mut d_qkv,
            &mut d_compressed,
        );
        [d_qkv, d_compressed]
    }

    /// Outputs against the definition, and that the chosen blocks are the forced ones and the best of the others.
    fn check(&self) {
        let got = self.run();
        let (qkv, compressed) = (wide(&self.qkv), wide(&self.compressed));
        let packed = Packed {
            shape: self.shape,
            qkv: &qkv,
        };
        let documents = self.documents();
        let expected = reference::compressed(packed, self.blocks, documents, &compressed);
        let name = |what: &str| format!("{what} at {:?}, {:?}", self.shape, self.blocks);
        assert_close_relative(&name("compressed o"), &got.compressed[0], &expected.o, 3e-6);
        assert_lse_close(&name("compressed lse"), &got.compressed[1], &expected.lse, 3e-6);
        let k = self.blocks.num_selected_blocks;
        let chosen = got.block_indices.chunks_exact(k);
        assert_eq!(chosen.len(), expected.importance.len());
        for (chosen, importance) in chosen.zip(&expected.importance) {
            let own = importance.len() - 1;
            let count = k.min(own + 1);
            let kept: Vec<usize> = chosen[..count].iter().map(|&x| x as usize).collect();
            assert!(kept.is_sorted_by(|a, b| a < b), "{kept:?}");
            assert!(chosen[count..].iter().all(|&x| x == -1));
            for forced in [own, own.saturating_sub(1), 0].into_iter().take(k) {
                assert!(kept.contains(&forced), "{kept:?} without {forced}");
            }
            let left = (0..=own).filter(|block| !kept.contains(block));
            let free = kept
                .iter()
                .filter(|&&block| block != 0 && block + 1 < own)
                .map(|&block| importance[block]);
            let worst = free.fold(f64::INFINITY, f64::min);
            for block in left {
                let x = importance[block];
                assert!(x <= worst + 1e-5, "block {block}: {x} above {worst}");
            }
        }
        let expected = reference::selected(packed, self.blocks, documents, &got.block_indices);
        assert_close_relative(&name("selected o"), &got.selected[0], &expected.o, 3e-6);
        assert_lse_close(&name("selected lse"), &got.selected[1], &expected.lse, 3e-6);
    }
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let sizes = [
        ([2, 63, 6, 3, 24], blocks(4, 2, 4, 3)),
        ([1, 1, 2, 1, 16], blocks(4, 2, 4, 3)),
        ([3, 65, 2, 2, 64], blocks(8, 4, 8, 4)),
        ([1, 201, 8, 1, 72], blocks(8, 8, 16, 5)),
        ([2, 77, 5, 1, 96], blocks(6, 2, 4, 3)),
        // A block longer than what is gathered at once; a document shorter than a compressed block.
        ([1, 330, 4, 2, 16], blocks(32, 16, 112, 1)),
        ([1, 20, 2, 2, 5], blocks(32, 16, 64, 3)),
        // Several tiles of every kernel.
        ([1, 1100, 2, 1, 8], blocks(16, 8, 16, 4)),
    ];
    for (n, (sizes, blocks)) in sizes.into_iter().enumerate() {
        for packed in [false, true] {
            cases.push(Case::new(sizes, blocks, packed, n as u64));
        }
    }
    cases
}

#[test]
fn nsa_equals_the_definition() {
    on_every_arch(|| cases().iter().for_each(Case::check));
}

#[test]
fn nsa_gradients_equal_differences() {
    for packed in [false, true] {
        let case = Case::new([2, 23, 4, 2, 3], blocks(4, 2, 4, 3), packed, 5);
        let Case { shape, blocks, .. } = case;
        let documents = case.documents();
        let got = case.run();
        let (qkv, compressed) = (wide(&case.qkv), wide(&case.compressed));
        let value = |qkv: &[f64], compressed: &[f64]| {
            let o = reference::compressed(Packed { shape, qkv }, blocks, documents, compressed).o;
            inner(&o, &case.d_o)
        };
        let [d_qkv, d_compressed] = case.compressed_backward(&got);
        let expected = finite_differences(&qkv, |qkv| value(qkv, &compressed));
        assert_close_relative("compressed d_qkv", &d_qkv, &expected, 1e-5);
        let expected = finite_differences(&compressed, |compressed| value(&qkv, compressed));
        assert_close_relative("d_compressed", &d_compressed, &expected, 1e-5);
        let expected = finite_differences(&qkv, |qkv| {
            let packed = Packed { shape, qkv };
            let o = reference::selected(packed, blocks, documents, &got.block_indices).o;
            inner(&o, &case.d_o)
        });
        assert_close_relative("selected d_qkv", &case.selected_backward(&got), &expected, 1e-5);
    }
}

#[test]
fn nsa_selected_with_every_block_is_dense_attention() {
    on_every_arch(|| {
        for (seed, sizes) in [[2usize, 130, 6, 2, 32], [1, 700, 2, 2, 64], [1, 301, 4, 1, 16]]
            .into_iter()
            .enumerate()
        {
            // k l' >= n
            let blocks = blocks(32, 16, 64, sizes[1].div_ceil(64));
            for packed in [false, true] {
                let case = Case::new(sizes, blocks, packed, 40 + seed as u64);
                let got = case.run();
                let [mut o, mut lse] = case.outputs();
                let documents = case.documents();
                let mask = Mask::Causal;
                attention_forward(case.shape, &case.qkv, documents, mask, &mut o, &mut lse);
                assert_close_relative("o", &got.selected[0], &wide(&o), 3e-6);
                assert_lse_close("lse", &got.selected[1], &wide(&lse), 3e-6);
                let mut d_qkv = vec![f32::NAN; case.qkv.len()];
                attention_backward(
                    case.shape, &case.qkv, documents, mask, &o, &lse, &case.d_o, &mut d_qkv, None,
                );
                assert_close_relative("d_qkv", &case.selected_backward(&got), &wide(&d_qkv), 1e-5);
            }
        }
    });
}

#[test]
fn nsa_rows_do_not_depend_on_later_tokens() {
    let case = Case::new([1, 300, 4, 2, 16], blocks(8, 4, 8, 4), false, 9);
    let got = case.run();
    for from in [1, 7, 8, 64, 255, 299] {
        let mut other = Case::new([1, 300, 4, 2, 16], blocks(8, 4, 8, 4), false, 9);
        let at = from * other.shape.token_len();
        other.qkv[at..].iter_mut().for_each(|x| *x = 3.0 - 2.0 * *x);
        // Compressed blocks that hold a changed token.
        let d = other.shape.head_dim;
        let first_changed = (from + 1).saturating_sub(8).div_ceil(4);
        let half = other.compressed.len() / 2;
        for which in [0, half] {
            other.compressed[which + first_changed * 2 * d..which + half].fill(1.5);
        }
        let changed = other.run();
        let width = from * case.shape.num_heads * d;
        assert_eq!(changed.compressed[0][..width], got.compressed[0][..width]);
        let chosen = from * 2 * 4;
        assert_eq!(changed.block_indices[..chosen], got.block_indices[..chosen]);
        // Panels regroup when later rows of the tile choose otherwise, but each row's own sums stay as they are.
        assert_eq!(changed.selected[0][..width], got.selected[0][..width]);
        assert_ne!(changed.selected[0][width..], got.selected[0][width..]);
    }
}

#[test]
fn a_block_nobody_chose_is_never_read() {
    let mut case = Case::new([1, 96, 2, 1, 16], blocks(8, 8, 8, 3), false, 3);
    let mut got = case.run();
    // Everybody keeps the first block, its own and the one before: then block 3 is seen by tokens 24 to 39 only.
    for (token, chosen) in got.block_indices.chunks_exact_mut(3).enumerate() {
        let own = token as i32 / 8;
        let mut kept = vec![0, own - 1, own];
        kept.retain(|&x| x >= 0);
        kept.dedup();
        kept.resize(3, -1);
        chosen.copy_from_slice(&kept);
    }
    let len = case.shape.token_len();
    let run = |case: &Case| {
        let [mut o, mut lse] = case.outputs();
        let (shape, blocks, documents) = (case.shape, case.blocks, case.documents());
        nsa_selected_attention_forward(
            shape,
            blocks,
            &case.qkv,
            documents,
            &got.block_indices,
            &mut o,
            &mut lse,
        );
        o
    };
    let before = run(&case);
    for token in 24..32 {
        case.qkv[token * len + 2 * 16..(token + 1) * len].fill(f32::NAN);
    }
    let after = run(&case);
    let width = 2 * 16;
    assert_eq!(before[..24 * width], after[..24 * width]);
    assert_eq!(before[40 * width..], after[40 * width..]);
    assert!(after[39 * width].is_nan());
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

#[test]
fn nsa_weights_count_the_papers_double_sum() {
    for (l, s, select) in [(32, 16, 64), (4, 2, 4), (6, 2, 4), (8, 8, 8), (4, 4, 12)] {
        let blocks = blocks(l, s, select, 1);
        for block in 0..5 {
            for c in 0..30 {
                let mut count = 0;
                for a in 0..select / s {
                    for b in 0..l / s {
                        count += usize::from(block * (select / s) + a == c + b);
                    }
                }
                assert_eq!(overlap_weight(blocks, c, block), count, "{l} {s} {select}");
                // A compressed block counts exactly for the selected blocks it overlaps.
                let overlap = c * s < (block + 1) * select && c * s + l > block * select;
                assert_eq!(count > 0, overlap);
            }
        }
    }
}

#[test]
fn nsa_blocks_and_means_equal_the_definition() {
    for case in cases() {
        let (d, l) = (case.shape.head_dim, case.blocks.compress_block_size);
        let mut random = Random(8);
        let positions = [random.vector(l * d), random.vector(l * d)];
        let documents = case.documents();
        let len = case.compressed.len() * l;
        let mut out = vec![f32::NAN; len];
        let [k_positions, v_positions] = &positions;
        nsa_blocks_forward(
            case.shape,
            case.blocks,
            &case.qkv,
            documents,
            [k_positions, v_positions],
            &mut out,
        );
        let (qkv, wide_positions) = (wide(&case.qkv), positions.each_ref().map(|x| wide(x)));
        let packed = Packed {
            shape: case.shape,
            qkv: &qkv,
        };
        let [k, v] = &wide_positions;
        let expected = reference::blocks_of(packed, case.blocks, documents, [k, v]);
        assert_close_relative("blocks", &out, &expected, 1e-6);
        // The op is linear, so <d_out, J x> = <J^T d_out, x> fixes its gradient.
        let mut d_out = random.vector(len);
        let mut d_qkv = vec![f32::NAN; case.qkv.len()];
        let (mut dk, mut dv) = (vec![f32::NAN; l * d], vec![f32::NAN; l * d]);
        let d_positions = [dk.as_mut_slice(), dv.as_mut_slice()];
        nsa_blocks_backward(case.shape, case.blocks, documents, &d_out, &mut d_qkv, d_positions);
        let forward = inner(&expected, &d_out);
        let backward = inner(&qkv, &d_qkv) + inner(k, &dk) + inner(v, &dv);
        let size = 1.0 + inner(&wide(&d_out), &d_out).sqrt() * (expected.len() as f64).sqrt();
        assert!((forward - backward).abs() < 1e-6 * size, "{forward} {backward}");

        let mut mean = vec![f32::NAN; case.compressed.len()];
        nsa_mean_pool_forward(case.shape, case.blocks, &case.qkv, documents, &mut mean);
        let zeros = vec![0.0; l * d];
        let tokens = reference::blocks_of(packed, case.blocks, documents, [&zeros, &zeros]);
        let expected: Vec<f64> = tokens
            .chunks_exact(l * d)
            .flat_map(|block| (0..d).map(move |c| block.iter().skip(c).step_by(d).sum::<f64>() / l as f64))
            .collect();
        assert_close_relative("means", &mean, &expected, 1e-6);
        d_out.truncate(mean.len());
        nsa_mean_pool_backward(case.shape, case.blocks, documents, &d_out, &mut d_qkv);
        let (forward, backward) = (inner(&expected, &d_out), inner(&qkv, &d_qkv));
        assert!((forward - backward).abs() < 1e-6 * size, "{forward} {backward}");
    }
}

#[test]
fn nsa_gates_equal_the_definition() {
    let (tokens, heads, d) = (131, 3, 5);
    let mut random = Random(2);
    let branches: [Vec<f32>; 3] = [0; 3].map(|_| random.vector(tokens * heads * d));
    let (logits, bias) = (random.vector(tokens * heads * 3), random.vector(heads * 3));
    let d_o = random.vector(tokens * heads * d);
    // All inputs in one vector: branches, logits, bias.
    let all: Vec<f64> = branches.iter().chain([&logits, &bias]).flat_map(|x| wide(x)).collect();
    let width = tokens * heads * d;
    let output = |x: &[f64]| -> Vec<f64> {
        let (logits, bias) = x[3 * width..].split_at(tokens * heads * 3);
        (0..width)
            .map(|at| {
                let row = at / d;
                (0..3)
                    .map(|c| {
                        let logit = logits[row * 3 + c] + bias[row % heads * 3 + c];
                        x[c * width + at] / (1.0 + (-logit).exp())
                    })
                    .sum()
            })
            .collect()
    };
    let mut o = vec![f32::NAN; width];
    let slices = branches.each_ref().map(Vec::as_slice);
    nsa_gates_forward(slices, &logits, &bias, d, &mut o);
    assert_close_relative("o", &o, &output(&all), 1e-6);
    let mut d_branches = [0; 3].map(|_| vec![f32::NAN; width]);
    let mut d_logits = vec![f32::NAN; logits.len()];
    let mut d_bias = vec![f32::NAN; bias.len()];
    nsa_gates_backward(
        slices,
        &logits,
        &bias,
        d,
        &d_o,
        d_branches.each_mut().map(Vec::as_mut_slice),
        &mut d_logits,
        &mut d_bias,
    );
    let got: Vec<f32> = d_branches.into_iter().flatten().chain(d_logits).chain(d_bias).collect();
    // Every input touches one output row, except the bias; some of each kind are enough.
    let some: Vec<usize> = (0..3 * width)
        .step_by(97)
        .chain((3 * width..all.len() - bias.len()).step_by(31))
        .chain(all.len() - bias.len()..all.len())
        .collect();
    let at_some: Vec<f64> = some.iter().map(|&i| all[i]).collect();
    let expected = finite_differences(&at_some, |x| {
        let mut all = all.clone();
        for (&i, &x) in some.iter().zip(x) {
            all[i] = x;
        }
        inner(&output(&all), &d_o)
    });
    let got: Vec<f32> = some.iter().map(|&i| got[i]).collect();
    assert_close_relative("gradients", &got, &expected, 1e-5);
}

#[test]
fn nsa_does_not_depend_on_the_number_of_threads() {
    let case = Case::new([2, 700, 4, 2, 16], blocks(16, 8, 32, 4), true, 12);
    let run = || {
        let got = case.run();
        let d_qkv = case.selected_backward(&got);
        (got.compressed, got.block_indices, got.selected, d_qkv)
    };
    let one = threads(1).install(run);
    for count in [2, 3, 5] {
        assert!(threads(count).install(run) == one, "{count} threads");
    }
}
