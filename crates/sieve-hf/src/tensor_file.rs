//! Safetensors files.
use crate::{CheckpointError, NamedTensor};
use burn::tensor::{DType, TensorData};
use memmap2::Mmap;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Writes `tensors` to `path` and syncs it; returns the checksum (XXH3, 64 bits, hexadecimal) of the file.
///
/// # Errors
/// Any failure of the file system, a full disk among them.
pub fn write_tensor_file(
    path: &Path,
    tensors: &[NamedTensor],
    metadata: Option<HashMap<String, String>>,
) -> Result<String, CheckpointError> {
    let views = tensors.iter().map(|tensor| {
        let dtype = to_safetensors(tensor.data.dtype);
        TensorView::new(dtype, tensor.data.shape.to_vec(), &tensor.data.bytes)
            .map(|view| (tensor.name.as_str(), view))
            .map_err(|error| malformed(path, &format!("tensor {}: {error}", tensor.name)))
    });
    let views = views.collect::<Result<Vec<_>, _>>()?;
    let bytes = safetensors::tensor::serialize(views, metadata).map_err(|error| malformed(path, &error.to_string()))?;
    sieve_files::write_synced(path, &bytes)?;
    Ok(format!("{:016x}", xxh3_64(&bytes)))
}

/// XXH3 of bytes, one slice after another.
pub fn checksum<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u64 {
    let mut sum = Xxh3::new();
    parts.into_iter().for_each(|part| sum.update(part));
    sum.digest()
}

/// A safetensors file, mapped: what is read of it is in memory, and no more.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    /// `None` of an empty file, which no system maps.
    map: Option<Mmap>,
}

/// A tensor as a file holds it.
pub(crate) struct Stored<'a> {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: &'a [u8],
}

impl TensorFile {
    /// Maps a file and checks its header.
    ///
    /// # Errors
    /// An unreadable file, or one that is not safetensors.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let file = File::open(path).map_err(CheckpointError::io("reading", path))?;
        let metadata = file.metadata();
        let len = metadata.map_err(CheckpointError::io("reading", path))?.len();
        let map = match len {
            0 => None,
            // SAFETY: checkpoints are renamed into place and removed, never written again.
            _ => Some(unsafe { Mmap::map(&file) }.map_err(CheckpointError::io("mapping", path))?),
        };
        let file = Self {
            path: path.to_owned(),
            map,
        };
        SafeTensors::deserialize(file.bytes())
            .map_err(|error| malformed(path, &format!("not a safetensors file: {error}")))?;
        Ok(file)
    }

    /// Where the file lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or(&[])
    }

    fn tensors(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(self.bytes()).expect("the header was checked when the file was opened")
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self
            .tensors()
            .names()
            .into_iter()
            .map(|name| name.to_string())
            .collect();
        names.sort();
        names
    }

    /// One tensor of the given shape.
    ///
    /// # Errors
    /// [`CheckpointError::OtherModel`] when it is missing or has another shape; an unknown dtype.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<TensorData, CheckpointError> {
        let stored = self.stored(name)?;
        if stored.shape != shape {
            return Err(self.other_shape(name, &stored.shape, shape));
        }
        Ok(stored.data())
    }

    /// One tensor of whatever shape.
    ///
    /// # Errors
    /// [`CheckpointError::OtherModel`] when it is missing; an unknown dtype.
    pub fn any_tensor(&self, name: &str) -> Result<TensorData, CheckpointError> {
        Ok(self.stored(name)?.data())
    }

    /// One tensor where it lies.
    pub(crate) fn stored(&self, name: &str) -> Result<Stored<'_>, CheckpointError> {
        let found = self.find(name)?;
        found.ok_or_else(|| self.other_model(format!("tensor {name} is missing")))
    }

    /// The same; `None` where it is missing.
    pub(crate) fn find(&self, name: &str) -> Result<Option<Stored<'_>>, CheckpointError> {
        let tensors = self.tensors();
        let Ok(view) = tensors.tensor(name) else {
            return Ok(None);
        };
        let dtype = from_safetensors(view.dtype())
            .ok_or_else(|| malformed(&self.path, &format!("tensor {name} has dtype {:?}", view.dtype())))?;
        Ok(Some(Stored {
            dtype,
            shape: view.shape().to_vec(),
            bytes: view.data(),
        }))
    }

    pub(crate) fn other_shape(&self, name: &str, found: &[usize], wanted: &[usize]) -> CheckpointError {
        self.other_model(format!("tensor {name} is {found:?}, the model wants {wanted:?}"))
    }

    pub(crate) fn other_model(&self, problem: String) -> CheckpointError {
        CheckpointError::OtherModel {
            path: self.path.clone(),
            problem,
        }
    }
}

impl Stored<'_> {
    fn data(&self) -> TensorData {
        let bytes = burn::tensor::Bytes::from_bytes_vec(self.bytes.to_vec());
        TensorData::from_bytes(bytes, self.shape.clone(), self.dtype)
    }
}

fn malformed(path: &Path, problem: &str) -> CheckpointError {
    CheckpointError::Malformed {
        path: path.to_owned(),
        problem: problem.to_owned(),
    }
}

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
