//! The C interface: `include/sieve.h` describes each function. No panic leaves it.
#![allow(unsafe_code, reason = "C passes pointers")]
use crate::launch::Loaded;
use crate::plan::Plan;
use crate::request::PlanError;
use std::cell::RefCell;
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::OnceLock;

/// Version of the C interface.
const ABI: u32 = 2;

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// A plan, and its loaded kernels once it was loaded on a GPU.
#[derive(Debug)]
pub struct PlanHandle {
    plan: Plan,
    loaded: OnceLock<Loaded>,
}

/// Returns the version of the C interface.
#[unsafe(no_mangle)]
pub extern "C" fn sieve_abi() -> u32 {
    ABI
}

/// Why the last call of this thread failed.
#[unsafe(no_mangle)]
pub extern "C" fn sieve_error() -> *const c_char {
    LAST_ERROR.with_borrow(|text| text.as_ptr())
}

/// Creates the plan of a request.
///
/// # Safety
/// `request_json` ends with NUL; `plan` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sieve_plan(request_json: *const c_char, plan: *mut *mut PlanHandle) -> c_int {
    guarded(|| {
        if request_json.is_null() || plan.is_null() {
            return Err(null("request_json and plan"));
        }
        // SAFETY: the caller keeps the contract of this function.
        let text = unsafe { CStr::from_ptr(request_json) }.to_string_lossy();
        let handle = PlanHandle { plan: Plan::new(&text)?, loaded: OnceLock::new() };
        // SAFETY: the caller keeps the contract of this function.
        unsafe { *plan = Box::into_raw(Box::new(handle)) };
        Ok(())
    })
}

/// The plan as JSON; `{}` for NULL.
///
/// # Safety
/// `plan` comes from [`sieve_plan`], or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sieve_plan_describe(plan: *const PlanHandle) -> *const c_char {
    // SAFETY: the caller keeps the contract of this function.
    match unsafe { plan.as_ref() } {
        Some(handle) => handle.plan.description.as_ptr(),
        None => c"{}".as_ptr(),
    }
}

/// Loads the plan's kernels on a GPU.
///
/// # Safety
/// `plan` comes from [`sieve_plan`]; the paths end with NUL, or are NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sieve_plan_load(
    plan: *mut PlanHandle,
    device: c_int,
    nvrtc_path: *const c_char,
    cache_folder: *const c_char,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller keeps the contract; a shared reference, since other threads may load or run the plan too.
        let handle = unsafe { plan.cast_const().as_ref() }.ok_or_else(|| null("plan"))?;
        // SAFETY: the caller keeps the contract of this function.
        let [nvrtc, cache] = [nvrtc_path, cache_folder].map(|path| unsafe { path_of(path) });
        let device = usize::try_from(device).map_err(|_| PlanError::Call(format!("device {device} is below 0")))?;
        if handle.loaded.get().is_none() {
            let loaded = Loaded::new(&handle.plan, device, nvrtc, cache)?;
            // Another thread may have been faster, with another device.
            let _ = handle.loaded.set(loaded);
        }
        match handle.loaded.get().map(Loaded::device) {
            Some(other) if other != device => {
                let error = format!("the plan is on device {other}; make another plan for device {device}");
                Err(PlanError::Call(error))
            }
            _ => Ok(()),
        }
    })
}

/// Queues the plan's launches.
///
/// # Safety
/// `plan` comes from [`sieve_plan`], and `pointers` has `num_pointers` elements. Each is the address of a buffer on the
/// plan's GPU, with the bytes that the plan says, which stays until the launches have run; integer inputs have the
/// values that the op's docs require. `stream` is one of this GPU's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sieve_plan_run(
    plan: *const PlanHandle,
    pointers: *const u64,
    num_pointers: usize,
    stream: *mut c_void,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller keeps the contract of this function.
        let handle = unsafe { plan.as_ref() }.ok_or_else(|| null("plan"))?;
        let loaded = handle.loaded.get();
        let loaded =
            loaded.ok_or_else(|| PlanError::Call("the plan was not loaded: call sieve_plan_load".to_owned()))?;
        if pointers.is_null() {
            return Err(null("pointers"));
        }
        // SAFETY: the caller keeps the contract of this function.
        let pointers = unsafe { std::slice::from_raw_parts(pointers, num_pointers) };
        // SAFETY: the caller keeps the contract of this function.
        unsafe { loaded.run(pointers, stream.cast()) }
    })
}

/// Frees a plan.
///
/// # Safety
/// `plan` comes from [`sieve_plan`] and is not used afterwards, or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sieve_plan_free(plan: *mut PlanHandle) {
    if !plan.is_null() {
        // SAFETY: the caller keeps the contract of this function.
        drop(unsafe { Box::from_raw(plan) });
    }
}

/// Runs `work` and returns 0. If it fails or panics, keeps the message for [`sieve_error`] and returns -1.
fn guarded(work: impl FnOnce() -> Result<(), PlanError>) -> c_int {
    let outcome = catch_unwind(AssertUnwindSafe(work));
    let text = match outcome {
        Ok(Ok(())) => return 0,
        Ok(Err(error)) => error.to_string(),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no text");
            format!("a defect of sieve-attention, please report it: {text}")
        }
    };
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    LAST_ERROR.with_borrow_mut(|last| *last = text);
    -1
}

fn null(what: &str) -> PlanError {
    PlanError::Call(format!("{what} must not be NULL"))
}

/// A C string as a path; `None` for NULL.
///
/// # Safety
/// NULL, or a text that ends with NUL and outlives the result.
unsafe fn path_of<'a>(path: *const c_char) -> Option<&'a Path> {
    if path.is_null() {
        return None;
    }
    // SAFETY: the caller keeps the contract of this function.
    let bytes = unsafe { CStr::from_ptr(path) }.to_bytes();
    Some(Path::new(OsStr::from_bytes(bytes)))
}
