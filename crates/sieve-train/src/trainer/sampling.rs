//! Texts that the model writes while it trains.
use super::{Reporter, Trainer};
use crate::{TrainError, TrainEvent};
use burn::module::AutodiffModule;
use sieve_core::ModelShape;
use sieve_data::Tokenizer;
use sieve_nn::Qwen3;
use sieve_ops::TrainBackend;

/// Writes a text for each of the recipe's prompts with a model of these sizes. An error is a sentence for the log.
pub type WriteSamples<B> = Box<dyn FnMut(&Qwen3<B>, &ModelShape, &Tokenizer) -> Result<Vec<String>, String>>;

impl<B: TrainBackend> Trainer<B> {
    /// Sets what writes the texts of `generation.interval`. It must leave the model and the device's random numbers as
    /// they are: a run's losses do not depend on its samples.
    pub fn set_samples(&mut self, write: WriteSamples<B::InnerBackend>) {
        self.lines.samples = Some(write);
    }

    /// Whether texts are written after the present step. The last step's are written by the caller, after the run.
    pub(super) fn samples_now(&self) -> bool {
        let interval = self.recipe.generation.interval as u64;
        interval > 0
            && self.progress.step.is_multiple_of(interval)
            && self.progress.step < self.recipe.training.steps as u64
    }

    /// Writes a text for each prompt, into the log and TensorBoard. All ranks call it, because the weights of the last
    /// update are gathered from all of them; only rank 0 has a writer.
    pub(super) fn sample(&mut self, reporter: &mut Reporter<'_>) -> Result<(), TrainError> {
        self.finish_leaves()?;
        let Some(mut write) = self.lines.samples.take() else {
            return Ok(());
        };
        let model = self.model().valid();
        let written = write(&model, &self.stage.shape, &self.data.tokenizer);
        self.lines.samples = Some(write);
        // Writing may take long: the other ranks learn that this one is alive.
        self.ranks.tick();
        match written {
            Ok(texts) => {
                for (number, text) in (1..).zip(&texts) {
                    reporter.metrics.greedy_sample(number, text, self.progress.step);
                    reporter.emit(TrainEvent::Sample(self.progress.step, text));
                }
            }
            // The weights may be unusable for the moment, which is no reason to end a run.
            Err(error) => {
                reporter.emit(TrainEvent::Notice(&format!("no sample at step {}: {error}", self.progress.step)))
            }
        }
        Ok(())
    }
}
