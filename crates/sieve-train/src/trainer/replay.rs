//! Detects silent data corruption, a device that computes a wrong gradient without an error: all ranks compute the
//! gradients of the same micro-batch and compare them bit for bit.
use super::faults::Moment;
use super::reporter::Reporter;
use super::{AWAY, Trainer};
use crate::collectives::{Primitive, flat};
use crate::group::Weights;
use crate::segment::Segment;
use crate::segments::{BlockSettings, PassHooks, pass};
use crate::{DeviceBatch, GradientBuffer, TrainError};
use sieve_comm::Work;
use sieve_nn::Qwen3;
use sieve_ops::{KernelPolicy, SumOrder, TrainBackend};
use xxhash_rust::xxh3::Xxh3;

/// Hashes and drops the gradients of each segment as soon as they are known, so that no more memory is needed than in a
/// step.
struct Hashes<'a, B: TrainBackend> {
    hash: Xxh3,
    /// With ZeRO-3, the weights to gather.
    weights: Option<Weights<'a, B>>,
}

impl<B: TrainBackend> Hashes<'_, B> {
    fn add(&mut self, values: Primitive<B>) {
        self.hash.update(flat::<B>(values).into_data().as_bytes());
    }
}

impl<B: TrainBackend> PassHooks<B> for Hashes<'_, B> {
    fn before_forward(
        &mut self,
        model: &mut Qwen3<B>,
        segment: Segment,
        _: &mut GradientBuffer<B>,
    ) -> Result<(), TrainError> {
        self.weights.as_mut().map_or(Ok(()), |weights| weights.before_forward(model, segment))
    }

    fn after_forward(&mut self, model: &mut Qwen3<B>, segment: Segment) -> Result<(), TrainError> {
        self.weights.iter_mut().for_each(|weights| weights.after_forward(model, segment));
        Ok(())
    }

    fn before_backward(&mut self, model: &mut Qwen3<B>, segment: Segment) -> Result<(), TrainError> {
        self.weights.as_mut().map_or(Ok(()), |weights| weights.before_backward(model, segment))
    }

    fn after_backward(
        &mut self,
        model: &mut Qwen3<B>,
        segment: Segment,
        gradients: &mut GradientBuffer<B>,
    ) -> Result<(), TrainError> {
        for gradient in segment.ids(model).into_iter().filter_map(|id| gradients.take(id)) {
            self.add(gradient.values);
        }
        self.weights.iter_mut().for_each(|weights| weights.release(model, segment));
        Ok(())
    }
}

impl<B: TrainBackend> Trainer<B> {
    /// Every `training.guard_replay` steps, computes the first micro-batch of the next step on all ranks, with sums in
    /// a fixed order, and compares loss and gradients bit for bit. If ranks differ, all compute it again to find the
    /// ranks at fault. A process without others computes it twice.
    ///
    /// # Errors
    /// Gradients differ; a rank is lost.
    pub(super) fn replay(&mut self, reporter: &mut Reporter<'_>) -> Result<(), TrainError> {
        let every = self.recipe.training.guard_replay as u64;
        if every == 0 || !(self.progress.step + 1).is_multiple_of(every) {
            return Ok(());
        }
        // The kernels that sum in a fixed order may have to be compiled first.
        self.ranks.set_work(Work::Long);
        self.finish_leaves()?;
        let first = self.replayed()?;
        if !self.ranks.is_alone() && first.iter().all(|hash| *hash == first[0]) {
            return Ok(());
        }
        let second = self.replayed()?;
        match at_fault(&first, &second) {
            ranks if ranks.is_empty() => Ok(()),
            ranks => {
                // Every rank reaches this point with the same result, so all of them can finish the checkpoint.
                self.finish_checkpoint(reporter)?;
                let names = ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
                let (rank, differ) = match ranks.len() {
                    1 => ("rank", "are wrong"),
                    _ => ("ranks", "differ"),
                };
                Err(TrainError::refused(
                    format!(
                        "the gradients of {rank} {names} of one micro-batch, which all ranks computed before step \
                         {}, {differ}: bad memory or arithmetic of a device, or a fault of Sieve's; the step was \
                         not taken",
                        self.progress.step + 1
                    ),
                    "--resume continues from the last checkpoint, without that device; ranks on GPUs of two models \
                     may differ by right: training.guard_replay = 0",
                ))
            }
        }
    }

    /// Computes the micro-batch and returns the hash of loss and gradients of every rank.
    fn replayed(&mut self) -> Result<Vec<u64>, TrainError> {
        let rows = self.stage.recipe.training.local_batch_size;
        let batch = self.stage.loader.batch(self.progress.next_sample, rows)?;
        let mut settings = BlockSettings::from(&self.recipe);
        settings.layers.keeping = self.machine.keeping;
        settings.layers.policy = KernelPolicy { sums: SumOrder::Fixed, ..settings.layers.policy };
        let mut loss_scale = 1.0 / batch.num_labels().max(1) as f64;
        self.machine.disturbance.at(self.progress.next_sample, Moment::Replay(&mut loss_scale));
        let group = self.ranks.group_mut().filter(|group| !group.share().keeps_whole);
        let weights = group.map(|group| Weights { group, pieces: self.learner.optimizer.pieces() });
        let mut hashes = Hashes { hash: Xxh3::default(), weights };
        let result = pass(
            &settings,
            self.learner.model.as_mut().expect(AWAY),
            &DeviceBatch::new(&batch, &self.machine.device),
            &self.learner.ropes.training,
            loss_scale,
            &mut GradientBuffer::default(),
            &mut hashes,
        )?;
        hashes.add(result.loss.into_primitive().tensor());
        let digest = hashes.hash.digest();
        self.gathered(digest)
    }
}

/// The suspect ranks, given two hashes of each: ranks whose own two hashes differ. If there are none, ranks whose hash
/// is not the majority's; without a majority, all ranks.
fn at_fault(first: &[u64], second: &[u64]) -> Vec<usize> {
    let ranks = |is_wrong: &dyn Fn(usize) -> bool| (0..first.len()).filter(|rank| is_wrong(*rank)).collect::<Vec<_>>();
    let unsteady = ranks(&|rank| first[rank] != second[rank]);
    if !unsteady.is_empty() {
        return unsteady;
    }
    let count = |hash: u64| second.iter().filter(|other| **other == hash).count();
    let common = second.iter().copied().find(|hash| 2 * count(*hash) > second.len());
    ranks(&|rank| Some(second[rank]) != common)
}

#[cfg(test)]
mod tests {
    use super::at_fault;

    #[test]
    fn the_rank_with_another_gradient_is_named_where_that_can_be_known() {
        for (first, second, expected) in [
            (&[7][..], &[7][..], &[][..]),
            (&[7], &[8], &[0]),
            // One rank has two different hashes; another has a hash that is not the majority's, twice.
            (&[7, 9], &[7, 7], &[1]),
            (&[7, 7, 9, 7], &[7, 7, 9, 7], &[2]),
            // Without a majority, all ranks are suspect.
            (&[7, 9], &[7, 9], &[0, 1]),
            (&[7, 7, 9, 9], &[7, 7, 9, 9], &[0, 1, 2, 3]),
            (&[7, 8, 9, 7], &[7, 6, 9, 7], &[1]),
        ] {
            assert_eq!(at_fault(first, second), expected, "{first:?} {second:?}");
        }
    }
}
