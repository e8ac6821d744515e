//! A DMA layer with gradients in a program that knows no CUDA.
use burn::backend::Autodiff;
use burn::tensor::{Distribution, Tensor};
use burn_flex::{Flex, FlexDevice};
use sieve_nn::{AttentionConfig, Forward, LayerContext, PassState};
use sieve_ops::{DmaShape, Documents};

type B = Autodiff<Flex>;

fn main() {
    let device = FlexDevice;
    let (batch, seq_len, d_model) = (1, 256, 64);
    // 4 query heads, 2 KV heads of 16 columns; each query keeps 32 keys.
    let config = AttentionConfig::new(d_model, 4, 2, 16);
    let layer = config.dynamic_mask::<B>(DmaShape::new(32), &device);

    let documents = Documents::whole_rows([batch, seq_len], &device);
    let rope = config.rope(seq_len, &device);
    let x = Tensor::random([batch, seq_len, d_model], Distribution::Normal(0.0, 1.0), &device).require_grad();
    let residual = x.zeros_like();
    let (context, mut state, no_caches) = (LayerContext::new(&documents, &rope), PassState::default(), None);
    let y = layer.forward(x.clone(), residual, &context, &mut state, no_caches).x;
    let gradients = y.clone().powi_scalar(2).sum().backward();

    let dx = x.grad(&gradients).expect("x requires a gradient");
    println!("y {:?}, |dx| {:.3e}", y.dims(), dx.powi_scalar(2).sum().sqrt().into_scalar());
}
