//! Errors after which a run can be continued as it is.
use crate::exit::{Exit, is_of_the_disk};
use crate::terminal;
use anyhow::Result;
use sieve_train::TrainError;

/// Whether the last checkpoint of a run could not be written. All ranks of a run have this error together.
pub fn is_unsaved(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(TrainError::Unsaved(_)))
}

/// Whether the same command may succeed later where no checkpoint is at stake, such as before the first step: the disk
/// failed, or another process is still ending in the folder of a run that no user attends.
pub fn passes_by_itself(error: &anyhow::Error) -> bool {
    let is_busy = matches!(error.downcast_ref(), Some(TrainError::FolderStillBusy { .. }));
    is_busy || error.chain().any(|cause| cause.downcast_ref().is_some_and(is_of_the_disk))
}

/// The result of a run, whose error of the kind `is_kind` becomes an exit code: the same command with `--resume=auto`
/// continues from the checkpoint before, or begins. `prints` says whether to print the error.
pub fn stopped_by(is_kind: fn(&anyhow::Error) -> bool, result: Result<Exit>, prints: bool) -> Result<Exit> {
    match result {
        Err(error) if is_kind(&error) => {
            if prints {
                terminal::print_error(&error);
            }
            Ok(Exit::StoppedEarly)
        }
        result => result,
    }
}
