//! The model that answers the questions of tasks and needles.
use sieve_data::Tokenizer;
use sieve_nn::Qwen3;
use sieve_ops::DeviceBackend;

/// The evaluated model, its tokenizer and device.
#[derive(Debug)]
pub struct TaskModel<'a, B: DeviceBackend> {
    /// The model that answers.
    pub model: &'a Qwen3<B>,
    /// The model's tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// The tokens that end a text, the end-of-document token first.
    pub ends: &'a [u32],
    /// The device that holds the model.
    pub device: &'a B::Device,
}
