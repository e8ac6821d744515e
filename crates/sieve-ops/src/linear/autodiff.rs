//! Products with a weight as nodes of the autodiff graph.
use super::backend::{LinearBackend, LinearGradients};
use crate::device::autodiff::{Gradient, enter, inner};
use crate::tensors::Float;
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::backend::Backend;

#[derive(Clone, Debug)]
struct Product<B: Backend> {
    x: Float<B>,
    weight: Float<B>,
}

impl<B: LinearGradients> Gradient<B, 2> for Product<B> {
    fn gradients(self, dy: Float<B>) -> [Float<B>; 2] {
        let dx = B::linear_input_gradient(self.weight, dy.clone());
        [dx, B::linear_weight_gradient(self.x, dy, None)]
    }
}

impl<B: LinearGradients> Gradient<B, 3> for Product<B> {
    fn gradients(self, dy: Float<B>) -> [Float<B>; 3] {
        let [dx, dweight] = Gradient::<B, 2>::gradients(self, dy.clone());
        [dx, dweight, dy]
    }
}

impl<B: LinearGradients, C: CheckpointStrategy> LinearBackend for Autodiff<B, C> {
    fn linear(x: Float<Self>, weight: Float<Self>) -> Float<Self> {
        let [inner_x, inner_weight] = [&x, &weight].map(inner::<B, C>);
        let kept = Product::<B> {
            x: inner_x.clone(),
            weight: inner_weight.clone(),
        };
        let y = <B as LinearBackend>::linear(inner_x, inner_weight);
        enter::<B, C, _, 2>([&x, &weight], kept, y)
    }

    fn linear_add(x: Float<Self>, weight: Float<Self>, residual: Float<Self>) -> Float<Self> {
        let [inner_x, inner_weight] = [&x, &weight].map(inner::<B, C>);
        let kept = Product::<B> {
            x: inner_x.clone(),
            weight: inner_weight.clone(),
        };
        let y = B::linear_add(inner_x, inner_weight, inner::<B, C>(&residual));
        enter::<B, C, _, 3>([&x, &weight, &residual], kept, y)
    }
}
