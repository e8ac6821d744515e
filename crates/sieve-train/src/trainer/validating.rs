//! Validation during a run.
use super::faults::Moment;
use super::reporter::Reporter;
use super::{AWAY, Trainer};
use crate::group::Weights;
use crate::validation::{ValidationSize, report, share_sums, sums_of_shares};
use crate::{DeviceBatch, TrainError, TrainEvent, ValidationReport};
use burn::module::AutodiffModule;
use sieve_nn::{LayerContext, Qwen3};
use sieve_ops::{RotaryEmbedding, TrainBackend};

impl<B: TrainBackend> Trainer<B> {
    /// Validates the model. Several processes share the batches, and only rank 0 gets the report; `None` on the others.
    pub(super) fn validate(&mut self, reporter: &mut Reporter<'_>) -> Result<Option<ValidationReport>, TrainError> {
        self.finish_leaves()?;
        self.machine.disturbance.at(self.progress.step, Moment::Validating);
        let size = self.stage.validation_size();
        let report = ValidationReport { step: self.progress.step, ..self.present_report(size)? };
        if !self.ranks.writes() {
            return Ok(None);
        }
        reporter.metrics.validation(&report);
        reporter.emit(TrainEvent::Validation(&report));
        Ok(Some(report))
    }

    /// The loss of the present model on held-out rows. All ranks call it.
    pub(super) fn present_report(&mut self, size: ValidationSize) -> Result<ValidationReport, TrainError> {
        let share = self.share();
        let model = self.learner.model.as_mut().expect(AWAY);
        match self.ranks.group_mut() {
            Some(group) if !share.keeps_whole => {
                let (rope, tokens) = (&self.learner.ropes.validation, self.held_out.tokens());
                let mut weights = Weights { group, pieces: self.learner.optimizer.pieces() };
                let losses = &mut |batch: Option<&_>| weights.token_losses(model, batch, rope);
                let sums =
                    share_sums(share, &self.stage.validation_loader, size, tokens, &self.machine.device, losses)?;
                Ok(report(&sums_of_shares(&self.gathered(sums)?)))
            }
            _ => {
                let model = model.valid();
                self.report_of(&model, &self.learner.ropes.validation, size)
            }
        }
    }

    /// The loss of a whole model on held-out rows, with its rotary tables. All ranks call it.
    pub(super) fn report_of(
        &self,
        model: &Qwen3<B::InnerBackend>,
        rope: &RotaryEmbedding<B::InnerBackend>,
        size: ValidationSize,
    ) -> Result<ValidationReport, TrainError> {
        let losses = &mut |batch: Option<&DeviceBatch<B::InnerBackend>>| {
            let losses = batch.map(|batch| {
                let context = LayerContext::new(&batch.documents, rope);
                model.token_losses(batch.tokens.clone(), batch.labels.clone(), &context)
            });
            self.ranks.tick();
            Ok(losses)
        };
        let tokens = self.held_out.tokens();
        let sums = share_sums(self.share(), &self.stage.validation_loader, size, tokens, &self.machine.device, losses)?;
        Ok(report(&sums_of_shares(&self.gathered(sums)?)))
    }
}
