//! Results of an attention call, on the host.
use sieve_kernels::AttentionShape;

/// Outputs and gradients of attention, converted to f32.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Outputs {
    /// Attention output, `[batch, seq_len, num_heads, head_dim_v]`.
    pub(crate) o: Vec<f32>,
    /// Log-sum-exp, `[batch, num_heads, seq_len]`.
    pub(crate) lse: Vec<f32>,
    /// Gradient of q, `[batch, seq_len, num_heads, head_dim]`.
    pub(crate) dq: Vec<f32>,
    /// Gradient of k, `[batch, seq_len, num_kv_heads, head_dim]`.
    pub(crate) dk: Vec<f32>,
    /// Gradient of v, `[batch, seq_len, num_kv_heads, head_dim_v]`.
    pub(crate) dv: Vec<f32>,
    /// Gradient of the biases, `[batch, num_kv_heads, seq_len]`; empty without a bias.
    pub(crate) ddelta: Vec<f32>,
    /// First query that no longer sees each key, `[batch, num_kv_heads, seq_len]`; empty where the call returns none.
    pub(crate) expire: Vec<i32>,
}

impl Outputs {
    /// Splits the gradient of a packed tensor `[batch, seq_len, num_heads + 2 num_kv_heads, head_dim]` into dq, dk, dv;
    /// values narrower than keys were padded with zeros.
    pub(crate) fn set_packed_gradient(&mut self, shape: AttentionShape, dqkv: &[f32]) {
        let AttentionShape { num_heads, num_kv_heads, head_dim, head_dim_v, .. } = shape;
        let token_len = (num_heads + 2 * num_kv_heads) * head_dim;
        self.dq.clear();
        self.dk.clear();
        self.dv.clear();
        for row in dqkv.chunks_exact(token_len) {
            let (q, rest) = row.split_at(num_heads * head_dim);
            let (k, v) = rest.split_at(num_kv_heads * head_dim);
            self.dq.extend(q);
            self.dk.extend(k);
            for v in v.chunks_exact(head_dim) {
                self.dv.extend(&v[..head_dim_v]);
            }
        }
    }
}
