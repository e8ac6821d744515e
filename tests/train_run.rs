//! What `sieve data batch` writes.
use crate::tiny_run::TinyRun;

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
