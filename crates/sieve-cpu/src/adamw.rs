//! AdamW on one parameter, in place, in the order of operations of PyTorch.

use pulp::Simd;
use rayon::prelude::*;
use sieve_core::AdamWStep;

use crate::simd::on_arch;

/// Elements that one task updates.
const BLOCK: usize = 1 << 14;

/// One AdamW update of `param`, `m` and `v` in place, as `torch.optim.AdamW`: decay, moments, bias-corrected step. The
/// gradient is first multiplied by `grad_scale`. Scalars are rounded to f32 where PyTorch rounds them.
///
/// # Shapes
/// - param, grad, m, v: the same length
///
/// # Panics
/// When the lengths differ.
pub fn adamw(param: &mut [f32], grad: &[f32], m: &mut [f32], v: &mut [f32], grad_scale: f32, step: &AdamWStep) {
    let len = param.len();
    assert_eq!((grad.len(), m.len(), v.len()), (len, len, len), "adamw: grad, m, v must be as long as param");
    param
        .par_chunks_mut(BLOCK)
        .zip(grad.par_chunks(BLOCK))
        .zip(m.par_chunks_mut(BLOCK))
        .zip(v.par_chunks_mut(BLOCK))
        .for_each(|(((param, grad), m), v)| update(param, grad, m, v, grad_scale, step));
}

on_arch! {
    fn update<'u>(
        param: &'u mut [f32], grad: &'u [f32], m: &'u mut [f32], v: &'u mut [f32], grad_scale: f32,
        step: &'u AdamWStep,
    ) -> () = update_simd;
}

/// The update of the elements of one task.
#[inline(always)]
fn update_simd<S: Simd>(
    _simd: S,
    param: &mut [f32],
    grad: &[f32],
    m: &mut [f32],
    v: &mut [f32],
    grad_scale: f32,
    step: &AdamWStep,
) {
    let keep = (1.0 - step.lr * step.weight_decay) as f32;
    let one_minus_beta1 = (1.0 - step.beta1) as f32;
    let beta2 = step.beta2 as f32;
    let one_minus_beta2 = (1.0 - step.beta2) as f32;
    let root_correction2 = step.bias_correction2.sqrt() as f32;
    let eps = step.eps as f32;
    let minus_step_size = (-step.lr / step.bias_correction1) as f32;
    for (((p, &g), m), v) in param.iter_mut().zip(grad).zip(m).zip(v) {
        let g = g * grad_scale;
        *m += (g - *m) * one_minus_beta1;
        *v = *v * beta2 + g * g * one_minus_beta2;
        let denominator = v.sqrt() / root_correction2 + eps;
        *p = *p * keep + minus_step_size * *m / denominator;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::tests::on_every_arch;
    use sieve_testing::{Random, assert_close_relative, threads, wide};

    const GRAD_SCALE: f32 = 0.5;

    fn step_number(number: i32, weight_decay: f64) -> AdamWStep {
        AdamWStep { weight_decay, ..AdamWStep::usual(3e-3, number) }
    }

    #[test]
    fn ten_steps_equal_the_formulas_in_f64() {
        on_every_arch(|| {
            let mut random = Random(1);
            let len = BLOCK + 77;
            let mut param = random.vector(len);
            let (mut m, mut v) = (vec![0.0; len], vec![0.0; len]);
            let (mut param64, mut m64, mut v64) = (wide(&param), vec![0.0; len], vec![0.0; len]);
            for t in 1..=10 {
                let grad = random.vector(len);
                let step = step_number(t, 0.1);
                adamw(&mut param, &grad, &mut m, &mut v, GRAD_SCALE, &step);
                for i in 0..len {
                    let g = 0.5 * f64::from(grad[i]);
                    m64[i] = step.beta1 * m64[i] + (1.0 - step.beta1) * g;
                    v64[i] = step.beta2 * v64[i] + (1.0 - step.beta2) * g * g;
                    param64[i] *= 1.0 - step.lr * step.weight_decay;
                    let m_hat = m64[i] / step.bias_correction1;
                    param64[i] -= step.lr * m_hat / ((v64[i] / step.bias_correction2).sqrt() + step.eps);
                }
            }
            assert_close_relative("param", &param, &param64, 2e-6);
            assert_close_relative("m", &m, &m64, 1e-6);
            assert_close_relative("v", &v, &v64, 1e-6);
        });
    }

    #[test]
    fn decay_comes_first_and_a_zero_gradient_only_decays() {
        let (mut param, mut m, mut v) = ([2.0], [0.0], [0.0]);
        adamw(&mut param, &[0.0], &mut m, &mut v, GRAD_SCALE, &step_number(1, 0.1));
        assert_eq!(param, [2.0 * (1.0 - 3e-3 * 0.1) as f32]);
        assert_eq!((m, v), ([0.0], [0.0]));
    }

    #[test]
    fn threads_do_not_change_a_bit() {
        let run = |count| {
            let mut random = Random(2);
            let (mut param, grad) = (random.vector(3 * BLOCK + 5), random.vector(3 * BLOCK + 5));
            let (mut m, mut v) = (vec![0.0; param.len()], vec![0.0; param.len()]);
            threads(count).install(|| adamw(&mut param, &grad, &mut m, &mut v, GRAD_SCALE, &step_number(1, 0.01)));
            param
        };
        assert_eq!(run(1), run(4));
    }
}
