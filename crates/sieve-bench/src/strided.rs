//! Tensors with every memory layout that launch wrappers accept: contiguous, padded, sliced, transposed, expanded.
use crate::case::Case;
use crate::shape::packed_of;

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
}

/// A buffer with its shape and strides, in elements; elements that no index reaches are NaN.
#[derive(Clone, Debug)]
pub(crate) struct Strided {
    pub(crate) buffer: Vec<f32>,
    pub(crate) shape: [usize; 4],
    pub(crate) strides: [usize; 4],
}

impl Strided {
    /// Lays out values given in index order. The expanded layout stores the first row of the batch alone.
    pub(crate) fn new(values: &[f32], shape: [usize; 4], layout: Layout) -> Self {
        let [_, seq_len, heads, width] = shape;
        let dense = heads * width;
        let strides = match layout {
            Layout::Contiguous => [seq_len * dense, dense, width, 1],
            Layout::Pitched => {
                let pitch = width + 8;
                [seq_len * heads * pitch, heads * pitch, pitch, 1]
            }
            Layout::Sliced => {
                let token = dense + 24;
                [(seq_len + 3) * token, token, width, 1]
            }
            Layout::Transposed => [seq_len * dense, width, seq_len * width, 1],
            Layout::Expanded => [0, dense, width, 1],
        };
        let ends = shape.iter().zip(strides);
        let last: usize = ends.map(|(size, stride)| (size - 1) * stride).sum();
        let mut strided = Self { buffer: vec![f32::NAN; last + 1], shape, strides };
        // In reverse: the rows of an expanded batch share memory, and the first row must be written last.
        for (at, &value) in values.iter().enumerate().rev() {
            let place = strided.place(at);
            strided.buffer[place] = value;
        }
        strided
    }

    /// Position in the buffer of the value with index `at` in index order.
    fn place(&self, at: usize) -> usize {
        let [_, seq_len, heads, width] = self.shape;
        let index = [at / (seq_len * heads * width), at / (heads * width) % seq_len, at / width % heads, at % width];
        index.iter().zip(self.strides).map(|(i, stride)| i * stride).sum()
    }

    /// The tensor's values in index order.
    pub(crate) fn gathered(&self) -> Vec<f32> {
        let count = self.shape.iter().product();
        (0..count).map(|at| self.buffer[self.place(at)]).collect()
    }
}

/// q, k and v of a case packed into one tensor `[batch, seq_len, num_heads + 2 num_kv_heads, head_dim]`; values must be
/// as wide as keys.
pub(crate) fn packed(case: &Case, layout: Layout) -> Strided {
    let (shape, d) = (case.shape, case.shape.head_dim);
    let (q_len, kv_len) = (shape.num_heads * d, shape.num_kv_heads * d);
    let of_token = |token: usize| {
        let part = |x: &'_ [f32], len: usize| x[token * len..][..len].to_vec();
        [part(&case.q, q_len), part(&case.k, kv_len), part(&case.v, kv_len)].concat()
    };
    let values: Vec<f32> = (0..shape.batch * shape.seq_len).flat_map(of_token).collect();
    Strided::new(&values, packed_of(shape), layout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layout_reads_the_same() {
        let shape = [1, 3, 2, 4];
        let values: Vec<f32> = (0..24).map(|x| x as f32).collect();
        for layout in Layout::ALL {
            let strided = Strided::new(&values, shape, layout);
            assert_eq!(strided.gathered(), values, "{layout:?}");
        }
        assert!(Strided::new(&values, shape, Layout::Pitched).buffer[5].is_nan());
    }
}
