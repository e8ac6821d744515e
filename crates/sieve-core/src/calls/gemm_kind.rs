//! The three GEMMs of a linear layer.

/// Which operands of a row-major GEMM are transposed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GemmKind {
    /// `x wᵀ`: `x [m, k]`, `w [n, k]`. A projection with a `[out, in]` weight.
    Nt,
    /// `x w`: `x [m, k]`, `w [k, n]`. The gradient of a projection's input.
    Nn,
    /// `xᵀ w`: `x [k, m]`, `w [k, n]`. The gradient of a projection's weight.
    Tn,
}
