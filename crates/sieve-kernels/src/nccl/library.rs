//! NCCL's functions, loaded at first use.
//!
//! They are not loaded through cudarc, which looks for `libnccl.so` only: NCCL's run-time packages contain
//! `libnccl.so.2` only.
use cudarc::nccl::sys::{cudaStream_t, ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};
use libloading::Library;
use sieve_gpu::KernelError;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

/// Name of the library in error messages.
pub(super) const NAME: &str = "nccl";

/// File names of the library; the first that can be opened is used.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

type From = *const c_void;
type To = *mut c_void;

type Sum = unsafe extern "C" fn(From, To, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t) -> c_int;

/// The functions that are used. They return an `ncclResult_t`, 0 for success.
pub(super) struct Nccl {
    pub(super) get_unique_id: unsafe extern "C" fn(*mut ncclUniqueId) -> c_int,
    pub(super) comm_init_rank: unsafe extern "C" fn(*mut ncclComm_t, c_int, ncclUniqueId, c_int) -> c_int,
    pub(super) group_start: unsafe extern "C" fn() -> c_int,
    pub(super) group_end: unsafe extern "C" fn() -> c_int,
    pub(super) all_reduce: Sum,
    pub(super) reduce_scatter: Sum,
    pub(super) reduce:
        unsafe extern "C" fn(From, To, usize, ncclDataType_t, ncclRedOp_t, c_int, ncclComm_t, cudaStream_t) -> c_int,
    pub(super) all_gather: unsafe extern "C" fn(From, To, usize, ncclDataType_t, ncclComm_t, cudaStream_t) -> c_int,
    pub(super) broadcast:
        unsafe extern "C" fn(From, To, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t) -> c_int,
    pub(super) send: unsafe extern "C" fn(From, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t) -> c_int,
    pub(super) receive: unsafe extern "C" fn(To, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t) -> c_int,
    pub(super) comm_abort: unsafe extern "C" fn(ncclComm_t) -> c_int,
    /// Writes the communicator's state as an `ncclResult_t`.
    pub(super) get_async_error: unsafe extern "C" fn(ncclComm_t, *mut c_int) -> c_int,
    get_version: unsafe extern "C" fn(*mut c_int) -> c_int,
    get_error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    _library: Library,
}

impl Nccl {
    /// The NCCL library, opened once.
    pub(super) fn get() -> Result<&'static Self, KernelError> {
        static FOUND: OnceLock<Result<Nccl, String>> = OnceLock::new();
        let found = FOUND.get_or_init(|| Self::open(&NAMES));
        found.as_ref().map_err(KernelError::no_nccl)
    }

    /// Opens the first of these libraries that can be opened.
    fn open(names: &[&str]) -> Result<Self, String> {
        let mut reasons = Vec::new();
        for name in names {
            // SAFETY: NCCL's initialisers run, as in every program that links it.
            match unsafe { Library::new(*name) } {
                Ok(library) => {
                    return Self::of(library).map_err(|error| format!("{name}: {}", with_source(&error)));
                }
                Err(error) => reasons.push(with_source(&error)),
            }
        }
        Err(reasons.join("; "))
    }

    /// Finds all functions in an opened library.
    fn of(library: Library) -> Result<Self, libloading::Error> {
        // SAFETY: the types are nccl.h's; no release since 2.0 has changed them for these functions.
        unsafe {
            Ok(Self {
                get_unique_id: *library.get(b"ncclGetUniqueId")?,
                comm_init_rank: *library.get(b"ncclCommInitRank")?,
                group_start: *library.get(b"ncclGroupStart")?,
                group_end: *library.get(b"ncclGroupEnd")?,
                all_reduce: *library.get(b"ncclAllReduce")?,
                reduce_scatter: *library.get(b"ncclReduceScatter")?,
                reduce: *library.get(b"ncclReduce")?,
                all_gather: *library.get(b"ncclAllGather")?,
                broadcast: *library.get(b"ncclBroadcast")?,
                send: *library.get(b"ncclSend")?,
                receive: *library.get(b"ncclRecv")?,
                comm_abort: *library.get(b"ncclCommAbort")?,
                get_async_error: *library.get(b"ncclCommGetAsyncError")?,
                get_version: *library.get(b"ncclGetVersion")?,
                get_error_string: *library.get(b"ncclGetErrorString")?,
                _library: library,
            })
        }
    }

    /// The library's version as one number, 23102 for 2.31.2.
    pub(super) fn version(&self) -> Option<c_int> {
        let mut version = 0;
        // SAFETY: writes one number.
        let result = unsafe { (self.get_version)(&mut version) };
        (result == 0).then_some(version)
    }

    /// Fails with NCCL's own text if the `result` of its function `call` is not success.
    pub(super) fn check(&self, call: &str, result: c_int) -> Result<(), String> {
        if result == 0 {
            return Ok(());
        }
        // SAFETY: NCCL returns a static text for any number.
        let text = unsafe { CStr::from_ptr((self.get_error_string)(result)) };
        Err(format!("{call}: {}", text.to_string_lossy()))
    }

    /// Like [`check`](Self::check), but returns a [`KernelError`] with a hint.
    pub(super) fn require(&self, call: &str, result: c_int) -> Result<(), KernelError> {
        self.check(call, result).map_err(|reason| {
            failed(format!(
                "{reason}\n  hint: NCCL_DEBUG=INFO says more; NCCL_SOCKET_IFNAME names the network between hosts"
            ))
        })
    }
}

/// An error with the system's reason for it.
fn with_source(error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

impl std::fmt::Debug for Nccl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(NAME)
    }
}

pub(super) fn failed(reason: String) -> KernelError {
    KernelError::Launch { kernel: NAME, reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_for_a_missing_library_has_the_names_that_were_tried() {
        let reason = Nccl::open(&["libnccl.so.none", "libnccl-none.so"]).expect_err("none is there");
        let text = KernelError::no_nccl(reason).to_string();
        for part in ["libnccl.so.none", "libnccl-none.so", "nvidia-nccl-cu13", "hint"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn a_library_without_the_functions_is_named() {
        // The C library is always there, and has no function of NCCL.
        let error = Nccl::open(&["libc.so.6"]).expect_err("no NCCL");
        assert!(error.contains("libc.so.6") && error.contains("ncclGetUniqueId"), "{error}");
    }
}
