//! A command as one of several ranks: which of them prints an error, and how all end.
use crate::environment::{LAUNCHED, variable};
use crate::exit::Exit;
use crate::gpus::other_lost;
use crate::on_event::{Event, OnEvent};
use crate::stopped::{is_unsaved, passes_by_itself, stopped_by};
use crate::terminal;
use anyhow::Result;
use sieve_comm::{CommError, Failure, Loss, Mesh, Timeouts, World};
use sieve_train::TrainError;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Work other than a step (such as preparing text) counts as hung after this time without progress; `seconds` are those
/// without a heartbeat after which a process counts as lost.
pub fn long_patience(seconds: u64) -> Duration {
    Duration::from_secs(20 * seconds)
}

/// Joins the ranks of `world` and does `work`. Rank 0 prints errors and runs the command of `events`; the hint follows
/// the line about a lost rank.
pub fn joined(
    world: World,
    patience: u64,
    (events, hint): (&OnEvent, &'static str),
    work: impl FnOnce(Arc<Mesh>) -> Result<Exit>,
) -> Result<Exit> {
    let rank = world.rank;
    let late = events.clone();
    let give_up = move |failure: &Failure| {
        tell(rank, failure, (&late, hint));
        other_lost().at_once();
    };
    let timeouts = Timeouts {
        silence: Duration::from_secs(patience),
        still: Duration::from_secs(10 * patience / 3), // as the defaults are to each other: 30 s and 100 s
        long: long_patience(patience),
        ..Timeouts::default()
    };
    let mesh = match Mesh::join(world, env!("CARGO_PKG_VERSION"), timeouts, give_up) {
        Ok(mesh) => Arc::new(mesh),
        Err(error) if rank == 0 => return events.ended(Err(error.into())),
        Err(error) => return Err(error.into()),
    };
    match stopped_by(is_unsaved, work(mesh.clone()), rank == 0) {
        Ok(exit) => {
            mesh.leave();
            match rank {
                0 => events.ended(Ok(exit)),
                _ => Ok(exit),
            }
        }
        Err(error) => {
            let lost = match (error.downcast_ref(), error.downcast_ref(), mesh.check()) {
                (Some(CommError::Lost(failure)), ..) => Some(failure.clone()),
                (_, Some(TrainError::Comm(CommError::Lost(failure))), _) => Some(failure.clone()),
                // After another rank was lost, errors of this one (such as an aborted communicator) are consequences.
                // But if the other rank ended with an error, both may have the same error, and it is reported.
                (.., Err(CommError::Lost(failure))) if !matches!(failure.loss, Loss::Error(_)) => Some(failure),
                _ => None,
            };
            if let Some(failure) = lost {
                tell(rank, &failure, (events, hint));
                return Ok(other_lost());
            }
            let text = terminal::error_text(&error);
            mesh.fail(text.trim_start_matches("error: "));
            match stopped_by(passes_by_itself, Err(error), rank == 0) {
                result if rank == 0 => events.ended(result),
                // Rank 0 prints this rank's error.
                result => Ok(result.unwrap_or(Exit::Failed)),
            }
        }
    }
}

/// Prints why all ranks stop and runs the command of `--on-event`. Only rank 0 does so, or rank 1 if rank 0 failed, and
/// only once.
fn tell(rank: usize, failure: &Failure, (events, hint): (&OnEvent, &str)) {
    static WAS_CALLED: AtomicBool = AtomicBool::new(false);
    if WAS_CALLED.swap(true, Ordering::Relaxed) {
        return;
    }
    let is_printed = match failure.loss {
        // Rank 0 has printed its own error.
        Loss::Error(_) => failure.rank == 0,
        // `sieve launch` prints how its process ended.
        Loss::Ended => variable(LAUNCHED).is_some(),
        Loss::Silent(_) | Loss::Still(_) | Loss::AllStill { .. } => false,
    };
    let printing_rank = usize::from(failure.rank == 0);
    if rank != printing_rank {
        return;
    }
    let (event, hint) = match failure.loss {
        Loss::Error(_) => (Event::Failed, ""),
        _ => (Event::Lost, hint),
    };
    let text = format!("error: {failure}");
    if !is_printed {
        terminal::fault(&format!("{text}{hint}"));
    }
    // Rank 0 has already run the command for its own error.
    if !(event == Event::Failed && failure.rank == 0) {
        events.tell(event, &text);
    }
}
