//! Options for the kernels of a call.

/// Options for the kernels of a call. On a GPU they are a property
/// of its tensors (`CudaTensor::under` of sieve-gpu); attention uses the policy of the queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KernelPolicy {
    /// Whether backward kernels add their sums in a fixed order.
    pub sums: SumOrder,
    /// Families of attention kernels that a call may use.
    pub families: KernelFamilies,
    /// The order in which passes over whole rows go through keys that are chosen one by one, and through pooled keys.
    pub keys: KeyOrder,
    /// Lanes that arrive at a barrier of the Hopper backward kernels.
    pub arrivals: Arrivals,
    /// For checks and measurements: about how many thread blocks share a key tile in backward passes. With `None` a
    /// simulation finds the fastest number.
    pub blocks_per_tile: Option<usize>,
}

impl KernelPolicy {
    /// The fastest kernels of the device, in a constant.
    pub const DEFAULT: Self = Self {
        sums: SumOrder::Any,
        families: KernelFamilies::All,
        keys: KeyOrder::Leaving,
        arrivals: Arrivals::Warp,
        blocks_per_tile: None,
    };
}

/// The order of sums over many keys or queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SumOrder {
    /// The order of the hardware's atomic adds: fastest, but the last bits differ from run to run.
    #[default]
    Any,
    /// Always the same order, so that two runs have equal bits. Thread blocks of the Hopper kernels wait for their turn
    /// to add; the portable kernels use no float atomics and compute dq in a separate pass.
    Fixed,
}

/// Families of attention kernels that a call may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KernelFamilies {
    /// The family that is fastest on the device.
    #[default]
    All,
    /// The portable family alone, to compare the families.
    Portable,
}

/// The order of a query's sums over keys that are chosen one by one (DMA), and over the pooled keys whose probabilities
/// choose blocks (NSA, InfLLM-V2), in passes over whole rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KeyOrder {
    /// By the query that no longer sees the key: fastest, and the only order that backward passes take. It depends on
    /// later tokens.
    #[default]
    Leaving,
    /// By what was known when the query's epoch of 128 tokens began (`kernels/common/epoch_order.cuh`), so that a query
    /// that is decoded alone has the same order. Pooled keys come from the document's first on, and NSA compresses
    /// blocks and adds up its gates and its output in the order of a token that is decoded alone.
    Epochs,
}

impl KeyOrder {
    /// Queries of an epoch, and keys of a stage.
    pub const EPOCH: usize = 128;
}

/// Which lanes arrive at a barrier of the Hopper backward kernels once they have stored row statistics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Arrivals {
    /// One lane arrives for its whole warp.
    #[default]
    Warp,
    /// Every lane. It is slower, but compute-sanitizer's racecheck takes an arrival as ordering its own lane alone.
    EveryLane,
}
