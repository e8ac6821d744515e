//! Processes that share each row train what one would that has whole rows.
use crate::tiny_run::{TinyRun, succeed};
use crate::train_ranks::assert_near;
use crate::train_ranks_faults::refuses_once;

const KINDS: [&str; 5] = [
    "kind = \"mha\"",
    "kind = \"swa\"\nsliding_window = 9",
    // Longer than a part.
    "kind = \"swa\"\nsliding_window = 23",
    "kind = \"dma\"\nkeep_window_size = 8\na_init = 0.5",
    "kind = \"dma\"\nkeep_window_size = 8\nlocal_window_size = 3\nbias = \"linear\"\nrecency = \"slope\"\na_init = 0.5",
];

#[test]
fn processes_that_share_rows_follow_one_that_has_them_whole() {
    for kind in KINDS {
        let tiny = TinyRun::new(kind);
        // Dense attention of two KV heads exchanges them for tokens, of one it reads all earlier keys.
        let heads = if kind.contains("mha") { 2 } else { 1 };
        let rows = format!(
            "--set training.local_batch_size=2 --set training.steps=6 --set validation.interval=3 \
             --set model.num_key_value_heads={heads}"
        );
        tiny.trained("one", &rows);
        // Two processes that share all rows, and two times two.
        for nproc in [2, 4] {
            let out = format!("of-{nproc}");
            let more = format!("{rows} --set parallelism.context_parallel_degree=2");
            succeed(&mut tiny.launch(nproc, &out, &more));
            let (found, expected) = (tiny.metrics(&out, "step"), tiny.metrics("one", "step"));
            assert_eq!(found.len(), 6, "{kind}");
            for (step, line) in expected {
                assert_near(&found[&step], &line, &["loss", "grad_norm"], 1e-5);
                assert_eq!(found[&step]["tokens_seen"], line["tokens_seen"]);
            }
            let last = |out: &str| tiny.metrics(out, "validation")[&6].clone();
            assert_near(&last(&out), &last("one"), &["loss"], 1e-5);
        }
    }
}

#[test]
fn a_run_goes_on_with_rows_in_parts_and_whole() {
    let tiny = TinyRun::dma();
    let rows = "--set training.local_batch_size=2 --set activation_checkpoint.mode=full \
                --set checkpoint.keep_latest_k=0 --set checkpoint.interval=4";
    tiny.trained("one", &format!("{rows} --set training.steps=12"));
    let steps = |steps: u64, from: &str| {
        let from = match from {
            "" => String::new(),
            from => format!("--resume-from {from}/checkpoint/step-{}", steps - 4),
        };
        format!("{rows} --set training.steps=12 --stop-after 4 {from}")
    };
    let parts = |more: String| format!("{more} --set parallelism.context_parallel_degree=2");
    succeed(&mut tiny.launch(4, "a", &parts(steps(4, ""))));
    succeed(&mut tiny.train("b", &steps(8, "a")));
    succeed(&mut tiny.launch(2, "c", &parts(steps(12, "b"))));
    let (found, expected) = (tiny.metrics("c", "step"), tiny.metrics("one", "step"));
    assert_near(&found[&12], &expected[&12], &["loss", "grad_norm"], 1e-4);
    assert_eq!(found[&12]["tokens_seen"], expected[&12]["tokens_seen"]);
}

#[test]
fn rows_that_cannot_be_shared_are_refused_once() {
    let tiny = TinyRun::dma();
    let rows = "--set training.local_batch_size=1";
    refuses_once(
        &mut tiny.launch(3, "run", &format!("{rows} --set parallelism.context_parallel_degree=2")),
        &["context_parallel_degree = 2", "3 processes", "hint"],
    );
    refuses_once(
        &mut tiny.train("run", "--set parallelism.context_parallel_degree=2"),
        &["1 processes are no multiple", "sieve launch --nproc 2"],
    );
    refuses_once(
        &mut tiny.launch(2, "run", "--set parallelism.context_parallel_degree=3"),
        &["context_parallel_degree: is 3", "training.seq_len = 32"],
    );
    refuses_once(
        &mut tiny.sieve("plan --recipe tiny.toml --gpu h200 --nproc 3 --set parallelism.context_parallel_degree=2"),
        &["context_parallel_degree = 2", "3 processes", "hint"],
    );
    let latent =
        TinyRun::new("kind = \"mla\"\nkv_lora_rank = 16\nqk_nope_head_dim = 8\nqk_rope_head_dim = 8\nv_head_dim = 8");
    let words = &["\"mla\" needs whole rows", "mha, swa and dma"];
    refuses_once(
        &mut latent.launch(2, "run", "--set parallelism.context_parallel_degree=2"),
        words,
    );
    refuses_once(
        &mut latent.sieve("plan --recipe tiny.toml --gpu h200 --nproc 2 --set parallelism.context_parallel_degree=2"),
        words,
    );
    assert!(!tiny.path("run/config.toml").exists());
}
