//! The ops around attention, one file for each family: each op against the plain-Burn reference in f32 (`ops`), its
//! launches called directly (`check_launches`), and their times (`bench`).
mod activation;
mod embedding;
mod fp8;
mod losses;
mod matrix_vector;
mod optimizer;
mod plain_loss;
mod products;
mod queue;
mod rotation;
mod scores;
mod stream;
mod wrappers;

pub(crate) use fp8::check_products as check_fp8_products;
pub(crate) use products::check_products;
pub(crate) use queue::check_order;

use crate::bar::{Bar, Results, judge_all};
use crate::bench::Bench;
use crate::device::Device;
use crate::error::Result as BenchResult;
use crate::extent::Extent;
use crate::place::{Place, float};
use crate::report::{Outcome, Path, PathWatch, Report, wrong};
use burn::tensor::DType;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Int, Tensor, TensorData, TensorPrimitive};
use burn_flex::{Flex, FlexDevice};
use sieve_kernels::{NeededKernels, SourceKernel};
use sieve_ops::DeviceBackend;
use sieve_testing::Random;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Words of the vocabulary of both timed models.
const VOCAB: usize = 50280;

/// Seed of the labels and token numbers of a timed call.
const SEED: u64 = 20;

/// Runs an op and its gradients on a number of rows.
type OpFn<B> = fn(&mut On<'_, B>, usize) -> Results;

/// The name of an op's row in the report, and the op.
type Op<B> = (&'static str, OpFn<B>);

fn ops<B: Place>() -> [Op<B>; 9] {
    [
        ("op linear", products::linear_op),
        ("op rms_norm", stream::rms_norm_op),
        ("op qk_norm_rope", rotation::qk_norm_rope_op),
        ("op swiglu", activation::swiglu_op),
        ("op embedding", embedding::embedding_op),
        ("op dma_scores", scores::dma_scores_op),
        ("op linear_cross_entropy", losses::linear_cross_entropy_op),
        ("op adamw", optimizer::adamw_op),
        ("op sum_of_squares", optimizer::sum_of_squares_op),
    ]
}

/// Checks every op on `B`. The CPU has kernels in f32 alone: in f64 its op is the reference, and in bf16 the reference
/// with a plain computation's rounding.
pub(crate) fn check_ops<B: Place>(report: &mut Report, device: &B::Device, extent: &Extent) -> BenchResult<()> {
    for ((name, op), (_, on_host)) in ops::<B>().into_iter().zip(ops::<Flex>()) {
        for (seed, rows) in (extent.seed..).zip([3, 61, 130]) {
            let watch = PathWatch::start(B::IS_CUDA);
            // A panic in one op costs its own row only.
            let outcome = catch_unwind(AssertUnwindSafe(|| compare::<B>(op, on_host, rows, device, seed)))
                .unwrap_or_else(|_| wrong("panicked"));
            let (path, outcome) = match watch.path() {
                Path::Kernel => (B::KERNEL.to_owned(), outcome),
                Path::None => ("Burn's operations, no kernel".to_owned(), outcome),
                Path::Reference(reason) => (format!("reference: {reason}"), wrong("took the reference")),
            };
            report.add(name, &path, &format!("{rows} rows, seed {seed}"), outcome);
        }
    }
    Ok(())
}

fn compare<B: Place>(op: OpFn<B>, on_host: OpFn<Flex>, rows: usize, device: &B::Device, seed: u64) -> Outcome {
    let [exact, plain] = [DType::F64, DType::BF16].map(|dtype| on_host(&mut On::new(&FlexDevice, dtype, seed), rows));
    let own = op(&mut On::new(device, B::DTYPE, seed), rows);
    let bar = Bar::of(B::IS_CUDA, 1e-6, [1e-3, 2e-5]);
    judge_all([&own, &plain, &exact], |_| bar)
}

/// Inputs on a backend, in its dtype; the same numbers, exact in bf16, for every backend.
struct On<'a, B: DeviceBackend> {
    device: &'a B::Device,
    dtype: DType,
    random: Random,
}

impl<'a, B: DeviceBackend> On<'a, B> {
    fn new(device: &'a B::Device, dtype: DType, seed: u64) -> Self {
        Self {
            device,
            dtype,
            random: Random(seed),
        }
    }

    fn input<const D: usize>(&mut self, shape: [usize; D]) -> FloatTensor<B> {
        let dtype = self.dtype;
        self.input_in(shape, dtype)
    }

    /// What stays in f32 where the other operands are bf16.
    fn wide_input<const D: usize>(&mut self, shape: [usize; D]) -> FloatTensor<B> {
        let dtype = match self.dtype {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
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
        let values: Vec<i32> = (0..count).map(|_| self.random.below(limit) as i32).collect();
        Tensor::from_data(TensorData::new(values, shape), self.device)
    }
}

/// What the checks launch beside the forms that ship.
pub(crate) fn rare_kernels() -> Vec<SourceKernel> {
    NeededKernels::step_rarely(&[16, 96], scores::KV_HEADS)
}

/// Checks every launch; the emulator gets the small sizes.
pub(crate) fn check_wrappers(report: &mut Report, device: &dyn Device, extent: &Extent) -> BenchResult<()> {
    for check in [
        stream::check_launches,
        activation::check_launches,
        matrix_vector::check_launches,
        matrix_vector::check_likeliest,
        rotation::check_launches,
        embedding::check_launches,
        optimizer::check_launches,
        scores::check_launches,
        fp8::check_rounding,
        losses::check_launches,
    ] {
        check(report, device, extent);
    }
    Ok(())
}

/// Times them all at the sizes of two models' steps: 1.7B (rows of 2048 columns) and 80M (768).
pub(crate) fn bench(bench: &mut Bench<'_>) -> BenchResult<()> {
    for (tokens, width, d_ff) in [(16384, 2048, 6144), (65536, 768, 2048)] {
        stream::bench(bench, tokens, width);
        activation::bench(bench, tokens, d_ff);
        embedding::bench(bench, tokens, width);
        matrix_vector::bench(bench, width, d_ff, VOCAB);
    }
    for (tokens, heads, kv_heads, head_dim) in [(16384, 16, 8, 128), (65536, 12, 4, 64)] {
        rotation::bench(bench, tokens, [heads, kv_heads], head_dim);
        scores::bench(bench, tokens, [heads, kv_heads], head_dim)?;
    }
    for (rows, vocab) in [(4096, VOCAB), (1664, 151_936)] {
        losses::bench(bench, rows, vocab)?;
    }
    for size in [VOCAB * 2048, 2048] {
        optimizer::bench(bench, size);
    }
    products::bench(bench);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emulator::tests::{AMPERE, emulated};

    #[test]
    fn emulated_launches_pass() {
        let extent = Extent::emulated(1, 64, 3);
        emulated("step", AMPERE, 4, |device, report| {
            activation::check_launches(report, device, &extent);
            matrix_vector::check_launches(report, device, &extent);
            matrix_vector::check_likeliest(report, device, &extent);
            fp8::check_rounding(report, device, &extent);
            Ok(())
        });
    }
}
