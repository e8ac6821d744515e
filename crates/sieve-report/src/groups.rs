//! Groups runs that differ only in their seed, and finds the keys in which recipes differ.
use crate::Run;
use std::collections::BTreeSet;

/// Whether runs of one group may differ in this key.
fn belongs_to_a_seed(key: &str) -> bool {
    matches!(key, "training.seed" | "data.cache_dir") || key.starts_with("checkpoint.") || key.starts_with("metrics.")
}

/// (key, value in each run) of a key in which recipes differ; `None` if a recipe lacks the key.
pub(crate) type Difference<'a> = (&'a str, Vec<Option<&'a str>>);

/// Keys whose values are not the same in all runs.
pub(crate) fn differences(runs: &[Run]) -> Vec<Difference<'_>> {
    let keys: BTreeSet<&str> = runs.iter().flat_map(|run| run.config.keys().map(String::as_str)).collect();
    keys.into_iter()
        .map(|key| (key, runs.iter().map(|run| run.config.get(key).map(String::as_str)).collect::<Vec<_>>()))
        .filter(|(_, values)| values.iter().any(|value| *value != values[0]))
        .collect()
}

/// Why losses of the runs cannot be compared: they read other text, or through other tokenizers. `None` if they can.
pub(crate) fn other_text(runs: &[Run]) -> Option<&'static str> {
    let differs = |is_of: fn(&str) -> bool| differences(runs).iter().any(|(key, _)| is_of(key));
    let is_tokenizer = |key: &str| key.starts_with("tokenizer.") || key == "model.vocab_size";
    let is_text = |key: &str| {
        (key.starts_with("data.") && key != "data.cache_dir")
            || (key.starts_with("stage[") && (key.ends_with(".paths") || key.ends_with(".weights")))
            || matches!(key, "validation.paths" | "validation.tokens")
    };
    if differs(is_tokenizer) {
        return Some("their tokenizers differ");
    }
    let checkpoints = runs.iter().filter_map(|run| run.last_checkpoint.as_ref());
    let mut fingerprints = checkpoints.map(|last| &last.data_fingerprint);
    let first = fingerprints.next();
    let reads_other = fingerprints.any(|other| Some(other) != first);
    (reads_other || differs(is_text)).then_some("their texts differ")
}

/// Whether the runs' recipes differ in a key of `[attention]` or `[model]`. The losses of such models differ by their
/// seeds too.
pub(crate) fn are_other_models(runs: &[Run]) -> bool {
    differences(runs).iter().any(|(key, _)| key.starts_with("attention.") || key.starts_with("model."))
}

/// The group of each run. Runs of one group differ only in their seed, and have done all of their steps: a run that
/// stopped early is a group of its own, since no mean holds it. Groups are numbered by their first run.
pub(crate) fn groups(runs: &[Run]) -> Vec<usize> {
    let mut known: Vec<Option<Vec<(&String, &String)>>> = Vec::new();
    runs.iter()
        .map(|run| {
            let own = run.config.iter().filter(|(key, _)| !belongs_to_a_seed(key)).collect();
            let own = (!run.is_short()).then_some(own);
            let found = known.iter().position(|other| own.is_some() && *other == own);
            found.unwrap_or_else(|| {
                known.push(own);
                known.len() - 1
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::tests::{STEP, folder};

    fn run(recipe: &str) -> Run {
        // It has done all of its steps.
        Run::open(folder(recipe, &STEP.replace("\"num_steps\":20", "\"num_steps\":10")).path(), None).unwrap()
    }

    #[test]
    fn seeds_of_one_recipe_are_a_group() {
        let dma = "[attention]\nkind = \"dma\"\n[training]\nseed = ";
        let runs = [run(&format!("{dma}0")), run("[attention]\nkind = \"mha\"\n"), run(&format!("{dma}1"))];
        assert_eq!(groups(&runs), [0, 1, 0]);
        let found = differences(&runs);
        assert_eq!(found[0], ("attention.kind", vec![Some("dma"), Some("mha"), Some("dma")]));
        assert_eq!(found[1], ("training.seed", vec![Some("0"), None, Some("1")]));
        assert_eq!(found.len(), 2);
        // A run that was stopped is in no mean.
        let stopped = Run::open(folder(&format!("{dma}2"), STEP).path(), None).unwrap();
        let [first, _, last] = runs;
        assert_eq!(groups(&[first, stopped, last]), [0, 1, 0]);
    }
}
