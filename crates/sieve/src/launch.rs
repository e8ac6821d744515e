//! `sieve launch`: starts several processes on this host that train one model, possibly together with other hosts.
use anyhow::{Context, Result, bail};
use clap::Args;
use sieve_comm::ReservedPort;
use sieve_host::environment::{LAUNCHED, variable};
use sieve_host::exit::Exit;
use sieve_host::interrupt::{Asked, Signals, respect_nohup};
use sieve_host::terminal;
use std::hash::{BuildHasher, RandomState};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Time between two checks whether processes have ended.
const POLL: Duration = Duration::from_millis(20);
/// After one process has failed, the others have this long to print their messages and end; then they are killed.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(15);
/// After all ranks but one have ended because they lost that one, it has this long to end; then it is killed.
const LAST_RANK_TIMEOUT: Duration = Duration::from_secs(3);
const STOPPED_EARLY: i32 = Exit::StoppedEarly.code();
const OTHER_LOST: i32 = Exit::OtherLost.code();
const INTERRUPTED: i32 = Exit::Interrupted.code();
const USAGE: i32 = Exit::Usage.code();
/// Port of rank 0 of a run on several hosts, if none is given.
const DEFAULT_PORT: u16 = 29_500;

/// Arguments of `sieve launch`.
#[derive(Args, Debug)]
pub(crate) struct LaunchArgs {
    /// Processes on this host, one for each GPU
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    nproc: u16,
    /// Port on which rank 0 listens; a free one when absent
    #[arg(long, conflicts_with = "master", value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,
    /// Hosts that take part, each with its own sieve launch; PET_NNODES or 1 when absent
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    nnodes: Option<u16>,
    /// Number of this host, from 0; PET_NODE_RANK or JOB_COMPLETION_INDEX when absent
    #[arg(long, value_name = "R")]
    node_rank: Option<u16>,
    /// Where rank 0 of several hosts listens; PET_MASTER_ADDR and PET_MASTER_PORT when absent, port 29500 when none is
    /// named
    #[arg(long, value_name = "HOST[:PORT]")]
    master: Option<String>,
    /// How often the processes are restarted with --resume=auto after one of them is lost; on one host
    #[arg(long, value_name = "N", default_value_t = 0)]
    max_restarts: u32,
    /// What each process runs: train, generate or eval ppl and its arguments, with or without -- before them
    #[arg(trailing_var_arg = true, required = true, value_name = "train …")]
    pub(crate) command: Vec<String>,
}

/// The process of one rank, and its exit status once it has ended.
struct Rank {
    child: Child,
    status: Option<ExitStatus>,
}

/// Which of the job's hosts this is, and how its processes find rank 0.
struct Place {
    nnodes: u16,
    node_rank: u16,
    host: String,
    /// Port of rank 0; `None` takes a free one at each start.
    port: Option<u16>,
    run_id: String,
    /// Shared secret of the processes. `None` on several hosts, where the user may set `SIEVE_TOKEN` on each.
    token: Option<String>,
}

/// A random 128-bit number in hexadecimal.
fn random_token() -> String {
    // The standard library seeds its hash tables from the system's random numbers.
    let word = || RandomState::new().hash_one(std::process::id());
    format!("{:016x}{:016x}", word(), word())
}

impl Place {
    /// Reads the flags, else the environment variables that their help texts name.
    fn of(args: &LaunchArgs) -> Result<Self> {
        let nnodes = args.nnodes.or(number("PET_NNODES")?).unwrap_or(1);
        anyhow::ensure!(nnodes > 0, "PET_NNODES=0 is not a number of hosts\n  hint: 1 is only this host");
        if nnodes == 1 {
            anyhow::ensure!(
                args.node_rank.is_none() && args.master.is_none(),
                "--node-rank and --master are for several hosts, and one takes part\n  \
                 hint: give --nnodes N too, or leave them out"
            );
            return Ok(Self {
                nnodes,
                node_rank: 0,
                host: "127.0.0.1".to_owned(),
                port: args.port,
                run_id: format!("launch-{}", std::process::id()),
                token: Some(random_token()),
            });
        }
        Self::of_several(args, nnodes)
    }

    /// As [`of`](Self::of), where `nnodes` hosts take part: each needs its rank and the address of rank 0.
    fn of_several(args: &LaunchArgs, nnodes: u16) -> Result<Self> {
        if args.max_restarts > 0 {
            bail!(
                "--max-restarts works on one host: this launcher cannot restart the processes of the other {}\n  \
                 hint: let the scheduler start all hosts again after exit code {STOPPED_EARLY}, with --resume=auto",
                nnodes - 1
            );
        }
        anyhow::ensure!(
            args.port.is_none(),
            "--port is for processes of one host, and {nnodes} hosts take part\n  hint: --master HOST:PORT"
        );
        let node_rank = match args.node_rank.or(number("PET_NODE_RANK")?) {
            Some(rank) => Some(rank),
            None => number("JOB_COMPLETION_INDEX")?,
        };
        let node_rank = node_rank.with_context(|| {
            format!("{nnodes} hosts take part, but this one has no rank\n  hint: --node-rank, from 0")
        })?;
        if node_rank >= nnodes {
            bail!("--node-rank {node_rank} is not a host of {nnodes}, counted from 0");
        }
        let (host, port) = master(args, nnodes)?;
        anyhow::ensure!(
            port > 0,
            "rank 0 cannot listen on port 0, which no other host finds\n  \
             hint: name one from 1 to 65535 with --master HOST:PORT or PET_MASTER_PORT"
        );
        Ok(Self { nnodes, node_rank, run_id: format!("launch-{host}:{port}"), host, port: Some(port), token: None })
    }
}

/// Host and port of rank 0: those of `--master HOST:PORT`, else of the environment.
fn master(args: &LaunchArgs, nnodes: u16) -> Result<(String, u16)> {
    let master = args.master.clone().or_else(|| variable("PET_MASTER_ADDR"));
    let master = master.with_context(|| {
        format!(
            "{nnodes} hosts take part, but the address of rank 0 is missing\n  \
            hint: --master HOST:PORT, the first host's name, the same for all"
        )
    })?;
    match master.rsplit_once(':') {
        Some((host, port)) => {
            let port = port.parse().ok();
            Ok((host.to_owned(), port.with_context(|| format!("--master {master}: no port"))?))
        }
        None => Ok((master, number("PET_MASTER_PORT")?.unwrap_or(DEFAULT_PORT))),
    }
}

/// An environment variable as a number; `None` if it is unset or empty.
fn number(name: &str) -> Result<Option<u16>> {
    let value = variable(name).filter(|value| !value.is_empty());
    let value = value.map(|value| {
        let number = value.trim().parse();
        number.with_context(|| format!("{name}={value} is not a valid number"))
    });
    value.transpose()
}

/// Runs `sieve launch`: starts one process for each GPU, and again if one is lost.
pub(crate) fn run(args: &LaunchArgs) -> Result<Exit> {
    let [first, second] = [0, 1].map(|at| args.command.get(at).map_or("", String::as_str));
    if !matches!((first, second), ("train" | "generate", _) | ("eval", "ppl")) {
        let name = if first == "eval" { format!("{first} {second}") } else { first.to_owned() };
        bail!(
            "sieve launch starts train, generate or eval ppl, not {name}\n  \
             hint: sieve launch --nproc {} -- train --recipe …",
            args.nproc
        );
    }
    anyhow::ensure!(
        first == "train" || args.max_restarts == 0,
        "--max-restarts is for train, whose checkpoints the next start continues from\n  hint: leave it out"
    );
    let place = Place::of(args)?;
    respect_nohup();
    // Number of signals that asked the job to stop.
    let asked = Arc::new(AtomicUsize::new(0));
    let (forwarded, signals) = (asked.clone(), Signals::default());
    ctrlc::set_handler(move || match signals.count() {
        Asked::Same => {}
        Asked::Stop | Asked::QuitAtOnce => _ = forwarded.fetch_add(1, Ordering::Relaxed),
    })
    .context("installing the signal handler")?;
    let mut command = args.command.clone();
    let mut restarts = 0;
    loop {
        let codes = run_once(args, &place, &command, &asked)?;
        let exit = job_exit(&codes);
        let is_asked = asked.load(Ordering::Relaxed) > 0 || was_asked(&codes);
        if exit != Exit::StoppedEarly || is_asked || restarts == args.max_restarts {
            return Ok(exit);
        }
        restarts += 1;
        terminal::note(&format!("start {restarts} of {} after a lost process, with --resume=auto", args.max_restarts));
        // The run that was begun over goes on.
        command.retain(|word| !word.starts_with("--resume=") && word != "--resume" && word != "--overwrite");
        command.push("--resume=auto".to_owned());
    }
}

/// Starts all processes and waits for them. Returns their exit codes; `None` is a process that a signal killed.
fn run_once(args: &LaunchArgs, place: &Place, command: &[String], asked: &AtomicUsize) -> Result<Vec<Option<i32>>> {
    let held;
    let port = match place.port {
        Some(port) => port,
        None => {
            held = ReservedPort::take().context("looking for a free port on 127.0.0.1")?;
            held.number()
        }
    };
    let mut ranks = Vec::new();
    for local_rank in 0..args.nproc {
        match start(args.nproc, place, command, local_rank, port) {
            Ok(child) => ranks.push(Rank { child, status: None }),
            Err(error) => {
                end(&mut ranks);
                return Err(error).with_context(|| format!("starting process {local_rank}"));
            }
        }
    }
    let first = usize::from(place.node_rank) * usize::from(args.nproc);
    let hint = match command.first().map(String::as_str) {
        Some("train") => "the same command with --resume continues from the last checkpoint",
        _ => "the same command starts again",
    };
    wait(&mut ranks, (first, hint), asked)
}

/// Starts the process `local_rank` of this host with torchrun's environment variables.
fn start(nproc: u16, place: &Place, words: &[String], local_rank: u16, port: u16) -> Result<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    // size = nnodes * nproc, rank = node_rank * nproc + local_rank.
    let [size, rank] = [(place.nnodes, 0), (place.node_rank, local_rank)]
        .map(|(hosts, more)| u32::from(hosts) * u32::from(nproc) + u32::from(more));
    command
        .args(words)
        .env("RANK", rank.to_string())
        .env("LOCAL_RANK", local_rank.to_string())
        .env("WORLD_SIZE", size.to_string())
        .env("LOCAL_WORLD_SIZE", nproc.to_string())
        .env("MASTER_ADDR", &place.host)
        .env("MASTER_PORT", port.to_string())
        .env("TORCHELASTIC_RUN_ID", &place.run_id)
        .env_remove("TORCHELASTIC_USE_AGENT_STORE")
        .env(LAUNCHED, "1")
        // The pipe closes when the launcher dies, and then the process stops (interrupt.rs).
        .stdin(Stdio::piped());
    if let Some(token) = &place.token {
        command.env("SIEVE_TOKEN", token);
    }
    if std::env::var_os("RAYON_NUM_THREADS").is_none() {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = (cores / usize::from(nproc)).max(1);
        command.env("RAYON_NUM_THREADS", threads.to_string());
    }
    if rank > 0 {
        command.stdout(Stdio::null()).stderr(Stdio::piped());
    }
    #[cfg(unix)]
    {
        use std::os::unix::process::CommandExt;
        // Rank 0 prints commands for the user; they begin with the name that the launcher was called by.
        if let Some(name) = std::env::args_os().next() {
            command.arg0(name);
        }
        // In a process group of its own the child does not get the terminal's Ctrl-C; the launcher forwards it once.
        command.process_group(0);
    }
    let mut child = command.spawn()?;
    if let Some(errors) = child.stderr.take() {
        std::thread::spawn(move || {
            for line in BufReader::new(errors).lines().map_while(Result::ok) {
                terminal::note(&format!("[{rank}] {line}"));
            }
        });
    }
    Ok(child)
}

/// Waits until all processes have ended. Forwards signals to them, and kills the rest some time after one has failed.
/// Returns the exit codes. `first` is the rank of the first process, and `hint` says how to go on after a fault.
fn wait(ranks: &mut [Rank], (first, hint): (usize, &str), asked: &AtomicUsize) -> Result<Vec<Option<i32>>> {
    let mut handed_on = 0;
    let mut failed: Option<Instant> = None;
    let mut last_ended = Instant::now();
    // At most one fault is printed: the first failure makes the other processes fail too, and the loop may see one of
    // these first.
    let mut is_printed = false;
    while ranks.iter().any(|rank| rank.status.is_none()) {
        for (number, rank) in ranks.iter_mut().enumerate() {
            if rank.status.is_some() {
                continue;
            }
            let Some(status) = rank.child.try_wait()? else {
                continue;
            };
            rank.status = Some(status);
            last_ended = Instant::now();
            if matches!(status.code(), Some(0 | STOPPED_EARLY | OTHER_LOST)) {
                continue;
            }
            failed.get_or_insert_with(Instant::now);
            if let (false, Some(line)) = (is_printed, fault(first + number, &rank.child, status, hint)) {
                is_printed = true;
                terminal::note(&line);
            }
        }
        let signals = asked.load(Ordering::Relaxed);
        for _ in handed_on..signals {
            ranks.iter_mut().filter(|rank| rank.status.is_none()).for_each(ask_to_stop);
        }
        handed_on = signals;
        // After a stop signal the last rank may still be writing its checkpoint and is not killed.
        let hangs = signals == 0 && is_lost_by_others(ranks) && last_ended.elapsed() > LAST_RANK_TIMEOUT;
        if hangs || failed.is_some_and(|since| since.elapsed() > GOODBYE_TIMEOUT) {
            // The ranks killed here are not at fault: the one that failed has printed the reason.
            is_printed = true;
            end(ranks);
        }
        std::thread::sleep(POLL);
    }
    let codes = ranks.iter().map(|rank| rank.status.and_then(|status| status.code()));
    Ok(codes.collect())
}

/// Whether one of several ranks still runs while all others ended because they lost a rank. It is the rank they lost:
/// it hangs, unless it was asked to stop and still writes its checkpoint.
fn is_lost_by_others(ranks: &[Rank]) -> bool {
    let (running, ended): (Vec<&Rank>, Vec<&Rank>) = ranks.iter().partition(|rank| rank.status.is_none());
    let has_lost = |rank: &&Rank| rank.status.and_then(|status| status.code()) == Some(OTHER_LOST);
    running.len() == 1 && !ended.is_empty() && ended.iter().all(has_lost)
}

/// Whether a rank stopped because a signal asked it to. A rank that lost another one ends with `OTHER_LOST` instead.
fn was_asked(codes: &[Option<i32>]) -> bool {
    codes.contains(&Some(STOPPED_EARLY))
}

/// Combines the ranks' exit codes into the job's exit code; `None` is a rank that a signal killed.
fn job_exit(codes: &[Option<i32>]) -> Exit {
    let all = |wanted: i32| codes.iter().all(|code| *code == Some(wanted));
    let any = |wanted: i32| codes.contains(&Some(wanted));
    let usual = [0, USAGE, STOPPED_EARLY, OTHER_LOST, INTERRUPTED];
    let is_lost = |code: &Option<i32>| code.is_none();
    if all(0) {
        Exit::Done
    } else if all(INTERRUPTED) {
        Exit::Interrupted
    } else if any(USAGE) {
        Exit::Usage
    } else if codes.iter().flatten().any(|code| !usual.contains(code)) {
        Exit::Failed
    } else if any(INTERRUPTED) {
        // A second signal ended one rank at once, and the other ranks then lost it.
        Exit::Interrupted
    } else if any(STOPPED_EARLY) || any(OTHER_LOST) || codes.iter().any(is_lost) {
        Exit::StoppedEarly
    } else {
        Exit::Failed
    }
}

/// The message about a process that ended without printing an error.
fn fault(rank: usize, child: &Child, status: ExitStatus, hint: &str) -> Option<String> {
    let pid = child.id();
    #[cfg(unix)]
    {
        use std::os::unix::process::ExitStatusExt;
        if let Some(signal) = status.signal() {
            let who = match signal {
                9 => ", which the kernel sends too when memory runs out (see dmesg)",
                7 => {
                    ": a file that it had mapped got shorter or cannot be read, train.bin of the prepared data or a \
                     checkpoint"
                }
                _ => "",
            };
            return Some(format!(
                "error: rank {rank} (pid {pid}) was ended by signal {signal}{who}; all ranks stop\n  hint: {hint}"
            ));
        }
    }
    match status.code() {
        // The process has printed its own error.
        Some(1 | USAGE | INTERRUPTED) => None,
        _ => Some(format!("error: rank {rank} (pid {pid}) ended with {status}; all ranks stop\n  hint: {hint}")),
    }
}

/// Sends SIGTERM, upon which a rank ends by itself; where there are no signals, the process is killed.
fn ask_to_stop(rank: &mut Rank) {
    #[cfg(unix)]
    {
        use nix::sys::signal::{Signal::SIGTERM, kill};
        use nix::unistd::Pid;
        // An error means that the process has just ended.
        let _ = kill(Pid::from_raw(rank.child.id() as i32), SIGTERM);
    }
    #[cfg(not(unix))]
    let _ = rank.child.kill();
}

/// Kills the processes that still run.
fn end(ranks: &mut [Rank]) {
    for rank in ranks.iter_mut().filter(|rank| rank.status.is_none()) {
        let _ = rank.child.kill();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_launch_draws_another_secret() {
        let tokens = [(); 3].map(|()| random_token());
        assert!(tokens.iter().all(|token| token.len() == 32));
        assert!(tokens[0] != tokens[1] && tokens[1] != tokens[2] && tokens[0] != tokens[2]);
    }

    #[test]
    fn the_code_of_a_job_is_that_of_the_rank_at_fault() {
        for (codes, expected) in [
            (&[Some(0), Some(0)][..], 0),
            (&[Some(75), Some(75)], 75),
            // One rank was killed, and the others noticed.
            (&[Some(76), None], 75),
            (&[Some(76), Some(76)], 75),
            (&[Some(75), None], 75),
            (&[None, None], 75),
            (&[Some(75), Some(1)], 1),
            (&[Some(76), Some(1)], 1),
            (&[Some(101), Some(75)], 1),
            (&[Some(2), Some(2)], 2),
            (&[Some(130), Some(130)], 130),
            (&[Some(130), Some(75)], 130),
            (&[Some(130), Some(76)], 130),
            (&[Some(130), None], 130),
        ] {
            assert_eq!(job_exit(codes).code(), expected, "{codes:?}");
        }
    }

    #[test]
    fn a_run_that_was_asked_to_stop_is_not_started_again() {
        for (codes, expected) in [
            (&[Some(75), Some(75)][..], true),
            // The last rank was killed, or lost, while it wrote.
            (&[Some(75), None], true),
            (&[Some(76), Some(75)], true),
            (&[Some(76), None], false),
            (&[Some(76), Some(76)], false),
        ] {
            assert_eq!(was_asked(codes), expected, "{codes:?}");
        }
    }
}
