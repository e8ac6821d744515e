//! Names of the files of prepared data, and hashes as they write them.

use crate::corpus::Document;

pub(super) const TRAIN: &str = "train";
pub(super) const VALIDATION: &str = "validation";
pub(super) const VALIDATION_SIZES: &str = "validation.docs.json";
pub(super) const LOCK: &str = "prepare.lock";

/// File names of the training shards, without suffix.
pub(super) fn train_names(num_corpora: usize) -> Vec<String> {
    match num_corpora {
        1 => vec![TRAIN.to_owned()],
        _ => (0..num_corpora).map(|number| format!("{TRAIN}-{number:03}")).collect(),
    }
}

/// A hash of a document's prompt and text, which decides whether the document is held out and finds equal documents.
pub(super) fn content_hash(document: &Document) -> u128 {
    // The ASCII bytes of "validate".
    const SEED: u64 = 0x7661_6C69_6461_7465;
    let hash = |text: &str| xxhash_rust::xxh3::xxh3_128_with_seed(text.as_bytes(), SEED);
    match &document.prompt {
        None => hash(&document.text),
        // No text holds a NUL, so prompt and text cannot be divided in another way with the same hash.
        Some(prompt) => hash(&[prompt.as_str(), "\0", &document.text].concat()),
    }
}

pub(super) fn hex(hash: u128) -> String {
    format!("{hash:032x}")
}
