//! How much memory a task's questions need.

/// Sizes of asking a task, for an estimate of its memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TaskSize {
    /// Tokens of the longest text of a forward pass.
    pub longest: usize,
    /// Most tokens of one forward pass.
    pub pass: usize,
    /// Tokens of a KV cache; 0 without one.
    pub cached: usize,
    /// KV caches held at the same time.
    pub num_caches: usize,
}

impl TaskSize {
    /// Each field is the larger one of the two.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self {
            longest: self.longest.max(other.longest),
            pass: self.pass.max(other.pass),
            cached: self.cached.max(other.cached),
            num_caches: self.num_caches.max(other.num_caches),
        }
    }
}
