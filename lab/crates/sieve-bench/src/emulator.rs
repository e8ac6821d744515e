//! The CPU emulator: runs the launches that the wrappers record without a GPU.
//!
//! A kernel's text, exactly as NVRTC would get it, becomes a C++ program. Headers in `tests/gpu/emulator` define CUDA's
//! types and functions, each thread is a fiber, and each `asm` statement becomes a call of a function of `ptx.h`. g++
//! compiles each specialisation once. The emulator checks results, not speed; tests/gpu/emulator/README.md lists which
//! errors it finds and which it cannot.
use crate::device::Device;
use crate::strided::place;
use half::bf16;
use sieve_core::ShownPath;
use sieve_kernels::{AttentionShape, CudaTensor, DType, Hardware, KernelError, Launch, Recorder, Step, recorded_at};
use std::cell::RefCell;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

const EMU: &str = include_str!("../../../../tests/gpu/emulator/emu.h");
const PTX: &str = include_str!("../../../../tests/gpu/emulator/ptx.h");
const RUNNER: &str = include_str!("../../../../tests/gpu/emulator/runner.h");

/// Flags of g++. `-mfma` and `-ffp-contract` fuse multiply-adds as nvcc does, so that rounding errors are the same.
/// `-U_FORTIFY_SOURCE`: a fortified longjmp would refuse the jumps between fibers' stacks.
const FLAGS: [&str; 6] = ["-std=c++17", "-O1", "-mfma", "-ffp-contract=fast", "-U_FORTIFY_SOURCE", "-w"];

/// Size of a memory page in bytes.
const PAGE: usize = 4096;

/// Runs a plan's steps on the CPU. `sizes` are the bytes of each buffer, `held` the contents of the first ones; the
/// others begin as NaN. Returns the contents of all buffers afterwards. The folder `programs` keeps compiled kernels.
///
/// # Errors
/// A folder that cannot be written; a kernel that accesses memory outside its buffers, or whose threads deadlock.
pub fn replay_emulated(
    programs: &Path,
    sizes: &[usize],
    held: &[Vec<u8>],
    steps: &[Step],
) -> Result<Vec<Vec<u8>>, KernelError> {
    let emulator = Emulator::new(programs).map_err(|e| failed("memory", &e))?;
    // The first tensors of a recorder have the buffers 0, 1, .., so that buffer numbers in `steps` are indices into
    // `sizes`.
    for &bytes in sizes {
        emulator.recorder.tensor(&[bytes], DType::U8);
    }
    emulator.make_buffers().map_err(|e| failed("memory", &e))?;
    for (buffer, bytes) in held.iter().enumerate() {
        emulator.write(buffer, bytes).map_err(|e| failed("memory", &e))?;
    }
    steps.iter().try_for_each(|step| emulator.step(step))?;
    let read = |buffer| emulator.read(buffer).map_err(|e| failed("reading", &e));
    (0..sizes.len()).map(read).collect()
}

/// A device for launch wrappers whose buffers are files and whose kernels are programs.
pub(crate) struct Emulator {
    recorder: Recorder,
    /// Folder of compiled kernels, kept between runs.
    programs: PathBuf,
    /// Folder of this emulator's buffers, and of a program while it is compiled; removed in the end.
    memory: PathBuf,
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    /// Number of buffers that have a file.
    made: usize,
    /// Number of launches so far; it seeds the order in which a launch runs its warps.
    launches: u64,
    /// Names of the kernels that the emulator ran.
    kernels: Vec<&'static str>,
}

impl Emulator {
    /// Emulates a GPU of compute capability 8.9 with the shared memory of an A100. `programs` keeps compiled kernels.
    ///
    /// # Errors
    /// A folder that cannot be created.
    pub(crate) fn new(programs: &Path) -> io::Result<Self> {
        Self::with_shared_bytes(programs, Hardware::AMPERE.max_shared_bytes)
    }

    /// An emulator with another limit of shared memory for a thread block.
    fn with_shared_bytes(programs: &Path, max_shared_bytes: usize) -> io::Result<Self> {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let memory = programs.join(format!("memory-{}-{number}", std::process::id()));
        fs::create_dir_all(&memory)?;
        Ok(Self {
            recorder: Recorder::new(Hardware { compute_capability: (8, 9), max_shared_bytes, ..Hardware::AMPERE }),
            programs: programs.to_owned(),
            memory,
            state: RefCell::default(),
        })
    }

    /// Names of the kernels that ran, sorted, each once.
    pub(crate) fn kernels(&self) -> Vec<&'static str> {
        let mut names = self.state.borrow().kernels.clone();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// Runs the steps that were recorded since the last call.
    fn catch_up(&self) -> Result<(), KernelError> {
        self.make_buffers().map_err(|e| failed("memory", &e))?;
        self.recorder.take_steps().iter().try_for_each(|step| self.step(step))
    }

    /// Launches a kernel, fills a buffer, or copies a strided tensor into a contiguous buffer, as recorded.
    fn step(&self, step: &Step) -> Result<(), KernelError> {
        match step {
            Step::Launch(launch) => self.run(launch)?,
            Step::Fill { buffer, element } => {
                let bytes = element.repeat(self.recorder.buffers()[*buffer] / element.len());
                self.write(*buffer, &bytes).map_err(|e| failed("fill", &e))?;
            }
            Step::Gather { from, to, shape, strides, element_bytes } => {
                let all = self.read(from.buffer).map_err(|e| failed("copy", &e))?;
                let mut gathered = Vec::new();
                for at in 0..shape.iter().product() {
                    let first = from.offset_bytes + place(at, shape, strides) * element_bytes;
                    gathered.extend(&all[first..first + element_bytes]);
                }
                self.write(*to, &gathered).map_err(|e| failed("copy", &e))?;
            }
        }
        Ok(())
    }

    /// Creates the files of buffers that have none yet. Every byte is 0xff, so that an unwritten float is NaN.
    fn make_buffers(&self) -> io::Result<()> {
        let buffers = self.recorder.buffers();
        let made = std::mem::replace(&mut self.state.borrow_mut().made, buffers.len());
        for (buffer, &bytes) in buffers.iter().enumerate().skip(made) {
            self.write(buffer, &vec![0xff; bytes])?;
        }
        Ok(())
    }

    fn file(&self, buffer: usize) -> PathBuf {
        self.memory.join(buffer.to_string())
    }

    /// Bytes before a buffer in its file. The buffer ends at the end of a page, so that a read behind it faults.
    fn padding(bytes: usize) -> usize {
        let padded = bytes.next_multiple_of(16);
        padded.next_multiple_of(PAGE).max(PAGE) - padded
    }

    fn write(&self, buffer: usize, bytes: &[u8]) -> io::Result<()> {
        let mut all = vec![0; Self::padding(bytes.len())];
        all.extend(bytes);
        all.resize(all.len().next_multiple_of(PAGE), 0);
        fs::write(self.file(buffer), all)
    }

    fn read(&self, buffer: usize) -> io::Result<Vec<u8>> {
        let bytes = self.recorder.buffers()[buffer];
        let all = fs::read(self.file(buffer))?;
        Ok(all[Self::padding(bytes)..][..bytes].to_vec())
    }

    /// Runs a launch's program. Its arguments: grid, threads of a block, bytes of dynamic shared memory, seed, number
    /// of params' words, the words, and each tensor as `file:bytes of the buffer:offset in bytes`.
    fn run(&self, launch: &Launch) -> Result<(), KernelError> {
        let name = launch.kernel.name();
        let seed = {
            let mut state = self.state.borrow_mut();
            state.launches += 1;
            state.kernels.push(name);
            state.launches
        };
        let mut command = Command::new(self.program(launch)?);
        command.args(launch.grid.map(|size| size.to_string()));
        let sizes =
            [launch.kernel.block_threads(), launch.kernel.dynamic_shared_bytes(), seed as usize, launch.words.len()];
        command.args(sizes.map(|size| size.to_string()));
        command.args(launch.words.iter().map(u64::to_string));
        let buffers = self.recorder.buffers();
        for view in &launch.tensors {
            let (file, bytes) = (self.file(view.buffer), buffers[view.buffer]);
            command.arg(format!("{}:{bytes}:{}", file.shown(), view.offset_bytes));
        }
        let done = command.output().map_err(|e| failed(name, &e))?;
        if done.status.success() {
            return Ok(());
        }
        let what = match done.status.code() {
            Some(2) => "threads wait for each other for ever",
            Some(3) => "it wrote past its dynamic shared memory",
            Some(4) => "its arguments do not fit the launch",
            _ => "it read or wrote outside its buffers, or at an address that is not aligned",
        };
        let words = String::from_utf8_lossy(&done.stderr);
        Err(failed(name, &format!("{what} ({}) {words}", done.status)))
    }

    /// The program of a specialisation, compiled at its first use.
    fn program(&self, launch: &Launch) -> Result<PathBuf, KernelError> {
        let (name, text) = (launch.kernel.name(), launch.kernel.text()?);
        let header = self.header().map_err(|e| failed(name, &e))?;
        let source = program_text(&header, launch.kernel.name(), &text.text);
        let program = self.programs.join(format!("{name}-{:016x}", fnv1a(&format!("{FLAGS:?}{source}"))));
        if program.is_file() {
            return Ok(program);
        }
        let [file, built] = ["program.cpp", "program"].map(|name| self.memory.join(name));
        fs::write(&file, source).map_err(|e| failed(name, &e))?;
        let done = Command::new("g++")
            .args(FLAGS)
            .arg("-I")
            .arg(&self.programs)
            .arg("-o")
            .args([&built, &file])
            .output()
            .map_err(|e| failed(name, &format!("g++ cannot be started: {e}")))?;
        if !done.status.success() {
            let log = String::from_utf8_lossy(&done.stderr).into_owned();
            return Err(KernelError::Compile { kernel: name, log });
        }
        fs::rename(&built, &program).map_err(|e| failed(name, &e))?;
        Ok(program)
    }

    /// Writes the header that all programs include and returns its name. A precompiled form saves two thirds of a small
    /// kernel's compile time; where g++ cannot precompile it, each program compiles the text.
    fn header(&self) -> io::Result<String> {
        let text = format!("{EMU}\n{PTX}\n");
        let name = format!("emulator-{:016x}.h", fnv1a(&format!("{FLAGS:?}{text}")));
        let header = self.programs.join(&name);
        if header.is_file() {
            return Ok(name);
        }
        let [file, built] = ["emulator.h", "emulator.h.gch"].map(|part| self.memory.join(part));
        fs::write(&file, text)?;
        let done = Command::new("g++").args(FLAGS).args(["-x", "c++-header", "-o"]).args([&built, &file]).output()?;
        if done.status.success() {
            fs::rename(&built, header.with_extension("h.gch"))?;
        }
        fs::rename(&file, header)?;
        Ok(name)
    }

    fn put(&self, bytes: &[u8], shape: &[usize], dtype: DType) -> CudaTensor {
        let tensor = self.recorder.tensor(shape, dtype);
        let at = recorded_at(&tensor).expect("the recorder made it");
        self.make_buffers().and_then(|()| self.write(at.buffer, bytes)).expect("the folder of buffers can be written");
        tensor
    }

    /// The bytes of a tensor, contiguous, after all launches that were recorded so far have run.
    fn get(&self, tensor: &CudaTensor) -> Result<Vec<u8>, KernelError> {
        let tensor = tensor.contiguous();
        self.catch_up()?;
        let at = recorded_at(&tensor).expect("tensors of one recorder");
        let all = self.read(at.buffer).map_err(|e| failed("reading", &e))?;
        let bytes = tensor.num_elements() * tensor.dtype().size();
        Ok(all[at.offset_bytes..][..bytes].to_vec())
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.memory);
    }
}

impl Device for Emulator {
    fn float(&self, values: &[f32], shape: &[usize], dtype: DType) -> CudaTensor {
        let bytes: Vec<u8> = match dtype {
            DType::BF16 => {
                let halves = values.iter().map(|&x| bf16::from_f32(x));
                halves.flat_map(bf16::to_le_bytes).collect()
            }
            _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        };
        self.put(&bytes, shape, dtype)
    }

    fn int(&self, values: &[i32], shape: &[usize]) -> CudaTensor {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.put(&bytes, shape, DType::I32)
    }

    /// Nothing to do: new buffers of the emulator hold NaN.
    fn poison(&self, _shape: AttentionShape) {}

    fn floats(&self, tensor: &CudaTensor) -> Result<Vec<f32>, KernelError> {
        let bytes = self.get(tensor)?;
        Ok(match tensor.dtype() {
            DType::BF16 => {
                let halves = bytes.as_chunks::<2>().0.iter();
                halves.map(|&half| bf16::from_le_bytes(half).to_f32()).collect()
            }
            DType::U8 => bytes.into_iter().map(f32::from).collect(),
            _ => {
                let words = bytes.as_chunks::<4>().0.iter();
                words.map(|&word| f32::from_le_bytes(word)).collect()
            }
        })
    }

    fn ints(&self, tensor: &CudaTensor) -> Result<Vec<i32>, KernelError> {
        let bytes = self.get(tensor)?;
        let words = bytes.as_chunks::<4>().0.iter();
        Ok(words.map(|&word| i32::from_le_bytes(word)).collect())
    }
}

fn failed(kernel: &'static str, reason: &dyn std::fmt::Display) -> KernelError {
    let reason = reason.to_string();
    KernelError::Launch { kernel, reason }
}

/// The FNV-1a hash of a text, which names its program in the cache.
fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// The C++ program of a kernel's text, after the header.
fn program_text(header: &str, entry: &str, kernel: &str) -> String {
    let mut text = format!("#include \"{header}\"\n");
    text.push_str(&without_asm(&with_shared_memory(&with_own_entry(entry, kernel))));
    text.push_str(RUNNER);
    text.push_str(&format!(
        "int main(int count, char** text) {{ return emu::run_program(count, text, {entry}{ENTRY}); }}\n"
    ));
    text
}

/// Suffix that the emulator adds to the entry point's name: a device function may have the same name, which C++ would
/// not tell apart from `extern "C"`.
const ENTRY: &str = "_entry";

/// The text with the suffix [`ENTRY`] added to the entry point's name.
fn with_own_entry(entry: &str, kernel: &str) -> String {
    let mut parts = kernel.split("extern \"C\"");
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        // #if may choose between two signatures of the entry point before its `{`.
        let (mut signature, body) = part.split_at(part.find('{').unwrap_or(part.len()));
        text.push_str("extern \"C\"");
        while let Some(at) = signature.find(&format!("{entry}(")) {
            let (before, from) = signature.split_at(at);
            text.push_str(before);
            text.push_str(entry);
            if !before.ends_with(|c: char| c.is_alphanumeric() || c == '_') {
                text.push_str(ENTRY);
            }
            signature = &from[entry.len()..];
        }
        text.push_str(signature);
        // A signature after #else begins its line; calls of a function with the same name are indented.
        let (from, to) = (format!("\n{entry}("), format!("\n{entry}{ENTRY}("));
        text.push_str(&body.replace(&from, &to));
    }
    text
}

/// Replaces `extern __shared__ TYPE name[];` by a pointer to the emulator's dynamic shared memory.
fn with_shared_memory(kernel: &str) -> String {
    let mut text = String::with_capacity(kernel.len());
    for line in kernel.lines() {
        match declared_shared(line) {
            Some((kind, name)) => {
                text.push_str(&format!("{kind}* const {name} = ({kind}*)emu::dynamic_shared;"));
            }
            None => text.push_str(line),
        }
        text.push('\n');
    }
    text
}

/// Type and name of a declaration of dynamic shared memory.
fn declared_shared(line: &str) -> Option<(&str, &str)> {
    let rest = line.trim_start().strip_prefix("extern __shared__ ")?;
    let rest = match rest.strip_prefix("__align__(") {
        Some(aligned) => aligned.split_once(')')?.1,
        None => rest,
    };
    let (declared, _) = rest.split_once("[]")?;
    let (kind, name) = declared.trim().rsplit_once(' ')?;
    Some((kind, name))
}

/// Replaces each asm statement by a call of the function that stands for its instruction.
fn without_asm(kernel: &str) -> String {
    let mut text = String::with_capacity(kernel.len());
    let mut rest = kernel;
    while let Some(at) = rest.find("asm") {
        let (before, statement) = rest.split_at(at);
        let starts_word = !before.ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '"');
        let parsed = statement_end(&statement[3..]).filter(|_| starts_word);
        text.push_str(before);
        match parsed {
            Some((inside, after)) => {
                text.push_str(&call_of(inside));
                rest = after;
            }
            None => {
                text.push_str("asm");
                rest = &statement[3..];
            }
        }
    }
    text.push_str(rest);
    text
}

/// Splits ` [volatile] (...); rest` into the text between the parentheses and the rest after the semicolon.
fn statement_end(text: &str) -> Option<(&str, &str)> {
    let text = text.trim_start();
    let text = text.strip_prefix("volatile").unwrap_or(text).trim_start();
    let (inside, after) = parenthesised(text)?;
    Some((inside, after.trim_start().strip_prefix(';')?))
}

/// Splits `(...)rest` into the text between the matching parentheses and the rest; parentheses in string literals do
/// not count.
fn parenthesised(text: &str) -> Option<(&str, &str)> {
    let inside = text.strip_prefix('(')?;
    let (mut depth, mut quoted) = (1, false);
    for (at, c) in inside.char_indices() {
        match c {
            '"' => quoted = !quoted,
            '(' if !quoted => depth += 1,
            ')' if !quoted => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some((&inside[..at], &inside[at + 1..]));
        }
    }
    None
}

/// The call that stands for an asm statement: `"opcode %0, [%1], 16;" : outputs : inputs : clobbers`.
fn call_of(statement: &str) -> String {
    let (template, rest) = template_of(statement);
    let operands = operands(rest);
    let named = |word: &str| -> String {
        let index = word.strip_prefix('%').and_then(|n| n.parse::<usize>().ok());
        index.and_then(|n| operands.get(n)).cloned().unwrap_or_else(|| word.to_owned())
    };
    let function = |opcode: &str| opcode.replace("::", "_").replace('.', "_");
    if template.starts_with('{') {
        // A block of several instructions: ptx.h names its function after the last one, in the line before `}`, without
        // its predicate `@p`. All operands are passed in the order of their numbers.
        let lines: Vec<&str> = template.split("\\n").collect();
        let last = lines.iter().rev().nth(1).copied().unwrap_or_default();
        let opcode = last.split_whitespace().find(|word| !word.starts_with('@')).unwrap_or_default();
        return format!("ptx_block_{}({});", function(opcode), operands.join(", "));
    }
    let (opcode, arguments) = template.split_once(' ').unwrap_or((&template, ""));
    if opcode.is_empty() {
        // A barrier for the compiler alone.
        return ";".to_owned();
    }
    let words = arguments.split([',', ' ', '[', ']', '{', '}', ';']).filter(|word| !word.is_empty());
    let words: Vec<String> = words.map(named).collect();
    let opcode = opcode.trim_end_matches(';');
    format!("ptx_{}({});", function(opcode), words.join(", "))
}

/// Joins the string literals that an asm statement begins with; returns them and the rest of the statement.
fn template_of(statement: &str) -> (String, &str) {
    let (mut template, mut rest) = (String::new(), statement.trim_start());
    while let Some((literal, after)) = rest.strip_prefix('"').and_then(|r| r.split_once('"')) {
        template.push_str(literal);
        rest = after.trim_start();
    }
    (template, rest)
}

/// The expressions of an asm statement's outputs and inputs: the parentheses after each `"constraint"`.
fn operands(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut rest = text;
    while let Some((_, after)) = rest.split_once('"') {
        let Some((_, after)) = after.split_once('"') else {
            break;
        };
        rest = after;
        if let Some((expression, after)) = parenthesised(after) {
            found.push(expression.to_owned());
            rest = after;
        }
    }
    found
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::error::Result;
    use crate::extent::Extent;
    use crate::report::Report;
    use crate::{decode, select, selection, sparse};
    use rayon::prelude::*;

    /// Shared memory of a block on the usual emulated GPU.
    pub(crate) const AMPERE: usize = Hardware::AMPERE.max_shared_bytes;

    /// Runs `check` of kernels on an emulated GPU whose blocks may have `max_shared_bytes` of shared memory: no row
    /// fails, and there are at least `least_rows`. Nothing is checked where no C++ compiler is installed. Compiled
    /// programs are cached by their source text, in the cache of the example `emulate`.
    pub(crate) fn emulated(
        name: &str,
        max_shared_bytes: usize,
        least_rows: usize,
        check: impl FnOnce(&Emulator, &mut Report) -> Result<()>,
    ) {
        if Command::new("g++").arg("--version").output().is_err() {
            return eprintln!("no g++: the emulator cannot run");
        }
        let programs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../target/emulator");
        let emulator = Emulator::with_shared_bytes(&programs, max_shared_bytes);
        let emulator = emulator.expect("a folder for programs");
        let mut report = Report::default();
        check(&emulator, &mut report).expect("cases");
        assert_eq!(report.failed(), 0, "{name}: {report}");
        assert!(report.rows().len() >= least_rows, "{name}: {report}");
    }

    /// A check of launch wrappers: its name, the check, its calls, shared memory of a block, rows at least.
    type Part = (&'static str, fn(&mut Report, &dyn Device, &Extent) -> Result<()>, Extent, usize, usize);

    #[test]
    fn emulated_wrappers_agree_with_their_definitions() {
        let of = Extent::emulated;
        let parts: [Part; 4] = [
            ("DMA's selection", selection::check_wrappers, of(20, 130, 5), AMPERE, 8),
            ("attention under masks", sparse::check_wrappers, of(40, 130, 3), AMPERE, 8),
            ("selectors", select::check_wrappers, of(4, 130, 3), AMPERE, 14),
            // 99 KiB: blocks of two, four and eight warps.
            ("decoding", decode::check_wrappers, of(4, 130, 7), 99 << 10, 7),
        ];
        parts.into_par_iter().for_each(|(name, check, extent, shared, least)| {
            emulated(name, shared, least, |emulator, report| check(report, emulator, &extent));
        });
    }

    #[test]
    fn buffers_end_with_their_page() {
        // Sizes are rounded up to 16 bytes, so that buffers begin at multiples of 16.
        for (bytes, padding) in [(16, PAGE - 16), (17, PAGE - 32), (PAGE, 0), (PAGE + 1, PAGE - 16)] {
            assert_eq!(Emulator::padding(bytes), padding);
        }
        assert_eq!(place(5, &[2, 3], &[10, 2]), 14); // element (1, 2)
    }
}
