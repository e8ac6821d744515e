//! A tiny model for tests.
use burn_flex::Flex;
use sieve_core::model::NsaCompression;
use sieve_core::model::test_shapes::tiny_dma;
use sieve_core::{Attention, ModelShape, NsaShape};
use sieve_data::Tokenizer;
use sieve_nn::Qwen3;

/// A model with random weights, by [`tiny_shape`].
pub(crate) fn tiny_model(attention: Attention, max_seq_len: usize) -> Qwen3<Flex> {
    Qwen3::new(&tiny_shape(attention, max_seq_len), 4, &Default::default())
}

/// Shape of the test model.
pub(crate) fn tiny_shape(attention: Attention, max_seq_len: usize) -> ModelShape {
    ModelShape {
        d_model: 16,
        d_ff: 24,
        num_layers: 2,
        head_dim: 8,
        vocab_size: 31,
        tie_word_embeddings: true,
        max_seq_len,
        initializer_range: 0.4,
        residual_scale: false,
        attention,
        ..tiny_dma()
    }
}

/// Native sparse attention of short blocks.
pub(crate) const NSA: NsaShape = NsaShape {
    compress_block_size: 8,
    compress_stride: 4,
    compress: NsaCompression::Mean,
    compress_hidden_size: None,
    select_block_size: 8,
    num_selected_blocks: 4,
    window_size: 12,
    shared_kv: true,
};

/// A tokenizer of Llama's form: byte fallback, a space before each text, and a template that puts token 1 first.
pub(crate) fn llama_tokenizer() -> Tokenizer {
    // Crates of the engine and of the lab, which share this file, lie at different depths.
    let folders = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let mut paths = folders.map(|folder| folder.join("tests/golden/llama_tokenizer.json"));
    let path = paths.find(|path| path.is_file()).expect("the stored tokenizer");
    Tokenizer::from_file(&path).expect("a tokenizer")
}

/// `len` token ids for the test model.
pub(crate) fn words(len: usize) -> Vec<u32> {
    (0..len).map(|n| ((n * n * 5 + n * 3) % 31) as u32).collect()
}
