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

/// The group of each run. Runs of one group differ only in their seed. Groups are numbered by their first run.
pub(crate) fn groups(runs: &[Run]) -> Vec<usize> {
    let mut known: Vec<Vec<(&String, &String)>> = Vec::new();
    runs.iter()
        .map(|run| {
            let own = run.config.iter().filter(|(key, _)| !belongs_to_a_seed(key)).collect();
            known.iter().position(|other| *other == own).unwrap_or_else(|| {
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
        Run::open(folder(recipe, STEP).path(), None).unwrap()
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
    }
}
