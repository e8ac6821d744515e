//! Snapshots of tensors, which another thread reads while ops continue.
use crate::tensors::{Float, tensor};
use burn::tensor::backend::Backend;
use burn::tensor::{Shape, TensorData, TensorMetadata};
#[cfg(feature = "cuda")]
use sieve_kernels::{HostCopy, HostReader, KernelError};

/// The values of a tensor when [`DeviceBackend::snapshot`](crate::DeviceBackend::snapshot) was called.
///
/// On a GPU it holds the tensor, so that ops which would write to the tensor in place write to a copy instead.
/// Synchronise the device before reading the values.
#[derive(Debug)]
pub struct Snapshot(Source);

#[derive(Debug)]
enum Source {
    Host(TensorData),
    #[cfg(feature = "cuda")]
    Cuda(Box<HostCopy>),
}

impl Snapshot {
    /// Reads a tensor on the calling thread.
    pub(crate) fn read_now<B: Backend>(x: Float<B>) -> Self {
        let shape = x.shape();
        let flat = B::float_reshape(x, Shape::new([shape.num_elements()]));
        let mut data = tensor::<B, 1>(flat).into_data();
        data.shape = shape;
        Self::of_data(data)
    }

    /// A snapshot of values that are on the host.
    pub fn of_data(data: TensorData) -> Self {
        Self(Source::Host(data))
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn of_cuda(copy: HostCopy) -> Self {
        Self(Source::Cuda(Box::new(copy)))
    }
}

/// Reads snapshots; must be used on the thread that created it.
#[derive(Debug, Default)]
pub struct SnapshotReader {
    /// `None` before the first snapshot of a GPU.
    #[cfg(feature = "cuda")]
    cuda: Option<HostReader>,
}

impl SnapshotReader {
    /// The values of a snapshot.
    ///
    /// # Errors
    /// An error of the CUDA driver.
    pub fn read(&mut self, snapshot: Snapshot) -> Result<TensorData, SnapshotError> {
        match snapshot.0 {
            Source::Host(data) => Ok(data),
            #[cfg(feature = "cuda")]
            Source::Cuda(copy) => self.read_cuda(&copy).map_err(|error| SnapshotError(error.to_string())),
        }
    }

    /// The values of a copy from a GPU, which the reader's own stream brings to the host.
    #[cfg(feature = "cuda")]
    fn read_cuda(&mut self, copy: &HostCopy) -> Result<TensorData, KernelError> {
        let reader = match &mut self.cuda {
            Some(reader) => reader,
            none => none.insert(HostReader::open(copy.device_index())?),
        };
        let bytes = reader.read(copy)?;
        Ok(TensorData::from_bytes_vec(bytes, copy.shape().to_vec(), sieve_kernels::burn_dtype(copy.dtype())))
    }
}

/// Why a snapshot's values could not be copied from its device, in the words of the device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SnapshotError(String);
