//! Processes that share each row train what one would that has whole rows.
use crate::sessions::assert_near;
use crate::tiny_run::{TinyRun, succeed};
use std::collections::BTreeMap;

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
