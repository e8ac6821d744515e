//! Calls libraries that panic on damaged input, and turns their panics into errors.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    static IS_GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is inside a call whose panic becomes an error. A panic hook that reports bugs to users checks
/// this and stays silent.
pub fn expects_panic() -> bool {
    IS_GUARDED.get()
}

/// The result of `work`, or `None` if it panicked. Nothing that `work` changed may be used after a panic.
pub(crate) fn guarded<T>(work: impl FnOnce() -> T) -> Option<T> {
    let outer = IS_GUARDED.replace(true);
    let result = catch_unwind(AssertUnwindSafe(work));
    IS_GUARDED.set(outer);
    result.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_gives_none_and_only_guarded_calls_expect_one() {
        assert_eq!(guarded(|| (expects_panic(), 7)), Some((true, 7)));
        assert_eq!(guarded(|| -> u32 { panic!("damaged") }), None);
        assert_eq!(guarded(|| guarded(|| ()).is_some() && expects_panic()), Some(true));
        assert!(!expects_panic());
    }
}
