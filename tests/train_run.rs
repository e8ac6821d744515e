//! A run from its first to its last step, and what it leaves.
use crate::tiny_run::{STEPS, TinyRun, number, refused, succeed};
use sieve_core::Recipe;
use sieve_testing::says;
use std::fs;
use std::process::Stdio;

#[test]
fn a_run_learns_and_leaves_every_file() {
    for attention in [
        "kind = \"mha\"",
        "kind = \"swa\"\nsliding_window = 8",
        "kind = \"dma\"\nkeep_window_size = 8",
    ] {
        let tiny = TinyRun::new(attention);
        let printed = succeed(&mut tiny.train("run", "--set checkpoint.at_start=true"));
        says(&printed, "bits per byte | unigram | step: | loss: | grad ");

        let resolved = tiny.read("run/config.toml");
        let loaded = Recipe::load(&resolved, "config.toml", &[]).expect("it loads");
        let text = tiny.read("tiny.toml");
        let set = ["checkpoint.at_start=true".to_owned()];
        assert_eq!(loaded, Recipe::load(&text, "tiny.toml", &set).expect("it loads"));

        let steps = tiny.metrics("run", "step");
        assert!(steps.keys().copied().eq(1..=STEPS));
        let loss = |step: u64| steps[&step]["loss"].as_f64().expect("a number");
        assert!(loss(STEPS) < 0.7 * loss(1), "{} to {}", loss(1), loss(STEPS));
        let density = steps[&STEPS]["attention"]["density"].as_f64();
        let density = density.expect("a number");
        assert_eq!(density == 1.0, attention.contains("mha"), "{density}");

        let validations = tiny.metrics("run", "validation");
        assert!(validations.keys().copied().eq([0, 10, 20, 30, 40]));
        let bits = |step: u64, key: &str| validations[&step][key].as_f64().expect("a number");
        assert!(bits(STEPS, "bits_per_byte") < bits(STEPS, "unigram_bits_per_byte"));
        assert!(bits(STEPS, "bits_per_byte") < 0.7 * bits(0, "bits_per_byte"));

        let mut events = fs::read_dir(tiny.path("run/tb")).expect("tb");
        let event = events.next().expect("one file").expect("readable");
        let events = fs::read(event.path()).expect("readable");
        // A scalar is its tag, then the byte that a float follows.
        for (tag, key) in [("global_avg_loss", "loss"), ("grad_norm", "grad_norm"), ("lr", "lr")] {
            let value = steps[&STEPS][key].as_f64().expect("a number") as f32;
            let scalar = [tag.as_bytes(), &[0x15], &value.to_le_bytes()].concat();
            let is_there = events.windows(scalar.len()).any(|bytes| bytes == scalar);
            assert!(is_there, "{tag} {value}");
        }
        let log = tiny.read("run/log");
        says(&log, "step:    40 | data: wrote");

        // The latest three, and the weights before the first step.
        assert_eq!(
            tiny.names("run/checkpoint"),
            ["step-0", "step-32", "step-36", "step-40"]
        );
    }
}

#[test]
fn the_same_seed_gives_the_same_run_in_one_folder_of_data_or_two() {
    let tiny = TinyRun::dma();
    tiny.trained("own", "");
    // Two processes at once: one prepares, the other waits and reads.
    let shared = "--set data.cache_dir=shared";
    let spawn = |out: &str| {
        let mut command = tiny.train(out, shared);
        command.stdout(Stdio::null()).spawn().expect("the program starts")
    };
    let both = [spawn("first"), spawn("second")];
    for mut run in both {
        assert!(run.wait().expect("it ends").success());
    }
    for out in ["first", "second"] {
        assert!(!tiny.path(out).join("data").exists());
        tiny.assert_same_end(out, "own");
        tiny.assert_same_metrics(out, "own");
    }
    // Other data in the same folder would pull it from under the runs above.
    let before = tiny.snapshot("shared");
    refused(
        &mut tiny.train("third", "--set data.cache_dir=shared --set data.max_bytes=20000"),
        "shared | data.cache_dir=DIR",
    );
    let changed = tiny.snapshot("shared");
    assert!(before.keys().eq(changed.keys()));
    assert!(before == changed);
}

#[test]
fn micro_batches_add_up_to_the_batch() {
    let tiny = TinyRun::dma();
    let losses = |out: &str, more: &str| {
        tiny.trained(out, more);
        let steps = tiny.metrics(out, "step");
        steps
            .into_values()
            .map(|line| number(&line["loss"]))
            .collect::<Vec<_>>()
    };
    // One document per row: rows end in padding, so micro-batches differ in their number of labels.
    for packing in ["false", "true"] {
        let more = format!(
            "--set training.one_document_per_row={packing} --set training.steps=10 --set training.local_batch_size="
        );
        let whole = losses(&format!("whole-{packing}"), &format!("{more}8"));
        let split = losses(&format!("split-{packing}"), &format!("{more}2"));
        for (step, (whole, split)) in whole.iter().zip(&split).enumerate() {
            let difference = (whole - split).abs();
            assert!(difference < 1e-4, "step {}: {whole} and {split}", step + 1);
        }
        assert_ne!(whole, split, "sums in another order differ somewhere");
    }
}

#[test]
fn a_diverged_step_is_not_kept() {
    let tiny = TinyRun::dma();
    tiny.trained("run", "--set training.steps=8");
    // Not logged before the checkpoint of step 12 is due.
    let message = refused(
        &mut tiny.train("nan", "--set optimizer.lr=1e30 --set metrics.log_freq=100"),
        "diverged | optimizer.lr | no checkpoint yet",
    );
    assert!(!tiny.path("nan/checkpoint/step-4").exists(), "{message}");
    let log = tiny.read("nan/log");
    assert!(log.contains("diverged"), "{log}");
}

#[test]
fn data_batch_writes_what_the_loader_gives() {
    use sieve_data::{Loader, LoaderConfig, Order, Packing, Prepared};
    let tiny = TinyRun::dma();
    tiny.trained("out/tiny", "--set training.steps=4");
    let prepared = Prepared::open(&tiny.path("out/tiny/data")).expect("prepared");
    for (packing, name) in [(Packing::Concatenated, "false"), (Packing::OneDocumentPerRow, "true")] {
        let tokenizer = sieve_data::Tokenizer::from_file(&tiny.path("out/tiny/data/tokenizer.json"));
        let config = LoaderConfig {
            seq_len: 32,
            order: Order::Shuffled { seed: 3 },
            packing,
            vocab_size: 300,
            pad_id: tokenizer.expect("trained").pad_id().unwrap_or(0),
        };
        let loader = Loader::new(prepared.train().expect("a shard").into(), config).expect("a loader");
        for step in [1, 2, 17] {
            tiny.prints(&format!(
                "data batch --recipe tiny.toml --step {step} --out batch.safetensors \
                 --set training.one_document_per_row={name}"
            ));
            let file = sieve_hf::TensorFile::open(&tiny.path("batch.safetensors")).expect("a file");
            let values = |name: &str| {
                let data = file.tensor(name, &[8, 32]).expect(name);
                data.iter::<i64>().collect::<Vec<_>>()
            };
            let batch = loader.batch((step - 1) * 8, 8).expect("a batch");
            let unsigned = |values: &[u32]| values.iter().map(|&x| i64::from(x as i32)).collect::<Vec<_>>();
            for (name, wanted) in [
                ("tokens", unsigned(&batch.tokens)),
                ("documents", unsigned(&batch.documents)),
                ("doc_start", unsigned(&batch.doc_start)),
                ("doc_end", unsigned(&batch.doc_end)),
                ("positions", unsigned(&batch.positions)),
                ("labels", batch.labels.iter().map(|&label| i64::from(label)).collect()),
            ] {
                assert_eq!(values(name), wanted, "{name}");
            }
        }
    }
    // The data of a run stays as it is.
    tiny.refuses(
        "data batch --recipe tiny.toml --step 1 --out b --set data.max_bytes=9000",
        "out/tiny/data",
    );
}

#[test]
fn eight_bit_blocks_train_and_a_resumed_run_may_leave_them() {
    let tiny = TinyRun::dma();
    let fp8 = "--set training.steps=8 --set training.precision=fp8";
    tiny.trained("bf16", "--set training.steps=8");
    tiny.trained("fp8", fp8);
    let last = |out: &str| {
        let steps = tiny.metrics(out, "step");
        let (_, line) = steps.last_key_value().expect("a step was logged");
        line["loss"].as_f64().expect("a number")
    };
    let (plain, rounded) = (last("bf16"), last("fp8"));
    assert!(plain != rounded && (plain - rounded).abs() < 0.05, "{plain} {rounded}");
    let log = |out: &str| tiny.read(&format!("{out}/log"));
    assert!(log("fp8").contains("2 of 2 blocks multiply in fp8"), "{}", log("fp8"));
    succeed(&mut tiny.train("left", &format!("{fp8} --stop-after 4")));
    succeed(&mut tiny.train("left", "--set training.steps=8 --resume"));
    let end = last("left");
    assert!(end != rounded && (end - plain).abs() < 0.05, "{end}");
    assert_eq!(log("left").matches("multiply in fp8").count(), 1);
    refused(
        &mut tiny.train(
            "odd",
            "--set training.precision=fp8 --set training.seq_len=30 --set training.local_batch_size=1",
        ),
        "training.local_batch_size | 30 | a multiple of 16 | bf16",
    );
}

#[test]
fn muon_keeps_one_moment_a_matrix_and_resumes_bit_for_bit_in_one_process_or_two() {
    let tiny = TinyRun::dma();
    let muon = "--set optimizer.name=Muon --set parallelism.zero_stage=0 --set training.local_batch_size=4";
    tiny.trained("whole", muon);
    succeed(&mut tiny.train("resumed", &format!("{muon} --stop-after 10")));
    succeed(&mut tiny.train("resumed", &format!("{muon} --resume")));
    tiny.assert_same_end("resumed", "whole");
    // Every process holds all, and rank 0's checkpoint is one process's.
    succeed(&mut tiny.launch(2, "two", &format!("{muon} --stop-after 10")));
    succeed(&mut tiny.train("two", &format!("{muon} --resume")));
    succeed(&mut tiny.launch(2, "both", muon));
    for run in ["two", "both"] {
        let (found, expected) = (tiny.metrics(run, "step"), tiny.metrics("whole", "step"));
        assert_eq!(found.len(), STEPS as usize, "{run}");
        for (step, line) in found {
            for key in ["loss", "grad_norm"] {
                let apart = number(&line[key]) / number(&expected[&step][key]) - 1.0;
                assert!(apart.abs() < 1e-4, "{run}, step {step}: {key} {apart}");
            }
        }
    }
    let moments = tiny.path(&format!("whole/checkpoint/step-{STEPS}/optimizer.safetensors"));
    let names = sieve_hf::TensorFile::open(&moments).expect("a checkpoint").names();
    let has = |name: &str| names.iter().any(|found| found == name);
    for (parameter, moments) in [("layers.0.mlp.down_proj.weight", 1), ("embed_tokens.weight", 2)] {
        assert!(has(&format!("{parameter}.exp_avg")), "{names:?}");
        assert_eq!(has(&format!("{parameter}.exp_avg_sq")), moments == 2, "{parameter}");
    }
}
