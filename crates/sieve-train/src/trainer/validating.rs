//! Validation during a run.
use super::{AWAY, Moment, Reporter, Trainer};
use crate::group::Weights;
use crate::validation::{TokenLosses, report, share_sums, sums_of_shares};
use crate::{TrainError, TrainEvent, ValidationReport};
use burn::module::AutodiffModule;
use sieve_nn::LayerContext;
use sieve_ops::TrainBackend;

impl<B: TrainBackend> Trainer<B> {
    /// Validates the model. Several processes share the batches, and only rank 0 gets the report; `None` on the others.
    pub(super) fn validate(&mut self, reporter: &mut Reporter<'_>) -> Result<Option<ValidationReport>, TrainError> {
        self.finish_leaves()?;
        self.disturbance.at(self.step, Moment::Validating);
        let share = self.share();
        let model = self.model.as_mut().expect(AWAY);
        let rope = &self.ropes.validation;
        let (size, tokens) = (self.stage.validation_size(), (&self.token_bytes, &self.unigram));
        let sums_by = |losses: &mut TokenLosses<'_, B::InnerBackend>| {
            share_sums(share, &self.stage.validation_loader, size, tokens, &self.device, losses)
        };
        let sums = match &mut self.group {
            Some(group) if !share.keeps_whole => {
                let mut weights = Weights { group, pieces: self.optimizer.pieces() };
                sums_by(&mut |batch| weights.token_losses(model, batch, rope))?
            }
            group => {
                let model = model.valid();
                sums_by(&mut |batch| {
                    let losses = batch.map(|batch| {
                        let context = LayerContext::new(&batch.documents, rope);
                        model.token_losses(batch.tokens.clone(), batch.labels.clone(), &context)
                    });
                    group.iter().for_each(|group| group.tick());
                    Ok(losses)
                })?
            }
        };
        let report = ValidationReport { step: self.step, ..report(&sums_of_shares(&self.gathered(sums)?)) };
        if !self.writes() {
            return Ok(None);
        }
        reporter.metrics.validation(&report);
        reporter.emit(TrainEvent::Validation(&report));
        Ok(Some(report))
    }
}
