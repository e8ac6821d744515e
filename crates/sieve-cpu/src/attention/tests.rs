//! The fast path against the definition in f64, and what must not change when inputs do.

use std::collections::BTreeMap;

use super::{ChosenBlocks, Documents, Mask, ScaledShape, attention_backward, attention_forward};
use crate::expire::dma_select;
use crate::reference::{AttentionCall, Results as Definition, Rounding};
use crate::simd::tests::on_every_arch;
use sieve_core::{AttentionShape, FarKeys};
use sieve_testing::{Random, assert_close_relative, assert_lse_close, inner, threads, whole_rows, wide};

#[derive(Clone)]
struct Case {
    shape: ScaledShape,
    qkv: Vec<f32>,
    start: Vec<i32>,
    end: Vec<i32>,
    expire: Vec<i32>,
    delta: Vec<f32>,
    /// Blocks that the queries chose, by `[block size, blocks per query]`.
    chosen: BTreeMap<[usize; 2], Vec<i32>>,
    d_o: Vec<f32>,
}

#[derive(Debug, PartialEq)]
struct Results {
    o: Vec<f32>,
    lse: Vec<f32>,
    d_qkv: Vec<f32>,
    d_delta: Vec<f32>,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Causal,
    Window(usize),
    /// A window, first tokens of the document, and each head's band of distances up to the second number.
    Far([usize; 2]),
    /// DMA: queries see a key until its `expire`.
    Expire,
    /// Chosen blocks, `[block size, blocks per query]`.
    Chosen([usize; 2]),
}

/// `[block size, blocks per query]`. A block of 112 keys is more than are gathered at once, one of 4096 is a whole row,
/// and most rows have fewer than 9 blocks of 64.
const CHOSEN: [[usize; 2]; 5] = [[4, 3], [16, 5], [112, 1], [4096, 2], [64, 9]];

fn shape(batch: usize, seq_len: usize, num_heads: usize, num_kv_heads: usize, head_dim: usize) -> ScaledShape {
    ScaledShape::new([batch, seq_len], [num_heads, num_kv_heads], head_dim)
}

impl Case {
    /// `packed`: rows have several documents. `keep_window_size`: keys that DMA keeps for a query.
    fn new(shape: ScaledShape, packed: bool, keep_window_size: usize, seed: u64) -> Self {
        let mut random = Random(seed);
        let (start, end) =
            if packed { random.documents(shape.batch, shape.seq_len) } else { whole_rows(shape.batch, shape.seq_len) };
        let keys = shape.batch * shape.num_kv_heads * shape.seq_len;
        // Few distinct scores, so that ties are common.
        let z: Vec<f32> = (0..keys).map(|_| random.below(40) as f32 / 20.0 - 1.0).collect();
        let mut expire = vec![0; keys];
        let documents = Documents::new(&start, &end);
        dma_select(&z, documents, shape.batch, shape.num_kv_heads, shape.seq_len, keep_window_size, &mut expire);
        let chosen = CHOSEN.map(|sizes| (sizes, some_blocks(shape, documents, sizes, seed)));
        Self {
            chosen: chosen.into(),
            shape,
            qkv: random.vector(shape.batch * shape.seq_len * shape.token_len()),
            start,
            end,
            expire,
            delta: z.iter().map(|z| z.exp()).collect(),
            d_o: random.vector(shape.batch * shape.seq_len * shape.num_heads * shape.head_dim),
        }
    }

    fn documents(&self) -> Documents<'_> {
        Documents::new(&self.start, &self.end)
    }

    fn mask(&self, kind: Kind) -> Mask<'_> {
        match kind {
            Kind::Causal => Mask::Causal,
            Kind::Window(window_size) => Mask::Window(window_size),
            Kind::Far([window_size, end]) => {
                let distances = [window_size, end];
                // The call's first head has the second band.
                Mask::Far(window_size, FarKeys { sink_tokens: 3, distances, num_bands: 3, first_band: 1 })
            }
            Kind::Expire => Mask::Expire { expire: &self.expire, delta: &self.delta },
            Kind::Chosen(sizes @ [block_size, count]) => {
                Mask::Chosen(ChosenBlocks { indices: &self.chosen[&sizes], count, block_size })
            }
        }
    }

    fn run(&self, kind: Kind) -> Results {
        let AttentionShape { batch, seq_len, num_heads, num_kv_heads, .. } = *self.shape;
        let mut o = vec![f32::NAN; self.d_o.len()];
        let mut lse = vec![f32::NAN; batch * num_heads * seq_len];
        let mut d_qkv = vec![f32::NAN; self.qkv.len()];
        let mut d_delta = vec![f32::NAN; batch * num_kv_heads * seq_len];
        let (documents, mask) = (self.documents(), self.mask(kind));
        attention_forward(self.shape, &self.qkv, documents, mask, &mut o, &mut lse);
        attention_backward(self.shape, &self.qkv, documents, mask, &o, &lse, &self.d_o, &mut d_qkv, Some(&mut d_delta));
        Results { o, lse, d_qkv, d_delta }
    }

    fn definition(&self, qkv: &[f32], mask: Mask<'_>) -> Definition {
        AttentionCall::packed(self.shape, qkv, self.documents(), mask, &self.d_o).run(Rounding::None)
    }

    /// Compares outputs and gradients with the definition.
    fn check(&self, kind: Kind) {
        let got = self.run(kind);
        let expected = self.definition(&self.qkv, self.mask(kind));
        let d_qkv = packed(&expected, self.shape);
        let name = |what: &str| format!("{what} of {kind:?} at {:?}", self.shape);
        assert_close_relative(&name("o"), &got.o, &expected.o, 2e-6);
        assert_lse_close(&name("lse"), &got.lse, &expected.lse, 2e-6);
        // All queries read the first tokens with large weights: 1.2e-5 measured in sums over 4030 rows that cancel.
        let tolerance = if matches!(kind, Kind::Far(_)) { 2e-5 } else { 8e-6 };
        assert_close_relative(&name("d_qkv"), &got.d_qkv, &d_qkv, tolerance);
        // Sums over many rows that cancel: 9.9e-6 measured with scalar code, 6e-6 with vectors.
        match kind {
            Kind::Expire => assert_close_relative(&name("d_delta"), &got.d_delta, &expected.d_delta, 2e-5),
            _ => assert!(got.d_delta.iter().all(|&x| x == 0.0)),
        }
    }
}

/// Some blocks of each query, its own often among them, ascending, then -1.
fn some_blocks(shape: ScaledShape, documents: Documents<'_>, [block_size, count]: [usize; 2], seed: u64) -> Vec<i32> {
    let mut random = Random(seed + 1000);
    let mut all = Vec::new();
    for token in 0..shape.batch * shape.seq_len {
        let own = (token % shape.seq_len - documents.start[token] as usize) / block_size;
        for _ in 0..shape.num_kv_heads {
            let mut blocks: Vec<i32> = (0..count).map(|_| random.below(own + 1) as i32).collect();
            blocks[0] = own as i32 - i32::from(random.below(8) == 0);
            blocks.sort_unstable();
            blocks.dedup();
            blocks.resize(count, -1);
            all.extend(blocks);
        }
    }
    all
}

/// dq, dk and dv as the gradient of the packed tensor.
fn packed(results: &Definition, shape: ScaledShape) -> Vec<f64> {
    let tokens = shape.batch * shape.seq_len;
    let parts = [&results.dq, &results.dk, &results.dv];
    let of_token = |token: usize| {
        parts.into_iter().flat_map(move |x| {
            let len = x.len() / tokens;
            x[token * len..(token + 1) * len].iter().copied()
        })
    };
    (0..tokens).flat_map(of_token).collect()
}

/// Shapes pairwise different, never multiples of a tile; head_dim on both sides of every panel width.
fn shapes() -> Vec<ScaledShape> {
    vec![
        shape(2, 63, 6, 3, 64),
        shape(1, 1, 2, 1, 16),
        shape(3, 65, 4, 4, 32),
        shape(2, 129, 5, 1, 24),
        shape(1, 300, 6, 2, 96),
        shape(2, 77, 3, 3, 5),
        shape(1, 210, 8, 4, 128),
        shape(1, 140, 2, 2, 72),
        shape(1, 31, 130, 1, 16),
        shape(2, 517, 2, 1, 40),
        // Many tiles, stored lists and segments: a tile is 12 tokens of 16 heads, a list 8 tiles.
        shape(1, 201, 16, 1, 16),
    ]
}

#[test]
fn equals_the_definition_with_whole_rows_and_with_documents() {
    let far = [[1, 4], [17, 120], [40, 100_000], [300, 400]].map(Kind::Far);
    let whole = [&[1, 17, 100_000].map(Kind::Window)[..], &far[..]].concat();
    let in_documents = [Kind::Window(19), Kind::Far([5, 33])];
    for (packed, kept, first_seed, windows) in [(false, 9, 0, &whole[..]), (true, 7, 100, &in_documents[..])] {
        on_every_arch(|| {
            for (seed, shape) in (first_seed..).zip(shapes()) {
                let case = Case::new(shape, packed, kept, seed);
                let kinds = [Kind::Causal, Kind::Expire].into_iter().chain(CHOSEN.map(Kind::Chosen));
                kinds.chain(windows.iter().copied()).for_each(|kind| case.check(kind));
            }
        });
    }
    let long = Case::new(shape(1, 1690, 1, 1, 16), false, 37, 14);
    for kind in [Kind::Causal, Kind::Window(300), Kind::Far([30, 500]), Kind::Expire, Kind::Chosen([16, 5])] {
        long.check(kind);
    }
}

#[test]
fn keeping_every_key_is_dense_with_a_bias() {
    let mut case = Case::new(shape(2, 131, 4, 2, 32), true, 131, 5);
    case.check(Kind::Expire);
    case.delta.fill(0.0);
    let (dense, kept) = (case.run(Kind::Causal), case.run(Kind::Expire));
    assert_eq!(dense.o, kept.o);
    assert_eq!(dense.lse, kept.lse);
    assert_eq!(dense.d_qkv, kept.d_qkv);
}

#[test]
fn a_block_that_no_query_chose_is_never_read() {
    let mut case = Case::new(shape(1, 196, 2, 1, 16), false, 5, 3);
    let sizes = [8, 3];
    // Every query keeps the first block, its own and the one before: only queries 24 to 39 see block 3.
    let kept = (0..196).flat_map(|token| {
        let own = token / 8;
        [0, if own > 1 { own - 1 } else { -1 }, if own > 0 { own } else { -1 }]
    });
    case.chosen.insert(sizes, kept.collect());
    let before = case.run(Kind::Chosen(sizes));
    let len = case.shape.token_len();
    for token in 24..32 {
        case.qkv[token * len + 2 * 16..(token + 1) * len].fill(f32::NAN);
    }
    let after = case.run(Kind::Chosen(sizes));
    // A panel has 64 rows: 32 queries of two heads. The two panels that hold queries 24 to 39 multiply the block's
    // values by 0 for their other queries, so these become NaN too; later panels do not read the block.
    let after_two_panels = 2 * 32 * 2 * 16;
    assert!(before.o[after_two_panels..] == after.o[after_two_panels..]);
    assert!(after.o[39 * 2 * 16].is_nan());
}

#[test]
#[should_panic(expected = "block 1 comes after its query")]
fn a_block_after_its_query_is_refused() {
    let mut case = Case::new(shape(1, 9, 2, 1, 8), false, 3, 15);
    case.chosen.insert([4, 1], vec![1; 9]);
    case.run(Kind::Chosen([4, 1]));
}

#[test]
fn scores_keep_their_digits_next_to_large_biases() {
    let case = Case::new(shape(1, 90, 2, 1, 16), true, 12, 6);
    for largest in [2.2e4, 4.9e8, 1.0e26, 8192.0, -8192.0] {
        let mut case = case.clone();
        for delta in case.delta.iter_mut().step_by(7) {
            *delta = largest;
        }
        case.check(Kind::Expire);
    }
}

#[test]
fn later_tokens_leave_earlier_rows_bit_identical() {
    for kind in [Kind::Causal, Kind::Window(40), Kind::Far([20, 90]), Kind::Chosen([4, 3])] {
        let case = Case::new(shape(1, 230, 6, 3, 32), false, 8, 7);
        let before = case.run(kind);
        for t in [0, 1, 62, 63, 64, 127, 200, 229] {
            let mut changed = Case::new(case.shape, false, 8, 7);
            let mut random = Random(t as u64);
            for x in &mut changed.qkv[(t + 1) * case.shape.token_len()..] {
                *x = 30.0 * random.normal();
            }
            let after = changed.run(kind);
            let o_len = case.shape.num_heads * case.shape.head_dim;
            assert_eq!(before.o[..(t + 1) * o_len], after.o[..(t + 1) * o_len], "{kind:?}, t = {t}");
        }
    }
}

#[test]
fn later_tokens_leave_earlier_rows_of_dma_within_rounding() {
    let shape = shape(1, 260, 4, 2, 32);
    let case = Case::new(shape, false, 20, 8);
    let before = case.run(Kind::Expire);
    for t in [0, 63, 100, 258] {
        // Scores after t change too: expiries of earlier keys differ, but only past t.
        let other = Case::new(shape, false, 20, 9);
        let mut random = Random(8);
        let keys = shape.num_kv_heads * shape.seq_len;
        let mut z: Vec<f32> = (0..keys).map(|_| random.below(40) as f32 / 20.0 - 1.0).collect();
        let mut changed = Case::new(shape, false, 20, 8);
        for head in 0..shape.num_kv_heads {
            for j in t + 1..shape.seq_len {
                z[head * shape.seq_len + j] = other.delta[head * shape.seq_len + j];
            }
        }
        dma_select(&z, case.documents(), 1, shape.num_kv_heads, shape.seq_len, 20, &mut changed.expire);
        changed.delta = z.iter().map(|z| z.exp()).collect();
        let from = (t + 1) * shape.token_len();
        changed.qkv[from..].copy_from_slice(&other.qkv[from..]);
        let after = changed.run(Kind::Expire);
        let rows = (t + 1) * shape.num_heads * shape.head_dim;
        assert_close_relative(&format!("o up to {t}"), &after.o[..rows], &wide(&before.o[..rows]), 1e-6);
    }
}

#[test]
fn keys_that_no_query_sees_may_be_nan() {
    on_every_arch(|| {
        let shape = shape(2, 333, 4, 2, 48);
        let case = Case::new(shape, true, 5, 10);
        let before = case.run(Kind::Expire);
        let mut poisoned = Case::new(shape, true, 5, 10);
        let mut count = 0;
        for row in 0..shape.batch {
            for kv_head in 0..shape.num_kv_heads {
                for j in 0..shape.seq_len {
                    let at = (row * shape.num_kv_heads + kv_head) * shape.seq_len + j;
                    if case.expire[at] > j as i32 {
                        continue;
                    }
                    count += 1;
                    assert_eq!(before.d_delta[at], 0.0);
                    poisoned.delta[at] = f32::NAN;
                    for head in [shape.num_heads + kv_head, shape.num_heads + shape.num_kv_heads + kv_head] {
                        let first = (row * shape.seq_len + j) * shape.token_len() + head * shape.head_dim;
                        let values = first..first + shape.head_dim;
                        assert!(before.d_qkv[values.clone()].iter().all(|&x| x == 0.0));
                        poisoned.qkv[values].fill(f32::NAN);
                    }
                }
            }
        }
        assert!(count > 100, "the case has few keys that nobody sees: {count}");
        assert!(poisoned.run(Kind::Expire) == before);
    });
}

#[test]
fn keys_outside_a_heads_distances_are_never_read() {
    // One head, which sees distances below 8 and from 100 to 199, and three first tokens. A tile begins at token 384.
    let case = Case::new(shape(1, 500, 1, 1, 16), false, 5, 77);
    let far = FarKeys { sink_tokens: 3, distances: [100, 400], num_bands: 3, first_band: 0 };
    let run = |qkv: &[f32]| {
        let (mut o, mut lse) = (vec![0.0; 500 * 16], vec![0.0; 500]);
        attention_forward(case.shape, qkv, case.documents(), Mask::Far(8, far), &mut o, &mut lse);
        o[384 * 16..].to_vec()
    };
    let before = run(&case.qkv);
    let mut poisoned = case.qkv.clone();
    for token in 3..=184 {
        poisoned[token * 48 + 16..(token + 1) * 48].fill(f32::NAN);
    }
    assert_eq!(run(&poisoned), before);
    poisoned[185 * 48 + 16] = f32::NAN;
    assert!(run(&poisoned)[..16].iter().all(|x| x.is_nan()), "the first query of the tile reads key 185");
}

#[test]
fn a_query_that_sees_no_key_has_zero_output_and_gradients() {
    on_every_arch(|| {
        let shape = shape(1, 70, 2, 1, 16);
        let mut case = Case::new(shape, false, 70, 11);
        // Queries 20 to 29 see nothing: every key up to 29 is gone by 20.
        for (j, expire) in case.expire.iter_mut().enumerate() {
            *expire = match j {
                0..20 => 20,
                20..30 => j as i32,
                _ => 70,
            };
        }
        case.check(Kind::Expire);
        let got = case.run(Kind::Expire);
        let o_len = shape.num_heads * shape.head_dim;
        assert!(got.o[20 * o_len..30 * o_len].iter().all(|&x| x == 0.0));
        for lse in got.lse.chunks(70) {
            assert!(lse[20..30].iter().all(|&x| x == f32::NEG_INFINITY));
        }
        let d_qkv = &got.d_qkv[20 * shape.token_len()..30 * shape.token_len()];
        assert!(d_qkv.iter().all(|&x| x == 0.0));
    });
}

#[test]
fn threads_do_not_change_a_bit() {
    let case = Case::new(shape(2, 400, 4, 1, 64), true, 30, 12);
    for kind in [Kind::Causal, Kind::Window(50), Kind::Far([20, 300]), Kind::Expire, Kind::Chosen([16, 5])] {
        let run = |count: usize| threads(count).install(|| case.run(kind));
        let one = run(1);
        assert!(run(2) == one && run(5) == one, "{kind:?}");
    }
}

#[test]
fn gradients_of_the_definition_are_its_finite_differences() {
    let case = Case::new(shape(1, 9, 4, 2, 3), true, 3, 13);
    for kind in [Kind::Causal, Kind::Window(4), Kind::Far([2, 7]), Kind::Expire, Kind::Chosen([4, 3])] {
        let loss = |qkv: &[f32], delta: &[f32]| {
            let mask = match kind {
                Kind::Expire => Mask::Expire { expire: &case.expire, delta },
                _ => case.mask(kind),
            };
            inner(&case.definition(qkv, mask).o, &case.d_o)
        };
        // Inputs are f32, so the step is large, and the quotient divides by the step that f32 really took; the
        // definition itself computes in f64.
        let differences = |x: &[f32], loss: &dyn Fn(&[f32]) -> f64| -> Vec<f64> {
            let mut at = x.to_vec();
            (0..x.len())
                .map(|i| {
                    let (above, below) = (x[i] + 0.001, x[i] - 0.001);
                    at[i] = above;
                    let high = loss(&at);
                    at[i] = below;
                    let low = loss(&at);
                    at[i] = x[i];
                    (high - low) / (f64::from(above) - f64::from(below))
                })
                .collect()
        };
        let narrow = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<f32>>();
        let got = case.definition(&case.qkv, case.mask(kind));
        let expected = differences(&case.qkv, &|qkv| loss(qkv, &case.delta));
        assert_close_relative(&format!("d_qkv, {kind:?}"), &narrow(&packed(&got, case.shape)), &expected, 1e-5);
        if matches!(kind, Kind::Expire) {
            let expected = differences(&case.delta, &|delta| loss(&case.qkv, delta));
            assert_close_relative("d_delta", &narrow(&got.d_delta), &expected, 1e-5);
            assert!(got.d_delta.iter().any(|&x| x.abs() > 0.01));
        }
    }
}

#[test]
#[should_panic(expected = "qkv has the wrong size")]
fn a_short_operand_is_refused() {
    let mut case = Case::new(shape(1, 5, 2, 1, 8), false, 3, 15);
    case.qkv.pop();
    case.run(Kind::Causal);
}

#[test]
fn values_narrower_than_keys_give_what_values_padded_with_zeros_give() {
    on_every_arch(|| {
        for (n, heads, d, d_v) in [(70, 3, 24, 16), (130, 2, 192, 128), (33, 2, 96, 64)] {
            let mut random = Random(n as u64);
            let shape = ScaledShape { softmax_scale: 0.2, ..ScaledShape::new([2, n], [heads; 2], d) };
            let narrow_shape = shape.with_value_width(d_v);
            let (start, end) = random.documents(2, n);
            let documents = Documents::new(&start, &end);
            // Values of the wide tensor are zero from d_v on.
            let mut full = random.vector(2 * n * shape.token_len());
            let mut narrow = Vec::new();
            for token in full.chunks_exact_mut(3 * heads * d) {
                narrow.extend_from_slice(&token[..2 * heads * d]);
                for v in token[2 * heads * d..].chunks_exact_mut(d) {
                    v[d_v..].fill(0.0);
                    narrow.extend_from_slice(&v[..d_v]);
                }
            }
            let cut = |x: &[f32]| -> Vec<f32> { x.chunks_exact(d).flat_map(|x| x[..d_v].to_vec()).collect() };
            let mut d_o = random.vector(2 * n * heads * d);
            d_o.chunks_exact_mut(d).for_each(|x| x[d_v..].fill(0.0));
            let mask = Mask::Causal;
            let [mut o, mut lse] = [2 * n * heads * d, 2 * heads * n].map(|len| vec![0.0; len]);
            attention_forward(shape, &full, documents, mask, &mut o, &mut lse);
            let mut d_full = vec![0.0; full.len()];
            attention_backward(shape, &full, documents, mask, &o, &lse, &d_o, &mut d_full, None);
            let [mut o_v, mut lse_v] = [2 * n * heads * d_v, 2 * heads * n].map(|len| vec![f32::NAN; len]);
            attention_forward(narrow_shape, &narrow, documents, mask, &mut o_v, &mut lse_v);
            assert_close_relative("o", &o_v, &wide(&cut(&o)), 1e-6);
            assert_close_relative("lse", &lse_v, &wide(&lse), 1e-6);
            let mut d_narrow = vec![f32::NAN; narrow.len()];
            let d_o_v = cut(&d_o);
            attention_backward(narrow_shape, &narrow, documents, mask, &o_v, &lse_v, &d_o_v, &mut d_narrow, None);
            let mut expected = Vec::new();
            for token in d_full.chunks_exact(3 * heads * d) {
                expected.extend_from_slice(&token[..2 * heads * d]);
                expected.extend(cut(&token[2 * heads * d..]));
            }
            assert_close_relative("d_qkv", &d_narrow, &wide(&expected), 3e-6);
        }
    });
}
