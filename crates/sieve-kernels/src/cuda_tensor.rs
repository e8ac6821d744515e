//! A Burn CUDA tensor as the launch wrappers see it: shape, strides, element type, and fresh outputs.
use crate::error::KernelError;
use crate::layout::{contiguous_strides, required_elements, strides_are_contiguous};
use crate::memory_watch::note_allocation;
use burn::tensor::{DType, Shape};
use burn_cubecl::ops::numeric::{empty_device_contiguous_dtype, full_device_dtype};
use burn_cubecl::tensor::CubeTensor;
use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::prelude::{ComputeClient, InputScalar};
use cubecl::zspace::metadata::Metadata;

/// The tensor primitive of `burn_cuda::Cuda<f32, i32>`.
pub type CudaPrimitive = CubeTensor<CudaRuntime>;

/// A tensor in GPU memory. Cloning shares the buffer; kernels that write in place change every clone.
///
/// Burn's CUDA tensors are *pitched*: rows are padded, so the strides say more than the shape does. A kernel either
/// takes strides or needs [`contiguous`](Self::contiguous).
#[derive(Debug, Clone)]
pub struct CudaTensor(CudaPrimitive);

impl From<CudaPrimitive> for CudaTensor {
    fn from(primitive: CudaPrimitive) -> Self {
        Self(primitive)
    }
}

impl From<CudaTensor> for CudaPrimitive {
    fn from(tensor: CudaTensor) -> Self {
        tensor.0
    }
}

impl CudaTensor {
    /// The Burn primitive inside.
    pub fn primitive(&self) -> &CudaPrimitive {
        &self.0
    }

    /// Sizes, outermost first.
    pub fn shape(&self) -> &[usize] {
        self.0.meta.shape()
    }

    /// Distance between neighbours of each dimension, in elements.
    pub fn strides(&self) -> &[usize] {
        self.0.meta.strides()
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// Number of elements.
    pub fn num_elements(&self) -> usize {
        self.shape().iter().product()
    }

    /// The client whose stream the tensor lives on.
    pub fn client(&self) -> &ComputeClient<CudaRuntime> {
        &self.0.client
    }

    /// The GPU.
    pub fn device(&self) -> &CudaDevice {
        &self.0.device
    }

    /// Sizes as an array.
    ///
    /// # Errors
    /// [`KernelError::Rank`] when there are not `D` dimensions.
    pub fn dims<const D: usize>(
        &self,
        kernel: &'static str,
        tensor: &'static str,
    ) -> Result<[usize; D], KernelError> {
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
        let tensor = self.0.clone();
        let copy = cubecl::std::tensor::into_contiguous(
            self.client(),
            tensor.binding(),
            self.dtype().into(),
        );
        self.with_handle(copy.handle, self.shape(), self.dtype())
    }

    /// The same elements under another shape, without a copy.
    ///
    /// # Errors
    /// [`KernelError::Layout`] when the tensor is not contiguous, [`KernelError::Shape`] when the sizes differ.
    pub fn reshaped(
        &self,
        kernel: &'static str,
        tensor: &'static str,
        shape: &[usize],
    ) -> Result<Self, KernelError> {
        self.require_contiguous(kernel, tensor)?;
        if shape.iter().product::<usize>() != self.num_elements() {
            return Err(KernelError::Shape {
                kernel,
                tensor,
                got: self.shape().to_vec(),
                expected: shape.to_vec(),
            });
        }
        Ok(self.with_handle(self.0.handle.clone(), shape, self.dtype()))
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
        let capacity = self.0.handle.size_in_used() as usize / self.dtype().size();
        if required_elements(shape, strides) > capacity {
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
        let metadata = Metadata::new(shape.to_vec(), strides.to_vec());
        let (client, device, handle) = (
            self.client().clone(),
            self.device().clone(),
            self.0.handle.clone(),
        );
        Ok(Self(CubeTensor::new(
            client,
            handle,
            metadata,
            device,
            self.dtype(),
        )))
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
            return Err(self.layout_error(
                kernel,
                tensor,
                "a contiguous tensor of more rows is needed",
            ));
        }
        shape[0] = count;
        let row_bytes = shape[1..].iter().product::<usize>() * self.dtype().size();
        let handle = self
            .0
            .handle
            .clone()
            .offset_start((first * row_bytes) as u64);
        Ok(self.with_handle(handle, &shape, self.dtype()))
    }

    /// A new contiguous tensor on the same device, contents undefined.
    pub fn empty_contiguous(&self, shape: &[usize], dtype: DType) -> Self {
        let (client, device) = (self.client().clone(), self.device().clone());
        let shape = Shape::from(shape.to_vec());
        let made = Self(empty_device_contiguous_dtype(client, device, shape, dtype));
        note_allocation(&made);
        made
    }

    /// A new contiguous tensor of zeros on the same device: one small launch.
    pub fn zeros_contiguous(&self, shape: &[usize], dtype: DType) -> Self {
        self.full_contiguous(shape, InputScalar::new(0u32, dtype), dtype)
    }

    /// A new contiguous float tensor of NaN. Tests pass such outputs, so that an element a kernel forgot shows.
    pub fn nan_contiguous(&self, shape: &[usize], dtype: DType) -> Self {
        self.full_contiguous(shape, InputScalar::new(f32::NAN, dtype), dtype)
    }

    /// Checks the element type.
    ///
    /// # Errors
    /// [`KernelError::DType`].
    pub fn require_dtype(
        &self,
        kernel: &'static str,
        tensor: &'static str,
        dtype: DType,
    ) -> Result<(), KernelError> {
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
    pub fn require_contiguous(
        &self,
        kernel: &'static str,
        tensor: &'static str,
    ) -> Result<(), KernelError> {
        if self.is_contiguous() {
            return Ok(());
        }
        Err(self.layout_error(kernel, tensor, "a contiguous tensor is needed"))
    }

    /// A [`KernelError::Layout`] about this tensor; `expected` says in words what the kernel needs.
    pub fn layout_error(
        &self,
        kernel: &'static str,
        tensor: &'static str,
        expected: &'static str,
    ) -> KernelError {
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
        self.with_handle(filled.handle, shape, dtype)
    }

    fn with_handle(&self, handle: cubecl::server::Handle, shape: &[usize], dtype: DType) -> Self {
        let metadata = Metadata::new(shape.to_vec(), contiguous_strides(shape));
        let (client, device) = (self.client().clone(), self.device().clone());
        Self(CubeTensor::new(client, handle, metadata, device, dtype))
    }
}
