//! A Burn program with a module and an optimizer of its own that calls Sieve's attention. It runs on the CPU
//! ([`Flex`]); with [`sieve_ops::Cuda`] in place of `Flex` the same code runs on the CUDA kernels.
//!
//! `cargo run --release --example kernels_in_burn`, from the workspace's root.

#![allow(clippy::print_stdout, reason = "this is a program")]

use burn::backend::Autodiff;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Distribution, Tensor};
use burn_flex::Flex;
use sieve_ops::{AttentionSpec, Documents, SieveBackend, attention};

const NUM_HEADS: usize = 4;
const NUM_KV_HEADS: usize = 2;
const HEAD_DIM: usize = 16;
/// Sieve's ops take queries, keys and values as one packed tensor.
const PACKED_HEADS: usize = NUM_HEADS + 2 * NUM_KV_HEADS;
const D_MODEL: usize = 32;

/// Any module of a Burn program, with attention over a window of 24 tokens.
#[derive(Module, Debug)]
struct Mixer<B: Backend> {
    qkv: Linear<B>,
    out: Linear<B>,
}

impl<B: SieveBackend> Mixer<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            qkv: LinearConfig::new(D_MODEL, PACKED_HEADS * HEAD_DIM).init(device),
            out: LinearConfig::new(NUM_HEADS * HEAD_DIM, D_MODEL).init(device),
        }
    }

    fn forward(&self, x: Tensor<B, 3>, documents: &Documents<B>) -> Tensor<B, 3> {
        let [batch, seq_len, _d_model] = x.dims();
        let qkv = self.qkv.forward(x).reshape([batch, seq_len, PACKED_HEADS, HEAD_DIM]);
        let spec = AttentionSpec { window_size: Some(24), ..AttentionSpec::dense([NUM_HEADS, NUM_KV_HEADS], HEAD_DIM) };
        self.out.forward(attention(qkv, documents, spec).flatten(2, 3))
    }
}

/// Trains the module to output at each token the input of two tokens before; returns the first and the last loss.
fn train<B: AutodiffBackend + SieveBackend>(device: &B::Device) -> (f32, f32) {
    let mut mixer = Mixer::<B>::new(device);
    let mut optimizer = AdamConfig::new().init();
    // One document per row. `Documents::new` packs several, which do not attend to each other.
    let (batch, seq_len) = (4, 96);
    let documents = Documents::whole_rows([batch, seq_len], device);
    let shape = [batch, seq_len, D_MODEL];
    let x = Tensor::<B, 3>::random(shape, Distribution::Normal(0.0, 1.0), device);
    let past = x.clone().slice([0..batch, 0..seq_len - 2]);
    let mut losses = Vec::new();
    for _step in 0..60 {
        let y = mixer.forward(x.clone(), &documents);
        let y = y.slice([0..batch, 2..seq_len]);
        let loss = (y - past.clone()).powi_scalar(2).mean();
        losses.push(loss.clone().into_data().iter::<f32>().next().unwrap_or(f32::NAN));
        let gradients = GradientsParams::from_grads(loss.backward(), &mixer);
        mixer = optimizer.step(1e-2, mixer, gradients);
    }
    (losses[0], losses[losses.len() - 1])
}

fn main() {
    let (first, last) = train::<Autodiff<Flex>>(&Default::default());
    println!("squared error: {first:.4} before, {last:.4} after 60 steps");
    assert!(last < first, "the gradients of the attention lead down");
}
