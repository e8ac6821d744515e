//! fp8 GEMMs on the CPU: f32 GEMMs of values rounded to fp8, always counted as the reference.
use super::{Fp8Kept, ToQuantise, reference};
use crate::device::paths::{self, Memory};
use crate::linear::added;
use crate::{Place, swiglu};
use burn_flex::{Flex, FlexTensor};

const NO_NUMBERS: &str = "the CPU has no fp8: f32 is rounded to it";

fn counted<T>(op: &'static str, run: impl FnOnce() -> T) -> T {
    paths::reference((Place::Cpu, op), NO_NUMBERS, Memory::Linear, run)
}

pub(crate) fn fp8_linear(
    x: ToQuantise<Flex>,
    weight: FlexTensor,
    residual: Option<FlexTensor>,
) -> (FlexTensor, Fp8Kept<Flex>) {
    counted("fp8_linear", || reference::fp8_linear::<Flex>(x.0, weight, residual))
}

/// `[dx, dweight]`, the latter added to the `sum` of earlier weight gradients, if there is one.
pub(crate) fn fp8_linear_backward(
    kept: Fp8Kept<Flex>,
    dy: ToQuantise<Flex>,
    sum: Option<FlexTensor>,
) -> [FlexTensor; 2] {
    let [dx, dweight] = counted("fp8_linear_backward", || reference::fp8_linear_backward(kept, dy.0));
    [dx, added::<Flex>(sum, dweight)]
}

pub(crate) fn fp8_swiglu(gate_up: FlexTensor) -> ToQuantise<Flex> {
    ToQuantise::new(swiglu::cpu::swiglu(gate_up))
}

pub(crate) fn fp8_swiglu_backward(gate_up: FlexTensor, dy: FlexTensor) -> ToQuantise<Flex> {
    ToQuantise::new(swiglu::cpu::swiglu_backward(gate_up, dy))
}
