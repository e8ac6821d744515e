//! The processes that train together, or this process alone.
use crate::group::Agreement;
use crate::share::Share;
use crate::{Group, TrainError};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sieve_comm::Work;
use sieve_nn::Qwen3;
use sieve_ops::TrainBackend;

/// The processes of the run. Where this process trains alone, its own answer is that of all, and no call waits.
pub(super) struct Ranks<B: TrainBackend>(Option<Group<B>>);

impl<B: TrainBackend> Ranks<B> {
    pub(super) fn new(group: Option<Group<B>>) -> Self {
        Self(group)
    }

    /// The group of this process and the others; `None` if this one trains alone.
    pub(super) fn group(&self) -> Option<&Group<B>> {
        self.0.as_ref()
    }

    /// As [`group`](Self::group), to start and finish its collectives.
    pub(super) fn group_mut(&mut self) -> Option<&mut Group<B>> {
        self.0.as_mut()
    }

    /// Whether this process trains without others.
    pub(super) fn is_alone(&self) -> bool {
        self.0.is_none()
    }

    pub(super) fn share(&self) -> Share {
        self.group().map_or(Share::ALL, Group::share)
    }

    /// Whether this process writes the run's files.
    pub(super) fn writes(&self) -> bool {
        self.share().rank == 0
    }

    /// Reports to the other ranks which work begins, and with it the progress timeout of this rank.
    pub(super) fn set_work(&self, work: Work) {
        self.group().into_iter().for_each(|group| group.set_work(work));
    }

    /// Reports progress to the other ranks.
    pub(super) fn tick(&self) {
        self.group().into_iter().for_each(Group::tick);
    }

    /// Fails if a rank is lost.
    pub(super) fn check(&self) -> Result<(), TrainError> {
        self.group().map_or(Ok(()), Group::check)
    }

    /// Exchanges what all ranks must know before the step after `step`.
    pub(super) fn agree(&self, step: u64, mean_loss: f32, own: Agreement) -> Result<Agreement, TrainError> {
        self.group().map_or(Ok(own), |group| group.agree(step, mean_loss, own))
    }

    /// A value of every rank, by rank.
    pub(super) fn gathered<T: Serialize + DeserializeOwned>(&self, own: T) -> Result<Vec<T>, TrainError> {
        match self.group() {
            Some(group) => group.gather_data(&own),
            None => Ok(vec![own]),
        }
    }

    /// The problem of the first rank that has one, `None` if no rank has; all ranks get the same answer.
    pub(super) fn problem_of_any(&self, own: Option<String>) -> Result<Option<String>, TrainError> {
        let Some(group) = self.group() else {
            return Ok(own);
        };
        let mut all = group.gather_data(&own)?.into_iter().enumerate();
        Ok(all.find_map(|(rank, problem)| Some(format!("rank {rank}: {}", problem?))))
    }

    /// Waits until the weights of the last update are gathered from all ranks.
    pub(super) fn finish_leaves(&mut self, model: &mut Option<Qwen3<B>>) -> Result<(), TrainError> {
        self.group_mut().map_or(Ok(()), |group| group.finish_leaves(model))
    }
}
