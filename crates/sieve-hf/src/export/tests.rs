use super::*;
use crate::{CheckpointFiles, CheckpointState, NamedTensor, TensorFile, load_model, named_parameters};
use burn::tensor::DType;
use burn_flex::Flex;
use serde_json::Value;
use sieve_nn::Qwen3;
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

const TIED: &str = "tie_word_embeddings = true";
pub(crate) const MHA: &str = "kind = \"mha\"";
pub(crate) const SWA: &str = "kind = \"swa\"\nsliding_window = 5";
pub(crate) const DMA: &str = "kind = \"dma\"\nkeep_window_size = 3\npreset = \"paper\"";
/// DMA in its default form; [`DMA`] is the paper's.
pub(crate) const SLOPED: &str = "kind = \"dma\"\nkeep_window_size = 3\nshortest_period = 4";

const TOKENIZER: &str = r#"{"added_tokens":[{"id":1,"content":"<|endoftext|>","special":true}],
    "model":{"type":"WordLevel","vocab":{"a":0,"<|endoftext|>":1},"unk_token":"a"}}"#;

/// Writes a random checkpoint; `model` and `attention` are lines of those sections.
fn checkpoint(folder: &Path, model: &str, attention: &str) -> Checkpoint {
    changed_checkpoint(folder, model, attention, |_, tensor| {
        if tensor.name.ends_with("post_attention_residual") {
            tensor.data = burn::tensor::TensorData::new(trained_scale(), [12]);
        }
    })
}

/// Writes a random checkpoint after `change` was called with the index of each weight and the weight.
pub(crate) fn changed_checkpoint(
    folder: &Path,
    model: &str,
    attention: &str,
    change: impl Fn(usize, &mut NamedTensor),
) -> Checkpoint {
    let kv_heads = if attention.contains("mla") { 4 } else { 2 };
    let text = format!(
        "[model]\nhidden_size = 12\nintermediate_size = 20\nnum_hidden_layers = 2\nnum_attention_heads = 4
         num_key_value_heads = {kv_heads}\nhead_dim = 6\nmax_position_embeddings = 16\n{model}
         [attention]\n{attention}\n[tokenizer]\npath = \"t.json\"\n[data]\npaths = [\"x\"]
         [training]\nsteps = 1\nseq_len = 8\nlocal_batch_size = 1\n[optimizer]\nlr = 1e-3
         [lr_scheduler]\nwarmup_steps = 0\ndecay_ratio = 0.0\n"
    );
    let recipe = sieve_core::Recipe::load(&text, "test", &[]).expect("the recipe is valid");
    let shape = recipe.model_shape(11).expect("no vocab_size is given");
    let model = Qwen3::<Flex>::new(&shape, 7, &Default::default());
    let state = CheckpointState { step: 4, next_sample: 8, tokens_seen: 64, ..CheckpointState::untrained(11) };
    let mut weights = named_parameters(&model);
    for (number, tensor) in weights.iter_mut().enumerate() {
        change(number, tensor);
    }
    let files = CheckpointFiles {
        model: weights,
        optimizer: Vec::new(),
        recipe_toml: recipe.to_toml().expect("small numbers"),
        tokenizer_json: TOKENIZER.to_owned(),
    };
    let path = Checkpoint::write(folder, state, &files).expect("the folder is writable");
    Checkpoint::open(&path).expect("just written")
}

/// A random checkpoint and its export.
struct Exported {
    checkpoint: Checkpoint,
    out: PathBuf,
    report: ExportReport,
    _folder: tempfile::TempDir,
}

fn exported(model: &str, attention: &str, options: &ExportOptions) -> Exported {
    let folder = tempfile::tempdir().expect("a folder");
    let checkpoint = checkpoint(&folder.path().join("run"), model, attention);
    let out = folder.path().join("hf");
    let report = export(&checkpoint, &out, options).expect("exports");
    Exported { checkpoint, out, report, _folder: folder }
}

impl Exported {
    fn config(&self) -> Value {
        read_json(&self.out.join("config.json"))
    }

    /// The checkpoint's weights, and the export's.
    fn weights(&self) -> [TensorFile; 2] {
        [&self.checkpoint.path, &self.out].map(|folder| weights(folder))
    }
}

/// Residual scales unlike those of a new model, which are all one.
fn trained_scale() -> Vec<f32> {
    (0..12).map(|n| n as f32).collect()
}

pub(crate) fn options() -> ExportOptions {
    ExportOptions {
        dtype: ExportDtype::F32,
        max_shard_bytes: DEFAULT_SHARD_BYTES,
        form: None,
        eos_token_id: 1,
        pad_token_id: None,
    }
}

fn values(file: &TensorFile, name: &str) -> Vec<f32> {
    let data = file.any_tensor(name).expect(name).convert::<f32>();
    data.to_vec().expect("converted to f32")
}

fn weights(folder: &Path) -> TensorFile {
    TensorFile::open(&folder.join("model.safetensors")).expect("just written")
}

pub(crate) fn read_json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).expect("written")).expect("JSON")
}

fn folder_bytes(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).expect("a folder");
    entries
        .map(|entry| entry.expect("readable"))
        .map(|entry| {
            let bytes = fs::read(entry.path()).expect("a file");
            (entry.file_name().to_string_lossy().into_owned(), bytes)
        })
        .collect()
}

#[test]
fn packed_projections_are_split_without_loss() {
    let model = exported("tie_word_embeddings = false", MHA, &options());
    assert_eq!(model.report.architecture, "Qwen3ForCausalLM");
    let (_, shape) = model.checkpoint.recipe_and_shape().expect("just written");
    assert_eq!(model.report.num_parameters, shape.parameters().total());
    let [ours, theirs] = model.weights();
    let packed = values(&ours, "layers.1.self_attn.qkv.qkv_proj.weight");
    let parts = ["q", "k", "v"].map(|part| {
        let name = format!("model.layers.1.self_attn.{part}_proj.weight");
        values(&theirs, &name)
    });
    assert_eq!(parts.each_ref().map(Vec::len), [24 * 12, 12 * 12, 12 * 12]);
    assert_eq!(packed, parts.concat());
    let packed = values(&ours, "layers.0.mlp.gate_up_proj.weight");
    let gate = values(&theirs, "model.layers.0.mlp.gate_proj.weight");
    let up = values(&theirs, "model.layers.0.mlp.up_proj.weight");
    assert_eq!(packed, [gate, up].concat());
    assert_eq!(values(&ours, "head.lm_head.weight"), values(&theirs, "lm_head.weight"));

    let config = model.config();
    assert_eq!(config["model_type"], "qwen3");
    assert_eq!(config["use_sliding_window"], false);
    assert_eq!(config["eos_token_id"], 1);
    let special = read_json(&model.out.join("special_tokens_map.json"));
    assert_eq!(special["eos_token"], "<|endoftext|>");
}

#[test]
fn a_dynamic_mask_model_becomes_doge_with_scales_of_one_or_the_trained_ones() {
    let scaled = "tie_word_embeddings = true\nresidual_scale = true";
    for (line, expected) in [(TIED, vec![1.0; 12]), (scaled, trained_scale())] {
        let model = exported(line, DMA, &options());
        assert_eq!(model.report.architecture, "DogeForCausalLM");
        let [ours, theirs] = model.weights();
        assert!(!theirs.names().contains(&"lm_head.weight".to_owned()));
        let scale = values(&theirs, "model.layers.0.post_attention_residual");
        assert_eq!(scale, expected);
        let a = values(&ours, "layers.1.self_attn.a");
        assert_eq!(a, values(&theirs, "model.layers.1.self_attn.A"));
        assert_eq!(model.config()["keep_window_size"], 3);
    }
}

#[test]
fn rope_scaling_is_exported_with_every_key_that_transformers_needs() {
    let model = "qk_norm = false\nrope_scaling = { rope_type = \"llama3\", factor = 8.0 }";
    for (attention, key) in [(MHA, "rope_parameters"), (DMA, "rotary_scaling")] {
        let config = exported(model, attention, &options()).config();
        let all = serde_json::json!({ "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0,
            "original_max_position_embeddings": 16, "low_freq_factor": 1.0, "high_freq_factor": 4.0 });
        assert_eq!(config[key], all);
        assert_eq!(config["rope_frequencies"].is_array(), key == "rotary_scaling");
    }
}

#[test]
fn a_window_is_in_every_layer() {
    let config = exported(TIED, SWA, &options()).config();
    assert_eq!(config["sliding_window"], 5);
    assert_eq!(config["max_window_layers"], 0);
    let every = serde_json::json!(["sliding_attention", "sliding_attention"]);
    assert_eq!(config["layer_types"], every);
}

#[test]
fn latent_attention_is_exported_as_deepseek_where_that_class_computes_it() {
    const MLA: &str = "kind = \"mla\"\nkv_lora_rank = 8\nqk_rope_head_dim = 4";
    let own = "SieveForCausalLM";
    for (name, model, architecture, reason) in [
        ("normed", TIED, own, Some("no norms of queries and keys")),
        ("paper", TIED, "DeepseekV3ForCausalLM", None),
        ("scaled", "residual_scale = true", own, Some("no residual scales")),
        ("epsilon", "rms_norm_eps = 1e-5", own, Some("an epsilon of 1e-6")),
    ] {
        let mla = format!("{MLA}\nqk_norm = {}", name == "normed");
        let model = exported(model, &mla, &options());
        let (config, report) = (model.config(), model.report);
        assert_eq!(report.architecture, architecture, "{name}");
        let said = report.not_stock.unwrap_or_default();
        assert_eq!(report.not_stock.is_some(), reason.is_some(), "{name}: {said}");
        assert!(said.contains(reason.unwrap_or_default()), "{name}: {said}");
        for file in ["modeling_sieve.py", "definitions.py"] {
            assert_eq!(report.files.contains(&file.to_owned()), architecture == own, "{name}: {file}");
        }
        assert_eq!(config["kv_lora_rank"], 8);
        assert_eq!(config["use_cache"], true);
    }
}

#[test]
fn exports_have_equal_bytes_and_replace_only_earlier_exports() {
    let folder = tempfile::tempdir().expect("a folder");
    let checkpoint = checkpoint(&folder.path().join("run"), TIED, DMA);
    let (first, second) = (folder.path().join("a"), folder.path().join("b"));
    // The second folder first holds an export in several files. These are removed; a user's file beside them stays.
    let small = ExportOptions { max_shard_bytes: 4000, ..options() };
    let sharded = export(&checkpoint, &second, &small).expect("exports");
    let index = read_json(&second.join("model.safetensors.index.json"));
    let map = index["weight_map"].as_object().expect("a map");
    assert!(sharded.files.len() > 7, "{:?}", sharded.files);
    assert_eq!(index["metadata"]["total_size"], sharded.num_bytes);
    for (name, file) in map {
        let file = second.join(file.as_str().expect("a name"));
        let shard = TensorFile::open(&file).expect("listed files exist");
        assert!(shard.names().contains(name), "{name}");
    }
    fs::write(second.join("NOTES.md"), "mine").expect("writable");

    export(&checkpoint, &first, &options()).expect("exports");
    export(&checkpoint, &second, &options()).expect("replaces its own");
    let (one, mut two) = (folder_bytes(&first), folder_bytes(&second));
    assert_eq!(two.remove("NOTES.md").as_deref(), Some(&b"mine"[..]));
    assert_eq!(one.keys().collect::<Vec<_>>(), two.keys().collect::<Vec<_>>());
    assert!(one == two, "the bytes differ");
}

#[test]
fn an_export_that_stops_at_any_file_leaves_no_model_of_old_and_new_files() {
    let folder = tempfile::tempdir().expect("a folder");
    let small = ExportOptions { max_shard_bytes: 4000, ..options() };
    let [old, new] =
        [MHA, DMA].map(|attention| checkpoint(&folder.path().join(attention.len().to_string()), TIED, attention));
    let names = export(&new, &folder.path().join("whole"), &small).expect("exports").files;
    let whole = folder_bytes(&folder.path().join("whole"));
    // The export stops at a file between: config.json goes first and comes last, and the marker is written then, too.
    for name in names.iter().filter(|name| !["config.json", "sieve_export.json"].contains(&name.as_str())) {
        let out = folder.path().join("out");
        export(&old, &out, &small).expect("exports");
        // Where a file is a folder that holds something, the export cannot give it its name.
        let _ = fs::remove_file(out.join(name));
        fs::create_dir(out.join(name)).expect("writable");
        fs::write(out.join(name).join("in"), "the way").expect("writable");
        export(&new, &out, &small).expect_err("it stops here");
        assert!(!out.join("config.json").exists() || !was_begun(&out, &whole), "{name}");
        fs::remove_dir_all(out.join(name)).expect("writable");
        export(&new, &out, &small).expect("replaces what was left");
        assert!(folder_bytes(&out) == whole, "{name}");
        fs::remove_dir_all(out).expect("writable");
    }
}

/// Whether the folder has weights of the new export under their final names.
fn was_begun(out: &Path, whole: &BTreeMap<String, Vec<u8>>) -> bool {
    let is_weights = |name: &str| name.ends_with(".safetensors");
    whole.iter().any(|(name, bytes)| is_weights(name) && fs::read(out.join(name)).is_ok_and(|found| found == *bytes))
}

#[test]
fn bf16_halves_the_bytes_and_rounds_to_nearest() {
    let bf16 = ExportOptions { dtype: ExportDtype::Bf16, ..options() };
    let model = exported(TIED, DMA, &bf16);
    assert_eq!(model.report.num_bytes, 2 * model.report.num_parameters);
    assert_eq!(model.config()["dtype"], "bfloat16");
    let [ours, theirs] = model.weights();
    let exact = values(&ours, "embed_tokens.weight");
    let rounded = values(&theirs, "model.embed_tokens.weight");
    let mut changed = 0;
    for (exact, rounded) in exact.iter().zip(&rounded) {
        // The tolerance is half a unit in the last of bf16's 8 bits.
        assert!((exact - rounded).abs() <= exact.abs() / 256.0, "{exact} became {rounded}");
        changed += usize::from(exact != rounded);
    }
    assert!(changed > exact.len() / 2, "only {changed} values changed");
}

#[test]
fn published_dma_can_be_exported_as_either_class_and_other_models_as_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let recency = "kind = \"dma\"\nkeep_window_size = 3\nbias = \"linear\"\nrecency = \"slope\"";
    let [doge, sieve] = [ExportForm::Doge, ExportForm::Sieve];
    let (either, own) = (["DogeForCausalLM", "SieveForCausalLM"], "SieveForCausalLM");
    let [no_norms, no_norms_and_dense] = ["qk_norm = false", "qk_norm = false\nlayer_types = [\"swa\", \"mha\"]"];
    // [model], [attention], the class where no form is given, where Doge is, where Sieve is; `None`: it is refused.
    for (n, (model, attention, usual, of_doge, of_sieve)) in [
        (TIED, DMA, either[0], Some(either[0]), Some(either[1])),
        (TIED, recency, own, None, Some(own)),
        (TIED, MHA, "Qwen3ForCausalLM", None, None),
        (TIED, SWA, "Qwen3ForCausalLM", None, None),
        (no_norms_and_dense, SWA, "MinistralForCausalLM", None, None),
        ("qk_norm = false\nrope_layers = [true, false]", MHA, "SmolLM3ForCausalLM", None, None),
        // No class of transformers computes the whole of these models.
        (no_norms, DMA, own, None, Some(own)),
        ("rope_layers = [true, false]", MHA, own, None, Some(own)),
    ]
    .into_iter()
    .enumerate()
    {
        let checkpoint = checkpoint(&folder.path().join(format!("run-{n}")), model, attention);
        let out = folder.path().join(format!("hf-{n}"));
        for (form, expected) in [(None, Some(usual)), (Some(doge), of_doge), (Some(sieve), of_sieve)] {
            let report = export(&checkpoint, &out, &ExportOptions { form, ..options() });
            let Some(expected) = expected else {
                sieve_testing::refusal(report, "this model as | hint: leave the form out");
                continue;
            };
            let report = report.expect("exports");
            assert_eq!(report.architecture, expected, "{attention} {form:?}");
            assert_eq!(report.leaves_ties_open, expected == either[0]);
            assert_eq!(report.is_remote_code, expected == own);
            for (file, _) in MODELING {
                assert_eq!(out.join(file).exists(), expected == own, "{file}");
            }
        }
    }
}

#[test]
fn a_form_that_does_not_fit_and_a_folder_of_other_files_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let checkpoint = checkpoint(&folder.path().join("run"), TIED, MHA);
    let out = folder.path().join("refused");
    let doge = ExportOptions { form: Some(ExportForm::Doge), ..options() };
    sieve_testing::refusal(export(&checkpoint, &out, &doge), "this model as Doge | leave the form out");
    assert!(!out.exists(), "nothing is written before the checks");
    let out = folder.path().join("thesis");
    fs::create_dir(&out).expect("writable");
    fs::write(out.join("config.json"), "mine").expect("writable");
    let error = export(&checkpoint, &out, &options()).expect_err("holds something else");
    assert!(error.to_string().contains("config.json"), "{error}");
    assert_eq!(fs::read_to_string(out.join("config.json")).expect("kept"), "mine");
}

#[test]
fn a_loaded_model_has_the_weights_of_its_checkpoint() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = folder.path().join("run");
    let checkpoint = checkpoint(&run, TIED, DMA);
    let load = |folder: &Path| load_model::<Flex>(folder, &Default::default(), DType::F32);
    let loaded = load(&run).expect("loads");
    assert_eq!(loaded.path, checkpoint.path);
    let weights = weights(&checkpoint.path);
    for tensor in named_parameters(&loaded.model) {
        assert_eq!(weights.any_tensor(&tensor.name).expect("same names"), tensor.data);
    }
    let empty = folder.path().join("empty");
    let error = load(&empty).expect_err("nothing there");
    assert!(matches!(error, CheckpointError::NotFound { .. }), "{error}");
    let file = loaded.path.join("model.safetensors");
    let mut bytes = fs::read(&file).expect("there");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&file, bytes).expect("writable");
    let error = load(&run).expect_err("a flipped bit");
    assert!(error.to_string().contains("model.safetensors"), "{error}");
}

/// AutoTokenizer of transformers 5 splits texts for a Qwen2 model as its own tokenizer does, not by tokenizer.json.
#[test]
fn a_qwen2_export_tells_whether_its_tokenizer_splits_as_qwen2s() {
    let words = |pattern: &str| {
        let split = serde_json::json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"});
        let text = serde_json::json!({"normalizer": {"type": "NFC"}, "pre_tokenizer": {"pretokenizers": [split]}});
        tokenizer_files::splits_as_qwen2(&[("config.json", "{}".to_owned()), ("tokenizer.json", text.to_string())])
    };
    let published = concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    );
    assert!(words(published));
    assert!(!words(&published.replace(r"\p{N}|", r"\p{N}{1,3}|")));
    let qwen2 = "qk_norm = false\nqkv_bias = true";
    for (model, replaced) in [(qwen2, true), ("qk_norm = false", false), ("", false)] {
        let report = exported(model, MHA, &options()).report;
        assert_eq!(report.replaces_tokenizer, replaced, "{model}");
    }
}
