//! `sieve train --sweep`.
use crate::tiny_run::{TinyRun, refused, succeed};
use sieve_testing::cases;

#[test]
fn every_value_is_a_run_and_the_best_is_named() {
    let run = TinyRun::dma();
    let sweep = "--sweep optimizer.lr=1e-2,1e-5 --sweep attention.keep_window_size=8,16 --set training.steps=12";
    let text = succeed(&mut run.train("out", sweep));
    let rows = run.json("out/sweep.json");
    let rows = rows.as_array().expect("a list");
    assert_eq!(rows.len(), 4);
    let loss = |index: usize| rows[index]["loss"].as_f64().expect("a loss");
    // A learning rate of 1e-5 learns nothing in twelve steps.
    assert!(loss(0) < loss(2) - 0.1 && loss(1) < loss(3) - 0.1, "{rows:?}");
    let folder = "lr=1e-2,keep_window_size=16";
    assert!(run.path("out").join(folder).join("checkpoint/step-12").is_dir());
    let best = text.lines().find(|line| line.ends_with("best")).expect("a best row");
    assert!(best.contains("optimizer.lr=1e-2"), "{text}");
    assert!(text.contains("best: out/lr=1e-2"), "{text}");
    // Only the first run begins when the program does.
    assert_eq!(text.matches("started: ").count(), 1, "{text}");
    // The text was tokenised once.
    assert_eq!(text.matches("data: wrote").count(), 1, "{text}");

    // The sweep's folder is one to compare, and so are all files in it.
    assert!(text.contains("compare out\n"), "{text}");
    run.prints("compare out --out folder.html");
    let mut all = run.sieve("compare --out files.html");
    let files = run
        .names("out")
        .into_iter()
        .map(|name| format!("out/{name}"))
        .collect::<Vec<_>>();
    assert!(files.len() == 6, "{files:?}");
    assert!(succeed(all.args(&files)).contains("files.html: 4 runs"));
    run.refuses("compare out/data --out none.html", "out/data holds no run");

    // Asked again, what is done stays done.
    refused(&mut run.train("out", sweep), "already holds a run");
    let text = succeed(&mut run.train("out", &format!("{sweep} --resume")));
    assert_eq!(text.matches("nothing to do").count(), 4, "{text}");
    assert!(text.contains("best: out/lr=1e-2"), "{text}");
}

#[test]
fn five_kinds_are_one_sweep_and_its_recipe_is_read_once() {
    let run = TinyRun::dma();
    let recipe = std::fs::File::open(run.path("tiny.toml")).expect("readable");
    let sweep = "train --recipe - --device cpu --out out --sweep attention.kind=mha,swa,nsa,mla,dma --set \
                 training.steps=12 --set attention.window_size=4";
    let output = run.sieve(sweep).stdin(recipe).output().expect("the program starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let rows = run.json("out/sweep.json");
    let rows = rows.as_array().expect("a list");
    assert_eq!(rows.len(), 5);
    let is_low = |row: &serde_json::Value| row["loss"].as_f64().is_some_and(|loss| loss < 6.0);
    assert!(rows.iter().all(is_low), "{rows:?}");
    // One line for each kind that leaves keys out, in whichever place they are given.
    let warnings = said.lines().filter(|line| line.starts_with("warning: not used"));
    let own = "attention.a_init, attention.keep_window_size";
    let of = |kind: &str, names: &str| format!("warning: not used with attention.kind = {kind:?}: {names}");
    let both = format!("{own}, attention.window_size");
    let heads = format!("{both}, model.num_key_value_heads");
    let expected = [
        of("mha", &both),
        of("swa", &both),
        of("nsa", own),
        of("mla", &heads),
        of("dma", "attention.window_size"),
    ];
    assert_eq!(warnings.collect::<Vec<_>>(), expected);
}

#[test]
fn seeds_have_means_and_none_is_best() {
    let run = TinyRun::dma();
    run.prints("tokenizer train --data corpus --vocab-size 300 --out t.json");
    let sweep = "--sweep training.seed=0,1 --sweep optimizer.lr=1e-2,1e-5 --set training.steps=12 --set \
                 tokenizer.path=t.json";
    let text = succeed(&mut run.train("out", sweep));
    assert!(
        text.contains("best: optimizer.lr=1e-2, by the mean of 2 seeds"),
        "{text}"
    );
    assert_eq!(text.matches("  best").count(), 1, "{text}");
    let text = succeed(&mut run.train("seeds", "--sweep training.seed=0,1,2 --set training.steps=4"));
    assert!(text.contains("mean of seeds") && !text.contains("best"), "{text}");

    // The parameters of a run whose recipe does not say how many tokens there are, with a checkpoint and without one.
    let text = succeed(&mut run.train("more", "--set training.steps=4 --set tokenizer.path=t.json"));
    let (_, rest) = text.split_once("model: ").expect("a line of the model");
    let (parameters, _) = rest.split_once(" parameters").expect("their number");
    std::fs::remove_dir_all(run.path("more/checkpoint")).expect("a checkpoint");
    run.prints("compare out more --out page.html");
    let cell = format!("<td>{parameters}</td>");
    // Two groups of two seeds with a row of means each, and the run.
    assert_eq!(run.read("page.html").matches(&cell).count(), 7, "{cell}");
}

#[test]
fn mistakes_are_told_before_the_first_run() {
    let run = TinyRun::dma();
    for [sweep, words] in cases(
        r#"
        optimizer.lrr=1,2 => optimizer.lrr | did you mean lr?
        optimizer.lr => section.key=V1,V2
        optimizer.lr=1e-3, => empty value
        optimizer.lr=1e-3,x => optimizer.lr=x | wanted a number
        optimizer.lr=1e-3,1e-3 => twice
    "#,
    ) {
        run.refuse(&mut run.train("out", &format!("--sweep {sweep}")), words);
    }
}

#[test]
fn a_value_that_diverges_is_a_row() {
    let run = TinyRun::dma();
    let text = succeed(&mut run.train(
        "out",
        "--sweep optimizer.lr=1e-2,1e30 --set training.steps=8 --set lr_scheduler.warmup_steps=0",
    ));
    assert!(text.contains("optimizer.lr=1e30  diverged"), "{text}");
}
