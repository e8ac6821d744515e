//! How the ranks of a group find each other: rank 0 listens, and the others connect to it.
use crate::frame::{receive_at_most, send};
use crate::timeouts::Timeouts;
use crate::watch::{Peer, is_timeout};
use crate::world::TOKEN;
use crate::{CommError, World};
use std::io::{self, ErrorKind, Read};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

pub(super) const HELLO: u8 = 10;
const WELCOME: u8 = 11;
pub(super) const REFUSED: u8 = 12;

/// First line of the first message. A program that sends another line is not a rank.
const MAGIC: &str = "sieve-comm 2";
/// The longest first message. A program that sends a longer one is not a rank.
const MAX_HELLO_BYTES: u64 = 4 << 10;
/// Time between two attempts to reach rank 0.
pub(super) const RETRY: Duration = Duration::from_millis(20);
/// Rank 0 drops a connection that has not sent its first message after this time.
const HELLO_WAIT: Duration = Duration::from_secs(5);
/// How many connections of other programs rank 0 keeps at a time. Further ones wait until one is dropped.
const MAX_STRANGERS: usize = 256;

/// The first message on each of a rank's two connections.
pub(super) struct Hello {
    version: String,
    run_id: String,
    token: String,
    size: usize,
    rank: usize,
    is_control: bool,
    place: String,
}

impl Hello {
    /// The message of this process, one field per line; [`read`](Self::read) is the inverse.
    pub(super) fn text(world: &World, version: &str, is_control: bool) -> String {
        let World { run_id, token, size, rank, .. } = world;
        let role = if is_control { "control" } else { "data" };
        format!("{MAGIC}\n{version}\n{run_id}\n{token}\n{size}\n{rank}\n{role}\n{}", place())
    }

    /// Reads a connection's first message; `None` if no rank sent it.
    fn read(stream: &TcpStream) -> Option<Self> {
        let (kind, bytes) = receive_until(stream, Instant::now() + HELLO_WAIT).ok()?;
        let text = String::from_utf8(bytes).ok()?;
        let mut lines = text.splitn(8, '\n');
        if kind != HELLO || lines.next()? != MAGIC {
            return None;
        }
        Some(Self {
            version: lines.next()?.to_owned(),
            run_id: lines.next()?.to_owned(),
            token: lines.next()?.to_owned(),
            size: lines.next()?.parse().ok()?,
            rank: lines.next()?.parse().ok()?,
            is_control: lines.next()? == "control",
            place: lines.next()?.to_owned(),
        })
    }

    /// Why the sender cannot be a rank of `world`; `None` if it can.
    fn problem(&self, world: &World, version: &str) -> Option<String> {
        let Self { rank, place, .. } = self;
        if self.version != version {
            let theirs = &self.version;
            return Some(format!("rank {rank} ({place}) runs version {theirs}, rank 0 version {version}"));
        }
        if self.size != world.size {
            return Some(format!(
                "rank {rank} ({place}) was started with WORLD_SIZE={}, rank 0 with {}",
                self.size, world.size
            ));
        }
        if *rank == 0 || *rank >= world.size {
            return Some(format!("a second process ({place}) claims to be rank {rank}"));
        }
        None
    }
}

/// Host name and process id of this process, for error messages.
pub fn place() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match host.trim() {
        "" => format!("pid {}", std::process::id()),
        host => format!("host {host}, pid {}", std::process::id()),
    }
}

/// What rank 0 has of another rank while the ranks join: its connections so far, for values and for heartbeats.
#[derive(Default)]
struct Arrival {
    data: Option<TcpStream>,
    control: Option<TcpStream>,
    place: String,
}

impl Arrival {
    fn is_complete(&self) -> bool {
        self.data.is_some() && self.control.is_some()
    }
}

/// On rank 0: waits for all other ranks. A separate thread reads each first message, so that a silent or slow
/// connection does not block the others.
pub(super) fn accept_all(
    world: &World,
    listener: TcpListener,
    version: &str,
    timeouts: Timeouts,
) -> Result<Vec<Peer>, CommError> {
    let deadline = Instant::now() + timeouts.join;
    let mut found: Vec<Arrival> = (1..world.size).map(|_| Arrival::default()).collect();
    let (sender, hellos) = channel();
    // Each reading thread holds a clone, so the reference count is their number plus one.
    let readers = Arc::new(());
    while !found.iter().all(Arrival::is_complete) {
        if let Ok((stream, hello)) = hellos.try_recv() {
            admit(world, version, &mut found, stream, hello)?;
            continue;
        }
        if Instant::now() >= deadline {
            return Err(missing(world, timeouts, &found));
        }
        let has_room = Arc::strong_count(&readers) <= MAX_STRANGERS + 2 * world.size;
        let Some(Ok((stream, _))) = has_room.then(|| listener.accept()) else {
            std::thread::sleep(Duration::from_millis(2));
            continue;
        };
        let (sender, reader) = (sender.clone(), readers.clone());
        let read = move || {
            let ready = stream.set_nonblocking(false).and_then(|()| stream.set_nodelay(true));
            if let (Ok(()), Some(hello)) = (ready, Hello::read(&stream)) {
                // Fails if the last rank has joined meanwhile, which is harmless.
                let _ = sender.send((stream, hello));
            }
            drop(reader);
        };
        // If no thread can start, the connection closes, and the rank connects again.
        let _ = std::thread::Builder::new().name("sieve-hello".to_owned()).spawn(read);
    }
    let peers = (1..).zip(found).filter_map(|(rank, arrival)| {
        Some(Peer { rank, place: arrival.place, data: arrival.data?, control: arrival.control? })
    });
    let peers = peers.collect::<Vec<_>>();
    for peer in &peers {
        // If the rank has ended meanwhile, the watch will notice.
        let _ = send(&peer.data, WELCOME, place().as_bytes());
    }
    Ok(peers)
}

/// Stores a connection with its rank, or closes it if it belongs to another run.
///
/// # Errors
/// A process of this run cannot be one of its ranks.
fn admit(
    world: &World,
    version: &str,
    found: &mut [Arrival],
    stream: TcpStream,
    hello: Hello,
) -> Result<(), CommError> {
    if hello.run_id != world.run_id || hello.token != world.token {
        let text = format!("rank 0 at {} belongs to another run, or was given a different {TOKEN}", world.address());
        let _ = send(&stream, REFUSED, text.as_bytes());
        return Ok(());
    }
    let mut problem = hello.problem(world, version);
    if problem.is_none() && is_ended(&stream) {
        // The rank has closed this connection. It connects again, or already has.
        return Ok(());
    }
    if problem.is_none() {
        let arrival = &mut found[hello.rank - 1];
        // A rank that closed a connection connects again, which must not count as a second process.
        arrival.data.take_if(|stream| is_ended(stream));
        arrival.control.take_if(|stream| is_ended(stream));
        let slot = if hello.is_control { &mut arrival.control } else { &mut arrival.data };
        if slot.is_none() {
            *slot = Some(stream);
            arrival.place = hello.place;
            return Ok(());
        }
        let (rank, first, second) = (hello.rank, &arrival.place, &hello.place);
        problem = Some(format!("two processes claim to be rank {rank}: {first}; {second}"));
    }
    // A rank reads the answer on its data connection; a thread may still be reading the first message there.
    if hello.is_control {
        return Ok(());
    }
    let problem = problem.unwrap_or_default();
    let others = found.iter().flat_map(|arrival| &arrival.data);
    for stream in others.chain([&stream]) {
        let _ = send(stream, REFUSED, problem.as_bytes());
    }
    Err(CommError::Refused(problem))
}

/// Waits until the name of rank 0's host resolves, since a host that has just started may register late.
pub(super) fn find_host(world: &World, timeouts: Timeouts) -> Result<(), CommError> {
    let deadline = Instant::now() + timeouts.silence.min(timeouts.join);
    loop {
        match world.address().to_socket_addrs() {
            Ok(_) => return Ok(()),
            Err(error) if Instant::now() >= deadline => {
                return Err(CommError::UnknownHost {
                    rank: world.rank,
                    host: world.master_addr.clone(),
                    problem: error.to_string(),
                });
            }
            Err(_) => std::thread::sleep(10 * RETRY),
        }
    }
}

/// Listens on the group's address. If that is not an address of this host, but of a router or proxy in front of it,
/// listens on all addresses of this host.
pub(super) fn listen(world: &World) -> Result<TcpListener, CommError> {
    let bound = match TcpListener::bind(world.address()) {
        Err(error) if error.kind() == ErrorKind::AddrNotAvailable => TcpListener::bind(("0.0.0.0", world.master_port)),
        bound => bound,
    };
    let listener = bound.and_then(|listener| listener.set_nonblocking(true).map(|()| listener));
    listener.map_err(|error| CommError::Listen { address: world.address(), problem: error.to_string() })
}

/// The error that names the ranks that have not joined in time.
fn missing(world: &World, timeouts: Timeouts, found: &[Arrival]) -> CommError {
    let missing = (1..).zip(found).filter(|(_, arrival)| !arrival.is_complete());
    let missing = missing.map(|(rank, _): (usize, _)| rank.to_string()).collect::<Vec<_>>();
    CommError::Missing {
        present: world.size - missing.len(),
        size: world.size,
        address: world.address(),
        seconds: timeouts.join.as_secs(),
        missing: missing.join(", "),
    }
}

/// On the other ranks: finds rank 0, and waits until all ranks have joined. If a connection ends without an answer,
/// another program had the port or rank 0 is restarting, so this rank tries again.
pub(super) fn connect(world: &World, version: &str, timeouts: Timeouts) -> Result<Peer, CommError> {
    let deadline = Instant::now() + timeouts.join;
    let is_control = false;
    loop {
        let data = open(world, version, is_control);
        match data.and_then(|data| wait_for_all(world, version, data, deadline)) {
            Ok(Answer::Welcome(peer)) => return Ok(*peer),
            Ok(Answer::Refused(text)) => return Err(CommError::Refused(text)),
            Ok(Answer::Strange) => {
                let error = io::Error::other("something else answers there");
                return Err(no_first_rank(world, timeouts, &error));
            }
            Err(error) if Instant::now() >= deadline => return Err(no_first_rank(world, timeouts, &error)),
            Err(_) => std::thread::sleep(RETRY),
        }
    }
}

/// Rank 0's answer to another rank's first message.
#[derive(Debug)]
pub(super) enum Answer {
    Welcome(Box<Peer>),
    Refused(String),
    /// The answer is not a rank 0's.
    Strange,
}

/// Opens the second connection, and waits for rank 0's answer on `data`, the first one.
///
/// # Errors
/// A connection ended before the answer, or none arrived before the deadline.
pub(super) fn wait_for_all(world: &World, version: &str, data: TcpStream, deadline: Instant) -> io::Result<Answer> {
    let is_control = true;
    let control = loop {
        match open(world, version, is_control) {
            Ok(control) => break Some(control),
            // Rank 0 has refused this rank on its first connection, and ended.
            Err(_) if is_answered(&data) => break None,
            Err(error) if Instant::now() >= deadline => return Err(error),
            // Tries again; `is_answered` has waited in between.
            Err(_) => {}
        }
    };
    // A rank that connects just before the deadline still waits `HELLO_WAIT` for the answer.
    let answer = receive_until(&data, deadline.max(Instant::now() + HELLO_WAIT))?;
    Ok(match (answer, control) {
        ((WELCOME, place), Some(control)) => Answer::Welcome(Box::new(Peer {
            rank: 0,
            place: String::from_utf8_lossy(&place).into_owned(),
            data,
            control,
        })),
        ((REFUSED, text), _) => Answer::Refused(String::from_utf8_lossy(&text).into_owned()),
        _ => Answer::Strange,
    })
}

/// Opens one of the two connections to rank 0, and sends the first message on it.
fn open(world: &World, version: &str, is_control: bool) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(world.address())?;
    stream.set_nodelay(true)?;
    let hello = Hello::text(world, version, is_control);
    send(&stream, HELLO, hello.as_bytes())?;
    Ok(stream)
}

/// Whether the other end has closed a connection, or sent data on it before it should.
fn is_ended(stream: &TcpStream) -> bool {
    let peeked = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
    let blocks = stream.set_nonblocking(false).is_ok();
    !blocks || !peeked.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

/// Whether data arrives on a connection, or the other end closes it, within [`RETRY`].
fn is_answered(stream: &TcpStream) -> bool {
    let peeked = stream.set_read_timeout(Some(RETRY)).and_then(|()| stream.peek(&mut [0]));
    !peeked.is_err_and(|error| is_timeout(error.kind()))
}

/// The error of a rank that has not found rank 0.
fn no_first_rank(world: &World, timeouts: Timeouts, error: &io::Error) -> CommError {
    CommError::NoFirstRank {
        rank: world.rank,
        address: world.address(),
        seconds: timeouts.join.as_secs(),
        problem: error.to_string(),
    }
}

/// Receives a short message. Its last byte must arrive before `deadline`.
fn receive_until(stream: &TcpStream, deadline: Instant) -> io::Result<(u8, Vec<u8>)> {
    let found = receive_at_most(MAX_HELLO_BYTES, Until { stream, deadline })?;
    stream.set_read_timeout(None)?;
    Ok(found)
}

/// A stream with one deadline for all its reads together.
struct Until<'a> {
    stream: &'a TcpStream,
    deadline: Instant,
}

impl Read for Until<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        let mut stream = self.stream;
        stream.read(buffer)
    }
}
