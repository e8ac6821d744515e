//! The numbers of one AdamW update.

/// Hyper-parameters of one AdamW update (arXiv:1711.05101), with the bias corrections computed. They are f64; each
/// kernel combines them in f64 and then rounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWStep {
    /// Learning rate of the step.
    pub lr: f64,
    /// Decay rate of the first moment.
    pub beta1: f64,
    /// Decay rate of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay, `p *= 1 - lr * weight_decay` before the update; zero for tensors that do not decay.
    pub weight_decay: f64,
    /// `1 - beta1^t` with t the number of this step, counted from 1.
    pub bias_correction1: f64,
    /// Bias correction of the second moment: `1 - beta2^t`.
    pub bias_correction2: f64,
}

impl AdamWStep {
    /// Step `number`, counted from 1, with the numbers that are usual for language models: decay rates of 0.9 and 0.95,
    /// an eps of 1e-8 and a weight decay of 0.1.
    pub fn usual(lr: f64, number: i32) -> Self {
        let (beta1, beta2) = (0.9_f64, 0.95_f64);
        let [bias_correction1, bias_correction2] = [beta1, beta2].map(|beta| 1.0 - beta.powi(number));
        Self { lr, beta1, beta2, eps: 1e-8, weight_decay: 0.1, bias_correction1, bias_correction2 }
    }
}
