//! Damaged text files of every kind that the program reads: ten thousand mutations of each, from a fixed seed. The
//! program must read each mutation or refuse it with a message that names the file; no mutation may cause a panic.
use crate::random_model::{random_model, recipe, write_checkpoint};
use sieve_core::Recipe;
use sieve_hf::{Checkpoint, imported_model, peek_model};
use sieve_select::Selector;
use sieve_testing::mutated;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const NUM_INPUTS: u64 = 10_000;

/// Calls `read` with [`NUM_INPUTS`] mutations of `text`; see [`each_within`].
pub(crate) fn each(text: &str, read: impl FnMut(&[u8]) -> bool) {
    each_within(text.as_bytes(), usize::MAX, read);
}

/// Calls `read` with [`NUM_INPUTS`] mutations of the first `within` bytes of `whole`; `read` returns whether it
/// accepted the input. Fails if it accepts all mutations or none, since the mutations then test nothing.
pub(crate) fn each_within(whole: &[u8], within: usize, mut read: impl FnMut(&[u8]) -> bool) {
    assert!(read(whole), "{} as it is", String::from_utf8_lossy(whole));
    let taken = (0..NUM_INPUTS).filter(|&number| read(&mutated(whole, within, number)));
    let num_taken = taken.count() as u64;
    assert!((1..NUM_INPUTS).contains(&num_taken), "{num_taken} were taken");
}

/// As [`each`], for a parser that reads its input from the file `path`.
pub(crate) fn each_file(path: &Path, mut read: impl FnMut() -> bool) {
    let whole = fs::read_to_string(path).expect("a text");
    each(&whole, |bytes| {
        fs::write(path, bytes).expect("writable");
        read()
    });
    fs::write(path, whole).expect("writable");
}

/// Whether `read` succeeded. The message of an error must contain one of `names` and no word of a panic.
pub(crate) fn is_read<T, E: std::fmt::Display>(read: Result<T, E>, names: &[&str]) -> bool {
    let Err(error) = read else {
        return true;
    };
    let message = error.to_string();
    assert!(names.iter().any(|name| message.contains(name)), "{message}");
    assert!(!message.contains("panic"), "{message}");
    false
}

/// A temporary folder, in memory (/dev/shm) if possible, because ten thousand files are written.
pub(crate) fn quick_dir() -> TempDir {
    let memory = Path::new("/dev/shm");
    let made = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    made.expect("a temporary folder")
}

/// Writes a checkpoint of a random model into `dir`, the folder of its run.
fn checkpoint(dir: &TempDir) -> PathBuf {
    let recipe = recipe("tie_word_embeddings = true", "kind = \"mha\"");
    let model = random_model(&recipe, 7);
    write_checkpoint(dir.path(), &recipe, &model);
    dir.path().join("step-1")
}

/// Whether the recipe loads. A loaded recipe must be valid; an error must explain the mistake in Sieve's words, not
/// serde's.
fn loads(text: &str, sets: &[String]) -> bool {
    let loaded = Recipe::load(text, "mine.toml", sets);
    match &loaded {
        Ok(recipe) => assert_eq!(recipe.validate(), Ok(())),
        Err(error) => {
            let message = error.to_string();
            assert!(message.lines().count() > 1, "no reason given: {message}");
            assert!(!message.contains("recipe: missing field"), "a serde message: {message}");
        }
    }
    is_read(loaded, &["mine.toml"])
}

#[test]
fn damaged_recipes() {
    for text in [
        include_str!("../recipes/quickstart.toml"),
        include_str!("../recipes/dma_1p7b.toml"),
        include_str!("../lab/recipes/mqar_nsa.toml"),
    ] {
        each(text, |bytes| std::str::from_utf8(bytes).is_ok_and(|text| loads(text, &[])));
    }
}

#[test]
fn damaged_overrides() {
    let quick = include_str!("../recipes/quickstart.toml");
    let staged = include_str!("../recipes/dma_1p7b.toml");
    for (text, set) in
        [(quick, "training.steps=125"), (quick, "data.paths=[\"a\", \"b\"]"), (staged, "stage.1.seq_len=128")]
    {
        each(set, |bytes| loads(text, &[String::from_utf8_lossy(bytes).into_owned()]));
    }
}

#[test]
fn damaged_checkpoints() {
    let dir = quick_dir();
    let folder = checkpoint(&dir);
    for name in ["state.json", "config.toml"] {
        each_file(&folder.join(name), || {
            let verified = is_read(Checkpoint::open(&folder).map(|_| ()), &["step-1/"]);
            // `peek_model` reads the shapes before it compares the checksums, so that it accepts some damaged files.
            let peeked = is_read(peek_model(&folder).map(|_| ()), &["step-1/"]);
            verified || peeked
        });
    }
}

#[test]
fn damaged_model_configurations() {
    let dir = quick_dir();
    let path = dir.path().join("config.json");
    let config = "{\"architectures\": [\"Qwen3ForCausalLM\"], \"model_type\": \"qwen3\", \"hidden_size\": 64, \
                  \"intermediate_size\": 96, \"num_hidden_layers\": 3, \"num_attention_heads\": 4, \
                  \"num_key_value_heads\": 2, \"head_dim\": 16, \"vocab_size\": 97, \"max_position_embeddings\": 64, \
                  \"rms_norm_eps\": 1e-06, \"rope_theta\": 10000.0, \"tie_word_embeddings\": true, \
                  \"hidden_act\": \"silu\", \"attention_bias\": false, \"attention_dropout\": 0.0, \
                  \"initializer_range\": 0.02, \"sliding_window\": null, \"use_sliding_window\": false}";
    fs::write(&path, config).expect("writable");
    // A safetensors file without tensors: the importer looks in it for an output layer, which a tied model lacks.
    fs::write(dir.path().join("model.safetensors"), b"\x02\0\0\0\0\0\0\0{}").expect("writable");
    imported_model(dir.path(), None, &[]).expect("as it is");
    each_file(&path, || is_read(imported_model(dir.path(), None, &[]), &["config.json"]));
}

#[test]
fn damaged_pattern_files_and_selectors() {
    let dir = quick_dir();
    let path = dir.path().join("patterns.json");
    let patterns = "[{\"0\": [\"vertical_and_slash\", 100, 200, 0.9], \"1\": [\"stream_llm\", 64, 128, 0.8]}, \
                    {\"0\": [\"block_sparse\", 100, 4, 0.7], \"1\": [\"vertical_and_slash\", 30, 80, 0.9]}]";
    fs::write(&path, patterns).expect("writable");
    let selector = format!("minference:pattern={}", path.display());
    Selector::parse(&selector).expect("as it is");
    each_file(&path, || is_read(Selector::parse(&selector), &["patterns.json", "pattern"]));
    for text in [
        "momo:k=32,k_exact=8,first_dense_layers=1",
        "delta:base=streamingllm,base.n_local=64,gamma=8",
        "quest:page=16,budget=64",
    ] {
        each(text, |bytes| {
            let text = String::from_utf8_lossy(bytes);
            match Selector::parse(&text) {
                // An accepted selector is printed and parsed again: both must be equal.
                Ok(selector) => {
                    let again = Selector::parse(&selector.to_string());
                    assert_eq!(again.as_ref().ok(), Some(&selector), "{text:?}");
                    true
                }
                Err(error) => is_read(Err::<(), _>(error), &[""]),
            }
        });
    }
}
