//! Runs the built program on a tiny recipe and a tiny generated corpus; a training run takes about a second.
use chacha20::ChaCha8Rng;
use chacha20::rand_core::{Rng, SeedableRng};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime};
use tempfile::TempDir;

/// Training steps of the recipe.
pub(crate) const STEPS: u64 = 40;
/// Steps between two checkpoints.
pub(crate) const INTERVAL: u64 = 4;

/// A folder with `corpus/`, `tiny.toml` and the runs that tests make in it.
pub(crate) struct TinyRun {
    dir: PathBuf,
    /// Deletes the folder when it is dropped.
    _owned: Option<TempDir>,
}

impl TinyRun {
    /// A new folder, whose recipe has these `[attention]` lines.
    pub(crate) fn new(attention: &str) -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let this = Self { dir: dir.path().to_owned(), _owned: Some(dir) };
        fs::create_dir(this.path("corpus")).expect("the folder is new");
        for (name, text) in corpus() {
            fs::write(this.path("corpus").join(name), text).expect("the folder is writable");
        }
        fs::write(this.path("tiny.toml"), recipe(attention)).expect("the folder is writable");
        this
    }

    /// A folder whose recipe has DMA that keeps 8 of a row's 32 keys.
    pub(crate) fn dma() -> Self {
        Self::new("kind = \"dma\"\nkeep_window_size = 8\na_init = 0.5\nrecency = \"none\"\nlocal_window_size = 0")
    }

    /// The folder that another process has made; it is not deleted.
    pub(crate) fn of_another(dir: PathBuf) -> Self {
        Self { dir, _owned: None }
    }

    /// A path below the folder.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The text of a file in the folder.
    pub(crate) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// Writes a file in the folder.
    pub(crate) fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        fs::write(self.path(name), bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
    }

    /// The names in a subfolder, sorted.
    pub(crate) fn names(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(folder)).unwrap_or_else(|error| panic!("{folder}: {error}"));
        let names = entries.map(|entry| entry.expect("readable").file_name().into_string().expect("text"));
        names.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Runs the program with `args`, split at white space. It must succeed. Returns its output.
    pub(crate) fn prints(&self, args: &str) -> String {
        succeed(&mut self.sieve(args))
    }

    /// Runs the program with `args`, split at white space. It must fail: its message must contain each of `words`
    /// (separated by ` | `), and no file may be created, changed or removed.
    pub(crate) fn refuses(&self, args: &str, words: &str) -> String {
        self.unchanged(|| refused(&mut self.sieve(args), words))
    }

    /// A command that runs the program in the folder, with `args` split at white space.
    pub(crate) fn sieve(&self, args: &str) -> Command {
        let mut command = Command::new(program());
        command
            .args(args.split_whitespace())
            .current_dir(&self.dir)
            // Resuming is bit-exact for the same number of threads, and tests share their cores with others.
            .env("RAYON_NUM_THREADS", "2")
            .stdin(Stdio::null());
        command
    }

    /// The command `sieve train` on the recipe into `out`, with the arguments `more`.
    pub(crate) fn train(&self, out: &str, more: &str) -> Command {
        self.sieve(&format!("train --recipe tiny.toml --device cpu --out {out} {more}"))
    }

    /// Trains the recipe into `out` and returns how long that took.
    pub(crate) fn trained(&self, out: &str, more: &str) -> Duration {
        // Building the program, if it is out of date, is not part of the measured time.
        let mut command = self.train(out, more);
        let started = Instant::now();
        succeed(&mut command);
        started.elapsed()
    }

    /// Weights, optimizer state and position in the data of a checkpoint, as bytes. The parts that several processes
    /// wrote are joined; `reference`, a run by one process, gives the tensors' names and shapes.
    pub(crate) fn checkpoint_like(&self, out: &str, reference: &str, step: u64) -> BTreeMap<String, Vec<u8>> {
        let folder = |out: &str| self.path(out).join(format!("checkpoint/step-{step}"));
        let [own, shapes] = [out, reference].map(|out| {
            let found = sieve_hf::Checkpoint::open(&folder(out));
            found.unwrap_or_else(|error| panic!("{error}"))
        });
        let mut found = BTreeMap::new();
        for (file, tensors) in [("model", own.model()), ("optimizer", own.optimizer())] {
            let tensors = tensors.expect("it was opened");
            let whole = folder(reference).join(format!("{file}.safetensors"));
            let whole = sieve_hf::TensorFile::open(&whole).expect("of one process");
            assert_eq!(tensors.names(), whole.names(), "{out}");
            for name in whole.names() {
                let shape = whole.any_tensor(&name).expect("it is named").shape.to_vec();
                let data = tensors.tensor(&name, &shape);
                let data = data.unwrap_or_else(|error| panic!("{error}"));
                found.insert(format!("{file}: {name}"), data.bytes.to_vec());
            }
        }
        let mut state = own.state.clone();
        // Checksums cover config.toml too, and runs with different recipes may be compared.
        state.checksums.clear();
        state.num_shards = shapes.state.num_shards;
        found.insert("state.json".to_owned(), format!("{state:?}").into_bytes());
        found
    }

    /// As [`checkpoint_like`](Self::checkpoint_like), for a checkpoint that one process wrote.
    pub(crate) fn checkpoint(&self, out: &str, step: u64) -> BTreeMap<String, Vec<u8>> {
        let folder = self.path(out).join(format!("checkpoint/step-{step}"));
        let read = |name: &str| {
            let path = folder.join(name);
            fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
        };
        let mut state: serde_json::Value = serde_json::from_slice(&read("state.json")).expect("JSON");
        // Checksums cover config.toml too, and runs with different recipes may be compared.
        state["checksums"] = serde_json::Value::Null;
        let files = ["model.safetensors", "optimizer.safetensors"];
        let mut found: BTreeMap<_, _> = files.into_iter().map(|name| (name.to_owned(), read(name))).collect();
        found.insert("state.json".to_owned(), state.to_string().into_bytes());
        found
    }

    /// Asserts that two runs ended with bit-identical weights and optimizer state, at the same position in the data.
    /// One process must have trained `reference`.
    pub(crate) fn assert_same_end(&self, out: &str, reference: &str) {
        self.assert_same_at(out, reference, STEPS);
    }

    /// As [`assert_same_end`](Self::assert_same_end), after an earlier step.
    pub(crate) fn assert_same_at(&self, out: &str, reference: &str, step: u64) {
        let folder = self.path(out).join(format!("checkpoint/step-{step}"));
        let read = |run: &str| {
            if folder.join("model.safetensors").exists() {
                self.checkpoint(run, step)
            } else {
                self.checkpoint_like(run, reference, step)
            }
        };
        let found = read(out);
        for (name, expected) in read(reference) {
            assert!(found[&name] == expected, "{out} and {reference}: {name}");
        }
    }

    /// The lines of one kind in `metrics.jsonl`, by step. Asserts that no step occurs twice.
    pub(crate) fn metrics(&self, out: &str, kind: &str) -> BTreeMap<u64, serde_json::Value> {
        let text = fs::read_to_string(self.path(out).join("metrics.jsonl")).expect("metrics");
        let mut lines = BTreeMap::new();
        for line in text.lines() {
            let value: serde_json::Value = serde_json::from_str(line).expect(line);
            if value["kind"] == kind {
                let step = value["step"].as_u64().expect(line);
                let before = lines.insert(step, value);
                assert!(before.is_none(), "{kind} {step} is there twice");
            }
        }
        lines
    }

    /// Asserts that `metrics.jsonl` has each step of the run once, with the same numbers as in `reference`.
    pub(crate) fn assert_same_metrics(&self, out: &str, reference: &str) {
        for (kind, keys) in [
            ("step", &["loss", "grad_norm", "lr", "tokens_seen", "attention"][..]),
            ("validation", &["loss", "bits_per_byte"][..]),
        ] {
            let (found, expected) = (self.metrics(out, kind), self.metrics(reference, kind));
            assert!(found.keys().eq(expected.keys()), "{kind}: {found:?}");
            for (step, line) in expected {
                for key in keys {
                    assert_eq!(found[&step][key], line[key], "{kind} {step}: {key}");
                }
            }
        }
        let steps = self.metrics(out, "step");
        assert!(steps.into_keys().eq(1..=STEPS));
    }

    /// Every path below the folder, with the bytes and the time of the last change of each file. Folders, pipes and
    /// devices are listed without these.
    fn snapshot(&self) -> BTreeMap<PathBuf, (Vec<u8>, Option<SystemTime>)> {
        let mut found = BTreeMap::new();
        let mut open = vec![self.path("")];
        while let Some(path) = open.pop() {
            if let Ok(entries) = fs::read_dir(&path) {
                open.extend(entries.map(|entry| entry.expect("readable").path()));
                found.insert(path, (Vec::new(), None));
            } else if path.metadata().is_ok_and(|meta| !meta.is_file()) {
                // Reading from a pipe would wait for a writer.
                found.insert(path, (Vec::new(), None));
            } else if let Ok(bytes) = fs::read(&path) {
                let modified = path.metadata().and_then(|meta| meta.modified()).ok();
                found.insert(path, (bytes, modified));
            }
        }
        found
    }

    /// Calls `refused`, which returns a message, and asserts that no file was made, changed or removed meanwhile.
    pub(crate) fn unchanged(&self, refused: impl FnOnce() -> String) -> String {
        let before = self.snapshot();
        let message = refused();
        let after = self.snapshot();
        let changed: Vec<_> =
            after.iter().filter(|(path, file)| before.get(*path) != Some(*file)).map(|(path, _)| path).collect();
        assert!(changed.is_empty(), "{message}\nchanged {changed:?}");
        assert_eq!(before.len(), after.len(), "{message}\nremoved a file");
        message
    }
}

/// Runs `command`, which must succeed. Returns what it printed.
pub(crate) fn succeed(command: &mut Command) -> String {
    let output = command.output().expect("the program starts");
    let text = text(&output);
    assert!(output.status.success(), "{command:?}: {text}");
    // No progress bar is drawn when the output is not a terminal.
    assert!(!text.contains(['\r', '\u{1b}']), "{text:?}");
    text
}

/// Runs `command`, which must fail with each of `words` in its message and without a panic. Returns the message.
pub(crate) fn refused(command: &mut Command, words: &str) -> String {
    refused_as(command, words, "")
}

/// As [`refused`], with one of the exit codes `codes`, separated by `|`; empty allows any code.
pub(crate) fn refused_as(command: &mut Command, words: &str, codes: &str) -> String {
    let output = command.output().expect("the program starts");
    let text = text(&output);
    assert!(!output.status.success(), "{command:?} went on: {text}");
    let code = output.status.code().expect("it ends by itself");
    let is_wanted = codes.is_empty() || codes.split('|').any(|wanted| wanted == code.to_string());
    assert!(code != 101 && is_wanted, "{command:?} ended with {code}: {text}");
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(message.contains("error"), "{command:?}: {text}");
    for broken in ["panicked", "a bug in Sieve", "unwrap", "RUST_BACKTRACE"] {
        assert!(!text.contains(broken), "{command:?}: {text}");
    }
    words_of(&message, words);
    message
}

/// Asserts that the text contains each of the words, separated by ` | `, and none of those after a `!`.
pub(crate) fn words_of(text: &str, words: &str) {
    for word in words.split(" | ") {
        match word.strip_prefix('!') {
            Some(word) => assert!(!text.contains(word), "{word:?} is in: {text}"),
            None => assert!(text.contains(word), "no {word:?} in: {text}"),
        }
    }
}

/// The JSON object that a command printed; other lines may follow it.
pub(crate) fn json(printed: &str) -> serde_json::Value {
    let object = printed.lines().rev().find(|line| line.starts_with(['{', '[']));
    serde_json::from_str(object.unwrap_or_default()).unwrap_or_else(|e| panic!("{e}: {printed}"))
}

/// Standard output and standard error of a process.
pub(crate) fn text(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

/// Starts `command` with pipes as standard output and standard error.
pub(crate) fn spawned(command: &mut Command) -> Child {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    child.expect("the program starts")
}

/// Waits for a process, which must end with this exit code. Returns its output.
pub(crate) fn ended(child: Child, code: i32) -> Output {
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(code), "{}", text(&output));
    output
}

/// Sends the signal of this name to a process.
pub(crate) fn signal(child: &Child, name: &str) {
    let sent = Command::new("kill").args(["-s", name, &child.id().to_string()]).status().expect("kill starts");
    assert!(sent.success(), "kill -s {name}");
}

/// Waits until `happened` returns true, five minutes at most: other processes may keep the machine busy.
pub(crate) fn wait_until(what: &str, mut happened: impl FnMut() -> bool) {
    let started = Instant::now();
    while !happened() {
        assert!(started.elapsed() < Duration::from_secs(300), "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Path of the program. Builds it first if it is missing or older than its sources.
pub(crate) fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let test = std::env::current_exe().expect("a test has a path");
        let profile = test.ancestors().nth(2).expect("target/<profile>/deps/all");
        let program = profile.join("sieve");
        if !is_fresh(&program) {
            let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
            let mut build = Command::new(cargo);
            build.args(["build", "--bin", "sieve"]);
            // Cargo sets variables for this test's package. Build scripts that read such variables would run again, and
            // everything that depends on them would be built again, now and at the next build from a shell.
            let told = std::env::vars_os().filter(|(name, _)| {
                let name = name.to_string_lossy();
                name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")
            });
            told.for_each(|(name, _)| _ = build.env_remove(name));
            build.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(".."));
            if profile.ends_with("release") {
                build.arg("--release");
            }
            assert!(build.status().expect("cargo starts").success());
        }
        program
    })
}

/// Whether `program` is newer than every source file listed in the `.d` file beside it.
fn is_fresh(program: &Path) -> bool {
    let modified = |path: &Path| path.metadata().and_then(|meta| meta.modified()).ok();
    let Some(built) = modified(program) else {
        return false;
    };
    let Ok(list) = fs::read_to_string(program.with_extension("d")) else {
        return false;
    };
    let sources = list.split_once(": ").map_or("", |(_, sources)| sources);
    sources.split_whitespace().all(|source| modified(Path::new(source)).is_none_or(|changed| changed <= built))
}

/// Sixty documents of simple sentences, about 200 KB; they are the same on every machine.
fn corpus() -> Vec<(String, String)> {
    const SUBJECTS: [&str; 8] =
        ["the cat", "a dog", "my aunt", "the pilot", "some child", "the old king", "a teacher", "nobody"];
    const VERBS: [&str; 8] = ["sees", "follows", "paints", "forgets", "likes", "draws", "finds", "carries"];
    const OBJECTS: [&str; 8] = [
        "the river",
        "a red apple",
        "seven stones",
        "the long road",
        "her letter",
        "an empty house",
        "the moon",
        "two birds",
    ];
    let mut random = ChaCha8Rng::seed_from_u64(17);
    let mut pick = |words: &[&'static str; 8]| words[random.next_u32() as usize % words.len()];
    let mut document = |number: usize| {
        let num_sentences = 10 + 7 * (number % 30);
        (0..num_sentences)
            .map(|_| format!("{} {} {}.\n", pick(&SUBJECTS), pick(&VERBS), pick(&OBJECTS)))
            .collect::<String>()
    };
    (0..60).map(|number| (format!("{number:02}.txt"), document(number))).collect()
}

fn recipe(attention: &str) -> String {
    format!(
        r#"
[model]
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
tie_word_embeddings = true
max_position_embeddings = 64

[attention]
{attention}

[tokenizer]
train = {{ vocab_size = 300, sample_bytes = 100_000 }}

[data]
paths = ["corpus/*.txt"]
validation_fraction = 0.1

[training]
steps = {STEPS}
seq_len = 32
local_batch_size = 4
global_batch_size = 8
max_norm = 1.0
seed = 3

[optimizer]
lr = 1e-2
beta2 = 0.95
weight_decay = 0.1

[lr_scheduler]
warmup_steps = 4
decay_ratio = 0.25

[checkpoint]
interval = {INTERVAL}
keep_latest_k = 3

[metrics]
log_freq = 1

[validation]
interval = 10
tokens = 256
"#
    )
}
