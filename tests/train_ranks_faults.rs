//! What a person reads where several processes cannot train together, or one of them is lost.
use crate::tiny_run::{TinyRun, ended, refused, signal, spawned, succeed, text, wait_until};
use crate::train_ranks::{UNTIED, started};
use sieve_comm::HeldPort;
use sieve_testing::says;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// More steps than anybody waits for.
pub(crate) const LONG: &str = "--set training.steps=1000000 --set checkpoint.interval=1000000";

/// The processes that a process has started.
fn children_of(id: u32) -> Vec<u32> {
    let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).expect("Linux");
    let children = children.split_whitespace();
    children.map(|id| id.parse().expect("a number")).collect()
}

/// The process of each rank that a launcher has started.
pub(crate) fn ranks_of(launcher: u32) -> Vec<u32> {
    // One that has just ended has no environment any more.
    let mut found = children_of(launcher)
        .into_iter()
        .filter_map(|id| {
            let environment = fs::read(format!("/proc/{id}/environ")).ok()?;
            let environment = String::from_utf8_lossy(&environment).into_owned();
            let mut variables = environment.split('\0');
            let rank = variables.find_map(|variable| variable.strip_prefix("RANK="))?;
            Some((rank.parse().ok()?, id))
        })
        .collect::<Vec<(usize, u32)>>();
    found.sort_unstable();
    found.into_iter().map(|(_, id)| id).collect()
}

pub(crate) fn is_there(id: u32) -> bool {
    // One that has ended and was not asked for is there with no command line.
    let line = fs::read(Path::new("/proc").join(id.to_string()).join("cmdline"));
    line.is_ok_and(|line| !line.is_empty())
}

pub(crate) fn send(signal: &str, id: u32) {
    let sent = Command::new("kill").args(["-s", signal, &id.to_string()]).status();
    assert!(sent.expect("kill starts").success());
}

#[test]
fn a_rank_that_is_killed_ends_the_job_with_one_plain_line() {
    let tiny = TinyRun::dma();
    // SIGBUS: a mapped file got shorter.
    for (rank, name, signal) in [
        (0, "KILL", "9, which"),
        (1, "KILL", "9, which"),
        (1, "BUS", "7: a file"),
    ] {
        let out = format!("killed-{rank}-{name}");
        let child = started(&mut tiny.launch(2, &out, LONG), 3);
        let ranks = ranks_of(child.id());
        let since = Instant::now();
        send(name, ranks[rank]);
        if name == "BUS" {
            // Rust's handler, which looks for stack overflows, returns from the first: a fault would come again.
            std::thread::sleep(Duration::from_millis(100));
            send(name, ranks[rank]);
        }
        let output = ended(child, 75);
        assert!(since.elapsed() < Duration::from_secs(10), "{:?}", since.elapsed());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let lines = said.lines().collect::<Vec<_>>();
        let [line, hint] = lines[..] else {
            panic!("{said}");
        };
        let first = format!("error: rank {rank} (pid {}) was ended by signal {signal}", ranks[rank]);
        assert!(line.starts_with(&first) && hint.contains("--resume"), "{said}");
        assert!(!ranks.into_iter().any(is_there));
    }
}

#[test]
fn without_a_launcher_a_lost_rank_is_named_by_another() {
    let tiny = TinyRun::dma();
    for lost in [0, 1] {
        let port = held_port();
        let out = format!("lost-{lost}");
        let second = spawned(&mut rank_of(&tiny, 1, &port, &out, LONG));
        let first = started(&mut rank_of(&tiny, 0, &port, &out, LONG), 3);
        let (lost_child, left) = if lost == 0 { (first, second) } else { (second, first) };
        send("KILL", lost_child.id());
        let output = left.wait_with_output().expect("it ends");
        lost_child.wait_with_output().expect("it ended");
        assert_eq!(output.status.code(), Some(75), "{}", text(&output));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            said.contains(&format!("error: rank {lost} (")) && said.contains("ended"),
            "{said}"
        );
        assert!(said.contains("--resume"), "{said}");
    }
}

#[test]
fn the_processes_of_a_launcher_that_is_killed_stop_with_a_checkpoint() {
    let tiny = TinyRun::dma();
    let mut child = started(&mut tiny.launch(2, "run", LONG), 3);
    let ranks = ranks_of(child.id());
    assert_eq!(ranks.len(), 2);
    child.kill().expect("SIGKILL is sent");
    child.wait().expect("it ends");
    wait_until("the ranks end", || !ranks.iter().any(|&id| is_there(id)));
    let found = sieve_hf::list_checkpoints(&tiny.path("run/checkpoint")).expect("a folder");
    assert_eq!(found.len(), 1, "{found:?}");
}

/// A program in a terminal of its own.
struct Terminal {
    child: Child,
    shown: Box<dyn Iterator<Item = String>>,
}

impl Terminal {
    /// Runs `command` there until it has shown the third step.
    fn open(command: &Command) -> Self {
        let words = [command.get_program()].into_iter().chain(command.get_args());
        let words = words.map(|word| word.to_str().expect("text"));
        let line = format!("exec {}", words.collect::<Vec<_>>().join(" "));
        let child = Command::new("script")
            .args(["--quiet", "--return", "--command", &line, "/dev/null"])
            .current_dir(command.get_current_dir().expect("a folder"))
            .env("SHELL", "/bin/sh")
            .env("RAYON_NUM_THREADS", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut child = child.expect("script of util-linux starts");
        let shown = BufReader::new(child.stdout.take().expect("piped"));
        let mut this = Self {
            child,
            shown: Box::new(shown.lines().map_while(Result::ok)),
        };
        this.wait_for("step:     3 ");
        this
    }

    fn wait_for(&mut self, words: &str) {
        // A bar that is drawn again and again may stand before them.
        assert!(self.shown.any(|line| line.contains(words)), "{words}");
    }

    /// Types Ctrl-C.
    fn interrupt(&mut self) {
        let keys = self.child.stdin.as_mut().expect("piped");
        keys.write_all(b"\x03").expect("it reads");
    }

    /// The exit code of the program.
    fn code(mut self) -> Option<i32> {
        self.shown.for_each(drop);
        self.child.wait().expect("it ends").code()
    }
}

#[test]
fn ctrl_c_in_a_terminal_reaches_each_rank_once() {
    let tiny = TinyRun::dma();
    let mut terminal = Terminal::open(&tiny.launch(2, "run", LONG));
    terminal.interrupt();
    // A second signal would end a rank with 130, before there is a checkpoint.
    assert_eq!(terminal.code(), Some(75));
    let log = tiny.read("run/log");
    assert_eq!(log.matches("stopped at step ").count(), 1, "{log}");
    let found = sieve_hf::list_checkpoints(&tiny.path("run/checkpoint")).expect("a folder");
    assert_eq!(found.len(), 1, "{found:?}");

    // Rank 1 stands still, so that no step ends between the first Ctrl-C and the second.
    let mut terminal = Terminal::open(&tiny.launch(2, "twice", LONG));
    let [launcher] = children_of(terminal.child.id())[..] else {
        panic!("one launcher");
    };
    let ranks = ranks_of(launcher);
    send("STOP", ranks[1]);
    terminal.interrupt();
    terminal.wait_for("stopping after this step");
    terminal.interrupt();
    wait_until("rank 0 ends", || !is_there(ranks[0]));
    send("CONT", ranks[1]);
    assert_eq!(terminal.code(), Some(130));
    assert!(!tiny.path("twice/checkpoint").exists());
}

#[test]
fn a_signal_to_one_rank_stops_all_of_them() {
    let tiny = TinyRun::dma();
    let child = started(&mut tiny.launch(2, "run", &format!("{UNTIED} {LONG}")), 3);
    send("TERM", ranks_of(child.id())[1]);
    ended(child, 75);
}

fn held_port() -> HeldPort {
    HeldPort::take().expect("a port")
}

/// One of two ranks that torchrun starts.
fn rank_of(tiny: &TinyRun, rank: usize, port: &HeldPort, out: &str, more: &str) -> Command {
    let mut command = tiny.train(out, more);
    torchrun(&mut command, rank, port);
    command
}

/// Sets what torchrun sets for one of two ranks.
fn torchrun(command: &mut Command, rank: usize, port: &HeldPort) {
    let number = rank.to_string();
    command
        .env("RANK", &number)
        .env("LOCAL_RANK", &number)
        .env("WORLD_SIZE", "2")
        .env("LOCAL_WORLD_SIZE", "2")
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", port.number().to_string());
}

/// Asserts that `command` refuses with one error of these words.
pub(crate) fn refuses_once(command: &mut Command, words: &[&str]) {
    let message = refused(command, &words.join(" | "));
    assert_eq!(message.matches("error:").count(), 1, "{message}");
}

#[test]
fn a_port_that_is_taken_is_named() {
    let tiny = TinyRun::dma();
    let port = held_port();
    let address = format!("127.0.0.1:{}", port.number());
    let _taken = TcpListener::bind(&address).expect("it is held");
    let mut command = rank_of(&tiny, 0, &port, "run", "");
    refuses_once(&mut command, &[&address, "MASTER_PORT"]);
}

#[test]
fn a_host_that_nobody_knows_is_named() {
    let tiny = TinyRun::dma();
    let mut command = rank_of(&tiny, 1, &held_port(), "run", "--patience 1");
    command.env("MASTER_ADDR", "no-such-host.invalid");
    let words = ["rank 1", "no-such-host.invalid", "--master"];
    refuses_once(&mut command, &words);
}

#[test]
fn a_folder_that_not_all_processes_share_is_refused() {
    let tiny = TinyRun::dma();
    let port = held_port();
    let other = spawned(&mut rank_of(&tiny, 1, &port, "elsewhere", ""));
    let mut first = rank_of(&tiny, 0, &port, "run", "");
    refuses_once(&mut first, &["rank 1", "does not see", "elsewhere", "--out"]);
    let output = other.wait_with_output().expect("it ends");
    assert!(!output.status.success());
    assert!(!tiny.path("run/shared.tmp").exists());
}

#[test]
fn variables_of_a_group_that_are_set_in_part_are_named() {
    let tiny = TinyRun::dma();
    for missing in ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
        let mut command = rank_of(&tiny, 0, &held_port(), "run", "");
        refuses_once(command.env_remove(missing), &[&format!("{missing} is not")]);
    }
}

#[test]
fn ranks_with_other_recipes_end_by_the_key_that_differs() {
    let tiny = TinyRun::dma();
    let port = held_port();
    let rank = |rank: usize, more: &str| rank_of(&tiny, rank, &port, "run", more);
    let second = spawned(&mut rank(1, "--set training.seed=4"));
    refuses_once(&mut rank(0, ""), &["rank 1", "another recipe", "training.seed"]);
    assert_eq!(text(&ended(second, 1)), "");
}

#[test]
fn an_error_of_one_rank_alone_is_told_with_its_number() {
    let tiny = TinyRun::dma();
    let port = held_port();
    let rank = |rank: usize, device: &str| {
        let mut command = tiny.sieve(&format!("train --recipe tiny.toml --out run --device {device}"));
        torchrun(command.env("CUDA_VISIBLE_DEVICES", ""), rank, &port);
        command
    };
    let second = spawned(&mut rank(1, "cuda"));
    refuses_once(&mut rank(0, "cpu"), &["rank 1 (", "CUDA"]);
    assert_eq!(text(&second.wait_with_output().expect("it ends")), "");
}

#[test]
fn a_disk_that_is_full_for_one_rank_loses_no_checkpoint() {
    let tiny = TinyRun::dma();
    let more = "--set checkpoint.keep_latest_k=0 --set training.steps=8 --checkpoint-patience 0";
    succeed(&mut tiny.launch(2, "reference", more));
    let part = "model-00002-of-00002.safetensors";
    let written = tiny.path(&format!("reference/checkpoint/step-8/{part}"));
    // Half of its part fits; the shell counts blocks of 512 bytes.
    let blocks = std::fs::metadata(written).expect("a part").len() / 1024;
    let limit = format!("ulimit -f {blocks}; exec \"$0\" \"$@\"");
    let port = held_port();
    let mut full = Command::new("sh");
    let own = tiny.train("run", more);
    full.arg("-c").arg(limit).arg(own.get_program()).args(own.get_args());
    full.current_dir(tiny.path("")).env("RAYON_NUM_THREADS", "2");
    torchrun(&mut full, 1, &port);
    let full = spawned(&mut full);
    let first = spawned(&mut rank_of(&tiny, 0, &port, "run", more));
    // Both go on to the last step, and end with the code of those who are to be started again.
    let said = text(&ended(first, 75));
    says(&said, "warning: no checkpoint at step 4: rank 1: | training continues");
    let words = format!("no checkpoint of step 8 can be written: rank 1: | {part} | File too large | make room");
    says(&said, &words);
    assert_eq!(text(&ended(full, 75)), "");
    assert_eq!(tiny.names("run/checkpoint"), [""; 0]);
    // With room the same command goes on, here from the beginning.
    succeed(&mut tiny.launch(2, "run", &format!("{more} --resume=auto")));
    assert!(tiny.path("run/checkpoint/step-8").is_dir());
}

#[test]
fn a_rank_that_stands_still_ends_the_job_with_one_plain_line() {
    let tiny = TinyRun::dma();
    for rank in [0, 1] {
        let out = format!("still-{rank}");
        let more = format!("{LONG} --patience 3");
        let child = started(&mut tiny.launch(2, &out, &more), 3);
        let ranks = ranks_of(child.id());
        let id = ranks[rank].to_string();
        send("STOP", ranks[rank]);
        let since = Instant::now();
        let output = ended(child, 75);
        assert!(since.elapsed() < Duration::from_secs(20), "{:?}", since.elapsed());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let lines = said.lines().collect::<Vec<_>>();
        // What rank 1 says carries its number.
        assert!(lines.len() == 2 && lines[1].contains("--resume"), "{said}");
        let words = format!("error: no sign of rank {rank} (");
        assert!(lines[0].contains(&words) && lines[0].contains(&id), "{said}");
        assert!(!ranks.into_iter().any(is_there));
    }
}

#[test]
fn a_lost_rank_is_started_again_and_the_run_ends_as_if_nothing_had_been() {
    let tiny = TinyRun::dma();
    tiny.trained("reference", UNTIED);
    let mut command = tiny.sieve(&format!(
        "launch --nproc 2 --max-restarts 1 -- train --recipe tiny.toml --device cpu --out run {UNTIED}"
    ));
    let child = started(&mut command, 14);
    send("KILL", ranks_of(child.id())[1]);
    let output = ended(child, 0);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("start 1 of 1 after a lost process"), "{said}");
    tiny.assert_same_end("run", "reference");
    // The restarts are used up.
    let mut command = tiny.sieve(&format!(
        "launch --nproc 2 --max-restarts 1 -- train --recipe tiny.toml --device cpu --out other {LONG}"
    ));
    let child = started(&mut command, 3);
    send("KILL", ranks_of(child.id())[0]);
    // The killed process may or may not have logged its third step.
    let log = tiny.path("other/log");
    let logged = || fs::read_to_string(&log).map_or(0, |log| log.matches("step:     3 ").count());
    let before = logged();
    wait_until("the second start", || ranks_of(child.id()).len() == 2);
    // Asked to stop, it does not start again.
    wait_until("its first step", || logged() > before);
    signal(&child, "TERM");
    ended(child, 75);
    // Nor where a rank alone is asked, and all stop with a checkpoint.
    let mut command = tiny.sieve(&format!(
        "launch --nproc 2 --max-restarts 1 -- train --recipe tiny.toml --device cpu --out asked {LONG}"
    ));
    let child = started(&mut command, 3);
    send("TERM", ranks_of(child.id())[1]);
    let said = String::from_utf8_lossy(&ended(child, 75).stderr).into_owned();
    assert!(!said.contains("after a lost process"), "{said}");
}

#[test]
fn two_launchers_are_one_job_of_two_hosts() {
    let tiny = TinyRun::dma();
    tiny.trained("reference", UNTIED);
    let port = held_port();
    let master = format!("127.0.0.1:{}", port.number());
    let host = |rank: usize| {
        let mut command = tiny.sieve(&format!(
            "launch --nproc 1 --nnodes 2 --node-rank {rank} --master {master} -- train --recipe tiny.toml --device \
             cpu --out run {UNTIED}"
        ));
        spawned(&mut command)
    };
    for host in [host(1), host(0)] {
        ended(host, 0);
    }
    tiny.assert_same_end("run", "reference");
    for (words, what) in [
        ("--nnodes 2 --node-rank 0", "--master"),
        ("--nnodes 2 --master a:1", "--node-rank"),
        ("--nnodes 2 --node-rank 2 --master a:1", "not a host of 2"),
        ("--nnodes 2 --node-rank 0 --master a:b", "no port"),
        ("--nnodes 2 --node-rank 0 --master a:1 --max-restarts 1", "one host"),
    ] {
        let mut command = tiny.sieve(&format!("launch --nproc 1 {words} -- train --recipe tiny.toml"));
        refuses_once(&mut command, &[what]);
    }
}
