//! Runs with stages, branches, and what they must not change.
use crate::tiny_run::{STEPS, TinyRun, number, refused, succeed};
use std::fs;

/// The tiny recipe in three stages of 40 steps: a length, a longer one with another base, and a wider window.
const STAGES: &str = "[[stage]]\nsteps = 13\n[[stage]]\nsteps = 14\nseq_len = 64\nrope_theta = 50000.0\n\
    local_batch_size = 2\nglobal_batch_size = 4\n[[stage]]\nsteps = 13\nwindow = 16\n";

/// `staged.toml` in the run's folder.
fn staged() -> TinyRun {
    let run = TinyRun::dma();
    let text = run.read("tiny.toml");
    assert!(text.contains("steps = 40\nseq_len = 32"), "{text}");
    let text = text
        .replacen("steps = 40\n", "", 1)
        .replacen("[optimizer]", &format!("{STAGES}[optimizer]"), 1);
    run.write("staged.toml", text);
    run
}

#[test]
fn a_stage_weights_its_own_paths_or_those_of_the_run() {
    let run = staged();
    for (folder, letter) in [("a", "q"), ("b", "z")] {
        fs::create_dir(run.path(folder)).expect("new");
        for number in 0..40 {
            // No two texts are equal, and one token is most of each.
            let text = format!("{number} {}", format!("{letter} ").repeat(400 + number));
            run.write(&format!("{folder}/{number}.txt"), text);
        }
    }
    let paths = "paths=[\"a/*.txt\",\"b/*.txt\"]";
    let own = format!("--set stage.2.{paths} --set stage.2.weights=[3,1]");
    let of_run = format!(
        "--set data.{paths} --set data.weights=[1,1] --set stage.2.weights=[3,1] --set tokenizer.train.vocab_size=270"
    );
    for (dir, sets, shares) in [
        ("own", &own, [None, Some([3, 1])]),
        ("of_run", &of_run, [Some([4, 4]), Some([3, 1])]),
    ] {
        let said = run.prints(&format!("data prepare --recipe staged.toml --data-dir {dir} {sets}"));
        assert_eq!(
            said.contains("train, stage 2, weight 3, a/*.txt"),
            dir == "own",
            "{said}"
        );
        // The rows of a step, 8 of 32 tokens and then 4 of 64, by the token that most of a row is.
        for ((step, rows), expected) in [(1, [8, 32]), (14, [4, 64])].into_iter().zip(shares) {
            let batch = format!("--data-dir {dir} --step {step} --out batch.safetensors {sets}");
            run.prints(&format!("data batch --recipe staged.toml {batch}"));
            let file = sieve_hf::TensorFile::open(&run.path("batch.safetensors")).expect("a file");
            let tokens = file.tensor("tokens", &rows).expect("rows of the stage");
            let tokens: Vec<i32> = tokens.convert::<i32>().to_vec().expect("converted");
            let mut counts = std::collections::BTreeMap::new();
            for row in tokens.chunks(rows[1]) {
                let count = |token: &&i32| row.iter().filter(|other| other == token).count();
                *counts.entry(row.iter().max_by_key(count).copied()).or_insert(0) += 1;
            }
            let mut counts: Vec<i32> = counts.into_values().collect();
            counts.sort_by(|x, y| y.cmp(x));
            if let Some(expected) = expected {
                assert_eq!(counts, expected, "{dir}, step {step}");
            }
        }
    }
    let train = |more: &str| run.sieve(&format!("train --recipe staged.toml --device cpu --out trained {more}"));
    succeed(&mut train(&own));
    let other = format!("{own} --resume --set stage.2.weights=[1,1]");
    run.refuse(&mut train(&other), "stage");
}

#[test]
fn a_dense_model_goes_on_as_dma_whose_window_shrinks_by_stage() {
    let run = TinyRun::new("kind = \"mha\"");
    run.trained("dense", "");
    run.prints("export --checkpoint dense --out hf");
    // A window of the whole row, no slope, A at 0: every key is kept and nothing is added to its logits.
    let keys = "--set attention.keep_window_size=32 --set attention.bias=linear --set attention.recency=none --set \
                attention.local_window_size=4";
    run.prints(&format!("import --from hf --out sparse --attention dma {keys}"));
    let text = run.read("tiny.toml");
    let stages = [32, 16, 8].map(|window| format!("[[stage]]\nsteps = 4\nwindow = {window}\n"));
    let text = text.replacen("steps = 40\n", "", 1);
    let text = text.replacen("[optimizer]", &format!("{}[optimizer]", stages.concat()), 1);
    run.write("shrinking.toml", text);
    let more = format!("--branch-from sparse --set attention.kind=dma {keys} --set lr_scheduler.warmup_steps=2");
    run.prints(&format!(
        "train --recipe shrinking.toml --device cpu --out tuned {more}"
    ));
    let loss = |out: &str, step: u64| {
        let checks = run.metrics(out, "validation");
        checks[&step]["loss"].as_f64().expect("a loss")
    };
    let (before, imported, after) = (loss("dense", STEPS), loss("tuned", 0), loss("tuned", 12));
    assert!((before - imported).abs() < 1e-5, "{before} became {imported}");
    assert!(after < before + 0.05, "{before} became {after}");
    let steps = run.metrics("tuned", "step");
    let kept = [4, 8, 12].map(|step| number(&steps[&step]["attention"]["mean_active_keys"]));
    assert!(kept[0] > kept[1] && kept[1] > kept[2] && kept[2] <= 8.0, "{kept:?}");
}

#[test]
fn a_dense_checkpoint_goes_on_with_chosen_blocks_and_back() {
    let run = TinyRun::new("kind = \"mha\"");
    run.trained("trunk", "--set training.steps=8 --set lr_scheduler.warmup_steps=2");
    let branch = |from: &str, out: &str, steps: u64, sets: &str| -> Vec<f64> {
        let sets =
            format!("--branch-from {from} --set training.steps={steps} --set lr_scheduler.warmup_steps=2 {sets}");
        run.trained(out, &sets);
        let steps = run.metrics(out, "step");
        steps
            .values()
            .map(|line| line["loss"].as_f64().expect("a loss"))
            .collect()
    };
    let dense = branch("trunk", "dense", 12, "");
    for kind in ["infllm_v2", "moba"] {
        let of = |blocks| format!("--set attention.kind={kind} --set attention.num_selected_blocks={blocks}");
        let all = branch("trunk", &format!("{kind}-all"), 12, &of(64));
        assert_eq!(all.len(), 4, "{kind}");
        for (all, dense) in all.iter().zip(&dense) {
            assert!((all - dense).abs() < 1e-4, "{kind}: {all}, dense {dense}");
        }
        let few = format!("{} --set attention.select_block_size=8", of(2));
        let few = branch("trunk", &format!("{kind}-few"), 12, &few);
        assert!(few != all && few.iter().all(|loss| loss.is_finite()), "{kind}: {few:?}");
        let back = branch(&format!("{kind}-few"), &format!("{kind}-back"), 14, "");
        assert!(
            back.len() == 2 && back.iter().all(|loss| loss.is_finite()),
            "{kind}: {back:?}"
        );
    }
}

#[test]
fn a_dense_model_goes_on_with_an_indexer_after_its_warm_up() {
    let dense = TinyRun::new("kind = \"mha\"");
    dense.trained("out", "");
    dense.prints("export --checkpoint out --out hf");
    let text = dense.prints("import --from hf --out start --attention msa");
    assert!(text.contains("6 parameters are new"), "{text}");
    refused(
        &mut dense.train("bad", "--branch-from out --set attention.kind=msa"),
        "attention.kind is mha there, msa here | sieve import --from EXPORT --attention msa",
    );
    let sizes = "kind = \"msa\"\nselect_block_size = 4\nnum_selected_blocks = 3";
    let run = TinyRun::new(&format!(
        "{sizes}\n[[stage]]\nsteps = 12\nindex_warmup = true\n[[stage]]\nsteps = {}",
        STEPS - 12
    ));
    let start = dense.path("start");
    run.trained(
        "tuned",
        &format!("--branch-from {} --set optimizer.lr=1e-3", start.display()),
    );
    let [before, steps] = [dense.metrics("out", "step"), run.metrics("tuned", "step")];
    let loss = |steps: &std::collections::BTreeMap<u64, serde_json::Value>, step| number(&steps[&step]["loss"]);
    let [untrained, trained] = [1, STEPS].map(|step| loss(&before, step));
    for step in [1, 12, 13, STEPS] {
        let now = loss(&steps, step);
        assert!(
            now - trained < 0.3 * (untrained - trained),
            "step {step}: {now}, {trained} before"
        );
    }
    let of = |step: u64, name: &str| number(&steps[&step]["attention"][name]);
    assert!(of(12, "density") == 1.0 && of(13, "density") < 1.0);
    let divergence = [1, 12].map(|step| of(step, "index_kl"));
    assert!(divergence[0] > divergence[1] && divergence[1] >= 0.0, "{divergence:?}");
    assert!((0.3..=1.0 + 1e-5).contains(&of(STEPS, "index_recall")));
}
