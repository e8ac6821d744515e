//! Scratch buffers that tasks reuse one after another.

use std::sync::{Mutex, PoisonError};

/// Buffers that tasks borrow, as many as run at once: allocating them for each task would take longer than small tasks.
pub(crate) struct Pool<T> {
    free: Mutex<Vec<Box<T>>>,
    make: fn(usize) -> T,
    head_dim: usize,
}

impl<T> Pool<T> {
    /// A pool whose buffers come from `make(head_dim)`.
    pub(crate) fn new(make: fn(usize) -> T, head_dim: usize) -> Self {
        Self { free: Mutex::new(Vec::new()), make, head_dim }
    }

    /// Runs `work` with a buffer that no other task uses meanwhile; it holds what an earlier task left there.
    pub(crate) fn lend<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        let free = || self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = free().pop();
        let mut buffer = taken.unwrap_or_else(|| Box::new((self.make)(self.head_dim)));
        let result = work(&mut buffer);
        free().push(buffer);
        result
    }
}
