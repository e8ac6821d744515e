//! Models of the hub: the files of one folder of a repository, fetched into a cache and kept there.
//!
//! A path is `hf://OWNER/NAME[@REVISION][/FOLDER]`. Configuration, tokenizer and weights as safetensors are fetched,
//! and nothing else: no Python, no pickles. They keep their names, in the cache's folder
//! `sieve/models/OWNER--NAME/COMMIT`. The listing is fetched once and kept, which pins a branch to its commit of that
//! day; from then on no network is needed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use sieve_core::{Refusal, ShownPath};
use sieve_files::{free_bytes, lock_or_wait, read_text, temporary_name};

use super::{Hub, HubConfig, RemoteFile, RemotePath, python_snapshot};
use crate::error::DataError;

const CONFIG: &str = "config.json";
const TOKENIZER: &str = "tokenizer.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Files that a model can do without.
const OPTIONAL: [&str; 4] =
    ["generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"];

/// What happens while a model is fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HubModelEvent<'a> {
    /// Another process fetches the same model; this one waits.
    Waiting,
    /// So many files and bytes are missing and will be fetched into a folder.
    Fetching {
        /// Number of files.
        num_files: usize,
        /// Bytes of these files, without the bytes that an earlier call fetched.
        num_bytes: u64,
        /// Folder of the model in the cache.
        dir: &'a Path,
    },
    /// A file was fetched.
    Fetched {
        /// Its name in the repository.
        name: &'a str,
        /// Its size in bytes.
        num_bytes: u64,
    },
}

/// A model of the hub on this disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubModel {
    /// Folder with its files, in the layout of `transformers`.
    pub path: PathBuf,
    /// Name of the repository, without its owner.
    pub name: String,
    /// Commit of the files.
    pub commit: String,
}

/// Whether a path names a model of the hub, or means to: it begins with `hf://`.
pub fn is_hub_model(path: &Path) -> bool {
    path.to_str().is_some_and(super::is_remote)
}

/// The folder of a model of the hub, `hf://OWNER/NAME[@REVISION][/FOLDER]`. The folder of `config` must be
/// `huggingface_hub`'s own cache: a model that is complete there is used as it is, and any other one is fetched once
/// into the cache's folder `sieve`. Its `config.json` comes first, and nothing else if `accepts` refuses that file.
///
/// # Errors
/// A path of another form; the error of `accepts`; a hub that cannot be reached; a repository without this model, or
/// with files that are not read; more bytes than the disk has free.
pub fn hub_model(
    path: &Path,
    mut config: HubConfig,
    accepts: &dyn Fn(&Path) -> Result<(), Refusal>,
    observe: &mut dyn FnMut(HubModelEvent<'_>),
) -> Result<HubModel, DataError> {
    let remote = RemotePath::parse_model(&path.to_string_lossy(), "model")?;
    let name = remote.repo.rsplit('/').next().unwrap_or_default().to_owned();
    let folder = remote.files.trim_end_matches('/').to_owned();
    if let Some((snapshot, commit)) = python_snapshot(&config.dir, &remote) {
        let path = snapshot.join(&folder);
        if is_complete(&path) {
            return Ok(HubModel { path, name, commit });
        }
    }
    config.dir = config.dir.join("sieve");
    let models = config.dir.join("models").join(remote.repo.replace('/', "--"));
    let hub = Hub::new(config)?;
    fs::create_dir_all(&models).map_err(DataError::io("create", &models))?;
    let lock = models.join("lock");
    let _lock = lock_or_wait(&lock, || observe(HubModelEvent::Waiting)).map_err(DataError::io("lock", &lock))?;
    let listing = hub.listing(&format!("hf://{}@{}", remote.repo, remote.revision), &remote)?;
    let commit = listing.sha.clone();
    let dir = models.join(&commit).join(&folder);
    let fetch = Fetch { hub: &hub, remote: &remote, folder: &folder, dir: &dir, files: hub.files(&remote, listing) };
    fetch.all(accepts, observe)?;
    Ok(HubModel { path: dir, name, commit })
}

/// Whether a folder of `huggingface_hub`'s cache has all files of a model.
fn is_complete(folder: &Path) -> bool {
    let has = |name: &str| folder.join(name).is_file();
    let has_shards = || shards(&folder.join(INDEX)).is_ok_and(|names| names.iter().all(|name| has(name)));
    has(CONFIG) && has(TOKENIZER) && (has(SINGLE) || (has(INDEX) && has_shards()))
}

/// The files that an index of weights names. They must lie beside it, or in folders there.
fn shards(index: &Path) -> Result<BTreeSet<String>, DataError> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let bad = |what: String| DataError::file(index, what, "it is not an index of safetensors: name another model");
    let text = read_text(index).map_err(DataError::io("read", index))?;
    let index = serde_json::from_str::<Index>(&text).map_err(|error| bad(error.to_string()))?;
    let names = index.weight_map.into_values().collect::<BTreeSet<_>>();
    match names.iter().find(|name| !is_plain(name)) {
        Some(odd) => Err(bad(format!("it names {odd:?}, which is not a safetensors file in its folder or below"))),
        None => Ok(names),
    }
}

/// Whether a name is a file of safetensors in the index's own folder, or in a folder below it.
fn is_plain(name: &str) -> bool {
    let is_harmless = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let is_name = |part: &str| !part.is_empty() && part.bytes().all(is_harmless) && !part.starts_with('.');
    name.split('/').all(is_name) && name.ends_with(".safetensors")
}

/// A model that is being fetched.
struct Fetch<'a> {
    hub: &'a Hub,
    remote: &'a RemotePath,
    /// Folder in the repository; empty for its top.
    folder: &'a str,
    /// Folder on this disk.
    dir: &'a Path,
    /// All files of the repository.
    files: Vec<RemoteFile>,
}

impl Fetch<'_> {
    /// Fetches the model's files that are not on this disk yet, once `accepts` has seen `config.json`.
    fn all(
        &self,
        accepts: &dyn Fn(&Path) -> Result<(), Refusal>,
        observe: &mut dyn FnMut(HubModelEvent<'_>),
    ) -> Result<(), DataError> {
        let Some(config) = self.find(CONFIG) else {
            return Err(self.lacks(CONFIG, "name a repository, or with /FOLDER a folder of one, that holds a model"));
        };
        fs::create_dir_all(self.dir).map_err(DataError::io("create", self.dir))?;
        // What is known of the model before its index of weights is read.
        let known = [TOKENIZER, SINGLE].iter().chain(&OPTIONAL).filter_map(|name| self.find(name));
        self.check_room(self.missing_bytes(known.chain([config])))?;
        if !self.path(config).is_file() {
            self.fetch(config)?;
        }
        accepts(&self.path(config))?;
        let tokenizer = self.find(TOKENIZER).ok_or_else(|| self.needs_conversion(TOKENIZER))?;
        let mut wanted = vec![tokenizer];
        wanted.extend(OPTIONAL.iter().filter_map(|name| self.find(name)));
        match (self.find(SINGLE), self.find(INDEX)) {
            (Some(single), _) => wanted.push(single),
            (None, Some(index)) => {
                // The index says which shards there are, so it is fetched before sizes are summed.
                self.fetch(index)?;
                let names = shards(&self.dir.join(INDEX))?;
                let lost = |name: &String| self.lacks(name, "its index of weights names this file: name another model");
                let found = names.iter().map(|name| self.find(name).ok_or_else(|| lost(name)));
                wanted.extend(found.collect::<Result<Vec<_>, _>>()?);
            }
            (None, None) => return Err(self.needs_conversion(SINGLE)),
        }
        wanted.retain(|file| !self.path(file).is_file());
        if wanted.is_empty() {
            return Ok(());
        }
        let num_bytes = self.missing_bytes(wanted.iter().copied());
        self.check_room(num_bytes)?;
        observe(HubModelEvent::Fetching { num_files: wanted.len(), num_bytes, dir: self.dir });
        for file in wanted {
            self.fetch(file)?;
            observe(HubModelEvent::Fetched { name: &file.name, num_bytes: file.num_bytes() });
        }
        Ok(())
    }

    /// Bytes of these files that are not on this disk yet.
    fn missing_bytes<'a>(&self, files: impl Iterator<Item = &'a RemoteFile>) -> u64 {
        let missing = files.filter(|file| !self.path(file).is_file());
        missing.map(|file| file.num_bytes().saturating_sub(self.fetched_bytes(file))).sum()
    }

    /// Bytes of a file that an earlier, broken transfer left.
    fn fetched_bytes(&self, file: &RemoteFile) -> u64 {
        fs::metadata(temporary_name(&self.path(file))).map_or(0, |metadata| metadata.len())
    }

    /// A file of the model's folder in the repository.
    fn find(&self, name: &str) -> Option<&RemoteFile> {
        let path = match self.folder {
            "" => name.to_owned(),
            folder => format!("{folder}/{name}"),
        };
        self.files.iter().find(|file| file.name == path)
    }

    /// Path of a file on this disk. Its name is a known one or one that [`is_plain`] accepts, so it leads nowhere else.
    fn path(&self, file: &RemoteFile) -> PathBuf {
        let below = file.name.strip_prefix(self.folder).unwrap_or(&file.name);
        self.dir.join(below.trim_start_matches('/'))
    }

    fn fetch(&self, file: &RemoteFile) -> Result<(), DataError> {
        let path = self.path(file);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(DataError::io("create", folder))?;
        }
        self.hub.fetch_to(file, path)
    }

    /// Refuses what does not fit on the disk, before it is fetched.
    fn check_room(&self, num_bytes: u64) -> Result<(), DataError> {
        let free = free_bytes(self.dir).unwrap_or(u64::MAX);
        if num_bytes <= free {
            return Ok(());
        }
        let gib = |bytes: u64| format!("{:.2} GiB", bytes as f64 / (1u64 << 30) as f64);
        let what = format!(
            "model {} takes {} more, and {} are free in {}",
            self.remote.repo,
            gib(num_bytes),
            gib(free),
            self.dir.shown()
        );
        Err(DataError::refused(what, "make room, or name a folder of another disk: HF_HOME"))
    }

    /// Where the files are, for messages: repository, folder and commit.
    fn place(&self) -> String {
        let commit = self.files.first().map_or(&*self.remote.revision, |file| &file.commit);
        match self.folder {
            "" => format!("model {} at commit {commit}", self.remote.repo),
            folder => format!("model {}, folder {folder:?}, at commit {commit}", self.remote.repo),
        }
    }

    fn lacks(&self, name: &str, hint: &'static str) -> DataError {
        DataError::refused(format!("{} has no {name}", self.place()), hint)
    }

    /// The error of a repository without a file in the form that is read; `transformers` may read another one.
    fn needs_conversion(&self, name: &str) -> DataError {
        let pickles = ["pytorch_model.bin", "pytorch_model.bin.index.json"];
        let has_pickles = pickles.iter().any(|pickle| self.find(pickle).is_some());
        let others = if name == SINGLE && has_pickles {
            ": its weights are pickles (pytorch_model.bin), which are programs and are not read"
        } else {
            ""
        };
        let hint = if name == TOKENIZER || has_pickles {
            sieve_core::how_to_convert(&self.remote.repo)
        } else {
            "weights are read from model.safetensors, or from the files of its index; GGUF files and adapters \
                  are not"
                .to_owned()
        };
        DataError::refused(format!("{} has no {name}{others}", self.place()), hint)
    }
}
