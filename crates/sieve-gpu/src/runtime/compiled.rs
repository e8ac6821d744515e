//! Compiled kernels: loaded once on each GPU, from the cache of cubins or freshly compiled, and launched on any stream.
use crate::KernelError;
use crate::runtime::{Cubins, MapLayout, SourceKernel, compile_with_nvrtc};
use cudarc::driver::result as driver;
use cudarc::driver::sys::{
    self as cuda, CUfunction, CUfunction_attribute, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue,
    CUlaunchConfig, CUresult, CUstream, CUtensorMap,
};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

/// A kernel that is loaded on a GPU.
#[derive(Debug)]
pub struct LoadedKernel {
    function: CUfunction,
    /// The limit of dynamic shared memory that was set in the driver, in bytes.
    shared_bytes: AtomicUsize,
    /// Whether the driver starts all blocks of a launch at once.
    runs_together: bool,
}

// SAFETY: a function handle stays valid for the life of its module, which is never unloaded, and the driver takes it
// from any thread.
unsafe impl Send for LoadedKernel {}
// SAFETY: as above.
unsafe impl Sync for LoadedKernel {}

/// One kernel launch, its tensors given as device addresses.
#[derive(Debug)]
pub struct DeviceLaunch<'a> {
    /// Thread blocks along x, y and z.
    pub grid: [u32; 3],
    /// Threads of a thread block, along x.
    pub threads: u32,
    /// Bytes of dynamic shared memory per thread block.
    pub shared_bytes: usize,
    /// Tensor maps, which kernels take by value before the pointers.
    pub maps: &'a [MapLayout],
    /// Addresses of the maps' tensors, then of the pointer arguments.
    pub pointers: &'a [u64],
    /// The kernel's params struct, as 64-bit words.
    pub words: &'a [u64],
    /// Whether the kernel may start before the previous kernel has ended (programmatic dependent launch); the kernel
    /// itself waits for the previous one.
    pub starts_early: bool,
}

/// Loaded kernels, by GPU number and [`SourceKernel::code_key`].
type Loaded = HashMap<(usize, u128), Arc<LoadedKernel>>;

/// The kernels that this process has loaded.
static LOADED: LazyLock<Mutex<Loaded>> = LazyLock::new(Mutex::default);

impl LoadedKernel {
    /// The kernel with this code key, if it was loaded on the GPU before.
    pub fn find(device: usize, key: u128) -> Option<Arc<Self>> {
        let loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        loaded.get(&(device, key)).cloned()
    }

    /// Loads a kernel on a GPU of architecture `arch` from its file in `cubins`; without one compiles it.
    ///
    /// # Errors
    /// [`KernelError::Installation`] without NVRTC, [`KernelError::Compile`] with the compiler's log,
    /// [`KernelError::Launch`] when the driver refuses the machine code.
    pub fn load(
        kernel: &SourceKernel,
        device: usize,
        arch: &str,
        cubins: Option<&Cubins>,
    ) -> Result<Arc<Self>, KernelError> {
        let key = kernel.code_key()?;
        make_current(device).map_err(|e| refused(kernel, "the primary context", e))?;
        let kept = cubins.and_then(|cubins| cubins.read(key));
        let loaded = match kept.and_then(|cubin| Self::of_cubin(kernel, &cubin).ok()) {
            Some(loaded) => loaded,
            // There is no file, or the driver refuses it.
            None => {
                let compiled = compile_with_nvrtc(kernel, arch)?;
                if let Some(cubins) = cubins {
                    // A write error is no error of this run: the next process compiles again.
                    let _ = cubins.write(key, &compiled.cubin);
                }
                Self::of_cubin(kernel, &compiled.cubin)?
            }
        };
        let loaded = Arc::new(loaded);
        let mut all = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(all.entry((device, key)).or_insert(loaded).clone())
    }

    /// Loads machine code on the current context.
    fn of_cubin(kernel: &SourceKernel, cubin: &[u8]) -> Result<Self, KernelError> {
        let entry = CString::new(kernel.name()).expect("an identifier of C");
        // SAFETY: the driver checks the image; the module stays loaded.
        let function = unsafe {
            let module = driver::module::load_data(cubin.as_ptr().cast())
                .map_err(|e| refused(kernel, "cuModuleLoadData", e.0))?;
            driver::module::get_function(module, entry).map_err(|e| refused(kernel, "cuModuleGetFunction", e.0))?
        };
        Ok(Self { function, shared_bytes: AtomicUsize::new(0), runs_together: kernel.runs_together() })
    }

    /// Queues one launch on `stream` of the current context.
    ///
    /// # Errors
    /// The driver's error, with the name of its function.
    ///
    /// # Safety
    /// With these words and grid the kernel must access only the buffers at these addresses, and must terminate; the
    /// buffers must live until the kernel has run.
    pub unsafe fn launch(&self, stream: CUstream, call: &DeviceLaunch<'_>) -> Result<(), String> {
        let (map_addresses, pointers) = call.pointers.split_at(call.maps.len());
        let maps = call.maps.iter().zip(map_addresses);
        let maps = maps.map(|(map, &address)| map.encoded(address)).collect::<Result<Vec<_>, _>>()?;
        self.allow_shared(call.shared_bytes)?;
        let map_arguments = maps.iter().map(|map| (&raw const *map).cast_mut().cast::<c_void>());
        let pointer_arguments = pointers.iter().map(|pointer| (&raw const *pointer).cast_mut().cast());
        let mut arguments: Vec<*mut c_void> = map_arguments.chain(pointer_arguments).collect();
        arguments.push(call.words.as_ptr().cast_mut().cast());
        let attribute = |id, value| CUlaunchAttribute { id, pad: Default::default(), value };
        let early = call.starts_early.then(|| {
            let value = CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 };
            attribute(CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, value)
        });
        let together = self.runs_together.then(|| {
            let value = CUlaunchAttributeValue { cooperative: 1 };
            attribute(CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE, value)
        });
        let mut attributes: Vec<_> = early.into_iter().chain(together).collect();
        let [x, y, z] = call.grid;
        let config = CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: call.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: call.shared_bytes as u32,
            hStream: stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        };
        let no_extra = std::ptr::null_mut();
        // SAFETY: the caller checked the arguments; the driver copies them and the configuration before it returns.
        let launched = unsafe { cuda::cuLaunchKernelEx(&config, self.function, arguments.as_mut_ptr(), no_extra) };
        let launched = launched.result();
        launched.map_err(|e| format!("cuLaunchKernelEx: {:?}", e.0))
    }

    /// Raises the kernel's limit of dynamic shared memory where it is below `bytes`. [`launch`](Self::launch) calls it.
    ///
    /// # Errors
    /// The driver's error, with the name of its function.
    pub fn allow_shared(&self, bytes: usize) -> Result<(), String> {
        if bytes <= self.shared_bytes.load(Ordering::Relaxed) {
            return Ok(());
        }
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is loaded.
        unsafe { driver::function::set_function_attribute(self.function, attribute, bytes as i32) }
            .map_err(|e| format!("cuFuncSetAttribute for {bytes} bytes of shared memory: {:?}", e.0))?;
        self.shared_bytes.fetch_max(bytes, Ordering::Relaxed);
        Ok(())
    }
}

/// Most encoded tensor maps that a thread caches.
const MOST_MAPS: usize = 1024;

impl MapLayout {
    /// The encoded tensor map for a tensor that begins at `address`, cached by thread.
    fn encoded(&self, address: u64) -> Result<CUtensorMap, String> {
        thread_local! {
            static ENCODED: RefCell<HashMap<(u64, MapLayout), CUtensorMap>> = RefCell::default();
        }
        ENCODED.with_borrow_mut(|encoded| match encoded.get(&(address, *self)) {
            Some(map) => Ok(*map),
            None => {
                if encoded.len() >= MOST_MAPS {
                    encoded.clear();
                }
                let map = self.encode(address)?;
                encoded.insert((address, *self), map);
                Ok(map)
            }
        })
    }

    /// Has the driver encode the map, which takes sizes from the innermost dimension out, and strides in bytes.
    fn encode(&self, address: u64) -> Result<CUtensorMap, String> {
        let [batch, rows, width] = self.shape.map(|size| size as u64);
        let [batch_stride, row_stride] = self.strides.map(|elements| 2 * elements as u64);
        let [tile_rows, tile_columns] = self.tile.map(|size| size as u32);
        let (shape, strides) = ([width, rows, batch], [row_stride, batch_stride]);
        let (tile, steps) = ([tile_columns, tile_rows, 1], [1u32; 3]);
        let rank = 3;
        let mut map = std::mem::MaybeUninit::<CUtensorMap>::zeroed();
        // SAFETY: arrays of the rank given; the map is written where the call succeeds.
        let encoded = unsafe {
            cuda::cuTensorMapEncodeTiled(
                map.as_mut_ptr(),
                cuda::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                rank,
                address as *mut c_void,
                shape.as_ptr(),
                strides.as_ptr(),
                tile.as_ptr(),
                steps.as_ptr(),
                cuda::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                cuda::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                cuda::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                cuda::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        if encoded != CUresult::CUDA_SUCCESS {
            return Err(format!(
                "cuTensorMapEncodeTiled: {encoded:?} (address {address:#x}, shape {shape:?}, strides of {strides:?} \
                 bytes, tile {tile:?}; addresses and strides must be multiples of 16 bytes)"
            ));
        }
        // SAFETY: written by the call; all bytes were zeroed before.
        Ok(unsafe { map.assume_init() })
    }
}

/// Runs `work` with the primary context of a GPU current on the calling thread, then restores the previous context.
///
/// # Errors
/// The driver cannot create the context, or cannot make it current.
pub fn on_device<T>(device: usize, work: impl FnOnce() -> T) -> Result<T, KernelError> {
    let failed = |error: CUresult| KernelError::driver(format!("the context of device {device}: {error:?}"));
    let before = driver::ctx::get_current().map_err(|e| failed(e.0))?;
    let context = context_of(device).map_err(failed)?;
    if before == Some(context) {
        return Ok(work());
    }
    // SAFETY: retained for the life of the process.
    unsafe { driver::ctx::set_current(context) }.map_err(|e| failed(e.0))?;
    let done = work();
    if let Some(before) = before {
        // SAFETY: the context was current before.
        unsafe { driver::ctx::set_current(before) }.map_err(|e| failed(e.0))?;
    }
    Ok(done)
}

/// Makes the primary context of a GPU current on the calling thread.
fn make_current(device: usize) -> Result<(), CUresult> {
    // SAFETY: retained for the life of the process.
    unsafe { driver::ctx::set_current(context_of(device)?) }.map_err(|e| e.0)
}

/// The primary context of a GPU, which is retained and never released. Each thread caches its last one.
fn context_of(device: usize) -> Result<cuda::CUcontext, CUresult> {
    thread_local! {
        static CURRENT: Cell<Option<(usize, cuda::CUcontext)>> = const { Cell::new(None) };
    }
    match CURRENT.get() {
        Some((known, context)) if known == device => Ok(context),
        _ => {
            let handle = driver::device::get(device as i32).map_err(|e| e.0)?;
            // SAFETY: the handle comes from the driver.
            let context = unsafe { driver::primary_ctx::retain(handle) }.map_err(|e| e.0)?;
            CURRENT.set(Some((device, context)));
            Ok(context)
        }
    }
}

fn refused(kernel: &SourceKernel, call: &str, error: CUresult) -> KernelError {
    KernelError::Launch { kernel: kernel.name(), reason: format!("{call}: {error:?}") }
}
