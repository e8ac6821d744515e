//! Where a run begins: every way to say it, with every command that obeys it. A run's validation loss before its first
//! step tells which weights it began with.
use crate::tiny_run::{TinyRun, refused, succeed, words_of};
use sieve_testing::cases;
use std::fs;
use std::path::Path;

/// Rows: name, recipe, flags, weights of a new run (`-`: it is refused), words of `train`, words of `plan`.
const BEGINNINGS: &str = r#"
    no key => alone/recipe.toml => none => random => !begins with => initial weights  random, seed 0 | !warning
    key => in/recipe.toml => none => in => begins with | in/step-0 | !wins => in/step-0, at step 0
    key and flag => in/recipe.toml => --branch-from other/step-0 => other \
        => begins with other/step-0 | --branch-from wins over the recipe's model.initial_weights | in/step-0 \
        => in/step-0, at step 0
    random => in/random.toml => none => random => !begins with => initial weights  random, seed 0 | !warning
    random and flag => in/random.toml => --branch-from other/step-0 => other \
        => begins with other/step-0 | wins over the recipe's model.initial_weights = "random" => random, seed 0
    key by set => in/recipe.toml => --set model.initial_weights=other/step-0 => other => begins with | other/step-0 \
        => other/step-0, at step 0
    old recipe => in/old.toml => none => - \
        => in/old.toml does not name the weights that a run begins with | in/step-0 is a checkpoint of its model \
        | hint: write initial_weights = "step-0" below [model] | initial_weights = "random" \
        => warning: sieve train refuses this recipe: in/old.toml does not name | initial weights  random, seed 0
    old recipe and flag => in/old.toml => --branch-from in/step-0 => in => begins with in/step-0 | !wins => warning
    changed => changed/recipe.toml => none => - => model.initial_weights: | model.safetensors is damaged \
        => changed/step-0, at step 0
    missing => missing/recipe.toml => none => - \
        => model.initial_weights: | missing/step-0 holds no checkpoint | "random" begins without a checkpoint \
        => model.initial_weights: | missing/step-0 holds no checkpoint
"#;

/// Folders of imported models and recipes of them, and the losses of their weights before the first step.
struct Beginnings {
    tiny: TinyRun,
    losses: [(&'static str, f64); 3],
}

impl Beginnings {
    fn new() -> Self {
        let tiny = TinyRun::new("kind = \"mha\"");
        for (run, seed) in [("in", 3), ("other", 4)] {
            let trunk = format!("trunk-{run}");
            tiny.trained(&trunk, &format!("--set training.steps=8 --set training.seed={seed}"));
            tiny.prints(&format!("export --checkpoint {trunk} --out hf-{run}"));
            tiny.prints(&format!("import --from hf-{run} --out {run} --data corpus"));
        }
        let text = tiny.read("in/recipe.toml");
        let key = "\ninitial_weights = \"step-0\"\n";
        assert!(text.contains(key), "{text}");
        for folder in ["alone", "missing"] {
            fs::create_dir(tiny.path(folder)).expect("a new folder");
        }
        for (name, line) in
            [("alone/recipe", "\n"), ("in/old", "\n"), ("in/random", "\ninitial_weights = \"random\"\n")]
        {
            tiny.write(&format!("{name}.toml"), text.replace(key, line));
        }
        tiny.write("missing/recipe.toml", &text);
        copy(&tiny.path("in"), &tiny.path("changed"));
        change(&tiny.path("changed"));
        let mut this = Self { tiny, losses: [("in", 0.0), ("other", 0.0), ("random", 0.0)] };
        for (name, flags) in
            [("in", "--branch-from in/step-0"), ("other", "--branch-from other/step-0"), ("random", "")]
        {
            let out = format!("reference-{name}");
            this.train("alone/recipe.toml", &out, &format!("{flags} --stop-after 1"));
            let loss = this.loss(&out);
            let found = this.losses.iter_mut().find(|(own, _)| *own == name);
            found.expect("one of the three").1 = loss;
        }
        let [trained, other, random] = this.losses.map(|(_, loss)| loss);
        assert!((trained - other).abs() > 1e-3 && random - trained.max(other) > 0.05, "{:?}", this.losses);
        this
    }

    fn train(&self, recipe: &str, out: &str, more: &str) -> String {
        succeed(&mut self.tiny.sieve(&format!("train --recipe {recipe} --device cpu --out {out} {more}")))
    }

    /// The validation loss of a run before its first step.
    fn loss(&self, out: &str) -> f64 {
        let lines = self.tiny.metrics(out, "validation");
        lines[&0]["loss"].as_f64().expect("a number")
    }

    /// Asserts that the run began with these weights, and that its `config.toml` says so.
    fn assert_began(&self, out: &str, weights: &str, place: &str) {
        let (loss, config) = (self.loss(out), self.tiny.read(&format!("{out}/config.toml")));
        let (_, expected) = self.losses.iter().find(|(name, _)| *name == weights).expect(place);
        assert!((loss - expected).abs() < 1e-4, "{place}: {loss}, and {weights} has {expected}");
        let key = config.lines().find(|line| line.starts_with("initial_weights = ")).expect(place);
        let full = self.tiny.path("").canonicalize().expect("a folder");
        match weights {
            "random" => assert_eq!(key, "initial_weights = \"random\"", "{place}"),
            name => words_of(key, &format!("{} | {name}/step-0\"", full.display())),
        }
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).expect("a new folder");
    for entry in fs::read_dir(from).expect("a folder").flatten() {
        let to = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).expect("a file");
        }
    }
}

/// Changes a byte of the weights of an import.
fn change(import: &Path) {
    let path = import.join("step-0/model.safetensors");
    let mut bytes = fs::read(&path).expect("weights");
    *bytes.last_mut().expect("not empty") ^= 0x40;
    fs::write(&path, bytes).expect("writable");
}

#[test]
fn a_new_run_begins_where_its_recipe_or_flag_says() {
    let all = Beginnings::new();
    for [name, recipe, flags, weights, trains, plans] in cases(BEGINNINGS) {
        let flags = if flags == "none" { "" } else { flags };
        let out = name.replace(' ', "-");
        // Several ranks, and sweeps, obey as one process does.
        // No sample: a random model writes any character.
        let sweep = "--sweep optimizer.lr=1e-4,2e-4 --set training.steps=2 --set generation.prompts=[] --verbose";
        let commands = [
            (String::new(), "--stop-after 1", vec![out.clone()]),
            ("launch --nproc 2 -- ".to_owned(), "--stop-after 1", vec![format!("{out}-ranks")]),
            (String::new(), sweep, ["lr=1e-4", "lr=2e-4"].map(|run| format!("{out}-sweep/{run}")).to_vec()),
        ];
        for (launcher, more, runs) in commands {
            let folder = runs[0].split('/').next().expect("a folder").to_owned();
            let words = format!("{launcher}train --recipe {recipe} --device cpu --out {folder} {more} {flags}");
            let mut command = all.tiny.sieve(&words);
            if weights == "-" {
                all.tiny.unchanged(|| refused(&mut command, trains));
                continue;
            }
            words_of(&succeed(&mut command), trains);
            runs.iter().for_each(|run| all.assert_began(run, weights, &words));
        }
        // A plan takes no flag that names a checkpoint.
        let set = if flags.starts_with("--set") { flags } else { "" };
        let mut plan = all.tiny.sieve(&format!("plan --recipe {recipe} {set}"));
        match name {
            "missing" => drop(refused(&mut plan, plans)),
            // A plan reads no weights, and does not see that they have changed.
            _ => words_of(&succeed(&mut plan), plans),
        }
    }
}

/// Rows: name, recipe, flags of the first start, its weights, what happens to the folder, words of a resume from the
/// run's checkpoint, and words of a resume without a checkpoint. `-` before words: that resume is refused.
const RESUMES: &str = r#"
    no key => alone => none => random => none => continuing at step 1 => starts over
    key => recipe => none => in => none => continuing at step 1 | !note: the run began => begins again with
    key and flag => recipe => --branch-from other/step-0 => other => none => continuing at step 1 => begins again with
    random => random => none => random => none => continuing at step 1 => starts over
    old recipe => old => --branch-from IN/step-0 => in => none => continuing at step 1 => begins again with
    key added => old => --branch-from IN/step-0 => in => key => continuing at step 1 => begins again with
    key moved => recipe => none => in => move => note: the run began with | it is gone | continuing at step 1 \
        => begins again with | moved/step-0
    changed => recipe => none => in => change => note: the run began with | model.safetensors is damaged \
        | continuing at step 1 \
        => - no checkpoint yet | which it began with, cannot be used | model.safetensors is damaged
    replaced => recipe => none => in => replace => a different checkpoint is there now | continuing at step 1 \
        => - which it began with, cannot be used: a different checkpoint is there now
    missing => recipe => none => in => remove => note: the run began with | it is gone | continuing at step 1 \
        => - which it began with, cannot be used | put that checkpoint back
    other weights => recipe => none => in => other => - model.initial_weights was | is now | other/step-0 \
        => - model.initial_weights was | is now
    made random => recipe => none => in => random => - model.initial_weights was | is now "random" \
        => - model.initial_weights was | is now "random"
    random made key => random => none => random => key => - model.initial_weights was "random", is now => - was "random"
"#;

#[test]
fn a_resumed_run_keeps_the_weights_that_it_began_with() {
    let all = Beginnings::new();
    let tiny = &all.tiny;
    for [name, recipe, flags, weights, after, with, without] in cases(RESUMES) {
        let out = format!("out-{}", name.replace(' ', "-"));
        // Each run has an import of its own to begin with, named in/ as the references are.
        let home = tiny.path(&out).join("home");
        fs::create_dir_all(&home).expect("a new folder");
        copy(&tiny.path("in"), &home.join("in"));
        let (folder, run) = (format!("{out}/home/in"), format!("{out}/run"));
        let file = match recipe {
            "alone" => "alone/recipe.toml".to_owned(),
            name => format!("{folder}/{name}.toml"),
        };
        let flags = if flags == "none" { String::new() } else { flags.replace("IN", &folder) };
        all.train(&file, &run, &format!("{flags} --stop-after 1"));
        all.assert_began(&run, weights, name);
        let mut file = file;
        let import = home.join("in");
        match after {
            "none" => {}
            "key" => file = format!("{folder}/recipe.toml"),
            "random" => file = format!("{folder}/random.toml"),
            "other" => file = "other/recipe.toml".to_owned(),
            "move" => {
                fs::rename(&import, home.join("moved")).expect("in one folder");
                file = format!("{out}/home/moved/recipe.toml");
            }
            "change" => change(&import),
            "replace" => {
                fs::remove_dir_all(import.join("step-0")).expect("a folder");
                copy(&tiny.path("other/step-0"), &import.join("step-0"));
            }
            "remove" => fs::remove_dir_all(import.join("step-0")).expect("a folder"),
            other => panic!("{other}"),
        }
        let resume = format!("train --recipe {file} --device cpu --out {run} --resume --stop-after 1");
        let told = |words: &str| match words.strip_prefix("- ") {
            Some(words) => drop(tiny.unchanged(|| refused(&mut tiny.sieve(&resume), words))),
            None => words_of(&succeed(&mut tiny.sieve(&resume)), words),
        };
        told(with);
        fs::remove_dir_all(tiny.path(&run).join("checkpoint")).expect("the run has one");
        told(without);
        if !without.starts_with('-') && after != "move" {
            all.assert_began(&run, weights, name);
        }
    }
}
