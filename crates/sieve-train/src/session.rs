//! The life of a run before its first step: new, resumed, extended, branched, or finished already.
mod extend;
mod ranks;

use crate::origin::ignored_checkpoint;
use crate::{
    BranchOptions, DataEvent, DataSource, Group, Hardware, Origin, RunFolder, Start, TrainError, Trainer, TrainingData,
    check_fit, named_checkpoint, tidy_finished,
};
pub use ranks::check_recipe;
use sieve_comm::Mesh;
use sieve_core::{Recipe, ShownPath, quoted};
use sieve_data::{OnChange, Surroundings};
use sieve_hf::Checkpoint;
use sieve_ops::TrainBackend;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What the user asks of a run.
#[derive(Clone, Debug)]
pub struct RunRequest {
    /// The run's output folder.
    pub out: PathBuf,
    /// Where the run starts.
    pub start: Start,
    /// Where the run starts instead if `out` holds a run.
    pub found: FoundRun,
    /// How a new run takes over a checkpoint's state.
    pub branch: BranchOptions,
    /// The step up to which a finished run is extended.
    pub extend: Option<usize>,
    /// The folder for the last checkpoint of this process if `out` cannot be written to; runs may share it.
    pub fallback: Option<PathBuf>,
    /// The recipe's file; `None` for a recipe that has none.
    pub recipe_file: Option<RecipeFile>,
}

/// What a request does with a run that the output folder holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FoundRun {
    /// [`RunRequest::start`] decides; it may refuse the folder.
    AsStart,
    /// The run resumes from its latest checkpoint: [`Start::Resume`].
    Resume,
    /// The run resumes from its latest whole checkpoint, and damaged ones are renamed: [`Start::ResumeAlone`].
    ResumeAlone,
}

/// The file that a recipe was read from.
#[derive(Clone, Debug)]
pub struct RecipeFile {
    /// The recipe's name in messages.
    pub name: String,
    /// The folder that the file lies in.
    pub folder: PathBuf,
}

/// What a request leads to.
#[derive(Debug)]
pub enum Opened {
    /// The run has steps to do.
    Run(Box<Session>),
    /// The run has all of its steps; the text says so, and how to train further.
    Finished(String),
}

/// A run that is about to train, in this process alone or as one of several ranks.
#[derive(Debug)]
pub struct Session {
    recipe: Recipe,
    start: Start,
    folder: RunFolder,
    origin: Origin,
    fallback: Option<PathBuf>,
    /// Connections to the other ranks; `None` if this process trains alone.
    mesh: Option<Arc<Mesh>>,
}

impl RunRequest {
    /// With [`extend`](Self::extend), gives `recipe` the new steps, with a warm-up and a decay of their own.
    ///
    /// # Errors
    /// A recipe with stages; a run that is not finished; no new step; an unreadable checkpoint.
    pub fn extend(&self, recipe: &mut Recipe) -> Result<(), TrainError> {
        match self.extend {
            Some(steps) => extend::extend(recipe, &self.out, steps),
            None => Ok(()),
        }
    }

    /// Moves the run in the output folder, if there is one, aside. Returns its new path.
    ///
    /// # Errors
    /// The run begins with a checkpoint of that folder; another process trains there; it cannot be renamed.
    pub fn move_aside(&self, recipe: &Recipe) -> Result<Option<PathBuf>, TrainError> {
        let canonical = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
        if let Start::BranchFrom(path) = &self.start
            && canonical(path).starts_with(canonical(&self.out))
        {
            return Err(TrainError::refused(
                format!("--branch-from {} is in the folder that --overwrite moves aside", path.shown()),
                "name another --out",
            ));
        }
        RunFolder::move_aside(&self.out, &recipe.checkpoint.folder)
    }

    /// Checks by the output folder, and by the checkpoint to begin with, that a run of `recipe` can start.
    /// Returns the size of that checkpoint's vocabulary; `None` if the run begins with none, or resumes. Writes
    /// nothing. For several runs that are checked before the first of them trains.
    ///
    /// # Errors
    /// What [`Session::open`] would refuse; a checkpoint that has all steps of the recipe.
    pub fn check(&self, recipe: &Recipe) -> Result<Option<usize>, TrainError> {
        let start = self.begins_at(None)?;
        self.check_beside(&start, recipe)?;
        RunFolder::open(&self.out, &recipe.checkpoint.folder, &start)?;
        let begins_with = match &start {
            Start::New => named_checkpoint(recipe)?.map(|found| (found.path.clone(), found)),
            Start::BranchFrom(path) => Some((path.clone(), Checkpoint::peek(path)?)),
            _ => None,
        };
        let Some((path, found)) = begins_with else {
            return Ok(None);
        };
        check_fit(&found, recipe, self.branch)?;
        if recipe.training.steps as u64 <= found.state.step {
            return Err(nothing_to_train(&path, found.state.step, recipe));
        }
        Ok(Some(found.state.vocab_size))
    }

    /// Where the run starts, by what the output folder of rank 0 holds.
    fn begins_at(&self, mesh: Option<&Mesh>) -> Result<Start, TrainError> {
        if self.found == FoundRun::AsStart || !ranks::of_first(mesh, RunFolder::holds_run(&self.out))? {
            return Ok(self.start.clone());
        }
        Ok(match self.found {
            FoundRun::AsStart => self.start.clone(),
            FoundRun::Resume => Start::Resume,
            FoundRun::ResumeAlone => Start::ResumeAlone { fallback: self.fallback.clone() },
        })
    }

    /// For a run that starts anew, refuses what [`RecipeFile::check_beside`] refuses.
    fn check_beside(&self, start: &Start, recipe: &Recipe) -> Result<(), TrainError> {
        match self.recipe_file.as_ref().filter(|_| *start == Start::New) {
            Some(file) => file.check_beside(recipe, &self.out),
            None => Ok(()),
        }
    }
}

/// Refuses [`RunRequest::branch`] where all of these runs begin with random weights: nothing would be taken over. All
/// ranks of a `mesh` call it.
///
/// # Errors
/// An option is given, and all runs begin with random weights; a rank is lost.
pub fn check_branch_options<'a>(
    runs: impl IntoIterator<Item = (&'a RunRequest, &'a Recipe)>,
    mesh: Option<&Mesh>,
) -> Result<(), TrainError> {
    let mut idle = None;
    for (request, recipe) in runs {
        let flag = match (request.branch.drops, request.branch.fresh_optimizer) {
            (true, _) => "--drop",
            (_, true) => "--fresh-optimizer",
            (false, false) => return Ok(()),
        };
        if request.begins_at(mesh)? != Start::New || recipe.model.initial_folder().is_some() {
            return Ok(());
        }
        idle = Some(flag);
    }
    match idle {
        None => Ok(()),
        Some(flag) => Err(TrainError::refused(
            format!("{flag} is for runs that begin with a checkpoint, and this one begins with random weights"),
            format!("--branch-from CHECKPOINT or model.initial_weights names one; else leave {flag} out"),
        )),
    }
}

impl RecipeFile {
    /// Refuses a new run of `recipe` if the recipe names no initial weights and its file lies beside a checkpoint of
    /// its model. Checkpoints in `out` do not count: they are the run's own.
    ///
    /// # Errors
    /// There is such a checkpoint.
    pub fn check_beside(&self, recipe: &Recipe, out: &Path) -> Result<(), TrainError> {
        let Ok(folder) = self.folder.canonicalize() else {
            return Ok(());
        };
        let own = [out.to_owned(), out.join(&recipe.checkpoint.folder)];
        if own.iter().any(|own| own.canonicalize().is_ok_and(|own| own == folder)) {
            return Ok(());
        }
        let Some(found) = ignored_checkpoint(&folder, recipe) else {
            return Ok(());
        };
        let hint = match found.file_name().filter(|_| found != folder) {
            // The recipe of a checkpoint is not to be edited.
            None => format!(
                "--set model.initial_weights={} begins with it, --set model.initial_weights=random without",
                quoted(&found)
            ),
            Some(name) => format!(
                "write initial_weights = {:?} below [model] to begin with it, initial_weights = \"random\" to begin \
                 without",
                name.to_string_lossy()
            ),
        };
        let what = format!(
            "{} does not name the weights that a run begins with, and {} is a checkpoint of its model",
            self.name,
            found.shown()
        );
        Err(TrainError::refused(what, hint))
    }
}

impl Session {
    /// Decides where the run of `recipe` starts, opens its folder, and finds the state that it begins with. Writes
    /// nothing, except that [`Start::ResumeAlone`] locks the folder and renames damaged checkpoints, and that a
    /// finished run is tidied up.
    ///
    /// All ranks of a `mesh` call it with the same request and recipe.
    ///
    /// # Errors
    /// A folder that holds another run, or none to resume; a checkpoint that is damaged, does not fit the recipe, or
    /// has all steps of a new run; a checkpoint beside the recipe that a new run would ignore.
    pub fn open(request: &RunRequest, recipe: &Recipe, mesh: Option<Arc<Mesh>>) -> Result<Opened, TrainError> {
        let start = request.begins_at(mesh.as_deref())?;
        request.check_beside(&start, recipe)?;
        let (folder, origin) = ranks::open(mesh.as_deref(), &request.out, &start, recipe, request.branch)?;
        let recipe = origin.own_recipe(recipe)?;
        let fallback = request.fallback.clone();
        let mut session = Self { recipe, start, folder, origin, fallback, mesh };
        Ok(match session.why_finished()? {
            Some(why) => Opened::Finished(why),
            None => Opened::Run(Box::new(session)),
        })
    }

    /// The recipe that the run's folder and its checkpoints keep.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// The state that the run begins with.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// The checkpoint that the run continues from; `None` for a new run, also for one that begins with a checkpoint.
    pub fn resumed(&self) -> Option<&Checkpoint> {
        self.origin.checkpoint.as_ref().filter(|_| !self.origin.is_branch)
    }

    /// The run's output folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Path of the run's log.
    pub fn log_path(&self) -> PathBuf {
        self.folder.log_path()
    }

    /// Does `work` in rank 0, then in all others, which find its files.
    ///
    /// # Errors
    /// Those of `work`; a rank is lost.
    pub fn first_then_others<T, E: From<TrainError>>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<T, E>,
    ) -> Result<T, E> {
        let mesh = self.mesh.clone();
        let barrier = |mesh: &Mesh| mesh.barrier().map_err(TrainError::from);
        match mesh {
            None => work(self),
            Some(mesh) if mesh.world().rank > 0 => {
                barrier(&mesh)?;
                work(self)
            }
            Some(mesh) => {
                let made = work(self)?;
                barrier(&mesh)?;
                Ok(made)
            }
        }
    }

    /// Finds the recipe's text files, then creates and locks the run's folder. `None` for a run that is resumed, which
    /// has its shards.
    ///
    /// # Errors
    /// A path that matches no file; an unreadable tokenizer; a folder that another process trains in.
    pub fn find_text(&mut self, around: &Surroundings<'_>) -> Result<Option<DataSource>, TrainError> {
        let source = match self.resumed() {
            Some(_) => None,
            None => {
                let begins_with = self.origin.checkpoint.as_ref();
                Some(DataSource::with_tokenizer_of(begins_with, &self.recipe, around)?)
            }
        };
        self.folder.claim(&self.start)?;
        Ok(source)
    }

    /// Folder of the run's shards: `data.cache_dir`, else one in the run's folder.
    ///
    /// # Errors
    /// An environment variable of the path is not set.
    pub fn data_path(&self, variable: &dyn Fn(&str) -> Option<String>) -> Result<PathBuf, TrainError> {
        Ok(match &self.recipe.data.cache_dir {
            Some(dir) => PathBuf::from(sieve_core::paths::expand(dir, variable)?),
            None => self.folder.data_path(),
        })
    }

    /// Prepares the tokenizer and the shards of `source`, the result of [`find_text`](Self::find_text), or opens those
    /// of the run that is resumed.
    ///
    /// # Errors
    /// Text or shards that cannot be read, or are not those that the run began with.
    pub fn prepare(
        &self,
        source: Option<DataSource>,
        around: &Surroundings<'_>,
        observe: &mut dyn FnMut(DataEvent),
    ) -> Result<TrainingData, TrainError> {
        let dir = self.data_path(around.variable)?;
        let on_change = match &self.recipe.data.cache_dir {
            // Other runs may be reading the shards in a shared folder.
            Some(_) => OnChange::Refuse,
            None => OnChange::Replace,
        };
        let mut data = match (source, &self.origin.checkpoint) {
            (Some(source), _) => source.prepare(&self.recipe, &dir, on_change, observe),
            (None, Some(checkpoint)) => TrainingData::resume(&self.recipe, &dir, checkpoint, around, observe),
            (None, None) => unreachable!("without a checkpoint the files were listed"),
        }?;
        data.prepare_stages(&self.recipe, (&dir, on_change), self.resumed(), around, observe)?;
        Ok(data)
    }

    /// Fails if a rank does not see rank 0's output folder. All ranks write parts of each checkpoint into it.
    ///
    /// # Errors
    /// A rank does not see the folder; a rank is lost.
    pub fn check_shared(&self) -> Result<(), TrainError> {
        self.mesh.as_deref().map_or(Ok(()), |mesh| ranks::check_shared(mesh, self.folder.path()))
    }

    /// The run's model and optimizer on `hardware`, ready to take its first step. Writes nothing.
    ///
    /// # Errors
    /// The errors of [`Trainer::new`]; a rank is lost.
    pub fn trainer<B: TrainBackend>(
        self,
        data: TrainingData,
        hardware: Hardware<B>,
        group: Option<Group<B>>,
    ) -> Result<Trainer<B>, TrainError> {
        let name = ranks::text_of_first(self.mesh.as_deref(), self.folder.fallback_name())?;
        let mut trainer = Trainer::new(self.recipe, data, self.folder, self.origin, hardware, group)?;
        if let Some(dir) = self.fallback {
            trainer.set_fallback(dir.join(name));
        }
        Ok(trainer)
    }

    /// Why there is nothing to do, and how to train further, if the checkpoint to continue from has all of the run's
    /// steps. A new run that begins with such a checkpoint is refused.
    fn why_finished(&mut self) -> Result<Option<String>, TrainError> {
        let (step, wanted) = (self.origin.step(), self.recipe.training.steps);
        let Some(checkpoint) = self.origin.checkpoint.as_ref().filter(|_| step >= wanted as u64) else {
            return Ok(None);
        };
        let begins = matches!(self.start, Start::ResumeFrom(_)) && !RunFolder::holds_run(self.folder.path());
        if self.origin.is_branch || begins {
            return Err(nothing_to_train(&checkpoint.path, step, &self.recipe));
        }
        let path = checkpoint.path.shown();
        let (saved, _) = checkpoint.recipe_and_shape()?;
        let steps = saved.training.steps;
        if step < steps as u64 {
            if saved.lr_scheduler.after_step > 0 {
                return Err(TrainError::refused(
                    format!(
                        "{path} is at step {step} of a run that was extended to {steps}, and the recipe has {wanted} \
                         steps"
                    ),
                    format!("--resume --extend {steps} continues it"),
                ));
            }
            return Ok(Some(format!(
                "nothing to do: {path} is at step {step} of {steps}, and training.steps is {wanted} here\n  \
                 to continue: leave training.steps out, or set it to {steps}"
            )));
        }
        let has = if step > wanted as u64 {
            format!("is at step {step}, beyond training.steps = {wanted}")
        } else {
            format!("has all {wanted} steps")
        };
        let how = if self.recipe.stage.is_empty() {
            format!("--resume --extend {}, with a learning-rate schedule of its own for the new steps", 2 * step)
        } else {
            "add a [[stage]] with the new steps to the recipe".to_owned()
        };
        let why = format!("nothing to do: {path} {has}\n  to continue: {how}");
        let writes = self.mesh.as_ref().is_none_or(|mesh| mesh.world().rank == 0);
        if writes && matches!(self.start, Start::Resume | Start::ResumeAlone { .. }) {
            // A kill right after the last checkpoint was written leaves older ones to delete.
            self.folder.claim(&self.start)?;
            tidy_finished(&self.folder, &self.recipe)?;
        }
        Ok(Some(why))
    }
}

/// The error of a new run that begins with a checkpoint at or after its last step.
fn nothing_to_train(path: &Path, step: u64, recipe: &Recipe) -> TrainError {
    let what = format!(
        "{} is at step {step}, and the recipe ends at step {}: nothing would be trained",
        path.shown(),
        recipe.training.steps
    );
    TrainError::refused(what, format!("--set training.steps=N, above {step}"))
}
