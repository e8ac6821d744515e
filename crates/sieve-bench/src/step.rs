//! The ops around attention: each backend's own form against the plain-Burn reference in f32.
mod fp8;
mod losses;
mod plain_loss;
mod products;
mod wrappers;

pub(crate) use fp8::check_products as check_fp8_products;
pub(crate) use products::check_products;
pub(crate) use wrappers::check_wrappers;

use crate::bar::Bar;
use crate::place::{Place, float, floats};
use crate::report::{Path, PathWatch, Report};
use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData, TensorPrimitive};
use burn_flex::{Flex, FlexDevice};
use plain_loss::plain_loss;
use sieve_ops::{
    AdamWStep, AdamWTensors, AttentionSpec, DeviceBackend, EmbeddingBackend, EmbeddingGradients,
    LinearBackend, QkNormRopeCall, RmsNormCall, RopeTables, reference,
};
use sieve_testing::Random;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Names and values of an op's results.
type Results = Vec<(&'static str, Vec<f32>)>;

/// Whose form of an op runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// The backend's.
    Own,
    /// The plain-Burn reference on that backend.
    Plain,
}

/// An op to compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Linear,
    RmsNorm,
    QkNormRope,
    Swiglu,
    Embedding,
    DmaScores,
    LinearCrossEntropy,
    AdamW,
    SumOfSquares,
}

const STEPS: [(Step, &str); 9] = [
    (Step::Linear, "op linear"),
    (Step::RmsNorm, "op rms_norm"),
    (Step::QkNormRope, "op qk_norm_rope"),
    (Step::Swiglu, "op swiglu"),
    (Step::Embedding, "op embedding"),
    (Step::DmaScores, "op dma_scores"),
    (Step::LinearCrossEntropy, "op linear_cross_entropy"),
    (Step::AdamW, "op adamw"),
    (Step::SumOfSquares, "op sum_of_squares"),
];

/// Checks every op on `B`.
pub(crate) fn check<B: Place>(report: &mut Report, device: &B::Device, seed: u64, is_cuda: bool) {
    for (step, name) in STEPS {
        for (at, rows) in [3, 61, 130].into_iter().enumerate() {
            let seed = seed + at as u64;
            let watch = PathWatch::start();
            // A panic in one op costs its own row only.
            let outcome = catch_unwind(AssertUnwindSafe(|| compare::<B>(step, rows, device, seed)))
                .unwrap_or_else(|_| Err("panicked".to_owned()));
            let (path, outcome) = match (is_cuda, watch.path()) {
                (false, _) => ("cpu".to_owned(), outcome),
                (true, Path::Kernel) => ("kernel".to_owned(), outcome),
                (true, Path::None) => ("Burn's operations, no kernel".to_owned(), outcome),
                (true, Path::Reference(reason)) => (
                    format!("reference: {reason}"),
                    Err("took the reference".to_owned()),
                ),
            };
            report.add(name, &path, &format!("{rows} rows, seed {seed}"), outcome);
        }
    }
}

fn compare<B: Place>(
    step: Step,
    rows: usize,
    device: &B::Device,
    seed: u64,
) -> Result<f32, String> {
    let exact = On::<Flex>::new(&FlexDevice, DType::F32, Form::Plain, seed).run(step, rows);
    let plain = On::<B>::new(device, B::DTYPE, Form::Plain, seed).run(step, rows);
    let own = On::<B>::new(device, B::DTYPE, Form::Own, seed).run(step, rows);
    judge(&own, &plain, &exact, B::DTYPE == DType::BF16)
}

fn judge(own: &Results, plain: &Results, exact: &Results, is_bf16: bool) -> Result<f32, String> {
    let bar = Bar {
        plain: if is_bf16 { 2.0 } else { 0.0 },
        floor: 1e-6,
        share: if is_bf16 { 1e-3 } else { 2e-5 },
        norm: false,
    };
    let mut worst = 0.0f32;
    for (((name, own), (_, plain)), (_, exact)) in own.iter().zip(plain).zip(exact) {
        worst = worst.max(bar.judge(name, own, plain, exact)?);
    }
    Ok(worst)
}

/// Inputs on a backend, in its dtype; the same numbers, exact in bf16, for every backend.
struct On<'a, B: DeviceBackend> {
    device: &'a B::Device,
    dtype: DType,
    form: Form,
    random: Random,
}

impl<'a, B: DeviceBackend> On<'a, B> {
    fn new(device: &'a B::Device, dtype: DType, form: Form, seed: u64) -> Self {
        Self {
            device,
            dtype,
            form,
            random: Random(seed),
        }
    }

    fn own(&self) -> bool {
        self.form == Form::Own
    }

    fn input<const D: usize>(&mut self, shape: [usize; D]) -> FloatTensor<B> {
        let dtype = self.dtype;
        self.input_in(shape, dtype)
    }

    fn input_in<const D: usize>(&mut self, shape: [usize; D], dtype: DType) -> FloatTensor<B> {
        let values = self.random.bf16_normals(shape.iter().product());
        let x = float::<B, D>(&values, shape, self.device);
        let x = Tensor::<B, D>::from_primitive(TensorPrimitive::Float(x));
        x.cast(dtype).into_primitive().tensor()
    }

    fn indices<const D: usize>(&mut self, shape: [usize; D], limit: usize) -> Tensor<B, D, Int> {
        let count = shape.iter().product();
        let values: Vec<i32> = (0..count)
            .map(|_| self.random.below(limit) as i32)
            .collect();
        Tensor::from_data(TensorData::new(values, shape), self.device)
    }

    fn run(mut self, step: Step, rows: usize) -> Results {
        match step {
            Step::Linear => self.linear(rows),
            Step::RmsNorm => self.rms_norm(rows),
            Step::QkNormRope => self.qk_norm_rope(rows),
            Step::Swiglu => self.swiglu(rows),
            Step::Embedding => self.embedding(rows),
            Step::DmaScores => self.dma_scores(rows),
            Step::LinearCrossEntropy => self.linear_cross_entropy(rows),
            Step::AdamW => self.adamw(rows),
            Step::SumOfSquares => {
                let x = self.input_in([rows, 96], DType::F32);
                let sum = if self.own() {
                    B::sum_of_squares(x)
                } else {
                    reference::sum_of_squares::<B>(x)
                };
                vec![("sum", floats::<B, 1>(sum))]
            }
        }
    }

    fn linear(&mut self, rows: usize) -> Results {
        let (x, weight) = (self.input([rows, 96]), self.input([40, 96]));
        let dy = self.input([rows, 40]);
        let (y, (dx, dweight)) = if self.own() {
            (
                <B as LinearBackend>::linear(x.clone(), weight.clone()),
                (
                    B::linear_input_gradient(weight, dy.clone()),
                    B::linear_weight_gradient(x, dy),
                ),
            )
        } else {
            (
                reference::linear::<B>(x.clone(), weight.clone()),
                (
                    reference::linear_input_gradient::<B>(weight, dy.clone()),
                    reference::linear_weight_gradient::<B>(x, dy),
                ),
            )
        };
        vec![
            ("y", floats::<B, 2>(y)),
            ("dx", floats::<B, 2>(dx)),
            ("dweight", floats::<B, 2>(dweight)),
        ]
    }

    fn rms_norm(&mut self, rows: usize) -> Results {
        const EPSILON: f64 = 1e-6;
        let norm = RmsNormCall::<B> {
            x: self.input([rows, 160]),
            weight: self.input([160]),
            epsilon: EPSILON,
        };
        let [dy, beside] = [0, 1].map(|_| self.input([rows, 160]));
        let (y, (dx, dweight), with_output) = if self.own() {
            (
                B::rms_norm(norm.clone()),
                B::rms_norm_backward(norm.clone(), dy.clone(), None),
                B::rms_norm_backward_with_output(norm, dy, beside),
            )
        } else {
            let y = reference::rms_norm::<B>(norm.clone());
            let (dx, dweight) = reference::rms_norm_backward::<B>(norm, dy);
            let sum = B::float_add(dx.clone(), beside);
            let with_output = (sum, dweight.clone(), y.clone());
            (y, (dx, dweight), with_output)
        };
        let (sum, dweight_again, y_again) = with_output;
        vec![
            ("y", floats::<B, 2>(y)),
            ("dx", floats::<B, 2>(dx)),
            ("dweight", floats::<B, 1>(dweight)),
            ("dx + residual", floats::<B, 2>(sum)),
            ("dweight again", floats::<B, 1>(dweight_again)),
            ("y again", floats::<B, 2>(y_again)),
        ]
    }

    fn qk_norm_rope(&mut self, rows: usize) -> Results {
        const EPSILON: f64 = 1e-6;
        let (batch, heads, kv_heads, width) = (2, 4, 2, 64);
        let shape = [batch, rows, heads + 2 * kv_heads, width];
        let qkv = self.input(shape);
        let (q_weight, k_weight) = (self.input([width]), self.input([width]));
        let dy = self.input(shape);
        let positions = self.indices([batch, rows], rows).into_primitive();
        let angles: Vec<f32> = (0..rows * width / 2)
            .map(|at| (at / (width / 2)) as f32 / (1 + at % (width / 2)) as f32)
            .collect();
        let table = |of: fn(f32) -> f32| {
            let values: Vec<f32> = angles.iter().map(|&angle| of(angle)).collect();
            float::<B, 2>(&values, [rows, width / 2], self.device)
        };
        let call = QkNormRopeCall::<B> {
            q_weight,
            k_weight,
            positions,
            rope: RopeTables {
                cos: table(f32::cos),
                sin: table(f32::sin),
            },
            num_kv_heads: kv_heads,
            epsilon: EPSILON,
        };
        let (y, (dx, dq, dk)) = if self.own() {
            (
                B::qk_norm_rope(qkv.clone(), call.clone()),
                B::qk_norm_rope_backward(qkv, call, dy),
            )
        } else {
            (
                reference::qk_norm_rope::<B>(qkv.clone(), call.clone()),
                reference::qk_norm_rope_backward::<B>(qkv, call, dy),
            )
        };
        vec![
            ("y", floats::<B, 4>(y)),
            ("dx", floats::<B, 4>(dx)),
            ("dq_weight", floats::<B, 1>(dq)),
            ("dk_weight", floats::<B, 1>(dk)),
        ]
    }

    fn swiglu(&mut self, rows: usize) -> Results {
        let (gate_up, dy) = (self.input([rows, 2 * 96]), self.input([rows, 96]));
        let (y, dx, (dx_again, y_again)) = if self.own() {
            (
                B::swiglu(gate_up.clone()),
                B::swiglu_backward(gate_up.clone(), dy.clone()),
                // Nobody else holds them now: they are written in place.
                B::swiglu_backward_with_output(gate_up, dy),
            )
        } else {
            let y = reference::swiglu::<B>(gate_up.clone());
            let dx = reference::swiglu_backward::<B>(gate_up, dy);
            (y.clone(), dx.clone(), (dx, y))
        };
        vec![
            ("y", floats::<B, 2>(y)),
            ("dx", floats::<B, 2>(dx)),
            ("dx again", floats::<B, 2>(dx_again)),
            ("y again", floats::<B, 2>(y_again)),
        ]
    }

    fn embedding(&mut self, rows: usize) -> Results {
        const WORDS: usize = 50;
        let (weight, dy) = (self.input([WORDS, 64]), self.input([2, rows, 64]));
        let ids = self.indices([2, rows], WORDS).into_primitive();
        let (y, dweight) = if self.own() {
            (
                <B as EmbeddingBackend>::embedding(weight, ids.clone()),
                <B as EmbeddingGradients>::embedding_backward(dy, ids, WORDS),
            )
        } else {
            (
                reference::embedding::<B>(weight, ids.clone()),
                reference::embedding_backward::<B>(dy, ids, WORDS),
            )
        };
        vec![
            ("y", floats::<B, 3>(y)),
            ("dweight", floats::<B, 2>(dweight)),
        ]
    }

    fn dma_scores(&mut self, rows: usize) -> Results {
        let (heads, kv_heads, width) = (4, 2, 64);
        let spec = AttentionSpec {
            num_heads: heads,
            num_kv_heads: kv_heads,
            softmax_scale: 0.125,
            window_size: None,
        };
        let shape = [2, rows, heads + 2 * kv_heads, width];
        let qkv = self.input(shape);
        let w_dt = self.input([kv_heads * width, kv_heads]);
        let a = self.input([kv_heads]);
        let dz = self.input_in([2, kv_heads, rows], DType::F32);
        let dqkv = self.input(shape);
        let (z, (dqkv, dw, da)) = if self.own() {
            (
                B::dma_scores(qkv.clone(), w_dt.clone(), a.clone(), spec),
                B::dma_scores_backward(qkv, w_dt, a, spec, dz, dqkv),
            )
        } else {
            (
                reference::dma_scores::<B>(qkv.clone(), w_dt.clone(), a.clone(), spec),
                reference::dma_scores_backward::<B>(qkv, w_dt, a, spec, dz, dqkv),
            )
        };
        vec![
            ("z", floats::<B, 3>(z)),
            ("dqkv", floats::<B, 4>(dqkv)),
            ("dw_dt", floats::<B, 2>(dw)),
            ("da", floats::<B, 1>(da)),
        ]
    }

    fn linear_cross_entropy(&mut self, rows: usize) -> Results {
        const WORDS: usize = 96;
        let (h, weight) = (self.input([rows, 64]), self.input([WORDS, 64]));
        let labels = self.indices([rows], WORDS).into_primitive();
        let [losses, loss, dh, dweight] = if self.form == Form::Plain && self.dtype == DType::BF16 {
            plain_loss::<B>(h, weight, labels)
        } else {
            let (losses, (loss, dh, dweight)) = if self.own() {
                (
                    B::token_losses(h.clone(), weight.clone(), labels.clone()),
                    B::linear_cross_entropy_with_gradients(h, weight, labels),
                )
            } else {
                (
                    reference::token_losses::<B>(h.clone(), weight.clone(), labels.clone()),
                    reference::linear_cross_entropy_with_gradients::<B>(h, weight, labels),
                )
            };
            [losses, loss, dh, dweight]
        };
        vec![
            ("losses", floats::<B, 1>(losses)),
            ("loss", floats::<B, 1>(loss)),
            ("dh", floats::<B, 2>(dh)),
            ("dweight", floats::<B, 2>(dweight)),
        ]
    }

    fn adamw(&mut self, rows: usize) -> Results {
        let shape = [rows, 96];
        let param = self.input_in(shape, DType::F32);
        let exp_avg = self.input_in(shape, DType::F32);
        // Squares are positive.
        let root = Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(
            self.input_in(shape, DType::F32),
        ));
        let tensors = AdamWTensors::<B> {
            param,
            leaf: None,
            exp_avg,
            exp_avg_sq: (root.clone() * root).into_primitive().tensor(),
        };
        let grad = self.input_in(shape, DType::F32);
        let scale = float::<B, 1>(&[0.5], [1], self.device);
        let step = AdamWStep {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            bias_correction1: 0.1,
            bias_correction2: 0.05,
        };
        let before = tensors.param.clone();
        let (next, split) = if self.own() {
            let (leaf, rest) = B::split_master(before.clone());
            let again = B::join_master(leaf.clone(), rest.clone());
            let halves = AdamWTensors::<B> {
                param: rest,
                leaf: Some(leaf),
                ..tensors.clone()
            };
            let halves = B::adamw(halves, grad.clone(), scale.clone(), step);
            let leaf = halves.leaf.expect("it was given one");
            let whole = B::join_master(leaf.clone(), halves.param);
            let next = B::adamw(tensors, grad, scale, step);
            (next, [again, whole, leaf])
        } else {
            let next = reference::adamw::<B>(tensors, grad, scale, step);
            let leaf = B::float_cast(next.param.clone(), FloatDType::BF16);
            let split = [before, next.param.clone(), leaf];
            (next, split)
        };
        let [again, whole, leaf] = split.map(|part| floats::<B, 2>(part));
        vec![
            ("split and joined", again),
            ("split param", whole),
            ("leaf", leaf),
            ("param", floats::<B, 2>(next.param)),
            ("exp_avg", floats::<B, 2>(next.exp_avg)),
            ("exp_avg_sq", floats::<B, 2>(next.exp_avg_sq)),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_passes() {
        let mut report = Report::default();
        check::<Flex>(&mut report, &FlexDevice, 7, false);
        assert_eq!(report.failed(), 0, "{:?}", report.rows());
        assert_eq!(report.rows().len(), STEPS.len());
    }
}
