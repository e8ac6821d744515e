//! Eight-bit floats on the CPU: rounded f32, always counted as the reference.
use super::backend::{Fp8Gradients, Fp8Kept, ToRound};
use super::reference;
use crate::device::paths::{self, Memory, Place};
use crate::linear::reference::added;
use crate::swiglu::{SwigluBackend, SwigluGradients};
use burn_flex::{Flex, FlexTensor};

const NO_NUMBERS: &str = "the CPU has no eight-bit floats: f32 is rounded to them";

fn counted<T>(op: &'static str, run: impl FnOnce() -> T) -> T {
    paths::reference((Place::Cpu, op), NO_NUMBERS, Memory::Linear, run)
}

impl Fp8Gradients for Flex {
    fn fp8_linear(x: ToRound<Self>, weight: FlexTensor, residual: Option<FlexTensor>) -> (FlexTensor, Fp8Kept<Self>) {
        counted("fp8_linear", || reference::fp8_linear::<Self>(x.0, weight, residual))
    }

    fn fp8_linear_backward(kept: Fp8Kept<Self>, dy: ToRound<Self>, sum: Option<FlexTensor>) -> [FlexTensor; 2] {
        let [dx, dweight] = counted("fp8_linear_backward", || reference::fp8_linear_backward(kept, dy.0));
        [dx, added::<Self>(sum, dweight)]
    }

    fn fp8_swiglu(gate_up: FlexTensor) -> ToRound<Self> {
        ToRound::new(Self::swiglu(gate_up))
    }

    fn fp8_swiglu_backward(gate_up: FlexTensor, dy: FlexTensor) -> ToRound<Self> {
        ToRound::new(Self::swiglu_backward(gate_up, dy))
    }
}
