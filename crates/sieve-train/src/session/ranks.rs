//! How the ranks of a run agree on its recipe, its folder and the checkpoint that it begins with.
//!
//! Rank 0 finds the checkpoint, and the other ranks open the same one.
use crate::{BranchOptions, Origin, RunFolder, Start, TrainError};
use sieve_comm::Mesh;
use sieve_core::{Recipe, ShownPath};
use sieve_hf::Checkpoint;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

/// All ranks must see a file of rank 0 within this time.
const SHARED: Duration = Duration::from_secs(10);

/// Fails if the ranks were given different recipes.
///
/// # Errors
/// The recipes of two ranks differ; a recipe cannot be read; a rank is lost.
pub fn check_recipe(mesh: &Mesh, recipe: &Recipe) -> Result<(), TrainError> {
    let all = mesh.gather(recipe.to_toml()?.as_bytes())?;
    let first = Recipe::load(&String::from_utf8_lossy(&all[0]), "the recipe of rank 0", &[])?;
    for (rank, text) in all.iter().enumerate().skip(1) {
        let name = format!("the recipe of rank {rank}");
        let other = Recipe::load(&String::from_utf8_lossy(text), &name, &[])?;
        if let Some(change) = first.diff(&other)?.first() {
            return Err(TrainError::refused(
                format!("rank {rank} was given a different recipe from rank 0's: {change}"),
                "start all ranks with the same command",
            ));
        }
    }
    Ok(())
}

/// Returns rank 0's `own` on every rank; without a mesh, this process's.
pub(super) fn of_first(mesh: Option<&Mesh>, own: bool) -> Result<bool, TrainError> {
    match mesh {
        Some(mesh) => Ok(mesh.broadcast(&[u8::from(own)])? == [1]),
        None => Ok(own),
    }
}

/// Returns rank 0's text on every rank. The name of a run's fallback folder is one: its path may differ between hosts,
/// and rank 0 alone knows the run's identity.
pub(super) fn text_of_first(mesh: Option<&Mesh>, own: String) -> Result<String, TrainError> {
    match mesh {
        Some(mesh) => Ok(String::from_utf8_lossy(&mesh.broadcast(own.as_bytes())?).into_owned()),
        None => Ok(own),
    }
}

/// Opens the output folder and the checkpoint to start from. Of several ranks, rank 0 finds the checkpoint and sends
/// its path to the others.
pub(super) fn open(
    mesh: Option<&Mesh>,
    out: &Path,
    start: &Start,
    recipe: &Recipe,
    options: BranchOptions,
) -> Result<(RunFolder, Origin), TrainError> {
    let Some(mesh) = mesh else {
        return open_first(out, start, recipe, options);
    };
    if mesh.world().rank == 0 {
        let (folder, origin) = open_first(out, start, recipe, options)?;
        let path = match &origin.checkpoint {
            Some(found) => found.path.canonicalize().map_err(TrainError::io("finding", &found.path))?,
            None => Default::default(),
        };
        // "1" for a branch, "2" for one without moments, else "0", then the checkpoint's path; no path: the run starts
        // from its seed.
        let how = u8::from(origin.is_branch) + u8::from(origin.fresh_optimizer);
        mesh.broadcast(format!("{how}{}", path.shown()).as_bytes())?;
        return Ok((folder, origin));
    }
    let folder = RunFolder::of_group(out, &recipe.checkpoint.folder);
    let found = text_of_first(Some(mesh), String::new())?;
    let origin = match found.split_at(1) {
        (_, "") => Origin::seed(),
        ("0", path) => Origin::find(&folder, &Start::ResumeFrom(path.into()), recipe, options)?,
        (how, path) => {
            // Rank 0 has checked what may be dropped.
            let options = BranchOptions { drops: true, fresh_optimizer: how == "2" };
            Origin::find(&folder, &Start::BranchFrom(path.into()), recipe, options)?
        }
    };
    Ok((folder, origin))
}

/// Like [`open`], in rank 0 or the only process.
fn open_first(
    out: &Path,
    start: &Start,
    recipe: &Recipe,
    options: BranchOptions,
) -> Result<(RunFolder, Origin), TrainError> {
    if let Start::ResumeFrom(path) | Start::BranchFrom(path) = start {
        // A path without a checkpoint is reported first: the hint about a folder that holds a run, --resume, would
        // continue from another checkpoint.
        Checkpoint::peek(path)?;
    }
    let mut folder = RunFolder::open(out, &recipe.checkpoint.folder, start)?;
    // Looking for the latest checkpoint may rename damaged ones, so it locks the folder first.
    if matches!(start, Start::ResumeAlone { .. }) {
        folder.claim(start)?;
    }
    let origin = Origin::find(&folder, start, recipe, options)?;
    Ok((folder, origin))
}

/// Fails if a rank does not see the files that rank 0 writes to `out`.
pub(super) fn check_shared(mesh: &Mesh, out: &Path) -> Result<(), TrainError> {
    let sign = out.join("shared.tmp");
    let rank = mesh.world().rank;
    let own = format!("{} {:?}", std::process::id(), SystemTime::now());
    if rank == 0 {
        std::fs::write(&sign, &own).map_err(TrainError::io("writing", &sign))?;
    }
    let wanted = mesh.broadcast(own.as_bytes())?;
    // A network file system may show a new file late.
    let deadline = Instant::now() + SHARED;
    let sees = || sieve_files::read_file(&sign).is_ok_and(|found| found == wanted);
    while !sees() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(100));
    }
    let place = out.canonicalize().unwrap_or_else(|_| out.to_owned());
    // `1` or `0` for whether this rank sees the file, then the folder where it looks.
    let answer = format!("{}{}", u8::from(sees()), place.shown());
    let answers = mesh.gather(answer.as_bytes())?;
    if rank == 0 {
        let _ = std::fs::remove_file(&sign);
    }
    let answers = answers.iter().map(|answer| String::from_utf8_lossy(answer));
    let answers = answers.collect::<Vec<_>>();
    match answers.iter().position(|answer| !answer.starts_with('1')) {
        None => Ok(()),
        Some(blind) => Err(TrainError::refused(
            format!(
                "rank {blind} does not see the files of rank 0's run: rank 0 writes to {}, rank {blind} looks in {}",
                &answers[0][1..],
                answers[blind].get(1..).unwrap_or_default()
            ),
            "give --out a folder that all hosts of the job share, by the same path",
        )),
    }
}
