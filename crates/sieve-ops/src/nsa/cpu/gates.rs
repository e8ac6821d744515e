//! The gated sum of the branches on the CPU.
use crate::device::flex::{contiguous, floats, from_vec, zeros_like};
use burn::tensor::TensorMetadata;
use burn_flex::FlexTensor;

pub(super) fn forward(branches: [FlexTensor; 3], logits: FlexTensor, bias: FlexTensor) -> FlexTensor {
    let branches = branches.map(contiguous);
    let [logits, bias] = [logits, bias].map(contiguous);
    let shape = branches[0].shape();
    let mut o = zeros_like(&branches[0]);
    sieve_cpu::nsa_gates_forward(
        branches.each_ref().map(floats),
        floats(&logits),
        floats(&bias),
        shape[3],
        &mut o,
    );
    from_vec(o, shape)
}

pub(super) fn backward(
    branches: [FlexTensor; 3],
    logits: FlexTensor,
    bias: FlexTensor,
    d_o: FlexTensor,
) -> [FlexTensor; 5] {
    let branches = branches.map(contiguous);
    let [logits, bias, d_o] = [logits, bias, d_o].map(contiguous);
    let shape = d_o.shape();
    let mut d_branches = [0; 3].map(|_| zeros_like(&d_o));
    let (mut d_logits, mut d_bias) = (zeros_like(&logits), zeros_like(&bias));
    sieve_cpu::nsa_gates_backward(
        branches.each_ref().map(floats),
        floats(&logits),
        floats(&bias),
        shape[3],
        floats(&d_o),
        d_branches.each_mut().map(Vec::as_mut_slice),
        &mut d_logits,
        &mut d_bias,
    );
    let [c, s, w] = d_branches.map(|dx| from_vec(dx, shape.clone()));
    [
        c,
        s,
        w,
        from_vec(d_logits, logits.shape()),
        from_vec(d_bias, bias.shape()),
    ]
}
