//! Tensors in the memory of a GPU or of a recording, with their shapes and strides.
use crate::KernelError;
use crate::runtime::{
    DType, Hardware, KernelPolicy, LaunchRequest, contiguous_strides, required_elements, strides_are_contiguous,
};
use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

/// An allocation on a GPU. Sieve's launch wrappers use a GPU through this trait alone; it is implemented for buffers of
/// Burn's allocator and of a [`Recorder`](crate::Recorder).
pub trait Memory: Any + Debug + Send + Sync {
    /// Properties of the GPU that holds the memory.
    fn hardware(&self) -> Hardware;

    /// Size of the allocation in bytes.
    fn num_bytes(&self) -> usize;

    /// New memory on the same GPU for a contiguous tensor, contents undefined.
    fn allocate(&self, shape: &[usize], dtype: DType) -> Arc<dyn Memory>;

    /// New memory on the same GPU for a contiguous tensor, all elements set to one value.
    fn filled(&self, shape: &[usize], dtype: DType, fill: Fill) -> Arc<dyn Memory>;

    /// A contiguous copy of a tensor in this memory, made on the stream.
    fn gathered(&self, tensor: &CudaTensor) -> Arc<dyn Memory>;

    /// Queues a launch whose first tensor is in this memory. Returns before the GPU has run it; the first launch of
    /// each kernel waits until it is compiled, loaded and queued.
    ///
    /// # Errors
    /// [`KernelError::Compile`]; [`KernelError::Launch`], which may also report an earlier launch.
    ///
    /// # Safety
    /// With these params, grid and block the kernel must access only the given tensors, and must terminate.
    unsafe fn launch(&self, launch: &LaunchRequest<'_>) -> Result<(), KernelError>;
}

/// The value of all elements of new memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fill {
    /// Zero of the element type.
    Zero,
    /// NaN; only for float types.
    Nan,
}

/// A tensor in GPU memory, or in a [`Recorder`](crate::Recorder), which notes launches without a GPU. Clones share the
/// buffer: kernels that write in place change every clone.
///
/// Burn's CUDA tensors are *pitched*: rows are padded, so strides do not follow from the shape. A kernel either takes
/// strides or needs [`contiguous`](Self::contiguous).
#[derive(Debug, Clone)]
pub struct CudaTensor {
    memory: Arc<dyn Memory>,
    offset_bytes: usize,
    shape: Vec<usize>,
    strides: Vec<usize>,
    dtype: DType,
    policy: KernelPolicy,
}

impl CudaTensor {
    /// A tensor that begins `offset_bytes` into an allocation, with strides in elements.
    pub fn new(memory: Arc<dyn Memory>, offset_bytes: usize, [shape, strides]: [&[usize]; 2], dtype: DType) -> Self {
        Self {
            memory,
            offset_bytes,
            shape: shape.to_vec(),
            strides: strides.to_vec(),
            dtype,
            policy: KernelPolicy::default(),
        }
    }

    /// The same tensor with a kernel policy for its calls. Tensors derived from it have the same policy.
    pub fn under(self, policy: KernelPolicy) -> Self {
        Self { policy, ..self }
    }

    /// The kernel policy of calls with this tensor.
    pub fn policy(&self) -> KernelPolicy {
        self.policy
    }

    /// The allocation as an `M`; `None` if it has another type.
    pub fn memory<M: Memory>(&self) -> Option<&M> {
        (self.memory.as_ref() as &dyn Any).downcast_ref()
    }

    /// The GPU memory that the tensor lies in.
    pub(crate) fn gpu(&self) -> &dyn Memory {
        self.memory.as_ref()
    }

    /// Whether no other [`CudaTensor`] shares the allocation.
    pub fn is_only_holder(&self) -> bool {
        Arc::strong_count(&self.memory) == 1
    }

    /// Properties of the GPU that holds the tensor.
    pub fn hardware(&self) -> Hardware {
        self.memory.hardware()
    }

    /// Bytes from the beginning of the allocation.
    pub fn offset_bytes(&self) -> usize {
        self.offset_bytes
    }

    /// Sizes of the dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Distance between neighbours of each dimension, in elements.
    pub fn strides(&self) -> &[usize] {
        &self.strides
    }

    /// Type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of elements.
    pub fn num_elements(&self) -> usize {
        self.shape().iter().product()
    }

    /// Sizes as an array.
    ///
    /// # Errors
    /// [`KernelError::Refused`] when there are not `D` dimensions.
    pub fn dims<const D: usize>(&self, kernel: &'static str, tensor: &'static str) -> Result<[usize; D], KernelError> {
        let shape = self.shape();
        let words = || format!("{tensor} has {} dimensions, expected {D}", shape.len());
        shape.try_into().map_err(|_| KernelError::refused(kernel, words()))
    }

    /// Whether the strides are row-major without gaps. Strides of dimensions of size 1 do not matter.
    pub fn is_contiguous(&self) -> bool {
        strides_are_contiguous(self.shape(), self.strides())
    }

    /// This tensor, or a contiguous copy made on the stream.
    pub fn contiguous(&self) -> Self {
        if self.is_contiguous() {
            return self.clone();
        }
        self.of_new(self.memory.gathered(self), &self.shape, self.dtype)
    }

    /// The same elements under another shape, without a copy.
    ///
    /// # Errors
    /// [`KernelError::Refused`] when the tensor is not contiguous, or when the sizes differ.
    pub fn reshaped(&self, kernel: &'static str, tensor: &'static str, shape: &[usize]) -> Result<Self, KernelError> {
        self.require_contiguous(kernel, tensor)?;
        if shape.iter().product::<usize>() != self.num_elements() {
            return Err(KernelError::shape(kernel, tensor, self.shape(), shape));
        }
        Ok(self.part(0, shape, &contiguous_strides(shape)))
    }

    /// The same buffer with another shape and strides (in elements), without a copy.
    ///
    /// # Errors
    /// [`KernelError::Refused`] when the buffer is too small.
    pub fn view(
        &self,
        kernel: &'static str,
        tensor: &'static str,
        shape: &[usize],
        strides: &[usize],
    ) -> Result<Self, KernelError> {
        self.view_at(kernel, tensor, 0, shape, strides)
    }

    /// [`view`](Self::view) from element `first` of the tensor on.
    ///
    /// # Errors
    /// The errors of [`view`](Self::view).
    pub fn view_at(
        &self,
        kernel: &'static str,
        tensor: &'static str,
        first: usize,
        shape: &[usize],
        strides: &[usize],
    ) -> Result<Self, KernelError> {
        let capacity = (self.memory.num_bytes() - self.offset_bytes) / self.dtype.size();
        if first + required_elements(shape, strides) > capacity {
            return Err(layout_error(kernel, tensor, [shape, strides], "the buffer is too small for this view"));
        }
        Ok(self.part(first * self.dtype().size(), shape, strides))
    }

    /// Rows `first .. first + count` of the outermost dimension of a contiguous tensor, without a copy.
    ///
    /// # Errors
    /// [`KernelError::Refused`] when the tensor is not contiguous or has fewer rows.
    pub fn row_range(
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
        self.of_new(self.memory.allocate(shape, dtype), shape, dtype)
    }

    /// A new contiguous tensor of zeros on the same device; it costs a launch.
    pub fn zeros_contiguous(&self, shape: &[usize], dtype: DType) -> Self {
        self.of_new(self.memory.filled(shape, dtype, Fill::Zero), shape, dtype)
    }

    /// A new contiguous float tensor of NaN. Tests pass such outputs to find elements that a kernel does not write.
    pub fn nan_contiguous(&self, shape: &[usize], dtype: DType) -> Self {
        self.of_new(self.memory.filled(shape, dtype, Fill::Nan), shape, dtype)
    }

    /// Checks the element type.
    ///
    /// # Errors
    /// [`KernelError::Refused`].
    pub fn require_dtype(&self, kernel: &'static str, tensor: &'static str, dtype: DType) -> Result<(), KernelError> {
        if self.dtype() == dtype {
            return Ok(());
        }
        let (got, expected) = (self.dtype().name(), dtype.name());
        let words = format!("{tensor} is {got}, expected {expected}\n  hint: cast it before the call");
        Err(KernelError::refused(kernel, words))
    }

    /// Checks the shape.
    ///
    /// # Errors
    /// [`KernelError::Refused`].
    pub fn require_shape(
        &self,
        kernel: &'static str,
        tensor: &'static str,
        expected: &[usize],
    ) -> Result<(), KernelError> {
        if self.shape() == expected {
            return Ok(());
        }
        Err(KernelError::shape(kernel, tensor, self.shape(), expected))
    }

    /// Checks that the tensor is contiguous.
    ///
    /// # Errors
    /// [`KernelError::Refused`].
    pub fn require_contiguous(&self, kernel: &'static str, tensor: &'static str) -> Result<(), KernelError> {
        if self.is_contiguous() {
            return Ok(());
        }
        Err(self.layout_error(kernel, tensor, "a contiguous tensor is needed"))
    }

    /// The error for strides that a kernel does not take; `expected` describes the strides that it needs.
    pub fn layout_error(&self, kernel: &'static str, tensor: &'static str, expected: &'static str) -> KernelError {
        layout_error(kernel, tensor, [self.shape(), self.strides()], expected)
    }

    /// A contiguous tensor on new memory, with this tensor's policy.
    fn of_new(&self, memory: Arc<dyn Memory>, shape: &[usize], dtype: DType) -> Self {
        Self::new(memory, 0, [shape, &contiguous_strides(shape)], dtype).under(self.policy)
    }

    /// The same buffer from byte `first_byte` of the tensor on, with another shape and strides.
    fn part(&self, first_byte: usize, shape: &[usize], strides: &[usize]) -> Self {
        let offset = self.offset_bytes + first_byte;
        Self::new(self.memory.clone(), offset, [shape, strides], self.dtype).under(self.policy)
    }
}

fn layout_error(kernel: &str, tensor: &str, [shape, strides]: [&[usize]; 2], expected: &str) -> KernelError {
    let words = format!("{tensor} of shape {shape:?} has strides {strides:?}; {expected}");
    KernelError::refused(kernel, words + "\n  hint: call into_contiguous() on it first")
}
