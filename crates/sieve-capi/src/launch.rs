//! Loads plans on a GPU and runs them.
use crate::capacity::Capacity;
use crate::graph::graph_of;
use crate::plan::Plan;
use crate::request::PlanError;
use cudarc::driver::result as driver;
use cudarc::driver::sys::{self, CUstream};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use sieve_core::ShownPath;
use sieve_gpu::{
    BufferView, Cubins, DeviceLaunch, KernelError, LoadedKernel, MapLayout, SourceKernel, Step, ahead_of_time,
    on_device,
};
use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Kernels read 16 bytes at a time.
const POINTER_ALIGNMENT: u64 = 16;

/// Number of plans that were loaded.
static NUM_LOADED: AtomicU64 = AtomicU64::new(0);

/// A plan whose kernels are on a GPU.
#[derive(Debug)]
pub struct Loaded {
    /// Differs from every other plan's in the process.
    number: u64,
    device: usize,
    num_pointers: usize,
    /// The most keys of the caches, where a run gives their number behind the pointers.
    capacity: Option<Capacity>,
    work: Vec<Work>,
}

/// One step of a plan, complete except for addresses.
#[derive(Debug)]
enum Work {
    Launch {
        kernel: Arc<LoadedKernel>,
        name: &'static str,
        grid: [u32; 3],
        threads: u32,
        shared_bytes: usize,
        maps: Vec<MapLayout>,
        /// Buffers of the TMA maps' tensors, then of the pointer arguments.
        places: Vec<BufferView>,
        words: Vec<u64>,
    },
    Fill {
        pointer: usize,
        byte: u8,
        num_bytes: usize,
    },
}

impl Loaded {
    /// Loads a plan's kernels on a GPU: from files below `cache`, or compiled now by the NVRTC at `nvrtc` (else the one
    /// that the dynamic linker finds) and cached there. Returns when all are loaded.
    ///
    /// # Errors
    /// No NVRTC, one of a newer CUDA than the driver's, a text that does not compile, machine code that the driver
    /// refuses.
    pub fn new(plan: &Plan, device: usize, nvrtc: Option<&Path>, cache: Option<&Path>) -> Result<Self, PlanError> {
        // SAFETY: only tries to open the library.
        if !unsafe { sys::is_culib_present() } {
            return Err(PlanError::Call(
                "the CUDA driver's library libcuda was not found: install NVIDIA's driver".to_owned(),
            ));
        }
        driver::init().map_err(KernelError::driver)?;
        if let Some(path) = nvrtc {
            open_for_all(path)?;
        }
        let version = ahead_of_time::installed_nvrtc()?;
        let driver = ahead_of_time::driver_version()?;
        if version.major > driver.major {
            return Err(KernelError::nvrtc_too_new(version, driver).into());
        }
        let arch = plan.hardware.arch();
        let cubins = cache.map(|root| Cubins::below(root, &arch, version));
        compile_at_once(plan, device, &arch, cubins.as_ref());
        let load = |step: &Step| -> Result<Work, PlanError> {
            let launch = match step {
                Step::Launch(launch) => launch,
                Step::Fill { buffer, element } => {
                    return Ok(Work::Fill { pointer: *buffer, byte: element[0], num_bytes: plan.buffers[*buffer] });
                }
                Step::Gather { .. } => unreachable!("plans have none"),
            };
            let kernel = match LoadedKernel::find(device, launch.kernel.code_key()?) {
                Some(kernel) => kernel,
                None => LoadedKernel::load(&launch.kernel, device, &arch, cubins.as_ref())?,
            };
            let shared_bytes = launch.kernel.dynamic_shared_bytes();
            let name = launch.kernel.name();
            kernel.allow_shared(shared_bytes).map_err(|reason| KernelError::Launch { kernel: name, reason })?;
            let maps = launch.maps.iter().map(|map| map.layout);
            let places = launch.maps.iter().map(|map| map.at);
            Ok(Work::Launch {
                kernel,
                name,
                grid: launch.grid.map(|size| size as u32),
                threads: launch.kernel.block_threads() as u32,
                shared_bytes,
                maps: maps.collect(),
                places: places.chain(launch.tensors.iter().copied()).collect(),
                words: launch.words.clone(),
            })
        };
        let work = on_device(device, || plan.steps.iter().map(load).collect::<Result<Vec<_>, _>>())??;
        Ok(Self {
            number: NUM_LOADED.fetch_add(1, Ordering::Relaxed),
            device,
            num_pointers: plan.buffers.len(),
            capacity: plan.capacity.clone(),
            work,
        })
    }

    /// Index of the GPU that the plan was loaded on.
    pub fn device(&self) -> usize {
        self.device
    }

    /// Queues the plan on a stream of its GPU. `pointers`: inputs, outputs, scratch memory, and behind them, where the
    /// plan has a [`Capacity`], the number of keys of its caches. It compiles nothing and does not synchronise. The
    /// fourth run at the same addresses records a CUDA graph, which later ones launch; a stream that is being captured
    /// gets plain launches.
    ///
    /// # Errors
    /// Another number of pointers, an address that is not a multiple of 16, more keys than planned, what the driver
    /// refuses.
    ///
    /// # Safety
    /// Each pointer is the address of a buffer on the GPU with the bytes of [`Plan::buffers`], which stays until the
    /// launches have run; integer inputs have the values that the op's docs require. The stream is one of this GPU's.
    pub unsafe fn run(&self, pointers: &[u64], stream: CUstream) -> Result<(), PlanError> {
        let expected = self.num_pointers + usize::from(self.capacity.is_some());
        if pointers.len() != expected {
            let got = pointers.len();
            return Err(PlanError::Call(format!("{got} pointers for a plan of {expected}")));
        }
        let run = [&[self.number], pointers].concat();
        let (pointers, keys) = pointers.split_at(self.num_pointers);
        let capacity = self.capacity.as_ref().zip(keys.first());
        let capacity = capacity.map(|(planned, &keys)| Ok::<_, PlanError>((planned, planned.checked(keys)?)));
        let capacity = capacity.transpose()?;
        if let Some(at) = pointers.iter().position(|pointer| !pointer.is_multiple_of(POINTER_ALIGNMENT)) {
            let address = pointers[at];
            return Err(PlanError::Call(format!(
                "pointer {at} is {address:#x}: tensors must begin at a multiple of 16 bytes\n  hint: clone the tensor"
            )));
        }
        let queue = |stream: CUstream| -> Result<(), PlanError> {
            for (step, work) in self.work.iter().enumerate() {
                let of_step = capacity.map(|(planned, keys)| (planned, step, keys));
                // SAFETY: the caller keeps the contract of this function.
                unsafe { work.queue(pointers, of_step, stream) }?;
            }
            Ok(())
        };
        on_device(self.device, || {
            // SAFETY: the caller's promise; launches depend on the plan, the pointers and the number of keys alone.
            match unsafe { graph_of(&run, self.work.len(), stream, queue) } {
                // SAFETY: the caller keeps the contract of this function.
                Some(graph) => unsafe { graph.launch(stream) },
                None => queue(stream),
            }
        })?
    }
}

impl Work {
    /// Queues the step. `capacity` holds, for a plan with caches, their planned keys, the step's index and the run's
    /// number of keys. The contract of [`Loaded::run`] applies.
    unsafe fn queue(
        &self,
        pointers: &[u64],
        capacity: Option<(&Capacity, usize, usize)>,
        stream: CUstream,
    ) -> Result<(), PlanError> {
        match self {
            Self::Launch { kernel, name, grid, threads, shared_bytes, maps, places, words } => {
                let resolved = places.iter().map(|at| pointers[at.buffer] + at.offset_bytes as u64);
                let addresses: Vec<u64> = resolved.collect();
                let mut words = Cow::Borrowed(words.as_slice());
                if let Some((planned, step, keys)) = capacity {
                    planned.set(step, words.to_mut(), keys);
                }
                let launch = DeviceLaunch {
                    grid: *grid,
                    threads: *threads,
                    shared_bytes: *shared_bytes,
                    maps,
                    pointers: &addresses,
                    words: &words,
                    starts_early: false,
                };
                // SAFETY: the wrappers recorded a launch that stays inside its buffers; the caller guarantees the
                // pointers.
                let queued = unsafe { kernel.launch(stream, &launch) };
                queued.map_err(|reason| KernelError::Launch { kernel: name, reason }.into())
            }
            Self::Fill { pointer, byte, num_bytes } => {
                // SAFETY: the whole buffer, by the caller's promise.
                let queued = unsafe { driver::memset_d8_async(pointers[*pointer], *byte, *num_bytes, stream) };
                queued.map_err(|e| PlanError::Call(format!("cuMemsetD8Async: {:?}", e.0)))
            }
        }
    }
}

/// Loads a plan's kernels in parallel, since each takes the compiler a second or two. Ignores errors: the caller loads
/// each kernel again, which returns its error.
fn compile_at_once(plan: &Plan, device: usize, arch: &str, cubins: Option<&Cubins>) {
    let launches = plan.steps.iter().filter_map(|step| match step {
        Step::Launch(launch) => Some(&launch.kernel),
        _ => None,
    });
    let keys = launches.filter_map(|kernel| Some((kernel.code_key().ok()?, kernel)));
    let distinct: HashMap<u128, &SourceKernel> =
        keys.filter(|&(key, _)| LoadedKernel::find(device, key).is_none()).collect();
    std::thread::scope(|scope| {
        for kernel in distinct.into_values() {
            scope.spawn(move || {
                let _ = on_device(device, || LoadedKernel::load(kernel, device, arch, cubins));
            });
        }
    });
}

/// Opens a library for the whole process: cudarc then finds it by its name.
fn open_for_all(path: &Path) -> Result<(), PlanError> {
    // SAFETY: NVRTC's initialisers do nothing but set up the library.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) };
    let library = library.map_err(|e| PlanError::Call(format!("NVRTC at {}: {e}", path.shown())))?;
    // Never closed: its functions are called for the life of the process.
    let _ = library.into_raw();
    Ok(())
}
