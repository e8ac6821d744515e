//! The TCP connections of a group of ranks, and collectives over them.
mod join;

use crate::frame::{receive, receive_head, receive_numbers, send, send_numbers};
use crate::timeouts::{Timeouts, Work};
use crate::watch::{CollectiveCounts, GiveUp, Peer, Watch};
use crate::{CommError, Failure, Loss, ShardGroup, World};
pub use join::place;
use join::{accept_all, connect, find_host, listen};
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

// Kinds of messages on the connections for values.
const NUMBERS: u8 = 20;
const GATHER: u8 = 21;
const BROADCAST: u8 = 22;
const EXCHANGE: u8 = 23;

/// A connection for values may break before the report of the reason arrives; this is how long to wait for the report.
const REASON_WAIT: Duration = Duration::from_secs(3);

/// This rank's connections. Every rank calls the same functions in the same order.
pub struct Mesh {
    world: World,
    /// On rank 0 all other ranks in order, on each other rank only rank 0.
    peers: Arc<Vec<Peer>>,
    watch: Arc<Watch>,
    timeouts: Timeouts,
    /// Held by the thread that calls a collective.
    exclusive: Mutex<()>,
}

impl fmt::Debug for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mesh").field("world", &self.world).finish_non_exhaustive()
    }
}

/// A collective in progress. While it lives, the watch counts this rank as waiting for the others.
struct Collective<'a> {
    watch: &'a Watch,
    _lock: MutexGuard<'a, ()>,
}

impl Drop for Collective<'_> {
    fn drop(&mut self) {
        self.watch.set_waiting(false);
    }
}

impl Mesh {
    /// Connects this rank with the others of `world`, and returns when all have joined. `version` must be equal on all
    /// ranks.
    ///
    /// Once another rank is lost, every call fails. A process that has not ended [`Timeouts::goodbye`] later is ended
    /// by `give_up`: its device may wait for the lost rank's device.
    ///
    /// # Errors
    /// The port is taken, a rank does not join in time, two processes claim the same rank, or versions differ.
    pub fn join(
        world: World,
        version: &str,
        timeouts: Timeouts,
        give_up: impl FnOnce(&Failure) + Send + 'static,
    ) -> Result<Self, CommError> {
        find_host(&world, timeouts)?;
        let peers = if world.rank == 0 {
            accept_all(&world, listen(&world)?, version, timeouts)?
        } else {
            vec![connect(&world, version, timeouts)?]
        };
        Self::start(world, peers, timeouts, Box::new(give_up))
    }

    /// Starts the threads that watch the connected ranks.
    fn start(world: World, peers: Vec<Peer>, timeouts: Timeouts, give_up: GiveUp) -> Result<Self, CommError> {
        let peers = Arc::new(peers);
        let watch = Watch::start(world.rank, peers.clone(), timeouts, give_up);
        let watch = watch.map_err(|error| CommError::Refused(format!("starting threads: {error}")))?;
        Ok(Self { world, peers, watch, timeouts, exclusive: Mutex::new(()) })
    }

    /// This rank's number, its group and its host.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// The sums of `values` over all ranks. Rank 0 adds them up in the order of the ranks, so every rank gets the same
    /// bits. A rank gets the sums in its ranges, `parts(rank)`, concatenated; `parts` must be equal on all ranks.
    ///
    /// # Errors
    /// A rank is lost, or passes another number of values.
    pub fn sum_parts(
        &self,
        mut values: Vec<f32>,
        parts: &dyn Fn(usize) -> Vec<Range<usize>>,
    ) -> Result<Vec<f32>, CommError> {
        let _collective = self.begin()?;
        let rank = self.world.rank;
        if rank > 0 {
            let first = &self.peers[0];
            self.send_values(first, &values)?;
            // `values` now receives the sums of this rank's ranges.
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
            self.send_values(peer, &concatenated(&values, &parts(peer.rank)))?;
        }
        Ok(concatenated(&values, &parts(0)))
    }

    /// Replaces `values` by their sums over all ranks, as [`sum_parts`](Self::sum_parts) adds them.
    ///
    /// # Errors
    /// A rank is lost, or passes another number of values.
    pub fn sum(&self, values: &mut [f32]) -> Result<(), CommError> {
        let all = 0..values.len();
        let sums = self.sum_parts(values.to_vec(), &|_| vec![all.clone()])?;
        values.copy_from_slice(&sums);
        Ok(())
    }

    /// The values of the ranks of this one's group, concatenated in the order of the ranks. `counts` gives how many
    /// values each rank passes. All ranks must call it, with groups of the same size.
    ///
    /// # Errors
    /// A rank is lost, or passes another number of values.
    pub fn gather_values(
        &self,
        own: &[f32],
        counts: &dyn Fn(usize) -> usize,
        group: ShardGroup,
    ) -> Result<Vec<f32>, CommError> {
        let _collective = self.begin()?;
        let new = |ranks: Range<usize>| vec![0.0; ranks.map(counts).sum()];
        if self.world.rank > 0 {
            let first = &self.peers[0];
            self.send_values(first, own)?;
            let mut values = new(group.ranks());
            self.receive_all(first, &mut values)?;
            return Ok(values);
        }
        let mut values_of_first = Vec::new();
        for first in (0..self.world.size).step_by(group.size()) {
            let ranks = first..first + group.size();
            let mut values = new(ranks.clone());
            let mut rest = values.as_mut_slice();
            for rank in ranks.clone() {
                let (theirs, others) = rest.split_at_mut(counts(rank));
                match rank {
                    0 => theirs.copy_from_slice(own),
                    _ => self.receive_all(self.peer(rank), theirs)?,
                }
                rest = others;
            }
            for rank in ranks.filter(|&rank| rank > 0) {
                self.send_values(self.peer(rank), &values)?;
            }
            if first == 0 {
                values_of_first = values;
            }
        }
        Ok(values_of_first)
    }

    /// On rank 0: the connections to another rank.
    fn peer(&self, rank: usize) -> &Peer {
        &self.peers[rank - 1]
    }

    /// The bytes of every rank, by rank.
    ///
    /// # Errors
    /// A rank is lost.
    pub fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let _collective = self.begin()?;
        if self.world.rank > 0 {
            let first = &self.peers[0];
            self.send(first, GATHER, bytes)?;
            return self.expect_parts(first, GATHER);
        }
        let mut all = vec![bytes.to_vec()];
        for peer in self.peers.iter() {
            all.push(self.expect(peer, GATHER)?);
        }
        // Each rank gets all values in one message, since a thousand ranks may do this in every step.
        let joined = joined(&all);
        for peer in self.peers.iter() {
            self.send(peer, GATHER, &joined)?;
        }
        Ok(all)
    }

    /// The bytes that rank 0 passes; other ranks' bytes are ignored.
    ///
    /// # Errors
    /// A rank is lost.
    pub fn broadcast(&self, bytes: &[u8]) -> Result<Vec<u8>, CommError> {
        let _collective = self.begin()?;
        if self.world.rank > 0 {
            return self.expect(&self.peers[0], BROADCAST);
        }
        for peer in self.peers.iter() {
            self.send(peer, BROADCAST, bytes)?;
        }
        Ok(bytes.to_vec())
    }

    /// Sends `bytes[rank]`, which may be empty, to each rank, and returns what each rank sent to this one, by rank.
    ///
    /// # Errors
    /// A rank is lost.
    pub fn exchange(&self, bytes: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>, CommError> {
        let _collective = self.begin()?;
        if self.world.rank > 0 {
            let first = &self.peers[0];
            self.send(first, EXCHANGE, &joined(&bytes))?;
            return self.expect_parts(first, EXCHANGE);
        }
        // `all[sender][receiver]` is what one rank sends to another.
        let mut all = vec![bytes];
        for peer in self.peers.iter() {
            all.push(self.expect_parts(peer, EXCHANGE)?);
        }
        let mut for_rank = |rank: usize| {
            let from = all.iter_mut().map(|from| std::mem::take(&mut from[rank]));
            from.collect::<Vec<_>>()
        };
        for peer in self.peers.iter() {
            self.send(peer, EXCHANGE, &joined(&for_rank(peer.rank)))?;
        }
        Ok(for_rank(0))
    }

    /// The parts of the next message, one for each rank; [`joined`] has composed it. Fails if it has too few bytes.
    fn expect_parts(&self, peer: &Peer, kind: u8) -> Result<Vec<Vec<u8>>, CommError> {
        let bytes = self.expect(peer, kind)?;
        let mut rest = bytes.as_slice();
        let parts = (0..self.world.size).map(|_| {
            let (len, others) = rest.split_first_chunk()?;
            let (part, others) = others.split_at_checked(u64::from_le_bytes(*len) as usize)?;
            rest = others;
            Some(part.to_vec())
        });
        let parts = parts.collect::<Option<Vec<_>>>();
        parts.ok_or_else(|| out_of_step(peer, kind, kind))
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// A rank is lost.
    pub fn barrier(&self) -> Result<(), CommError> {
        self.gather(&[]).map(drop)
    }

    /// Sets what this rank does from now on, and with it the progress timeout. A rank that makes no progress for the
    /// timeout of its [`Work`] while others wait for it counts as hung, even if its heartbeats arrive. If no rank waits
    /// for another, because all wait for their devices, the timeout is [`Timeouts::still`] in a step, and
    /// [`Timeouts::long`] plus [`Timeouts::silence`] in other work.
    pub fn set_work(&self, work: Work) {
        self.watch.set_limit(match work {
            Work::Step => Some(self.timeouts.silence),
            Work::Long => Some(self.timeouts.long),
            Work::Any => None,
        });
    }

    /// Reports that this rank has made progress.
    pub fn tick(&self) {
        self.watch.tick();
    }

    /// Reports how many collectives this rank's device has reached and completed; heartbeats carry the counts to the
    /// others. If no rank makes progress, the error names the rank that is behind.
    pub fn set_collective_counts(&self, counts: CollectiveCounts) {
        self.watch.set_collective_counts(counts);
    }

    /// Whether this rank has a progress timeout, as between its first step and its last.
    pub fn is_at_work(&self) -> bool {
        self.watch.has_limit()
    }

    /// How long this rank has waited for others so far.
    pub fn waited(&self) -> Duration {
        self.watch.waited()
    }

    /// Begins a collective, once no other thread is in one. Fails if a rank is known to be lost: data that it sent
    /// before may still be readable, and the collective would seem to succeed.
    fn begin(&self) -> Result<Collective<'_>, CommError> {
        self.check()?;
        let collective =
            Collective { watch: &self.watch, _lock: self.exclusive.lock().unwrap_or_else(PoisonError::into_inner) };
        self.watch.set_waiting(true);
        Ok(collective)
    }

    /// Succeeds unless this rank knows that another one is lost.
    ///
    /// # Errors
    /// A rank is lost.
    pub fn check(&self) -> Result<(), CommError> {
        let failure = self.watch.failure(Duration::ZERO);
        failure.map_or(Ok(()), |failure| Err(CommError::Lost(failure)))
    }

    /// Sends the error with which this rank ends to the other ranks.
    pub fn fail(&self, text: &str) {
        self.watch.fail(text);
    }

    /// Sends a goodbye message, after which the others do not miss this rank's heartbeats.
    pub fn leave(&self) {
        self.watch.leave();
    }

    fn send(&self, peer: &Peer, kind: u8, bytes: &[u8]) -> Result<(), CommError> {
        send(&peer.data, kind, bytes).map_err(|e| self.lost(peer, &e))
    }

    fn send_values(&self, peer: &Peer, values: &[f32]) -> Result<(), CommError> {
        send_numbers(&peer.data, NUMBERS, values).map_err(|e| self.lost(peer, &e))
    }

    /// The content of the next message, which must be of this kind.
    fn expect(&self, peer: &Peer, kind: u8) -> Result<Vec<u8>, CommError> {
        let (found, bytes) = receive(&peer.data).map_err(|e| self.lost(peer, &e))?;
        if found == kind { Ok(bytes) } else { Err(out_of_step(peer, found, kind)) }
    }

    /// Fills `values` from the next message, which must have as many.
    fn receive_all(&self, peer: &Peer, values: &mut [f32]) -> Result<(), CommError> {
        self.expect_numbers(peer, values.len())?;
        let read = receive_numbers(&peer.data, values, |value, new| *value = new);
        read.map_err(|e| self.lost(peer, &e))
    }

    /// Reads the head of the next message, which must be of `count` numbers.
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

    /// The error to report where a connection for values returned `error`.
    fn lost(&self, peer: &Peer, error: &io::Error) -> CommError {
        // The message was too long: nothing was sent, and no rank is lost.
        if error.kind() == io::ErrorKind::InvalidInput {
            return CommError::TooLong(error.to_string());
        }
        let unknown = || Failure {
            rank: peer.rank,
            place: peer.place.clone(),
            loss: if self.watch.is_gone(peer.rank) {
                Loss::Error("it finished before the others".to_owned())
            } else {
                Loss::Error(format!("its connection broke: {error}"))
            },
        };
        CommError::Lost(self.watch.failure(REASON_WAIT).unwrap_or_else(unknown))
    }
}

/// The parts as one message: each part's length, then its bytes.
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

/// The error for a message of kind `theirs` from `peer` where this rank expects one of kind `ours`.
fn out_of_step(peer: &Peer, theirs: u8, ours: u8) -> CommError {
    let name = |kind: u8| match kind {
        NUMBERS => "numbers".to_owned(),
        GATHER => "the values of all ranks".to_owned(),
        BROADCAST => "the value of rank 0".to_owned(),
        EXCHANGE => "values for some ranks".to_owned(),
        other => format!("message {other}"),
    };
    CommError::OutOfStep { rank: peer.rank, theirs: name(theirs), ours: name(ours) }
}

#[cfg(test)]
mod tests;
