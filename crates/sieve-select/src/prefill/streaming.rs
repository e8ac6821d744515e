//! The first tokens and a window: StreamingLLM (arXiv:2309.17453) in prefill.

use crate::prefill::a_shape;
use crate::prelude::*;

settings! {
    /// Settings of `streamingllm`, in prefill and in decode.
    pub struct StreamingConfig {
        /// First tokens that all queries see.
        pub n_init: usize = 4,
        /// Last tokens a query sees, its own included.
        pub n_local: usize = 1024,
        /// In decode, keys take their position in the cache instead of their own.
        pub reindex: bool = false,
        /// Base of the rotary embedding, to move keys with `reindex`; the model's when not given.
        pub rope_theta: Option<f64> = None,
    }
    small "streamingllm:n_init=3,n_local=20";
    everything "streamingllm:n_local=100000";
}

impl PrefillMethod for StreamingConfig {
    fn check(&self, _: GqaPolicy) -> Result<(), SelectError> {
        Rules("streamingllm").positive("n_local", self.n_local)?;
        Rules("streamingllm").rope_theta(self.rope_theta)
    }

    fn select(&self, call: &Call<'_>, _: GqaPolicy) -> Selected {
        a_shape::ranges(call, self.n_init, self.n_local).into()
    }

    fn reads(&self) -> Reads {
        Reads::Nothing
    }

    fn is_causal_map(&self) -> bool {
        true
    }

    fn knob(&self) -> Option<Knob> {
        (!self.reindex).then_some(("n_local", TOKENS))
    }
}
