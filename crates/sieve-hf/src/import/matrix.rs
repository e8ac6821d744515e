//! Variants of `config.json` of seven families, read as transformers 5 read them (`tests/golden/config_matrix.json`).
use super::config::HfConfig;
use super::recipe_and_shape;
use crate::CheckpointError;
use crate::export::Architecture;
use serde_json::Value;
use sieve_core::ModelShape;
use sieve_core::kinds::Chooses;
use std::path::Path;

static MATRIX: &str = include_str!("../../../../tests/golden/config_matrix.json");

/// The model that a configuration describes, and the notes on it.
fn read(text: &str) -> Result<(ModelShape, Vec<String>), CheckpointError> {
    let path = Path::new("folder/config.json");
    let config = HfConfig::parse(path, text)?;
    let has_scales = config.architecture == Architecture::Doge;
    let (_, shape, _) = recipe_and_shape(Path::new("folder"), &config, has_scales, &[])?;
    Ok((shape, config.notes))
}

/// The window of each layer, null for a dense one.
fn windows(shape: &ModelShape) -> Vec<Value> {
    (0..shape.num_layers).map(|layer| shape.attention_of(layer).as_kind().cached_window().into()).collect()
}

/// Fails unless `shape` is what transformers read.
fn compare(name: &str, shape: &ModelShape, theirs: &Value) {
    let (frequencies, amplitude) = shape.rotary_frequencies(shape.head_dim);
    let wanted = theirs["frequencies"].as_array().expect("a list");
    assert_eq!(frequencies.len(), wanted.len(), "{name}");
    for (ours, theirs) in frequencies.iter().chain([&amplitude]).zip(wanted.iter().chain([&theirs["amplitude"]])) {
        let theirs = theirs.as_f64().expect("a number");
        // transformers computes them in f32.
        assert!((ours - theirs).abs() <= 1e-5 * theirs, "{name}: {ours} and {theirs}");
    }
    assert_eq!(theirs["head_dim"], shape.head_dim, "{name}");
    assert_eq!(theirs["num_key_value_heads"], shape.num_kv_heads, "{name}");
    assert_eq!(theirs["rms_norm_eps"], shape.rms_norm_eps, "{name}");
    assert_eq!(theirs["tie_word_embeddings"], shape.tie_word_embeddings, "{name}");
    assert_eq!(theirs["windows"], Value::from(windows(shape)), "{name}");
    let rotates = (0..shape.num_layers).map(|layer| Value::from(shape.has_rope(layer))).collect::<Vec<_>>();
    assert_eq!(theirs["rotates"], Value::from(rotates), "{name}");
    if shape.attention.kind().facts().chooses != Chooses::Nothing {
        let kept = shape.attention.as_kind().num_kept();
        assert_eq!(theirs["keep_window_size"], Value::from(kept), "{name}");
    }
}

#[test]
fn variants_are_read_as_transformers_reads_them() {
    let variants: Vec<Value> = serde_json::from_str(MATRIX).expect("stored JSON");
    let (mut loaded, mut refused) = (0, 0);
    for variant in &variants {
        let text = |key: &str| variant[key].as_str().expect("a text");
        let (name, key) = (text("name"), text("key"));
        match (text("outcome"), read(&variant["config"].to_string())) {
            // `shapes`: the import refuses the variant by the shapes of its weights, which are not read here.
            ("refused", Ok(_)) => assert_eq!(variant["shapes"], true, "{name} is read"),
            ("refused", Err(error)) => assert!(error.to_string().contains(key), "{name}: {error}"),
            (_, Err(error)) => panic!("{name}: {error}"),
            (outcome, Ok((shape, notes))) => {
                compare(name, &shape, &variant["transformers"]);
                assert_eq!(notes.iter().any(|note| note.contains(key)), outcome == "noted", "{name}: {notes:?}");
                loaded += 1;
                continue;
            }
        }
        refused += 1;
    }
    assert!(loaded >= 140 && refused >= 60, "{loaded} loaded, {refused} refused");
}
