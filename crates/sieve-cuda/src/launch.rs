//! CubeCL's generic code behind plain functions, for a crate that is optimised and so cannot share it.
use crate::Primitive;
use cubecl::cuda::CudaRuntime;
use cubecl::ir::{Scope, StorageType};
use cubecl::prelude::CubeDim;
use cubecl::server::Handle;
use cubecl_cpp::shared::{Elem, Item, SharedMemory};
use cubecl_runtime::compiler::{CompilationError, Compiler};
use cubecl_runtime::kernel::{KernelDefinition, KernelOptions};
use cubecl_runtime::server::ExecutionMode;

/// Writes a kernel's text for CUDA.
pub type CudaCompiler = <CudaRuntime as cubecl::Runtime>::Compiler;

/// A kernel as the launch reads its sizes from it.
pub type Representation = <CudaCompiler as Compiler>::Representation;

/// A copy of a tensor's elements in index order, without gaps, made on the stream.
pub fn contiguous_copy(tensor: &Primitive) -> Handle {
    cubecl::std::tensor::into_contiguous(&tensor.client, tensor.clone().binding(), tensor.dtype.into()).handle
}

/// What a launch of `threads` threads a block and that much dynamic shared memory reads its sizes from.
///
/// # Errors
/// Those of CubeCL's compiler.
pub fn sizes_of_launch(
    compiler: &CudaCompiler,
    options: &<CudaCompiler as Compiler>::CompilationOptions,
    mode: ExecutionMode,
    address_type: StorageType,
    [threads, shared_bytes]: [usize; 2],
) -> Result<Representation, CompilationError> {
    let empty = KernelDefinition {
        buffers: vec![],
        tensor_maps: vec![],
        scalars: vec![],
        cube_dim: CubeDim::new_1d(threads as u32),
        body: Scope::root(false),
        options: KernelOptions::default(),
    };
    let mut kernel = compiler.clone().compile(empty, options, mode, address_type)?;
    if shared_bytes > 0 {
        let bytes = Item::scalar(Elem::U8, true);
        kernel
            .body
            .shared_memories
            .push(SharedMemory::new_array(0, bytes, shared_bytes, 1024));
    }
    Ok(kernel)
}
