//! Runs with stages, branches, and what they must not change.
use crate::tiny_run::{STEPS, TinyRun, number, refused, signal, succeed, wait_until};
use crate::train_ranks::UNTIED;
use sieve_testing::says;
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

fn train(run: &TinyRun, out: &str, more: &str) -> std::process::Command {
    run.sieve(&format!("train --recipe staged.toml --device cpu --out {out} {more}"))
}

/// Trains until a step's checkpoint is there, and is killed.
fn kill_at(run: &TinyRun, out: &str, more: &str, step: u64) {
    let mut child = train(run, out, more).spawn().expect("the program starts");
    let reached = run.path(out).join(format!("checkpoint/step-{step}"));
    wait_until("the checkpoint", || reached.is_dir());
    signal(&child, "KILL");
    child.wait().expect("it ends");
}

/// Losses in the guard's mean of a checkpoint.
fn losses_counted(run: &TinyRun, out: &str, step: u64) -> f32 {
    let state = run.json(&format!("{out}/checkpoint/step-{step}/state.json"));
    let bits = state["guard"]["num_losses_bits"].as_u64().expect("bits");
    f32::from_bits(bits as u32)
}

#[test]
fn a_staged_run_changes_length_base_and_window() {
    let run = staged();
    let text = succeed(&mut train(&run, "out", ""));
    says(
        &text,
        "stage 1 of 3: steps 1 to 13, rows of 32 tokens, rope_theta 10000, window 8 | \
         stage 2 of 3: steps 14 to 27, rows of 64 tokens, rope_theta 50000, window 8 | \
         stage 3 of 3: steps 28 to 40, rows of 32 tokens, rope_theta 10000, window 16",
    );
    let steps = run.metrics("out", "step");
    assert!(steps.keys().copied().eq(1..=STEPS));
    // The mean loss is the last stage's alone.
    assert_eq!(losses_counted(&run, "out", STEPS), 13.0);
    // 8 rows of 32, then 4 of 64, then 8 of 32: the same tokens a step.
    assert_eq!(steps[&STEPS]["tokens_seen"], 256 * STEPS);
    let keys = |step: u64| number(&steps[&step]["attention"]["mean_active_keys"]);
    assert!(keys(13) <= 8.0 && keys(27) <= 8.0);
    assert!(keys(40) > 8.0, "the wider window: {}", keys(40));

    // What evaluation reads from a checkpoint are the values of its stage.
    let exported = |step: u64| {
        let out = format!("hf-{step}");
        run.prints(&format!("export --checkpoint out/checkpoint/step-{step} --out {out}"));
        let config = run.json(&format!("{out}/config.json"));
        ["rope_theta", "keep_window_size"].map(|key| number(&config[key]))
    };
    assert_eq!(exported(40), [10_000.0, 16.0]);

    // The rows of a step are its stage's.
    for (step, rows) in [(13, [8, 32]), (14, [4, 64]), (28, [8, 32])] {
        run.prints(&format!(
            "data batch --recipe staged.toml --data-dir out/data --step {step} --out batch.safetensors"
        ));
        let file = sieve_hf::TensorFile::open(&run.path("batch.safetensors")).expect("a file");
        file.tensor("tokens", &rows).expect("rows of the stage");
    }
}

#[test]
fn two_processes_go_through_the_stages_of_one_bit_for_bit() {
    let run = staged();
    let more = format!("{UNTIED} --set activation_checkpoint.mode=full");
    succeed(&mut train(&run, "of-1", &more));
    run.prints(&format!(
        "launch --nproc 2 -- train --recipe staged.toml --device cpu --out of-2 {more}"
    ));
    run.assert_same_end("of-2", "of-1");
}

#[test]
fn a_run_stopped_in_any_stage_goes_on_bit_for_bit() {
    let run = staged();
    succeed(&mut train(&run, "whole", ""));
    for (out, stop_at) in [("first", 8), ("border", 12), ("second", 20), ("third", 32)] {
        kill_at(&run, out, "", stop_at);
        succeed(&mut train(&run, out, "--resume"));
        run.assert_same_end(out, "whole");
        run.assert_same_metrics(out, "whole");
    }
}

#[test]
fn a_checkpoint_at_the_end_of_a_stage_is_resumed_in_the_next() {
    let run = staged();
    succeed(&mut train(
        &run,
        "whole",
        "--set checkpoint.interval=13 --set checkpoint.keep_latest_k=0",
    ));
    let more = "--set checkpoint.interval=13 --set checkpoint.keep_latest_k=0 --resume-from whole/checkpoint/step-13";
    succeed(&mut train(&run, "other", more));
    run.assert_same_end("other", "whole");
}

#[test]
fn stages_may_be_added_to_a_finished_run_but_not_changed() {
    let run = TinyRun::dma();
    let half = "--set training.steps=20 --set lr_scheduler.decay_ratio=0";
    run.trained("out", half);
    let text = run.read("tiny.toml");
    let longer = |first: &str| {
        text.replacen("steps = 40\n", "", 1).replacen(
            "[optimizer]",
            &format!("[[stage]]\nsteps = 20\n{first}[[stage]]\nsteps = 20\nseq_len = 64\n[optimizer]"),
            1,
        )
    };
    run.write("longer.toml", longer(""));
    run.write("other.toml", longer("rope_theta = 3.0\n"));
    let resume = |recipe: &str| {
        run.sieve(&format!(
            "train --recipe {recipe} --device cpu --out out --resume --set lr_scheduler.decay_ratio=0"
        ))
    };
    refused(&mut resume("other.toml"), "stage.1.rope_theta");
    let text = succeed(&mut resume("longer.toml"));
    assert!(text.contains("stage 2 of 2: steps 21 to 40"), "{text}");
    assert!(run.path("out/checkpoint/step-40").is_dir());
}

#[test]
fn a_stage_reads_text_of_its_own() {
    let run = staged();
    fs::create_dir(run.path("long")).expect("new");
    let line = "zebra zebra zebra quick quick quick\n";
    for number in 0..40 {
        let name = format!("long/{number}.txt");
        // Equal documents would be held out together, or not at all.
        run.write(&name, format!("{number}\n{}", line.repeat(80)));
    }
    let own = "--set stage.2.paths=[\"long/*.txt\"]";
    succeed(&mut train(&run, "own", own));
    succeed(&mut train(&run, "usual", ""));
    let loss = |out: &str, step: u64| number(&run.metrics(out, "step")[&step]["loss"]);
    assert_eq!(loss("own", 13), loss("usual", 13));
    // One sentence again and again is learned at once; the first stage's text is not.
    assert!(
        loss("own", 27) < 0.85 * loss("usual", 27),
        "{} {}",
        loss("own", 27),
        loss("usual", 27)
    );
    assert!(run.path("own/data/stage-2/meta.json").is_file());

    // Resumed inside the stage, and when its files are gone.
    kill_at(&run, "killed", own, 20);
    fs::rename(run.path("long"), run.path("gone")).expect("there");
    succeed(&mut train(&run, "killed", &format!("{own} --resume")));
    run.assert_same_end("killed", "own");
    run.refuse(&mut train(&run, "new", own), "long/*.txt");
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
    succeed(&mut train(&run, "trained", &own));
    let other = format!("{own} --resume --set stage.2.weights=[1,1]");
    run.refuse(&mut train(&run, "trained", &other), "stage");
}

#[test]
fn a_branch_goes_on_under_another_recipe() {
    let run = TinyRun::dma();
    run.trained("trunk", "");
    let before = run.snapshot("trunk");
    let branch = "--branch-from trunk/checkpoint/step-36 --set optimizer.lr=1e-3 --set attention.keep_window_size=4 \
                  --set training.steps=44 --set data.validation_fraction=0.2";
    let text = succeed(&mut run.train("branch", branch));
    says(
        &text,
        "optimizer.lr was 0.01, is now 0.001 | attention.keep_window_size was 8, is now 4 | continuing at step 36",
    );
    let steps = run.metrics("branch", "step");
    assert!(steps.into_keys().eq(37..=44));
    assert_eq!(losses_counted(&run, "trunk", 36), 36.0);
    assert_eq!(losses_counted(&run, "branch", 44), 8.0);
    assert!(run.snapshot("trunk") == before, "the trunk is as it was");

    refused(
        &mut run.train("bad", "--branch-from trunk --set model.hidden_size=48"),
        "cannot begin this run | hidden_size is 32 there and 48 here",
    );
    refused(
        &mut run.train("trunk", "--branch-from trunk/checkpoint/step-36"),
        "already holds a run",
    );
    // Another kind is told before sizes, which it has others of; a part that is only here is named by its own number.
    let message = refused(
        &mut run.train("bad", "--branch-from trunk --set attention.kind=mha"),
        "attention.kind is dma there, mha here | must have the kind of the checkpoint",
    );
    assert!(!message.contains("mlp"), "{message}");
    let scales = "--branch-from trunk --set model.residual_scale=true";
    refused(
        &mut run.train("bad", scales),
        "its residual scale has 0 parameters there and 128 here",
    );
    let dense = TinyRun::new("kind = \"mha\"");
    dense.trained("trunk", "--set training.steps=8 --set lr_scheduler.warmup_steps=2");
    let sparse = "--branch-from trunk --set attention.kind=dma --set attention.keep_window_size=8";
    refused(
        &mut dense.train("bad", sparse),
        "attention.kind is mha there, dma here | sieve import --from EXPORT --attention dma",
    );
    assert!(!run.path("bad").exists());
}

#[test]
fn an_imported_model_can_be_trained_on() {
    let run = TinyRun::new("kind = \"mha\"");
    run.trained("out", "");
    run.prints("export --checkpoint out --out hf");
    let text = run.prints("import --from hf --out sparse --attention dma --set attention.keep_window_size=8");
    assert!(text.contains("4 parameters are new"), "{text}");
    // As the import is: another kind by --set alone has a slope.
    let branch = "--branch-from sparse --set attention.kind=dma --set attention.keep_window_size=8 --set \
                  attention.bias=exp --set attention.local_window_size=0 --set training.steps=8 --set \
                  lr_scheduler.warmup_steps=2";
    let text = succeed(&mut run.train("tuned", branch));
    assert!(!text.contains("warning"), "{text}");
    let losses = run.metrics("tuned", "step");
    let first = number(&losses[&1]["loss"]);
    let before = run.metrics("out", "step");
    let [untrained, trained] = [1, STEPS].map(|step| number(&before[&step]["loss"]));
    assert!(
        first - trained < 0.3 * (untrained - trained),
        "{untrained} {trained} {first}: {text}"
    );
    let text = succeed(&mut run.train(
        "sloped",
        &format!("{branch} --set attention.bias=linear --set attention.recency=slope"),
    ));
    let warned = "warning: attention.recency was \"none\", is now \"slope\"; the weights were trained with";
    assert!(text.contains(warned), "{text}");
    run.refuses("import --from hf --out other --attention mla", "infllm_v2, moba or msa");
    run.refuses("import --from nowhere --out other", "nowhere");
    for (folder, found) in [("sparse", "step-0"), ("out", "a run")] {
        let before = run.snapshot(folder);
        run.refuses(
            &format!("import --from hf --out {folder}"),
            &format!("{folder} | holds | {found} | name a new or empty folder"),
        );
        assert!(run.snapshot(folder) == before, "{folder}");
    }
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
fn the_norm_of_gradients_counts_the_indexers() {
    let run = TinyRun::new("kind = \"msa\"\nselect_block_size = 4\nnum_selected_blocks = 3");
    let squared_norm = |weight: f64| {
        let out = format!("weight-{weight}");
        run.trained(
            &out,
            &format!("--set attention.index_loss_weight={weight:?} --stop-after 1"),
        );
        number(&run.metrics(&out, "step")[&1]["grad_norm"]).powi(2)
    };
    let [none, once, twice] = [0.0, 100.0, 200.0].map(squared_norm);
    // The first step has the same weights: the cross-entropy's gradients are equal, the indexers' go with the weight.
    let [of_one, of_two] = [once - none, twice - none];
    assert!(of_one > 1e-3 * none, "{none}, {once}");
    assert!((of_two / of_one - 4.0).abs() < 1e-2, "{none}, {once}, {twice}");
}

#[test]
fn every_second_step_is_dense_and_a_killed_run_goes_on_with_the_same_bits() {
    let run = TinyRun::new("kind = \"msa\"\nselect_block_size = 4\nnum_selected_blocks = 3");
    let text = run.read("tiny.toml");
    run.write(
        "staged.toml",
        text.replacen("steps = 40", "steps = 40\ndense_steps = 0.5", 1),
    );
    succeed(&mut train(&run, "out", ""));
    // The mean over steps of both kinds.
    let density = |out: &str| number(&run.metrics(out, "step")[&STEPS]["attention"]["density"]);
    run.trained("sparse", "");
    assert!((density("out") - (1.0 + density("sparse")) / 2.0).abs() < 1e-9);
    kill_at(&run, "killed", "", 4);
    succeed(&mut train(&run, "killed", "--resume"));
    assert_eq!(run.checkpoint("killed", STEPS), run.checkpoint("out", STEPS));
    refused(
        &mut train(&run, "killed", "--resume --set training.dense_steps=0.25"),
        "training.dense_steps",
    );
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
