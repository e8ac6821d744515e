//! Sizes of an attention call, on every device.

/// Sizes of the tensors of an attention call. Of the packed tensor of q, k and v a token has all query heads, then the
/// key heads, then the value heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// Rows of the batch.
    pub batch: usize,
    /// Tokens of each row.
    pub seq_len: usize,
    /// Number of query heads, a multiple of `num_kv_heads`.
    pub num_heads: usize,
    /// Number of key heads, and of value heads.
    pub num_kv_heads: usize,
    /// Columns of a query head and of a key head.
    pub head_dim: usize,
    /// Columns of a value head and of an output head, at most `head_dim`.
    pub head_dim_v: usize,
}

impl AttentionShape {
    /// Sizes from `[query heads, KV heads]` and `[width of keys, width of values]`.
    pub fn new(
        batch: usize,
        seq_len: usize,
        [num_heads, num_kv_heads]: [usize; 2],
        [head_dim, head_dim_v]: [usize; 2],
    ) -> Self {
        Self { batch, seq_len, num_heads, num_kv_heads, head_dim, head_dim_v }
    }

    /// Query heads that share a KV head.
    pub fn group_size(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// Elements of one token in the packed tensor.
    pub fn token_len(&self) -> usize {
        (self.num_heads + self.num_kv_heads) * self.head_dim + self.num_kv_heads * self.head_dim_v
    }

    /// Shape of the output and its gradient.
    pub fn output(&self) -> [usize; 4] {
        [self.batch, self.seq_len, self.num_heads, self.head_dim_v]
    }

    /// Shape of the log-sum-exp, `[batch, num_heads, seq_len]`.
    pub fn lse(&self) -> [usize; 3] {
        [self.batch, self.num_heads, self.seq_len]
    }

    /// Shape of a tensor with one number for each key: `[batch, num_kv_heads, seq_len]`.
    pub fn per_key(&self) -> [usize; 3] {
        [self.batch, self.num_kv_heads, self.seq_len]
    }
}
