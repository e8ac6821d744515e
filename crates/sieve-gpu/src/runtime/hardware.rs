//! The GPUs that kernels run on.

/// The properties of a GPU that launches depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hardware {
    /// CUDA compute capability, for example (9, 0).
    pub compute_capability: (u32, u32),
    /// Number of streaming multiprocessors.
    pub num_multiprocessors: usize,
    /// Most shared memory of a thread block, in bytes.
    pub max_shared_bytes: usize,
    /// Most threads that a thread block may have.
    pub max_threads: usize,
    /// Largest grid along x, y and z.
    pub max_grid: [usize; 3],
}

impl Hardware {
    /// An A100, which takes the portable kernels.
    pub const AMPERE: Self = Self {
        compute_capability: (8, 0),
        num_multiprocessors: 108,
        max_shared_bytes: 163 << 10,
        max_threads: 1024,
        max_grid: [i32::MAX as usize, 65535, 65535],
    };

    /// An H100 or H200, which takes the Hopper kernels where there are any.
    pub const HOPPER: Self =
        Self { compute_capability: (9, 0), num_multiprocessors: 132, max_shared_bytes: 227 << 10, ..Self::AMPERE };

    /// An RTX 5090: a GPU of the least shared memory, which takes the smallest tilings.
    pub(crate) const SMALLEST: Self =
        Self { compute_capability: (12, 0), num_multiprocessors: 170, max_shared_bytes: 99 << 10, ..Self::AMPERE };

    /// The usual GPU of an architecture that kernels are compiled ahead of time for; `None` for any other architecture.
    /// Their multiprocessors are those of an A100, RTX 3090, L40S, H100, B200 and RTX 5090.
    pub fn of_arch(arch: &str) -> Option<Self> {
        let (compute_capability, num_multiprocessors, shared_kib) = match arch {
            "sm_80" => return Some(Self::AMPERE),
            "sm_86" => ((8, 6), 82, 99),
            "sm_89" => ((8, 9), 142, 99),
            "sm_90a" => return Some(Self::HOPPER),
            "sm_100a" => ((10, 0), 148, 227),
            "sm_120a" => return Some(Self::SMALLEST),
            _ => return None,
        };
        let max_shared_bytes = shared_kib << 10;
        Some(Self { compute_capability, num_multiprocessors, max_shared_bytes, ..Self::AMPERE })
    }

    /// The architecture's name for compilers: `sm_80`, `sm_90a`. The `a` permits instructions of that one alone.
    pub fn arch(&self) -> String {
        let (major, minor) = self.compute_capability;
        let suffix = if major >= 9 { "a" } else { "" };
        format!("sm_{major}{minor}{suffix}")
    }
}
