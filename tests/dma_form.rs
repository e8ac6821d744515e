//! The same keys of DMA are the same attention wherever they stand: in a recipe's text, in overrides, in an import, in
//! the crates and in the functions of the Python package.
use crate::python;
use burn::tensor::{DType, Distribution, Tensor};
use burn_flex::Flex;
use serde_json::{Value, json};
use sieve_core::recipe::AttentionKind;
use sieve_core::{Attention, DmaBias, DmaForm, DmaRecency, DmaShape, Recipe};
use sieve_nn::AttentionConfig;
use sieve_ops::AttentionSpec;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Tokens of a row; a quarter of them is the window where none is given.
const SEQ_LEN: usize = 256;
const WINDOW: usize = 64;
const KV_HEADS: usize = 2;

/// Keys of `[attention]` that are given, as TOML; `None` leaves a key out.
#[derive(Clone, Copy, Debug)]
struct Keys {
    preset: Option<&'static str>,
    keep_window_size: Option<&'static str>,
    bias: Option<&'static str>,
    recency: Option<&'static str>,
    local_window_size: Option<&'static str>,
}

impl Keys {
    /// Every combination.
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for preset in [None, Some("\"paper\"")] {
            for keep_window_size in [None, Some("64"), Some("24")] {
                for bias in [None, Some("\"exp\""), Some("\"linear\"")] {
                    for recency in [None, Some("\"none\""), Some("\"slope\"")] {
                        for local_window_size in [None, Some("0"), Some("5")] {
                            all.push(Self { preset, keep_window_size, bias, recency, local_window_size });
                        }
                    }
                }
            }
        }
        all
    }

    fn given(self) -> Vec<(&'static str, &'static str)> {
        let all = [
            ("preset", self.preset),
            ("keep_window_size", self.keep_window_size),
            ("bias", self.bias),
            ("recency", self.recency),
            ("local_window_size", self.local_window_size),
        ];
        all.into_iter().filter_map(|(key, value)| Some((key, value?))).collect()
    }

    fn window(self) -> usize {
        self.keep_window_size.map_or(WINDOW, |window| window.parse().expect("a number"))
    }

    /// The keys as a recipe has them.
    fn lines(self) -> String {
        self.given().iter().map(|(key, value)| format!("{key} = {value}\n")).collect()
    }

    /// The keys as overrides.
    fn overrides(self) -> Vec<String> {
        self.given().iter().map(|(key, value)| format!("attention.{key}={}", value.trim_matches('"'))).collect()
    }

    /// The shape that Rust code gives with these keys; `None` if it cannot say them together.
    fn shape(self) -> Option<DmaShape> {
        let form = DmaForm {
            bias: self.bias.map(|bias| if bias == "\"exp\"" { DmaBias::Exp } else { DmaBias::Linear }),
            recency: self.recency.map(|it| if it == "\"none\"" { DmaRecency::None } else { DmaRecency::Slope }),
            local_window_size: self.local_window_size.map(|local| local.parse().expect("a number")),
        };
        match self.preset {
            None => Some(DmaShape::with_form(self.window(), form)),
            // A recipe takes no other key beside the preset unless it says the same.
            Some(_) if form == DmaForm::default() => Some(DmaShape::published(self.window())),
            Some(_) => None,
        }
    }

    /// The arguments of `sieve_attention.dma_attention`.
    fn arguments(self) -> Value {
        let mut arguments = json!({"keep": self.window(), "kv_heads": KV_HEADS});
        for (key, value) in self.given() {
            let value: Value = serde_json::from_str(value).expect("of one form in TOML and JSON");
            match key {
                "keep_window_size" => {}
                "local_window_size" => arguments["local"] = value,
                key => arguments[key] = value,
            }
        }
        arguments
    }
}

fn text(attention: &str) -> String {
    format!(
        "[model]\nhidden_size = 32\nnum_hidden_layers = 2\nnum_attention_heads = 4\nnum_key_value_heads = {KV_HEADS}\n\
         head_dim = 8\n[attention]\n{attention}\n[tokenizer]\nnumbers = 64\n[data]\npaths = [\"none\"]\n\
         [training]\nsteps = 1\nseq_len = {SEQ_LEN}\nlocal_batch_size = 1\n[optimizer]\nlr = 1e-3\n"
    )
}

/// The attention of a recipe; `None` if it is refused.
fn loaded(attention: &str, overrides: &[String]) -> Option<DmaShape> {
    let recipe = Recipe::load(&text(attention), "a recipe", overrides).ok()?;
    // What a run's config.toml holds is read back equal, in any version that knows its keys: all of them are there.
    let config = recipe.to_toml().expect("a loaded recipe can be written");
    let again = Recipe::load(&config, "config.toml", &[]).expect("reads back");
    assert_eq!(again, recipe, "{attention} {overrides:?}");
    match recipe.attention.own {
        Attention::Dma(dma) => Some(dma),
        other => panic!("{other:?}"),
    }
}

/// A dense model in the Hugging Face layout, of which only the configuration is read.
fn dense_model(folder: &Path) -> PathBuf {
    let config = json!({
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": KV_HEADS, "head_dim": 8, "vocab_size": 64,
        "max_position_embeddings": SEQ_LEN, "rope_theta": 1e4, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "tie_word_embeddings": true,
    });
    std::fs::write(folder.join("config.json"), config.to_string()).expect("writable");
    // A safetensors file without tensors: the length of its header, and the header.
    let tensors = [&2u64.to_le_bytes()[..], b"{}"].concat();
    std::fs::write(folder.join("model.safetensors"), tensors).expect("writable");
    folder.to_owned()
}

fn imported(from: &Path, overrides: &[String]) -> Option<DmaShape> {
    match sieve_hf::imported_model(from, Some(AttentionKind::Dma), overrides).ok()?.0.attention.own {
        Attention::Dma(dma) => Some(dma),
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_same_keys_are_one_form_in_text_overrides_import_and_rust() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = dense_model(folder.path());
    let (mut taken, mut refused) = (0, 0);
    for keys in Keys::all() {
        let (lines, overrides) = (keys.lines(), keys.overrides());
        let with_kind = [vec!["attention.kind=dma".to_owned()], overrides.clone()].concat();
        let form = loaded(&format!("kind = \"dma\"\n{lines}"), &[]);
        for (place, found) in [
            ("overrides", loaded("kind = \"dma\"", &overrides)),
            ("another kind's text with overrides", loaded("kind = \"swa\"", &with_kind)),
            ("import", imported(&model, &overrides)),
        ] {
            assert_eq!(found, form, "{place}: {keys:?}");
        }
        match form {
            Some(form) => {
                taken += 1;
                let of_rust = keys.shape().unwrap_or(form);
                assert_eq!(of_rust, form, "{keys:?}");
                let config = AttentionConfig::new(32, 4, KV_HEADS, 8);
                let layer = config.dynamic_mask::<Flex>(of_rust, &Default::default());
                assert_eq!(layer.dma_layer().spec, form);
            }
            None => refused += 1,
        }
    }
    // Refused: a slope with an exponential bias, and what contradicts a preset.
    assert_eq!((taken, refused), (96, 66));
}

#[test]
fn the_same_keys_are_one_form_in_a_recipe_and_in_python() {
    let test = "the_same_keys_are_one_form_in_a_recipe_and_in_python";
    let Some(python) = python::interpreter(test, "import json") else {
        return;
    };
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    let lines: String = Keys::all().iter().map(|keys| format!("{}\n", keys.arguments())).collect();
    let mut child = Command::new(python)
        .arg(root.join("tests/python/dma_forms.py"))
        .arg(root.join("python/sieve_attention"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the interpreter ran before");
    let mut input = child.stdin.take().expect("piped");
    input.write_all(lines.as_bytes()).expect("the script reads");
    drop(input);
    let output = child.wait_with_output().expect("ends");
    assert!(output.status.success());
    let said = String::from_utf8(output.stdout).expect("JSON");
    let said: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(said.len(), Keys::all().len());
    for (keys, said) in Keys::all().into_iter().zip(said) {
        let Some(form) = loaded(&format!("kind = \"dma\"\n{}", keys.lines()), &[]) else {
            assert!(said["refused"].is_string(), "{keys:?}: {said}");
            continue;
        };
        assert_eq!(said["linear"], json!(form.bias == DmaBias::Linear), "{keys:?}: {said}");
        assert_eq!(said["local"], json!(form.local_window_size), "{keys:?}: {said}");
        let slopes = form.slopes(KV_HEADS).unwrap_or_default();
        let found: Vec<f64> = serde_json::from_value(said["slopes"].clone()).expect("numbers");
        assert_eq!(found.len(), slopes.len(), "{keys:?}: {said}");
        assert!(found.iter().zip(&slopes).all(|(a, b)| (a / b - 1.0).abs() < 1e-14), "{keys:?}: {said}");
    }
}

#[test]
fn doge_is_the_published_form_and_an_export_says_its_form_in_full() {
    let of = |config: &Value| {
        let folder = tempfile::tempdir().expect("a folder");
        dense_model(folder.path());
        std::fs::write(folder.path().join("config.json"), config.to_string()).expect("writable");
        let model = sieve_hf::imported_model(folder.path(), None, &[]);
        model.map(|(recipe, ..)| recipe.attention.own).map_err(|error| error.to_string())
    };
    let folder = tempfile::tempdir().expect("a folder");
    let config = std::fs::read_to_string(dense_model(folder.path()).join("config.json")).expect("written");
    let mut config: Value = serde_json::from_str(&config).expect("JSON");
    config["keep_window_size"] = json!(48);
    config["model_type"] = json!("doge");
    assert_eq!(of(&config), Ok(Attention::Dma(DmaShape::published(48))));
    config["model_type"] = json!("sieve");
    config["attention_kind"] = json!("dma");
    let form = json!({"bias": "linear", "recency": "slope", "local_window_size": 6});
    let form = form.as_object().expect("keys");
    for missing in form.keys() {
        let mut some = config.clone();
        for (key, value) in form.iter().filter(|(key, _)| *key != missing) {
            some[key] = value.clone();
        }
        let said = of(&some).expect_err(missing);
        assert!(said.contains(&format!("attention_kind is dma, and {missing} is missing")), "{said}");
    }
    config.as_object_mut().expect("keys").extend(form.clone());
    assert_eq!(of(&config), Ok(Attention::Dma(DmaShape::new(48))));
}

/// `checkpoints/tiny` was written when layers transposed the weight of the scores.
#[test]
fn a_stored_weight_of_the_scores_is_read_to_the_bit_and_scores_its_keys() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../checkpoints/tiny");
    let loaded = sieve_hf::load_model::<Flex>(&folder, &Default::default(), DType::F32).expect("loads");
    let file = sieve_hf::TensorFile::open(&folder.join("model.safetensors")).expect("there");
    let (kv_heads, head_dim, tokens) = (loaded.shape.num_kv_heads, loaded.shape.head_dim, 9);
    let mut num_layers = 0;
    for (at, layer) in loaded.model.layers.iter().enumerate() {
        let sieve_nn::Attention::Ranked(dma) = &layer.self_attn else { continue };
        num_layers += 1;
        let values = |name: &str| -> Vec<f32> {
            let name = format!("model.layers.{at}.self_attn.{name}");
            file.any_tensor(&name).unwrap_or_else(|error| panic!("{error}")).iter::<f32>().collect()
        };
        let (w, a) = (values("dt_proj.weight"), values("A"));
        let read = dma.dma_layer();
        assert_eq!(read.w_dt.dims(), [kv_heads, kv_heads * head_dim]);
        assert_eq!(read.w_dt.clone().into_data().to_vec::<f32>().expect("f32"), w);
        let spec = AttentionSpec::dense([loaded.shape.num_heads, kv_heads], head_dim);
        let shape = [1, tokens, spec.packed_heads(), head_dim];
        let qkv = Tensor::<Flex, 4>::random(shape, Distribution::Normal(0.0, 1.0), &Default::default());
        let rows: Vec<f32> = qkv.clone().into_data().to_vec().expect("f32");
        let no_recency = None;
        let rank = sieve_ops::dma_ranks(qkv, &read, spec, no_recency).expect("fits");
        let rank: Vec<f32> = rank.into_data().to_vec().expect("f32");
        for (token, row) in rows.chunks(spec.packed_heads() * head_dim).enumerate() {
            let v = &row[row.len() - kv_heads * head_dim..];
            for head in 0..kv_heads {
                let of_head = &w[head * v.len()..][..v.len()];
                let x: f64 = v.iter().zip(of_head).map(|(v, w)| f64::from(*v) * f64::from(*w)).sum();
                let exact = f64::from(a[head]) * x.exp().ln_1p();
                let off = (f64::from(rank[head * tokens + token]) - exact).abs();
                assert!(off <= 1e-5 * exact.abs().max(1.0), "layer {at}, head {head}: off by {off}");
            }
        }
    }
    assert_eq!(num_layers, 4);
}
