//! The runs of a sweep: every combination of the values, and each run once.
use super::run::Run;
use crate::train::arguments::TrainArgs;
use anyhow::{Result, bail};
use sieve_core::Recipe;
use std::path::Path;

/// Runs of a sweep, at most. More are likely a mistake in the values.
const MAX_RUNS: usize = 1000;

/// What a sweep trains.
pub(super) struct Planned {
    pub(super) runs: Vec<Run>,
    /// A warning that names the keys which some runs do not use; `None` if all use every key.
    pub(super) unused: Option<String>,
    /// Number of combinations of the values. More than runs, if some combinations have the same recipe.
    pub(super) num_combinations: usize,
}

/// Reads the recipe of every combination of values. Combinations whose recipes are equal, because they differ only in
/// keys that their kind of attention does not use, are one run.
pub(super) fn planned(args: &TrainArgs, base: &Path) -> Result<Planned> {
    let swept = swept_keys(args)?;
    let shares_data = !swept.iter().any(|(key, _)| changes_shards(key));
    let combinations = combinations(&swept)?;
    let num_combinations = combinations.len();
    let (mut runs, mut unused): (Vec<Run>, Vec<Unused>) = (Vec::new(), Vec::new());
    for overrides in combinations {
        let mut source = args.recipe.clone();
        source.overrides.extend(overrides.iter().cloned());
        let (mut recipe, left_out) = source.load_unsaid()?;
        note_unused(&mut unused, &recipe, &left_out);
        let overrides = used(overrides, &left_out);
        let out = base.join(folder_name(&overrides));
        let text = source.choose_text(&mut recipe)?;
        if shares_data && recipe.data.cache_dir.is_none() {
            let shared = base.join("data").to_string_lossy().into_owned();
            recipe.data.cache_dir = Some(shared.replace('$', "$$"));
        }
        if !runs.iter().any(|run| run.recipe == recipe) {
            runs.push(Run { overrides, recipe, text, request: args.request_of_sweep(&out) });
        }
    }
    for (index, run) in runs.iter().enumerate() {
        if runs[..index].iter().any(|other| other.request.out == run.request.out) {
            bail!("--sweep names {} twice\n  hint: give each value once", run.overrides.join(" "));
        }
    }
    Ok(Planned { runs, unused: unused_words(&unused), num_combinations })
}

/// Kinds of attention, and the keys that all of them leave out.
struct Unused {
    kinds: Vec<&'static str>,
    keys: Vec<String>,
}

/// Adds the keys that a recipe left out to those of its kind.
fn note_unused(unused: &mut Vec<Unused>, recipe: &Recipe, left_out: &[String]) {
    let kind = recipe.attention.kind().name();
    match unused.iter_mut().find(|known| known.keys == left_out) {
        _ if left_out.is_empty() => {}
        Some(known) if known.kinds.contains(&kind) => {}
        Some(known) => known.kinds.push(kind),
        None => unused.push(Unused { kinds: vec![kind], keys: left_out.to_owned() }),
    }
}

/// The one line about all unused keys of a sweep.
fn unused_words(unused: &[Unused]) -> Option<String> {
    let clause = |Unused { kinds, keys }: &Unused| {
        let kinds = kinds.iter().map(|kind| format!("{kind:?}")).collect::<Vec<_>>().join(", ");
        format!("with {kinds}: {}", keys.join(", "))
    };
    let clauses = unused.iter().map(clause).collect::<Vec<_>>().join("; ");
    (!unused.is_empty()).then(|| format!("keys that a kind does not use, {clauses}"))
}

/// The overrides whose keys the run uses, by which it is named; all of them if it uses none.
fn used(overrides: Vec<String>, left_out: &[String]) -> Vec<String> {
    let is_used =
        |item: &&String| item.split_once('=').is_none_or(|(key, _)| !left_out.iter().any(|out| out == key.trim()));
    let used: Vec<String> = overrides.iter().filter(is_used).cloned().collect();
    if used.is_empty() { overrides } else { used }
}

/// The keys of `--sweep` with their values. A key is given once, by `--sweep` or `--set`.
fn swept_keys(args: &TrainArgs) -> Result<Vec<(&str, Vec<String>)>> {
    let mut swept = Vec::new();
    for (index, sweep) in args.sweep.iter().enumerate() {
        let Some((key, values)) = sweep.split_once('=') else {
            bail!(
                "--sweep {sweep} is not written section.key=V1,V2,…\n  \
                 hint: for example --sweep optimizer.lr=1e-3,3e-3"
            );
        };
        let values = split(values);
        if values.is_empty() || values.iter().any(String::is_empty) {
            bail!("--sweep {sweep} has an empty value\n  hint: write {key}=V1,V2 without spaces");
        }
        if let Some(twice) = (1..values.len()).find(|&index| values[..index].contains(&values[index])) {
            bail!("--sweep names {key}={} twice\n  hint: give each value once", values[twice]);
        }
        let mut others = args.recipe.overrides.iter().chain(&args.sweep[..index]);
        let key_of = |item: &str| item.split('=').next().unwrap_or_default().trim().to_owned();
        if let Some(other) = others.find(|other| key_of(other) == key_of(sweep)) {
            bail!("--sweep {sweep}: {key} is also given as {other}\n  hint: give each key once, with all its values");
        }
        swept.push((key, values));
    }
    Ok(swept)
}

/// Whether a key changes what shards hold, so that runs cannot share one folder of them.
fn changes_shards(key: &str) -> bool {
    let of_text = ["data.", "tokenizer.", "validation.paths"];
    let of_stage = [".paths", ".weights"];
    // A run that begins with a checkpoint reads that one's tokenizer.
    key == "model.initial_weights"
        || of_text.iter().any(|begin| key.starts_with(begin))
        || of_stage.iter().any(|end| key.ends_with(end))
}

/// `KEY=VALUE` of each key, for every combination of their values; the last key's values change fastest.
fn combinations(swept: &[(&str, Vec<String>)]) -> Result<Vec<Vec<String>>> {
    let mut combinations: Vec<Vec<String>> = vec![Vec::new()];
    for (key, values) in swept {
        let longer = |shorter: &Vec<String>, value: &String| [&shorter[..], &[format!("{key}={value}")]].concat();
        combinations =
            combinations.iter().flat_map(|shorter| values.iter().map(move |value| longer(shorter, value))).collect();
        if combinations.len() > MAX_RUNS {
            bail!("--sweep asks for more than {MAX_RUNS} runs\n  hint: give fewer values");
        }
    }
    Ok(combinations)
}

/// Splits at commas that are not inside brackets or quotes.
fn split(values: &str) -> Vec<String> {
    let mut split = vec![String::new()];
    let (mut depth, mut quoted) = (0usize, false);
    for letter in values.chars() {
        match letter {
            '"' => quoted = !quoted,
            '[' | '{' if !quoted => depth += 1,
            ']' | '}' if !quoted => depth = depth.saturating_sub(1),
            ',' if !quoted && depth == 0 => {
                split.push(String::new());
                continue;
            }
            _ => {}
        }
        if let Some(last) = split.last_mut() {
            last.push(letter);
        }
    }
    split
}

/// A folder name such as `lr=1e-3,beta2=0.9`. Characters that are unsafe in file names become `_`.
fn folder_name(overrides: &[String]) -> String {
    let short = overrides.iter().map(|item| {
        let (key, value) = item.split_once('=').unwrap_or((item, ""));
        let key = key.rsplit_once('.').map_or(key, |(_, last)| last);
        format!("{key}={value}")
    });
    let name = short.collect::<Vec<_>>().join(",");
    let plain = |letter: char| letter.is_alphanumeric() || "=,.-+_".contains(letter);
    name.chars().map(|letter| if plain(letter) { letter } else { '_' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_split_at_commas_outside_brackets_and_quotes() {
        assert_eq!(split("1e-3,3e-3"), ["1e-3", "3e-3"]);
        assert_eq!(split("[1,2],[3]"), ["[1,2]", "[3]"]);
        assert_eq!(split("\"a,b\",c"), ["\"a,b\"", "c"]);
        assert_eq!(split(""), [""]);
    }

    #[test]
    fn folders_are_named_after_what_differs() {
        let overrides = ["optimizer.lr=1e-3", "data.paths=[\"a/b\"]"].map(str::to_owned);
        assert_eq!(folder_name(&overrides), "lr=1e-3,paths=__a_b__");
    }

    #[test]
    fn a_run_is_named_by_the_keys_that_it_uses() {
        let all = ["attention.kind=mha", "attention.keep_window_size=64", "training.seed=0"].map(str::to_owned);
        let left_out = ["attention.keep_window_size".to_owned()];
        assert_eq!(used(all.to_vec(), &left_out), ["attention.kind=mha", "training.seed=0"]);
        assert_eq!(used(all[1..2].to_vec(), &left_out), all[1..2], "a run needs a name");
    }
}
