//! A GPU's clocks, memory errors and temperature from the driver's management library (NVML), where it is installed.
use cudarc::driver::result as driver;
use cudarc::driver::sys::cuDeviceGetPCIBusId;
use libloading::Library;
use serde::{Deserialize, Serialize};
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

const NAMES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];

/// Clock of the multiprocessors: `NVML_CLOCK_SM` of nvml.h.
const CLOCK_OF_MULTIPROCESSORS: c_int = 1;
/// Sensor of the GPU's temperature: `NVML_TEMPERATURE_GPU` of nvml.h, in degrees Celsius.
const TEMPERATURE_OF_GPU: c_int = 0;
/// Errors that ECC could not correct: `NVML_MEMORY_ERROR_TYPE_UNCORRECTED` of nvml.h.
const UNCORRECTED: c_int = 1;
/// `NVML_VOLATILE_ECC`: errors since the driver was loaded.
const SINCE_DRIVER_LOAD: c_int = 0;

type Gpu = *mut c_void;
type Query = unsafe extern "C" fn(Gpu, c_int, *mut c_uint) -> c_int;

/// State of a GPU; `None` for a value that the driver does not report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuState {
    /// Current and highest clock of its multiprocessors, MHz.
    pub clocks_mhz: Option<[u32; 2]>,
    /// Memory errors that ECC could not correct, since the driver was loaded.
    pub uncorrected_ecc_errors: Option<u64>,
    /// GPU temperature in degrees Celsius.
    pub temperature: Option<u32>,
}

impl GpuState {
    /// Reads the state of a CUDA device; `None` if there is no NVML or no such device.
    pub fn of(device_index: usize) -> Option<Self> {
        // SAFETY: NVML's initialisers run, as in every program that links it.
        let library = NAMES.iter().find_map(|name| unsafe { Library::new(*name) }.ok())?;
        // NVML's device numbers ignore CUDA_VISIBLE_DEVICES, so the device is found by its PCI address.
        let device = driver::device::get(device_index as i32).ok()?;
        let mut bus: [c_char; 32] = [0; 32];
        // SAFETY: writes at most `bus.len()` bytes, the ending NUL included.
        let found = unsafe { cuDeviceGetPCIBusId(bus.as_mut_ptr(), bus.len() as c_int, device) };
        found.result().ok()?;
        // SAFETY: these are the types of the functions in nvml.h; the pointers passed are valid for writes.
        unsafe {
            let init = library.get::<unsafe extern "C" fn() -> c_int>(b"nvmlInit_v2").ok()?;
            let shutdown = library.get::<unsafe extern "C" fn() -> c_int>(b"nvmlShutdown").ok()?;
            let find_by_bus = library
                .get::<unsafe extern "C" fn(*const c_char, *mut Gpu) -> c_int>(b"nvmlDeviceGetHandleByPciBusId_v2")
                .ok()?;
            if init() != 0 {
                return None;
            }
            let mut gpu = std::ptr::null_mut();
            let state = (find_by_bus(bus.as_ptr(), &mut gpu) == 0).then(|| Self::read(&library, gpu));
            shutdown();
            state
        }
    }

    /// Reads the values of a GPU one by one.
    ///
    /// # Safety
    /// The library was initialised, and `gpu` is one of its handles.
    unsafe fn read(library: &Library, gpu: Gpu) -> Self {
        type Count = unsafe extern "C" fn(Gpu, c_int, c_int, *mut c_ulonglong) -> c_int;
        let query = |function: &[u8], which: c_int| {
            let mut value = 0;
            // SAFETY: as above; writes one number.
            let result = unsafe { library.get::<Query>(function).ok()?(gpu, which, &mut value) };
            (result == 0).then_some(value)
        };
        let clock = query(b"nvmlDeviceGetClockInfo", CLOCK_OF_MULTIPROCESSORS);
        let highest_clock = query(b"nvmlDeviceGetMaxClockInfo", CLOCK_OF_MULTIPROCESSORS);
        let mut errors = 0;
        // SAFETY: as above; writes one number.
        let result = unsafe {
            let count = library.get::<Count>(b"nvmlDeviceGetTotalEccErrors").ok();
            count.map(|count| count(gpu, UNCORRECTED, SINCE_DRIVER_LOAD, &mut errors))
        };
        Self {
            clocks_mhz: clock.zip(highest_clock).map(<[u32; 2]>::from),
            uncorrected_ecc_errors: (result == Some(0)).then_some(errors),
            temperature: query(b"nvmlDeviceGetTemperature", TEMPERATURE_OF_GPU),
        }
    }
}
