//! `training.train = ["indexer"]`: an indexer learns beside a model that stays as it is.
use crate::tiny_run::{TinyRun, text};
use sieve_hf::TensorFile;
use std::process::Command;

const ALONE: &str = "--set training.train=[\"indexer\"]";

/// Both ways in which an indexer scores blocks, with the layers of the model: the second may have the first one's
/// choice.
const INDEXERS: [(&str, &str); 3] =
    [("msa", "[\"sparse\"]"), ("msa\"\nindexer = \"qsa", "[\"sparse\"]"), ("msa", "[\"sparse\",\"shared\"]")];

fn tiny(kind: &str) -> TinyRun {
    TinyRun::new(&format!("kind = \"{kind}\"\nselect_block_size = 4\nnum_selected_blocks = 2"))
}

/// The bytes of each tensor of a checkpoint's file, by name.
fn tensors(tiny: &TinyRun, file: &str) -> Vec<(String, Vec<u8>)> {
    let file = TensorFile::open(&tiny.path(file)).expect("a checkpoint");
    let bytes = |name: &String| file.any_tensor(name).expect("it is named").bytes.to_vec();
    file.names().into_iter().map(|name| (name.clone(), bytes(&name))).collect()
}

#[test]
fn an_indexer_alone_has_the_gradients_of_a_whole_step_and_moves_alone() {
    for (kind, layers) in INDEXERS {
        let tiny = tiny(kind);
        // Nothing is clipped, so the first moments are the gradients of one step in both runs.
        let set = format!(
            "--stop-after 1 --set checkpoint.at_start=true --set training.max_norm=1e9 \
             --set lr_scheduler.warmup_steps=0 --set model.layer_types={layers}"
        );
        tiny.trained("whole", &set);
        tiny.trained("alone", &format!("{set} {ALONE}"));
        let moments = |out: &str| tensors(&tiny, &format!("{out}/checkpoint/step-1/optimizer.safetensors"));
        let of_indexer: Vec<_> = moments("whole")
            .into_iter()
            .filter(|(name, _)| name.contains("indexer") || !name.contains("exp_avg"))
            .collect();
        assert!(of_indexer.len() > 2, "{kind}");
        assert!(moments("alone") == of_indexer, "{kind}: the moments of an indexer alone");
        let weights = |step: u64| tensors(&tiny, &format!("alone/checkpoint/step-{step}/model.safetensors"));
        for ((name, before), (_, after)) in weights(0).into_iter().zip(weights(1)) {
            assert_eq!(before != after, name.contains("indexer"), "{kind}: {name}");
        }
    }
}

#[test]
fn an_indexer_learns_from_the_layers_that_read_its_choice() {
    let tiny = tiny("msa");
    let set = "--stop-after 1 --set training.max_norm=1e9 --set lr_scheduler.warmup_steps=0 \
               --set model.layer_types=[\"sparse\",\"shared\"]";
    tiny.trained("all", set);
    tiny.trained("own", &format!("{set} --set attention.index_loss_of_shared=false"));
    let moments = |out: &str| tensors(&tiny, &format!("{out}/checkpoint/step-1/optimizer.safetensors"));
    for ((name, all), (other, own)) in moments("all").into_iter().zip(moments("own")) {
        assert_eq!(name, other);
        let is_gradient = name.ends_with("exp_avg") || name.ends_with("exp_avg_sq");
        assert_eq!(all != own, is_gradient && name.contains("indexer"), "{name}");
    }
}

#[test]
fn a_run_of_an_indexer_alone_begins_with_a_whole_model_resumes_and_goes_on_as_one() {
    let tiny = tiny("msa");
    tiny.trained("whole", "--set training.steps=4");
    let from = format!("--branch-from whole --set training.steps=12 {ALONE}");
    tiny.trained("alone", &from);
    tiny.trained("parts", &format!("{from} --stop-after 2"));
    tiny.trained("parts", &format!("--resume --set training.steps=12 {ALONE}"));
    assert!(tiny.checkpoint("alone", 12) == tiny.checkpoint("parts", 12), "resumed");
    tiny.trained("after", "--branch-from alone --set training.steps=16");
    let moments = tensors(&tiny, "after/checkpoint/step-16/optimizer.safetensors");
    assert!(moments.iter().any(|(name, _)| name.contains("mlp") && name.ends_with("exp_avg")));
}

#[test]
fn indexers_alone_in_an_untrained_model_are_named_in_a_warning() {
    let tiny = tiny("msa");
    tiny.trained("whole", "--stop-after 1");
    let warns = |mut command: Command| {
        let output = command.output().expect("it runs");
        assert!(output.status.success(), "{}", text(&output));
        text(&output).contains("the attention of an untrained model")
    };
    let from = "--set model.initial_weights=whole";
    for (what, is_warned) in [("", true), (from, false), ("--branch-from whole", false)] {
        let out = format!("out{}", what.len());
        assert_eq!(warns(tiny.train(&out, &format!("--stop-after 1 {ALONE} {what}"))), is_warned, "{what}");
    }
    assert!(!warns(tiny.train("all", "--stop-after 1")));
    let plan = |more: &str| warns(tiny.sieve(&format!("plan --recipe tiny.toml {ALONE} {more}")));
    assert_eq!([plan(""), plan(from)], [true, false]);
}
