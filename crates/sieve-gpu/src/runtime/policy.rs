//! Which kernels calls take, and how these sum.

/// What a caller may choose about the kernels of a call. Tensors carry it into the launches
/// ([`CudaTensor::under`](crate::CudaTensor::under)); attention uses the queries' policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KernelPolicy {
    /// Order of the backward kernels' sums.
    pub sums: SumOrder,
    /// Families of attention kernels that may be taken.
    pub families: KernelFamilies,
    /// Who arrives at a barrier of the Hopper backward kernels.
    pub arrivals: Arrivals,
    /// About how many thread blocks share a key tile in backward passes; `None`: as many as finish first in a
    /// simulation. For checks and measurements.
    pub blocks_per_tile: Option<usize>,
}

impl KernelPolicy {
    /// The fastest kernels of the device.
    pub const DEFAULT: Self = Self {
        sums: SumOrder::Any,
        families: KernelFamilies::All,
        arrivals: Arrivals::Warp,
        blocks_per_tile: None,
    };
}

/// In which order sums over many keys or queries are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SumOrder {
    /// Whatever order the hardware happens to take: fastest, last bits vary from run to run.
    #[default]
    Any,
    /// Always the same order, so that two runs are bit-equal. Hopper's kernels add in turns; the portable ones use no
    /// float atomics and compute dq in a separate pass.
    Fixed,
}

/// Families of attention kernels that a call may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KernelFamilies {
    /// The best for the device.
    #[default]
    All,
    /// The portable one, to cross-check one family by the other.
    Portable,
}

/// Which lanes arrive at a barrier of the Hopper backward kernels once they have stored row statistics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Arrivals {
    /// One lane for its warp.
    #[default]
    Warp,
    /// Each lane itself. Slower; for racecheck, which credits an arrival to its lane alone.
    EveryLane,
}
