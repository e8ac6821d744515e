//! The fast path against the definition in f64, and what must not change when inputs do.

use super::{AttentionShape, Documents, Mask, attention_backward, attention_forward};
use crate::expire::dma_select;
use crate::reference::{AttentionCall, Results as Definition, Rounding};
use crate::simd::tests::on_every_arch;
use sieve_testing::{Random, assert_close_relative, assert_lse_close, inner, threads, whole_rows};

#[derive(Clone)]
struct Case {
    shape: AttentionShape,
    qkv: Vec<f32>,
    start: Vec<i32>,
    end: Vec<i32>,
    expire: Vec<i32>,
    delta: Vec<f32>,
    d_o: Vec<f32>,
}

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
    Expire,
}

fn shape(batch: usize, seq_len: usize, num_heads: usize, num_kv_heads: usize, head_dim: usize) -> AttentionShape {
    let softmax_scale = 1.0 / (head_dim as f32).sqrt();
    AttentionShape {
        batch,
        seq_len,
        num_heads,
        num_kv_heads,
        head_dim,
        softmax_scale,
    }
}

impl Case {
    fn new(shape: AttentionShape, packed: bool, keep_window_size: usize, seed: u64) -> Self {
        let mut random = Random(seed);
        let (start, end) = if packed {
            random.documents(shape.batch, shape.seq_len)
        } else {
            whole_rows(shape.batch, shape.seq_len)
        };
        let keys = shape.batch * shape.num_kv_heads * shape.seq_len;
        // Few distinct scores, so that ties are common.
        let z: Vec<f32> = (0..keys).map(|_| random.below(40) as f32 / 20.0 - 1.0).collect();
        let mut expire = vec![0; keys];
        let documents = Documents::new(&start, &end);
        dma_select(
            &z,
            documents,
            shape.batch,
            shape.num_kv_heads,
            shape.seq_len,
            keep_window_size,
            &mut expire,
        );
        Self {
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
            Kind::Expire => Mask::Expire {
                expire: &self.expire,
                delta: &self.delta,
            },
        }
    }

    fn run(&self, kind: Kind) -> Results {
        let AttentionShape {
            batch,
            seq_len,
            num_heads,
            num_kv_heads,
            ..
        } = self.shape;
        let mut o = vec![f32::NAN; self.d_o.len()];
        let mut lse = vec![f32::NAN; batch * num_heads * seq_len];
        let mut d_qkv = vec![f32::NAN; self.qkv.len()];
        let mut d_delta = vec![f32::NAN; batch * num_kv_heads * seq_len];
        let (documents, mask) = (self.documents(), self.mask(kind));
        attention_forward(self.shape, &self.qkv, documents, mask, &mut o, &mut lse);
        attention_backward(
            self.shape,
            &self.qkv,
            documents,
            mask,
            &o,
            &lse,
            &self.d_o,
            &mut d_qkv,
            Some(&mut d_delta),
        );
        Results { o, lse, d_qkv, d_delta }
    }

    fn definition(&self, qkv: &[f32], mask: Mask<'_>) -> Definition {
        AttentionCall::packed(self.shape, qkv, self.documents(), mask, &self.d_o).run(Rounding::None)
    }

    fn check(&self, kind: Kind) {
        let got = self.run(kind);
        let expected = self.definition(&self.qkv, self.mask(kind));
        let d_qkv = packed(&expected, self.shape);
        let name = |what: &str| format!("{what} of {kind:?} at {:?}", self.shape);
        assert_close_relative(&name("o"), &got.o, &expected.o, 2e-6);
        assert_lse_close(&name("lse"), &got.lse, &expected.lse, 2e-6);
        assert_close_relative(&name("d_qkv"), &got.d_qkv, &d_qkv, 8e-6);
        // Sums over many rows that cancel: 9.9e-6 measured with scalar code, 6e-6 with vectors.
        match kind {
            Kind::Expire => assert_close_relative(&name("d_delta"), &got.d_delta, &expected.d_delta, 2e-5),
            Kind::Causal | Kind::Window(_) => assert!(got.d_delta.iter().all(|&x| x == 0.0)),
        }
    }
}

/// dq, dk and dv as the gradient of the packed tensor.
fn packed(results: &Definition, shape: AttentionShape) -> Vec<f64> {
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
fn shapes() -> Vec<AttentionShape> {
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
fn equals_the_definition_with_whole_rows() {
    on_every_arch(|| {
        for (seed, shape) in shapes().into_iter().enumerate() {
            let case = Case::new(shape, false, 9, seed as u64);
            for kind in [
                Kind::Causal,
                Kind::Window(1),
                Kind::Window(17),
                Kind::Window(100_000),
                Kind::Expire,
            ] {
                case.check(kind);
            }
        }
    });
}

#[test]
fn equals_the_definition_with_documents() {
    on_every_arch(|| {
        for (seed, shape) in shapes().into_iter().enumerate() {
            let case = Case::new(shape, true, 7, 100 + seed as u64);
            for kind in [Kind::Causal, Kind::Window(19), Kind::Expire] {
                case.check(kind);
            }
        }
    });
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
fn beside_large_biases_scores_keep_their_digits() {
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
    for kind in [Kind::Causal, Kind::Window(40)] {
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
            assert_eq!(
                before.o[..(t + 1) * o_len],
                after.o[..(t + 1) * o_len],
                "{kind:?}, t = {t}"
            );
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
        dma_select(
            &z,
            case.documents(),
            1,
            shape.num_kv_heads,
            shape.seq_len,
            20,
            &mut changed.expire,
        );
        changed.delta = z.iter().map(|z| z.exp()).collect();
        let from = (t + 1) * shape.token_len();
        changed.qkv[from..].copy_from_slice(&other.qkv[from..]);
        let after = changed.run(Kind::Expire);
        let rows = (t + 1) * shape.num_heads * shape.head_dim;
        let expected: Vec<f64> = before.o[..rows].iter().map(|&x| f64::from(x)).collect();
        assert_close_relative(&format!("o up to {t}"), &after.o[..rows], &expected, 1e-6);
    }
}

#[test]
fn keys_that_nobody_sees_may_be_nan() {
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
                    poisoned.delta[at] = f32::NAN;
                    for head in [
                        shape.num_heads + kv_head,
                        shape.num_heads + shape.num_kv_heads + kv_head,
                    ] {
                        let first = (row * shape.seq_len + j) * shape.token_len() + head * shape.head_dim;
                        poisoned.qkv[first..first + shape.head_dim].fill(f32::NAN);
                    }
                }
            }
        }
        assert!(count > 100, "the case has few keys that nobody sees: {count}");
        let after = poisoned.run(Kind::Expire);
        assert_eq!(before.o, after.o);
        assert_eq!(before.lse, after.lse);
        assert_eq!(before.d_qkv, after.d_qkv);
        assert_eq!(before.d_delta, after.d_delta);
    });
}

#[test]
fn a_row_that_sees_nothing_is_empty() {
    on_every_arch(|| {
        let shape = shape(1, 70, 2, 1, 16);
        let mut case = Case::new(shape, false, 70, 11);
        // Queries 20 to 29 see nothing: every key up to 29 is gone by 20.
        for (j, expire) in case.expire.iter_mut().enumerate() {
            *expire = if j < 20 {
                20
            } else if j < 30 {
                j as i32
            } else {
                70
            };
        }
        case.check(Kind::Expire);
        let got = case.run(Kind::Expire);
        let o_len = shape.num_heads * shape.head_dim;
        assert!(got.o[20 * o_len..30 * o_len].iter().all(|&x| x == 0.0));
        for head in 0..shape.num_heads {
            assert!(
                got.lse[head * 70 + 20..head * 70 + 30]
                    .iter()
                    .all(|&x| x == f32::NEG_INFINITY)
            );
        }
        for token in 20..30 {
            assert!(
                got.d_qkv[token * shape.token_len()..(token + 1) * shape.token_len()]
                    .iter()
                    .all(|&x| x == 0.0)
            );
        }
    });
}

#[test]
fn threads_do_not_change_a_bit() {
    let case = Case::new(shape(2, 400, 4, 1, 64), true, 30, 12);
    for kind in [Kind::Causal, Kind::Window(50), Kind::Expire] {
        let run = |count: usize| threads(count).install(|| case.run(kind));
        let one = run(1);
        for count in [2, 5] {
            let many = run(count);
            assert_eq!(one.o, many.o);
            assert_eq!(one.lse, many.lse);
            assert_eq!(one.d_qkv, many.d_qkv);
            assert_eq!(one.d_delta, many.d_delta);
        }
    }
}

#[test]
fn the_definition_s_gradients_are_its_differences() {
    let case = Case::new(shape(1, 9, 4, 2, 3), true, 3, 13);
    for kind in [Kind::Causal, Kind::Window(4), Kind::Expire] {
        let loss = |qkv: &[f32], delta: &[f32]| {
            let mask = match kind {
                Kind::Expire => Mask::Expire {
                    expire: &case.expire,
                    delta,
                },
                Kind::Causal | Kind::Window(_) => case.mask(kind),
            };
            inner(&case.definition(qkv, mask).o, &case.d_o)
        };
        // The inputs are f32, so the steps must be large enough to be exact in f32; the reference itself is f64.
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
        assert_close_relative(
            &format!("d_qkv, {kind:?}"),
            &narrow(&packed(&got, case.shape)),
            &expected,
            1e-5,
        );
        if matches!(kind, Kind::Expire) {
            let expected = differences(&case.delta, &|delta| loss(&case.qkv, delta));
            assert_close_relative("d_delta", &narrow(&got.d_delta), &expected, 1e-5);
            assert!(got.d_delta.iter().any(|&x| x.abs() > 0.01));
        }
    }
}

#[test]
fn long_rows_equal_the_definition() {
    let case = Case::new(shape(1, 1690, 1, 1, 16), false, 37, 14);
    for kind in [Kind::Causal, Kind::Window(300), Kind::Expire] {
        case.check(kind);
    }
}

#[test]
#[should_panic(expected = "qkv has another size")]
fn a_short_operand_is_refused() {
    let mut case = Case::new(shape(1, 5, 2, 1, 8), false, 3, 15);
    case.qkv.pop();
    case.run(Kind::Causal);
}
