//! The sizes and strides of a TMA tensor map.

/// A TMA tensor map without its address: a bf16 tensor `[batch, rows, width]` that is read in tiles with the 128-byte
/// swizzle. Elements outside the tensor are read as zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MapLayout {
    /// Shape of the tensor, `[batch, rows, width]`.
    pub shape: [usize; 3],
    /// Strides of batch and rows in elements, multiples of 8; the stride of columns is 1.
    pub strides: [usize; 2],
    /// Rows and columns of a tile that TMA copies.
    pub tile: [usize; 2],
}
