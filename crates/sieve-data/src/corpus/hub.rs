//! Data sets, tokenizers and models of the Hugging Face hub, named by paths.
//!
//! A data set's path is `hf://datasets/OWNER/NAME[@REVISION][/FILES]`, as `huggingface_hub` writes it. FILES is a
//! folder, a file or a glob; without it all files with an ending of the corpus are read. The listing is fetched once
//! and kept, which pins the data set to that commit; after that the network is needed only for files that were not
//! read yet. A file is fetched when it is read, a broken transfer is resumed, and a file that was read to its end is
//! removed.
//!
//! The server is not trusted: the name of a fetched file on this disk is a hash of its name on the hub, and its bytes
//! must have the listed checksum.

mod client;
mod config;
mod models;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

use crate::error::DataError;
use client::{Checksum, Client, Download, is_hex};
use config::OFFLINE;
pub use config::{DownloadProgress, HubConfig, HubLimits, SeeDownload, Surroundings};
pub use models::{HubModel, HubModelEvent, hub_model, is_hub_model};
use sieve_files::{temporary_name, write_atomically};

/// Whether the path of a tokenizer names a model of the hub.
pub fn is_hub_tokenizer(path: &str) -> bool {
    is_remote(path)
}

/// The `tokenizer.json` of a model of the hub, `hf://OWNER/NAME[@REVISION][/FOLDER]`. The folder of `config` must be
/// `huggingface_hub`'s own cache: the file is looked up there, and otherwise fetched once into its folder `sieve`.
///
/// # Errors
/// A path of another form; a hub that cannot be reached or has no such file.
pub fn hub_tokenizer(path: &str, mut config: HubConfig) -> Result<PathBuf, DataError> {
    let remote = RemotePath::parse_model(path, "tokenizer")?;
    let folder = remote.files.trim_end_matches("tokenizer.json");
    let folder = folder.trim_end_matches('/');
    let name = match folder {
        "" => "tokenizer.json".to_owned(),
        folder => format!("{folder}/tokenizer.json"),
    };
    if let Some((snapshot, _)) = python_snapshot(&config.dir, &remote)
        && snapshot.join(&name).is_file()
    {
        return Ok(snapshot.join(&name));
    }
    config.dir = config.dir.join("sieve");
    let hub = Hub::new(config)?;
    // A model has one listing for all its folders.
    let listing = hub.listing(&format!("hf://{}@{}", remote.repo, remote.revision), &remote)?;
    let place = listing.siblings.iter().position(|sibling| sibling.name == name);
    let place =
        place.ok_or_else(|| hub.failed(&remote.url_repo(), format!("there is no {name} at commit {}", listing.sha)))?;
    hub.fetch(&hub.files(&remote, listing).swap_remove(place))
}

/// The folder that a model's revision has in `huggingface_hub`'s cache, and its commit. `None` if the cache does not
/// know the commit of a branch or tag. A revision that is a commit is not looked up, so its folder may not exist.
fn python_snapshot(cache: &Path, remote: &RemotePath) -> Option<(PathBuf, String)> {
    let model = cache.join(format!("models--{}", remote.repo.replace('/', "--")));
    let commit = if is_hex(&remote.revision, &[40]) {
        remote.revision.clone()
    } else {
        // The cache stores the commit of a branch or tag in a file of its name.
        sieve_files::read_text(&model.join("refs").join(&remote.revision)).ok()?
    };
    let commit = Some(commit.trim()).filter(|commit| is_hex(commit, &[40]))?;
    Some((model.join("snapshots").join(commit), commit.to_owned()))
}

/// A file of a repository on the hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RemoteFile {
    /// Repository: "datasets/OWNER/NAME", or "OWNER/NAME" for a model.
    repo: Arc<str>,
    commit: Arc<str>,
    /// Path of the file in the repository.
    pub(super) name: String,
    /// Size and checksum in the hub's list of files; `None` where the list lacks them.
    num_bytes: Option<u64>,
    checksum: Option<Checksum>,
}

impl RemoteFile {
    /// A name for messages and for the order of files.
    pub(super) fn display_path(&self) -> PathBuf {
        PathBuf::from(format!("hf://{}@{}/{}", self.repo, self.commit, self.name))
    }

    pub(super) fn num_bytes(&self) -> u64 {
        self.num_bytes.unwrap_or(0)
    }

    /// Name of the file on this disk: a hash, then the end of its name on the hub, whose ending decides the format.
    /// Characters other than ASCII letters, digits and `-_.` become `_`.
    fn local_name(&self) -> String {
        let hash = xxh3_128(self.display_path().as_os_str().as_encoded_bytes());
        let own = self.name.rsplit('/').next().unwrap_or_default().chars().map(|letter| {
            let is_harmless = letter.is_ascii_alphanumeric() || "-_.".contains(letter);
            if is_harmless { letter } else { '_' }
        });
        let own = own.collect::<String>();
        format!("{hash:032x}-{}", &own[own.len().saturating_sub(MAX_KEPT_NAME)..])
    }
}

const PREFIX: &str = "hf://datasets/";
/// How many characters of a remote file's name the local name ends with.
const MAX_KEPT_NAME: usize = 80;

/// Whether a path names a data set of the hub.
pub(super) fn is_remote(path: &str) -> bool {
    path.starts_with("hf://")
}

/// The parts of a path that begins with `hf://`.
#[derive(Debug, PartialEq, Eq)]
struct RemotePath {
    repo: String,
    revision: String,
    files: String,
    is_model: bool,
}

impl RemotePath {
    /// The repository as it is written in URLs.
    fn url_repo(&self) -> String {
        if self.is_model { self.repo.clone() } else { format!("datasets/{}", self.repo) }
    }

    /// Parses a model's `hf://OWNER/NAME[@REVISION][/FOLDER]`; `what` names what is read of the model.
    fn parse_model(path: &str, what: &str) -> Result<Self, DataError> {
        let bad = || {
            let hint = "write hf://OWNER/NAME, optionally followed by @REVISION and /FOLDER";
            DataError::refused(format!("{path:?} is not a valid hub path for a {what}"), hint)
        };
        let model = path.strip_prefix("hf://").filter(|model| !model.starts_with("datasets/")).ok_or_else(bad)?;
        let remote = Self::parse(&format!("{PREFIX}{model}")).map_err(|_| bad())?;
        let folder = remote.files.strip_suffix('/').unwrap_or(&remote.files);
        if !folder.is_empty() && folder.split('/').any(|part| matches!(part, "" | "." | "..")) {
            return Err(bad());
        }
        Ok(Self { is_model: true, ..remote })
    }

    /// Parses `hf://datasets/OWNER/NAME[@REVISION][/FILES]`; the revision is `main` if the path names none.
    fn parse(path: &str) -> Result<Self, DataError> {
        let bad = |reason: &str| {
            let hint = "write hf://datasets/OWNER/NAME, optionally followed by @REVISION and /FILES";
            DataError::refused(format!("{path:?} is not a data set: {reason}"), hint)
        };
        let rest = path.strip_prefix(PREFIX).ok_or_else(|| bad("only data sets can be read"))?;
        let mut parts = rest.split('/');
        let owner = parts.next().unwrap_or_default();
        let name = parts.next().unwrap_or_default();
        let (name, revision) = match name.split_once('@') {
            // refs/convert/parquet and refs/pr/3 are revisions with slashes.
            Some((name, "refs")) => {
                let kind = parts.next().unwrap_or_default();
                let which = parts.next().unwrap_or_default();
                (name, format!("refs/{kind}/{which}"))
            }
            Some((name, revision)) => (name, revision.to_owned()),
            None => (name, "main".to_owned()),
        };
        let is_name = |part: &str| {
            let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
            !part.is_empty() && part.bytes().all(allowed) && !part.starts_with('.')
        };
        if !is_name(owner) || !is_name(name) {
            return Err(bad(
                "the owner or the name of the data set is missing or holds other signs than letters, digits, - _ .",
            ));
        }
        if !revision.split('/').all(is_name) {
            return Err(bad("the revision after @ is not a branch, tag or commit"));
        }
        Ok(Self {
            repo: format!("{owner}/{name}"),
            revision,
            files: parts.collect::<Vec<_>>().join("/"),
            is_model: false,
        })
    }

    /// Whether FILES includes a file of the repository.
    fn takes(&self, file: &str, has_extension: &dyn Fn(&Path) -> bool) -> Result<bool, DataError> {
        let folder = self.files.trim_end_matches('/');
        if folder.is_empty() || file.strip_prefix(folder).is_some_and(|below| below.starts_with('/')) {
            return Ok(has_extension(Path::new(file)));
        }
        let pattern = glob::Pattern::new(&self.files).map_err(|error| DataError::glob(&self.files, &error))?;
        let options = glob::MatchOptions { require_literal_separator: true, ..Default::default() };
        Ok(pattern.matches_with(file, options))
    }
}

/// Checks the form of a path and of its glob, without contacting the hub.
pub(super) fn check_path(path: &str) -> Result<(), DataError> {
    RemotePath::parse(path)?.takes("", &|_| true).map(drop)
}

/// The hub's list of a data set's files: its answer, and what is stored on this disk.
#[derive(Debug, Serialize, Deserialize)]
struct Listing {
    /// The path that the files were listed for; the hub's answer has none.
    #[serde(default)]
    path: String,
    sha: String,
    siblings: Vec<Sibling>,
}

/// A file of a [`Listing`], which the hub calls a sibling.
#[derive(Debug, Serialize, Deserialize)]
struct Sibling {
    #[serde(rename = "rfilename")]
    name: String,
    #[serde(default)]
    size: Option<u64>,
    #[serde(default, rename = "blobId", skip_serializing_if = "Option::is_none")]
    git_blob: Option<String>,
    /// Set for a file in Git's large file storage (LFS).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lfs: Option<LargeFile>,
}

#[derive(Debug, Serialize, Deserialize)]
struct LargeFile {
    #[serde(default)]
    sha256: Option<String>,
}

/// The longest listing that is read: about a quarter of a million files. Parsed, it takes about ten times these bytes.
const MAX_ANSWER_BYTES: u64 = 64 << 20;
/// The longest file name that is accepted, as on Linux.
const MAX_NAME_BYTES: usize = 4096;

/// A connection to the hub, with its settings.
pub(super) struct Hub {
    client: Client,
    config: HubConfig,
}

impl fmt::Debug for Hub {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        self.config.fmt(formatter)
    }
}

impl Hub {
    pub(super) fn new(config: HubConfig) -> Result<Self, DataError> {
        fs::create_dir_all(&config.dir).map_err(DataError::io("create", &config.dir))?;
        let client = Client::new(&config)?;
        Ok(Self { client, config })
    }

    /// The files that a path names, by name.
    pub(super) fn list(&self, path: &str, has_extension: &dyn Fn(&Path) -> bool) -> Result<Vec<RemoteFile>, DataError> {
        let remote = RemotePath::parse(path)?;
        let mut listing = self.listing(path, &remote)?;
        let mut taken = Vec::with_capacity(listing.siblings.len());
        for sibling in listing.siblings {
            if remote.takes(&sibling.name, has_extension)? {
                taken.push(sibling);
            }
        }
        listing.siblings = taken;
        let mut files = self.files(&remote, listing);
        files.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(files)
    }

    /// The files of a listing, in its order.
    fn files(&self, remote: &RemotePath, listing: Listing) -> Vec<RemoteFile> {
        let (repo, commit) = (Arc::<str>::from(remote.url_repo()), Arc::<str>::from(listing.sha));
        let file = |sibling: Sibling| RemoteFile {
            repo: repo.clone(),
            commit: commit.clone(),
            checksum: Checksum::of(
                sibling.lfs.as_ref().and_then(|lfs| lfs.sha256.as_deref()),
                // For an LFS file the Git blob is only a pointer to the contents.
                sibling.git_blob.as_deref().filter(|_| sibling.lfs.is_none()),
            ),
            name: sibling.name,
            num_bytes: sibling.size,
        };
        listing.siblings.into_iter().map(file).collect()
    }

    /// The stored listing of `path`; without one, fetches the listing of the repository from the hub and stores it.
    fn listing(&self, path: &str, remote: &RemotePath) -> Result<Listing, DataError> {
        let kept_name = format!("listing-{:016x}.json", xxh3_64(path.as_bytes()));
        let kept = self.config.dir.join(kept_name);
        if kept.exists() {
            let bytes = sieve_files::read_file(&kept).map_err(DataError::io("read", &kept))?;
            let what = match serde_json::from_slice::<Listing>(&bytes) {
                Ok(listing) if listing.path == path => return Ok(listing),
                Ok(_) => "it lists a different path".to_owned(),
                Err(error) => error.to_string(),
            };
            let what = format!("not a listing of a data set: {what}; remove it to ask the hub again");
            return Err(DataError::meta(&kept, what));
        }
        let kind = if remote.is_model { "models" } else { "datasets" };
        let revision = encoded(&remote.revision, "");
        let url_path = format!("/api/{kind}/{}/revision/{revision}?blobs=true", remote.repo);
        let what = format!("the listing of {}", remote.revision);
        let failed = |reason: String| self.failed(&remote.url_repo(), reason);
        let body = self.client.text((&url_path, &what), MAX_ANSWER_BYTES, &failed)?;
        let answer = serde_json::from_str::<Listing>(&body)
            .map_err(|error| failed(format!("the answer is not a listing: {error}")))?;
        if !is_hex(&answer.sha, &[40, 64]) {
            return Err(failed(format!("the answer's commit {} is none", shortened(&answer.sha))));
        }
        let leads_elsewhere = |name: &str| {
            name.len() > MAX_NAME_BYTES
                || name.starts_with('/')
                || name.contains(char::is_control)
                || name.split('/').any(|part| part == "..")
        };
        if let Some(odd) = answer.siblings.iter().find(|sibling| leads_elsewhere(&sibling.name)) {
            let name = shortened(&odd.name);
            return Err(failed(format!("the file name {name} leads elsewhere or is not a name")));
        }
        let listing = Listing { path: path.to_owned(), ..answer };
        let json = serde_json::to_vec(&listing).expect("names and numbers serialise");
        write_atomically(&kept, &json)?;
        Ok(listing)
    }

    /// Path of a fetched file on this disk.
    fn local_path(&self, file: &RemoteFile) -> PathBuf {
        self.config.dir.join("files").join(file.local_name())
    }

    /// Fetches a file unless it exists, and returns its path.
    pub(super) fn fetch(&self, file: &RemoteFile) -> Result<PathBuf, DataError> {
        let path = self.local_path(file);
        let folder = self.config.dir.join("files");
        fs::create_dir_all(&folder).map_err(DataError::io("create", &folder))?;
        self.fetch_to(file, path.clone())?;
        Ok(path)
    }

    /// Fetches a file to `path` unless it exists; the folder must exist.
    fn fetch_to(&self, file: &RemoteFile, path: PathBuf) -> Result<(), DataError> {
        // A file gets its final name only after it is complete and its checksum was verified.
        if path.is_file() {
            return Ok(());
        }
        let RemoteFile { repo, commit, name, .. } = file;
        let download = Download {
            url_path: format!("/{repo}/resolve/{commit}/{}", encoded(name, "/")),
            name,
            path,
            num_bytes: file.num_bytes,
            checksum: file.checksum.as_ref(),
        };
        self.client.download(&download, &|reason| self.failed(repo, reason))
    }

    /// Removes the fetched copy of a file, if there is one.
    pub(super) fn discard(&self, file: &RemoteFile) {
        let path = self.local_path(file);
        // Errors are ignored: a copy that stays only takes disk space.
        let _ = fs::remove_file(temporary_name(&path));
        let _ = fs::remove_file(path);
    }

    /// The error of a request to the hub about a data set or a model.
    fn failed(&self, repo: &str, reason: String) -> DataError {
        let (kind, repo) = match repo.strip_prefix("datasets/") {
            Some(repo) => ("data set", repo),
            None => ("model", repo),
        };
        let what = format!("{kind} {repo} at {}: {reason}", self.config.endpoint);
        let hint = if self.config.is_offline {
            format!("leave {OFFLINE} out to fetch it, or name a folder on this disk")
        } else {
            format!(
                "check the name, the revision and the network; 401 and 404 mean that there is no such {kind}, or that \
                 it needs a token (HF_TOKEN); what was fetched before is kept, so ask again"
            )
        };
        DataError::refused(what, hint)
    }
}

/// Percent-encodes `text` for a URL: all bytes but letters, digits, `-_.~` and the characters of `kept`.
fn encoded(text: &str, kept: &str) -> String {
    let letters = text.bytes().map(|byte| match byte {
        byte if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) || kept.as_bytes().contains(&byte) => {
            char::from(byte).to_string()
        }
        byte => format!("%{byte:02X}"),
    });
    letters.collect()
}

/// The beginning of a server's text, quoted for a message.
fn shortened(text: &str) -> String {
    let start = text.chars().take(80).collect::<String>();
    if start.len() < text.len() { format!("{start:?}… of {} bytes", text.len()) } else { format!("{start:?}") }
}

#[cfg(test)]
mod tests;
