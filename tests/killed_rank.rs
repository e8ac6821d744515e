//! A process that is one rank of a run, and is killed by `kill -9` when it is at a known place.
use crate::tiny_run::{TinyRun, wait_until};
use std::fs;
use std::io::Read;
use std::process::{Child, Command, Stdio};

/// Environment variable with the arguments of the process, one on each line: the run's folder, its output folder, and
/// what the test has beside them.
const TOLD: &str = "SIEVE_TEST_KILLED_RANK";

/// The arguments of the process that is killed, asked for inside that process.
pub(crate) fn told() -> Vec<String> {
    let told = std::env::var(TOLD).expect("the test that started this process has set it");
    told.lines().map(str::to_owned).collect()
}

/// Called inside the process that is killed: creates a file by which the test knows that the process is at its place,
/// then waits to be killed.
pub(crate) fn wait_for_the_end() {
    let [folder, out, ..] = &told()[..] else {
        panic!("{TOLD}");
    };
    fs::write(format!("{folder}/{out}.there"), "").expect("written");
    // Standard input ends if the test ends first.
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    std::process::exit(1);
}

/// Starts the process: the ignored test `own_name`, for the run in `out`, with `more` arguments.
pub(crate) fn start(tiny: &TinyRun, own_name: &str, out: &str, more: &[String]) -> Child {
    let told = [&[tiny.path("").display().to_string(), out.to_owned()], more].concat().join("\n");
    let mut command = Command::new(std::env::current_exe().expect("a test has a path"));
    command.args(["--exact", own_name, "--ignored"]).env(TOLD, told);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("it starts")
}

/// Kills the process when it is at its place. Until then it must run, and `others_run` must hold.
pub(crate) fn kill_at_its_place(mut process: Child, tiny: &TinyRun, out: &str, others_run: impl Fn() -> bool) {
    let there = tiny.path(&format!("{out}.there"));
    wait_until(out, || {
        let ended = process.try_wait().expect("a child");
        assert_eq!(ended, None, "{out}: the rank ended before it was killed");
        assert!(others_run(), "{out}: another rank ended before that");
        there.exists()
    });
    process.kill().expect("SIGKILL is sent");
    process.wait().expect("it ends");
}
