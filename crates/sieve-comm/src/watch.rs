//! Heartbeats: which rank is lost, and how the others then end.
use crate::error::in_parentheses;
use crate::frame::{receive, send};
use crate::timeouts::Timeouts;
use crate::{Failure, Loss};
use std::io::ErrorKind;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

// Kinds of messages on the control connections.
const BEAT: u8 = 1;
const FAILED: u8 = 2;
const BYE: u8 = 3;

/// Time between two heartbeats of a rank.
const BEAT_EVERY: Duration = Duration::from_secs(2);
/// At least this many heartbeats must fit into the timeout after which a rank counts as lost.
const BEATS: u32 = 3;

/// Another rank, and this rank's connections to it.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) rank: usize,
    /// Host name and process id of the rank.
    pub(crate) place: String,
    /// Connection for the values of collectives.
    pub(crate) data: TcpStream,
    /// Connection for heartbeats, errors and goodbye messages.
    pub(crate) control: TcpStream,
}

/// What this rank knows of itself and the others, shared by all its threads.
pub(crate) struct Watch {
    rank: usize,
    peers: Arc<Vec<Peer>>,
    state: Mutex<State>,
    changed: Condvar,
}

/// How many collectives a rank's device has reached and completed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct CollectiveCounts {
    /// Number of collectives that all ranks have completed.
    pub num_ended: u64,
    /// Number of collectives that this rank's device has reached; in the last of them it may still wait for the others.
    pub num_reached: u64,
}

#[derive(Default)]
struct State {
    /// The counts of the other ranks, in the order of `peers`.
    collectives: Vec<CollectiveCounts>,
    failure: Option<Failure>,
    /// A thread has found a failure, which becomes `failure` as soon as the other ranks are informed.
    is_lost: bool,
    /// This rank has said goodbye or failed.
    has_left: bool,
    /// The ranks that have said goodbye.
    gone: Vec<usize>,
    progress: Progress,
    /// How long this rank has waited for others in all; a wait in progress is not counted yet.
    waited: Duration,
}

/// How far this rank is.
#[derive(Clone, Copy, Default)]
struct Progress {
    /// Grows with every step of the rank's work.
    ticks: u64,
    /// The timeout for the rank's progress, which holds while the rank waits for no other.
    limit: Option<Duration>,
    /// Time at which the rank began to wait for others; `None` if it does not wait.
    waits_since: Option<Instant>,
    collectives: CollectiveCounts,
}

impl Progress {
    /// The content of a heartbeat, in 64-bit words: the counts of collectives, and, if the rank has a timeout and waits
    /// for no other, its ticks and the timeout in milliseconds.
    fn to_bytes(self) -> Vec<u8> {
        let CollectiveCounts { num_ended, num_reached } = self.collectives;
        let mut words = vec![num_ended, num_reached];
        if let (Some(limit), None) = (self.limit, self.waits_since) {
            words.extend([self.ticks, limit.as_millis() as u64]);
        }
        words.into_iter().flat_map(u64::to_le_bytes).collect()
    }
}

/// The last heartbeat of a rank, and since when its content has not changed.
struct LastBeat {
    words: Vec<u64>,
    since: Instant,
}

impl LastBeat {
    fn new() -> Self {
        Self { words: Vec::new(), since: Instant::now() }
    }

    /// Stores a heartbeat, the words of `Progress::to_bytes`. If the rank has a timeout and waits for no other, returns
    /// the timeout and the time of the last progress of the rank or its device.
    fn update(&mut self, beat: &[u8]) -> Option<(Duration, Instant)> {
        let (words, _) = beat.as_chunks();
        let words = words.iter().copied().map(u64::from_le_bytes).collect::<Vec<_>>();
        // With two words alone, the rank waits or has no timeout: lack of change is then no lack of progress.
        if words != self.words || words.len() < 4 {
            (self.words, self.since) = (words, Instant::now());
        }
        let limit = Duration::from_millis(*self.words.get(3)?);
        Some((limit, self.since))
    }

    /// The counts in the last heartbeat; 0 before the first.
    fn collectives(&self) -> CollectiveCounts {
        let word = |index: usize| self.words.get(index).copied().unwrap_or(0);
        CollectiveCounts { num_ended: word(0), num_reached: word(1) }
    }
}

/// Ends the process if it has not ended in time after the failure of another rank.
pub(crate) type GiveUp = Box<dyn FnOnce(&Failure) + Send>;

impl Watch {
    /// Starts the threads that send and receive heartbeats, and the one that calls `give_up`. The sender and the latter
    /// end when this rank leaves or a failure is known; the receiver of a peer, when that peer leaves or is lost.
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
        spawn("sieve-give-up", move || watch.end_late(timeouts.goodbye, give_up))?;
        Ok(this)
    }

    /// The lost rank, if any. Waits up to `wait` for a report of it.
    pub(crate) fn failure(&self, wait: Duration) -> Option<Failure> {
        let state = self.lock();
        let waited = self.changed.wait_timeout_while(state, wait, |state| state.failure.is_none());
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.failure.clone()
    }

    /// Sends the error with which this rank ends to all ranks.
    pub(crate) fn fail(&self, text: &str) {
        let failure = Failure { rank: self.rank, place: String::new(), loss: Loss::Error(text.to_owned()) };
        self.lock().has_left = true;
        self.tell(&failure);
        self.changed.notify_all();
    }

    /// Sends a goodbye message to all ranks.
    pub(crate) fn leave(&self) {
        self.lock().has_left = true;
        for peer in self.peers.iter() {
            let _ = send(&peer.control, BYE, &[]);
        }
        self.changed.notify_all();
    }

    /// Notes that this rank made progress; heartbeats report it.
    pub(crate) fn tick(&self) {
        self.lock().progress.ticks += 1;
    }

    /// Sets the progress timeout; `None` disables it.
    pub(crate) fn set_limit(&self, limit: Option<Duration>) {
        let progress = &mut self.lock().progress;
        progress.ticks += 1;
        progress.limit = limit;
    }

    /// Sets the counts of this rank's device.
    pub(crate) fn set_collective_counts(&self, counts: CollectiveCounts) {
        self.lock().progress.collectives = counts;
    }

    /// Sets whether this rank waits for the others from now on.
    pub(crate) fn set_waiting(&self, waits: bool) {
        let mut state = self.lock();
        let since = std::mem::replace(&mut state.progress.waits_since, waits.then(Instant::now));
        state.waited += since.map_or(Duration::ZERO, |since| since.elapsed());
        state.progress.ticks += 1;
    }

    /// Whether this rank has a progress timeout.
    pub(crate) fn has_limit(&self) -> bool {
        self.lock().progress.limit.is_some()
    }

    /// How long this rank has waited for others so far; a wait in progress is not counted yet.
    pub(crate) fn waited(&self) -> Duration {
        self.lock().waited
    }

    /// Sends heartbeats, and notices when no rank makes progress.
    fn beat(&self, every: Duration, timeouts: Timeouts) {
        let mut own = LastBeat::new();
        // Rank 0 alone receives all heartbeats, so it reports first if no rank makes progress.
        let head_start = if self.rank == 0 { Duration::ZERO } else { BEATS * every };
        let mut state = self.lock();
        while !state.has_left && state.failure.is_none() {
            let beat = state.progress.to_bytes();
            drop(state);
            // If a rank waited for this one, it would have reported this one earlier. So no rank waits for another:
            // each waits for its GPU, and the GPUs wait for one that hangs.
            if let Some((limit, since)) = own.update(&beat) {
                // In a step the rank's own limit is at most `silence`; in longer work it is `long`.
                let all_still =
                    if limit <= timeouts.silence { timeouts.still } else { timeouts.long + timeouts.silence };
                if since.elapsed() > all_still + head_start {
                    return self.lose(Failure {
                        // Rank 0 need not be at fault: all ranks that notice this must report the same failure.
                        rank: 0,
                        place: String::new(),
                        loss: Loss::AllStill { seconds: all_still.as_secs(), behind: self.behind() },
                    });
                }
            }
            for peer in self.peers.iter() {
                // If the connection is broken, the thread that listens to it notices.
                let _ = send(&peer.control, BEAT, &beat);
            }
            let waited = self.changed.wait_timeout(self.lock(), every);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Receives the heartbeats of a rank, until that rank says goodbye or is lost.
    fn listen(&self, index: usize, silence: Duration) {
        let peer = &self.peers[index];
        let lost = |loss| Failure { rank: peer.rank, place: peer.place.clone(), loss };
        let mut last = LastBeat::new();
        let failure = loop {
            match receive(&peer.control) {
                Ok((BEAT, bytes)) => {
                    let timeout = last.update(&bytes);
                    let mut state = self.lock();
                    state.collectives[index] = last.collectives();
                    let waits_since = state.progress.waits_since;
                    drop(state);
                    // The other rank is lost if it made no progress for `limit` while this rank waited all that time.
                    if let Some((limit, since)) = timeout
                        && waits_since.is_some_and(|waits_since| waits_since.max(since).elapsed() > limit)
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

    /// A phrase that names the rank whose device has reached the fewest collectives; empty if all have reached equally
    /// many.
    fn behind(&self) -> String {
        let state = self.lock();
        let own = (state.progress.collectives, self.rank, "");
        let others = self.peers.iter().zip(&state.collectives);
        let others = others.map(|(peer, counts)| (*counts, peer.rank, peer.place.as_str()));
        let all = others.chain([own]).collect::<Vec<_>>();
        let reached = |(counts, _, _): &(CollectiveCounts, usize, &str)| counts.num_reached;
        let most = all.iter().map(reached).max().unwrap_or(0);
        let Some((counts, rank, place)) = all.iter().min_by_key(|x| reached(x)).filter(|x| reached(x) < most) else {
            return String::new();
        };
        let (place, reached) = (in_parentheses(place), counts.num_reached);
        format!("rank {rank}{place} has reached collective {reached}, another waits in collective {most}")
    }

    /// Makes all calls of this rank fail from now on, unless it has left or failed before.
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
        // A thread that waits for values wakes up with an error.
        for peer in self.peers.iter() {
            let _ = peer.data.shutdown(Shutdown::Both);
        }
    }

    /// Sends a failure to all connected ranks.
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

    /// Waits for a failure, then for the time `goodbye`, in which the process should end, and then calls `give_up`.
    /// Returns without calling it once this rank leaves.
    fn end_late(&self, goodbye: Duration, give_up: GiveUp) {
        let is_well = |state: &mut State| !state.has_left && state.failure.is_none();
        drop(self.changed.wait_while(self.lock(), is_well));
        drop(self.changed.wait_timeout_while(self.lock(), goodbye, |s| !s.has_left));
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

/// The failure that [`Watch::tell`] of rank `from` has sent as these bytes.
fn read_failure(bytes: &[u8], from: &Peer) -> Failure {
    let text = String::from_utf8_lossy(bytes);
    let mut parts = text.splitn(4, '\n');
    let mut part = || parts.next().unwrap_or_default().to_owned();
    let (rank, place, kind, text) = (part(), part(), part(), part());
    let rank = rank.parse().unwrap_or(from.rank);
    Failure {
        rank,
        // A rank that reports its own error does not send its host name and process id.
        place: if rank == from.rank { from.place.clone() } else { place },
        loss: match kind.as_str() {
            "silent" => Loss::Silent(text.parse().unwrap_or(0)),
            "still" => Loss::Still(text.parse().unwrap_or(0)),
            "all still" => {
                let (seconds, behind) = text.split_once('\n').unwrap_or((&text, ""));
                Loss::AllStill { seconds: seconds.parse().unwrap_or(0), behind: behind.to_owned() }
            }
            "error" => Loss::Error(text),
            _ => Loss::Ended,
        },
    }
}
