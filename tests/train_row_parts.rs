//! Processes that share each row train what one would that has whole rows.
use crate::tiny_run::{TinyRun, succeed};
use crate::train_ranks::assert_near;
use crate::train_ranks_faults::refuses_once;
use std::collections::BTreeMap;

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

/// Kinds that exchange tokens for heads: every branch and choice of theirs.
const BY_HEADS: [&str; 8] = [
    "kind = \"mla\"\nkv_lora_rank = 12\nqk_rope_head_dim = 8",
    "kind = \"mla\"\nkv_lora_rank = 12\nqk_rope_head_dim = 8\nqk_norm = false",
    "kind = \"nsa\"\ncompress = \"mean\"\nshared_kv = true\ncompress_block_size = 4\ncompress_stride = 2\n\
     select_block_size = 4\nnum_selected_blocks = 3\nwindow_size = 6",
    "kind = \"nsa\"\ncompress = \"mlp\"\nshared_kv = true\ncompress_block_size = 4\ncompress_stride = 2\n\
     select_block_size = 4\nnum_selected_blocks = 3\nwindow_size = 6",
    "kind = \"nsa\"\ncompress = \"mlp\"\nshared_kv = false\ncompress_block_size = 4\ncompress_stride = 2\n\
     select_block_size = 4\nnum_selected_blocks = 3\nwindow_size = 6",
    "kind = \"infllm_v2\"\ncompress_block_size = 4\ncompress_stride = 2\nselect_block_size = 4\n\
     num_selected_blocks = 3",
    "kind = \"moba\"\nselect_block_size = 4\nnum_selected_blocks = 2",
    "kind = \"msa\"\nselect_block_size = 4\nnum_selected_blocks = 2",
];

/// The first moments of a checkpoint by name: a tenth of the clipped gradients after one step.
fn first_moments(tiny: &TinyRun, out: &str, reference: &str) -> BTreeMap<String, Vec<f64>> {
    let found = tiny.checkpoint_like(out, reference, 1).into_iter();
    let moments = found.filter(|(name, _)| name.ends_with(".exp_avg"));
    let values = |bytes: Vec<u8>| {
        let (values, _) = bytes.as_chunks();
        values
            .iter()
            .map(|&bytes| f64::from(f32::from_le_bytes(bytes)))
            .collect()
    };
    moments.map(|(name, bytes)| (name, values(bytes))).collect()
}

#[test]
fn kinds_that_exchange_tokens_for_heads_have_the_gradients_of_whole_rows() {
    for kind in BY_HEADS {
        let tiny = TinyRun::new(kind);
        // Parts of an odd length; documents begin and end anywhere in them.
        for (degree, nproc, seq_len) in [(2, 2, 30), (2, 4, 30), (4, 4, 28)] {
            let rows = format!(
                "--set training.local_batch_size=2 --set training.steps=1 --set validation.interval=4 \
                 --set model.num_attention_heads={degree} --set model.num_key_value_heads={degree} \
                 --set training.seq_len={seq_len} --set activation_checkpoint.mode=selective \
                 --set lr_scheduler.warmup_steps=1"
            );
            let [one, parts] = [format!("one-{degree}"), format!("parts-{degree}-{nproc}")];
            if !tiny.path(&one).exists() {
                tiny.trained(&one, &rows);
            }
            let more = format!("{rows} --set parallelism.context_parallel_degree={degree}");
            succeed(&mut tiny.launch(nproc, &parts, &more));
            let [found, expected] = [&parts, &one].map(|out| tiny.metrics(out, "step")[&1].clone());
            assert_near(&found, &expected, &["loss", "grad_norm"], 1e-6);
            let found = first_moments(&tiny, &parts, &one);
            let expected = first_moments(&tiny, &one, &one);
            assert!(expected.len() > 10 && found.keys().eq(expected.keys()), "{kind}");
            for (name, expected) in expected {
                let apart = found[&name].iter().zip(&expected).map(|(a, b)| (a - b).powi(2));
                let apart = apart.sum::<f64>().sqrt();
                let norm = expected.iter().map(|x| x * x).sum::<f64>().sqrt();
                assert!(
                    apart <= 1e-5 * norm + 1e-12,
                    "{kind} {degree} {nproc} {name}: {apart} of {norm}"
                );
            }
        }
    }
}

#[test]
fn kinds_that_exchange_tokens_for_heads_train_and_go_on_as_with_whole_rows() {
    for kind in BY_HEADS {
        let tiny = TinyRun::new(kind);
        // The warm-up of MSA's indexer reads all keys.
        let warm_up = if kind.contains("msa") {
            "index_warmup = true\n"
        } else {
            ""
        };
        let stages = format!("[[stage]]\nsteps = 2\n{warm_up}[[stage]]\nsteps = 6\n[optimizer]");
        let staged = tiny.read("tiny.toml").replace("[optimizer]", &stages);
        tiny.write("tiny.toml", staged.replace("steps = 40\n", ""));
        let rows = "--set training.local_batch_size=2 --set model.num_key_value_heads=2 \
                    --set checkpoint.keep_latest_k=0 --set validation.interval=4";
        tiny.trained("one", rows);
        let parts = format!("{rows} --set parallelism.context_parallel_degree=2");
        succeed(&mut tiny.launch(2, "a", &format!("{parts} --stop-after 4")));
        let from = |out: &str| format!("--resume-from {out}/checkpoint/step-4");
        succeed(&mut tiny.launch(4, "b", &format!("{parts} --set parallelism.zero_stage=2 {}", from("a"))));
        succeed(&mut tiny.train("c", &format!("{rows} {}", from("a"))));
        let expected = tiny.metrics("one", "step");
        for (run, steps) in [("a", 1..=4), ("b", 5..=8), ("c", 5..=8)] {
            for (step, line) in tiny.metrics(run, "step") {
                assert!(steps.contains(&step), "{kind} {run}: {step}");
                assert_near(&line, &expected[&step], &["loss"], 1e-5);
                assert_near(&line, &expected[&step], &["grad_norm"], 1e-4);
                assert_eq!(line["tokens_seen"], expected[&step]["tokens_seen"]);
            }
        }
        let last = |out: &str| tiny.metrics(out, "validation")[&8].clone();
        assert_near(&last("b"), &last("one"), &["loss"], 1e-5);
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
    let latent = TinyRun::new(BY_HEADS[0]);
    let words = &["\"mla\" shares out its KV heads", "num_key_value_heads = 2", "hint"];
    let four = "--set model.num_key_value_heads=2 --set parallelism.context_parallel_degree=4";
    refuses_once(&mut latent.launch(4, "run", four), words);
    refuses_once(
        &mut latent.sieve(&format!("plan --recipe tiny.toml --gpu h200 --nproc 4 {four}")),
        words,
    );
    assert!(!tiny.path("run/config.toml").exists());
}
