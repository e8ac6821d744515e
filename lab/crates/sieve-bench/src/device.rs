//! Devices that checks run launch wrappers on: a GPU, or the CPU emulator.
use crate::error::BenchError;
use crate::shape::{keys_of, packed_of, queries_of, values_of};
use burn::tensor::{Int, Tensor, TensorData};
use burn_cuda::CudaDevice;
use sieve_core::{KeyMask, MaskError};
use sieve_kernels::{
    AttentionShape, CudaPrimitive, CudaTensor, DType, KernelError, KernelFamilies, KernelFamily, KernelPolicy,
    KeySource, Qkv, ToBurn, burn_dtype, kernel_tensor,
};
use sieve_ops::Cuda;
use std::ops::Deref;

/// A device that the launch wrappers can be called on.
pub(crate) trait Device {
    /// Copies floats of the host to a contiguous tensor.
    fn float(&self, values: &[f32], shape: &[usize], dtype: DType) -> CudaTensor;

    /// Copies integers of the host to a contiguous tensor.
    fn int(&self, values: &[i32], shape: &[usize]) -> CudaTensor;

    /// Fills the memory that the allocator will give to a call's outputs with NaN, so that an element that a kernel
    /// does not write shows.
    fn poison(&self, shape: AttentionShape);

    /// Reads a tensor back as f32, in index order.
    ///
    /// # Errors
    /// Errors of launches that were queued before.
    fn floats(&self, tensor: &CudaTensor) -> Result<Vec<f32>, KernelError>;

    /// Reads an integer tensor back, in index order.
    ///
    /// # Errors
    /// Errors of launches that were queued before.
    fn ints(&self, tensor: &CudaTensor) -> Result<Vec<i32>, KernelError>;
}

/// A kernel policy of the portable kernels alone, or of all families.
pub(crate) fn portable_only(portable: bool) -> KernelPolicy {
    KernelPolicy {
        families: if portable { KernelFamilies::Portable } else { KernelFamilies::All },
        ..KernelPolicy::default()
    }
}

/// Waits for all work on the GPU.
pub(crate) fn wait(device: &Gpu) -> Result<(), BenchError> {
    use burn::tensor::backend::Backend;
    Cuda::sync(device).map_err(BenchError::gpu)
}

/// Uploads queries, keys and values as three separate tensors.
pub(crate) fn separate(device: &dyn Device, [q, k, v]: [&[f32]; 3], shape: AttentionShape) -> Qkv {
    let put = |values, sizes: [usize; 4]| device.float(values, &sizes, DType::BF16);
    let (q, k) = (put(q, queries_of(shape)), put(k, keys_of(shape)));
    Qkv::separate(&q, &k, &put(v, values_of(shape)))
}

/// Uploads a mask in the form that kernels read.
///
/// # Errors
/// The errors of [`KeyMask::for_kernels`].
pub(crate) fn upload_mask(device: &dyn Device, mask: &KeyMask) -> Result<KeyMask<CudaTensor>, MaskError> {
    let upload = |words: Vec<i32>| device.int(&words, &[words.len()]);
    Ok(mask.for_kernels()?.map(upload))
}

/// Reads a mask back from a device.
///
/// # Errors
/// Errors of launches that were queued before.
pub(crate) fn download_mask(device: &dyn Device, mask: KeyMask<CudaTensor>) -> Result<KeyMask, KernelError> {
    mask.try_map(|words| device.ints(&words))
}

/// The family of attention kernels that a call takes.
pub(crate) fn family(device: &dyn Device, shape: &AttentionShape, source: KeySource) -> KernelFamily {
    KernelFamily::of(shape, source, &device.float(&[0.0], &[1], DType::F32))
}

/// The name of a kernel family in reports.
pub(crate) fn family_name(family: KernelFamily) -> &'static str {
    match family {
        KernelFamily::Portable => "portable kernel",
        KernelFamily::Hopper => "Hopper kernel",
    }
}

/// A GPU, and which kernels calls on its tensors take.
#[derive(Clone, Debug)]
pub(crate) struct Gpu {
    pub(crate) device: CudaDevice,
    pub(crate) policy: KernelPolicy,
}

impl Gpu {
    /// Opens the GPU number `index`.
    pub(crate) fn new(index: usize, policy: KernelPolicy) -> Self {
        Self { device: CudaDevice::new(index), policy }
    }

    /// A Burn tensor as the kernels take it, under this GPU's policy.
    pub(crate) fn tensor(&self, primitive: CudaPrimitive) -> CudaTensor {
        kernel_tensor(primitive).under(self.policy)
    }

    /// A one-dimensional Burn tensor, reshaped to `shape`.
    fn wrapped(&self, primitive: CudaPrimitive, shape: &[usize]) -> CudaTensor {
        let flat = self.tensor(primitive).contiguous();
        flat.reshaped("upload", "the values", shape).expect("as many values as the shape has")
    }
}

impl Deref for Gpu {
    type Target = CudaDevice;

    fn deref(&self) -> &CudaDevice {
        &self.device
    }
}

impl Device for Gpu {
    fn float(&self, values: &[f32], shape: &[usize], dtype: DType) -> CudaTensor {
        let data = TensorData::new(values.to_vec(), [values.len()]);
        let tensor = Tensor::<Cuda, 1>::from_data(data, &self.device).cast(burn_dtype(dtype));
        self.wrapped(tensor.into_primitive().tensor(), shape)
    }

    fn int(&self, values: &[i32], shape: &[usize]) -> CudaTensor {
        let data = TensorData::new(values.to_vec(), [values.len()]);
        let tensor = Tensor::<Cuda, 1, Int>::from_data(data, &self.device);
        self.wrapped(tensor.into_primitive(), shape)
    }

    fn poison(&self, shape: AttentionShape) {
        // Two buffers of each size that outputs have (dk and dv are equally large) are filled and freed; the
        // allocator's pool reuses them for the call.
        let held: Vec<Tensor<Cuda, 1>> = [
            (&queries_of(shape)[..], DType::BF16),
            (&shape.output(), DType::BF16),
            (&packed_of(shape), DType::BF16),
            (&keys_of(shape), DType::BF16),
            (&shape.lse(), DType::F32),
            (&shape.per_key(), DType::F32),
        ]
        .into_iter()
        .flat_map(|sizes| [sizes; 2])
        .map(|(sizes, dtype)| {
            let size = [sizes.iter().product::<usize>()];
            Tensor::full(size, f32::NAN, (&self.device, burn_dtype(dtype)))
        })
        .collect();
        drop(held);
    }

    fn floats(&self, tensor: &CudaTensor) -> Result<Vec<f32>, KernelError> {
        let data = burn_cubecl::ops::into_data_sync(tensor.clone().burn());
        let values = data.convert::<f32>().to_vec();
        Ok(values.expect("data converted to f32 is read as f32"))
    }

    fn ints(&self, tensor: &CudaTensor) -> Result<Vec<i32>, KernelError> {
        let data = burn_cubecl::ops::into_data_sync(tensor.clone().burn());
        let values = data.convert::<i32>().to_vec();
        Ok(values.expect("data converted to i32 is read as i32"))
    }
}
