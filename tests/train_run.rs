//! What `sieve data batch` writes, and a step on rows that documents share against one on rows of one document.
use crate::tiny_run::TinyRun;

/// 32 documents of 15 letters and an end-of-document token fill 8 rows of 64, or have 32 rows with padding.
#[test]
fn rows_of_one_document_have_the_gradients_of_shared_rows() {
    for kind in ["msa", "msa\"\nindexer = \"qsa"] {
        let tiny = TinyRun::new(&format!("kind = \"{kind}\"\nselect_block_size = 4\nnum_selected_blocks = 2"));
        // The first two letters tell documents apart.
        let letter =
            |number: usize, at: usize| [number / 8, number % 8].get(at).copied().unwrap_or(number * at * at % 11);
        let text = |number| (0..15).map(|at| (b'a' + letter(number, at) as u8) as char).collect::<String>();
        let documents = |numbers: std::ops::Range<usize>| {
            numbers.map(|number| format!("{{\"text\": \"{}\"}}\n", text(number))).collect::<String>()
        };
        // All 32 documents are trained on, so that both runs read the same documents in whatever order.
        tiny.write("documents.jsonl", documents(0..32));
        tiny.write("held_out.jsonl", documents(32..44));
        let set = "--set data.paths=documents.jsonl --set validation.paths=held_out.jsonl \
                   --set tokenizer.train={vocab_size=258} --set training.max_norm=1e9 --set training.seq_len=64 \
                   --set training.steps=1 --set lr_scheduler.warmup_steps=0 \
                   --set training.global_batch_size";
        tiny.trained("shared", &format!("{set}=8"));
        tiny.trained("alone", &format!("{set}=32 --set training.one_document_per_row=true"));
        let open = |out: &str| {
            let path = tiny.path(out).join("checkpoint/step-1/optimizer.safetensors");
            sieve_hf::TensorFile::open(&path).expect("a checkpoint")
        };
        let (shared, alone) = (open("shared"), open("alone"));
        let norm = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>().sqrt();
        let moments = shared.names().into_iter().filter(|name| name.ends_with(".exp_avg")).collect::<Vec<_>>();
        assert!(moments.iter().any(|name| name.contains("indexer")), "{moments:?}");
        for name in moments {
            let values = |file: &sieve_hf::TensorFile| {
                file.any_tensor(&name).expect("in both").iter::<f64>().collect::<Vec<_>>()
            };
            let (one, other) = (values(&shared), values(&alone));
            let difference = one.iter().zip(&other).map(|(a, b)| a - b).collect::<Vec<_>>();
            let share = norm(&difference) / norm(&one);
            assert!(share < 1e-5, "{kind}: {name} differs by {share:e} of its norm");
        }
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
    // A refused command leaves the run's data as they are.
    tiny.refuses("data batch --recipe tiny.toml --step 1 --out b --set data.max_bytes=9000", "out/tiny/data");
}
