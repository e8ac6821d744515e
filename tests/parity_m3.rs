//! MSA exported as MiniMax-M3's text class: transformers' own class, without remote code, computes the same, and so
//! does a model that is read from the folder, or from one that transformers has saved again.
#![allow(clippy::print_stderr, reason = "the largest difference is worth a line")]
use crate::python;
use crate::random_model::{
    VOCAB_SIZE, export_options, generated, greedy, max_difference, random_model, recipe_with_context, tokens,
    write_checkpoint,
};
use burn::tensor::{DType, TensorData};
use burn_flex::Flex;
use sieve_hf::{CheckpointError, ExportDtype, ExportForm, ExportOptions, ExportReport, TensorFile, check_config};
use sieve_hf::{export, load_model};
use sieve_infer::logits;
use sieve_testing::{cases, refusal};
use std::path::Path;

/// Tokens of the text; the script's prompts are LEN / 48 times longer than its list says.
const LEN: usize = 576;
const PROMPTS: [usize; 3] = [60, 192, 132];
const NEW: usize = 12;
const SEED: u64 = 5;
/// Tolerance of a logit's difference, as a share of the largest logit; both sides compute in f32.
const TOLERANCE: f32 = 1e-5;

fn models() -> Vec<[&'static str; 3]> {
    cases(
        r#"
        small => tie_word_embeddings = true => kind = "msa"\nselect_block_size = 4\nnum_selected_blocks = 3
        hybrid => tie_word_embeddings = false\nlayer_types = ["sparse", "mha", "sparse"] => kind = "msa"\n\
            select_block_size = 16\nnum_selected_blocks = 6\nnum_local_blocks = 3
        published => tie_word_embeddings = false\nhead_dim = 128 => kind = "msa"\nselect_block_size = 128\n\
            num_selected_blocks = 2
        yarn => tie_word_embeddings = true\nlayer_types = ["mha", "msa", "msa"]\n\
            rope_scaling = { rope_type = "yarn", factor = 4.0, original_max_position_embeddings = 160 } \
            => kind = "mha"\n[attention.msa]\nselect_block_size = 8\nnum_selected_blocks = 5
    "#,
    )
}

fn values(data: TensorData) -> Vec<f32> {
    data.convert::<f32>().to_vec().expect("converted to f32")
}

/// Logits of a folder: a checkpoint, or one of transformers.
fn our_logits(folder: &Path, tokens: &[u32]) -> Vec<f32> {
    let device = Default::default();
    let loaded = load_model::<Flex>(folder, &device, DType::F32).unwrap_or_else(|error| panic!("{error}"));
    values(logits(&loaded.model, tokens, &device).expect("tokens of the vocabulary"))
}

fn largest(logits: &[f32]) -> f32 {
    logits.iter().fold(0.0, |max, x| max.max(x.abs()))
}

/// The largest difference of two lists of logits, as a share of the largest logit.
fn apart(ours: &[f32], theirs: &[f32]) -> f32 {
    max_difference(ours, theirs) / largest(ours)
}

fn in_form(form: ExportForm) -> ExportOptions {
    ExportOptions { form: Some(form), ..export_options(ExportDtype::F32) }
}

#[test]
fn minimax_m3_of_transformers_computes_the_same() {
    let imports = "import torch, safetensors, transformers.models.minimax_m3_vl.modeling_minimax_m3_vl";
    let python = python::interpreter("minimax_m3_of_transformers_computes_the_same", imports);
    let folder = tempfile::tempdir().expect("a folder");
    let tokens = tokens(LEN, SEED);
    let list: Vec<String> = tokens.iter().map(u32::to_string).collect();
    let mut arguments = vec![list.join(","), "t5 t96".to_owned()];
    let mut ours = Vec::new();
    for [name, model_lines, attention] in models() {
        let recipe = recipe_with_context(model_lines, attention, 640);
        let model = random_model(&recipe, SEED);
        let run = folder.path().join(name);
        let checkpoint = write_checkpoint(&run, &recipe, &model);
        let out = folder.path().join(format!("{name}-hf"));
        let report = export(&checkpoint, &out, &in_form(ExportForm::M3)).unwrap_or_else(|error| panic!("{error}"));
        arguments.push(out.display().to_string());
        let logits = our_logits(&run, &tokens);
        let imported = apart(&logits, &our_logits(&out, &tokens));
        eprintln!("{name}: the import differs by {imported:.2e}");
        assert!(imported < TOLERANCE, "{name}: {imported}");
        let continued = PROMPTS.map(|len| generated(&model, &tokens[..len], greedy(NEW)));
        ours.push((name, out, report, logits, continued));
    }
    let Some(python) = python else {
        return;
    };
    let printed = python::run(&python, "transformers_logits.py", &arguments);
    let lines: Vec<serde_json::Value> = printed.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    assert_eq!(lines.len(), ours.len(), "{printed}");
    for ((name, out, report, ours, continued), line) in ours.into_iter().zip(lines) {
        assert_eq!(line["model"], "MiniMaxM3VLForCausalLM", "{name}");
        assert_eq!(line["missing"], serde_json::json!([]), "{name}");
        assert_eq!(line["unexpected"], serde_json::json!([]), "{name}");
        assert_eq!(line["num_parameters"], report.num_parameters, "{name}");
        let theirs = TensorFile::open(&out.join("transformers.safetensors")).expect("written");
        let theirs = values(theirs.tensor("logits", &[1, LEN, VOCAB_SIZE]).expect("of this shape"));
        let (difference, largest) = (apart(&ours, &theirs), largest(&ours));
        let transformers = &line["transformers"];
        eprintln!("{name}: {difference:.2e} of the largest logit, {largest:.2} (transformers {transformers})");
        assert!(difference < TOLERANCE, "{name}: {difference}");
        for (what, difference) in line["worst"].as_object().expect("an object") {
            let difference = difference.as_f64().expect("a number") / f64::from(largest);
            eprintln!("    {what}: {difference:.2e}");
            assert!(difference < f64::from(TOLERANCE), "{name}, {what}: {difference}");
        }
        assert_eq!(line["generated"], serde_json::json!(continued), "{name}");
        let saved = out.with_file_name(format!("{name}-hf-saved"));
        std::fs::copy(out.join("tokenizer.json"), saved.join("tokenizer.json")).expect("writable");
        let again = apart(&ours, &our_logits(&saved, &tokens));
        eprintln!("    saved again: {again:.2e}");
        assert!(again < TOLERANCE, "{name}: {again}");
    }
}

#[test]
fn minimax_m3_of_vllm_is_read_back() {
    let folder = tempfile::tempdir().expect("a folder");
    let tokens = tokens(LEN, SEED);
    let lines = "tie_word_embeddings = true\nhead_dim = 128\nlayer_types = [\"sparse\", \"mha\", \"sparse\"]";
    let recipe = recipe_with_context(lines, "kind = \"msa\"\nselect_block_size = 128\nnum_selected_blocks = 2", 640);
    let model = random_model(&recipe, SEED);
    let run = folder.path().join("run");
    let checkpoint = write_checkpoint(&run, &recipe, &model);
    let out = folder.path().join("hf");
    let report = export(&checkpoint, &out, &in_form(ExportForm::M3Vllm)).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!((report.architecture, report.is_for_vllm), ("MiniMaxM3SparseForCausalLM", true));
    let difference = apart(&our_logits(&run, &tokens), &our_logits(&out, &tokens));
    eprintln!("vLLM's form, read back, differs by {difference:.2e}");
    assert!(difference < TOLERANCE, "{difference}");
}

/// Exports a random model of a recipe with these lines to the folder `hf` in `folder`.
fn exported(folder: &Path, model: &str, attention: &str, form: ExportForm) -> Result<ExportReport, CheckpointError> {
    let recipe = recipe_with_context(model, attention, 640);
    let checkpoint = write_checkpoint(&folder.join("run"), &recipe, &random_model(&recipe, SEED));
    export(&checkpoint, &folder.join("hf"), &in_form(form))
}

#[test]
fn what_minimax_m3_lacks_is_refused_by_the_recipes_key() {
    let msa = "kind = \"msa\"\nselect_block_size = 4\nnum_selected_blocks = 3";
    for [form, model, attention, words] in cases(
        r#"
        m3 => tie_word_embeddings = true => kind = "mha" => MiniMaxM3VLForCausalLM: no layer is msa | the form out
        m3 => tie_word_embeddings = true => kind = "swa"\nsliding_window = 7 \
            => attention.kind or model.layer_types has swa | leave the form out
        m3 => layer_types = ["msa", "swa", "msa"] => msa\n[attention.swa]\nsliding_window = 7 => has swa, and the
        m3 => layer_types = ["msa", "big", "msa"] => msa\n[attention.big]\nkind = "msa"\nselect_block_size = 8\n\
            num_selected_blocks = 3 => differ in their blocks
        m3 => qk_norm = true => msa\nindexer = "qsa" => attention.indexer is "qsa" | leave the form out
        m3 => layer_types = ["msa", "shared", "msa"] => msa => model.layer_types has "shared"
        m3 => qk_norm = false => msa => model.qk_norm is false
        m3 => qk_norm = false\nqkv_bias = true => msa => model.qk_norm is false
        m3 => qkv_bias = true => msa => model.qkv_bias is true
        m3 => residual_scale = true => msa => model.residual_scale is true
        m3 => rope_layers = [true, false, true] => msa => model.rope_layers has false
        vllm => tie_word_embeddings = true => msa => MiniMaxM3SparseForCausalLM: model.head_dim is 16 | the form m3
        vllm => head_dim = 128 => msa => attention.select_block_size is 4, and the class's kernels have blocks of 128
        vllm => head_dim = 128\nrope_scaling = { rope_type = "linear", factor = 2.0 } => kind = "msa"\n\
            select_block_size = 128\nnum_selected_blocks = 2 => model.rope_scaling is given | the form m3
        "#,
    ) {
        let folder = tempfile::tempdir().expect("a folder");
        let attention = attention.strip_prefix("msa").map_or(attention.to_owned(), |more| format!("{msa}{more}"));
        let form = if form == "m3" { ExportForm::M3 } else { ExportForm::M3Vllm };
        let report = exported(folder.path(), model, &attention, form);
        refusal(report, words);
        assert!(!folder.path().join("hf").exists(), "nothing is written before the checks");
    }
}

#[test]
fn a_minimax_m3_that_no_recipe_has_is_refused() {
    let attention = "kind = \"msa\"\nselect_block_size = 128\nnum_selected_blocks = 2";
    for (form, table) in [
        (
            ExportForm::M3,
            r#"
            mlp_layer_types => ["dense", "sparse", "dense"] => mlp_layer_types (or moe_layer_freq) is | experts
            mlp_layer_types => null => mlp_layer_types (or moe_layer_freq) is null
            swiglu_alpha => 1.702 => (up + 1) * gate * sigmoid(alpha * gate) | swiglu_alpha = 1.702
            swiglu_limit => 7.0 => swiglu_limit = 7.0
            swiglu_up_scale => null => swiglu_up_scale = null
            index_n_heads => 4 => index_n_heads is 4, and a recipe's model has 2
            index_head_dim => 64 => index_head_dim is 64, and a recipe's model has 128
            layer_types => ["minimax_m3_sparse"] => not a list of 3 layers
            partial_rotary_factor => 0.5 => partial_rotary_factor is 0.5
            "#,
        ),
        (
            ExportForm::M3Vllm,
            r#"
            moe_layer_freq => [0, 1, 0] => mlp_layer_types (or moe_layer_freq) is | experts
            swiglu_beta => 1.0 => swiglu_beta = 1.0
            attention_output_gate => true => attention_output_gate is true
            use_gemma_norm => false => use_gemma_norm is false
            sparse_attention_config => {"sparse_num_index_heads": 2, "sparse_init_block": 1, \
                "sparse_score_type": "max"} => sparse_init_block is 1
            "#,
        ),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let head_dim = "head_dim = 128";
        exported(folder.path(), head_dim, attention, form).unwrap_or_else(|error| panic!("{error}"));
        let path = folder.path().join("hf/config.json");
        let whole = std::fs::read_to_string(&path).expect("written");
        check_config(&path).unwrap_or_else(|error| panic!("{error}"));
        for [key, value, words] in cases(table) {
            let mut config: serde_json::Value = serde_json::from_str(&whole).expect("JSON");
            let model = if form == ExportForm::M3 { &mut config } else { &mut config["text_config"] };
            model[key] = serde_json::from_str(value).expect("JSON");
            std::fs::write(&path, config.to_string()).expect("writable");
            refusal(check_config(&path), words);
        }
    }
}
