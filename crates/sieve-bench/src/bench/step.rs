//! The kernels around attention, and products, at the sizes of two models' steps: 1.7B (rows of 2048 columns) and 80M
//! (768).
use super::Bench;
use crate::device::Device;
use crate::error::Result;
use burn::tensor::{DType, Distribution, Tensor};
use burn_cuda::CudaDevice;
use sieve_core::AdamWStep;
use sieve_kernels::{
    AdamwTensors, CudaTensor, GradientTarget, LogitRows, MatmulOutput, Product, QkNormRope, Qkv,
    Reuse, ScoreBias, ScoresBackward, adamw, cross_entropy, cross_entropy_with_gradients,
    dma_scores, dma_scores_backward, embedding_backward, embedding_forward, matmul, matmul_nn,
    matmul_nt, qk_norm_rope_backward, qk_norm_rope_forward, require_cublaslt, residual_add,
    rms_norm_backward, rms_norm_backward_with_output, rms_norm_forward, rms_norm_residual_forward,
    sum_of_squares, swiglu_backward_with_output, swiglu_forward,
};
use sieve_ops::Cuda;
use sieve_testing::Random;

const EPSILON: f32 = 1e-6;

/// Words of the vocabulary of both models.
const VOCAB: usize = 50280;

/// Seed of labels and token numbers.
const SEED: u64 = 20;

/// All of them.
pub(crate) fn rows(bench: &mut Bench<'_>) -> Result<()> {
    for (tokens, width, d_ff) in [(16384, 2048, 6144), (65536, 768, 2048)] {
        streams(bench, tokens, width);
        gated(bench, tokens, d_ff);
        embedding(bench, tokens, width);
    }
    for (tokens, heads, kv_heads, head_dim) in [(16384, 16, 8, 128), (65536, 12, 4, 64)] {
        rotated(bench, tokens, [heads, kv_heads], head_dim)?;
        scores(bench, tokens, [heads, kv_heads], head_dim)?;
    }
    for (rows, vocab) in [(4096, VOCAB), (1664, 151_936)] {
        losses(bench, rows, vocab)?;
    }
    for size in [VOCAB * 2048, 2048] {
        optimizer(bench, size);
    }
    products(bench);
    Ok(())
}

fn normal<const D: usize>(shape: [usize; D], dtype: DType, device: &CudaDevice) -> CudaTensor {
    let normal = Distribution::Normal(0.0, 1.0);
    let tensor = Tensor::<Cuda, D>::random(shape, normal, device).cast(dtype);
    CudaTensor::from(tensor.into_primitive().tensor()).contiguous()
}

/// Norms and sums of the residual stream.
fn streams(bench: &mut Bench<'_>, tokens: usize, width: usize) {
    let device = bench.device.clone();
    let of = || normal([tokens, width], DType::BF16, &device);
    let (x, residual, dy) = (of(), of(), of());
    let weight = normal([width], DType::BF16, &device);
    let dweight = normal([width], DType::F32, &device);
    let shape = format!("{tokens}x{width}");
    let moved = |times: usize| (times * tokens * width) as f64;
    let target = || GradientTarget::AddTo(&dweight);
    bench.moved("rms_norm forward", &shape, moved(4), &mut || {
        rms_norm_forward(&x, &weight, EPSILON).map(drop)
    });
    bench.moved("rms_norm + residual", &shape, moved(8), &mut || {
        rms_norm_residual_forward(&x, &residual, &weight, EPSILON).map(drop)
    });
    bench.moved("rms_norm backward", &shape, moved(6), &mut || {
        rms_norm_backward(&x, &weight, EPSILON, &dy, None, target()).map(drop)
    });
    bench.moved(
        "rms_norm backward + residual",
        &shape,
        moved(8),
        &mut || rms_norm_backward(&x, &weight, EPSILON, &dy, Some(&residual), target()).map(drop),
    );
    let name = "rms_norm backward + residual + output";
    bench.moved(name, &shape, moved(10), &mut || {
        rms_norm_backward_with_output(&x, &weight, EPSILON, &dy, &residual, target()).map(drop)
    });
    bench.moved("residual_add", &shape, moved(6), &mut || {
        residual_add(&x, &residual).map(drop)
    });
}

fn gated(bench: &mut Bench<'_>, tokens: usize, d_ff: usize) {
    let gate_up = normal([tokens, 2 * d_ff], DType::BF16, &bench.device);
    let dy = normal([tokens, d_ff], DType::BF16, &bench.device);
    let shape = format!("{tokens}x{d_ff}");
    let moved = |times: usize| (times * tokens * d_ff) as f64;
    bench.moved("swiglu forward", &shape, moved(6), &mut || {
        swiglu_forward(&gate_up).map(drop)
    });
    let name = "swiglu backward + output, in place";
    bench.moved(name, &shape, moved(12), &mut || {
        swiglu_backward_with_output(&gate_up, &dy, Reuse::InPlace).map(drop)
    });
}

fn embedding(bench: &mut Bench<'_>, tokens: usize, width: usize) {
    let mut random = Random(SEED);
    // As words of a text: the rank r with a probability of about 1 / r.
    let zipf = |random: &mut Random| ((VOCAB as f64).powf(random.unit()) - 1.0) as usize;
    let ids: Vec<i32> = (0..tokens)
        .map(|_| zipf(&mut random).min(VOCAB - 1) as i32)
        .collect();
    let mut unique = ids.clone();
    unique.sort_unstable();
    unique.dedup();
    let weight = normal([VOCAB, width], DType::BF16, &bench.device);
    let sums = normal([VOCAB, width], DType::F32, &bench.device);
    let dy = normal([1, tokens, width], DType::BF16, &bench.device);
    let shape = format!("{tokens}x{width}, {} ids", unique.len());
    let (elements, rows) = ((tokens * width) as f64, (unique.len() * width) as f64);
    let on = |ids: &[i32]| bench.device.int(ids, &[1, tokens]);
    let (any, same) = (on(&ids), on(&vec![7; tokens]));
    let bytes = 2.0 * elements + 2.0 * rows;
    bench.moved("embedding forward", &shape, bytes, &mut || {
        embedding_forward(&weight, &any).map(drop)
    });
    let bytes = 2.0 * elements + 8.0 * rows + 16.0 * tokens as f64;
    bench.moved("embedding backward", &shape, bytes, &mut || {
        embedding_backward(&dy, &any, VOCAB, GradientTarget::AddTo(&sums)).map(drop)
    });
    let shape = format!("{tokens}x{width}, one id");
    bench.moved("embedding backward", &shape, 2.0 * elements, &mut || {
        embedding_backward(&dy, &same, VOCAB, GradientTarget::AddTo(&sums)).map(drop)
    });
}

fn rotated(
    bench: &mut Bench<'_>,
    tokens: usize,
    [heads, kv_heads]: [usize; 2],
    head_dim: usize,
) -> Result<()> {
    const POSITIONS: usize = 2048;
    let device = bench.device.clone();
    let packed = [1, tokens, heads + 2 * kv_heads, head_dim];
    let (qkv, dy) = (
        normal(packed, DType::BF16, &device),
        normal(packed, DType::BF16, &device),
    );
    let [q_weight, k_weight] = [0, 1].map(|_| normal([head_dim], DType::BF16, &device));
    let [dq_weight, dk_weight] = [0, 1].map(|_| normal([head_dim], DType::F32, &device));
    let [cos, sin] = [0, 1].map(|_| normal([POSITIONS, head_dim / 2], DType::F32, &device));
    let positions: Vec<i32> = (0..tokens).map(|at| (at % POSITIONS) as i32).collect();
    let positions = device.int(&positions, &[1, tokens]);
    let args = QkNormRope {
        q_weight: &q_weight,
        k_weight: &k_weight,
        positions: &positions,
        cos: &cos,
        sin: &sin,
        num_kv_heads: kv_heads,
        epsilon: EPSILON,
    };
    let shape = format!("{tokens} h{heads}/{kv_heads} d{head_dim}");
    let all = (tokens * packed[2] * head_dim) as f64;
    let rotated = (tokens * (heads + kv_heads) * head_dim) as f64;
    bench.moved("qk_norm_rope forward", &shape, 4.0 * all, &mut || {
        qk_norm_rope_forward(&qkv, &args, Reuse::Copy).map(drop)
    });
    let backward = |reuse| {
        let targets = [&dq_weight, &dk_weight].map(GradientTarget::AddTo);
        qk_norm_rope_backward(&qkv, &args, &dy, reuse, targets).map(drop)
    };
    let bytes = 4.0 * all + 2.0 * rotated;
    bench.moved("qk_norm_rope backward", &shape, bytes, &mut || {
        backward(Reuse::Copy)
    });
    let name = "qk_norm_rope backward, in place";
    bench.moved(name, &shape, 6.0 * rotated, &mut || {
        backward(Reuse::InPlace)
    });
    Ok(())
}

fn scores(
    bench: &mut Bench<'_>,
    tokens: usize,
    [heads, kv_heads]: [usize; 2],
    head_dim: usize,
) -> Result<()> {
    let device = bench.device.clone();
    let packed = [1, tokens, heads + 2 * kv_heads, head_dim];
    let [qkv, dqkv] = [0, 1].map(|_| normal(packed, DType::BF16, &device));
    let w_dt = normal([kv_heads * head_dim, kv_heads], DType::F32, &device);
    let a = normal([kv_heads], DType::F32, &device);
    let dz = normal([1, kv_heads, tokens], DType::F32, &device);
    let (qkv, dqkv) = (
        Qkv::packed(&qkv, heads, kv_heads),
        Qkv::packed(&dqkv, heads, kv_heads),
    );
    let forward = || dma_scores(&qkv, &w_dt, &a, ScoreBias::Exp);
    let shape = format!("{tokens} kv heads {kv_heads} d{head_dim}");
    let keys = (tokens * kv_heads) as f64;
    let bytes = keys * (2 * head_dim + 12) as f64;
    bench.moved("dma_scores forward", &shape, bytes, &mut || {
        forward().map(drop)
    });
    let scored = forward()?;
    let bytes = keys * (6 * head_dim + 8) as f64;
    bench.moved("dma_scores backward", &shape, bytes, &mut || {
        let call = ScoresBackward {
            qkv: &qkv,
            w_dt: &w_dt,
            a: &a,
            x: &scored.x,
            dz: &dz,
        };
        dma_scores_backward(call, &dqkv, GradientTarget::New, GradientTarget::New).map(drop)
    });
    Ok(())
}

fn losses(bench: &mut Bench<'_>, rows: usize, vocab: usize) -> Result<()> {
    let device = bench.device.clone();
    let mut random = Random(SEED);
    let labels: Vec<i32> = (0..rows).map(|_| random.below(vocab) as i32).collect();
    let labels = device.int(&labels, &[rows]);
    let losses = normal([rows], DType::F32, &device);
    let width = vocab.next_multiple_of(8);
    let shape = format!("{rows}x{vocab}");
    let bytes = (4 * rows * vocab) as f64;
    let logits = LogitRows::of(&normal([rows, width], DType::BF16, &device), vocab)?;
    bench.moved("cross_entropy, in place", &shape, bytes, &mut || {
        cross_entropy_with_gradients(&logits, &labels, &losses, &logits, 1.0)
    });
    drop(logits);
    let logits = LogitRows::of(&normal([rows, width], DType::F32, &device), vocab)?;
    bench.moved("cross_entropy losses, f32", &shape, bytes, &mut || {
        cross_entropy(&logits, &labels, &losses)
    });
    Ok(())
}

/// Products of a step, each with the output that the step asks for.
fn products(bench: &mut Bench<'_>) {
    if let Err(error) = require_cublaslt() {
        bench.skip_named("product", "all", &error.to_string());
        return;
    }
    for [m, n, k] in [
        [16384, 4096, 2048],
        [16384, 2048, 2048],
        [16384, 12288, 2048],
        [16384, 2048, 6144],
        [4096, VOCAB, 2048],
        [65536, 768, 768],
        [2048, 512, 512],
    ] {
        let of = |rows: usize, cols: usize, dtype| normal([rows, cols], dtype, &bench.device);
        let (x, w, dy) = (
            of(m, k, DType::BF16),
            of(n, k, DType::BF16),
            of(m, n, DType::BF16),
        );
        let dweight = of(n, k, DType::F32);
        let (shape, flops) = (format!("{m}x{n}x{k}"), 2.0 * (m * n * k) as f64);
        bench.computed("product NT", &shape, flops, &mut || {
            matmul_nt(&x, &w).map(drop)
        });
        bench.computed("product NT + residual", &shape, flops, &mut || {
            matmul(Product::Nt, &x, &w, MatmulOutput::Plus(&dy)).map(drop)
        });
        bench.computed("product NN", &shape, flops, &mut || {
            matmul_nn(&dy, &w).map(drop)
        });
        bench.computed("product TN, added to f32", &shape, flops, &mut || {
            matmul(Product::Tn, &dy, &x, MatmulOutput::AddTo(&dweight)).map(drop)
        });
    }
}

fn optimizer(bench: &mut Bench<'_>, size: usize) {
    const UPDATE: AdamWStep = AdamWStep {
        lr: 1e-3,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        bias_correction1: 0.1,
        bias_correction2: 0.1,
    };
    let device = bench.device.clone();
    let of = |dtype| normal([size], dtype, &device);
    let [param, exp_avg, exp_avg_sq, grad] = [0; 4].map(|_| of(DType::F32));
    let [leaf, rest] = [0; 2].map(|_| of(DType::BF16));
    let grad_scale = device.float(&[1.0], &[1], DType::F32);
    let step = |param: &CudaTensor| {
        let tensors = AdamwTensors {
            param,
            exp_avg: &exp_avg,
            exp_avg_sq: &exp_avg_sq,
            grad: &grad,
            grad_scale: &grad_scale,
            leaf: Some(&leaf),
        };
        adamw(tensors, UPDATE)
    };
    let shape = size.to_string();
    let moved = |times: usize| (times * size) as f64;
    bench.moved("adamw, f32 master", &shape, moved(30), &mut || step(&param));
    bench.moved("adamw, split master", &shape, moved(28), &mut || {
        step(&rest)
    });
    bench.moved("sum of squares", &shape, moved(4), &mut || {
        sum_of_squares(&grad).map(drop)
    });
}
