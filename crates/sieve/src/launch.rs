//! `sieve launch`: several processes of this program on this host, which train together.
use crate::exit::Exit;
use crate::interrupt::respect_nohup;
use crate::terminal;
use crate::train::LAUNCHED;
use anyhow::{Context, Result, bail};
use clap::Args;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Between two looks at the processes.
const POLL: Duration = Duration::from_millis(20);
/// After one has failed, the others have so long to end by themselves: they notice it, and tell what they know.
const FAREWELL: Duration = Duration::from_secs(15);

/// Arguments of `sieve launch`.
#[derive(Args, Debug)]
pub(crate) struct LaunchArgs {
    /// Processes on this host, one for each GPU
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    nproc: u16,
    /// Port on which rank 0 listens; a free one when absent
    #[arg(long)]
    port: Option<u16>,
    /// What each of them runs: train and its arguments
    #[arg(last = true, required = true, value_name = "train …")]
    pub(crate) command: Vec<String>,
}

/// One process, and how it ended.
struct Rank {
    child: Child,
    status: Option<ExitStatus>,
}

/// Runs the command.
pub(crate) fn run(args: &LaunchArgs) -> Result<Exit> {
    if args.command[0] != "train" {
        bail!(
            "sieve launch starts train, not {}\n  hint: sieve launch --nproc {} -- train --recipe …",
            args.command[0],
            args.nproc
        );
    }
    respect_nohup();
    let asked = Arc::new(AtomicUsize::new(0));
    let signals = asked.clone();
    ctrlc::set_handler(move || {
        signals.fetch_add(1, Ordering::Relaxed);
    })
    .context("installing the signal handler")?;
    let port = match args.port {
        Some(port) => port,
        None => free_port().context("looking for a free port on 127.0.0.1")?,
    };
    let mut ranks = Vec::new();
    for rank in 0..args.nproc {
        match start(args, rank, port) {
            Ok(child) => ranks.push(Rank {
                child,
                status: None,
            }),
            Err(error) => {
                end(&mut ranks);
                return Err(error).with_context(|| format!("starting rank {rank}"));
            }
        }
    }
    wait(&mut ranks, &asked)
}

/// A port that nobody has just now.
fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

fn start(args: &LaunchArgs, rank: u16, port: u16) -> Result<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    let number = rank.to_string();
    let size = args.nproc.to_string();
    command
        .args(&args.command)
        .env("RANK", &number)
        .env("LOCAL_RANK", &number)
        .env("WORLD_SIZE", &size)
        .env("LOCAL_WORLD_SIZE", &size)
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", port.to_string())
        .env(
            "TORCHELASTIC_RUN_ID",
            format!("launch-{}", std::process::id()),
        )
        .env_remove("TORCHELASTIC_USE_AGENT_STORE")
        .env(LAUNCHED, "1")
        // Its end tells that this process has died.
        .stdin(Stdio::piped());
    if std::env::var_os("RAYON_NUM_THREADS").is_none() {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = (cores / usize::from(args.nproc)).max(1);
        command.env("RAYON_NUM_THREADS", threads.to_string());
    }
    if rank > 0 {
        command.stdout(Stdio::null()).stderr(Stdio::piped());
    }
    #[cfg(unix)]
    {
        use std::os::unix::process::CommandExt;
        // A group of its own: Ctrl-C in a terminal reaches this process alone, which hands it on once.
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

/// Until all have ended: hands signals on, and ends the others after one has failed.
fn wait(ranks: &mut [Rank], asked: &AtomicUsize) -> Result<Exit> {
    let mut handed_on = 0;
    let mut failed: Option<Instant> = None;
    // One line: the others end because of the first, which need not be noticed first.
    let mut is_told = false;
    while ranks.iter().any(|rank| rank.status.is_none()) {
        for (number, rank) in ranks.iter_mut().enumerate() {
            if rank.status.is_some() {
                continue;
            }
            let Some(status) = rank.child.try_wait()? else {
                continue;
            };
            rank.status = Some(status);
            if status.success() || status.code() == Some(Exit::StoppedEarly.code()) {
                continue;
            }
            failed.get_or_insert_with(Instant::now);
            if let (false, Some(line)) = (is_told, fault(number, &rank.child, status)) {
                is_told = true;
                terminal::note(&line);
            }
        }
        let signals = asked.load(Ordering::Relaxed);
        while handed_on < signals {
            handed_on += 1;
            ranks
                .iter_mut()
                .filter(|rank| rank.status.is_none())
                .for_each(ask_to_stop);
        }
        if failed.is_some_and(|since| since.elapsed() > FAREWELL) {
            // Why was said by whoever failed.
            is_told = true;
            end(ranks);
        }
        std::thread::sleep(POLL);
    }
    let codes = ranks
        .iter()
        .map(|rank| rank.status.and_then(|status| status.code()));
    let codes = codes.collect::<Vec<_>>();
    let all = |wanted: &[Exit]| {
        let is_wanted = |code: i32| wanted.iter().any(|exit| exit.code() == code);
        codes.iter().all(|code| code.is_some_and(is_wanted))
    };
    Ok(if all(&[Exit::Done]) {
        Exit::Done
    } else if all(&[Exit::Done, Exit::StoppedEarly]) {
        Exit::StoppedEarly
    } else if all(&[Exit::Interrupted]) {
        Exit::Interrupted
    } else {
        Exit::Failed
    })
}

/// What to say of a process that ended without saying why itself.
fn fault(rank: usize, child: &Child, status: ExitStatus) -> Option<String> {
    let pid = child.id();
    let hint = "  hint: the same command with --resume goes on from the last checkpoint";
    #[cfg(unix)]
    {
        use std::os::unix::process::ExitStatusExt;
        if let Some(signal) = status.signal() {
            let who = match signal {
                9 => ", which the kernel sends too when memory runs out (see dmesg)",
                _ => "",
            };
            return Some(format!(
                "error: rank {rank} (pid {pid}) was ended by signal {signal}{who}; all ranks stop\n{hint}"
            ));
        }
    }
    match status.code() {
        // It has printed its error.
        Some(code)
            if [Exit::Failed, Exit::Interrupted]
                .map(Exit::code)
                .contains(&code) =>
        {
            None
        }
        _ => Some(format!(
            "error: rank {rank} (pid {pid}) ended with {status}; all ranks stop\n{hint}"
        )),
    }
}

fn ask_to_stop(rank: &mut Rank) {
    #[cfg(unix)]
    {
        use nix::sys::signal::{Signal::SIGTERM, kill};
        use nix::unistd::Pid;
        // One that has ended meanwhile needs no signal.
        let _ = kill(Pid::from_raw(rank.child.id() as i32), SIGTERM);
    }
    #[cfg(not(unix))]
    let _ = rank.child.kill();
}

fn end(ranks: &mut [Rank]) {
    for rank in ranks.iter_mut().filter(|rank| rank.status.is_none()) {
        let _ = rank.child.kill();
    }
}
