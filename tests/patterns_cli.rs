//! The searches ahead of time, through the program: a file is written, and a selector uses it.
use crate::tiny_run::{TinyRun, json, number};
use sieve_testing::says;
use std::fs;

/// A dense model with room for prompts on which MInference's candidates differ.
fn dense() -> TinyRun {
    let tiny = TinyRun::new("kind = \"mha\"");
    tiny.trained("run", "--set training.steps=8 --set model.max_position_embeddings=5100");
    tiny
}

fn command(more: &str) -> String {
    format!("eval patterns --checkpoint run --data corpus --device cpu {more}")
}

#[test]
fn patterns_of_minference_are_written_and_used() {
    let tiny = dense();
    let text = tiny.prints(&command("--length 5050 --out found.json"));
    let flag = "--selector minference:pattern=found.json";
    says(
        &text,
        &format!("minference: 1 prompt of 5050 tokens | all 4 heads keep | wrote found.json | {flag}"),
    );
    let file = tiny.json("found.json");
    let layers = file.as_array().expect("a list");
    assert_eq!(layers.len(), 2);
    for layer in layers {
        let heads = layer.as_object().expect("a layer");
        assert!(heads.keys().eq(["0", "1"]), "{file}");
    }
    let found = json(&tiny.prints(&command("--length 5050 --out again.json --json")));
    assert_eq!(tiny.json("again.json"), file, "{found}");
    let counts = found["found"]["patterns"].as_array().expect("a list");
    let heads: f64 = counts.iter().map(|count| number(&count["heads"])).sum();
    assert_eq!((heads, &found["num_tokens"]), (4.0, &5050.into()));
    // The same prompt under the selector: its density and recall are those that the search told.
    let table = json(&tiny.prints(&format!(
        "eval selectors --checkpoint run --data corpus --device cpu --lengths 5050 --windows 1 --json {flag} \
         --selector minference"
    )));
    let (used, default) = (&table["selectors"][0], &table["selectors"][1]);
    for key in ["density", "recall"] {
        let (told, used) = (number(&found["found"][key]), number(&used[key]));
        assert!((told - used).abs() < 1e-4, "{key}: {told} and {used}");
    }
    assert!(number(&used["density"]) < 0.999, "{used}");
    assert_eq!(number(&default["density"]), 1.0);
    let ppl = json(&tiny.prints(&format!(
        "eval ppl --checkpoint run --data corpus --context 5050 --max-tokens 6000 --device cpu --json {flag}"
    )));
    assert!(number(&ppl["loss"]).is_finite(), "{ppl}");
    // Where everything is kept the choice says little, and the program says so.
    let short = tiny.prints(&command("--out short.json"));
    assert!(short.contains("1 prompt of 32 tokens"), "{short}");
    says(&short, "search on a longer prompt (--length)");
}

#[test]
fn patterns_of_dam_are_written_and_used() {
    let tiny = dense();
    let dam = "--method dam:capture=24,density=0.3,sink=2 --windows 3 --out maps.json";
    let text = tiny.prints(&command(dam));
    let flag = "--selector dam:map=maps.json,sink=2";
    says(&text, &format!("dam: 3 prompts of 24 tokens | pairs on | {flag}"));
    let maps = tiny.json("maps.json");
    assert_eq!(maps["layers"].as_array().map(Vec::len), Some(2));
    assert_eq!(maps["layers"][1][1]["rows"].as_array().map(Vec::len), Some(24));
    let found = json(&tiny.prints(&command(&format!("{dam} --json"))));
    let layers = found["found"]["layers"].as_array().expect("a list");
    let told: f64 = layers.iter().map(|layer| number(&layer["density"]) / 2.0).sum();
    assert!(told >= 0.3, "{found}");
    let table = json(&tiny.prints(&format!(
        "eval selectors --checkpoint run --data corpus --device cpu --lengths 24 --windows 2 --json {flag}"
    )));
    // As long as the maps, they decide alone.
    let used = number(&table["selectors"][0]["density"]);
    assert!((told - used).abs() < 1e-9, "{told} and {used}");
    let ppl = json(&tiny.prints(&format!(
        "eval ppl --checkpoint run --data corpus --max-tokens 500 --device cpu --json {flag}"
    )));
    assert!(number(&ppl["loss"]).is_finite(), "{ppl}");
}

#[test]
fn patterns_mistakes_are_told_and_change_nothing() {
    let tiny = dense();
    tiny.trained(
        "swa",
        "--set training.steps=4 --set attention.kind=swa --set attention.sliding_window=8",
    );
    fs::create_dir(tiny.path("folder")).expect("new");
    tiny.write("kept.json", "kept");
    tiny.refuses_each(
        &command(""),
        r#"
        => --out
        --out no/where.json => no/where.json | no folder
        --out folder => it is a folder
        --out /dev/null => /dev/null | it is not a file
        --out a,b.json => a,b.json | a comma ends a setting
        --out a.json --method bfla => bfla | the methods are minference and dam
        --out a.json --method dma => dma | the methods are minference and dam
        --out a.json --method dam:captur=3 => did you mean capture?
        --out a.json --method dam:density=2 => density=2 is outside [0, 1]
        --out a.json --method minference:last_dense_rows=9 => has no settings
        --out a.json --method dam:map=kept.json => kept.json | expected
        --out a.json --method dam:first_dense_layers=3 => leave the others out
        --out kept.json --length 5101 => --length | 5101 tokens | context of 5100
        --out a.json --length 0 => must be positive
        --out a.json --windows 3 => --windows is for dam
        --out a.json --method dam --length 600 => use --method dam:capture=600
        --out a.json --method dam --windows 900000 => the data holds | give more text
    "#,
    );
    let with = |checkpoint: &str, data: &str| {
        tiny.sieve(&format!(
            "eval patterns --checkpoint {checkpoint} --data {data} --device cpu --out kept.json"
        ))
    };
    tiny.refuse(&mut with("nowhere", "corpus"), "no checkpoint");
    tiny.refuse(&mut with("run", "nowhere.txt"), "nowhere.txt");
    tiny.refuse(
        &mut with("swa", "corpus"),
        "minference selects for dense attention | kind = \"mha\"",
    );
}
