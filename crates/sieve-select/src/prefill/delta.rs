//! Delta: any sparse method, corrected by the dense output of every gamma-th row (arXiv:2505.11254; as MOMO uses it,
//! eq. 3).

use crate::attention::dense_rows_attention;
use crate::mask::{Correction, CorrectionMode};
use crate::prelude::*;

settings! {
    /// Settings of `delta`, beside its base selector's.
    pub struct DeltaConfig {
        /// The corrected method; its settings are given as `base.key=value`.
        pub base: String = "streamingllm".to_owned(),
        /// Distance between two probe rows, which are computed densely.
        pub gamma: usize = 16,
        /// Also compute the last `(N mod gamma) + max(128, gamma)` rows densely.
        pub dense_tail: bool = true,
        /// How the probes' dense outputs are used.
        pub mode: CorrectionMode = CorrectionMode::Correct,
    }
    small
        "delta:base=streamingllm,base.n_local=16,base.min_prefill_tokens=0,gamma=8,dense_tail=false",
        "delta:base=meanpool,base.block=16,base.tau=0.3,base.min_prefill_tokens=0,gamma=16,mode=recompute";
    everything
        "delta:base=meanpool,base.tau=1,base.block=16,gamma=8,dense_tail=false",
        "delta:base=streamingllm,gamma=1,base.n_local=1,dense_tail=false";
}

impl DeltaConfig {
    pub(crate) fn check(&self) -> Result<(), SelectError> {
        Rules("delta").positive("gamma", self.gamma)
    }

    /// Adds the probes' dense outputs to a selection of the base.
    pub(crate) fn correct(&self, call: &Call<'_>, chosen: &mut Selected) {
        chosen.correction = Some(correction(call, &probe_rows(call.shape, self.gamma), self.mode));
    }

    /// The first of the last rows that are computed densely; `None` without `dense_tail`.
    pub(crate) fn tail(&self, shape: CallShape) -> Option<usize> {
        let tail = shape.num_keys % self.gamma + self.gamma.max(128);
        self.dense_tail.then_some(shape.num_queries.saturating_sub(tail))
    }
}

/// The correction by dense outputs of some rows of the call.
pub(crate) fn correction(call: &Call<'_>, rows: &[usize], mode: CorrectionMode) -> Correction {
    let probe_rows = rows.iter().map(|&row| row as i32).collect();
    Correction { mode, probe_rows, probe_o: dense_rows_attention(call, rows) }
}

/// Rows whose position is a multiple of gamma, and the first row of the call.
pub fn probe_rows(shape: CallShape, gamma: usize) -> Vec<usize> {
    let context = shape.context();
    (0..shape.num_queries).filter(|row| *row == 0 || (context + row).is_multiple_of(gamma)).collect()
}
