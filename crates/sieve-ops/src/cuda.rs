//! Arguments of the attention kernels.
pub(crate) mod attention;
pub(crate) mod dma;
