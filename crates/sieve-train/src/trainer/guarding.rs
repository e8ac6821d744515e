//! What the host does about steps that the guard did not let through.
use super::{Reporter, Trainer};
use crate::guard::{JudgedStep, Judgement};
use crate::metrics::Metrics;
use crate::trainer::stage::StageState;
use crate::{GradientBuffer, Precision, SkippedStep, TrainError, TrainEvent};
use burn::tensor::Tensor;
use sieve_data::{Batch, PAD_DOCUMENT};
use sieve_hf::Checkpoint;
use sieve_nn::Qwen3;
use sieve_ops::TrainBackend;
use std::collections::{BTreeSet, VecDeque};

/// Steps whose judgement may wait unread: reading one waits for the device.
const MAX_UNREAD: usize = 64;
/// After a step that was not taken, this many are read one by one, so that their gradients can be told by layer.
const WATCHED_STEPS: u64 = 100;
/// Documents of a step that are named.
const MAX_NAMED_DOCUMENTS: usize = 16;
/// How often a run goes back to one checkpoint before it gives up.
const MAX_RETURNS: u32 = 2;

/// A factor of the loss by the number of a step's first row.
pub(super) struct Disturbance(pub(super) Box<dyn Fn(u64) -> f64>);

/// What follows for the loop.
pub(super) enum Verdict {
    GoOn,
    /// The state is an earlier checkpoint's.
    WentBack,
}

/// Judgements that were not looked at yet, and what came of the others.
pub(super) struct GuardLog<B: TrainBackend> {
    unread: VecDeque<Unread<B>>,
    /// Steps in a row that were not taken.
    streak: Vec<SkippedStep>,
    last: Option<(u64, JudgedStep)>,
    /// Steps up to this one are read at once.
    watched_until: u64,
    /// The checkpoint gone back to, and how often.
    returns: (u64, u32),
}

struct Unread<B: TrainBackend> {
    step: u64,
    lr: f64,
    first_sample: u64,
    num_rows: u64,
    /// In the order of the rows, neighbours once.
    documents: Vec<u32>,
    row: Tensor<B::InnerBackend, 1>,
    norms: Vec<(String, f64)>,
}

impl<B: TrainBackend> GuardLog<B> {
    pub(super) fn new(precision: Precision) -> Self {
        Self {
            unread: VecDeque::new(),
            streak: Vec::new(),
            last: None,
            watched_until: match precision {
                // Reading costs nothing where host and device are one.
                Precision::F32 => u64::MAX,
                Precision::Bf16 => 0,
            },
            returns: (0, 0),
        }
    }

    /// Remembers a step that was just judged, before its gradients go.
    pub(super) fn note(
        &mut self,
        step: u64,
        lr: f64,
        batches: &[Batch],
        judgement: &Judgement<B>,
        (model, gradients, device): (&Qwen3<B>, &GradientBuffer<B>, &B::Device),
    ) {
        let is_watched = step <= self.watched_until;
        let is_bad = is_watched && !JudgedStep::read::<B>(&judgement.row).is_taken;
        let documents = batches.iter().flat_map(|batch| &batch.documents);
        let mut documents = documents.copied().collect::<Vec<_>>();
        documents.dedup();
        self.unread.push_back(Unread {
            step,
            lr,
            first_sample: batches.first().map_or(0, |batch| batch.first_sample),
            num_rows: batches.iter().map(|batch| batch.batch as u64).sum(),
            documents,
            row: judgement.row.clone(),
            norms: if is_bad {
                norms_by_part(model, gradients, device)
            } else {
                Vec::new()
            },
        });
    }

    /// The numbers of `step`, where it was taken.
    pub(super) fn last_taken(&self, step: u64) -> Option<JudgedStep> {
        let (last, judged) = self.last?;
        (last == step && judged.is_taken).then_some(judged)
    }

    /// Whether the last step that was read was not taken.
    pub(super) fn in_streak(&self) -> bool {
        !self.streak.is_empty()
    }
}

/// Gradient norm of every part of the model.
fn norms_by_part<B: TrainBackend>(
    model: &Qwen3<B>,
    gradients: &GradientBuffer<B>,
    device: &B::Device,
) -> Vec<(String, f64)> {
    let read = |norm: Tensor<B::InnerBackend, 1>| {
        let data = norm.into_data();
        data.iter::<f64>().next().unwrap_or(f64::NAN)
    };
    let embedding = gradients.norm(&model.embed_tokens, device);
    let mut norms = vec![("embedding".to_owned(), read(embedding))];
    for (layer_idx, layer) in model.layers.iter().enumerate() {
        let norm = read(gradients.norm(layer, device));
        norms.push((format!("layer {layer_idx}"), norm));
    }
    norms.push(("head".to_owned(), read(gradients.norm(&model.head, device))));
    norms
}

impl<B: TrainBackend> Trainer<B> {
    /// Looks at the judgements of past steps: at all of them where `now` is set, else when they are many or watched.
    pub(super) fn check_steps(
        &mut self,
        now: bool,
        reporter: &mut Reporter<'_>,
    ) -> Result<Verdict, TrainError> {
        let is_watched = self.step <= self.guard_log.watched_until;
        if !(now || is_watched || self.guard_log.unread.len() >= MAX_UNREAD) {
            return Ok(Verdict::GoOn);
        }
        while let Some(unread) = self.guard_log.unread.pop_front() {
            let judged = JudgedStep::read::<B>(&unread.row);
            self.guard_log.last = Some((unread.step, judged));
            if judged.is_taken {
                self.guard_log.streak.clear();
                continue;
            }
            self.guard_log.watched_until = self
                .guard_log
                .watched_until
                .max(unread.step.saturating_add(WATCHED_STEPS));
            let lr = unread.lr;
            let skipped = unread.report(judged);
            reporter.metrics.skipped(&skipped)?;
            reporter.tell(TrainEvent::Skipped(&skipped));
            self.guard_log.streak.push(skipped);
            if self.guard_log.streak.len() >= self.recipe.training.guard_patience {
                self.go_back(judged, lr, reporter)?;
                return Ok(Verdict::WentBack);
            }
        }
        Ok(Verdict::GoOn)
    }

    /// To the last checkpoint, but past the rows that were read since.
    fn go_back(
        &mut self,
        judged: JudgedStep,
        lr: f64,
        reporter: &mut Reporter<'_>,
    ) -> Result<(), TrainError> {
        self.finish_checkpoint(reporter)?;
        let (to, times) = self.guard_log.returns;
        let path = match self.last_checkpoint {
            Some(step) if !(step == to && times >= MAX_RETURNS) => self.last_checkpoint_path(),
            _ => None,
        };
        let Some(path) = path else {
            return Err(TrainError::Diverged {
                step: self.step,
                loss: judged.loss,
                grad_norm: judged.grad_norm,
                lr,
                last_checkpoint: self.last_checkpoint_path(),
            });
        };
        let checkpoint = Checkpoint::open(&path)?;
        let (from, index, next_sample) = (self.step, self.stage.stage.index, self.next_sample);
        let stage = self.recipe.stage_of_step(checkpoint.state.step as usize);
        let same_stage = stage.index == index;
        if !same_stage {
            self.stage = StageState::new(&self.recipe, stage, &self.data)?;
        }
        self.restore(&checkpoint)?;
        let first_skipped = self.next_sample;
        if same_stage {
            self.next_sample = next_sample;
        }
        let tensorboard = self.recipe.metrics.enable_tensorboard;
        reporter.metrics = Metrics::open(&self.folder, self.step, tensorboard)?.0;
        let log = &mut self.guard_log;
        for skipped in std::mem::take(&mut log.streak) {
            reporter.metrics.skipped(&skipped)?;
        }
        log.unread.clear();
        log.last = None;
        let times = if log.returns.0 == self.step {
            log.returns.1
        } else {
            0
        };
        log.returns = (self.step, times + 1);
        let rows = if same_stage {
            format!(
                "rows {first_skipped} to {} are skipped",
                next_sample.max(1) - 1
            )
        } else {
            "the rows of the stage before are read again".to_owned()
        };
        reporter.tell(TrainEvent::Notice(&format!(
            "guard: {} steps in a row were not taken; back from step {from} to {}, {rows}",
            self.recipe.training.guard_patience,
            path.display()
        )));
        Ok(())
    }
}

impl<B: TrainBackend> Unread<B> {
    fn report(self, judged: JudgedStep) -> SkippedStep {
        let documents = self.documents.into_iter();
        let documents = documents
            .filter(|document| *document != PAD_DOCUMENT)
            .collect::<BTreeSet<_>>();
        SkippedStep {
            step: self.step,
            loss: judged.loss,
            grad_norm: judged.grad_norm,
            mean_grad_norm: judged.mean_norm,
            mean_loss: judged.mean_loss,
            first_row: self.first_sample,
            num_rows: self.num_rows,
            num_documents: documents.len(),
            documents: documents.into_iter().take(MAX_NAMED_DOCUMENTS).collect(),
            grad_norms: self.norms,
        }
    }
}
