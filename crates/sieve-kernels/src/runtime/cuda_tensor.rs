//! A tensor as the launch wrappers see it: shape, strides, element type, and fresh outputs.
use crate::error::KernelError;
use crate::runtime::layout::{contiguous_strides, required_elements, strides_are_contiguous};
use crate::runtime::memory_watch::note_allocation;
use crate::runtime::probe::compute_capability;
use crate::runtime::recording::{BufferView, Hardware, RecordedTensor, Recorder, Step};
use burn::tensor::{DType, Shape};
use burn_cubecl::ops::numeric::{empty_device_contiguous_dtype, full_device_dtype};
use burn_cubecl::tensor::CubeTensor;
use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::prelude::{ComputeClient, InputScalar};
use cubecl::zspace::metadata::Metadata;
use sieve_cuda::contiguous_copy;

/// What is assumed where the driver does not say.
const DEFAULT_MULTIPROCESSORS: usize = 132;

/// The tensor primitive of `burn_cuda::Cuda<f32, i32>`.
pub type CudaPrimitive = CubeTensor<CudaRuntime>;

/// A tensor in GPU memory, or one of a [`Recorder`]. Cloning shares the buffer; kernels that write in place change
/// every clone.
///
/// Burn's CUDA tensors are *pitched*: rows are padded, so the strides say more than the shape does. A kernel either
/// takes strides or needs [`contiguous`](Self::contiguous).
#[derive(Debug, Clone)]
pub struct CudaTensor(Place);

/// Where a tensor is.
#[derive(Debug, Clone)]
enum Place {
    Gpu(CudaPrimitive),
    Recorded(RecordedTensor),
}

impl From<CudaPrimitive> for CudaTensor {
    fn from(primitive: CudaPrimitive) -> Self {
        Self(Place::Gpu(primitive))
    }
}

impl From<RecordedTensor> for CudaTensor {
    fn from(tensor: RecordedTensor) -> Self {
        Self(Place::Recorded(tensor))
    }
}

/// Panics as [`CudaTensor::primitive`].
impl From<CudaTensor> for CudaPrimitive {
    fn from(tensor: CudaTensor) -> Self {
        match tensor.0 {
            Place::Gpu(primitive) => primitive,
            Place::Recorded(_) => panic!("{NO_MEMORY}"),
        }
    }
}

/// Recorded tensors are made by a [`Recorder`] alone, and its caller keeps them away from Burn.
const NO_MEMORY: &str = "a recorded tensor has no memory on a GPU";

impl CudaTensor {
    /// The Burn primitive inside.
    ///
    /// # Panics
    /// For a tensor of a [`Recorder`].
    pub fn primitive(&self) -> &CudaPrimitive {
        match &self.0 {
            Place::Gpu(primitive) => primitive,
            Place::Recorded(_) => panic!("{NO_MEMORY}"),
        }
    }

    /// The recorded tensor inside, if it is one.
    pub(crate) fn recorded(&self) -> Option<&RecordedTensor> {
        match &self.0 {
            Place::Gpu(_) => None,
            Place::Recorded(tensor) => Some(tensor),
        }
    }

    /// Number and first byte of the buffer of a recorded tensor; `None` in GPU memory.
    pub fn recorded_at(&self) -> Option<BufferView> {
        self.recorded().map(|tensor| tensor.at)
    }

    /// What launches must know of the GPU.
    pub(crate) fn hardware(&self) -> Hardware {
        if let Some(tensor) = self.recorded() {
            return tensor.recorder.hardware();
        }
        let hardware = &self.client().properties().hardware;
        let (x, y, z) = hardware.max_cube_count;
        Hardware {
            compute_capability: compute_capability(self.device().index).unwrap_or_default(),
            num_multiprocessors: hardware
                .num_streaming_multiprocessors
                .map_or(DEFAULT_MULTIPROCESSORS, |n| n as usize),
            max_shared_bytes: hardware.max_shared_memory_size,
            max_threads: hardware.max_units_per_cube as usize,
            max_grid: [x, y, z].map(|n| n as usize),
        }
    }

    /// Bytes from the beginning of the buffer.
    pub(crate) fn offset_bytes(&self) -> usize {
        match &self.0 {
            Place::Gpu(primitive) => primitive.handle.offset_start.unwrap_or(0) as usize,
            Place::Recorded(tensor) => tensor.at.offset_bytes,
        }
    }

    /// Sizes, outermost first.
    pub fn shape(&self) -> &[usize] {
        match &self.0 {
            Place::Gpu(primitive) => primitive.meta.shape(),
            Place::Recorded(tensor) => &tensor.shape,
        }
    }

    /// Distance between neighbours of each dimension, in elements.
    pub fn strides(&self) -> &[usize] {
        match &self.0 {
            Place::Gpu(primitive) => primitive.meta.strides(),
            Place::Recorded(tensor) => &tensor.strides,
        }
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        match &self.0 {
            Place::Gpu(primitive) => primitive.dtype,
            Place::Recorded(tensor) => tensor.dtype,
        }
    }

    /// Number of elements.
    pub fn num_elements(&self) -> usize {
        self.shape().iter().product()
    }

    /// The client whose stream the tensor lives on. Panics as [`primitive`](Self::primitive).
    pub fn client(&self) -> &ComputeClient<CudaRuntime> {
        &self.primitive().client
    }

    /// The GPU. Panics as [`primitive`](Self::primitive).
    pub fn device(&self) -> &CudaDevice {
        &self.primitive().device
    }

    /// Sizes as an array.
    ///
    /// # Errors
    /// [`KernelError::Rank`] when there are not `D` dimensions.
    pub fn dims<const D: usize>(&self, kernel: &'static str, tensor: &'static str) -> Result<[usize; D], KernelError> {
        let shape = self.shape();
        shape.try_into().map_err(|_| KernelError::Rank {
            kernel,
            tensor,
            got: shape.len(),
            expected: D,
        })
    }

    /// True when elements lie in memory in index order, without gaps. Dimensions of size 1 don't count.
    pub fn is_contiguous(&self) -> bool {
        strides_are_contiguous(self.shape(), self.strides())
    }

    /// This tensor, or a contiguous copy made on the stream.
    pub fn contiguous(&self) -> Self {
        if self.is_contiguous() {
            return self.clone();
        }
        if let Some(tensor) = self.recorded() {
            return Self::from(tensor.gathered());
        }
        let copy = contiguous_copy(self.primitive());
        self.with_handle(copy, self.shape(), &contiguous_strides(self.shape()), self.dtype())
    }

    /// The same elements under another shape, without a copy.
    ///
    /// # Errors
    /// [`KernelError::Layout`] when the tensor is not contiguous, [`KernelError::Shape`] when the sizes differ.
    pub fn reshaped(&self, kernel: &'static str, tensor: &'static str, shape: &[usize]) -> Result<Self, KernelError> {
        self.require_contiguous(kernel, tensor)?;
        if shape.iter().product::<usize>() != self.num_elements() {
            return Err(KernelError::Shape {
                kernel,
                tensor,
                got: self.shape().to_vec(),
                expected: shape.to_vec(),
            });
        }
        Ok(self.part(0, shape, &contiguous_strides(shape)))
    }

    /// The same buffer under another shape and other strides, in elements; no copy, no check of what lies there.
    ///
    /// # Errors
    /// [`KernelError::Layout`] when the buffer is too small.
    pub fn view(
        &self,
        kernel: &'static str,
        tensor: &'static str,
        shape: &[usize],
        strides: &[usize],
    ) -> Result<Self, KernelError> {
        self.view_at(kernel, tensor, 0, shape, strides)
    }

    /// As [`view`](Self::view), from element `first` of the tensor on.
    ///
    /// # Errors
    /// As [`view`](Self::view).
    pub fn view_at(
        &self,
        kernel: &'static str,
        tensor: &'static str,
        first: usize,
        shape: &[usize],
        strides: &[usize],
    ) -> Result<Self, KernelError> {
        let capacity = match &self.0 {
            Place::Gpu(primitive) => primitive.handle.size_in_used() as usize / self.dtype().size(),
            Place::Recorded(tensor) => tensor.capacity(),
        };
        if first + required_elements(shape, strides) > capacity {
            let (shape, strides) = (shape.to_vec(), strides.to_vec());
            let expected = "the buffer is too small for this view";
            return Err(KernelError::Layout {
                kernel,
                tensor,
                shape,
                strides,
                expected,
            });
        }
        Ok(self.part(first * self.dtype().size(), shape, strides))
    }

    /// Rows `first .. first + count` of the outermost dimension of a contiguous tensor, without a copy.
    ///
    /// # Errors
    /// [`KernelError::Layout`] when the tensor is not contiguous or has fewer rows.
    pub(crate) fn row_range(
        &self,
        kernel: &'static str,
        tensor: &'static str,
        first: usize,
        count: usize,
    ) -> Result<Self, KernelError> {
        let mut shape = self.shape().to_vec();
        if !self.is_contiguous() || shape.first().is_none_or(|&rows| first + count > rows) {
            return Err(self.layout_error(kernel, tensor, "a contiguous tensor of more rows is needed"));
        }
        shape[0] = count;
        let row_bytes = shape[1..].iter().product::<usize>() * self.dtype().size();
        let strides = contiguous_strides(&shape);
        Ok(self.part(first * row_bytes, &shape, &strides))
    }

    /// A new contiguous tensor on the same device, contents undefined.
    pub fn empty_contiguous(&self, shape: &[usize], dtype: DType) -> Self {
        if let Some(tensor) = self.recorded() {
            return tensor.recorder.tensor(shape, dtype);
        }
        let (client, device) = (self.client().clone(), self.device().clone());
        let shape = Shape::from(shape.to_vec());
        let made = empty_device_contiguous_dtype(client, device, shape, dtype);
        let made = Self::from(made);
        note_allocation(&made);
        made
    }

    /// A new contiguous tensor of zeros on the same device: one small launch.
    pub fn zeros_contiguous(&self, shape: &[usize], dtype: DType) -> Self {
        if let Some(tensor) = self.recorded() {
            return filled(&tensor.recorder, shape, dtype, vec![0]);
        }
        self.full_contiguous(shape, InputScalar::new(0u32, dtype), dtype)
    }

    /// A new contiguous float tensor of NaN. Tests pass such outputs, so that an element a kernel forgot shows.
    pub fn nan_contiguous(&self, shape: &[usize], dtype: DType) -> Self {
        if let Some(tensor) = self.recorded() {
            // All bits set: a NaN in every float type.
            return filled(&tensor.recorder, shape, dtype, vec![0xff]);
        }
        self.full_contiguous(shape, InputScalar::new(f32::NAN, dtype), dtype)
    }

    /// Checks the element type.
    ///
    /// # Errors
    /// [`KernelError::DType`].
    pub fn require_dtype(&self, kernel: &'static str, tensor: &'static str, dtype: DType) -> Result<(), KernelError> {
        if self.dtype() == dtype {
            return Ok(());
        }
        let (got, expected) = (self.dtype().name().to_owned(), dtype.name().to_owned());
        Err(KernelError::DType {
            kernel,
            tensor,
            got,
            expected,
        })
    }

    /// Checks the shape.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    pub fn require_shape(
        &self,
        kernel: &'static str,
        tensor: &'static str,
        expected: &[usize],
    ) -> Result<(), KernelError> {
        if self.shape() == expected {
            return Ok(());
        }
        Err(KernelError::Shape {
            kernel,
            tensor,
            got: self.shape().to_vec(),
            expected: expected.to_vec(),
        })
    }

    /// Checks that the tensor is contiguous.
    ///
    /// # Errors
    /// [`KernelError::Layout`].
    pub fn require_contiguous(&self, kernel: &'static str, tensor: &'static str) -> Result<(), KernelError> {
        if self.is_contiguous() {
            return Ok(());
        }
        Err(self.layout_error(kernel, tensor, "a contiguous tensor is needed"))
    }

    /// A [`KernelError::Layout`] about this tensor; `expected` says in words what the kernel needs.
    pub fn layout_error(&self, kernel: &'static str, tensor: &'static str, expected: &'static str) -> KernelError {
        let (shape, strides) = (self.shape().to_vec(), self.strides().to_vec());
        KernelError::Layout {
            kernel,
            tensor,
            shape,
            strides,
            expected,
        }
    }

    fn full_contiguous(&self, shape: &[usize], value: InputScalar, dtype: DType) -> Self {
        // One dimension, because Burn pads the rows of anything with more.
        let flat = Shape::from(vec![shape.iter().product::<usize>()]);
        let (client, device) = (self.client().clone(), self.device().clone());
        let filled = full_device_dtype(client, flat, device, value, dtype);
        self.with_handle(filled.handle, shape, &contiguous_strides(shape), dtype)
    }

    /// The same buffer from a later byte on, under another shape and strides.
    fn part(&self, first_byte: usize, shape: &[usize], strides: &[usize]) -> Self {
        match &self.0 {
            Place::Gpu(primitive) => {
                let handle = primitive.handle.clone();
                let handle = match first_byte {
                    0 => handle,
                    bytes => handle.offset_start(bytes as u64),
                };
                self.with_handle(handle, shape, strides, self.dtype())
            }
            Place::Recorded(tensor) => {
                let mut part = tensor.clone();
                part.at.offset_bytes += first_byte;
                (part.shape, part.strides) = (shape.to_vec(), strides.to_vec());
                Self::from(part)
            }
        }
    }

    fn with_handle(&self, handle: cubecl::server::Handle, shape: &[usize], strides: &[usize], dtype: DType) -> Self {
        let metadata = Metadata::new(shape.to_vec(), strides.to_vec());
        let (client, device) = (self.client().clone(), self.device().clone());
        Self::from(CubeTensor::new(client, handle, metadata, device, dtype))
    }
}

/// A new buffer of a recorder whose bytes are all `byte`.
fn filled(recorder: &Recorder, shape: &[usize], dtype: DType, byte: Vec<u8>) -> CudaTensor {
    let made = recorder.allocate(shape, &contiguous_strides(shape), dtype);
    recorder.push(Step::Fill {
        buffer: made.at.buffer,
        element: byte,
    });
    CudaTensor::from(made)
}
