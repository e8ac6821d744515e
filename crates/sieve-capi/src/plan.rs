//! An op's launches, in which every address is a place: an offset from a pointer of the caller's or in scratch memory.
//!
//! Inputs, outputs and one piece of scratch memory are the places; buffers that are never alive together share
//! memory. The Python package keeps plans by shape. Running a plan encodes its tensor maps and launches its
//! kernels. The emulator replays the same plans in the package's tests.
use crate::capacity::Capacity;
use crate::ops::{Named, record};
use crate::request::{PlanError, Request};
use serde_json::{Value, json};
use sieve_gpu::{BufferView, CudaTensor, Hardware, Recorder, Step, recorded_at};
use std::collections::HashMap;
use std::ffi::CString;

/// Bytes that every buffer in scratch memory, and every part of an output, begins at a multiple of.
pub(crate) const ALIGNMENT: usize = 256;

/// The launches of an op for given shapes on a kind of GPU, in order. The buffers of its steps are numbered as
/// [`run`](crate::Loaded::run) takes pointers: inputs, outputs, and scratch memory as the last.
#[derive(Debug)]
pub struct Plan {
    /// The GPU that the plan was made for.
    pub hardware: Hardware,
    /// Bytes of each input and output; scratch memory is the last.
    pub buffers: Vec<usize>,
    /// Number of inputs; they are the first buffers, outputs follow.
    pub num_inputs: usize,
    /// Fills, copies and launches, in their order.
    pub steps: Vec<Step>,
    /// How a run may set the number of keys in its caches; `None` if it may not.
    pub capacity: Option<Capacity>,
    /// Description of the plan as JSON.
    pub(crate) description: CString,
}

impl Plan {
    /// The plan of a request. Touches no GPU.
    ///
    /// # Errors
    /// A request that is no JSON, lacks a tensor or has one too many; what a launch wrapper refuses; strides that would
    /// need a copy.
    pub fn new(request_json: &str) -> Result<Self, PlanError> {
        let mut request: Request = serde_json::from_str(request_json)?;
        let hardware = request.gpu.hardware()?;
        let mut capacity = Capacity::planned(&mut request);
        let gpu = Recorder::new(hardware);
        let [inputs, outputs] = record(&request, &gpu)?;
        let mut steps = gpu.take_steps();
        if let Some(capacity) = &mut capacity {
            let other = Recorder::new(hardware);
            record(&capacity.with_one_key_less(request.clone()), &other)?;
            capacity.find_words(&steps, &other.take_steps());
        }
        let sizes = gpu.buffers();
        let places = Places::new(request.call.name(), &inputs, &outputs, &sizes, &steps)?;
        for step in &mut steps {
            places.rewrite(step);
        }
        let described = json!({
            "inputs": described(&inputs, &places.bytes),
            "outputs": described(&outputs, &places.bytes[inputs.len()..]),
            "workspace_bytes": places.workspace_bytes,
            "capacity_of": capacity.as_ref().map(|capacity| capacity.input),
            "launches": steps.iter().map(described_step).collect::<Vec<_>>(),
        });
        let description = CString::new(described.to_string()).expect("JSON escapes NUL");
        let mut buffers = places.bytes;
        buffers.push(places.workspace_bytes);
        Ok(Self { hardware, buffers, num_inputs: inputs.len(), steps, capacity, description })
    }

    /// The plan as JSON: `inputs` and `outputs` in the order of the pointers, `workspace_bytes`, `launches`.
    pub fn description(&self) -> &str {
        self.description.to_str().expect("made of a string")
    }
}

/// The place of each recorded buffer in the plan's memory.
struct Places {
    /// Sizes of inputs and outputs in bytes, in the order of the pointers.
    bytes: Vec<usize>,
    /// For each recorded buffer: the pointer that holds it, and the offset from it.
    of: HashMap<usize, BufferView>,
    workspace_bytes: usize,
}

/// First and last step that uses a buffer.
type Life = [usize; 2];

/// The buffers that are neither inputs nor outputs, with their lives, in the order of their first steps.
fn scratch_lives(steps: &[Step], with_pointers: &HashMap<usize, BufferView>) -> Vec<(usize, Life)> {
    let mut lives: Vec<(usize, Life)> = Vec::new();
    for (index, step) in steps.iter().enumerate() {
        for buffer in buffers_of(step).into_iter().filter(|buffer| !with_pointers.contains_key(buffer)) {
            match lives.iter_mut().find(|(known, _)| *known == buffer) {
                Some((_, [_, last])) => *last = index,
                None => lives.push((buffer, [index, index])),
            }
        }
    }
    lives
}

/// Where each buffer begins in one piece of memory, and the size of the piece. Buffers that are never alive together
/// share memory: each takes the lowest gap among the buffers that are alive with it. They come in the order of their
/// first steps, each with its size.
fn shared_places(buffers: impl Iterator<Item = (Life, usize)>) -> (Vec<usize>, usize) {
    let mut placed: Vec<(Life, [usize; 2])> = Vec::new();
    for (life, size) in buffers {
        let alive = placed.iter().filter(|(other, _)| other[1] >= life[0]);
        let mut taken: Vec<[usize; 2]> = alive.map(|(_, range)| *range).collect();
        taken.sort_unstable();
        let mut start = 0;
        for [from, to] in taken {
            if start + size <= from {
                break;
            }
            start = start.max(to);
        }
        placed.push((life, [start, start + size]));
    }
    let end = placed.iter().map(|(_, [_, end])| *end).max().unwrap_or(0);
    (placed.into_iter().map(|(_, [start, _])| start).collect(), end)
}

impl Places {
    /// Gives each input and output a pointer, in which parts of one output follow each other, and each other recorded
    /// buffer a range of scratch memory.
    fn new(
        op: &'static str,
        inputs: &Named,
        outputs: &Named,
        sizes: &[usize],
        steps: &[Step],
    ) -> Result<Self, PlanError> {
        let (mut bytes, mut of) = (Vec::new(), HashMap::new());
        for parts in inputs.chunks(1).chain(by_name(outputs)) {
            let mut end = 0;
            for (name, tensor) in parts {
                let at = recorded_at(tensor).expect("a tensor of the recorder");
                let place = BufferView { buffer: bytes.len(), offset_bytes: usize::next_multiple_of(end, ALIGNMENT) };
                assert!(
                    at.offset_bytes == 0 && of.insert(at.buffer, place).is_none(),
                    "{op}: {name} has no buffer of its own"
                );
                end = place.offset_bytes + sizes[at.buffer];
            }
            bytes.push(end);
        }
        for step in steps {
            if let Step::Gather { from, .. } = step {
                return Err(gathered(op, inputs, from.buffer));
            }
            if let Step::Fill { buffer, .. } = step {
                let is_whole = of.get(buffer).is_some_and(|at| bytes[at.buffer] == sizes[*buffer]);
                assert!(is_whole, "{op}: a fill of what is not an output by itself would need a length");
            }
        }
        let lives = scratch_lives(steps, &of);
        let sizes = lives.iter().map(|&(buffer, life)| (life, sizes[buffer].next_multiple_of(ALIGNMENT)));
        let (starts, workspace_bytes) = shared_places(sizes);
        let scratch = bytes.len();
        of.extend(
            lives
                .iter()
                .zip(starts)
                .map(|(&(buffer, _), start)| (buffer, BufferView { buffer: scratch, offset_bytes: start })),
        );
        Ok(Self { bytes, of, workspace_bytes })
    }

    /// Replaces the recorded buffers of a step by their places.
    fn rewrite(&self, step: &mut Step) {
        let place = |at: &mut BufferView| {
            let base = self.of[&at.buffer];
            at.buffer = base.buffer;
            at.offset_bytes += base.offset_bytes;
        };
        match step {
            Step::Launch(launch) => {
                launch.maps.iter_mut().for_each(|map| place(&mut map.at));
                launch.tensors.iter_mut().for_each(place);
            }
            Step::Fill { buffer, .. } => *buffer = self.of[buffer].buffer,
            Step::Gather { .. } => unreachable!("refused before"),
        }
    }
}

/// The recorded buffers that a step reads or writes.
fn buffers_of(step: &Step) -> Vec<usize> {
    match step {
        Step::Launch(launch) => {
            let maps = launch.maps.iter().map(|map| map.at.buffer);
            maps.chain(launch.tensors.iter().map(|at| at.buffer)).collect()
        }
        Step::Fill { buffer, .. } => vec![*buffer],
        Step::Gather { from, to, .. } => vec![from.buffer, *to],
    }
}

/// The error of an input that a launch wrapper would copy first, which is left to the caller.
fn gathered(op: &'static str, inputs: &Named, buffer: usize) -> PlanError {
    let found = inputs.iter().find(|(_, tensor)| recorded_at(tensor).is_some_and(|at| at.buffer == buffer));
    let (tensor, problem) = match found {
        Some((name, tensor)) => {
            let (shape, strides) = (tensor.shape(), tensor.strides());
            let problem = format!("of shape {shape:?} has strides {strides:?}, which the kernels cannot follow");
            (name.clone(), format!("{problem}\n  hint: call .contiguous() on it first"))
        }
        None => ("a tensor of the op's own".to_owned(), "would be copied".to_owned()),
    };
    PlanError::Tensor { op, tensor, problem }
}

/// The outputs, grouped so that parts of one output are together.
fn by_name(outputs: &Named) -> impl Iterator<Item = &[(String, CudaTensor)]> {
    outputs.chunk_by(|(one, _), (other, _)| one == other)
}

/// Describes inputs or outputs of these sizes in bytes; an output of several parts is described with one axis.
fn described(tensors: &Named, bytes: &[usize]) -> Value {
    let described = by_name(tensors).zip(bytes).map(|(parts, bytes)| {
        let (name, tensor) = &parts[0];
        let elements = [bytes / tensor.dtype().size()];
        let (shape, strides): (&[usize], &[usize]) = match parts.len() {
            1 => (tensor.shape(), tensor.strides()),
            _ => (&elements, &[1]),
        };
        json!({ "name": name, "shape": shape, "strides": strides, "dtype": tensor.dtype().name() })
    });
    described.collect()
}

/// Describes a step.
fn described_step(step: &Step) -> Value {
    match step {
        Step::Launch(launch) => json!({
            "kernel": launch.kernel.name(),
            "grid": launch.grid,
            "threads": launch.kernel.block_threads(),
            "shared_bytes": launch.kernel.dynamic_shared_bytes(),
        }),
        _ => json!({ "kernel": "memset" }),
    }
}
