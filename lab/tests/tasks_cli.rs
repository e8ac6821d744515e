//! The command `sieve eval tasks`: its numbers equal lm-evaluation-harness's; also with selectors, with
//! generation, and with mistakes.
use crate::python;
use crate::random_model::{VOCAB_SIZE, kinds, random_model, recipe, write_checkpoint};
use crate::tiny_run::{TinyRun, json};
use chacha20::ChaCha8Rng;
use chacha20::rand_core::{Rng, SeedableRng};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// Tasks whose scores by lm-evaluation-harness are stored in `golden`.
const TASKS: [&str; 6] = ["lambada_openai", "hellaswag", "piqa", "arc_easy", "winogrande", "sciq"];
const NUM_ROWS: usize = 24;

/// Makes rows of data sets, in the words of the random model's tokenizer.
struct Rows(ChaCha8Rng);

impl Rows {
    fn number(&mut self, below: usize) -> usize {
        self.0.next_u32() as usize % below
    }

    fn words(&mut self, least: usize, most: usize) -> String {
        let len = least + self.number(most - least + 1);
        let words = (0..len).map(|_| format!("t{}", self.number(VOCAB_SIZE - 1)));
        words.collect::<Vec<_>>().join(" ")
    }

    /// A row with the columns of `task`, of random words and numbers.
    fn row(&mut self, task: &str) -> Value {
        match task {
            "lambada_openai" => json!({"text": self.words(2, 40)}),
            "hellaswag" => {
                let endings: Vec<String> = (0..4).map(|_| self.words(1, 6) + " [step]").collect();
                json!({"activity_label": self.words(1, 2), "ctx_a": self.words(2, 9) + " [title]",
                    "ctx_b": self.words(1, 3), "endings": endings, "label": self.number(4).to_string()})
            }
            "piqa" => {
                json!({"goal": self.words(2, 20), "sol1": self.words(1, 8), "sol2": self.words(1, 8),
                "label": self.number(2)})
            }
            "arc_easy" => {
                let label = &["A", "B", "C", "D", "E"][..3 + self.number(3)];
                let text: Vec<String> = label.iter().map(|_| self.words(1, 5)).collect();
                json!({"question": self.words(2, 12), "answerKey": label[self.number(label.len())],
                    "choices": {"text": text, "label": label}})
            }
            "winogrande" => {
                json!({"sentence": format!("{} _ {}", self.words(1, 9), self.words(1, 6)),
                "option1": self.words(1, 2), "option2": self.words(1, 2), "answer": (1 + self.number(2)).to_string()})
            }
            "sciq" => {
                json!({"support": self.words(0, 9), "question": self.words(2, 9), "distractor1": self.words(1, 4),
                "distractor2": self.words(1, 4), "distractor3": self.words(1, 4), "correct_answer": self.words(1, 4)})
            }
            other => panic!("{other}"),
        }
    }

    fn write(&mut self, path: &Path, task: &str, num_rows: usize) {
        let lines: Vec<String> = (0..num_rows).map(|_| self.row(task).to_string() + "\n").collect();
        fs::write(path, lines.concat()).expect("the folder is writable");
    }
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/lm_eval_tasks.json")
}

fn read(path: &Path) -> Value {
    let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).expect("JSON")
}

/// The `[model]` and `[attention]` lines of a dense model.
pub(crate) const DENSE: [&str; 2] = ["tie_word_embeddings = true", "kind = \"mha\""];

/// [`random_run_in`] a new folder.
fn random_run(lines: [&str; 2]) -> TinyRun {
    let tiny = TinyRun::new("kind = \"mha\"");
    random_run_in(&tiny, lines);
    tiny
}

/// Writes a model of random weights, with these `[model]` and `[attention]` lines, into `run`, and two examples and
/// more of each of [`TASKS`] into `rows`.
pub(crate) fn random_run_in(tiny: &TinyRun, [model, attention]: [&str; 2]) {
    let recipe = recipe(model, attention);
    write_checkpoint(&tiny.path("run"), &recipe, &random_model(&recipe, 11));
    fs::create_dir(tiny.path("rows")).expect("it is new");
    for (seed, task) in (7..).zip(TASKS) {
        let mut rows = Rows(ChaCha8Rng::seed_from_u64(seed));
        rows.write(&tiny.path(&format!("rows/{task}.jsonl")), task, NUM_ROWS);
        rows.write(&tiny.path(&format!("rows/{task}.train.jsonl")), task, 2);
    }
}

fn eval(tiny: &TinyRun, more: &str) -> String {
    tiny.prints(&format!("eval tasks --checkpoint run --device cpu {more}"))
}

/// Likelihoods and scores equal lm-evaluation-harness's, with one solved example before each question, and with texts
/// that are too long cut at their beginning.
#[test]
fn tasks_have_the_numbers_of_lm_evaluation_harness() {
    let test = "tasks_have_the_numbers_of_lm_evaluation_harness";
    if let Some(python) = python::interpreter(test, "import lm_eval, accelerate, torch, transformers") {
        // The texts repeat tokens, and which of several equal keys Doge in transformers keeps is undefined.
        // In one text of nope_nsa two blocks differ in score by rounding alone: there transformers' own likelihood
        // changes by 0.05 with the length of the padding behind the text.
        let kinds = kinds().into_iter().filter(|[kind, ..]| !["dma", "nope_nsa"].contains(kind));
        let runs = kinds.map(|[kind, model, attention]| (kind, random_run([model, attention]))).collect::<Vec<_>>();
        // One Python process scores all models: it takes longer to start than to score a model. All have the same rows.
        let rows = &runs[0].1;
        let mut arguments = vec!["score".to_owned(), "1".to_owned()];
        for (_, tiny) in &runs {
            tiny.prints("export --checkpoint run --out exported");
            let paths = [tiny.path("exported"), rows.path("rows"), tiny.path("out.json")];
            arguments.extend(paths.map(|path| path.display().to_string()));
        }
        python::run(&python, "lm_eval_tasks.py", &arguments);
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            // The results of the first kind, which is dense, are stored.
            fs::copy(rows.path("out.json"), golden()).expect("the folder is writable");
        }
        for (kind, tiny) in &runs {
            assert_same(kind, tiny, &read(&tiny.path("out.json")));
        }
    }
    assert_same("stored", &random_run(DENSE), &read(&golden()));
}

fn assert_same(kind: &str, tiny: &TinyRun, expected: &Value) {
    let files = |ending: &str| TASKS.map(|task| format!("{task}=rows/{task}{ending}")).join(" ");
    let (rows, examples) = (files(".jsonl"), files(".train.jsonl"));
    let report = json(&eval(
        tiny,
        &format!("--data {rows} --fewshot-data {examples} --fewshot 1 --truncate --samples samples.jsonl --json"),
    ));
    let samples = tiny.read("samples.jsonl");
    let mut samples = samples.lines().map(json);
    let mut num_cut = 0;
    for (task, report) in TASKS.iter().zip(report["tasks"].as_array().expect("a list")) {
        let expected = &expected[*task];
        num_cut += report["num_truncated"].as_u64().expect("a count");
        for row in expected["rows"].as_array().expect("a list") {
            let sample = samples.next().expect("as many rows");
            assert_eq!(sample["task"], *task);
            let found = sample["likelihoods"].as_array().expect("a list");
            let wanted = row.as_array().expect("a list");
            assert_eq!(found.len(), wanted.len(), "{sample}");
            for (found, wanted) in found.iter().zip(wanted) {
                let (value, other) = (found["log_likelihood"].as_f64(), wanted[0].as_f64());
                let (value, other) = (value.expect("a number"), other.expect("a number"));
                assert!((value - other).abs() <= 1e-4 * other.abs().max(1.0), "{kind}: {sample}: {other}");
                assert!(found["is_greedy"].is_null() || found["is_greedy"] == wanted[1], "{kind}: {sample}");
            }
        }
        let scores = report["scores"].as_array().expect("a list");
        for (name, wanted) in expected["scores"].as_object().expect("names") {
            let score = scores.iter().find(|score| score["name"] == **name);
            let value = score.and_then(|score| score["value"].as_f64()).expect(name);
            let wanted = wanted.as_f64().expect("a number");
            let limit = if name == "perplexity" { 1e-4 * wanted } else { 1e-9 };
            assert!((value - wanted).abs() <= limit, "{task} {name}: {value}, {wanted}");
        }
    }
    assert_eq!(samples.next(), None);
    assert!(num_cut > 0, "no text was longer than the context");
}

/// Models of transformers may name their end token otherwise, and may end a text at further tokens.
#[test]
fn answers_end_at_the_ends_that_the_model_names() {
    let tiny = random_run(DENSE);
    tiny.prints("export --checkpoint run --out exported");
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        let path = format!("exported/{name}");
        let text = tiny.read(&path);
        assert!(text.contains("<|endoftext|>"), "{text}");
        tiny.write(&path, text.replace("<|endoftext|>", "[END]"));
    }
    tiny.write("mine.toml", "measure = \"generation\"\nprompt = \"{q}\"\nanswers = \"a\"\nmax_new_tokens = 5\n");
    tiny.write("mine.jsonl", json!({"q": "t5 t9 t11", "a": ["x"]}).to_string());
    let answer = || {
        let of_export = "eval tasks --checkpoint exported --device cpu --data mine.toml=mine.jsonl --samples s.jsonl";
        tiny.prints(of_export);
        let answer = json(&tiny.read("s.jsonl"))["answer"].as_str().expect("a text").to_owned();
        answer.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    let whole = answer();
    // The first word that differs from the answer's first word becomes a further end.
    let later = whole.iter().position(|word| *word != whole[0]).unwrap_or(0);
    let mut generation = read(&tiny.path("exported/generation_config.json"));
    let id: u32 = whole[later][1..].parse().expect("tN is token N");
    generation["eos_token_id"] = json!([VOCAB_SIZE - 1, id]);
    tiny.write("exported/generation_config.json", generation.to_string());
    assert_eq!(answer(), whole[..later]);
}
