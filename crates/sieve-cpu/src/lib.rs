//! CPU kernels on plain slices.
