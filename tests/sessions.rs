//! Tests as shell sessions: commands that start the program, and what they must print. The sessions are in
//! `sessions/*.txt`.
//!
//! ```text
//! == name                               a session, in a folder of its own with a corpus and `tiny.toml`
//! with kind = "mha"                     the recipe's attention, `; ` between two lines; with several such lines the
//!                                       session runs once with each
//! uses NAME                             further files in the folder, see `prepare`
//! NAME=value                            a shell variable in all later commands
//! $ train run --set training.steps=8    a shell command, which must succeed; `\` at its end continues it
//!   bits per byte | !step:              words that its output must contain, and (after `!`) must not contain
//!   = text                              the whole standard output, without white space at its ends
//!   .loss < 3                           a value of the printed JSON, see `compare`
//! $ sieve generate
//!   2: --checkpoint                     the command must fail: its exit code, words of its message; no file may change
//!   1w: is damaged                      as above, but files may change
//! each sieve eval ruler _ --json        begins a table of commands that must fail: each row's text before ` => `
//!   --tasks passky => no task           replaces `_`, or is appended
//! @same run reference                   an assertion of `TinyRun`, see `assertion`
//! ```
//!
//! `\n` in words means a line break. `SIEVE_TEST_SESSION=name` runs the session of that name alone.
use crate::tiny_run::{TinyRun, program, refused_as, words_of};
use serde_json::Value;
use sieve_comm::ReservedPort;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

macro_rules! sessions {
    ($($file:ident)+) => {
        $(#[test]
        fn $file() {
            run(stringify!($file));
        })+

        #[test]
        fn every_file_of_sessions_is_run() {
            let files = fs::read_dir(folder()).expect("a folder");
            let paths = files.map(|file| file.expect("readable").path());
            let texts = paths.filter(|path| path.extension().is_some_and(|ending| ending == "txt"));
            assert_eq!(texts.count(), [$(stringify!($file)),+].len());
        }
    };
}

sessions! { begin chat command_line daily data eval kernels memory mistakes newcomer next ranks resume selectors
stages train wrong_inputs }

/// A command or an assertion, with the expectations below it.
struct Step {
    place: String,
    line: String,
    expected: Vec<String>,
}

#[derive(Default)]
struct Session {
    name: String,
    kinds: Vec<String>,
    uses: Vec<String>,
    steps: Vec<Step>,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("sessions")
}

/// Parses the sessions of a file. Each row of an `each` block becomes a command. A shell variable is written before
/// every later command.
fn read(file: &str) -> Vec<Session> {
    let text = fs::read_to_string(folder().join(format!("{file}.txt"))).expect("it is listed");
    // A continued line becomes one line whose breaks are marked, so that the line numbers still count.
    let text = text.replace("\\\n", "\u{1}");
    let (mut sessions, mut variables, mut rows, mut number) = (Vec::<Session>::new(), String::new(), None::<String>, 1);
    for line in text.lines() {
        let place = format!("sessions/{file}.txt:{number}");
        number += 1 + line.matches('\u{1}').count();
        let pieces = line.split('\u{1}').enumerate();
        let pieces = pieces.map(|(at, piece)| if at == 0 { piece } else { piece.trim_start() });
        let line = pieces.collect::<String>();
        if let Some(name) = line.strip_prefix("== ") {
            variables.clear();
            sessions.push(Session { name: name.to_owned(), ..Session::default() });
            continue;
        }
        let Some(session) = sessions.last_mut() else { continue };
        if let Some(expected) = line.strip_prefix("  ") {
            let expected = expected.trim().replace("\\n", "\n");
            match &rows {
                Some(prefix) => {
                    let (row, words) = expected.split_once("=> ").expect(&place);
                    let command =
                        if prefix.contains("_ ") { prefix.replacen('_', row, 1) } else { format!("{prefix} {row}") };
                    let words = match refusal(words) {
                        Some(_) => words.to_owned(),
                        None => format!("1|2: {words}"),
                    };
                    let line = format!("{variables}{command}");
                    session.steps.push(Step { place, line, expected: vec![words] });
                }
                None => session.steps.last_mut().expect(&place).expected.push(expected),
            }
        } else if let Some(kind) = line.strip_prefix("with ") {
            session.kinds.push(kind.replace("; ", "\n"));
        } else if let Some(name) = line.strip_prefix("uses ") {
            session.uses.push(name.to_owned());
        } else if let Some(prefix) = line.strip_prefix("each ") {
            rows = Some(prefix.to_owned());
        } else if line.starts_with(['$', '@']) {
            rows = None;
            let line = match line.strip_prefix("$ ") {
                Some(command) => format!("{variables}{command}"),
                None => line,
            };
            session.steps.push(Step { place, line, expected: Vec::new() });
        } else if line.split_once('=').is_some_and(|(name, _)| !name.trim_start_matches("export ").contains(' ')) {
            variables += &format!("{line}\n");
        } else {
            assert!(line.is_empty() || line.starts_with('#'), "{place}: {line}");
        }
    }
    sessions
}

/// On a panic, prints the place in the session's file.
struct Failing<'a>(&'a str);

impl Drop for Failing<'_> {
    #[expect(clippy::print_stderr, reason = "a test that fails shows what it printed")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.0);
        }
    }
}

/// Runs the sessions of a file, each once for every kind of attention that it names.
fn run(file: &str) {
    let only = std::env::var("SIEVE_TEST_SESSION").ok();
    let usual = vec![
        "kind = \"dma\"\nkeep_window_size = 8\na_init = 0.5\nrecency = \"none\"\nlocal_window_size = 0".to_owned(),
    ];
    let (sessions, mut failed) = (read(file), Vec::new());
    for session in &sessions {
        if only.as_ref().is_some_and(|only| *only != session.name) {
            continue;
        }
        let kinds = if session.kinds.is_empty() { &usual } else { &session.kinds };
        for kind in kinds {
            // One failed session does not stop the others.
            if std::panic::catch_unwind(|| run_session(session, kind)).is_err() {
                failed.push((&session.name, kind));
            }
        }
    }
    assert!(failed.is_empty(), "failed: {failed:?}");
}

/// Runs a session in a folder of its own, whose recipe has the attention `kind`.
fn run_session(session: &Session, kind: &str) {
    // Reserved, so that no other process gets this port meanwhile.
    let port = ReservedPort::take().expect("a port");
    let tiny = TinyRun::new(kind);
    session.uses.iter().for_each(|name| prepare(&tiny, name));
    let mut values = BTreeMap::new();
    for step in &session.steps {
        let _failing = Failing(&step.place);
        match step.line.strip_prefix('@') {
            Some(words) => assertion(&tiny, words),
            None => command(&tiny, step, &port, &mut values),
        }
    }
}

/// Splits a refusal into its exit code and the words of its message.
fn refusal(expected: &str) -> Option<(&str, &str)> {
    let (code, words) = expected.split_once(": ")?;
    let is_code = |code: &str| code.parse::<u8>().is_ok();
    let mut codes = code.trim_end_matches('w').split('|');
    codes.all(is_code).then_some((code, words))
}

fn prepare(tiny: &TinyRun, name: &str) {
    match name {
        "formats" => crate::data_commands::formats(tiny),
        "mixture" => crate::data_commands::mixture(tiny),
        "random_run" => crate::tasks_cli::random_run_in(tiny, crate::tasks_cli::DENSE),
        "words" => crate::words_model::write(tiny),
        _ => panic!("nothing is called {name}"),
    }
}

/// Checks the assertion of a line that begins with `@`; `words` stand behind it.
fn assertion(tiny: &TinyRun, words: &str) {
    let number = |word: &str| word.parse::<u64>().expect("a step");
    match words.split(' ').collect::<Vec<_>>()[..] {
        ["same", out, reference] => tiny.assert_same_end(out, reference),
        ["same", out, reference, step] => tiny.assert_same_at(out, reference, number(step)),
        ["same_metrics", out, reference] => tiny.assert_same_metrics(out, reference),
        ["steps", out, first, last] => {
            let steps = tiny.metrics(out, "step").into_keys();
            assert!(steps.eq(number(first)..=number(last)), "{words}");
        }
        ["equal", out, reference, kind, ref keys @ ..] => {
            let expected = tiny.metrics(reference, kind);
            for (step, line) in tiny.metrics(out, kind) {
                keys.iter().for_each(|&key| assert_eq!(line[key], expected[&step][key], "{words}: {step}"));
            }
        }
        // `near OUT REFERENCE KIND:FIRST-LAST DIFFERENCE KEY…`: these keys of the metrics differ by at most this
        // relative difference, and the tokens seen are equal.
        ["near", out, reference, kind, most, ref keys @ ..] => {
            let (kind, steps) = kind.split_once(':').unwrap_or((kind, "0-1000"));
            let (first, last) = steps.split_once('-').expect(words);
            let (found, expected) = (tiny.metrics(out, kind), tiny.metrics(reference, kind));
            let most = most.parse().expect("a number");
            let mut lines = found.range(number(first)..=number(last)).peekable();
            assert!(lines.peek().is_some(), "{words}");
            for (step, line) in lines {
                assert_near(line, &expected[step], keys, most);
                assert_eq!(line["tokens_seen"], expected[step]["tokens_seen"], "{words}: {step}");
            }
        }
        ["moments", out, reference] => assert_same_moments(tiny, out, reference),
        _ => panic!("no assertion: {words}"),
    }
}

/// Asserts that AdamW's first moments after one step (a tenth of the clipped gradients) equal the moments of a run by
/// one process, up to a share of each tensor's norm.
fn assert_same_moments(tiny: &TinyRun, out: &str, reference: &str) {
    let [found, expected] = [out, reference].map(|out| {
        let mut tensors = tiny.checkpoint_like(out, reference, 1);
        tensors.retain(|name, _| name.ends_with(".exp_avg"));
        tensors
    });
    assert!(expected.len() > 10 && found.keys().eq(expected.keys()), "{out}");
    for (name, expected) in &expected {
        let [found, expected] = [&found[name], expected].map(|bytes| {
            let values = bytes.as_chunks().0.iter();
            let values = values.map(|&bytes| f64::from(f32::from_le_bytes(bytes)));
            values.collect::<Vec<_>>()
        });
        let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
        let apart = norm(&mut found.iter().zip(&expected).map(|(a, b)| a - b));
        let norm = norm(&mut expected.iter().copied());
        assert!(apart <= 1e-5 * norm + 1e-12, "{out} {name}: {apart} of {norm}");
    }
}

/// Asserts that numbers of two reports are equal up to a relative difference.
fn assert_near(found: &Value, expected: &Value, keys: &[&str], most: f64) {
    for key in keys {
        let [found, expected] = [found, expected].map(|line| line[key].as_f64());
        let (Some(found), Some(expected)) = (found, expected) else {
            assert_eq!(found, expected, "{key}");
            continue;
        };
        let apart = (found / expected - 1.0).abs();
        assert!(apart < most, "{key} {found}, {expected}");
    }
}

/// Runs the shell command of a step. It must print what the step expects, or be refused as the step says. `values` are
/// the numbers that earlier steps of the session stored.
fn command(tiny: &TinyRun, step: &Step, port: &ReservedPort, values: &mut BTreeMap<String, Value>) {
    let mut shell = Command::new("sh");
    let mut path = program().parent().expect("a folder").as_os_str().to_owned();
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap_or_default());
    shell
        .args(["-c", &format!(". {}/prelude.sh\n{}", folder().display(), step.line)])
        .current_dir(tiny.path(""))
        .env("PATH", path)
        .env("ROOT", concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
        .env("PORT", port.number().to_string())
        .env("RAYON_NUM_THREADS", "2")
        .stdin(Stdio::null());
    if let [only] = &step.expected[..]
        && let Some((code, words)) = refusal(only)
    {
        match code.strip_suffix('w') {
            Some(code) => refused_as(&mut shell, words, code),
            None => tiny.unchanged(|| refused_as(&mut shell, words, code)),
        };
        return;
    }
    let output = shell.output().expect("sh starts");
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let all = printed.clone() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {all}", step.line);
    // No progress bar is drawn when the output is not a terminal.
    assert!(!all.contains(['\r', '\u{1b}']), "{all:?}");
    for expected in &step.expected {
        if let Some(whole) = expected.strip_prefix("= ") {
            assert_eq!(printed.trim(), whole);
        } else if expected.starts_with('.') {
            let last = || all.lines().rev().find(|line| line.starts_with(['{', '[']));
            let json = serde_json::from_str(&printed).or_else(|_| serde_json::from_str(last().unwrap_or_default()));
            compare(&json.unwrap_or_else(|error| panic!("{error}: {all}")), expected, values);
        } else {
            words_of(&all, expected);
        }
    }
}

/// Checks `PATH OPERATOR VALUE` of a JSON value. A path consists of keys and indices; `*` means every item of a list,
/// `#` the list's length. A value is JSON, or `$name` (which `PATH as name` has stored) with an optional `+`, `-` or
/// `*` and a number. `~ VALUE DIFFERENCE` means equal up to a difference, `differs` the opposite, and `has` looks for a
/// part of a text.
fn compare(json: &Value, expected: &str, values: &mut BTreeMap<String, Value>) {
    let (path, rest) = expected.split_once(' ').expect(expected);
    let (operator, value) = rest.split_once(' ').expect(expected);
    let mut found = vec![json.clone()];
    for part in path.split('.').filter(|part| !part.is_empty()) {
        let inside = |value: Value| match part {
            "*" => value.as_array().cloned().unwrap_or_default(),
            "#" => vec![value.as_array().map(Vec::len).or(value.as_object().map(|it| it.len())).into()],
            _ => vec![part.parse::<usize>().map_or(value[part].clone(), |at| value[at].clone())],
        };
        found = found.into_iter().flat_map(inside).collect();
    }
    assert!(!found.is_empty(), "{expected}: {json}");
    if operator == "as" {
        values.insert(value.to_owned(), found[0].clone());
        return;
    }
    let known = |word: &str| -> Value {
        let Some(name) = word.strip_prefix('$') else {
            return serde_json::from_str(word).unwrap_or_else(|error| panic!("{word}: {error}"));
        };
        let Some(at) = name.find(['+', '-', '*']) else {
            return values[name].clone();
        };
        let (left, right) = (values[&name[..at]].as_f64(), name[at + 1..].parse::<f64>());
        let (left, right) = (left.expect(name), right.expect(name));
        Value::from(match &name[at..=at] {
            "+" => left + right,
            "-" => left - right,
            _ => left * right,
        })
    };
    for found in found {
        let number = || found.as_f64().unwrap_or_else(|| panic!("{expected}: {found} in {json}"));
        let other = || known(value).as_f64().expect(expected);
        let is_so = match operator {
            "=" => found == known(value) || found.as_f64().is_some_and(|it| Some(it) == known(value).as_f64()),
            "!=" => found != known(value),
            "<" => number() < other(),
            ">" => number() > other(),
            "<=" => number() <= other(),
            ">=" => number() >= other(),
            "has" => found.to_string().contains(value),
            "~" | "differs" => {
                let (value, most) = value.split_once(' ').expect(expected);
                let apart = (number() - known(value).as_f64().expect(expected)).abs();
                let most = most.parse().expect(expected);
                if operator == "~" { apart <= most } else { apart > most }
            }
            _ => panic!("{expected}: no operator"),
        };
        assert!(is_so, "{expected}: {found} in {json}");
    }
}
