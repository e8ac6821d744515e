//! Groups runs that differ only in their seed, and finds the keys in which recipes differ.
use crate::Run;
use serde::Serialize;
use sieve_core::Attention;
use sieve_core::recipe::{AttentionKind, other_losses};
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
    if let Some(reason) = other_losses(differences(runs).into_iter().map(|(key, _)| key)) {
        return Some(reason);
    }
    let checkpoints = runs.iter().filter_map(|run| run.last_checkpoint.as_ref());
    let mut fingerprints = checkpoints.map(|last| &last.data_fingerprint);
    let first = fingerprints.next();
    let reads_other = fingerprints.any(|other| Some(other) != first);
    reads_other.then_some("their texts differ")
}

/// Whether the runs' recipes differ in a key of `[attention]` or `[model]`. The losses of such models differ by their
/// seeds too.
pub(crate) fn are_other_models(runs: &[Run]) -> bool {
    differences(runs).iter().any(|(key, _)| key.starts_with("attention.") || key.starts_with("model."))
}

/// The runs' kind of attention, which gives a run its colour; `None` for a recipe without one.
fn kind(run: &Run) -> Option<&String> {
    run.config.get("attention.kind")
}

/// Whether every layer of a run is dense.
pub(crate) fn is_dense(run: &Run) -> bool {
    kind(run).and_then(|kind| AttentionKind::named(kind)) == Some(Attention::DENSE.kind())
}

/// The name of a group: that of its run; of several runs, their name without the seed.
pub(crate) fn name_of(runs: &[Run], members: &[usize]) -> String {
    let first = &runs[members[0]].name;
    if members.len() == 1 {
        return first.clone();
    }
    let parts = first.split(',').filter(|part| !part.starts_with("seed="));
    match parts.collect::<Vec<_>>().join(",") {
        name if name.is_empty() => "all seeds".to_owned(),
        name if name == *first && swept_seeds(runs, members) => format!("{name} and other seeds"),
        name if name == *first => format!("{name} and its repetitions"),
        name => name,
    }
}

/// How many seeds the runs of a group have: runs of one seed are repetitions, and their spread says nothing of seeds.
pub(crate) fn num_seeds(runs: &[Run], members: &[usize]) -> usize {
    let seeds: BTreeSet<_> = members.iter().map(|&idx| runs[idx].config.get("training.seed")).collect();
    seeds.len()
}

/// Whether the runs of a group differ in their seed.
pub(crate) fn swept_seeds(runs: &[Run], members: &[usize]) -> bool {
    num_seeds(runs, members) > 1
}

/// How a run's line is drawn: which of the colours, and which of the dashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Look {
    colour: usize,
    dash: usize,
}

/// The look of each run. Each kind of attention has a colour, and recipes of one kind differ by their dashes; runs that
/// are all of one kind have a colour for each recipe. Seeds of one recipe look the same.
pub(crate) fn looks(runs: &[Run], groups: &[usize]) -> Vec<Look> {
    let mut kinds: Vec<Option<&String>> = Vec::new();
    runs.iter().map(kind).for_each(|kind| {
        if !kinds.contains(&kind) {
            kinds.push(kind)
        }
    });
    if kinds.len() == 1 {
        return groups.iter().map(|&colour| Look { colour, dash: 0 }).collect();
    }
    let mut of_kind: Vec<Vec<usize>> = vec![Vec::new(); kinds.len()];
    let look = |(run, &group): (&Run, &usize)| {
        let colour = kinds.iter().position(|known| *known == kind(run)).expect("all kinds are known");
        let dash = of_kind[colour].iter().position(|known| *known == group).unwrap_or_else(|| {
            of_kind[colour].push(group);
            of_kind[colour].len() - 1
        });
        Look { colour, dash }
    };
    runs.iter().zip(groups).map(look).collect()
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
    fn a_kind_has_one_colour_and_its_recipes_their_dashes() {
        let recipe = |kind: &str, width: u32, seed: u32| {
            run(&format!("[attention]\nkind = \"{kind}\"\nwidth = {width}\n[training]\nseed = {seed}\n"))
        };
        let look = |colour, dash| Look { colour, dash };
        let runs = [recipe("dma", 1, 0), recipe("mha", 1, 0), recipe("dma", 2, 0), recipe("dma", 1, 1)];
        assert_eq!(looks(&runs, &groups(&runs)), [look(0, 0), look(1, 0), look(0, 1), look(0, 0)]);
        let runs = [recipe("dma", 1, 0), recipe("dma", 2, 0), recipe("dma", 1, 1)];
        assert_eq!(looks(&runs, &groups(&runs)), [look(0, 0), look(1, 0), look(0, 0)]);
    }

    #[test]
    fn a_group_is_called_by_what_its_seeds_share() {
        let named = |name: &str, seed: u32| {
            let last = STEP.replace("\"num_steps\":20", "\"num_steps\":10");
            Run::open(folder(&format!("[training]\nseed = {seed}\n"), &last).path(), Some(name)).unwrap()
        };
        for (first, name) in [("kind=dma,seed=0", "kind=dma"), ("seed=0", "all seeds"), ("a", "a and other seeds")] {
            let runs = [named(first, 0), named("b", 1)];
            assert_eq!((name_of(&runs, &[0, 1]), name_of(&runs, &[0])), (name.to_owned(), first.to_owned()));
        }
        let twice = [named("a", 0), named("b", 0), named("c", 1)];
        assert_eq!(name_of(&twice, &[0, 1]), "a and its repetitions");
        assert_eq!([&[0, 1][..], &[0, 1, 2], &[0]].map(|members| num_seeds(&twice, members)), [1, 2, 1]);
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
