//! Arithmetic on tensors' shapes and strides.
use std::ops::Range;

/// Row-major strides of a shape, in elements.
pub fn contiguous_strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim];
    }
    strides
}

/// Whether the strides are row-major without gaps. Strides of dimensions of size 1 do not matter, as no index uses
/// them. An empty tensor is contiguous.
pub(crate) fn strides_are_contiguous(shape: &[usize], strides: &[usize]) -> bool {
    if shape.contains(&0) {
        return true;
    }
    let expected = contiguous_strides(shape);
    shape.iter().zip(strides).zip(expected).all(|((&size, &stride), expected)| size == 1 || stride == expected)
}

/// The number of elements that a buffer needs for every index of a strided tensor.
pub(crate) fn required_elements(shape: &[usize], strides: &[usize]) -> usize {
    if shape.contains(&0) {
        return 0;
    }
    let last: usize = shape.iter().zip(strides).map(|(size, stride)| (size - 1) * stride).sum();
    last + 1
}

/// Divides `0..len` into ranges of at most `most` (at least 1), each for one launch.
pub(crate) fn ranges(len: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let most = most.clamp(1, len);
    (0..len).step_by(most).map(move |first| first..(first + most).min(len))
}

/// Strides of a `[batch, seq_len, heads, width]` tensor whose last two dimensions have no gaps, such as a slice of
/// heads of a packed tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowLayout {
    /// Elements from one batch row to the next.
    pub(crate) batch_stride: usize,
    /// Elements from one token to the next.
    pub(crate) token_stride: usize,
}

/// The [`RowLayout`] of a `[batch, seq_len, heads, width]` tensor. `None` when heads or columns have gaps between them,
/// when tokens overlap, or when a stride is not a multiple of `align` elements, which vector loads need.
pub(crate) fn row_layout(shape: [usize; 4], strides: [usize; 4], align: usize) -> Option<RowLayout> {
    let [batch, seq_len, heads, width] = shape;
    let columns_fit = width == 1 || strides[3] == 1;
    let heads_fit = heads == 1 || strides[2] == width;
    // The stride of a dimension of size 1 may have any value; the kernel gets the stride of a contiguous tensor.
    let token_stride = if seq_len == 1 { heads * width } else { strides[1] };
    let batch_stride = if batch == 1 { seq_len * token_stride } else { strides[0] };
    let apart =
        token_stride >= heads * width && (batch == 1 || batch_stride >= (seq_len - 1) * token_stride + heads * width);
    let aligned = token_stride.is_multiple_of(align) && batch_stride.is_multiple_of(align);
    (columns_fit && heads_fit && apart && aligned).then_some(RowLayout { batch_stride, token_stride })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contiguous_strides_are_row_major() {
        assert_eq!(contiguous_strides(&[2, 3, 5]), [15, 5, 1]);
        assert_eq!(contiguous_strides(&[]), Vec::<usize>::new());
    }

    #[test]
    fn a_buffer_reaches_to_the_last_element_of_a_view() {
        assert_eq!(required_elements(&[2, 3, 5], &[15, 5, 1]), 30);
        assert_eq!(required_elements(&[2, 3, 5], &[64, 8, 1]), 64 + 16 + 5);
        assert_eq!(required_elements(&[4, 7], &[0, 1]), 7);
        assert_eq!(required_elements(&[4, 0], &[9, 1]), 0);
        assert_eq!(required_elements(&[], &[]), 1);
    }

    #[test]
    fn ranges_cover_a_row_once() {
        for (seq_len, most) in [(1, 4096), (4096, 4096), (4097, 4096), (10_000, 1000), (5, 0)] {
            let mut next = 0;
            for range in ranges(seq_len, most) {
                assert_eq!(range.start, next);
                assert!((1..=most.max(1)).contains(&range.len()));
                next = range.end;
            }
            assert_eq!(next, seq_len);
        }
    }

    #[test]
    fn pitched_sliced_and_expanded_tensors_are_not_contiguous() {
        assert!(strides_are_contiguous(&[2, 3, 5], &[15, 5, 1]));
        assert!(!strides_are_contiguous(&[2, 3, 96], &[384, 128, 1]), "pitched rows");
        assert!(!strides_are_contiguous(&[4, 7], &[0, 1]), "expanded");
        assert!(!strides_are_contiguous(&[4, 7], &[1, 4]), "transposed");
        assert!(strides_are_contiguous(&[1, 7], &[999, 1]), "a size of 1 has no neighbour");
        assert!(strides_are_contiguous(&[0, 7], &[3, 2]), "nothing to read");
    }

    #[test]
    fn a_slice_of_packed_heads_has_a_row_layout() {
        // Two KV heads of width 64 out of a packed row of 8 heads.
        let layout = row_layout([3, 10, 2, 64], [10 * 512, 512, 64, 1], 8);
        assert_eq!(layout, Some(RowLayout { batch_stride: 5120, token_stride: 512 }));
        assert_eq!(row_layout([3, 10, 2, 96], [10 * 256, 256, 128, 1], 8), None, "pitched heads");
        assert_eq!(row_layout([3, 10, 2, 64], [0, 128, 64, 1], 8), None, "expanded batch");
        assert_eq!(row_layout([3, 10, 2, 64], [64, 192, 1920, 1], 8), None, "heads outermost");
        assert_eq!(row_layout([1, 10, 1, 12], [120, 12, 12, 1], 8), None, "rows of 24 bytes are not 16-byte aligned");
        assert_eq!(
            row_layout([1, 1, 2, 64], [7, 9, 64, 1], 8),
            Some(RowLayout { batch_stride: 128, token_stride: 128 })
        );
    }
}
