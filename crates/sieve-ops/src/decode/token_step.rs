//! One new token of every row through a whole model, in one call, for devices that have a faster path for it than layer
//! by layer.
use super::call::{TokenStep, TokensBefore};
use crate::DeviceBackend;
use crate::tensors::tensor;
use burn::tensor::{Int, Tensor};

/// Runs the step and returns the logits of the next token of every row, `[batch, vocab_size]`. The token's keys are
/// written to the caches, and the caller updates their lengths. `graph` then holds the step for [`repeat_token_step`].
/// Returns `None`, with nothing changed, if the device has no such path for the model.
pub fn token_step<B: DeviceBackend>(step: TokenStep<'_, B>, graph: &mut B::StepGraph) -> Option<Tensor<B, 2>> {
    B::token_step(step, graph).map(tensor)
}

/// The step in `graph` for other tokens, ids `[batch, 1]`; otherwise as [`token_step`]. Returns `None` if `graph` is
/// empty or one of its buffers is full. With [`TokensBefore::Same`] the tokens are at the next position, and nothing
/// else may write to the caches between two steps; with [`TokensBefore::Each`] the caches must be the same buffers.
pub fn repeat_token_step<B: DeviceBackend>(
    graph: &mut B::StepGraph,
    ids: &Tensor<B, 2, Int>,
    before: TokensBefore<'_>,
) -> Option<Tensor<B, 2>> {
    B::repeat_token_step(graph, ids.clone().into_primitive(), before).map(tensor)
}
