//! The program's allocator.
use libmimalloc_sys::{mi_option_set_default, mi_option_t};
use mimalloc::MiMalloc;
use std::alloc::{GlobalAlloc, Layout};
use std::io::Write;

/// mimalloc, which keeps freed buffers. The system's allocator returns large ones at once, and a step on the CPU then
/// spends half its time in page faults. Where there is no memory, the program ends with a sentence in place of a
/// signal.
struct Allocator;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

// SAFETY: all calls go to mimalloc as they are.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are mimalloc's.
        found(unsafe { MiMalloc.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are mimalloc's.
        found(unsafe { MiMalloc.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, from: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the caller's promises are mimalloc's.
        found(unsafe { MiMalloc.realloc(from, layout, new_size) }, new_size)
    }

    unsafe fn dealloc(&self, from: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are mimalloc's.
        unsafe { MiMalloc.dealloc(from, layout) }
    }
}

/// The memory, unless there is none.
fn found(memory: *mut u8, num_bytes: usize) -> *mut u8 {
    if memory.is_null() {
        no_memory(num_bytes);
    }
    memory
}

/// Ends the program with exit code 1. Nothing here takes memory, and nothing is dropped: other threads still run.
#[cold]
fn no_memory(num_bytes: usize) -> ! {
    // The write may fail, and the program ends all the same.
    let _ = write!(
        std::io::stderr(),
        "error: the system has no memory for {num_bytes} more bytes\n  hint: free memory or raise its limit; sieve \
         plan prints what a recipe needs; a training run continues from its last checkpoint with --resume=auto\n"
    );
    #[cfg(unix)]
    // SAFETY: ends the process.
    unsafe {
        nix::libc::_exit(1)
    };
    #[cfg(not(unix))]
    std::process::exit(1)
}

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
