//! Reads and writes safetensors files.
use crate::{CheckpointError, NamedTensor};
use burn::tensor::{Bytes, DType, TensorData, bf16, f16};
use memmap2::Mmap;
use rayon::prelude::*;
use safetensors::tensor::{Dtype, Metadata, SafeTensors, TensorInfo};
use sieve_core::ShownPath;
use sieve_files::{in_place_of, open_file};
use std::cmp::Reverse;
use std::collections::HashMap;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3;

/// Writes `tensors` to `path` and syncs it; returns the checksum (XXH3, 64 bits, hexadecimal) of the file.
///
/// # Errors
/// Any failure of the file system, a full disk among them.
pub fn write_tensor_file(
    path: &Path,
    tensors: &[NamedTensor],
    metadata: Option<HashMap<String, String>>,
) -> Result<String, CheckpointError> {
    let headers = tensors.iter().map(|tensor| TensorHeader {
        name: tensor.name.clone(),
        dtype: tensor.data.dtype,
        shape: tensor.data.shape.to_vec(),
    });
    let headers = headers.collect::<Vec<_>>();
    stream_tensor_file(path, &headers, metadata, |n| Ok(&tensors[n].data.bytes[..]))
}

/// The entry of a tensor in the header of a file.
#[derive(Clone, Debug)]
pub(crate) struct TensorHeader {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
}

/// As [`write_tensor_file`], with values that `read` returns for each index of `headers`, so that only one tensor is in
/// memory at a time.
///
/// # Errors
/// The errors of `read`; values whose length does not fit their header; any failure of the file system.
pub(crate) fn stream_tensor_file<D: Deref<Target = [u8]>>(
    path: &Path,
    headers: &[TensorHeader],
    metadata: Option<HashMap<String, String>>,
    mut read: impl FnMut(usize) -> Result<D, CheckpointError>,
) -> Result<String, CheckpointError> {
    // Sorts as the safetensors library: the widest type first, so that all values are aligned, then by name.
    let mut order: Vec<usize> = (0..headers.len()).collect();
    order.sort_by_key(|&n| (Reverse(to_safetensors(headers[n].dtype)), &headers[n].name));
    let mut end = 0;
    let mut infos = Vec::new();
    for &n in &order {
        let TensorHeader { name, dtype, shape } = &headers[n];
        let start = end;
        end += shape.iter().product::<usize>() * dtype.size();
        let info = TensorInfo { dtype: to_safetensors(*dtype), shape: shape.clone(), data_offsets: (start, end) };
        infos.push((name.clone(), info));
    }
    let sizes = infos.iter().map(|(_, info)| info.data_offsets.1 - info.data_offsets.0);
    let sizes = sizes.collect::<Vec<_>>();
    let header = Metadata::new(metadata, infos).map_err(|error| CheckpointError::malformed(path, error))?;
    let mut header = serde_json::to_vec(&header).expect("plain data serialises");
    // Spaces fill the header up to a multiple of 8 bytes, so that the values are aligned.
    header.resize(header.len().next_multiple_of(size_of::<u64>()), b' ');

    let mut sum = Xxh3::new();
    sieve_files::write_pieces_synced(path, |write| {
        let mut write = |piece: &[u8]| {
            sum.update(piece);
            write(piece)
        };
        write(&(header.len() as u64).to_le_bytes())?;
        write(&header)?;
        for (&n, size) in order.iter().zip(sizes) {
            let values = read(n)?;
            if values.len() != size {
                let (name, len) = (&headers[n].name, values.len());
                let problem = format!("tensor {name} has {len} bytes of values, its shape and type make {size}");
                return Err(CheckpointError::malformed(path, problem));
            }
            write(&values)?;
        }
        Ok(())
    })?;
    Ok(format!("{:016x}", sum.digest()))
}

/// What a file of a checkpoint says of itself: the step that it was written at.
pub(crate) fn of_step(step: u64) -> HashMap<String, String> {
    HashMap::from([(STEP.to_owned(), step.to_string())])
}

/// The step that a file of a checkpoint says it was written at; `None` if it says none.
pub(crate) fn step_of(path: &Path) -> Option<u64> {
    let file = open_file(path).ok()?;
    // SAFETY: files of a checkpoint are never changed in place: they are renamed to their final name, and removed.
    let map = unsafe { Mmap::map(&file) }.ok()?;
    let (_, header) = SafeTensors::read_metadata(&map).ok()?;
    header.metadata().as_ref()?.get(STEP)?.parse().ok()
}

/// The key of [`of_step`].
const STEP: &str = "step";

/// XXH3 hash of the concatenated slices.
pub fn checksum<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u64 {
    let mut sum = Xxh3::new();
    parts.into_iter().for_each(|part| sum.update(part));
    sum.digest()
}

/// A memory-mapped safetensors file: only the tensor that is being read takes memory.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    map: Mmap,
}

/// A tensor in a memory-mapped file.
pub(crate) struct Stored<'a> {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: &'a [u8],
    /// The mapping that holds the bytes.
    map: &'a Mmap,
}

impl TensorFile {
    /// Maps a file and checks its header.
    ///
    /// # Errors
    /// An unreadable file, or one that is not safetensors.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let file = open_file(path).map_err(CheckpointError::io("reading", path))?;
        // SAFETY: files of a checkpoint are never changed in place: they are renamed to their final name, and removed.
        let map = unsafe { Mmap::map(&file) }.map_err(CheckpointError::io("mapping", path))?;
        if let Err(error) = SafeTensors::deserialize(&map) {
            return Err(match (in_place_of(&map), whole_size(&map)) {
                (Some((what, hint)), _) => CheckpointError::refused(format!("{}: {what}", path.shown()), hint),
                (None, Some(size)) if size > map.len() as u64 => CheckpointError::refused(
                    format!("{}: it ends after {} of its {size} bytes", path.shown(), map.len()),
                    "its transfer was broken off, or the disk was full: fetch or copy the file again",
                ),
                _ => CheckpointError::malformed(path, format!("not a safetensors file: {error}")),
            });
        }
        Ok(Self { path: path.to_owned(), map })
    }

    /// Path of the safetensors file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn tensors(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.map).expect("the header was checked when the file was opened")
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.tensors().names().into_iter().map(|name| name.to_string()).collect();
        names.sort();
        names
    }

    /// Reads a tensor that must have this shape.
    ///
    /// # Errors
    /// It is missing or has another shape; an unknown dtype.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<TensorData, CheckpointError> {
        let stored = self.stored(name)?;
        if stored.shape != shape {
            return Err(self.other_shape(name, &stored.shape, shape));
        }
        Ok(stored.data())
    }

    /// Reads a tensor of any shape.
    ///
    /// # Errors
    /// It is missing; an unknown dtype.
    pub fn any_tensor(&self, name: &str) -> Result<TensorData, CheckpointError> {
        Ok(self.stored(name)?.data())
    }

    /// A tensor in the mapped file, without a copy.
    pub(crate) fn stored(&self, name: &str) -> Result<Stored<'_>, CheckpointError> {
        let found = self.find(name)?;
        found.ok_or_else(|| self.other_model(format!("tensor {name} is missing")))
    }

    /// Like [`stored`](Self::stored), but `None` if the tensor is missing.
    pub(crate) fn find(&self, name: &str) -> Result<Option<Stored<'_>>, CheckpointError> {
        let tensors = self.tensors();
        let Ok(view) = tensors.tensor(name) else {
            return Ok(None);
        };
        let dtype = from_safetensors(view.dtype()).ok_or_else(|| {
            let (path, dtype) = (self.path.shown(), view.dtype());
            CheckpointError::refused(
                format!("{path}: tensor {name} is of type {dtype:?}: the weights are quantised"),
                "the file is sound, but only f64, f32, f16 and bf16 weights can be read: take the model's plain \
                 weights, or dequantise these with the program that wrote them",
            )
        })?;
        Ok(Some(Stored { dtype, shape: view.shape().to_vec(), bytes: view.data(), map: &self.map }))
    }

    pub(crate) fn other_shape(&self, name: &str, found: &[usize], wanted: &[usize]) -> CheckpointError {
        self.other_model(format!("tensor {name} is {found:?}, the model expects {wanted:?}"))
    }

    pub(crate) fn other_model(&self, problem: String) -> CheckpointError {
        CheckpointError::other_model(&self.path, problem)
    }
}

/// The size that a safetensors file has by its header, in bytes; `None` if the header cannot be read.
fn whole_size(bytes: &[u8]) -> Option<u64> {
    let (length, rest) = bytes.split_first_chunk::<8>()?;
    let length = u64::from_le_bytes(*length);
    let header = rest.get(..usize::try_from(length).ok()?)?;
    let header: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(header).ok()?;
    let ends = header.values().filter_map(|tensor| tensor["data_offsets"][1].as_u64());
    ends.max()?.checked_add(8 + length)
}

/// Elements that a thread converts at a time.
const PART_ELEMENTS: usize = 1 << 20;

/// Converts numbers of N bytes to numbers of M bytes, both little-endian.
fn convert_each<const N: usize, const M: usize>(from: &[u8], to: &mut [u8], convert: impl Fn([u8; N]) -> [u8; M]) {
    let (from, to) = (from.as_chunks::<N>().0, to.as_chunks_mut::<M>().0);
    from.iter().zip(to).for_each(|(from, to)| *to = convert(*from));
}

impl Stored<'_> {
    /// Writes all values in another type to `to`, on all cores. `to` must have the exact number of bytes. f32 is
    /// rounded to the nearest bf16, ties to even.
    pub(crate) fn convert(&self, dtype: DType, to: &mut [u8]) {
        let [from_bytes, to_bytes] = [self.dtype, dtype].map(|dtype| PART_ELEMENTS * dtype.size());
        let parts = self.bytes.par_chunks(from_bytes).zip(to.par_chunks_mut(to_bytes));
        parts.for_each(|(from, to)| {
            self.convert_part(from, dtype, to);
            self.release(from);
        });
    }

    /// Writes `from`, a part of this tensor's values, as `dtype` to `to`. Types without a case of their own go by f32.
    fn convert_part(&self, from: &[u8], dtype: DType, to: &mut [u8]) {
        match (self.dtype, dtype) {
            (from_dtype, dtype) if from_dtype == dtype => to.copy_from_slice(from),
            (DType::F32, DType::BF16) => {
                convert_each(from, to, |bytes| bf16::from_f32(f32::from_le_bytes(bytes)).to_le_bytes());
            }
            (DType::BF16, DType::F32) => {
                convert_each(from, to, |bytes| bf16::from_le_bytes(bytes).to_f32().to_le_bytes());
            }
            (DType::F16, DType::F32) => {
                convert_each(from, to, |bytes| f16::from_le_bytes(bytes).to_f32().to_le_bytes());
            }
            _ => {
                let bytes = Bytes::from_bytes_vec(from.to_vec());
                let part = TensorData::from_bytes(bytes, [from.len() / self.dtype.size()], self.dtype);
                to.copy_from_slice(&part.convert_dtype(DType::F32).convert_dtype(dtype).bytes);
            }
        }
    }

    /// Drops the resident pages of `bytes`, which have been copied. Resident pages of a mapping count as memory of this
    /// process, beside the copy.
    pub(crate) fn release(&self, bytes: &[u8]) {
        #[cfg(unix)]
        {
            let offset = bytes.as_ptr() as usize - self.map.as_ptr() as usize;
            // SAFETY: the mapping is shared and its file is never changed, so a later access reads the same bytes.
            let advised =
                unsafe { self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, offset, bytes.len()) };
            // If the kernel refuses, the pages stay in memory, and the values are right all the same.
            advised.ok();
        }
    }

    /// All values.
    pub(crate) fn data(&self) -> TensorData {
        let bytes = Bytes::from_bytes_vec(self.bytes.to_vec());
        self.release(self.bytes);
        TensorData::from_bytes(bytes, self.shape.clone(), self.dtype)
    }
}

/// The type in a file; F32 also stands for each type of Burn that is not named here.
fn to_safetensors(dtype: DType) -> Dtype {
    match dtype {
        DType::F64 => Dtype::F64,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I64 => Dtype::I64,
        DType::I32 => Dtype::I32,
        DType::U8 => Dtype::U8,
        DType::U32 => Dtype::U32,
        _ => Dtype::F32,
    }
}

/// The type in Burn; `None` for a type that Sieve does not read.
fn from_safetensors(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F64 => DType::F64,
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::I64 => DType::I64,
        Dtype::I32 => DType::I32,
        Dtype::U8 => DType::U8,
        Dtype::U32 => DType::U32,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::bf16;
    use safetensors::tensor::TensorView;
    use std::cell::Cell;
    use xxhash_rust::xxh3::xxh3_64;

    /// Tensors of three types, in an order that is not the file's; one is a number, one is empty.
    fn tensors() -> Vec<NamedTensor> {
        let tensors = [
            ("b", TensorData::new(vec![1f32, -2.0, 3.5, 0.0, 7.0, 8.0], [2, 3])),
            ("half", TensorData::new(vec![bf16::from_f32(0.5); 3], [3])),
            ("steps", TensorData::new(vec![7i64], [1])),
            ("a", TensorData::new(vec![9f32], Vec::<usize>::new())),
            ("empty", TensorData::new(Vec::<f32>::new(), [0, 4])),
        ];
        let named = tensors.map(|(name, data)| NamedTensor { name: name.to_owned(), data });
        named.to_vec()
    }

    #[test]
    fn a_file_has_the_bytes_that_the_safetensors_crate_writes() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("tensors");
        let tensors = tensors();
        let formats = [None, Some(HashMap::from([("format".to_owned(), "pt".to_owned())]))];
        for (metadata, tensors) in formats.into_iter().zip([&tensors[..], &tensors[1..]]) {
            let sum = write_tensor_file(&path, tensors, metadata.clone()).expect("writable");
            let views = tensors.iter().map(|NamedTensor { name, data }| {
                let dtype = to_safetensors(data.dtype);
                let view = TensorView::new(dtype, data.shape.to_vec(), &data.bytes);
                (name.as_str(), view.expect("whole"))
            });
            let expected = safetensors::tensor::serialize(views, metadata).expect("serialises");
            assert_eq!(std::fs::read(&path).expect("written"), expected);
            assert_eq!(sum, format!("{:016x}", xxh3_64(&expected)));
        }
    }

    /// A tensor's values; the cell has the number of such tensors in memory, and the most so far.
    struct Counted<'a>(Vec<u8>, &'a Cell<[usize; 2]>);

    impl Deref for Counted<'_> {
        type Target = [u8];

        fn deref(&self) -> &[u8] {
            &self.0
        }
    }

    impl Drop for Counted<'_> {
        fn drop(&mut self) {
            let [now, most] = self.1.get();
            self.1.set([now - 1, most]);
        }
    }

    #[test]
    fn one_tensor_is_held_at_a_time_and_a_short_one_is_named() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("tensors");
        let header =
            |number: usize| TensorHeader { name: format!("t{number}"), dtype: DType::F32, shape: vec![number] };
        let headers = [4, 1, 3].map(header);
        let held = Cell::new([0, 0]);
        let read = |bytes_short: usize| {
            let (headers, held) = (&headers, &held);
            move |n: usize| {
                let [now, most] = held.get();
                held.set([now + 1, most.max(now + 1)]);
                let len = 4 * headers[n].shape[0] - bytes_short;
                Ok(Counted(vec![n as u8; len], held))
            }
        };
        stream_tensor_file(&path, &headers, None, read(0)).expect("writable");
        assert_eq!(held.get(), [0, 1]);
        let file = TensorFile::open(&path).expect("written");
        assert_eq!(file.names(), ["t1", "t3", "t4"]);
        assert_eq!(file.stored("t3").expect("there").bytes, [2; 12]);
        let error = stream_tensor_file(&path, &headers, None, read(1)).expect_err("a byte is missing");
        assert!(error.to_string().contains("tensor t1 has 3 bytes"), "{error}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn pages_that_were_read_do_not_stay_in_memory() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("tensors");
        let data = TensorData::new(vec![1f32; 4 << 20], [4 << 20]);
        let name = "weights".to_owned();
        write_tensor_file(&path, &[NamedTensor { name, data }], None).expect("writable");
        let file = TensorFile::open(&path).expect("safetensors");
        // KiB of the file's mapping that are in this process's memory.
        let resident = || -> usize {
            let maps = std::fs::read_to_string("/proc/self/smaps").expect("Linux has it");
            let mut lines = maps.lines().skip_while(|line| !line.ends_with(path.to_str().expect("Unicode")));
            let line = lines.find_map(|line| line.strip_prefix("Rss:")).expect("it is mapped");
            line.trim().trim_end_matches(" kB").parse().expect("a number")
        };
        let stored = file.stored("weights").expect("there");
        assert_eq!(stored.bytes.iter().map(|&byte| u64::from(byte == 0x3f)).sum::<u64>(), 4 << 20);
        assert!(resident() > 16 << 10, "the test reads all {} KiB", resident());
        let mut rounded = vec![0; 8 << 20];
        stored.convert(DType::BF16, &mut rounded);
        assert!(resident() < 1 << 10, "{} KiB stay after a conversion", resident());
        file.any_tensor("weights").expect("there");
        assert!(resident() < 1 << 10, "{} KiB stay after a copy", resident());
        assert!(rounded.as_chunks::<2>().0.iter().all(|x| *x == [0x80, 0x3f]));
    }
}
