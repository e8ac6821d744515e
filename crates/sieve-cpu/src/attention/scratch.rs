//! Scratch buffers that tasks reuse one after another.

use std::sync::{Mutex, PoisonError};

/// Buffers for as many tasks as run at once; making them anew for each task costs more than small tasks do.
pub(crate) struct Pool<T> {
    free: Mutex<Vec<Box<T>>>,
    make: fn(usize) -> T,
    head_dim: usize,
}

impl<T> Pool<T> {
    /// A pool whose buffers come from `make(head_dim)`.
    pub(crate) fn new(make: fn(usize) -> T, head_dim: usize) -> Self {
        Self {
            free: Mutex::new(Vec::new()),
            make,
            head_dim,
        }
    }

    /// Runs `work` with a buffer of its own, in the state some earlier task left it in.
    pub(crate) fn lend<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        let free = || self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = free().pop();
        let mut buffer = taken.unwrap_or_else(|| Box::new((self.make)(self.head_dim)));
        let result = work(&mut buffer);
        free().push(buffer);
        result
    }
}
