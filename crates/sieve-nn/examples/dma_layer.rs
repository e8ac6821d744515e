//! One DMA layer outside a model, with gradients, on the CPU.
//!
//! `cargo run --release --example dma_layer`, from the workspace's root.

#![allow(clippy::print_stdout, reason = "this is a program")]

use burn::backend::Autodiff;
use burn::tensor::{Distribution, Tensor};
use burn_flex::Flex;
use sieve_nn::{AttentionConfig, Forward, LayerContext, PassState};
use sieve_ops::{DmaShape, Documents};

type B = Autodiff<Flex>;

/// A forward pass, the density of the mask that it returns, and the gradients of the input and of A.
fn main() {
    let device = Default::default();
    let (batch, seq_len, d_model) = (2, 512, 256);

    // 8 query heads in groups of 4; a query keeps 64 keys. `new` is the form of a recipe of kind = "dma": recency by a
    // slope, the last 8 keys in any case; `DmaShape::published(64)` is the paper's form.
    let config = AttentionConfig::new(d_model, 8, 2, 32);
    let dma = DmaShape { a_init: 0.5, ..DmaShape::new(64) }; // the default 0 starts as a sliding window with a slope
    let layer = config.dynamic_mask::<B>(dma, &device);

    // One document per row; `Documents::new` packs several.
    let documents = Documents::whole_rows([batch, seq_len], &device);
    let rope = config.rope(seq_len, &device);
    let x = Tensor::<B, 3>::random([batch, seq_len, d_model], Distribution::Normal(0.0, 1.0), &device).require_grad();
    let (context, mut state, no_caches) = (LayerContext::new(&documents, &rope), PassState::default(), None);
    let result = layer.forward(x.clone(), x.zeros_like(), &context, &mut state, no_caches);
    println!("output {:?}", result.x.dims());

    // Key j is seen by the queries j <= i < expire[j].
    let expire = result.expire.expect("DMA returns its mask");
    let lifetimes = expire.into_data();
    let pairs: i64 = lifetimes.iter::<i64>().enumerate().map(|(key, expire)| expire - (key % seq_len) as i64).sum();
    let causal = batch * 2 * seq_len * (seq_len + 1) / 2; // both KV heads have a mask
    println!("density {:.3}", pairs as f64 / causal as f64);

    let gradients = result.x.powi_scalar(2).sum().backward();
    let dx = x.grad(&gradients).expect("x requires a gradient");
    let da = layer.a.val().grad(&gradients).expect("so does every parameter");
    println!("|dx| {:.3e}", dx.powi_scalar(2).sum().sqrt().into_scalar());
    println!("dA {:?}", da.into_data().to_vec::<f32>().expect("f32 on the CPU"));
}
