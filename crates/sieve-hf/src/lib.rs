//! Weights on disk: checkpoints that survive a crash, and the Hugging Face layout.

mod error;
mod parameters;
mod tensor_file;

mod checkpoint;

pub use checkpoint::{
    Checkpoint, CheckpointFiles, CheckpointState, FORMAT_VERSION, list_checkpoints,
};
pub use error::CheckpointError;
pub use parameters::{NamedTensor, load_parameters, named_parameters};
pub use tensor_file::{TensorFile, write_tensor_file};
