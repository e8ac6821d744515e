//! `sieve plan` on every shipped recipe, and its messages.
use crate::tiny_run::{TinyRun, succeed};
use std::path::Path;
use std::time::{Duration, Instant};

/// Recipes that leave the vocabulary to a file that does not ship.
const WITHOUT_VOCABULARY: &[&str] = &[];

#[test]
fn every_shipped_recipe_is_planned_within_a_second() {
    let run = TinyRun::dma();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../recipes");
    let mut planned = 0;
    for entry in std::fs::read_dir(folder).expect("recipes") {
        let path = entry.expect("an entry").path();
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        if path.extension().is_none_or(|ending| ending != "toml") || WITHOUT_VOCABULARY.contains(&name.as_str()) {
            continue;
        }
        let mut fastest = Duration::MAX;
        let mut text = String::new();
        // Other tests share the cores: the faster of two says what planning takes.
        for _ in 0..2 {
            let started = Instant::now();
            text = run.prints(&format!("plan --recipe {name} --gpu h200 --json"));
            fastest = fastest.min(started.elapsed());
        }
        assert!(fastest < Duration::from_secs(1), "{name}: {fastest:?}");
        let plan: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let sum = plan["parameters"].as_array().expect("a list").iter();
        let sum: u64 = sum.map(|part| part[1].as_u64().expect("a count")).sum();
        assert_eq!(plan["num_parameters"].as_u64(), Some(sum), "{name}");
        assert!(!plan["ops"].as_array().expect("a list").is_empty(), "{name}");
        for stage in plan["stages"].as_array().expect("a list") {
            let number = |key: &str| stage[key].as_f64().expect("a number");
            assert!(number("executed_flops_per_token") > 0.0, "{name}");
            // No speed was measured where there are no kernels on a GPU: for narrow heads of kinds that choose blocks.
            match ["mqar_nsa", "mqar_infllm_v2", "mqar_moba", "mqar_msa"].contains(&name.as_str()) {
                true => assert!(stage["tokens_per_second"].is_null(), "{name}"),
                false => assert!(number("tokens_per_second") > 0.0, "{name}"),
            }
        }
        planned += 1;
    }
    assert!(planned >= 20, "{planned} recipes");
}

#[test]
fn a_plan_says_how_often_the_run_reads_its_text() {
    let run = TinyRun::dma();
    let plan = "plan --recipe tiny.toml";
    let before = succeed(&mut run.sieve(plan));
    assert!(before.contains("text       not tokenised yet"), "{before}");
    succeed(&mut run.sieve("data prepare --recipe tiny.toml"));
    let folder = run.path("out/tiny/data");
    let found = sieve_data::Prepared::open(&folder).expect("shards").meta;
    // 40 steps of 8 rows of 32 tokens.
    let epochs = 40.0 * 256.0 / found.train.num_tokens as f64;
    let text = succeed(&mut run.sieve(plan));
    let words = format!("of out/tiny/data, read {epochs:.2} times");
    assert!(text.contains(&words), "no {words:?} in {text}");
    let json = |more: &str| {
        let text = run.prints(&format!("{plan} --json {more}"));
        let plan: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        plan["text"].clone()
    };
    let one = json("");
    assert_eq!(one[0]["num_tokens"], found.train.num_tokens);
    let apart = one[0]["epochs"].as_f64().expect("a number") - epochs;
    assert!(apart.abs() < 1e-9, "{one}");
    assert!(one[1].is_null(), "{one}");
    // Shares of a mixture are read at rates of their own.
    let mixture = "--set data.paths=[\"corpus/0*.txt\",\"corpus/1*.txt\"] --set data.weights=[3,1]";
    succeed(&mut run.sieve(&format!("data prepare --recipe tiny.toml --data-dir mixed {mixture}")));
    let parts = json(&format!("{mixture} --set data.cache_dir=mixed"));
    let read = parts.as_array().expect("a list").iter().map(|part| {
        let number = |key: &str| part[key].as_f64().expect("a number");
        (number("num_tokens") * number("epochs")).round()
    });
    assert_eq!(read.collect::<Vec<_>>(), [7680.0, 2560.0]);
}

#[test]
fn the_page_of_recipe_keys_is_what_the_program_prints() {
    let run = TinyRun::dma();
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/recipe.md");
    let page = std::fs::read_to_string(page).expect("a page");
    let printed = run.prints("recipe keys");
    assert!(
        page == printed,
        "docs/recipe.md is old: sieve recipe keys > docs/recipe.md"
    );
    let schema = run.prints("recipe schema");
    let schema: serde_json::Value = serde_json::from_str(&schema).expect("JSON");
    for line in page.lines().filter(|line| line.starts_with("| `")) {
        let key = line.split('`').nth(1).expect("a key");
        assert!(schema.to_string().contains(&format!("{key:?}:")), "{key}");
    }
}
