//! Burn's memory as the GPU of the launch wrappers: allocations, fills, copies and launches, which the tape of a step
//! records where there is one.
use crate::burn_memory::{BurnMemory, ToBurn, burn_dtype};
use crate::launch;
use crate::memory_watch::note_allocation;
use crate::probe::compute_capability;
use burn::tensor::Shape;
use burn_cubecl::ops::numeric::{empty_device_contiguous_dtype, full_device_dtype};
use cubecl::prelude::InputScalar;
use cubecl::server::Handle;
use sieve_cuda::contiguous_copy;
use sieve_gpu::{CudaTensor, DType, Fill, Hardware, KernelError, LaunchRequest, Memory};
use std::sync::Arc;

/// Number of multiprocessors assumed if the driver does not report it.
const DEFAULT_MULTIPROCESSORS: usize = 132;

impl BurnMemory {
    /// Another buffer on the same GPU, whose launches no tape records.
    fn with_handle(&self, handle: Handle) -> Self {
        Self { handle, client: self.client.clone(), device: self.device.clone(), tape: None }
    }
}

impl Memory for BurnMemory {
    fn hardware(&self) -> Hardware {
        let hardware = &self.client.properties().hardware;
        let (x, y, z) = hardware.max_cube_count;
        Hardware {
            compute_capability: compute_capability(self.device.index).unwrap_or_default(),
            num_multiprocessors: hardware.num_streaming_multiprocessors.map_or(DEFAULT_MULTIPROCESSORS, |n| n as usize),
            max_shared_bytes: hardware.max_shared_memory_size,
            max_threads: hardware.max_units_per_cube as usize,
            max_grid: [x, y, z].map(|n| n as usize),
        }
    }

    fn num_bytes(&self) -> usize {
        self.handle.size_in_used() as usize
    }

    fn allocate(&self, shape: &[usize], dtype: DType) -> Arc<dyn Memory> {
        let (client, device) = (self.client.clone(), self.device.clone());
        let shape = Shape::from(shape.to_vec());
        let tensor = empty_device_contiguous_dtype(client, device, shape, burn_dtype(dtype));
        note_allocation(&self.client);
        Arc::new(Self { tape: self.tape.clone(), ..self.with_handle(tensor.handle) })
    }

    fn filled(&self, shape: &[usize], dtype: DType, fill: Fill) -> Arc<dyn Memory> {
        if let Some(tape) = &self.tape {
            tape.refuse("a fill by Burn");
        }
        // The shape is flat, because Burn pads the rows of a tensor of two or more dimensions.
        let flat = Shape::from(vec![shape.iter().product::<usize>()]);
        let (client, device, dtype) = (self.client.clone(), self.device.clone(), burn_dtype(dtype));
        let value = match fill {
            Fill::Zero => InputScalar::new(0u32, dtype),
            Fill::Nan => InputScalar::new(f32::NAN, dtype),
        };
        Arc::new(self.with_handle(full_device_dtype(client, flat, device, value, dtype).handle))
    }

    fn gathered(&self, tensor: &CudaTensor) -> Arc<dyn Memory> {
        if let Some(tape) = &self.tape {
            tape.refuse("a copy by Burn");
        }
        Arc::new(self.with_handle(contiguous_copy(&tensor.clone().burn())))
    }

    unsafe fn launch(&self, launch: &LaunchRequest<'_>) -> Result<(), KernelError> {
        // SAFETY: the caller keeps the contract of this function.
        let queued = unsafe { launch::queue(launch) }?;
        if let Some(tape) = &self.tape {
            tape.note(Box::new(queued));
        }
        Ok(())
    }
}
