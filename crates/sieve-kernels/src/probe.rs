//! Checks that CUDA can be used on this machine. It runs before any CubeCL client is made, because making one without
//! CUDA panics.
use crate::locked::lock;
use cubecl::cuda::install;
use cudarc::driver::result as driver;
use cudarc::driver::sys::{self as driver_sys, CUdevice_attribute};
use sieve_gpu::ahead_of_time::{driver_version, installed_nvrtc};
use sieve_gpu::{CudaVersion, KernelError};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex};

/// Headers that Burn's kernels include when they are compiled at run time.
const HEADERS: [&str; 2] = ["cuda_bf16.h", "cuda_runtime.h"];

/// A working CUDA installation: versions, headers and GPUs.
#[derive(Debug, Clone, PartialEq)]
pub struct CudaReport {
    /// Newest CUDA version that the driver supports.
    pub driver: CudaVersion,
    /// Version of the run-time compiler NVRTC.
    pub nvrtc: CudaVersion,
    /// Folder of the CUDA headers.
    pub include_folder: PathBuf,
    /// The GPUs of this machine, in the driver's order.
    pub devices: Vec<DeviceReport>,
}

/// Properties of one GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceReport {
    /// Index of the GPU, as in `--device cuda:N`.
    pub index: usize,
    /// Name of the GPU, as `nvidia-smi` prints it.
    pub name: String,
    /// Major number of the compute capability.
    pub major: u32,
    /// Minor number of the compute capability.
    pub minor: u32,
    /// Number of streaming multiprocessors.
    pub num_multiprocessors: usize,
    /// Size of the GPU's memory in bytes.
    pub total_memory_bytes: u64,
}

impl DeviceReport {
    /// The architecture for which CubeCL compiles, as nvcc spells it: `sm_80`, `sm_90a`.
    pub fn arch(&self) -> String {
        let suffix = if self.major >= 9 { "a" } else { "" };
        format!("sm_{}{}{suffix}", self.major, self.minor)
    }

    /// Bytes of a device's memory that are free now, and bytes in total. Creates the device's primary context (about
    /// 0.2 s on first use), which CubeCL's client later shares.
    ///
    /// # Errors
    /// [`KernelError::Installation`] when the driver does not answer.
    pub fn memory_bytes(device: usize) -> Result<(u64, u64), KernelError> {
        let handle = driver::device::get(device as i32).map_err(KernelError::driver)?;
        // SAFETY: the handle comes from the driver. The context is never released, because the client shares it.
        let context = unsafe { driver::primary_ctx::retain(handle) }.map_err(KernelError::driver)?;
        // SAFETY: the context was just retained.
        unsafe { driver::ctx::set_current(context) }.map_err(KernelError::driver)?;
        let (free, total) = driver::mem_get_info().map_err(KernelError::driver)?;
        Ok((free as u64, total as u64))
    }
}

impl CudaReport {
    /// The device of index `wanted`.
    ///
    /// # Errors
    /// [`KernelError::WrongDevice`] if there is none; a GPU of a compute capability below 8.0.
    pub fn device(&self, wanted: usize) -> Result<&DeviceReport, KernelError> {
        let count = self.devices.len();
        let device = self.devices.get(wanted).ok_or(KernelError::WrongDevice { wanted, count })?;
        if device.major < 8 {
            let DeviceReport { index, name, major, minor, .. } = device;
            return Err(KernelError::Installation(format!(
                "device {index} ({name}) has compute capability {major}.{minor}; the kernels need 8.0 (Ampere) or \
                 newer\n  hint: use a different GPU, or --device cpu"
            )));
        }
        Ok(device)
    }

    /// Looks for the driver, the run-time compiler, the headers and the GPUs, in this order. Creates neither a client
    /// nor a context.
    ///
    /// # Errors
    /// The first of them that is missing, with how to install it.
    pub fn probe() -> Result<CudaReport, KernelError> {
        // SAFETY: only tries to open the library.
        if !unsafe { driver_sys::is_culib_present() } {
            return Err(KernelError::NoDriver);
        }
        driver::init().map_err(KernelError::driver)?;
        let count = driver::device::get_count().map_err(KernelError::driver)?;
        if count == 0 {
            return Err(KernelError::NoDevice);
        }
        let (nvrtc, driver) = (installed_nvrtc()?, driver_version()?);
        check_versions(driver, nvrtc)?;
        let include_folder = check_headers(install::cuda_path().as_deref())?;
        let devices = (0..count as usize).map(describe).collect::<Result<_, _>>()?;
        Ok(CudaReport { driver, nvrtc, include_folder, devices })
    }
}

/// Text of a version that NVIDIA's libraries report as one number: `2.31.2` for 23102.
pub(crate) fn version_text(number: usize) -> String {
    format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100)
}

/// Major and minor compute capability of a device; the driver is queried once for each device.
pub(crate) fn compute_capability(device: usize) -> Option<(u32, u32)> {
    static KNOWN: LazyLock<Mutex<HashMap<usize, (u32, u32)>>> = LazyLock::new(Mutex::default);
    let mut known = lock(&KNOWN);
    if let Some(found) = known.get(&device) {
        return Some(*found);
    }
    let report = describe(device).ok()?;
    known.insert(device, (report.major, report.minor));
    Some((report.major, report.minor))
}

/// Fails if NVRTC is newer than the driver, which loads only PTX of its own CUDA version or an older one.
fn check_versions(driver: CudaVersion, nvrtc: CudaVersion) -> Result<(), KernelError> {
    if nvrtc > driver { Err(KernelError::nvrtc_too_new(nvrtc, driver)) } else { Ok(()) }
}

/// The include folder that CubeCL passes to NVRTC. Fails if one of [`HEADERS`] is missing there.
pub(crate) fn check_headers(cuda_path: Option<&Path>) -> Result<PathBuf, KernelError> {
    let missing = |header: &str, searched: &str| {
        KernelError::Installation(format!(
            "the header {header} was not found in {searched}\n  hint: set CUDA_PATH to the toolkit's folder (the one \
             with include/{header}); without a toolkit: `pip install nvidia-cuda-runtime nvidia-cuda-crt \
             nvidia-cuda-cccl` and CUDA_PATH=<site-packages>/nvidia/cu13"
        ))
    };
    let path = cuda_path.ok_or_else(|| missing(HEADERS[0], "$CUDA_PATH, /usr/local/cuda, /opt/cuda or /usr"))?;
    let folder = path.join("include");
    match HEADERS.into_iter().find(|header| !folder.join(header).is_file()) {
        Some(header) => Err(missing(header, &folder.to_string_lossy().escape_debug().to_string())),
        None => Ok(folder),
    }
}

/// Asks the driver for a GPU's properties.
fn describe(index: usize) -> Result<DeviceReport, KernelError> {
    let device = driver::device::get(index as i32).map_err(KernelError::driver)?;
    // SAFETY: the handle comes from the driver, the attributes are plain integers.
    let attribute = |which| unsafe { driver::device::get_attribute(device, which) }.map_err(KernelError::driver);
    let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? as u32;
    let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)? as u32;
    let num_multiprocessors = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize;
    let name = driver::device::get_name(device).map_err(KernelError::driver)?;
    // SAFETY: the handle comes from the driver.
    let total_memory_bytes = unsafe { driver::device::total_mem(device) }.map_err(KernelError::driver)? as u64;
    Ok(DeviceReport { index, name, major, minor, num_multiprocessors, total_memory_bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(major: u32, minor: u32) -> CudaVersion {
        CudaVersion { major, minor }
    }

    fn report(majors: &[u32]) -> CudaReport {
        let device = |(index, &major): (usize, &u32)| DeviceReport {
            index,
            name: "test".into(),
            major,
            minor: 0,
            num_multiprocessors: 1,
            total_memory_bytes: 1,
        };
        let devices = majors.iter().enumerate().map(device).collect();
        CudaReport { driver: version(13, 0), nvrtc: version(13, 0), include_folder: PathBuf::new(), devices }
    }

    #[test]
    fn probing_never_panics() {
        // On a machine without CUDA this is the error a user sees; with CUDA it is a report.
        match CudaReport::probe() {
            Ok(report) => assert!(!report.devices.is_empty()),
            Err(error) => assert!(error.to_string().starts_with("CUDA: "), "{error}"),
        }
    }

    #[test]
    fn a_wrong_device_number_tells_how_many_there_are() {
        let error = report(&[9, 9]).device(2).expect_err("two devices only").to_string();
        assert!(error.contains("no device 2") && error.contains("has 2") && error.contains("cuda:1"), "{error}");
        let old = report(&[7]).device(0).expect_err("Volta").to_string();
        assert!(old.contains("7.0") && old.contains("8.0"), "{old}");
        assert_eq!(report(&[9]).device(0).expect("Hopper").arch(), "sm_90a");
        assert_eq!(report(&[8]).device(0).expect("Ampere").arch(), "sm_80");
    }

    #[test]
    fn a_compiler_newer_than_the_driver_is_refused() {
        assert_eq!(check_versions(version(13, 0), version(12, 9)), Ok(()));
        assert_eq!(check_versions(version(13, 0), version(13, 0)), Ok(()));
        let error = check_versions(version(12, 4), version(12, 8)).expect_err("PTX is too new");
        assert!(error.to_string().contains("12.8") && error.to_string().contains("12.4"), "{error}");
    }

    #[test]
    fn headers_are_looked_for_where_they_will_be_used() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let missing = check_headers(Some(folder.path())).expect_err("empty folder").to_string();
        assert!(missing.contains("cuda_bf16.h") && missing.contains("CUDA_PATH"), "{missing}");
        std::fs::create_dir(folder.path().join("include")).expect("created");
        for header in HEADERS {
            std::fs::write(folder.path().join("include").join(header), "").expect("written");
        }
        assert_eq!(check_headers(Some(folder.path())), Ok(folder.path().join("include")));
        assert!(check_headers(None).is_err());
    }
}
