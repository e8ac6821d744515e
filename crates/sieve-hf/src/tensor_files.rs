//! Reads the tensors of a checkpoint, from one file or from one for each rank that wrote it.
use crate::tensor_file::Stored;
use crate::{CheckpointError, TensorFile};
use burn::tensor::{Bytes, DType, TensorData};
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;

/// The weights of a folder in the Hugging Face layout that holds one file of them.
pub(crate) const SINGLE: &str = "model.safetensors";
/// The index of a folder that holds several files of weights: it says which tensor is in which file.
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// Tensors that are whole in the first file, or divided into flat pieces in all files.
#[derive(Debug)]
pub struct TensorFiles {
    files: Vec<TensorFile>,
}

impl TensorFiles {
    /// Name of one of `size` files: `model.safetensors`, or of several `model-00001-of-00004.safetensors`.
    pub(crate) fn name(stem: &str, index: usize, size: usize) -> String {
        match size {
            1 => format!("{stem}.safetensors"),
            _ => format!("{stem}-{:05}-of-{size:05}.safetensors", index + 1),
        }
    }

    /// Opens the files of `count` ranks.
    ///
    /// # Errors
    /// As [`TensorFile::open`].
    pub(crate) fn open(folder: &Path, stem: &str, count: usize) -> Result<Self, CheckpointError> {
        let files = (0..count.max(1)).map(|rank| {
            let name = Self::name(stem, rank, count.max(1));
            TensorFile::open(&folder.join(name))
        });
        Ok(Self { files: files.collect::<Result<_, _>>()? })
    }

    /// Path of the first file.
    pub fn path(&self) -> &Path {
        self.files[0].path()
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> Vec<String> {
        let names = self.files.iter().flat_map(TensorFile::names);
        names.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Reads a tensor that must have this shape.
    ///
    /// # Errors
    /// It is missing or has another shape; an unknown dtype.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<TensorData, CheckpointError> {
        self.part(name, shape, None)
    }

    /// Reads a tensor of this shape for a model with parameters of `dtype`. For a bf16 model, f32 values are rounded
    /// while they are read, on all cores; other types are not converted.
    ///
    /// # Errors
    /// As [`tensor`](Self::tensor).
    pub(crate) fn tensor_for(&self, name: &str, shape: &[usize], dtype: DType) -> Result<TensorData, CheckpointError> {
        let pieces = self.pieces(name, shape)?;
        let stored = pieces[0].dtype;
        let rounds = stored == DType::F32 && dtype == DType::BF16;
        let dtype = if rounds { DType::BF16 } else { stored };
        let count = shape.iter().product::<usize>();
        let mut bytes = vec![0; count * dtype.size()];
        let mut rest = &mut bytes[..];
        for piece in pieces {
            // The piece's elements, in bytes of the new type.
            let of_piece;
            (of_piece, rest) = rest.split_at_mut(piece.bytes.len() / stored.size() * dtype.size());
            piece.convert(dtype, of_piece);
        }
        Ok(TensorData::from_bytes(Bytes::from_bytes_vec(bytes), shape.to_vec(), dtype))
    }

    /// Reads a tensor of this shape, or a range of its flattened elements.
    ///
    /// # Errors
    /// As [`tensor`](Self::tensor); a range beyond the end of the tensor.
    pub fn part(
        &self,
        name: &str,
        shape: &[usize],
        range: Option<Range<usize>>,
    ) -> Result<TensorData, CheckpointError> {
        let first = &self.files[0];
        let pieces = self.pieces(name, shape)?;
        let dtype = pieces[0].dtype;
        let count = shape.iter().product::<usize>();
        let wanted = range.clone().unwrap_or(0..count);
        if wanted.end > count {
            return Err(first.other_model(format!("tensor {name} has {count} elements")));
        }
        let mut bytes = Vec::with_capacity(wanted.len() * dtype.size());
        let mut start = 0;
        for piece in pieces {
            let len = piece.bytes.len() / dtype.size();
            // The elements of this piece that the wanted range covers.
            let from = wanted.start.clamp(start, start + len) - start;
            let to = wanted.end.clamp(start, start + len) - start;
            let read = &piece.bytes[from * dtype.size()..to * dtype.size()];
            bytes.extend_from_slice(read);
            piece.release(read);
            start += len;
        }
        let shape = match range {
            Some(range) => vec![range.len()],
            None => shape.to_vec(),
        };
        Ok(TensorData::from_bytes(Bytes::from_bytes_vec(bytes), shape, dtype))
    }

    /// The pieces of a tensor in the order of the files; a single one if the first file holds the whole tensor.
    fn pieces(&self, name: &str, shape: &[usize]) -> Result<Vec<Stored<'_>>, CheckpointError> {
        let first = &self.files[0];
        let stored = first.stored(name)?;
        if stored.shape == shape {
            return Ok(vec![stored]);
        }
        let mut pieces = vec![stored];
        for file in &self.files[1..] {
            pieces.push(file.stored(name)?);
        }
        let mut lengths = pieces.iter().map(|piece| piece.shape.iter().product::<usize>());
        let total = lengths.try_fold(0usize, usize::checked_add);
        let is_flat = pieces.iter().all(|piece| piece.shape.len() == 1);
        let has_one_dtype = pieces.iter().all(|piece| piece.dtype == pieces[0].dtype);
        if pieces.len() > 1 && is_flat && has_one_dtype && total == Some(shape.iter().product()) {
            return Ok(pieces);
        }
        let found = match total {
            Some(total) if pieces.len() > 1 => vec![total],
            _ => pieces.swap_remove(0).shape,
        };
        Err(first.other_shape(name, &found, shape))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{NamedTensor, write_tensor_file};

    fn written(folder: &Path, rank: usize, size: usize, tensors: &[(&str, TensorData)]) {
        let tensors = tensors.iter().map(|(name, data)| NamedTensor { name: (*name).to_owned(), data: data.clone() });
        let path = folder.join(TensorFiles::name("model", rank, size));
        write_tensor_file(&path, &tensors.collect::<Vec<_>>(), None).expect("written");
    }

    #[test]
    fn pieces_of_several_files_are_one_tensor() {
        let dir = tempfile::tempdir().expect("a folder");
        let values = (0..12u8).map(f32::from).collect::<Vec<_>>();
        // Pieces of 5, 0 and 7 elements: one is empty. The norm is whole in the first file.
        let cuts = [0, 5, 5, 12];
        for rank in 0..3 {
            let own = values[cuts[rank]..cuts[rank + 1]].to_vec();
            let len = own.len();
            let mut tensors = vec![("a", TensorData::new(own, [len]))];
            if rank == 0 {
                tensors.push(("norm", TensorData::new(vec![7f32; 2], [2])));
            }
            written(dir.path(), rank, 3, &tensors);
        }
        let files = TensorFiles::open(dir.path(), "model", 3).expect("three files");
        assert_eq!(files.names(), ["a", "norm"]);
        let whole = files.tensor("a", &[3, 4]).expect("it is there");
        assert_eq!(whole, TensorData::new(values.clone(), [3, 4]));
        for dtype in [DType::F32, DType::BF16] {
            let made = files.tensor_for("a", &[3, 4], dtype).expect("it is there");
            assert_eq!(made, whole.clone().convert_dtype(dtype));
        }
        let norm = files.tensor("norm", &[2]).expect("it is there");
        assert_eq!(norm, TensorData::new(vec![7f32; 2], [2]));
        for start in 0..=12 {
            for end in start..=12 {
                let part = files.part("a", &[3, 4], Some(start..end)).expect("inside");
                let expected = TensorData::new(values[start..end].to_vec(), [end - start]);
                assert_eq!(part, expected);
            }
        }
        for (name, shape) in [("a", [4, 4]), ("a", [2, 4]), ("b", [1, 1]), ("norm", [1, 2])] {
            let error = files.tensor(name, &shape).expect_err("another model");
            let error = error.to_string();
            assert!(error.contains("does not hold this model's weights"), "{error}");
        }
        assert!(files.part("a", &[3, 4], Some(3..13)).is_err());
    }

    #[test]
    fn one_file_holds_whole_tensors() {
        let dir = tempfile::tempdir().expect("a folder");
        let data = TensorData::new(vec![1f32, 2.0, 3.0, 4.0], [2, 2]);
        written(dir.path(), 0, 1, &[("a", data.clone())]);
        let files = TensorFiles::open(dir.path(), "model", 1).expect("a file");
        assert_eq!(files.tensor("a", &[2, 2]).expect("it is there"), data);
        let part = files.part("a", &[2, 2], Some(1..3)).expect("inside");
        assert_eq!(part, TensorData::new(vec![2f32, 3.0], [2]));
        let error = files.tensor("a", &[4]).expect_err("another shape");
        assert!(error.to_string().contains("[2, 2]"), "{error}");
    }
}
