//! Checkpoints of a run: when they may be written, which stay.
use super::writer::{Shard, Written};
use super::{Reporter, Trainer};
use crate::group::Group;
use crate::optimizer::ReplicaSums;
use crate::{RunFolder, TrainError, TrainEvent};
use sieve_core::Recipe;
use sieve_hf::{Checkpoint, CheckpointFiles, CheckpointState, FORMAT_VERSION, list_checkpoints};
use sieve_ops::TrainBackend;
use std::fs;
use std::path::{Path, PathBuf};

impl<B: TrainBackend> Trainer<B> {
    /// Takes hold of the state as it stands and begins to write it, unless the folder has it already. The checkpoint
    /// before is on disk then. Of several processes each writes its pieces.
    ///
    /// # Errors
    /// Any failure of the file system, also of the checkpoint before. Earlier checkpoints stay.
    pub(super) fn start_checkpoint(&mut self, reporter: &mut Reporter<'_>) -> Result<(), TrainError> {
        let folder = self.folder.checkpoint_path();
        if [self.last_checkpoint, self.writer.step()].contains(&Some(self.step)) {
            return Ok(());
        }
        self.finish_checkpoint(reporter)?;
        self.finish_leaves()?;
        if self.writes() {
            fs::create_dir_all(&folder).map_err(TrainError::io("creating", &folder))?;
            Checkpoint::begin(&folder, self.step)?;
        }
        if let Some(group) = &self.group {
            // The others write into the folder that rank 0 has made.
            group.gather(&[])?;
        }
        let (recipe_toml, tokenizer_json) = (self.recipe.to_toml()?, self.data.tokenizer_json.clone());
        let distance = self.distance(self.step);
        let snapshot = (self.optimizer).snapshot(self.model(), &self.device, distance);
        let (step, writing) = (self.step, self.disturbance.writing);
        let files = move || {
            writing(step);
            let (model, optimizer, replica) = snapshot.read()?;
            let files = CheckpointFiles {
                model,
                optimizer,
                recipe_toml,
                tokenizer_json,
            };
            Ok((files, replica))
        };
        let share = self.share();
        let state = CheckpointState {
            format_version: FORMAT_VERSION,
            step: self.step,
            next_sample: self.next_sample,
            tokens_seen: self.tokens_seen,
            guard: Some(self.loss_mean.state()),
            vocab_size: self.stage.shape.vocab_size,
            data_fingerprint: self.data.fingerprint().to_owned(),
            num_threads: rayon::current_num_threads(),
            sieve_version: env!("CARGO_PKG_VERSION").to_owned(),
            num_shards: share.size,
            checksums: Default::default(),
        };
        self.writer.start(&folder, state, share, files)
    }

    /// Waits for the checkpoint being written, by all processes, tells of it, and removes those that are too old.
    ///
    /// # Errors
    /// Why it could not be written.
    pub(super) fn finish_checkpoint(&mut self, reporter: &mut Reporter<'_>) -> Result<(), TrainError> {
        let Some(Written { folder, state, shard }) = self.finish_writing()? else {
            return Ok(());
        };
        let step = state.step;
        (self.disturbance.naming)(step);
        self.all_written = false;
        let writes = self.writes();
        let discard = || {
            if writes {
                Checkpoint::discard(&folder, step);
            }
        };
        let mut checksums = shard.files.clone();
        if let Some(group) = &self.group {
            let own = serde_json::to_vec(&shard).expect("plain data serialises");
            let all = group.gather(&own).inspect_err(|_| discard())?;
            let all = all.iter().map(|text| serde_json::from_slice::<Shard>(text));
            let all = all.collect::<Result<Vec<_>, _>>();
            let all = all.expect("ranks of one version");
            let sums = all.iter().map(|shard| shard.replica.clone());
            let distance = self.distance(step);
            if let Some(ranks) = ReplicaSums::differ(&sums.collect::<Vec<_>>(), distance) {
                discard();
                return Err(TrainError::ReplicasDiffer { ranks, step });
            }
            checksums.extend(all.into_iter().flat_map(|shard| shard.files));
        }
        if writes {
            let path = Checkpoint::publish(&folder, state, checksums).inspect_err(|_| discard())?;
            reporter.tell(TrainEvent::Checkpoint(&path));
            prune(&self.folder.checkpoint_path(), &self.recipe)?;
        }
        if let Some(group) = &self.group {
            // It has its name for all.
            group.gather(&[])?;
        }
        self.last_checkpoint = Some(step);
        Ok(())
    }

    /// Waits for this process's files.
    fn finish_writing(&mut self) -> Result<Option<Written>, TrainError> {
        let group = self.group.as_ref();
        let written = self.writer.finish(&|| group.into_iter().for_each(Group::tick));
        // Where a rank is lost, rank 0 has removed the folder: that is no error of this rank.
        written.or_else(|error| {
            group.map_or(Ok(()), Group::check)?;
            Err(error)
        })
    }

    /// How much further the rank is whose pieces this one compares at a step: over some checkpoints all others.
    fn distance(&self, step: u64) -> usize {
        let others = self.share().size.saturating_sub(1).max(1) as u64;
        let interval = self.recipe.checkpoint.interval.max(1) as u64;
        1 + (step / interval % others) as usize
    }

    /// As [`finish_checkpoint`](Self::finish_checkpoint), where it needs no waiting; of several processes once all are
    /// done.
    ///
    /// # Errors
    /// Why it could not be written.
    pub(super) fn poll_checkpoint(&mut self, reporter: &mut Reporter<'_>) -> Result<(), TrainError> {
        let is_done = match &self.group {
            Some(_) => self.all_written,
            None => self.writer.is_done(),
        };
        match is_done {
            true => self.finish_checkpoint(reporter),
            false => Ok(()),
        }
    }

    /// Where the last checkpoint of this run lies.
    pub(super) fn last_checkpoint_path(&self) -> Option<PathBuf> {
        let step = self.last_checkpoint?;
        Some(self.folder.checkpoint_path().join(format!("step-{step}")))
    }

    /// Clears away what a killed process left half written, and sets checkpoints aside that lie ahead of this run's
    /// step: they belong to another continuation of it, and the latest must be this one's.
    pub(super) fn tidy_checkpoints(&self, reporter: &mut Reporter<'_>) -> Result<(), TrainError> {
        let folder = self.folder.checkpoint_path();
        for (step, path) in list_checkpoints(&folder)? {
            if step <= self.step {
                continue;
            }
            let aside = (1..)
                .map(|number| folder.join(format!("step-{step}.aside-{number}")))
                .find(|path| !path.exists());
            let aside = aside.expect("some number is free");
            fs::rename(&path, &aside).map_err(TrainError::io("renaming", &path))?;
            reporter.tell(TrainEvent::Notice(&format!(
                "note: step-{step} is ahead of this continuation; it is kept as {}",
                aside.display()
            )));
        }
        remove_half_written(&folder)
    }
}

/// Does what a finished run was killed before: removes checkpoints that are too old, and what is half written.
///
/// # Errors
/// Any failure of the file system.
pub fn tidy_finished(folder: &RunFolder, recipe: &Recipe) -> Result<(), TrainError> {
    let folder = folder.checkpoint_path();
    remove_half_written(&folder)?;
    prune(&folder, recipe)
}

fn remove_half_written(folder: &Path) -> Result<(), TrainError> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Ok(());
    };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("step-") && name.ends_with(".tmp") {
            let path = entry.path();
            fs::remove_dir_all(&path).map_err(TrainError::io("removing", &path))?;
        }
    }
    Ok(())
}

/// Removes all but the latest checkpoints; the one before the first step stays where the recipe asks for it.
fn prune(folder: &Path, recipe: &Recipe) -> Result<(), TrainError> {
    let keep = recipe.checkpoint.keep_latest_k;
    if keep == 0 {
        return Ok(());
    }
    let always = |step: u64| step == 0 && recipe.checkpoint.at_start;
    let mut all = list_checkpoints(folder)?;
    all.retain(|(step, _)| !always(*step));
    all.truncate(all.len().saturating_sub(keep));
    for (step, path) in all {
        // Renamed first: a kill in the middle leaves no half checkpoint under a checkpoint's name.
        let going = folder.join(format!("step-{step}.tmp"));
        fs::rename(&path, &going)
            .and_then(|()| fs::remove_dir_all(&going))
            .map_err(TrainError::io("removing", &path))?;
    }
    Ok(())
}
