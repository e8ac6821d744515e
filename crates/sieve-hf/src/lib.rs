//! Weights on disk: checkpoints that survive a crash, and the Hugging Face layout.

mod error;
mod odd_folders;
mod parameters;
mod tensor_file;
mod tensor_files;

mod checkpoint;
mod loaded_model;

mod chat;

mod export;
mod import;

pub use chat::{Chat, ChatMessage, ChatRefusal, ChatTemplate};
pub use checkpoint::{Checkpoint, CheckpointFiles, CheckpointState, FORMAT_VERSION, GuardState, list_checkpoints};
pub use error::CheckpointError;
pub use export::{DEFAULT_SHARD_BYTES, ExportDtype, ExportForm, ExportOptions, ExportReport, export};
pub use import::{ImportReport, check_config, import, importable_families, imported_model};
pub use loaded_model::{
    LoadedModel, SamplingDefaults, end_ids, load_model, load_model_then, peek_model, peek_tokenizer,
};
pub use odd_folders::{refuse_odd_file, refuse_odd_model};
pub use parameters::{
    Kept, LoadedThen, NamedTensor, ParameterLoader, PartSource, TensorSource, converted_source, load_converted,
    load_parameters, named_parameters, parameter_names,
};
pub use tensor_file::{TensorFile, checksum, write_tensor_file};
pub use tensor_files::TensorFiles;
