//! The connections of a group, and what all its ranks do together.
use crate::frame::{receive, receive_head, receive_numbers, send, send_numbers};
use crate::watch::{GiveUp, Peer, Watch, is_timeout};
use crate::{CommError, Failure, Loss, World};
use std::fmt;
use std::io::{self, ErrorKind};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const HELLO: u8 = 10;
const WELCOME: u8 = 11;
const REFUSED: u8 = 12;
/// Numbers, to be added up or not.
const NUMBERS: u8 = 20;
const GATHER: u8 = 21;
const BROADCAST: u8 = 22;
const EXCHANGE: u8 = 23;

/// First line of the first message; a program that sends another one is a stranger.
const MAGIC: &str = "sieve-comm 1";
/// Between two tries to reach rank 0.
const RETRY: Duration = Duration::from_millis(20);
/// A connection that says nothing for so long is a stranger's.
const HELLO_WAIT: Duration = Duration::from_secs(5);
/// How much later than a broken connection its reason may come.
const REASON_WAIT: Duration = Duration::from_secs(3);

/// How long a rank waits for others.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Until all ranks are there.
    pub join: Duration,
    /// For a sign of life, and for a step that stands still.
    pub silence: Duration,
    /// For other work of a run that stands still.
    pub long: Duration,
    /// After another rank is lost, until this process must end.
    pub farewell: Duration,
}

impl Default for Patience {
    /// Five minutes to come, 30 seconds without a sign, ten minutes for long work, 10 seconds to end.
    fn default() -> Self {
        Self {
            join: Duration::from_secs(300),
            silence: Duration::from_secs(30),
            long: Duration::from_secs(600),
            farewell: Duration::from_secs(10),
        }
    }
}

/// What a rank does while others may wait for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// A step like those before: it goes on within [`Patience::silence`].
    Step,
    /// A first step, a validation, a checkpoint: it goes on within [`Patience::long`].
    Long,
    /// Something without a limit, as reading and preparing data.
    Any,
}

/// This rank's connections. Every rank calls the same functions in the same order.
pub struct Mesh {
    world: World,
    /// Of rank 0 all others in order, of the others rank 0 alone.
    peers: Arc<Vec<Peer>>,
    watch: Arc<Watch>,
    patience: Patience,
    /// One call at a time.
    turn: Mutex<()>,
}

impl fmt::Debug for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mesh")
            .field("world", &self.world)
            .finish_non_exhaustive()
    }
}

/// This rank waits for the others as long as it lasts.
struct Turn<'a> {
    watch: &'a Watch,
    _lock: MutexGuard<'a, ()>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.watch.set_waiting(false);
    }
}

impl Mesh {
    /// Connects this rank with the others of `world`, and returns when all are there. `version` must be the same for
    /// all.
    ///
    /// From then on, where another rank is lost, every call fails; a process that has not left some seconds later is
    /// ended by `give_up`: it may wait for a device that waits for the lost rank.
    ///
    /// # Errors
    /// The port is taken, a rank does not come, one is twice there or of another version.
    pub fn join(
        world: World,
        version: &str,
        patience: Patience,
        give_up: impl FnOnce(&Failure) + Send + 'static,
    ) -> Result<Self, CommError> {
        find_host(&world, patience)?;
        let peers = if world.rank == 0 {
            accept_all(&world, listen(&world)?, version, patience)?
        } else {
            vec![connect(&world, version, patience)?]
        };
        Self::start(world, peers, patience, Box::new(give_up))
    }

    /// Watches over ranks that are all there.
    fn start(world: World, peers: Vec<Peer>, patience: Patience, give_up: GiveUp) -> Result<Self, CommError> {
        let peers = Arc::new(peers);
        let watch = Watch::start(world.rank, peers.clone(), patience, give_up);
        let watch = watch.map_err(|error| CommError::Refused(format!("starting threads: {error}")))?;
        Ok(Self {
            world,
            peers,
            watch,
            patience,
            turn: Mutex::new(()),
        })
    }

    /// Who this rank is.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// The sums of `values` over all ranks, added in the order of the ranks, with equal bits on all ranks. A rank gets
    /// those in the ranges that `parts` gives for it, one after another; every rank must know the same ranges.
    ///
    /// # Errors
    /// A rank is lost, or brings another number of values.
    pub fn sum_parts(
        &self,
        mut values: Vec<f32>,
        parts: &dyn Fn(usize) -> Vec<Range<usize>>,
    ) -> Result<Vec<f32>, CommError> {
        let _turn = self.turn();
        let rank = self.world.rank;
        if rank > 0 {
            let first = &self.peers[0];
            send_numbers(&first.data, NUMBERS, &values).map_err(|e| self.lost(first, &e))?;
            values.truncate(parts(rank).iter().map(Range::len).sum());
            self.receive_all(first, &mut values)?;
            return Ok(values);
        }
        for peer in self.peers.iter() {
            self.expect_numbers(peer, values.len())?;
            let read = receive_numbers(&peer.data, &mut values, |sum, value| *sum += value);
            read.map_err(|e| self.lost(peer, &e))?;
        }
        for peer in self.peers.iter() {
            let part = concatenated(&values, &parts(peer.rank));
            send_numbers(&peer.data, NUMBERS, &part).map_err(|e| self.lost(peer, &e))?;
        }
        Ok(concatenated(&values, &parts(0)))
    }

    /// As [`sum_parts`](Self::sum_parts), where every rank gets every sum, in place.
    ///
    /// # Errors
    /// A rank is lost, or brings another number of values.
    pub fn sum(&self, values: &mut [f32]) -> Result<(), CommError> {
        let all = 0..values.len();
        let sums = self.sum_parts(values.to_vec(), &|_| vec![all.clone()])?;
        values.copy_from_slice(&sums);
        Ok(())
    }

    /// The values of every rank, one after another; `counts` gives how many each rank brings.
    ///
    /// # Errors
    /// A rank is lost, or brings another number of values.
    pub fn gather_values(&self, own: &[f32], counts: &dyn Fn(usize) -> usize) -> Result<Vec<f32>, CommError> {
        let _turn = self.turn();
        let mut all = vec![0.0; (0..self.world.size).map(counts).sum()];
        if self.world.rank > 0 {
            let first = &self.peers[0];
            send_numbers(&first.data, NUMBERS, own).map_err(|e| self.lost(first, &e))?;
            self.receive_all(first, &mut all)?;
            return Ok(all);
        }
        let (first, mut others) = all.split_at_mut(own.len());
        first.copy_from_slice(own);
        for peer in self.peers.iter() {
            let (theirs, rest) = others.split_at_mut(counts(peer.rank));
            self.receive_all(peer, theirs)?;
            others = rest;
        }
        for peer in self.peers.iter() {
            send_numbers(&peer.data, NUMBERS, &all).map_err(|e| self.lost(peer, &e))?;
        }
        Ok(all)
    }

    /// The bytes of every rank, by rank.
    ///
    /// # Errors
    /// A rank is lost.
    pub fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let _turn = self.turn();
        if self.world.rank > 0 {
            let first = &self.peers[0];
            send(&first.data, GATHER, bytes).map_err(|e| self.lost(first, &e))?;
            return (0..self.world.size).map(|_| self.expect(first, GATHER)).collect();
        }
        let mut all = vec![bytes.to_vec()];
        for peer in self.peers.iter() {
            all.push(self.expect(peer, GATHER)?);
        }
        for peer in self.peers.iter() {
            for bytes in &all {
                send(&peer.data, GATHER, bytes).map_err(|e| self.lost(peer, &e))?;
            }
        }
        Ok(all)
    }

    /// The bytes of rank 0; what the others give is not read.
    ///
    /// # Errors
    /// A rank is lost.
    pub fn broadcast(&self, bytes: &[u8]) -> Result<Vec<u8>, CommError> {
        let _turn = self.turn();
        if self.world.rank > 0 {
            return self.expect(&self.peers[0], BROADCAST);
        }
        for peer in self.peers.iter() {
            send(&peer.data, BROADCAST, bytes).map_err(|e| self.lost(peer, &e))?;
        }
        Ok(bytes.to_vec())
    }

    /// Gives each rank its bytes, and returns what each has given to this one, by rank. Few ranks may have something
    /// for each other: the rest give nothing.
    ///
    /// # Errors
    /// A rank is lost.
    pub fn exchange(&self, bytes: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>, CommError> {
        let _turn = self.turn();
        let size = self.world.size;
        if self.world.rank > 0 {
            let first = &self.peers[0];
            send(&first.data, EXCHANGE, &joined(&bytes)).map_err(|e| self.lost(first, &e))?;
            return self.split(first, size);
        }
        let mut all = vec![bytes];
        for peer in self.peers.iter() {
            all.push(self.split(peer, size)?);
        }
        let mut for_rank = |rank: usize| {
            let from = all.iter_mut().map(|from| std::mem::take(&mut from[rank]));
            from.collect::<Vec<_>>()
        };
        for peer in self.peers.iter() {
            let bytes = joined(&for_rank(peer.rank));
            send(&peer.data, EXCHANGE, &bytes).map_err(|e| self.lost(peer, &e))?;
        }
        Ok(for_rank(0))
    }

    /// What a rank sends by [`joined`], for as many ranks.
    fn split(&self, peer: &Peer, size: usize) -> Result<Vec<Vec<u8>>, CommError> {
        let bytes = self.expect(peer, EXCHANGE)?;
        let mut rest = bytes.as_slice();
        let parts = (0..size).map(|_| {
            let (len, others) = rest.split_first_chunk()?;
            let (part, others) = others.split_at_checked(u64::from_le_bytes(*len) as usize)?;
            rest = others;
            Some(part.to_vec())
        });
        let parts = parts.collect::<Option<Vec<_>>>();
        parts.ok_or_else(|| out_of_step(peer, EXCHANGE, EXCHANGE))
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// A rank is lost.
    pub fn barrier(&self) -> Result<(), CommError> {
        self.gather(&[]).map(drop)
    }

    /// Says what this rank does from now on. Where it does not go on with it for the time that [`Work`] names while
    /// another rank waits for it, it is lost, though it gives signs of life. Where none waits, as all wait for their
    /// devices, the work ends after [`Patience::long`] and [`Patience::silence`].
    pub fn set_work(&self, work: Work) {
        self.watch.set_limit(match work {
            Work::Step => Some(self.patience.silence),
            Work::Long => Some(self.patience.long),
            Work::Any => None,
        });
    }

    /// Says that this rank has gone on with its work.
    pub fn tick(&self) {
        self.watch.tick();
    }

    fn turn(&self) -> Turn<'_> {
        let turn = Turn {
            watch: &self.watch,
            _lock: self.turn.lock().unwrap_or_else(PoisonError::into_inner),
        };
        self.watch.set_waiting(true);
        turn
    }

    /// Whether all ranks are well, as far as this one knows.
    ///
    /// # Errors
    /// A rank is lost.
    pub fn check(&self) -> Result<(), CommError> {
        let failure = self.watch.failure(Duration::ZERO);
        failure.map_or(Ok(()), |failure| Err(CommError::Lost(failure)))
    }

    /// Tells the others why this rank cannot go on.
    pub fn fail(&self, text: &str) {
        self.watch.fail(text);
    }

    /// Says farewell: the others do not wait for this rank any more.
    pub fn leave(&self) {
        self.watch.leave();
    }

    /// The bytes of the next message, which must be of this kind.
    fn expect(&self, peer: &Peer, kind: u8) -> Result<Vec<u8>, CommError> {
        let (found, bytes) = receive(&peer.data).map_err(|e| self.lost(peer, &e))?;
        match found == kind {
            true => Ok(bytes),
            false => Err(out_of_step(peer, found, kind)),
        }
    }

    /// As many values as there is room for.
    fn receive_all(&self, peer: &Peer, values: &mut [f32]) -> Result<(), CommError> {
        self.expect_numbers(peer, values.len())?;
        let read = receive_numbers(&peer.data, values, |value, sum| *value = sum);
        read.map_err(|e| self.lost(peer, &e))
    }

    fn expect_numbers(&self, peer: &Peer, count: usize) -> Result<(), CommError> {
        let (kind, len) = receive_head(&peer.data).map_err(|e| self.lost(peer, &e))?;
        if kind != NUMBERS {
            return Err(out_of_step(peer, kind, NUMBERS));
        }
        if len != 4 * count as u64 {
            return Err(CommError::OutOfStep {
                rank: peer.rank,
                theirs: format!("{} values", len / 4),
                ours: format!("{count} values"),
            });
        }
        Ok(())
    }

    /// Why a connection for values broke.
    fn lost(&self, peer: &Peer, error: &io::Error) -> CommError {
        let unknown = || Failure {
            rank: peer.rank,
            place: peer.place.clone(),
            loss: match self.watch.is_gone(peer.rank) {
                true => Loss::Error("it finished before the others".to_owned()),
                false => Loss::Error(format!("its connection broke: {error}")),
            },
        };
        CommError::Lost(self.watch.failure(REASON_WAIT).unwrap_or_else(unknown))
    }
}

/// Each part behind its length.
fn joined(parts: &[Vec<u8>]) -> Vec<u8> {
    let parts = parts.iter().map(|part| {
        let len = (part.len() as u64).to_le_bytes();
        [&len[..], part].concat()
    });
    parts.collect::<Vec<_>>().concat()
}

fn concatenated(values: &[f32], parts: &[Range<usize>]) -> Vec<f32> {
    let parts = parts.iter().map(|part| &values[part.clone()]);
    parts.collect::<Vec<_>>().concat()
}

fn out_of_step(peer: &Peer, theirs: u8, ours: u8) -> CommError {
    let name = |kind: u8| match kind {
        NUMBERS => "numbers".to_owned(),
        GATHER => "the values of all ranks".to_owned(),
        BROADCAST => "the value of rank 0".to_owned(),
        EXCHANGE => "values for some ranks".to_owned(),
        other => format!("message {other}"),
    };
    CommError::OutOfStep {
        rank: peer.rank,
        theirs: name(theirs),
        ours: name(ours),
    }
}

/// What a rank says first, on each of its two connections.
struct Hello {
    version: String,
    run_id: String,
    size: usize,
    rank: usize,
    is_control: bool,
    place: String,
}

impl Hello {
    fn text(world: &World, version: &str, is_control: bool) -> String {
        let World { run_id, size, rank, .. } = world;
        let role = if is_control { "control" } else { "data" };
        format!("{MAGIC}\n{version}\n{run_id}\n{size}\n{rank}\n{role}\n{}", place())
    }

    /// `None` of a stranger.
    fn read(stream: &TcpStream) -> Option<Self> {
        stream.set_read_timeout(Some(HELLO_WAIT)).ok()?;
        let (kind, bytes) = receive(stream).ok()?;
        stream.set_read_timeout(None).ok()?;
        let text = String::from_utf8(bytes).ok()?;
        let mut lines = text.splitn(7, '\n');
        if kind != HELLO || lines.next()? != MAGIC {
            return None;
        }
        Some(Self {
            version: lines.next()?.to_owned(),
            run_id: lines.next()?.to_owned(),
            size: lines.next()?.parse().ok()?,
            rank: lines.next()?.parse().ok()?,
            is_control: lines.next()? == "control",
            place: lines.next()?.to_owned(),
        })
    }

    /// Why this rank cannot be one of `world`.
    fn problem(&self, world: &World, version: &str) -> Option<String> {
        let Self { rank, place, .. } = self;
        if self.version != version {
            let theirs = &self.version;
            return Some(format!(
                "rank {rank} ({place}) runs version {theirs}, rank 0 version {version}"
            ));
        }
        if self.size != world.size {
            return Some(format!(
                "rank {rank} ({place}) was started with WORLD_SIZE={}, rank 0 with {}",
                self.size, world.size
            ));
        }
        if *rank == 0 || *rank >= world.size {
            return Some(format!("a second process ({place}) says that it is rank {rank}"));
        }
        None
    }
}

/// Host and process, as messages name them.
fn place() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match host.trim() {
        "" => format!("pid {}", std::process::id()),
        host => format!("host {host}, pid {}", std::process::id()),
    }
}

/// Rank 0: waits for all others.
fn accept_all(world: &World, listener: TcpListener, version: &str, patience: Patience) -> Result<Vec<Peer>, CommError> {
    let deadline = Instant::now() + patience.join;
    let mut found: Vec<(Option<TcpStream>, Option<TcpStream>, String)> =
        (1..world.size).map(|_| (None, None, String::new())).collect();
    while found
        .iter()
        .any(|(data, control, _)| data.is_none() || control.is_none())
    {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if Instant::now() >= deadline {
                    return Err(missing(world, patience, &found));
                }
                std::thread::sleep(Duration::from_millis(2));
                continue;
            }
            Err(_) => continue,
        };
        let ready = stream.set_nonblocking(false).and_then(|()| stream.set_nodelay(true));
        let (Ok(()), Some(hello)) = (ready, Hello::read(&stream)) else {
            continue;
        };
        if hello.run_id != world.run_id {
            let text = format!("rank 0 at {} belongs to another run", world.address());
            let _ = send(&stream, REFUSED, text.as_bytes());
            continue;
        }
        let mut problem = hello.problem(world, version);
        if problem.is_none() {
            let slot = &mut found[hello.rank - 1];
            // A rank whose connection ended comes again.
            slot.0.take_if(|stream| is_ended(stream));
            slot.1.take_if(|stream| is_ended(stream));
            let place = if hello.is_control { &mut slot.1 } else { &mut slot.0 };
            if place.is_some() {
                let (rank, first, second) = (hello.rank, &slot.2, &hello.place);
                problem = Some(format!(
                    "two processes say that they are rank {rank}: {first}; {second}"
                ));
            } else {
                *place = Some(stream);
                slot.2 = hello.place;
                continue;
            }
        }
        let problem = problem.unwrap_or_default();
        let others = found.iter().flat_map(|(data, _, _)| data);
        for stream in others.chain([&stream]) {
            let _ = send(stream, REFUSED, problem.as_bytes());
        }
        return Err(CommError::Refused(problem));
    }
    let peers = (1..).zip(found).filter_map(|(rank, (data, control, place))| {
        Some(Peer {
            rank,
            place,
            data: data?,
            control: control?,
        })
    });
    let peers = peers.collect::<Vec<_>>();
    for peer in &peers {
        // A rank that ended meanwhile is noticed by its watch.
        let _ = send(&peer.data, WELCOME, place().as_bytes());
    }
    Ok(peers)
}

/// Waits until the name of rank 0's host is known: that of a host that has just been started may come late.
fn find_host(world: &World, patience: Patience) -> Result<(), CommError> {
    let deadline = Instant::now() + patience.silence.min(patience.join);
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

/// Listens where the others look; on every address of this host where that name is a router's or a proxy's.
fn listen(world: &World) -> Result<TcpListener, CommError> {
    let bound = match TcpListener::bind(world.address()) {
        Err(error) if error.kind() == ErrorKind::AddrNotAvailable => TcpListener::bind(("0.0.0.0", world.master_port)),
        bound => bound,
    };
    let listener = bound.and_then(|listener| listener.set_nonblocking(true).map(|()| listener));
    listener.map_err(|error| CommError::Listen {
        address: world.address(),
        problem: error.to_string(),
    })
}

fn missing(world: &World, patience: Patience, found: &[(Option<TcpStream>, Option<TcpStream>, String)]) -> CommError {
    let missing = found
        .iter()
        .zip(1..)
        .filter(|((data, control, _), _)| data.is_none() || control.is_none());
    let missing = missing
        .map(|(_, rank): (_, usize)| rank.to_string())
        .collect::<Vec<_>>();
    CommError::Missing {
        present: world.size - missing.len(),
        size: world.size,
        address: world.address(),
        seconds: patience.join.as_secs(),
        missing: missing.join(", "),
    }
}

/// Any other rank: finds rank 0, and waits until all are there. Where a connection ends without an answer, something
/// else had listened there, or rank 0 starts again: this rank looks on.
fn connect(world: &World, version: &str, patience: Patience) -> Result<Peer, CommError> {
    let deadline = Instant::now() + patience.join;
    loop {
        let data = open(world, version, false);
        match data.and_then(|data| wait_for_all(world, version, data, deadline)) {
            Ok(Answer::Welcome(peer)) => return Ok(*peer),
            Ok(Answer::Refused(text)) => return Err(CommError::Refused(text)),
            Ok(Answer::Strange) => {
                let error = io::Error::other("something else answers there");
                return Err(no_first_rank(world, patience, &error));
            }
            Err(error) if Instant::now() >= deadline => return Err(no_first_rank(world, patience, &error)),
            Err(_) => std::thread::sleep(RETRY),
        }
    }
}

/// What rank 0 says to another rank's first message.
#[derive(Debug)]
enum Answer {
    Welcome(Box<Peer>),
    Refused(String),
    /// No answer of a rank 0.
    Strange,
}

/// Opens the second connection, and waits for rank 0's answer on the first one.
///
/// # Errors
/// A connection ended before the answer, or there was none until the deadline.
fn wait_for_all(world: &World, version: &str, data: TcpStream, deadline: Instant) -> io::Result<Answer> {
    let control = loop {
        match open(world, version, true) {
            Ok(control) => break Some(control),
            // Rank 0 refuses a rank at its first connection, and ends.
            Err(_) if is_answered(&data) => break None,
            Err(error) if Instant::now() >= deadline => return Err(error),
            Err(_) => {}
        }
    };
    let left = deadline.saturating_duration_since(Instant::now());
    data.set_read_timeout(Some(left.max(HELLO_WAIT)))?;
    let answer = receive(&data)?;
    data.set_read_timeout(None)?;
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

/// One of the two connections to rank 0, and the first message on it.
fn open(world: &World, version: &str, is_control: bool) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(world.address())?;
    stream.set_nodelay(true)?;
    let hello = Hello::text(world, version, is_control);
    send(&stream, HELLO, hello.as_bytes())?;
    Ok(stream)
}

/// Whether the other end has closed a connection, on which nothing is expected yet.
fn is_ended(stream: &TcpStream) -> bool {
    let peeked = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
    let blocks = stream.set_nonblocking(false).is_ok();
    !blocks || !peeked.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

/// Whether a connection brings something, or its end, within [`RETRY`].
fn is_answered(stream: &TcpStream) -> bool {
    let peeked = stream
        .set_read_timeout(Some(RETRY))
        .and_then(|()| stream.peek(&mut [0]));
    !peeked.is_err_and(|error| is_timeout(error.kind()))
}

fn no_first_rank(world: &World, patience: Patience, error: &io::Error) -> CommError {
    CommError::NoFirstRank {
        rank: world.rank,
        address: world.address(),
        seconds: patience.join.as_secs(),
        problem: error.to_string(),
    }
}

#[cfg(test)]
mod tests;
