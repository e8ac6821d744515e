//! The program's allocator.
use libmimalloc_sys::{mi_option_set_default, mi_option_t};
use mimalloc::MiMalloc;

/// mimalloc keeps freed buffers. The system's allocator returns large ones at once, and a step on the CPU then spends
/// half its time in page faults.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

/// mimalloc's `mi_option_purge_delay`, which the bindings do not name: milliseconds until freed memory goes back to the
/// system, -1 for never.
const PURGE_DELAY: mi_option_t = 15;

/// From now on freed memory stays with the program, unless `MIMALLOC_PURGE_DELAY` is set. A training step on the CPU
/// frees and allocates the same buffers, and page faults of those that went back take a tenth of it.
pub(crate) fn keep_freed_memory() {
    // SAFETY: stores one aligned number, which other threads only read; any number is a valid delay.
    unsafe { mi_option_set_default(PURGE_DELAY, -1) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use libmimalloc_sys::mi_option_get;

    #[test]
    fn the_option_is_the_purge_delay() {
        // SAFETY: reads one number.
        let delay = || unsafe { mi_option_get(PURGE_DELAY) };
        // No other option of mimalloc 3 has this default.
        assert_eq!(delay(), 1000);
        keep_freed_memory();
        assert_eq!(delay(), -1);
    }
}
