//! Reference results of a case: attention and its gradients by their definition, in f64 or rounded as plain bf16 code
//! would.
use crate::case::{Case, Keys};
use crate::outputs::Outputs;
use sieve_cpu::reference::{AttentionCall, Heads, Rounding, Terms};
use sieve_cpu::{Documents, Mask, ScaledShape};

/// Reference results, and the sizes of the terms that they sum.
pub(crate) struct Reference {
    pub(crate) outputs: Outputs,
    /// Largest `sum_i P_ij (|dP_ij| + |sum_j P_ij dP_ij|)` of any key j. `ddelta` is this sum without the absolute
    /// values, so its rounding error is proportional to this number, even where `ddelta` is 0.
    pub(crate) ddelta_terms: f32,
    /// Sizes of the terms that each row of o, dq, dk and dv sums.
    pub(crate) terms: Terms,
}

/// Computes outputs and gradients of a case by their definition, with the given rounding.
pub(crate) fn attention(case: &Case, rounding: Rounding) -> Reference {
    let sieve_kernels::AttentionShape { num_heads, num_kv_heads, head_dim, head_dim_v, .. } = case.shape;
    let no_bias = vec![0.0; case.expire.len()];
    let has_bias = case.has_bias();
    let call = AttentionCall {
        shape: shape_of(case),
        q: Heads::new(&case.q, num_heads, head_dim),
        k: Heads::new(&case.k, num_kv_heads, head_dim),
        v: Heads::new(&case.v, num_kv_heads, head_dim_v),
        d_o: Heads::new(&case.d_o, num_heads, head_dim_v),
        documents: Documents::new(&case.doc_start, &case.doc_end),
        mask: match case.keys {
            Keys::Far(window, far) => Mask::Far(window, far),
            _ => Mask::Expire { expire: &case.expire, delta: if has_bias { &case.delta } else { &no_bias } },
        },
    };
    let results = call.run(rounding);
    Reference {
        ddelta_terms: results.d_delta_terms.iter().fold(0.0, |m, &x| x.max(m)) as f32,
        terms: results.terms,
        outputs: Outputs {
            o: narrow(results.o),
            lse: narrow(results.lse),
            dq: narrow(results.dq),
            dk: narrow(results.dk),
            dv: narrow(results.dv),
            ddelta: narrow(if has_bias { results.d_delta } else { Vec::new() }),
            expire: case.expire.clone(),
        },
    }
}

/// The sizes of a case for the CPU's kernels and definitions.
pub(crate) fn shape_of(case: &Case) -> ScaledShape {
    let shape = case.shape;
    ScaledShape {
        softmax_scale: case.scale,
        ..ScaledShape::new([shape.batch, shape.seq_len], [shape.num_heads, shape.num_kv_heads], shape.head_dim)
    }
}

/// Converts to f32, in which results are compared.
pub(crate) fn narrow(values: Vec<f64>) -> Vec<f32> {
    values.into_iter().map(|x| x as f32).collect()
}
