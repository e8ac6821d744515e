//! A run from its first to its last step, and what it leaves.
use crate::tiny_run::{STEPS, TinyRun, succeed};
use sieve_core::Recipe;
use sieve_testing::says;
use std::fs;

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
