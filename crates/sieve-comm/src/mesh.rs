//! The connections of a group, and what all its ranks do together.
mod join;

use crate::frame::{receive, receive_head, receive_numbers, send, send_numbers};
use crate::watch::{CollectiveCounts, GiveUp, Peer, Watch};
use crate::{CommError, Failure, Loss, World};
pub use join::place;
use join::{accept_all, connect, find_host, listen};
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Numbers, to be added up or not.
const NUMBERS: u8 = 20;
const GATHER: u8 = 21;
const BROADCAST: u8 = 22;
const EXCHANGE: u8 = 23;

/// How much later than a broken connection its reason may come.
const REASON_WAIT: Duration = Duration::from_secs(3);

/// How long a rank waits for others.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// Until all ranks have joined.
    pub join: Duration,
    /// Without a heartbeat, and without progress in a step that others wait for.
    pub silence: Duration,
    /// Without progress of any rank in a step while none waits for another.
    pub still: Duration,
    /// Without progress in other work of a run.
    pub long: Duration,
    /// After another rank is lost, until this process must end.
    pub goodbye: Duration,
}

impl Default for Timeouts {
    /// Five minutes to join, 30 seconds without a heartbeat, 100 seconds without progress of any rank in a step, ten
    /// minutes in long work, 10 seconds to end.
    fn default() -> Self {
        Self {
            join: Duration::from_secs(300),
            silence: Duration::from_secs(30),
            still: Duration::from_secs(100),
            long: Duration::from_secs(600),
            goodbye: Duration::from_secs(10),
        }
    }
}

/// What a rank does while others may wait for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// An ordinary step: progress within [`Timeouts::silence`].
    Step,
    /// A first step, a validation, a checkpoint: progress within [`Timeouts::long`].
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
    timeouts: Timeouts,
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
    /// From then on every call fails once another rank is lost; a process that has not left some seconds later is ended
    /// by `give_up`, since it may wait for a device that waits for the lost rank.
    ///
    /// # Errors
    /// The port is taken, a rank does not come, one is twice there or of another version.
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

    /// Watches over ranks that are all there.
    fn start(world: World, peers: Vec<Peer>, timeouts: Timeouts, give_up: GiveUp) -> Result<Self, CommError> {
        let peers = Arc::new(peers);
        let watch = Watch::start(world.rank, peers.clone(), timeouts, give_up);
        let watch = watch.map_err(|error| CommError::Refused(format!("starting threads: {error}")))?;
        Ok(Self {
            world,
            peers,
            watch,
            timeouts,
            turn: Mutex::new(()),
        })
    }

    /// Who this rank is.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// The sums of `values` over all ranks, added in the order of the ranks, with equal bits on all ranks. A rank gets
    /// the sums in its ranges of `parts`, concatenated; `parts` must be equal on all ranks.
    ///
    /// # Errors
    /// A rank is lost, or passes another number of values.
    pub fn sum_parts(
        &self,
        mut values: Vec<f32>,
        parts: &dyn Fn(usize) -> Vec<Range<usize>>,
    ) -> Result<Vec<f32>, CommError> {
        let _turn = self.turn()?;
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
    /// A rank is lost, or passes another number of values.
    pub fn sum(&self, values: &mut [f32]) -> Result<(), CommError> {
        let all = 0..values.len();
        let sums = self.sum_parts(values.to_vec(), &|_| vec![all.clone()])?;
        values.copy_from_slice(&sums);
        Ok(())
    }

    /// The values of every rank, one after another; `counts` gives how many each rank passes.
    ///
    /// # Errors
    /// A rank is lost, or passes another number of values.
    pub fn gather_values(&self, own: &[f32], counts: &dyn Fn(usize) -> usize) -> Result<Vec<f32>, CommError> {
        let _turn = self.turn()?;
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
        let _turn = self.turn()?;
        if self.world.rank > 0 {
            let first = &self.peers[0];
            send(&first.data, GATHER, bytes).map_err(|e| self.lost(first, &e))?;
            return self.split(first, GATHER);
        }
        let mut all = vec![bytes.to_vec()];
        for peer in self.peers.iter() {
            all.push(self.expect(peer, GATHER)?);
        }
        // One message a rank: a thousand ranks do this in every step.
        let joined = joined(&all);
        for peer in self.peers.iter() {
            send(&peer.data, GATHER, &joined).map_err(|e| self.lost(peer, &e))?;
        }
        Ok(all)
    }

    /// The bytes of rank 0; those passed by other ranks are ignored.
    ///
    /// # Errors
    /// A rank is lost.
    pub fn broadcast(&self, bytes: &[u8]) -> Result<Vec<u8>, CommError> {
        let _turn = self.turn()?;
        if self.world.rank > 0 {
            return self.expect(&self.peers[0], BROADCAST);
        }
        for peer in self.peers.iter() {
            send(&peer.data, BROADCAST, bytes).map_err(|e| self.lost(peer, &e))?;
        }
        Ok(bytes.to_vec())
    }

    /// Sends each rank its bytes, and returns the bytes received from each, by rank. Empty messages are allowed.
    ///
    /// # Errors
    /// A rank is lost.
    pub fn exchange(&self, bytes: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>, CommError> {
        let _turn = self.turn()?;
        if self.world.rank > 0 {
            let first = &self.peers[0];
            send(&first.data, EXCHANGE, &joined(&bytes)).map_err(|e| self.lost(first, &e))?;
            return self.split(first, EXCHANGE);
        }
        let mut all = vec![bytes];
        for peer in self.peers.iter() {
            all.push(self.split(peer, EXCHANGE)?);
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

    /// What a rank sends by [`joined`]: a part for each rank, or of each.
    fn split(&self, peer: &Peer, kind: u8) -> Result<Vec<Vec<u8>>, CommError> {
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

    /// Sets what this rank does from now on, and so its progress timeout. A rank that others wait for and that makes no
    /// progress for the time of its [`Work`] counts as hung, even if its heartbeats arrive. Where no rank waits for
    /// another, since all wait for their devices, the limit is [`Timeouts::still`] in a step, and [`Timeouts::long`]
    /// plus [`Timeouts::silence`] in other work.
    pub fn set_work(&self, work: Work) {
        self.watch.set_limit(match work {
            Work::Step => Some(self.timeouts.silence),
            Work::Long => Some(self.timeouts.long),
            Work::Any => None,
        });
    }

    /// Says that this rank has gone on with its work.
    pub fn tick(&self) {
        self.watch.tick();
    }

    /// Reports how many collectives this rank's device has completed; the heartbeat carries it to the others. If no
    /// rank makes progress, the rank that is behind is named.
    pub fn set_collective_counts(&self, counts: CollectiveCounts) {
        self.watch.set_collective_counts(counts);
    }

    /// Whether this rank has a progress timeout: between its first step and its last.
    pub fn is_at_work(&self) -> bool {
        self.watch.has_limit()
    }

    /// How long this rank has waited for others so far.
    pub fn waited(&self) -> Duration {
        self.watch.waited()
    }

    /// This thread's turn to exchange with the others. A rank that knows of a loss starts no exchange: data that the
    /// others sent before may still be readable.
    fn turn(&self) -> Result<Turn<'_>, CommError> {
        self.check()?;
        let turn = Turn {
            watch: &self.watch,
            _lock: self.turn.lock().unwrap_or_else(PoisonError::into_inner),
        };
        self.watch.set_waiting(true);
        Ok(turn)
    }

    /// Whether all ranks are well, as far as this one knows.
    ///
    /// # Errors
    /// A rank is lost.
    pub fn check(&self) -> Result<(), CommError> {
        let failure = self.watch.failure(Duration::ZERO);
        failure.map_or(Ok(()), |failure| Err(CommError::Lost(failure)))
    }

    /// Sends the others the error that ends this rank.
    pub fn fail(&self, text: &str) {
        self.watch.fail(text);
    }

    /// Sends a goodbye message, after which the others do not wait for this rank.
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
        let (kind, len) = receive_head(&mut &peer.data).map_err(|e| self.lost(peer, &e))?;
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
        // Nothing was sent, and no rank is lost.
        if error.kind() == io::ErrorKind::InvalidInput {
            return CommError::TooLong(error.to_string());
        }
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

#[cfg(test)]
mod tests;
