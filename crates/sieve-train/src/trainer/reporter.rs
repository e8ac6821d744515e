//! Where a run's numbers and messages go.
use crate::TrainEvent;
use crate::metrics::Metrics;

/// The two receivers of a run's numbers and messages: the metrics files, and the caller's callback.
pub(super) struct Reporter<'a> {
    pub(super) metrics: Metrics,
    pub(super) observe: &'a mut dyn FnMut(TrainEvent<'_>),
}

impl Reporter<'_> {
    /// Hands an event to the caller.
    pub(super) fn emit(&mut self, event: TrainEvent<'_>) {
        (self.observe)(event);
    }

    /// Reports writes of the metrics files that failed or succeed again.
    pub(super) fn report_writes(&mut self) {
        for message in self.metrics.take_messages() {
            self.emit(TrainEvent::Warning(&message));
        }
    }
}
