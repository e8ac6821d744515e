//! Maps a checkpoint's tensors to the tensors of `transformers`.
use super::form::Form;
use super::{Architecture, m3};
use crate::tensor_file::TensorHeader;
use crate::{CheckpointError, TensorFiles};
use burn::tensor::{DType, TensorData};
use sieve_core::ModelShape;
use sieve_core::kinds::{ParamSpec, Part};
use std::collections::BTreeSet;
use std::ops::Range;

/// One tensor of an exported model.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ExportTensor {
    /// Name of the tensor in `transformers`.
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) source: Source,
    pub(crate) form: Form,
}

/// Where the values of an exported tensor come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// `rows` of a checkpoint's tensor, which has `num_rows` rows.
    Rows { name: String, rows: Range<usize>, num_rows: usize },
    /// All ones: the class multiplies by a tensor that the model does not have.
    Ones,
}

impl ExportTensor {
    pub(super) fn num_elements(&self) -> u64 {
        self.shape.iter().map(|&size| size as u64).product()
    }

    pub(super) fn num_bytes(&self, dtype: DType) -> u64 {
        self.num_elements() * dtype.size() as u64
    }

    /// Name, type and shape for the header of a file.
    pub(super) fn header(&self, dtype: DType) -> TensorHeader {
        TensorHeader { name: self.name.clone(), dtype, shape: self.shape.clone() }
    }

    /// Reads the values as `dtype`; other rows of the checkpoint's tensor are not read.
    pub(super) fn read(&self, weights: &TensorFiles, dtype: DType) -> Result<TensorData, CheckpointError> {
        let data = match &self.source {
            Source::Ones => TensorData::new(vec![1f32; self.num_elements() as usize], self.shape.clone()),
            Source::Rows { name, rows, num_rows } => {
                let mut shape = self.shape.clone();
                shape[0] = *num_rows;
                let width: usize = shape[1..].iter().product();
                let mut data = weights.part(name, &shape, Some(rows.start * width..rows.end * width))?;
                data.shape = self.shape.clone().into();
                data
            }
        };
        Ok(self.form.stored(data).convert_dtype(dtype))
    }
}

/// All tensors of the export, in the order of the forward pass: each part of the model's parameters under its name in
/// `transformers`.
pub(crate) fn tensors_of(shape: &ModelShape, architecture: Architecture) -> Vec<ExportTensor> {
    // Doge always has residual scales.
    let residual_scale = shape.residual_scale || architecture == Architecture::Doge;
    let named = ModelShape { residual_scale, ..shape.clone() };
    let mut all = named.all_parameters();
    // vLLM's class ties nothing: the embedding is stored twice.
    if architecture == Architecture::M3Vllm && shape.tie_word_embeddings {
        all.push(ParamSpec { theirs: vec![("lm_head.weight".to_owned(), shape.vocab_size)], ..all[0].clone() });
    }
    let all = all.into_iter();
    all.flat_map(|spec| {
        let is_missing = spec.part == Part::ResidualScale && !shape.residual_scale;
        let mut start = 0;
        let parts = parts_of(&spec, architecture).into_iter().map(|(name, rows, form)| {
            let range = start..start + rows;
            start = range.end;
            let dims = [&[rows], &spec.dims[1..]].concat();
            let source = if is_missing {
                Source::Ones
            } else {
                Source::Rows { name: spec.ours.clone(), rows: range, num_rows: spec.dims[0] }
            };
            ExportTensor { name, shape: dims, source, form }
        });
        parts.collect::<Vec<_>>()
    })
    .collect()
}

/// The tensors of a parameter: the name, number of rows and form of each.
fn parts_of(spec: &ParamSpec, architecture: Architecture) -> Vec<(String, usize, Form)> {
    if architecture.is_m3() {
        return m3::parts(spec, architecture == Architecture::M3Vllm);
    }
    spec.theirs.iter().map(|(name, rows)| (name.clone(), *rows, Form::PLAIN)).collect()
}

/// Refuses weights with a tensor that the export would leave out.
pub(super) fn check_complete(tensors: &[ExportTensor], weights: &TensorFiles) -> Result<(), CheckpointError> {
    let used: BTreeSet<&str> = tensors
        .iter()
        .filter_map(|tensor| match &tensor.source {
            Source::Rows { name, .. } => Some(name.as_str()),
            Source::Ones => None,
        })
        .collect();
    match weights.names().into_iter().find(|name| !used.contains(name.as_str())) {
        None => Ok(()),
        Some(name) => {
            let problem = format!("tensor {name} has no place in the model of the recipe");
            Err(CheckpointError::other_model(weights.path(), problem))
        }
    }
}
