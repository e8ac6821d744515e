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
