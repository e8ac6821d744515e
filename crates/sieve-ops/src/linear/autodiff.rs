//! Products with a weight as nodes of the autodiff graph.
use super::backend::{LinearBackend, LinearGradients};
use crate::device::autodiff::{enter, inner};
use crate::tensors::Float;
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;

/// `[dx, dweight]`.
fn backward<B: LinearGradients>(x: Float<B>, weight: Float<B>, dy: Float<B>) -> [Float<B>; 2] {
    let dx = B::linear_input_gradient(weight, dy.clone());
    [dx, B::linear_weight_gradient(x, dy, None)]
}

impl<B: LinearGradients, C: CheckpointStrategy> LinearBackend for Autodiff<B, C> {
    fn linear(x: Float<Self>, weight: Float<Self>) -> Float<Self> {
        let [a, w] = [&x, &weight].map(inner::<B, C>);
        let y = <B as LinearBackend>::linear(a.clone(), w.clone());
        enter::<B, C, _, _>([&x, &weight], y, move |dy| backward::<B>(a, w, dy))
    }

    fn linear_add(x: Float<Self>, weight: Float<Self>, residual: Float<Self>) -> Float<Self> {
        let [a, w] = [&x, &weight].map(inner::<B, C>);
        let y = B::linear_add(a.clone(), w.clone(), inner::<B, C>(&residual));
        enter::<B, C, _, _>([&x, &weight, &residual], y, move |dy| {
            let [dx, dweight] = backward::<B>(a, w, dy.clone());
            [dx, dweight, dy]
        })
    }
}
