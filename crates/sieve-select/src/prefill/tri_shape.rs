//! Tri-shape: the first tokens, a window and a dense end of the prompt (as in SCBench, arXiv:2412.10319).

use crate::prefill::a_shape::ranges;
use crate::prelude::*;

settings! {
    /// Settings of the prefill method `tri_shape`.
    pub struct TriShapeConfig {
        /// First tokens that all queries see.
        pub n_init: usize = 128,
        /// Last tokens a query sees, its own included.
        pub n_local: usize = 3968,
        /// Last rows of the call, which are dense.
        pub n_last: usize = 100,
    }
    small "tri_shape:n_init=5,n_local=20,n_last=30";
    everything "tri_shape:n_last=100000,n_local=3";
}

impl PrefillMethod for TriShapeConfig {
    fn check(&self, _: GqaPolicy) -> Result<(), SelectError> {
        Rules("tri_shape").positive("n_local", self.n_local)
    }

    fn select(&self, call: &Call<'_>, _: GqaPolicy) -> Selected {
        let mut mask = ranges(call, self.n_init, self.n_local);
        let rows = call.shape.num_queries;
        mask.add_dense_rows(rows.saturating_sub(self.n_last)..rows);
        mask.into()
    }

    fn reads(&self) -> Reads {
        Reads::Nothing
    }
}
