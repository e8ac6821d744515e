//! AdamW on one parameter, in place, in the update order of torch.

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

/// Elements one task updates.
const BLOCK: usize = 1 << 14;

/// The numbers of one AdamW step. Scalars are f64 and are rounded to f32 where torch rounds them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWStep {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled decay: `p *= 1 - lr * weight_decay`, before the update.
    pub weight_decay: f64,
    /// `1 - beta1^t` with t the number of this step, counted from 1.
    pub bias_correction1: f64,
    /// `1 - beta2^t`.
    pub bias_correction2: f64,
    /// The gradient is multiplied by this first (clipping, averaging).
    pub grad_scale: f32,
}

/// One AdamW update of `param`, `m` and `v` in place: decay, moments, bias-corrected step, as `torch.optim.AdamW`.
///
/// # Shapes
/// - param, grad, m, v: the same length
///
/// # Panics
/// When the lengths differ.
pub fn adamw_step(param: &mut [f32], grad: &[f32], m: &mut [f32], v: &mut [f32], step: &AdamWStep) {
    let len = param.len();
    assert_eq!(
        (grad.len(), m.len(), v.len()),
        (len, len, len),
        "adamw_step: grad, m, v must be as long as param"
    );
    param
        .par_chunks_mut(BLOCK)
        .zip(grad.par_chunks(BLOCK))
        .zip(m.par_chunks_mut(BLOCK))
        .zip(v.par_chunks_mut(BLOCK))
        .for_each(|(((param, grad), m), v)| {
            Arch::new().dispatch(Update {
                param,
                grad,
                m,
                v,
                step,
            })
        });
}

struct Update<'u> {
    param: &'u mut [f32],
    grad: &'u [f32],
    m: &'u mut [f32],
    v: &'u mut [f32],
    step: &'u AdamWStep,
}

impl WithSimd for Update<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let Self {
            param,
            grad,
            m,
            v,
            step,
        } = self;
        let keep = (1.0 - step.lr * step.weight_decay) as f32;
        let one_minus_beta1 = (1.0 - step.beta1) as f32;
        let beta2 = step.beta2 as f32;
        let one_minus_beta2 = (1.0 - step.beta2) as f32;
        let root_correction2 = step.bias_correction2.sqrt() as f32;
        let eps = step.eps as f32;
        let minus_step_size = (-step.lr / step.bias_correction1) as f32;
        for (((p, &g), m), v) in param.iter_mut().zip(grad).zip(m).zip(v) {
            let g = g * step.grad_scale;
            *m += (g - *m) * one_minus_beta1;
            *v = *v * beta2 + g * g * one_minus_beta2;
            let denominator = v.sqrt() / root_correction2 + eps;
            *p = *p * keep + minus_step_size * *m / denominator;
        }
    }
}
