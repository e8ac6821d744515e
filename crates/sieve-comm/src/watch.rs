//! Signs of life: which rank is lost, and what then happens to the others.
use crate::frame::{receive, send};
use crate::mesh::Timeouts;
use crate::{Failure, Loss};
use std::io::ErrorKind;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

const BEAT: u8 = 1;
const FAILED: u8 = 2;
const BYE: u8 = 3;

/// Time between two heartbeats.
const BEAT_EVERY: Duration = Duration::from_secs(2);
/// Fewest heartbeats that fit into the timeout after which a rank counts as lost.
const BEATS: u32 = 3;

/// Another rank as this one knows it.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) rank: usize,
    /// Host and process id.
    pub(crate) place: String,
    /// Values.
    pub(crate) data: TcpStream,
    /// Signs of life.
    pub(crate) control: TcpStream,
}

/// What all threads of this rank know.
pub(crate) struct Watch {
    rank: usize,
    peers: Arc<Vec<Peer>>,
    state: Mutex<State>,
    changed: Condvar,
}

/// How far a rank's device is with what all ranks do together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct CollectiveCounts {
    /// Ended by all ranks.
    pub num_ended: u64,
    /// Reached by this rank's device, which then waits for the others.
    pub num_reached: u64,
}

#[derive(Default)]
struct State {
    /// Of the other ranks, in the order of `peers`.
    collectives: Vec<CollectiveCounts>,
    failure: Option<Failure>,
    /// A listener has found a failure, which becomes `failure` as soon as the others are informed.
    is_lost: bool,
    /// This rank needs the others no more.
    has_left: bool,
    /// Ranks that said so of themselves.
    gone: Vec<usize>,
    pace: Pace,
    /// Time for which this rank has waited for others, those waits that are over.
    waited: Duration,
}

/// How this rank gets on.
#[derive(Clone, Copy, Default)]
struct Pace {
    /// Grows with everything that it has done.
    ticks: u64,
    /// Its progress timeout, where it waits for no other rank.
    limit: Option<Duration>,
    /// Since when it has waited for the others.
    waits_since: Option<Instant>,
    collectives: CollectiveCounts,
}

impl Pace {
    /// The content of a heartbeat: counts of collectives, and, where the rank must make progress by itself, its ticks
    /// and the timeout in milliseconds.
    fn to_bytes(self) -> Vec<u8> {
        let CollectiveCounts { num_ended, num_reached } = self.collectives;
        let mut words = vec![num_ended, num_reached];
        if let (Some(limit), None) = (self.limit, self.waits_since) {
            words.extend([self.ticks, limit.as_millis() as u64]);
        }
        words.into_iter().flat_map(u64::to_le_bytes).collect()
    }
}

/// Progress of this rank or another one, as heartbeats carry it, and since when it has not changed.
struct Place {
    words: Vec<u64>,
    since: Instant,
}

impl Place {
    fn new() -> Self {
        Self {
            words: Vec::new(),
            since: Instant::now(),
        }
    }

    /// Where the rank waits for no other: its progress timeout, and the time of its last progress, its device's
    /// included.
    fn see(&mut self, pace: &[u8]) -> Option<(Duration, Instant)> {
        let (words, _) = pace.as_chunks();
        let words = words.iter().copied().map(u64::from_le_bytes).collect::<Vec<_>>();
        if words != self.words || words.len() < 4 {
            (self.words, self.since) = (words, Instant::now());
        }
        let limit = Duration::from_millis(*self.words.get(3)?);
        Some((limit, self.since))
    }

    fn collectives(&self) -> CollectiveCounts {
        let word = |place: usize| self.words.get(place).copied().unwrap_or(0);
        CollectiveCounts {
            num_ended: word(0),
            num_reached: word(1),
        }
    }
}

/// Ends the process where the failure of another rank does not end it in time.
pub(crate) type GiveUp = Box<dyn FnOnce(&Failure) + Send>;

impl Watch {
    /// Starts the threads that send and receive heartbeats. They end when this rank leaves.
    pub(crate) fn start(
        rank: usize,
        peers: Arc<Vec<Peer>>,
        timeouts: Timeouts,
        give_up: GiveUp,
    ) -> std::io::Result<Arc<Self>> {
        let this = Arc::new(Self {
            rank,
            state: Mutex::new(State {
                collectives: vec![CollectiveCounts::default(); peers.len()],
                ..State::default()
            }),
            peers,
            changed: Condvar::new(),
        });
        for index in 0..this.peers.len() {
            this.peers[index].control.set_read_timeout(Some(timeouts.silence))?;
            let watch = this.clone();
            spawn("sieve-listen", move || watch.listen(index, timeouts.silence))?;
        }
        let watch = this.clone();
        let every = BEAT_EVERY.min(timeouts.silence / BEATS);
        spawn("sieve-beat", move || watch.beat(every, timeouts))?;
        let watch = this.clone();
        spawn("sieve-give-up", move || watch.end(timeouts.goodbye, give_up))?;
        Ok(this)
    }

    /// The lost rank, if any; waits a moment for the report, because a broken connection for values may be noticed
    /// before its reason.
    pub(crate) fn failure(&self, wait: Duration) -> Option<Failure> {
        let state = self.lock();
        let waited = self
            .changed
            .wait_timeout_while(state, wait, |state| state.failure.is_none());
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.failure.clone()
    }

    /// Sends all ranks the error that ends this one.
    pub(crate) fn fail(&self, text: &str) {
        let failure = Failure {
            rank: self.rank,
            place: String::new(),
            loss: Loss::Error(text.to_owned()),
        };
        self.lock().has_left = true;
        self.tell(&failure);
        self.changed.notify_all();
    }

    /// Tells all ranks that this one needs them no more.
    pub(crate) fn leave(&self) {
        self.lock().has_left = true;
        for peer in self.peers.iter() {
            let _ = send(&peer.control, BYE, &[]);
        }
        self.changed.notify_all();
    }

    /// This rank has done something.
    pub(crate) fn tick(&self) {
        self.lock().pace.ticks += 1;
    }

    /// Sets the progress timeout; `None` disables it.
    pub(crate) fn set_limit(&self, limit: Option<Duration>) {
        let pace = &mut self.lock().pace;
        pace.ticks += 1;
        pace.limit = limit;
    }

    /// How far this rank's device is.
    pub(crate) fn set_collective_counts(&self, counts: CollectiveCounts) {
        self.lock().pace.collectives = counts;
    }

    /// From now on this rank waits for the others, or no more.
    pub(crate) fn set_waiting(&self, waits: bool) {
        let mut state = self.lock();
        let since = std::mem::replace(&mut state.pace.waits_since, waits.then(Instant::now));
        state.waited += since.map_or(Duration::ZERO, |since| since.elapsed());
        state.pace.ticks += 1;
    }

    /// Whether this rank has a progress timeout.
    pub(crate) fn has_limit(&self) -> bool {
        self.lock().pace.limit.is_some()
    }

    /// Time for which this rank has waited.
    pub(crate) fn waited(&self) -> Duration {
        self.lock().waited
    }

    fn beat(&self, every: Duration, timeouts: Timeouts) {
        let mut own = Place::new();
        // Rank 0 alone receives all heartbeats, so it reports first if no rank makes progress.
        let head_start = if self.rank == 0 { Duration::ZERO } else { BEATS * every };
        let mut state = self.lock();
        while !state.has_left && state.failure.is_none() {
            let pace = state.pace.to_bytes();
            drop(state);
            // A rank that waits for this one would have reported it earlier. If no rank makes progress and none waits
            // for another, each waits for its GPU, and the GPUs for one that hangs.
            if let Some((limit, since)) = own.see(&pace) {
                let all_still = match limit <= timeouts.silence {
                    true => timeouts.still,
                    false => timeouts.long + timeouts.silence,
                };
                if since.elapsed() > all_still + head_start {
                    return self.lose(Failure {
                        // Equal on all ranks that notice it; one of them reports it.
                        rank: 0,
                        place: String::new(),
                        loss: Loss::AllStill {
                            seconds: all_still.as_secs(),
                            behind: self.behind(),
                        },
                    });
                }
            }
            for peer in self.peers.iter() {
                // A connection that broke is noticed by who listens to it.
                let _ = send(&peer.control, BEAT, &pace);
            }
            let waited = self.changed.wait_timeout(self.lock(), every);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn listen(&self, index: usize, silence: Duration) {
        let peer = &self.peers[index];
        let lost = |loss| Failure {
            rank: peer.rank,
            place: peer.place.clone(),
            loss,
        };
        let mut place = Place::new();
        let failure = loop {
            match receive(&peer.control) {
                Ok((BEAT, bytes)) => {
                    let met = place.see(&bytes);
                    let mut state = self.lock();
                    state.collectives[index] = place.collectives();
                    let waits = state.pace.waits_since;
                    drop(state);
                    if let Some((limit, since)) = met
                        && waits.is_some_and(|waits| waits.max(since).elapsed() > limit)
                    {
                        break lost(Loss::Still(limit.as_secs()));
                    }
                }
                Ok((BYE, _)) => {
                    self.lock().gone.push(peer.rank);
                    return;
                }
                Ok((FAILED, bytes)) => break read_failure(&bytes, peer),
                Err(error) if is_timeout(error.kind()) => {
                    break lost(Loss::Silent(silence.as_secs()));
                }
                _ => break lost(Loss::Ended),
            }
        };
        self.lose(failure);
    }

    /// The rank whose device has not reached what another one waits in, in words; empty where all are equally far.
    fn behind(&self) -> String {
        let state = self.lock();
        let own = (state.pace.collectives, self.rank, "");
        let others = self.peers.iter().zip(&state.collectives);
        let others = others.map(|(peer, found)| (*found, peer.rank, peer.place.as_str()));
        let all = others.chain([own]).collect::<Vec<_>>();
        let reached = |(found, _, _): &(CollectiveCounts, usize, &str)| found.num_reached;
        let most = all.iter().map(reached).max().unwrap_or(0);
        let Some((found, rank, place)) = all.iter().min_by_key(|of| reached(of)).filter(|of| reached(of) < most) else {
            return String::new();
        };
        let place = match *place {
            "" => String::new(),
            place => format!(" ({place})"),
        };
        let reached = found.num_reached;
        format!("rank {rank}{place} has reached collective {reached}, another waits in collective {most}")
    }

    /// Ends the work of all ranks, where nothing has ended it before.
    fn lose(&self, failure: Failure) {
        let mut state = self.lock();
        if state.has_left || state.is_lost {
            return;
        }
        state.is_lost = true;
        drop(state);
        // Report before this rank leaves, since messages after a goodbye are ignored. Rank 0 informs the others, also
        // of a hung rank, which cannot report itself.
        if self.rank == 0 || matches!(failure.loss, Loss::Still(_) | Loss::AllStill { .. }) {
            self.tell(&failure);
        }
        self.lock().failure = Some(failure);
        self.changed.notify_all();
        // Whoever waits for values wakes up with an error.
        for peer in self.peers.iter() {
            let _ = peer.data.shutdown(Shutdown::Both);
        }
    }

    /// Sends a failure to everybody who listens.
    fn tell(&self, failure: &Failure) {
        let (kind, text) = match &failure.loss {
            Loss::Ended => ("ended", String::new()),
            Loss::Silent(seconds) => ("silent", seconds.to_string()),
            Loss::Still(seconds) => ("still", seconds.to_string()),
            Loss::AllStill { seconds, behind } => ("all still", format!("{seconds}\n{behind}")),
            Loss::Error(text) => ("error", text.clone()),
        };
        let message = format!("{}\n{}\n{kind}\n{text}", failure.rank, failure.place);
        for peer in self.peers.iter() {
            let _ = send(&peer.control, FAILED, message.as_bytes());
        }
    }

    /// Waits for a failure; the process then has the time `goodbye` to end by itself.
    fn end(&self, goodbye: Duration, give_up: GiveUp) {
        let is_well = |state: &mut State| !state.has_left && state.failure.is_none();
        let waited = self.changed.wait_while(self.lock(), is_well);
        drop(waited);
        if self.lock().has_left {
            return;
        }
        let waited = self.changed.wait_timeout_while(self.lock(), goodbye, |s| !s.has_left);
        drop(waited);
        let state = self.lock();
        if let (false, Some(failure)) = (state.has_left, state.failure.clone()) {
            drop(state);
            give_up(&failure);
        }
    }

    /// Whether a rank has sent a goodbye message.
    pub(crate) fn is_gone(&self, rank: usize) -> bool {
        self.lock().gone.contains(&rank)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    thread::Builder::new().name(name.to_owned()).spawn(work).map(drop)
}

pub(crate) fn is_timeout(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

fn read_failure(bytes: &[u8], from: &Peer) -> Failure {
    let text = String::from_utf8_lossy(bytes);
    let mut parts = text.splitn(4, '\n');
    let mut part = || parts.next().unwrap_or_default().to_owned();
    let (rank, place, kind, text) = (part(), part(), part(), part());
    let rank = rank.parse().unwrap_or(from.rank);
    Failure {
        rank,
        // A rank does not send its own place.
        place: if rank == from.rank { from.place.clone() } else { place },
        loss: match kind.as_str() {
            "silent" => Loss::Silent(text.parse().unwrap_or(0)),
            "still" => Loss::Still(text.parse().unwrap_or(0)),
            "all still" => {
                let (seconds, behind) = text.split_once('\n').unwrap_or((&text, ""));
                Loss::AllStill {
                    seconds: seconds.parse().unwrap_or(0),
                    behind: behind.to_owned(),
                }
            }
            "error" => Loss::Error(text),
            _ => Loss::Ended,
        },
    }
}
