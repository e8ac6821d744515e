//! Exported models give the same logits in Hugging Face transformers.
//!
//! The test compares with transformers if Python has it, and otherwise with stored logits. `UPDATE_GOLDEN=1` rewrites
//! the stored logits.
#![allow(clippy::print_stderr, reason = "the largest difference is worth a line")]
use crate::python;
use crate::random_model::{
    VOCAB_SIZE, distinct_tokens, export_options, generated, greedy, kinds, max_difference, random_model, recipe,
    write_checkpoint,
};
use burn::tensor::{DType, Tensor, TensorData};
use burn_flex::Flex;
use sieve_core::DmaWindow;
use sieve_hf::{ExportDtype, NamedTensor, TensorFile, export, load_model, write_tensor_file};
use sieve_infer::logits;
use sieve_nn::Qwen3;
use sieve_ops::{Documents, dma_select};
use sieve_testing::Random;
use std::path::{Path, PathBuf};

const LEN: usize = 48;
/// Lengths of the prompts that the script continues, and the number of tokens that it generates.
const PROMPTS: [usize; 3] = [5, 16, 11];
const NEW: usize = 12;
const SEED: u64 = 11;
/// Tolerance of a logit's absolute difference; both sides compute in f32.
const TOLERANCE: f32 = 1e-4;

fn golden_path(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
    folder.join(format!("{name}.safetensors"))
}

fn golden_of_kind(kind: &str) -> PathBuf {
    golden_path(&format!("transformers_{kind}"))
}

fn values(data: TensorData) -> Vec<f32> {
    data.convert::<f32>().to_vec().expect("converted to f32")
}

/// Logits of a checkpoint that is read back from disk.
fn our_logits(checkpoint: &Path, tokens: &[u32]) -> Vec<f32> {
    let device = Default::default();
    let loaded = load_model::<Flex>(checkpoint, &device, DType::F32).expect("just written");
    values(logits(&loaded.model, tokens, &device).expect("tokens of the vocabulary"))
}

/// Greedy tokens after each prompt, decoded with a cache, concatenated.
fn our_continuations(model: &Qwen3<Flex>, tokens: &[u32]) -> Vec<Vec<u32>> {
    PROMPTS.map(|len| generated(model, &tokens[..len], greedy(NEW))).to_vec()
}

#[test]
fn transformers_computes_the_same_logits() {
    let imports = "import torch, transformers, safetensors";
    let Some(python) = python::interpreter("transformers_computes_the_same_logits", imports) else {
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let tokens = distinct_tokens(LEN, SEED);
    let list: Vec<String> = tokens.iter().map(u32::to_string).collect();
    let mut arguments = vec![list.join(","), "t5 t96 t1 <|endoftext|> t30".to_owned()];
    let mut ours = Vec::new();
    for [kind, model_lines, attention] in kinds() {
        let recipe = recipe(model_lines, attention);
        let model = random_model(&recipe, SEED);
        let run = folder.path().join(kind);
        let checkpoint = write_checkpoint(&run, &recipe, &model);
        let out = folder.path().join(format!("{kind}-hf"));
        // One checkpoint is exported into several files.
        let mut options = export_options(ExportDtype::F32);
        if kind == "swa" {
            options.max_shard_bytes = 100_000;
        }
        let report = export(&checkpoint, &out, &options).expect("exports");
        arguments.push(out.display().to_string());
        let continued = our_continuations(&model, &tokens);
        ours.push((kind, out, report, our_logits(&run, &tokens), continued));
    }
    let printed = python::run(&python, "transformers_logits.py", &arguments);
    let lines: Vec<serde_json::Value> = printed.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    assert_eq!(lines.len(), ours.len(), "{printed}");
    for ((kind, out, report, ours, continued), line) in ours.into_iter().zip(lines) {
        assert_eq!(line["model"], report.architecture);
        assert_eq!(line["missing"], serde_json::json!([]), "{kind}");
        assert_eq!(line["unexpected"], serde_json::json!([]), "{kind}");
        assert_eq!(line["num_parameters"], report.num_parameters, "{kind}");
        assert_eq!(line["text_ids"], serde_json::json!([5, 0, 1, 96, 30]), "{kind}");
        assert_eq!(line["eos_token_id"], VOCAB_SIZE - 1, "{kind}");
        let theirs = TensorFile::open(&out.join("transformers.safetensors")).expect("written");
        let theirs = theirs.tensor("logits", &[1, LEN, VOCAB_SIZE]);
        let theirs = values(theirs.expect("logits of this shape"));
        let difference = max_difference(&ours, &theirs);
        let (transformers, torch) = (&line["transformers"], &line["torch"]);
        let largest = theirs.iter().fold(0f32, |max, x| max.max(x.abs()));
        eprintln!(
            "{kind}: largest difference {difference:.2e} of logits up to {largest:.2} (transformers {transformers}, \
             torch {torch})"
        );
        assert!(difference < TOLERANCE, "{kind}: {difference}");
        for (what, difference) in line["worst"].as_object().expect("an object") {
            let difference = difference.as_f64().expect("a number");
            eprintln!("    {what}: {difference:.2e}");
            assert!(difference < f64::from(TOLERANCE), "{kind}, {what}: {difference}");
        }
        // Of keys with equal scores, Doge in transformers keeps the keys that `torch.topk` happens to return. Generated
        // text repeats tokens and thus scores, so it is not compared.
        if report.architecture != "DogeForCausalLM" {
            assert_eq!(line["generated"], serde_json::json!(continued), "{kind}");
        }
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            write_golden(kind, &tokens, theirs, &line["generated"]);
        }
    }
}

fn write_golden(kind: &str, tokens: &[u32], logits: Vec<f32>, generated: &serde_json::Value) {
    let tokens: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
    let rows: Option<Vec<Vec<i32>>> = serde_json::from_value(generated.clone()).expect("rows of tokens, or null");
    let tensor = |name: &str, data| NamedTensor { name: name.to_owned(), data };
    let mut tensors = vec![
        tensor("tokens", TensorData::new(tokens, [1, LEN])),
        tensor("logits", TensorData::new(logits, [1, LEN, VOCAB_SIZE])),
    ];
    if let Some(rows) = rows {
        tensors.push(tensor("generated", TensorData::new(rows.concat(), [PROMPTS.len(), NEW])));
    }
    write_tensor_file(&golden_of_kind(kind), &tensors, None).expect("the folder is writable");
}

#[test]
fn stored_logits_and_generated_tokens_of_transformers_are_reproduced() {
    for [kind, model_lines, attention] in kinds() {
        let golden = TensorFile::open(&golden_of_kind(kind)).expect("stored beside the tests");
        let tokens = golden.tensor("tokens", &[1, LEN]).expect("of this length");
        let tokens: Vec<u32> = tokens.iter::<i32>().map(|token| token as u32).collect();
        let theirs = golden.tensor("logits", &[1, LEN, VOCAB_SIZE]);
        let theirs = values(theirs.expect("logits of this shape"));
        let model = random_model(&recipe(model_lines, attention), SEED);
        let ours = values(logits(&model, &tokens, &Default::default()).expect("valid"));
        let difference = max_difference(&ours, &theirs);
        assert!(difference < TOLERANCE, "{kind}: {difference}");
        // Doge has no stored `generated` tensor, for the same reason.
        if golden.names().contains(&"generated".to_owned()) {
            let stored = golden.tensor("generated", &[PROMPTS.len(), NEW]).expect("of this shape");
            let stored: Vec<u32> = stored.iter::<i32>().map(|token| token as u32).collect();
            assert_eq!(our_continuations(&model, &tokens).concat(), stored, "{kind}");
        }
    }
}

const MASK_ROWS: usize = 200;
const MASK_LEN: usize = 96;

/// Scores with many ties, `[MASK_ROWS, MASK_LEN]`, and for each row its number of keys, of kept keys, and of recent
/// keys that are always seen.
fn ranks_with_ties() -> (Vec<f32>, Vec<[usize; 3]>) {
    let mut random = Random(SEED);
    let rows = (0..MASK_ROWS).map(|_| {
        let (len, keep) = (1 + random.below(MASK_LEN), 1 + random.below(40));
        [len, keep, random.below(keep + 1)]
    });
    let rows: Vec<_> = rows.collect();
    let values = [-1.0, -0.0, 0.0, 0.5, 2.0, 3.0];
    let ranks = (0..MASK_ROWS * MASK_LEN).map(|_| values[random.below(values.len())]);
    (ranks.collect(), rows)
}

/// For each key, the first query that does not see it; 0 for keys past a row's end.
fn our_expiry(ranks: &[f32], rows: &[[usize; 3]]) -> Vec<i32> {
    let mut expire = vec![0; ranks.len()];
    for (row, &[len, keep, local]) in rows.iter().enumerate() {
        let at = row * MASK_LEN;
        let rank = TensorData::new(ranks[at..at + len].to_vec(), [1, 1, len]);
        let window = DmaWindow { keep_window_size: keep, local_window_size: local };
        let documents = Documents::<Flex>::whole_rows([1, len], &Default::default());
        let rank = Tensor::<Flex, 3>::from_data(rank, &Default::default());
        let found = dma_select(rank, &documents, window).expect("fits").into_data();
        for (expire, found) in expire[at..].iter_mut().zip(found.iter::<i32>()) {
            *expire = found;
        }
    }
    expire
}

#[test]
fn the_exported_file_chooses_the_same_keys_as_the_program_where_ranks_tie() {
    let test = "the_exported_file_chooses_the_same_keys_as_the_program_where_ranks_tie";
    let (ranks, rows) = ranks_with_ties();
    let ours = our_expiry(&ranks, &rows);
    let golden = golden_path("dma_expiry");
    if let Some(python) = python::interpreter(test, "import torch, transformers, safetensors") {
        let folder = tempfile::tempdir().expect("a folder");
        let [given, found] = ["ranks", "expiry"].map(|name| folder.path().join(format!("{name}.safetensors")));
        let settings: Vec<i32> = rows.iter().flatten().map(|&size| size as i32).collect();
        let tensors = [
            ("rank", TensorData::new(ranks, [MASK_ROWS, MASK_LEN])),
            ("rows", TensorData::new(settings, [MASK_ROWS, 3])),
        ]
        .map(|(name, data)| NamedTensor { name: name.to_owned(), data });
        write_tensor_file(&given, &tensors, None).expect("the folder is writable");
        let arguments = [&given, &found].map(|path| path.display().to_string());
        python::run(&python, "dma_expiry.py", &arguments);
        let theirs = TensorFile::open(&found).expect("written");
        let theirs = theirs.tensor("expire", &[MASK_ROWS, MASK_LEN]).expect("of this shape");
        assert_eq!(theirs.iter::<i32>().collect::<Vec<_>>(), ours);
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::copy(&found, &golden).expect("the folder is writable");
        }
    }
    let golden = TensorFile::open(&golden).expect("stored beside the tests");
    let golden = golden.tensor("expire", &[MASK_ROWS, MASK_LEN]).expect("of this shape");
    assert_eq!(golden.iter::<i32>().collect::<Vec<_>>(), ours);
}
