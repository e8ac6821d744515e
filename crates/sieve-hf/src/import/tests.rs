use super::*;
use crate::export::tests::{self, DMA, MHA, SLOPED, SWA, changed_checkpoint, read_json};
use crate::named_parameters;
use crate::tensor_files::{INDEX, SINGLE};
use crate::{DEFAULT_SHARD_BYTES, ExportDtype, ExportOptions, NamedTensor, TensorFile, export, load_model};
use burn_flex::Flex;
use serde_json::{Value, json};
use sieve_core::kinds::Projections;
use sieve_core::{Attention, LayerType};
use sieve_testing::{cases, refusal};
use std::collections::HashSet;

/// A random checkpoint, exported: the folder of `transformers`.
fn exported(folder: &Path, model: &str, attention: &str, options: ExportOptions) -> PathBuf {
    let model = format!("rope_theta = 54321.5\n{model}");
    let run = folder.join("run");
    let checkpoint = changed_checkpoint(&run, &model, attention, |number, tensor| {
        // Norms, A and scales too get other values than a new model has.
        let shift = 1.0 + number as f32 / 64.0;
        let values = tensor.data.iter::<f32>().map(|value| value + shift);
        tensor.data = TensorData::new(values.collect::<Vec<_>>(), tensor.data.shape.to_vec());
    });
    let out = folder.join("hf");
    export(&checkpoint, &out, &options).expect("exports");
    out
}

fn options(dtype: ExportDtype, max_shard_bytes: u64) -> ExportOptions {
    ExportOptions { dtype, max_shard_bytes, ..tests::options() }
}

/// An export of f32 values in one file.
fn whole() -> ExportOptions {
    options(ExportDtype::F32, DEFAULT_SHARD_BYTES)
}

const TIED: &str = "tie_word_embeddings = true";

/// The folder of a dense model, and the folder that holds it.
fn dense(model: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let hf = exported(folder.path(), model, MHA, whole());
    (folder, hf)
}

fn imported(
    from: &Path,
    out: &Path,
    attention: Option<AttentionKind>,
    overrides: &[&str],
) -> Result<ImportReport, CheckpointError> {
    let overrides = overrides.iter().map(|item| (*item).to_owned()).collect::<Vec<_>>();
    let drops = false;
    import::<Flex>(from, out, attention, &overrides, drops, &Default::default())
}

/// Rewrites one file of weights.
fn rewrite(hf: &Path, change: impl FnOnce(&mut Vec<NamedTensor>)) {
    let path = hf.join(SINGLE);
    let mut tensors = all_tensors(&path);
    change(&mut tensors);
    crate::write_tensor_file(&path, &tensors, None).expect("writable");
}

#[test]
fn export_import_export_gives_the_same_bytes() {
    const NSA: &str = "kind = \"nsa\"\ncompress_block_size = 4\ncompress_stride = 2\nselect_block_size = 4\n\
        num_selected_blocks = 3\nwindow_size = 5\n";
    const MLA: &str = "kind = \"mla\"\nkv_lora_rank = 8\nqk_rope_head_dim = 4\n";
    const INFLLM_V2: &str = "kind = \"infllm_v2\"\ncompress_block_size = 4\ncompress_stride = 2\n\
        select_block_size = 4\nnum_selected_blocks = 5\nnum_local_blocks = 1\n";
    const MOBA: &str = "kind = \"moba\"\nselect_block_size = 4\nnum_selected_blocks = 3\n";
    const MSA: &str = "kind = \"msa\"\nselect_block_size = 4\nnum_selected_blocks = 3\n";
    const COWA: &str = "kind = \"cowa\"\nnear_window = 3\nfar_reach = 40\n";
    let llama3 = "qk_norm = false\nrope_scaling = { rope_type = \"llama3\", factor = 8.0, low_freq_factor = 1.5, \
        original_max_position_embeddings = 32 }";
    let yarn = "qk_norm = false\nqkv_bias = true\nlayer_types = [\"mha\", \"swa\"]\n\
        rope_scaling = { rope_type = \"yarn\", factor = 4.0, beta_fast = 16.0 }";
    let linear = "qk_norm = false\nrope_scaling = { rope_type = \"linear\", factor = 2.0 }";
    let scaled = "residual_scale = true";
    let mut kinds = HashSet::new();
    // Whether embeddings are tied, the rest of [model], the kind, the rest of [attention].
    for (tied, model, kind, more) in [
        (true, "", MHA, ""),
        (false, "", MHA, ""),
        (false, "", SWA, ""),
        (true, "", DMA, ""),
        (true, scaled, DMA, ""),
        (true, "layer_types = [\"sparse\", \"mha\"]", SLOPED, ""),
        (false, "layer_types = [\"swa\", \"mha\"]", SWA, ""),
        (true, scaled, NSA, "compress_hidden_size = 5\nshared_kv = false"),
        (false, "", NSA, "compress = \"mean\""),
        (true, "", MLA, ""),
        (false, "", MLA, "qk_norm = false"),
        (true, "qk_norm = false", MHA, ""),
        (false, llama3, MHA, ""),
        (false, "qk_norm = false", SWA, ""),
        (true, "attention_sinks = true\nlayer_types = [\"swa\", \"mha\"]", SWA, ""),
        (true, yarn, SWA, ""),
        (false, "qk_norm = false\nlayer_types = [\"swa\", \"mha\"]", SWA, ""),
        (true, "residual_scale = true\nqkv_bias = true", MHA, ""),
        (true, linear, DMA, ""),
        (false, "", INFLLM_V2, ""),
        (true, "layer_types = [\"sparse\", \"shared\"]", MOBA, ""),
        (false, scaled, MSA, ""),
        (true, "", MSA, "indexer = \"qsa\""),
        (false, "", COWA, "sink_tokens = 0"),
        (true, "layer_types = [\"sparse\", \"mha\"]", COWA, "num_bands = 1"),
    ] {
        let model = format!("tie_word_embeddings = {tied}\n{model}");
        let (model, attention) = (model.as_str(), format!("{kind}\n{more}"));
        for options in [whole(), options(ExportDtype::Bf16, DEFAULT_SHARD_BYTES), options(ExportDtype::F32, 1500)] {
            let folder = tempfile::tempdir().expect("a folder");
            let first = exported(folder.path(), model, &attention, options);
            let back = folder.path().join("back");
            let report = imported(&first, &back, None, &[]).expect("imports");
            assert_eq!(report.added, Vec::<String>::new());
            assert_eq!(report.recipe.model.rope_theta, 54321.5);
            let trained = Checkpoint::open(&folder.path().join("run")).expect("just written");
            let trained = trained.recipe_and_shape().expect("just written").0.attention.own;
            assert_eq!(report.recipe.attention.own, trained, "{attention}");
            kinds.insert(trained.kind());
            let second = folder.path().join("again");
            let checkpoint = Checkpoint::open(&back).expect("just written");
            export(&checkpoint, &second, &options).expect("exports again");
            let mut names = fs::read_dir(&first)
                .expect("a folder")
                .map(|entry| entry.expect("an entry").file_name())
                .collect::<Vec<_>>();
            names.sort();
            // A model card says what was trained, which an import does not know.
            names.retain(|name| name != "README.md");
            assert!(names.len() >= 5, "{names:?}");
            for name in names {
                let read = |folder: &Path| fs::read(folder.join(&name)).expect("a file");
                assert!(read(&first) == read(&second), "{attention}: {name:?}");
            }
        }
    }
    assert_eq!(kinds, AttentionKind::ALL.into());
}

#[test]
fn a_dense_model_becomes_sparse_with_initial_values_of_new_weights() {
    let (folder, hf) = dense(TIED);
    let out = folder.path().join("dma");
    let kind = Some(AttentionKind::Dma);
    let report = imported(&hf, &out, kind, &["attention.keep_window_size=3"]).expect("imports");
    assert_eq!(
        report.added,
        [
            "layers.0.self_attn.dt_proj.weight",
            "layers.0.self_attn.a",
            "layers.1.self_attn.dt_proj.weight",
            "layers.1.self_attn.a",
        ]
    );
    let loaded = load_model::<Flex>(&out, &Default::default(), burn::tensor::DType::F32).expect("loads");
    let new = named_parameters(&loaded.model);
    let find = |name: &str| new.iter().find(|tensor| tensor.name == name).expect(name);
    let a = find("layers.1.self_attn.a");
    assert!(a.data.iter::<f32>().all(|value| value == 0.0));
    let dt = find("layers.1.self_attn.dt_proj.weight");
    assert!(dt.data.iter::<f32>().any(|value| value != 0.0));
    // NSA takes the same weights; its gates begin with its window for the most part.
    let sizes = [
        "attention.compress_block_size=4",
        "attention.compress_stride=2",
        "attention.compress=mean",
        "attention.select_block_size=4",
        "attention.num_selected_blocks=3",
        "attention.window_size=5",
    ];
    let nsa = folder.path().join("nsa");
    let report = imported(&hf, &nsa, Some(AttentionKind::Nsa), &sizes).expect("imports");
    assert!(!report.added.is_empty(), "the gates are new");
    assert!(report.added.iter().all(|name| name.contains("self_attn")), "{report:?}");
    // The other weights are the exported ones.
    let theirs = TensorFile::open(&hf.join(SINGLE)).expect("exported");
    let name = "model.layers.1.self_attn.o_proj.weight";
    let expected = theirs.any_tensor(name).expect(name);
    let found = &find("layers.1.self_attn.o_proj.weight").data;
    assert_eq!(found.as_bytes(), expected.as_bytes());
}

/// Version 4 of transformers and older ones left out keys whose values are the class's defaults.
#[test]
fn absent_keys_have_the_defaults_of_their_class() {
    let (_folder, hf) = dense("tie_word_embeddings = true\nqk_norm = false");
    let path = hf.join("config.json");
    let config = read_json(&path);
    for (model_type, window, theta) in [("llama", None, None), ("mistral", Some(4096), Some(5e5))] {
        let mut changed = config.clone();
        let keys = changed.as_object_mut().expect("an object");
        keys.retain(|key, _| !["rope_parameters", "rope_theta", "sliding_window"].contains(&key.as_str()));
        keys.insert("model_type".to_owned(), json!(model_type));
        keys.insert("rope_scaling".to_owned(), json!({ "type": "linear", "factor": 2.0 }));
        if let Some(theta) = theta {
            keys.insert("rope_theta".to_owned(), json!(theta));
        }
        fs::write(&path, changed.to_string()).expect("writable");
        let (recipe, shape) = crate::imported_model(&hf, None, &[]).expect("imports");
        assert_eq!(recipe.model.rope_theta, theta.unwrap_or(10_000.0));
        let expected = window.map_or(sieve_core::Attention::Mha, sieve_core::Attention::swa);
        assert_eq!(recipe.attention.own, expected);
        let (frequencies, amplitude) = shape.rotary_frequencies(4);
        assert_eq!((frequencies[0], amplitude), (0.5, 1.0));
    }
}

#[test]
fn missing_unknown_and_ill_shaped_tensors_are_all_named() {
    let (folder, hf) = dense(TIED);
    rewrite(&hf, |tensors| {
        tensors.retain(|tensor| !tensor.name.contains("layers.0.mlp"));
        for tensor in tensors.iter_mut() {
            if tensor.name == "model.norm.weight" {
                tensor.name = "model.norm.wait".to_owned();
            }
            if tensor.name.ends_with("0.self_attn.q_norm.weight") {
                tensor.data = TensorData::new(vec![1f32; 7], [7]);
            }
        }
    });
    refusal(
        imported(&hf, &folder.path().join("out"), None, &[]),
        "4 tensors are missing: model.layers.0.mlp.down_proj.weight, model.layers.0.mlp.gate_proj.weight | \
         model.norm.weight | 1 tensors are unknown: model.norm.wait | \
         model.layers.0.self_attn.q_norm.weight [7] instead of [6]",
    );
    assert!(!folder.path().join("out").exists(), "nothing is written");
}

#[test]
fn a_prefix_of_all_names_is_named_with_its_way_out() {
    for (tied, change, words) in [
        (true, ("model.", ""), "lack \"model.\" | AutoModelForCausalLM.from_pretrained( | save_pretrained"),
        (false, ("model.", ""), "lack \"model.\" | has no lm_head.weight: take the model that"),
        (true, ("model.", "_orig_mod.model."), "begin with \"_orig_mod.\" | removeprefix(\"_orig_mod.\") | save_file"),
        (true, ("model.", "module.model."), "begin with \"module.\" | torch.compile | removeprefix(\"module.\")"),
        (true, ("model.", "a.module.model."), "begin with \"a.module.\""),
        (true, ("layers.0", "layers.7"), "config.json and the weights must be of one model"),
    ] {
        let (folder, hf) = dense(if tied { TIED } else { "tie_word_embeddings = false" });
        rewrite(&hf, |tensors| {
            tensors.retain(|tensor| tensor.name != OUTPUT);
            tensors.iter_mut().for_each(|tensor| tensor.name = tensor.name.replacen(change.0, change.1, 1));
        });
        let error = refusal(imported(&hf, &folder.path().join("out"), None, &[]), words);
        assert_eq!(error.contains("must be of one model"), change.0 == "layers.0", "{error}");
    }
}

#[test]
fn rotary_tables_and_a_tied_output_projection_are_ignored() {
    let (folder, hf) = dense(TIED);
    rewrite(&hf, |tensors| {
        let frequencies = TensorData::new(vec![0f32; 3], [3]);
        let added =
            [("lm_head.weight", embedding_of(tensors)), ("model.layers.0.self_attn.rotary_emb.inv_freq", frequencies)];
        tensors.extend(added.map(|(name, data)| NamedTensor { name: name.to_owned(), data }));
    });
    let report = imported(&hf, &folder.path().join("out"), None, &[]).expect("imports");
    assert_eq!(report.ignored.len(), 2);
    assert!(report.recipe.model.tie_word_embeddings);
}

fn embedding_of(tensors: &[NamedTensor]) -> TensorData {
    let found = tensors.iter().find(|tensor| tensor.name == EMBEDDING);
    found.expect("every model has one").data.clone()
}

/// Some tools write an output projection of its own and leave `tie_word_embeddings` true; `transformers` reads it.
#[test]
fn an_output_projection_unlike_the_embedding_unties_the_model() {
    let (folder, hf) = dense(TIED);
    let mut output = Vec::new();
    rewrite(&hf, |tensors| {
        let embedding = embedding_of(tensors);
        output = embedding.iter::<f32>().map(|x| x + 0.25).collect();
        let data = TensorData::new(output.clone(), embedding.shape.to_vec());
        let name = OUTPUT.to_owned();
        tensors.push(NamedTensor { name, data });
    });
    let report = imported(&hf, &folder.path().join("out"), None, &[]).expect("imports");
    assert!(!report.recipe.model.tie_word_embeddings && report.ignored.is_empty());
    let [(_, shape), (_, imported_shape)] = [&hf, &report.path].map(|path| crate::peek_model(path).expect("a model"));
    assert!(!shape.tie_word_embeddings && shape == imported_shape);
    for path in [&hf, &report.path] {
        let loaded = load_model::<Flex>(path, &Default::default(), DType::F32).expect("loads");
        let head = loaded.model.head.lm_head.expect("untied").weight.val();
        assert_eq!(head.into_data().iter::<f32>().collect::<Vec<_>>(), output);
    }
}

#[test]
fn an_export_says_the_length_of_its_rows() {
    let (_folder, hf) = dense(TIED);
    let row = || {
        let (recipe, shape) = crate::peek_model(&hf).expect("a model");
        [recipe.training.seq_len, shape.max_seq_len]
    };
    assert_eq!(row()[0], 8);
    fs::remove_file(hf.join("sieve_export.json")).expect("an export has it");
    let [usual, longest] = row();
    assert_eq!(usual, longest.min(2048));
    assert_ne!(usual, 8);
}

#[test]
fn residual_scales_that_bf16_would_round_to_one_are_kept() {
    let folder = tempfile::tempdir().expect("a folder");
    let hf = exported(folder.path(), TIED, DMA, whole());
    let has_scales = || {
        let loaded = load_model::<Flex>(&hf, &Default::default(), DType::BF16).expect("loads");
        loaded.shape.residual_scale
    };
    assert!(!has_scales(), "all of them are one");
    rewrite(&hf, |tensors| {
        for tensor in tensors.iter_mut().filter(|tensor| is_residual_scale(&tensor.name)) {
            tensor.data = TensorData::full([12], 1.001f32);
        }
    });
    assert!(has_scales());
}

#[test]
fn chat_templates_and_special_tokens_are_exported_again() {
    let (folder, hf) = dense(TIED);
    let config_path = "tokenizer_config.json";
    let read = |folder: &Path| read_json(&folder.join(config_path));
    let mut config = read(&hf);
    config["chat_template"] = json!("{{ messages }}");
    config["bos_token"] = json!("a");
    // Another tokenizer class of transformers would not read tokenizer.json unchanged.
    config["tokenizer_class"] = json!("Qwen2Tokenizer");
    fs::write(hf.join(config_path), config.to_string()).expect("writable");
    fs::write(hf.join("chat_template.jinja"), "{{ all }}").expect("writable");
    let back = folder.path().join("back");
    imported(&hf, &back, None, &[]).expect("imports");
    // The checkpoint holds copies of these files.
    let moved = folder.path().join("moved");
    fs::rename(&back, &moved).expect("the same file system");
    let out = folder.path().join("again");
    export(&Checkpoint::open(&moved).expect("just written"), &out, &whole()).expect("exports");
    let found = read(&out);
    assert_eq!(found["chat_template"], "{{ messages }}");
    assert_eq!(found["bos_token"], "a");
    assert_eq!(found["tokenizer_class"], "PreTrainedTokenizerFast");
    assert_eq!(fs::read_to_string(out.join("chat_template.jinja")).expect("carried"), "{{ all }}");
}

#[test]
fn tokens_that_begin_and_end_generation_are_exported_again() {
    let (folder, hf) = dense(TIED);
    let read = |folder: &Path, name: &str| read_json(&folder.join(name));
    let change = |name: &str, changes: serde_json::Value| {
        let mut all = read(&hf, name);
        for (key, value) in changes.as_object().expect("an object") {
            all[key] = value.clone();
        }
        fs::write(hf.join(name), all.to_string()).expect("writable");
    };
    // Id 0 is the tokenizer's token "a". A key that generation_config.json lacks is taken from config.json.
    let sampling = json!({ "do_sample": true, "temperature": 0.5, "transformers_version": "5" });
    change("generation_config.json", sampling);
    change("config.json", json!({ "bos_token_id": 0, "eos_token_id": 0 }));
    change("tokenizer_config.json", json!({ "eos_token": null }));
    // A run that continues from here ends its documents with token 1.
    for (number, (theirs, expected)) in [(json!([0, 1]), json!([0, 1])), (json!(0), json!(1))].into_iter().enumerate() {
        change("generation_config.json", json!({ "eos_token_id": theirs }));
        let back = folder.path().join(format!("back-{number}"));
        let report = imported(&hf, &back, None, &[]).expect("imports");
        assert_eq!(report.recipe.tokenizer.eos_token.as_deref(), Some("a"));
        // Generation ends at all of these tokens, from the import and from the folder itself.
        for model in [&back, &hf] {
            let loaded = crate::load_model::<Flex>(model, &Default::default(), DType::F32).expect("loads");
            let ends = [0, 1].map(|eos| loaded.end_ids(eos).expect("readable"));
            let both = [vec![0, 1], vec![1, 0]];
            assert_eq!(ends, if number == 0 { both } else { [vec![0], vec![1]] });
        }
        let out = folder.path().join(format!("again-{number}"));
        export(&Checkpoint::open(&back).expect("just written"), &out, &whole()).expect("exports");
        let generation = json!({ "eos_token_id": expected, "pad_token_id": null, "do_sample": true,
            "temperature": 0.5, "bos_token_id": 0 });
        assert_eq!(read(&out, "generation_config.json"), generation);
        let config = read(&out, "config.json");
        assert_eq!([&config["bos_token_id"], &config["eos_token_id"]], [&json!(0), &expected]);
    }
    // A name in tokenizer_config.json comes first, and one that the user gives before it.
    change("tokenizer_config.json", json!({ "eos_token": { "content": "<|endoftext|>" } }));
    let eos = |out: &str, overrides: &[&str]| {
        let report = imported(&hf, &folder.path().join(out), None, overrides).expect("imports");
        report.recipe.tokenizer.eos_token
    };
    assert_eq!(eos("named", &[]).as_deref(), Some("<|endoftext|>"));
    assert_eq!(eos("set", &["tokenizer.eos_token=a"]).as_deref(), Some("a"));
}

#[test]
fn configurations_without_a_recipe_are_refused() {
    let (folder, hf) = dense(TIED);
    let out = folder.path().join("out");
    let latent = tempfile::tempdir().expect("a folder");
    let mla = "kind = \"mla\"\nkv_lora_rank = 8\nqk_rope_head_dim = 4\nqk_norm = false";
    let latent_hf = exported(latent.path(), TIED, mla, whole());
    let ranked = tempfile::tempdir().expect("a folder");
    let scaled = "rope_scaling = { rope_type = \"linear\", factor = 2.0 }";
    let ranked_hf = exported(ranked.path(), scaled, SLOPED, whole());
    for [kind, key, value, word] in cases(
        r#"
        dense => model_type => "mixtral" => model_type is "mixtral"
        dense => num_local_experts => 8 => num_local_experts is 8
        dense => alibi => true => alibi is true
        dense => hidden_act => "gelu" => hidden_act
        dense => attention_bias => true => attention_bias
        dense => partial_rotary_factor => 0.5 => partial_rotary_factor is 0.5
        dense => rope_parameters => {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25} => \
            partial_rotary_factor is 0.25
        dense => rope_parameters => {"rope_type": "longrope", "rope_theta": 1e4} => scaled
        dense => rope_parameters => {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": false} => \
            truncate is false in rope_parameters
        dense => rope_scaling => {"type": "linear", "factor": 0.5} => rope_scaling.factor: is 0.5
        dense => layer_types => ["full_attention", "sliding_attention"] => sliding_window is null
        dense => num_hidden_layers => "two" => num_hidden_layers
        dense => num_key_value_heads => 3 => num_key_value_heads
        dense => hidden_size => 13 => of a different shape
        mla => q_lora_rank => 8 => q_lora_rank is 8
        mla => rope_interleave => true => rope_interleave
        mla => first_k_dense_replace => 1 => some layers have experts
        mla => qk_nope_head_dim => 4 => qk_nope_head_dim is not v_head_dim
        mla => rms_norm_eps => 1e-5 => rms_norm_eps is not the 1e-6
        dense => hidden_size => -1 => hidden_size is -1, not a whole number | correct this value
        dense => hidden_size => "12" => hidden_size is "12", not a whole number | correct this value
        dma => attention_kind => "foo" => attention_kind is "foo", not one of mha, | correct this value
        dma => dense_layers => 3 => dense_layers is 3, not a list | correct this value
        dma => periods => [4, 8] => periods is [4,8], and its other keys give [4.0, | correct this value
        dma => periods => [-1, "0"] => periods is [-1,"0"], and
        dma => periods => null => periods is null, and
        dma => rope_amplitude => 3.5 => rope_amplitude is 3.5, and its other keys give 1.0
    "#,
    ) {
        let from = match kind {
            "mla" => &latent_hf,
            "dma" => &ranked_hf,
            _ => &hf,
        };
        let path = from.join("config.json");
        let whole = fs::read_to_string(&path).expect("written");
        let mut changed = read_json(&path);
        changed[key] = serde_json::from_str(value).expect("JSON");
        fs::write(&path, changed.to_string()).expect("writable");
        refusal(imported(from, &out, None, &[]), word);
        fs::write(&path, whole).expect("writable");
    }
    refusal(imported(&hf, &out, None, &["model.intermediate_size=24"]), "only the attention may change");
    fs::rename(hf.join("config.json"), hf.join("config")).expect("the same file system");
    refusal(crate::peek_model(&hf), "has a model's weights, but config.json is missing");
    fs::rename(hf.join("config"), hf.join("config.json")).expect("the same file system");
    fs::remove_file(hf.join(SINGLE)).expect("there");
    refusal(imported(&hf, &out, None, &[]), "neither model.safetensors");
    fs::write(hf.join(INDEX), r#"{"weight_map":{"a":"../secret"}}"#).expect("writable");
    refusal(imported(&hf, &out, None, &[]), "../secret");
}

#[test]
fn an_export_that_transformers_saved_again_is_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let from = exported(&folder.path().join("export"), TIED, SLOPED, whole());
    let path = from.join("config.json");
    let mut saved = read_json(&path);
    // `save_pretrained` also writes the keys that have the defaults of modeling_sieve.py.
    saved["rope_frequencies"] = json!(null);
    saved["rope_amplitude"] = json!(1.0);
    saved["no_rope_layers"] = json!([]);
    fs::write(&path, saved.to_string()).expect("writable");
    imported(&from, &folder.path().join("out"), None, &[]).expect("imports");
}

#[test]
fn a_doge_export_that_transformers_saved_again_is_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let from = exported(&folder.path().join("export"), TIED, DMA, whole());
    let path = from.join("config.json");
    let mut saved = read_json(&path);
    // The class writes the settings of experts into every file.
    let experts = json!({ "is_moe": false, "num_experts": 16384, "num_experts_per_tok": 64, "norm_topk_prob": false });
    saved.as_object_mut().expect("an object").extend(experts.as_object().expect("an object").clone());
    fs::write(&path, saved.to_string()).expect("writable");
    imported(&from, &folder.path().join("out"), None, &[]).expect("imports");
    saved["is_moe"] = json!(true);
    fs::write(&path, saved.to_string()).expect("writable");
    refusal(imported(&from, &folder.path().join("experts"), None, &[]), "is_moe is true");
}

#[test]
fn dense_layers_beside_others_become_another_kind() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = "layer_types = [\"dma\", \"sparse\"]";
    let dma = format!("{MHA}\n[attention.dma]\n{}", SLOPED.replace("kind = \"dma\"", ""));
    let hf = exported(folder.path(), model, &dma, whole());
    let kinds = |out: &str, kind| {
        let report = imported(&hf, &folder.path().join(out), kind, &[]).expect("imports");
        let layers = report.recipe.layer_pattern().types().to_vec();
        (layers.len(), layers[1] == LayerType::OWN, report.recipe.attention.own.kind())
    };
    assert_eq!(kinds("same", None), (2, true, AttentionKind::Mha));
    assert_eq!(kinds("windows", Some(AttentionKind::Swa)), (2, true, AttentionKind::Swa));
}

/// Settings of the first layer's attention unlike those that the model in `hf` has with the overrides `first`. Each is
/// a line of the recipe that the other lines go with; `prefix` stands before its key in an override.
fn changed_settings(hf: &Path, prefix: &str, first: &[String]) -> Vec<String> {
    let mut overrides = first.to_vec();
    let attention = |overrides: &[String]| {
        let (_, shape) = imported_model(hf, None, overrides).ok()?;
        Some(shape.attention_of(0))
    };
    let mut last = attention(&overrides).unwrap_or_else(|| panic!("{overrides:?}"));
    let mut lines = Vec::new();
    let settings = serde_json::to_value(last).expect("numbers and names");
    for (key, value) in settings.as_object().expect("a table") {
        let others: Vec<Value> = match value {
            Value::Bool(is_on) => vec![json!(!is_on)],
            Value::Number(number) => match number.as_u64() {
                Some(count) => [2 * count, count / 2, count + 1].map(Value::from).to_vec(),
                None => vec![json!(number.as_f64().expect("finite") / 2.0 + 0.25)],
            },
            _ => continue,
        };
        for other in others {
            overrides.push(format!("{prefix}{key}={other}"));
            match attention(&overrides) {
                Some(changed) if changed != last => {
                    last = changed;
                    lines.push(format!("{key} = {other}"));
                    break;
                }
                _ => _ = overrides.pop(),
            }
        }
    }
    lines
}

#[test]
fn layers_that_have_the_kind_of_the_attention_flag_keep_their_settings() {
    let (_folder, dense) = dense(TIED);
    let is_latent = |kind: &AttentionKind| kind.facts().projections == Projections::Latent;
    for kind in AttentionKind::ALL {
        let name = kind.name();
        let own = format!("kind = {name:?}");
        // The kinds of the other layers, and the names of the layers of `kind` beside them.
        let mut models = Vec::new();
        if is_latent(&kind) {
            let folder = tempfile::tempdir().expect("a folder");
            let hf = exported(folder.path(), TIED, &own, whole());
            let lines = changed_settings(&hf, "attention.", &[]).join("\n");
            assert!(!lines.is_empty(), "{name}");
            models.push((TIED.to_owned(), format!("{own}\n{lines}")));
        } else {
            let types = format!("layer_types = [{name:?}, \"sparse\"]");
            let is_dense = kind == AttentionKind::Mha;
            let lines = if is_dense {
                String::new()
            } else {
                let prefix = format!("attention.{name}.");
                let first = [format!("model.{types}").replace(" = ", "="), format!("{prefix}kind={name}")];
                changed_settings(&dense, &prefix, &first).join("\n")
            };
            assert!(is_dense || lines.lines().count() > 0, "{name}");
            let far = "layer_types = [\"far\", \"sparse\"]";
            models.push((far.to_owned(), format!("{own}\n{lines}\n[attention.far]\n{own}")));
            for other in AttentionKind::ALL.into_iter().filter(|other| *other != kind && !is_latent(other)) {
                let table = if is_dense { String::new() } else { format!("[attention.{name}]\n{lines}") };
                models.push((types.clone(), format!("kind = {:?}\n{table}", other.name())));
            }
        }
        for (model, attention) in models {
            let folder = tempfile::tempdir().expect("a folder");
            let hf = exported(folder.path(), &model, &attention, whole());
            let shape = |kind| imported_model(&hf, kind, &[]).unwrap_or_else(|error| panic!("{attention}: {error}")).1;
            let (before, after) = (shape(None), shape(Some(kind)));
            for layer in 0..2 {
                let own = before.attention;
                let [before, after] = [&before, &after].map(|shape| shape.attention_of(layer));
                assert!(before.kind() != kind || before == after, "{attention}: {after:?}");
                assert!(before != own || after.kind() == kind, "{attention}: {after:?}");
            }
        }
    }
}

#[test]
fn a_dense_model_takes_sparse_layers_between_its_dense_ones() {
    let (folder, hf) = dense(TIED);
    let settings = ["attention.keep_window_size=16", "attention.bias=linear", "model.layer_types=[\"sparse\",\"mha\"]"];
    let out = folder.path().join("out");
    let report = imported(&hf, &out, Some(AttentionKind::Dma), &settings).expect("imports");
    assert_eq!(report.recipe.layer_pattern().types(), [LayerType::OWN, LayerType::of(Attention::DENSE)]);
    let names = ["dt_proj.weight", "a"].map(|name| format!("layers.0.self_attn.{name}"));
    assert_eq!(report.added, names);
}

#[test]
fn the_page_names_every_class_that_is_read() {
    let page = include_str!("../../../../docs/export.md");
    for class in Architecture::ALL.map(Architecture::class) {
        assert!(page.contains(class.name), "docs/export.md lacks {}", class.name);
    }
}
