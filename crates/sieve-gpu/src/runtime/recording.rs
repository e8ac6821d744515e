//! Records launches as data instead of queueing them on a GPU.
//!
//! A [`Recorder`] stands for a GPU that this machine need not have. Its tensors have a shape, strides and the index of
//! a buffer, but no memory. The launch wrappers of this crate take them like any tensor, and each launch is appended to
//! the [`Recording`] as a [`Step`]. Programs that run kernels without CubeCL, such as the CPU emulator of
//! `tests/gpu/emulator`, replay the steps, so they need no tilings, grids and params structs of their own.
use crate::KernelError;
use crate::runtime::{
    CudaTensor, DType, Fill, Hardware, LaunchRequest, MapLayout, Memory, SourceKernel, TileMap, contiguous_strides,
    required_elements,
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A stand-in for a GPU that records launches and copies and runs none. Clones share the recording.
#[derive(Debug, Clone)]
pub struct Recorder {
    hardware: Hardware,
    recording: Arc<Mutex<Recording>>,
}

/// The launches and copies that a recorder has written down.
#[derive(Debug, Default)]
struct Recording {
    /// Size in bytes of each recorded buffer.
    buffers: Vec<usize>,
    /// Launches and copies in the order of the calls.
    steps: Vec<Step>,
}

/// A launch or a copy on the stream.
#[derive(Debug, Clone)]
pub enum Step {
    /// Launches a kernel.
    Launch(Launch),
    /// Fills a buffer with copies of one element.
    Fill {
        /// Index of the buffer that is filled.
        buffer: usize,
        /// The bytes of the element.
        element: Vec<u8>,
    },
    /// Copies a tensor of any strides to a contiguous one.
    Gather {
        /// First element of the source tensor.
        from: BufferView,
        /// Index of the buffer that is written.
        to: usize,
        /// Sizes of the source's dimensions, outermost first.
        shape: Vec<usize>,
        /// Strides of the source, in elements.
        strides: Vec<usize>,
        /// Size of an element in bytes.
        element_bytes: usize,
    },
}

/// A position in a recorded buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferView {
    /// Index of the recorded buffer.
    pub buffer: usize,
    /// Offset from the buffer's first byte.
    pub offset_bytes: usize,
}

/// One recorded kernel launch.
#[derive(Debug, Clone)]
pub struct Launch {
    /// File, defines, threads of a block, dynamic shared memory.
    pub kernel: SourceKernel,
    /// Thread blocks along x, y and z.
    pub grid: [usize; 3],
    /// Tensor maps, which kernels take by value before the pointers.
    pub maps: Vec<MapData>,
    /// The kernel's pointer arguments, in order.
    pub tensors: Vec<BufferView>,
    /// The params struct, 64 bits for each field.
    pub words: Vec<u64>,
}

/// A TMA tensor map of a recorded tensor.
#[derive(Debug, Clone)]
pub struct MapData {
    /// First element of the tensor.
    pub at: BufferView,
    /// Sizes and strides of the map.
    pub layout: MapLayout,
}

/// A buffer of a recorder: it has a size but no memory.
#[derive(Debug)]
struct RecordedMemory {
    recorder: Recorder,
    buffer: usize,
    num_bytes: usize,
}

impl Recorder {
    /// A recorder that stands for a GPU with these properties.
    pub fn new(hardware: Hardware) -> Self {
        Self { hardware, recording: Arc::default() }
    }

    /// Properties of the GPU that the recorder stands for.
    pub fn hardware(&self) -> Hardware {
        self.hardware
    }

    /// A contiguous tensor in a buffer of its own.
    pub fn tensor(&self, shape: &[usize], dtype: DType) -> CudaTensor {
        self.strided(shape, &contiguous_strides(shape), dtype)
    }

    /// A tensor with these strides, in elements, in a buffer of its own without further room.
    pub fn strided(&self, shape: &[usize], strides: &[usize], dtype: DType) -> CudaTensor {
        let memory = self.buffer(required_elements(shape, strides) * dtype.size());
        CudaTensor::new(memory, 0, [shape, strides], dtype)
    }

    fn buffer(&self, num_bytes: usize) -> Arc<RecordedMemory> {
        let mut recording = self.recording();
        recording.buffers.push(num_bytes);
        Arc::new(RecordedMemory { recorder: self.clone(), buffer: recording.buffers.len() - 1, num_bytes })
    }

    fn push(&self, step: Step) {
        self.recording().steps.push(step);
    }

    /// Removes and returns the steps so far; buffers keep their indices.
    pub fn take_steps(&self) -> Vec<Step> {
        std::mem::take(&mut self.recording().steps)
    }

    /// Sizes in bytes of all buffers so far, by index.
    pub fn buffers(&self) -> Vec<usize> {
        self.recording().buffers.clone()
    }

    fn recording(&self) -> MutexGuard<'_, Recording> {
        self.recording.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The position of a recorded tensor; `None` for a tensor in GPU memory.
pub fn recorded_at(tensor: &CudaTensor) -> Option<BufferView> {
    tensor
        .memory::<RecordedMemory>()
        .map(|memory| BufferView { buffer: memory.buffer, offset_bytes: tensor.offset_bytes() })
}

impl Memory for RecordedMemory {
    fn hardware(&self) -> Hardware {
        self.recorder.hardware()
    }

    fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    fn allocate(&self, shape: &[usize], dtype: DType) -> Arc<dyn Memory> {
        self.recorder.buffer(shape.iter().product::<usize>() * dtype.size())
    }

    fn filled(&self, shape: &[usize], dtype: DType, fill: Fill) -> Arc<dyn Memory> {
        let memory = self.recorder.buffer(shape.iter().product::<usize>() * dtype.size());
        self.recorder.push(Step::Fill {
            buffer: memory.buffer,
            // A float with all bits set is a NaN.
            element: match fill {
                Fill::Zero => vec![0],
                Fill::Nan => vec![0xff],
            },
        });
        memory
    }

    fn gathered(&self, tensor: &CudaTensor) -> Arc<dyn Memory> {
        let element_bytes = tensor.dtype().size();
        let copy = self.recorder.buffer(tensor.num_elements() * element_bytes);
        self.recorder.push(Step::Gather {
            from: BufferView { buffer: self.buffer, offset_bytes: tensor.offset_bytes() },
            to: copy.buffer,
            shape: tensor.shape().to_vec(),
            strides: tensor.strides().to_vec(),
            element_bytes,
        });
        copy
    }

    /// Records the launch; runs nothing.
    unsafe fn launch(&self, launch: &LaunchRequest<'_>) -> Result<(), KernelError> {
        let places: Option<Vec<BufferView>> = launch.tensors.iter().map(|tensor| recorded_at(tensor)).collect();
        let maps: Option<Vec<MapData>> = launch.maps.iter().map(MapData::of).collect();
        let (Some(tensors), Some(maps)) = (places, maps) else {
            return Err(KernelError::Launch {
                kernel: launch.kernel.name(),
                reason: "recorded tensors and tensors on a GPU in one call".to_owned(),
            });
        };
        self.recorder.push(Step::Launch(Launch {
            kernel: launch.kernel.clone(),
            grid: launch.grid,
            maps,
            tensors,
            words: launch.words.to_vec(),
        }));
        Ok(())
    }
}

impl MapData {
    /// The map as data; `None` for a tensor in GPU memory.
    fn of(map: &TileMap<'_>) -> Option<Self> {
        let mut at = recorded_at(map.tensor)?;
        at.offset_bytes += map.offset * map.tensor.dtype().size();
        Some(Self { at, layout: map.layout })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Qkv;

    #[test]
    fn a_call_of_a_wrapper_becomes_launches() {
        let gpu = Recorder::new(Hardware::AMPERE);
        let of = |heads| gpu.tensor(&[2, 70, heads, 64], DType::BF16);
        let qkv = Qkv::separate(&of(4), &of(2), &of(2));
        let doc_start = gpu.tensor(&[2, 70], DType::I32);
        let result = qkv.attention_forward(&doc_start, None, 0.125, None).expect("a usual call");
        assert_eq!(result.o.shape(), [2, 70, 4, 64]);
        let steps = gpu.take_steps();
        let [Step::Launch(launch)] = &steps[..] else {
            panic!("{steps:?}");
        };
        assert_eq!(launch.kernel.name(), "attention_forward");
        assert!(launch.kernel.defines().contains(&("HEAD_DIM", "64".to_owned())));
        // One tile of queries, for each of 4 heads and 2 rows of the batch.
        assert_eq!((launch.grid, launch.kernel.block_threads()), ([1, 4, 2], 128));
        // The params begin with batch, seq_len and the numbers of query heads and of KV heads.
        assert_eq!(launch.words[..4], [2, 70, 4, 2]);
        // q, k, v, doc_start, o, lse: buffers in the order of their allocation.
        let buffers: Vec<usize> = launch.tensors.iter().map(|view| view.buffer).collect();
        assert_eq!(buffers, [0, 1, 2, 3, 4, 5]);
        assert_eq!(gpu.buffers()[5], 2 * 4 * 70 * 4);
        assert!(gpu.take_steps().is_empty());
    }

    #[test]
    fn a_hopper_launch_has_its_tensor_maps() {
        let gpu = Recorder::new(Hardware::HOPPER);
        let of = |heads| gpu.tensor(&[1, 300, heads, 128], DType::BF16);
        let qkv = Qkv::separate(&of(4), &of(2), &of(2));
        let doc_start = gpu.tensor(&[1, 300], DType::I32);
        qkv.attention_forward(&doc_start, None, 0.1, None).expect("a usual call");
        let steps = gpu.take_steps();
        let [Step::Launch(launch)] = &steps[..] else {
            panic!("{steps:?}");
        };
        assert_eq!(launch.kernel.name(), "hopper_attention_forward");
        // A thread block for each of 132 multiprocessors; maps of q, k and v.
        assert_eq!((launch.grid, launch.maps.len()), ([132, 1, 1], 3));
        // Keys in tiles of 128 rows and 64 columns.
        let MapLayout { shape, tile, .. } = launch.maps[1].layout;
        assert_eq!((shape, tile), ([1, 300, 256], [128, 64]));
    }

    #[test]
    fn a_tensor_with_gaps_is_gathered_once() {
        let gpu = Recorder::new(Hardware::AMPERE);
        let pitched = gpu.strided(&[3, 5], &[8, 1], DType::F32);
        assert_eq!(gpu.buffers(), [(2 * 8 + 5) * 4]);
        let copy = pitched.contiguous();
        assert!(copy.is_contiguous() && copy.contiguous().is_contiguous());
        assert_eq!(gpu.take_steps().len(), 1);
    }
}
