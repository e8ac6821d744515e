//! One training step of a small DMA model on the CPU, split by op: where the time goes that is not matrix products.
//!
//! `cargo run --release --example step_profile -- [REPEATS]`, from the workspace's root. Sizes are those of
//! `recipes/quickstart.toml`; every op runs alone on fresh outputs, as in training, and the median counts.

#![allow(clippy::print_stdout, reason = "this is a program")]

use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Int, Tensor, TensorData, TensorPrimitive};
use burn_flex::Flex;
use sieve_ops::{
    AdamWStep, AdamWTensors, AttentionSpec, DmaBackend, DmaBias, DmaGradients, DmaSelection,
    DocumentBounds, Documents, EmbeddingBackend, EmbeddingGradients, LinearBackend,
    LinearGradients, LossGradients, NormBackend, NormGradients, OptimizerBackend, QkNormRopeCall,
    RmsNormCall, RopeBackend, RopeGradients, RopeTables, RotaryEmbedding, SwigluBackend,
    SwigluGradients, dma_bias,
};
use sieve_testing::Random;
use std::time::Instant;

type Float = FloatTensor<Flex>;

const BATCH: usize = 16;
const SEQ_LEN: usize = 256;
const TOKENS: usize = BATCH * SEQ_LEN;
const D_MODEL: usize = 192;
const D_FF: usize = 512;
const NUM_LAYERS: usize = 4;
const NUM_HEADS: usize = 4;
const NUM_KV_HEADS: usize = 2;
const HEAD_DIM: usize = 64;
const PACKED_HEADS: usize = NUM_HEADS + 2 * NUM_KV_HEADS;
const VOCAB_SIZE: usize = 4096;
const KEEP_WINDOW_SIZE: usize = 64;
const DOCUMENT_LEN: usize = 200;
const EPSILON: f64 = 1e-6;

fn main() {
    let repeats = match std::env::args().nth(1).map(|n| n.parse()) {
        None => 10,
        Some(Ok(n)) if n > 0 => n,
        Some(_) => {
            println!("REPEATS must be a number above 0");
            std::process::exit(2);
        }
    };
    let mut table = Table {
        repeats,
        rows: Vec::new(),
    };
    products(&mut table);
    pointwise(&mut table);
    attention(&mut table);
    head(&mut table);
    optimizer(&mut table);
    table.print();
}

/// A line of the result: an op, how often a step runs it, and one call's time.
struct Row {
    op: &'static str,
    calls: usize,
    milliseconds: f64,
    /// Floating-point operations of a call; 0 where they are not the cost.
    flops: f64,
}

struct Table {
    repeats: usize,
    rows: Vec<Row>,
}

impl Table {
    /// Times `call`; the median of `repeats` after one warm-up.
    fn time<T>(&mut self, op: &'static str, calls: usize, flops: f64, mut call: impl FnMut() -> T) {
        drop(call());
        let mut times: Vec<f64> = (0..self.repeats)
            .map(|_| {
                let start = Instant::now();
                drop(call());
                start.elapsed().as_secs_f64() * 1e3
            })
            .collect();
        times.sort_by(f64::total_cmp);
        self.rows.push(Row {
            op,
            calls,
            milliseconds: times[times.len() / 2],
            flops,
        });
    }

    fn print(&self) {
        let step: f64 = self
            .rows
            .iter()
            .map(|row| row.milliseconds * row.calls as f64)
            .sum();
        println!("op                                calls   ms/call   ms/step   share   GFLOP/s");
        for row in &self.rows {
            let total = row.milliseconds * row.calls as f64;
            let rate = match row.flops {
                0.0 => "-".to_owned(),
                flops => format!("{:.0}", flops / row.milliseconds / 1e6),
            };
            println!(
                "{:<33} {:>5} {:>9.3} {:>9.2} {:>6.1}% {:>9}",
                row.op,
                row.calls,
                row.milliseconds,
                total,
                100.0 * total / step,
                rate
            );
        }
        let flops: f64 = self
            .rows
            .iter()
            .map(|row| row.flops * row.calls as f64)
            .sum();
        println!(
            "step: {step:.0} ms, {:.0} tokens/s, {:.0} GFLOP/s counted",
            TOKENS as f64 / step * 1e3,
            flops / step / 1e6
        );
    }
}

/// Normal values.
fn random<const D: usize>(dims: [usize; D], scale: f32) -> Tensor<Flex, D> {
    let len = dims.iter().product::<usize>();
    let mut random = Random(len as u64);
    let values: Vec<f32> = (0..len).map(|_| scale * random.normal()).collect();
    Tensor::from_data(TensorData::new(values, dims), &Default::default())
}

fn float<const D: usize>(dims: [usize; D], scale: f32) -> Float {
    random(dims, scale).into_primitive().tensor()
}

fn ints<const D: usize>(dims: [usize; D], value: impl Fn(usize) -> i32) -> IntTensor<Flex> {
    let values: Vec<i32> = (0..dims.iter().product()).map(value).collect();
    Tensor::<Flex, D, Int>::from_data(TensorData::new(values, dims), &Default::default())
        .into_primitive()
}

fn products(table: &mut Table) {
    let layers = NUM_LAYERS;
    for (op, backward, d_in, d_out) in [
        (
            "linear qkv",
            "linear qkv backward",
            D_MODEL,
            PACKED_HEADS * HEAD_DIM,
        ),
        (
            "linear o",
            "linear o backward",
            NUM_HEADS * HEAD_DIM,
            D_MODEL,
        ),
        (
            "linear gate_up",
            "linear gate_up backward",
            D_MODEL,
            2 * D_FF,
        ),
        ("linear down", "linear down backward", D_FF, D_MODEL),
    ] {
        let x = float([BATCH, SEQ_LEN, d_in], 1.0);
        let weight = float([d_out, d_in], 0.02);
        let dy = float([BATCH, SEQ_LEN, d_out], 1.0);
        let flops = 2.0 * (TOKENS * d_in * d_out) as f64;
        table.time(op, layers, flops, || {
            <Flex as LinearBackend>::linear(x.clone(), weight.clone())
        });
        table.time(backward, layers, 2.0 * flops, || {
            (
                Flex::linear_input_gradient(weight.clone(), dy.clone()),
                Flex::linear_weight_gradient(x.clone(), dy.clone()),
            )
        });
    }
}

fn pointwise(table: &mut Table) {
    let layers = NUM_LAYERS;
    let ids = ints([BATCH, SEQ_LEN], |n| (n * 7919 % VOCAB_SIZE) as i32);
    let embedding = float([VOCAB_SIZE, D_MODEL], 0.02);
    let stream = float([BATCH, SEQ_LEN, D_MODEL], 1.0);
    table.time("embedding", 1, 0.0, || {
        <Flex as EmbeddingBackend>::embedding(embedding.clone(), ids.clone())
    });
    table.time("embedding backward", 1, 0.0, || {
        <Flex as EmbeddingGradients>::embedding_backward(stream.clone(), ids.clone(), VOCAB_SIZE)
    });
    let norm = RmsNormCall::<Flex> {
        x: stream.clone(),
        weight: float([D_MODEL], 1.0),
        epsilon: EPSILON,
    };
    table.time("rms_norm", 2 * layers + 1, 0.0, || {
        Flex::rms_norm(norm.clone())
    });
    table.time("rms_norm backward", 2 * layers + 1, 0.0, || {
        Flex::rms_norm_backward(norm.clone(), stream.clone(), None)
    });
    let gate_up = float([BATCH, SEQ_LEN, 2 * D_FF], 1.0);
    let dy = float([BATCH, SEQ_LEN, D_FF], 1.0);
    table.time("swiglu", layers, 0.0, || Flex::swiglu(gate_up.clone()));
    table.time("swiglu backward", layers, 0.0, || {
        Flex::swiglu_backward(gate_up.clone(), dy.clone())
    });
    let (a, b) = (
        random([BATCH, SEQ_LEN, D_MODEL], 1.0),
        random([BATCH, SEQ_LEN, D_MODEL], 1.0),
    );
    // Both stay alive in a graph, so the sum is a tensor of its own; backward adds two gradients.
    table.time("residual add, and its gradients", 4 * layers, 0.0, || {
        a.clone() + b.clone()
    });

    let qkv = float([BATCH, SEQ_LEN, PACKED_HEADS, HEAD_DIM], 1.0);
    let norm = float([HEAD_DIM], 1.0);
    let rope = RotaryEmbedding::<Flex>::new(HEAD_DIM, SEQ_LEN, 1e4, &Default::default());
    let call = QkNormRopeCall::<Flex> {
        q_weight: norm.clone(),
        k_weight: norm,
        positions: ints([BATCH, SEQ_LEN], |n| (n % SEQ_LEN % DOCUMENT_LEN) as i32),
        rope: RopeTables {
            cos: rope.cos.into_primitive().tensor(),
            sin: rope.sin.into_primitive().tensor(),
        },
        num_kv_heads: NUM_KV_HEADS,
        epsilon: EPSILON,
    };
    table.time("qk_norm_rope", layers, 0.0, || {
        Flex::qk_norm_rope(qkv.clone(), call.clone())
    });
    table.time("qk_norm_rope backward", layers, 0.0, || {
        Flex::qk_norm_rope_backward(qkv.clone(), call.clone(), qkv.clone())
    });
}

/// Documents of [`DOCUMENT_LEN`] tokens, the last one cut by the row's end.
fn documents() -> DocumentBounds<Flex> {
    let bounds: (Vec<u32>, Vec<u32>) = (0..TOKENS)
        .map(|token| {
            let start = token % SEQ_LEN / DOCUMENT_LEN * DOCUMENT_LEN;
            (start as u32, (start + DOCUMENT_LEN).min(SEQ_LEN) as u32)
        })
        .unzip();
    let shape = [BATCH, SEQ_LEN];
    Documents::<Flex>::new(&bounds.0, &bounds.1, shape, &Default::default()).bounds()
}

fn attention(table: &mut Table) {
    let layers = NUM_LAYERS;
    let documents = documents();
    let spec = AttentionSpec {
        num_heads: NUM_HEADS,
        num_kv_heads: NUM_KV_HEADS,
        softmax_scale: 1.0 / (HEAD_DIM as f64).sqrt(),
        window_size: None,
    };
    let qkv = float([BATCH, SEQ_LEN, PACKED_HEADS, HEAD_DIM], 1.0);
    let w_dt = float([NUM_KV_HEADS * HEAD_DIM, NUM_KV_HEADS], 0.1);
    let a = float([NUM_KV_HEADS], 1.0);
    let z = Flex::dma_scores(qkv.clone(), w_dt.clone(), a.clone(), spec);
    table.time("dma_scores", layers, 0.0, || {
        Flex::dma_scores(qkv.clone(), w_dt.clone(), a.clone(), spec)
    });
    table.time("dma_select", layers, 0.0, || {
        Flex::dma_select(z.clone(), &documents, KEEP_WINDOW_SIZE.into())
    });
    let selection: DmaSelection<Flex> =
        Flex::dma_select(z.clone(), &documents, KEEP_WINDOW_SIZE.into());
    let scores = Tensor::<Flex, 3>::from_primitive(TensorPrimitive::Float(z.clone()));
    let delta = dma_bias(scores, DmaBias::Exp).into_primitive().tensor();
    let output = Flex::dma_attention(qkv.clone(), delta.clone(), &documents, &selection, spec);
    let pairs = active_pairs(&selection);
    let flops = 4.0 * pairs * (NUM_HEADS / NUM_KV_HEADS * HEAD_DIM) as f64;
    table.time("dma_attention", layers, flops, || {
        Flex::dma_attention(qkv.clone(), delta.clone(), &documents, &selection, spec)
    });
    table.time("dma_attention backward", layers, 2.5 * flops, || {
        let d_o = output.o.clone();
        Flex::dma_attention_backward(
            qkv.clone(),
            delta.clone(),
            &documents,
            &selection,
            spec,
            output.clone(),
            d_o,
        )
    });
    table.time("dma_scores backward", layers, 0.0, || {
        // The caller hands over a tensor that nobody else holds.
        let dqkv = Tensor::<Flex, 4>::from_primitive(TensorPrimitive::Float(qkv.clone()));
        let dqkv = (dqkv + 1.0).into_primitive().tensor();
        Flex::dma_scores_backward(qkv.clone(), w_dt.clone(), a.clone(), spec, z.clone(), dqkv)
    });
}

/// Pairs of a query and a key it sees, over all KV heads.
fn active_pairs(selection: &DmaSelection<Flex>) -> f64 {
    let expire = Tensor::<Flex, 3, Int>::from_primitive(selection.expire.clone());
    let expire = expire.into_data();
    let pairs = expire
        .iter::<i64>()
        .enumerate()
        .map(|(key, expire)| expire - (key % SEQ_LEN) as i64);
    pairs.sum::<i64>() as f64
}

fn head(table: &mut Table) {
    let h = float([TOKENS, D_MODEL], 1.0);
    let weight = float([VOCAB_SIZE, D_MODEL], 0.02);
    let labels = ints([TOKENS], |n| (n * 31 % VOCAB_SIZE) as i32);
    let flops = 6.0 * (TOKENS * D_MODEL * VOCAB_SIZE) as f64;
    table.time("linear_cross_entropy, both ways", 1, flops, || {
        Flex::linear_cross_entropy_with_gradients(h.clone(), weight.clone(), labels.clone())
    });
}

fn optimizer(table: &mut Table) {
    let layer =
        D_MODEL * (PACKED_HEADS * HEAD_DIM + 2 * D_FF) + (NUM_HEADS * HEAD_DIM + D_FF) * D_MODEL;
    let parameters = NUM_LAYERS * layer + VOCAB_SIZE * D_MODEL;
    let gradient = float([parameters], 1.0);
    table.time("sum_of_squares", 1, 0.0, || {
        Flex::sum_of_squares(gradient.clone())
    });
    let zeros = || {
        let zeros = Tensor::<Flex, 1>::zeros([parameters], &Default::default());
        zeros.into_primitive().tensor()
    };
    let mut tensors = Some(AdamWTensors::<Flex> {
        param: float([parameters], 0.02),
        leaf: None,
        exp_avg: zeros(),
        exp_avg_sq: zeros(),
    });
    let scale = float([1], 1.0);
    let step = AdamWStep {
        lr: 1e-3,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        bias_correction1: 0.1,
        bias_correction2: 0.05,
    };
    table.time("adamw", 1, 0.0, || {
        let held = tensors.take().expect("put back below");
        tensors = Some(Flex::adamw(held, gradient.clone(), scale.clone(), step));
    });
}
