//! The output folder of a run: `config.toml`, `checkpoint/step-N/`, `tb/`, `metrics.jsonl`, `log`.
use crate::TrainError;
use sieve_core::ShownPath;
use sieve_files::{Taken, try_lock};
use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::xxh3_64;

/// How long a run that no user attends waits for the folder: the processes of a launcher that was killed write one more
/// checkpoint before they end.
const ENDING: Duration = Duration::from_secs(10);
/// Between two looks whether the folder is free.
const LOOK: Duration = Duration::from_millis(50);
/// The file of a run with the lines of `metrics.jsonl` about steps of checkpoints that were set aside.
pub(crate) const METRICS_ASIDE: &str = "metrics.aside.jsonl";

/// Whether a run starts anew or resumes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// The run starts anew, in a folder that holds no run.
    New,
    /// The run resumes from the latest checkpoint of the folder.
    Resume,
    /// As `Resume`, for a run that no user attends: damaged checkpoints are renamed, and the latest whole one is used.
    ResumeAlone {
        /// The folder of `--checkpoint-fallback`: the run's own folder in it ([`RunFolder::fallback_name`]) may hold a
        /// later checkpoint.
        fallback: Option<PathBuf>,
    },
    /// The run continues from a checkpoint that the user names: of this folder or, in a new folder, of another.
    ResumeFrom(PathBuf),
    /// A new run with another recipe, in a folder without a run, from a checkpoint's weights, moments and step.
    BranchFrom(PathBuf),
}

/// A run's output folder: the paths in it, and the lock that keeps other processes from training in it.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    checkpoint_folder: String,
    /// Whether another process of the same group, rank 0, has locked the folder.
    is_claimed: bool,
    /// What sets this run apart from earlier and later ones in the same folder: the contents of its lock file. Empty
    /// until the folder is locked.
    identity: String,
    /// Whether the folder held a run without an identity, whose lock file was emptied or removed.
    had_no_identity: bool,
    /// Held until the run ends; the system releases it when the process is killed.
    lock: Option<File>,
}

impl RunFolder {
    /// Checks that `path` is free for a new run, or holds one to resume. Writes nothing.
    ///
    /// # Errors
    /// A folder that holds another run; nothing to resume; a path that is no folder.
    pub fn open(path: &Path, checkpoint_folder: &str, start: &Start) -> Result<Self, TrainError> {
        let folder = Self { is_claimed: false, ..Self::of_group(path, checkpoint_folder) };
        folder.check(start)?;
        Ok(folder)
    }

    /// A file or folder in `path` that only a run writes, if there is one.
    pub fn found_run(path: &Path, checkpoint_folder: &str) -> Option<String> {
        Self::of_group(path, checkpoint_folder).first_of_a_run()
    }

    /// Whether a run has begun in the folder `path`.
    pub fn holds_run(path: &Path) -> bool {
        path.join("config.toml").is_file()
    }

    /// The folder of a run that rank 0 of the same group has opened and writes to.
    pub fn of_group(path: &Path, checkpoint_folder: &str) -> Self {
        Self {
            path: path.to_owned(),
            checkpoint_folder: checkpoint_folder.to_owned(),
            is_claimed: true,
            identity: String::new(),
            had_no_identity: false,
            lock: None,
        }
    }

    /// Moves the run in `path`, if there is one, to the first free of `NAME.1`, `NAME.2`, …, so that a new run can
    /// begin in `path`. Nothing is removed. Returns the new path.
    ///
    /// # Errors
    /// Another process trains in the folder; a folder that cannot be renamed.
    pub fn move_aside(path: &Path, checkpoint_folder: &str) -> Result<Option<PathBuf>, TrainError> {
        let mut folder = Self { is_claimed: false, ..Self::of_group(path, checkpoint_folder) };
        if folder.first_of_a_run().is_none() {
            return Ok(None);
        }
        if Path::new(".").canonicalize().is_ok_and(|here| path.canonicalize().is_ok_and(|path| here.starts_with(path)))
        {
            return Err(TrainError::refused(
                format!(
                    "--overwrite would move the folder that this command runs in, with all its files: {}",
                    path.shown()
                ),
                "run the command elsewhere, with the run's path as --out, or name another --out",
            ));
        }
        // Held until the folder has its new name.
        folder.take()?;
        let path = match path.file_name() {
            Some(_) => path.to_owned(),
            None => path.canonicalize().map_err(TrainError::io("finding", path))?,
        };
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut names = (1..).map(|number| path.with_file_name(format!("{name}.{number}")));
        let aside = names.find(|path| !path.exists()).expect("some number is free");
        fs::rename(&path, &aside).map_err(TrainError::io("renaming", path))?;
        Ok(Some(aside))
    }

    /// Creates the folder if it is missing, and locks it for this process. A run that no user attends waits some
    /// seconds for a process that trains there to end.
    ///
    /// # Errors
    /// A folder that cannot be made or written to, or that another process trains in.
    pub fn claim(&mut self, start: &Start) -> Result<(), TrainError> {
        if self.is_claimed || self.lock.is_some() {
            return Ok(());
        }
        match start {
            Start::ResumeAlone { .. } => self.take_within(ENDING)?,
            _ => self.take()?,
        }
        // Another process may have begun a run between the first check and the lock.
        self.check(start)
    }

    /// Creates and locks the folder again if it was removed, so that no other run begins there. Returns whether it had
    /// been removed.
    ///
    /// # Errors
    /// A folder that cannot be made, or that another process has taken meanwhile.
    pub(crate) fn regain(&mut self) -> Result<bool, TrainError> {
        let Some(held) = &self.lock else {
            // Only rank 0 locks the folder and creates it again.
            return Ok(false);
        };
        if is_same_file(held, &self.lock_path()) {
            return Ok(false);
        }
        self.take()?;
        Ok(true)
    }

    /// Creates the folder if it is missing, and locks it; an error if another process has locked it.
    fn take(&mut self) -> Result<(), TrainError> {
        fs::create_dir_all(&self.path).map_err(TrainError::io("creating", &self.path))?;
        let lock = self.lock_path();
        match try_lock(&lock).map_err(TrainError::io("locking", &lock))? {
            Taken::Yes(mut file) => {
                self.identify(&mut file).map_err(TrainError::io("locking", &lock))?;
                self.lock = Some(file);
                Ok(())
            }
            Taken::ByAnother(_) => Err(TrainError::FolderBusy(self.path.clone())),
        }
    }

    /// As [`take`](Self::take), and waits this long while another process has the folder.
    fn take_within(&mut self, patience: Duration) -> Result<(), TrainError> {
        let begun = Instant::now();
        loop {
            match self.take() {
                Err(TrainError::FolderBusy(path)) if begun.elapsed() >= patience => {
                    return Err(TrainError::FolderStillBusy { path, waited: patience });
                }
                Err(TrainError::FolderBusy(_)) => std::thread::sleep(LOOK),
                taken => return taken,
            }
        }
    }

    /// Reads the identity of the run in the folder from its lock file. A folder without a run or without an identity
    /// gets one: this process's earlier one if the folder was removed, else a new one.
    fn identify(&mut self, lock: &mut File) -> io::Result<()> {
        if Self::holds_run(&self.path) {
            let mut stored = String::new();
            lock.read_to_string(&mut stored)?;
            if !stored.is_empty() {
                self.identity = stored;
                return Ok(());
            }
            self.had_no_identity = true;
        }
        if self.identity.is_empty() {
            self.identity = format!("{:016x}", RandomState::new().hash_one(std::process::id()));
        }
        lock.set_len(0)?;
        lock.write_all(self.identity.as_bytes())?;
        lock.sync_all()
    }

    /// Refuses a folder that holds a run where `start` begins one, or holds none where `start` resumes one.
    fn check(&self, start: &Start) -> Result<(), TrainError> {
        let (path, shown) = (&self.path, self.path.shown());
        let elsewhere = "name another folder with --out";
        if path.exists() && !path.is_dir() {
            let what = format!("{shown} is a file, and a run needs a folder");
            return Err(TrainError::refused(what, elsewhere));
        }
        let begins = match start {
            Start::New | Start::BranchFrom(_) => true,
            Start::Resume | Start::ResumeAlone { .. } => false,
            Start::ResumeFrom(checkpoint) => !self.holds(checkpoint),
        };
        if begins {
            // A folder with two models: some commands would read the one, some the other.
            if let Some(found) = self.first_of(&["config.json", "model.safetensors"]) {
                return Err(TrainError::refused(
                    format!("{shown} already holds a model ({found} is there)"),
                    elsewhere,
                ));
            }
            return match self.first_of_a_run() {
                Some(found) => Err(TrainError::refused(
                    format!("{shown} already holds a run ({found} is there)"),
                    format!("continue it with --resume, move it aside with --overwrite, or {elsewhere}"),
                )),
                None => Ok(()),
            };
        }
        let problem = if !path.exists() { "there is no such folder" } else { "it has no config.toml" };
        if matches!(start, Start::ResumeFrom(_)) || self.config_path().is_file() {
            Ok(())
        } else {
            Err(TrainError::refused(
                format!("{shown} holds no run to resume: {problem}"),
                "check --out, or leave out --resume to start a run there",
            ))
        }
    }

    /// A file or folder that only a run writes, if there is one. The data folder may have been prepared before the run,
    /// so it does not count.
    fn first_of_a_run(&self) -> Option<String> {
        self.first_of(&["config.toml", "metrics.jsonl", &self.checkpoint_folder, "log", "tb"])
    }

    /// The first of `names` that is in the folder.
    fn first_of(&self, names: &[&str]) -> Option<String> {
        let found = names.iter().find(|name| self.path.join(name).exists());
        found.map(|name| (*name).to_owned())
    }

    /// Whether `path` is this run's folder, its folder of checkpoints, or one of its checkpoints.
    fn holds(&self, path: &Path) -> bool {
        let (Ok(own), Ok(path)) = (self.path.canonicalize(), path.canonicalize()) else {
            return false;
        };
        let checkpoints = own.join(&self.checkpoint_folder);
        path == own || path == checkpoints || path.parent() == Some(&checkpoints)
    }

    /// Path of the run folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Name of the run's own folder in the folder of `--checkpoint-fallback`, which several runs may share. It is made
    /// from the absolute path of the run's folder and from the run's identity, so that no other run has it. Only the
    /// process that has locked the folder knows the identity.
    pub fn fallback_name(&self) -> String {
        let path = self.path.canonicalize().unwrap_or_else(|_| self.path.clone());
        let named = [path.as_os_str().as_encoded_bytes(), self.identity.as_bytes()].concat();
        format!("run-{:016x}", xxh3_64(&named))
    }

    /// Whether the folder held a run without an identity when it was locked. What such a run saved in a fallback folder
    /// cannot be told from what other runs of the same folder saved there.
    pub(crate) fn had_no_identity(&self) -> bool {
        self.had_no_identity
    }

    /// Path of the resolved recipe.
    pub fn config_path(&self) -> PathBuf {
        self.path.join("config.toml")
    }

    /// Path of the file that names the checkpoint of another folder that the run began with. The run resumes from that
    /// checkpoint until it has one of its own.
    pub(crate) fn origin_path(&self) -> PathBuf {
        self.path.join("origin.json")
    }

    /// Path of the file that is locked while a process trains here. It holds the run's identity, which is written when
    /// the run begins.
    pub(crate) fn lock_path(&self) -> PathBuf {
        self.path.join("run.lock")
    }

    /// Path of the metrics: one JSON object for each logged step and validation.
    pub fn metrics_path(&self) -> PathBuf {
        self.path.join("metrics.jsonl")
    }

    /// Path of the lines of `metrics.jsonl` about steps of checkpoints that were set aside.
    pub(crate) fn metrics_aside_path(&self) -> PathBuf {
        self.path.join(METRICS_ASIDE)
    }

    /// Folder of the TensorBoard event files.
    pub(crate) fn tensorboard_path(&self) -> PathBuf {
        self.path.join("tb")
    }

    /// Path of the log: the terminal's output as plain lines.
    pub fn log_path(&self) -> PathBuf {
        self.path.join("log")
    }

    /// Folder that holds the checkpoints `step-N`.
    pub(crate) fn checkpoint_path(&self) -> PathBuf {
        self.path.join(&self.checkpoint_folder)
    }

    /// Folder of the shards and a trained tokenizer, if the recipe names no `data.cache_dir`.
    pub fn data_path(&self) -> PathBuf {
        self.path.join("data")
    }
}

/// Renames a folder `NAME` to `NAME.WORD-N`, with the first free number N. No run takes the new name for a
/// checkpoint's.
pub(crate) fn rename_aside(path: &Path, word: &str) -> Result<PathBuf, TrainError> {
    let names = (1..).map(|number| path.with_extension(format!("{word}-{number}")));
    let aside = names.into_iter().find(|path| !path.exists());
    let aside = aside.expect("some number is free");
    fs::rename(path, &aside).map_err(TrainError::io("renaming", path))?;
    Ok(aside)
}

/// Whether the file at `path` is the open file `held`. Outside of Unix, whether there is any file.
pub(crate) fn is_same_file(held: &File, path: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let identity = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
        let held = held.metadata().map(identity);
        held.is_ok_and(|held| fs::metadata(path).is_ok_and(|found| identity(found) == held))
    }
    #[cfg(not(unix))]
    {
        let _ = held;
        path.exists()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_run_needs_a_folder_without_a_run() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run");
        let open = |start: &Start| RunFolder::open(&path, "checkpoint", start);
        assert!(!path.exists());
        open(&Start::New).unwrap().claim(&Start::New).unwrap();
        // A folder with prepared data alone holds no run.
        fs::create_dir(path.join("data")).unwrap();
        open(&Start::New).unwrap();
        for name in ["config.toml", "metrics.jsonl", "log"] {
            fs::write(path.join(name), "x").unwrap();
            let error = open(&Start::New).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("--resume"), "{error}");
            fs::remove_file(path.join(name)).unwrap();
        }
        fs::write(path.join("config.json"), "x").unwrap();
        let error = open(&Start::New).unwrap_err().to_string();
        assert!(error.contains("already holds a model (config.json is there)"), "{error}");
    }

    #[test]
    fn a_run_is_moved_aside_whole_unless_a_process_trains_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run");
        let aside = || RunFolder::move_aside(&path, "checkpoint");
        assert_eq!(aside().unwrap(), None);
        fs::create_dir_all(path.join("data")).unwrap();
        assert_eq!(aside().unwrap(), None, "prepared data is no run");
        for number in 1..=2 {
            fs::create_dir_all(path.join("checkpoint/step-3")).unwrap();
            fs::write(path.join("config.toml"), number.to_string()).unwrap();
            let mut first = RunFolder::open(&path, "checkpoint", &Start::Resume).unwrap();
            first.claim(&Start::Resume).unwrap();
            assert!(matches!(aside(), Err(TrainError::FolderBusy(_))));
            assert!(path.join("config.toml").is_file());
            drop(first);
            let moved = aside().unwrap().unwrap();
            assert_eq!(moved.file_name().unwrap().to_str().unwrap(), format!("run.{number}"));
            assert_eq!(fs::read_to_string(moved.join("config.toml")).unwrap(), number.to_string());
            assert!(moved.join("checkpoint/step-3").is_dir() && !path.exists());
        }
        assert!(dir.path().join("run.1").is_dir());
    }

    #[test]
    fn a_run_keeps_its_identity_and_the_next_one_in_its_folder_has_another() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run");
        let begun = |start: &Start| {
            let mut folder = RunFolder::open(&path, "checkpoint", start).unwrap();
            folder.claim(start).unwrap();
            fs::write(path.join("config.toml"), "x").unwrap();
            folder
        };
        let first = begun(&Start::New);
        let name = first.fallback_name();
        assert_eq!(begun_again(first, &begun), name);
        let mut first = begun(&Start::Resume);
        fs::remove_dir_all(&path).unwrap();
        assert!(first.regain().unwrap());
        assert_eq!(first.fallback_name(), name, "the same run creates its removed folder again and keeps its name");
        fs::write(path.join("config.toml"), "x").unwrap();
        assert_eq!(begun_again(first, &begun), name);
        RunFolder::move_aside(&path, "checkpoint").unwrap().unwrap();
        let second = begun(&Start::New);
        assert_ne!(second.fallback_name(), name);
        assert!(!second.had_no_identity());
        let of_second = second.fallback_name();
        drop(second);
        // A user may empty or remove the lock file.
        fs::write(path.join("run.lock"), "").unwrap();
        let earlier = begun(&Start::Resume);
        assert!(earlier.had_no_identity());
        assert!(![&name, &of_second].contains(&&earlier.fallback_name()));
        let its_name = earlier.fallback_name();
        assert_eq!(begun_again(earlier, &begun), its_name, "the identity that it got stays");
    }

    /// The fallback name of a run that is resumed after its process has ended.
    fn begun_again(ended: RunFolder, begun: &dyn Fn(&Start) -> RunFolder) -> String {
        drop(ended);
        begun(&Start::Resume).fallback_name()
    }

    #[test]
    fn only_one_process_can_lock_the_folder() {
        let dir = tempfile::tempdir().unwrap();
        let open = || RunFolder::open(dir.path(), "checkpoint", &Start::New).unwrap();
        let mut first = open();
        first.claim(&Start::New).unwrap();
        let error = open().claim(&Start::New).unwrap_err();
        assert!(matches!(error, TrainError::FolderBusy(_)), "{error}");
        let error = open().take_within(2 * LOOK).unwrap_err();
        assert!(matches!(error, TrainError::FolderStillBusy { .. }), "{error}");
        // A restart just behind a launcher's death comes while its processes end.
        let ending = std::thread::spawn(move || {
            std::thread::sleep(3 * LOOK);
            drop(first);
        });
        fs::write(dir.path().join("config.toml"), "x").unwrap();
        let alone = Start::ResumeAlone { fallback: None };
        RunFolder::open(dir.path(), "checkpoint", &alone).unwrap().claim(&alone).unwrap();
        ending.join().unwrap();
        fs::remove_file(dir.path().join("config.toml")).unwrap();
        open().claim(&Start::New).unwrap();
    }

    #[test]
    fn a_checkpoint_of_another_run_needs_a_new_folder() {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("run/checkpoint/step-3");
        let other = dir.path().join("other/checkpoint/step-3");
        for path in [&own, &other] {
            fs::create_dir_all(path).unwrap();
        }
        let run = dir.path().join("run");
        let open = |path: &Path, from: &PathBuf| RunFolder::open(path, "checkpoint", &Start::ResumeFrom(from.clone()));
        open(&run, &own).unwrap();
        open(&run, &run).unwrap();
        assert!(open(&run, &other).is_err());
        open(&dir.path().join("new"), &other).unwrap();
    }

    #[test]
    fn a_removed_folder_is_locked_again_unless_another_process_has_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run");
        let open = || RunFolder::open(&path, "checkpoint", &Start::New).unwrap();
        let mut first = open();
        first.claim(&Start::New).unwrap();
        assert!(!first.regain().unwrap());
        fs::remove_dir_all(&path).unwrap();
        assert!(first.regain().unwrap() && !first.regain().unwrap());
        assert!(open().claim(&Start::New).is_err(), "the lock is back");
        fs::remove_dir_all(&path).unwrap();
        let mut second = open();
        second.claim(&Start::New).unwrap();
        assert!(matches!(first.regain(), Err(TrainError::FolderBusy(_))));
    }
}
