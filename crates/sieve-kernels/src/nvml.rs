//! State of a GPU from the driver's management library (NVML): optional, read once at the start of a run.
use cudarc::driver::result as driver;
use cudarc::driver::sys::cuDeviceGetPCIBusId;
use libloading::Library;
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

const NAMES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];

/// `NVML_CLOCK_SM`.
const CLOCK_OF_MULTIPROCESSORS: c_int = 1;
/// `NVML_TEMPERATURE_GPU`.
const TEMPERATURE_OF_GPU: c_int = 0;
/// `NVML_MEMORY_ERROR_TYPE_UNCORRECTED` and `NVML_VOLATILE_ECC`: since the driver was loaded.
const UNCORRECTED: c_int = 1;
const SINCE_DRIVER: c_int = 0;

type Gpu = *mut c_void;
type Ask = unsafe extern "C" fn(Gpu, c_int, *mut c_uint) -> c_int;

/// State of a GPU; what the driver does not say is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuState {
    /// Present and highest clock of its multiprocessors, MHz.
    pub clocks_mhz: Option<[u32; 2]>,
    /// Memory errors that ECC could not correct, since the driver was loaded.
    pub uncorrected_ecc_errors: Option<u64>,
    /// Degrees Celsius.
    pub temperature: Option<u32>,
}

impl GpuState {
    /// Of the CUDA device of this number; `None` where there is no NVML or no such device.
    pub fn of(device_index: usize) -> Option<Self> {
        // SAFETY: NVML's initialisers run, as in every program that links it.
        let library = NAMES.iter().find_map(|name| unsafe { Library::new(*name) }.ok())?;
        // CUDA_VISIBLE_DEVICES numbers GPUs in another way than NVML does: the bus address is the same for both.
        let device = driver::device::get(device_index as i32).ok()?;
        let mut bus: [c_char; 32] = [0; 32];
        // SAFETY: writes a text of at most as many bytes with its end.
        let found = unsafe { cuDeviceGetPCIBusId(bus.as_mut_ptr(), bus.len() as c_int, device) };
        found.result().ok()?;
        // SAFETY: the types are those of nvml.h for these names; numbers and handles are written where they point.
        unsafe {
            let init = library.get::<unsafe extern "C" fn() -> c_int>(b"nvmlInit_v2").ok()?;
            let shutdown = library.get::<unsafe extern "C" fn() -> c_int>(b"nvmlShutdown").ok()?;
            let find = library
                .get::<unsafe extern "C" fn(*const c_char, *mut Gpu) -> c_int>(b"nvmlDeviceGetHandleByPciBusId_v2")
                .ok()?;
            if init() != 0 {
                return None;
            }
            let mut gpu = std::ptr::null_mut();
            let state = (find(bus.as_ptr(), &mut gpu) == 0).then(|| Self::read(&library, gpu));
            shutdown();
            state
        }
    }

    /// # Safety
    /// `gpu` is a handle of the library, which was initialised.
    unsafe fn read(library: &Library, gpu: Gpu) -> Self {
        type Count = unsafe extern "C" fn(Gpu, c_int, c_int, *mut c_ulonglong) -> c_int;
        let ask = |name: &[u8], which: c_int| {
            let mut value = 0;
            // SAFETY: as above; writes one number.
            let asked = unsafe { library.get::<Ask>(name).ok()?(gpu, which, &mut value) };
            (asked == 0).then_some(value)
        };
        let now = ask(b"nvmlDeviceGetClockInfo", CLOCK_OF_MULTIPROCESSORS);
        let most = ask(b"nvmlDeviceGetMaxClockInfo", CLOCK_OF_MULTIPROCESSORS);
        let mut errors = 0;
        // SAFETY: as above; writes one number.
        let counted = unsafe {
            let count = library.get::<Count>(b"nvmlDeviceGetTotalEccErrors").ok();
            count.map(|count| count(gpu, UNCORRECTED, SINCE_DRIVER, &mut errors))
        };
        Self {
            clocks_mhz: now.zip(most).map(|(now, most)| [now, most]),
            uncorrected_ecc_errors: (counted == Some(0)).then_some(errors),
            temperature: ask(b"nvmlDeviceGetTemperature", TEMPERATURE_OF_GPU),
        }
    }
}
