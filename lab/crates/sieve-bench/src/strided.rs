//! Tensors with every memory layout that launch wrappers accept: contiguous, padded, sliced, transposed, expanded.
use crate::case::Case;

/// Memory layout of a `[batch, seq_len, heads, width]` tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Contiguous, without gaps between rows.
    Contiguous,
    /// Each head is followed by a gap, as in Burn's pitched tensors.
    Pitched,
    /// A slice of a larger tensor with more heads and tokens: the token stride exceeds heads * width.
    Sliced,
    /// `[batch, heads, seq_len, width]` in memory, as PyTorch's attention has it.
    Transposed,
    /// All rows of the batch share the memory of one row (batch stride 0).
    Expanded,
}

impl Layout {
    pub(crate) const ALL: [Self; 5] = [Self::Contiguous, Self::Pitched, Self::Sliced, Self::Transposed, Self::Expanded];

    /// Strides of a tensor of this shape, in elements.
    pub(crate) fn strides(self, [_, seq_len, heads, width]: [usize; 4]) -> [usize; 4] {
        let dense = heads * width;
        match self {
            Self::Contiguous => [seq_len * dense, dense, width, 1],
            Self::Pitched => {
                let pitch = width + 8;
                [seq_len * heads * pitch, heads * pitch, pitch, 1]
            }
            Self::Sliced => {
                let token = dense + 24;
                [(seq_len + 3) * token, token, width, 1]
            }
            Self::Transposed => [seq_len * dense, width, seq_len * width, 1],
            Self::Expanded => [0, dense, width, 1],
        }
    }
}

/// The memory of a strided tensor with these values, which are given in index order. Elements that no index reaches are
/// NaN. The expanded layout stores the first row of the batch alone.
pub(crate) fn laid_out(values: &[f32], shape: [usize; 4], strides: [usize; 4]) -> Vec<f32> {
    let last = shape.map(|size| size - 1).iter().zip(strides).map(|(index, stride)| index * stride).sum::<usize>();
    let mut memory = vec![f32::NAN; last + 1];
    // In reverse: the rows of an expanded batch share memory, and the first row must be written last.
    for (at, &value) in values.iter().enumerate().rev() {
        memory[place(at, &shape, &strides)] = value;
    }
    memory
}

/// The offset of element number `at` (in index order) of a strided tensor, in elements.
pub(crate) fn place(mut at: usize, shape: &[usize], strides: &[usize]) -> usize {
    let mut place = 0;
    for (size, stride) in shape.iter().zip(strides).rev() {
        place += at % size * stride;
        at /= size;
    }
    place
}

/// q, k and v of a case packed as `[batch, seq_len, num_heads + 2 num_kv_heads, head_dim]`; values must be as wide as
/// keys.
pub(crate) fn packed(case: &Case) -> Vec<f32> {
    let (shape, d) = (case.shape, case.shape.head_dim);
    let (q_len, kv_len) = (shape.num_heads * d, shape.num_kv_heads * d);
    let of_token = |token: usize| {
        let part = |x: &'_ [f32], len: usize| x[token * len..][..len].to_vec();
        [part(&case.q, q_len), part(&case.k, kv_len), part(&case.v, kv_len)].concat()
    };
    (0..shape.batch * shape.seq_len).flat_map(of_token).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layout_reads_the_same() {
        let shape = [1, 3, 2, 4];
        let values: Vec<f32> = (0..24).map(|x| x as f32).collect();
        for layout in Layout::ALL {
            let strides = layout.strides(shape);
            let memory = laid_out(&values, shape, strides);
            let gathered: Vec<f32> = (0..24).map(|at| memory[place(at, &shape, &strides)]).collect();
            assert_eq!(gathered, values, "{layout:?}");
        }
        assert!(laid_out(&values, shape, Layout::Pitched.strides(shape))[5].is_nan());
    }
}
