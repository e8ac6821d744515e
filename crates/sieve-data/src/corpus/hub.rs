//! Data sets of the Hugging Face hub, named by paths.
//!
//! A path is `hf://datasets/OWNER/NAME[@REVISION][/FILES]`, as `huggingface_hub` writes it; FILES is a folder, a file
//! or a glob, and without it all files with a wanted ending are taken. The listing is made once and kept: from then on
//! the data set is pinned to that commit, and a preparation needs the network only for files that it has not read yet.
//! A file is fetched when it is read, a broken transfer goes on where it stopped, and a file that was read to its end
//! is removed.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hf_hub::api::sync::{Api, ApiBuilder};
use hf_hub::{Cache, Repo, RepoType};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::error::DataError;
use sieve_files::write_atomically;

/// How to reach the hub, and where fetched files wait until they are read.
#[derive(Clone, PartialEq, Eq)]
pub struct HubConfig {
    /// Usually [`ENDPOINT`](Self::ENDPOINT); the variable `HF_ENDPOINT` by convention.
    pub endpoint: String,
    /// For data sets that are not public; the variable `HF_TOKEN` by convention.
    pub token: Option<String>,
    /// A folder of one's own; made if missing.
    pub dir: PathBuf,
}

impl HubConfig {
    /// The public hub.
    pub const ENDPOINT: &'static str = "https://huggingface.co";
}

// By hand, so that no message ever holds the token.
impl fmt::Debug for HubConfig {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter
            .debug_struct("HubConfig")
            .field("endpoint", &self.endpoint)
            .field("dir", &self.dir)
            .finish_non_exhaustive()
    }
}

/// Whether the path of a tokenizer names a model of the hub.
pub fn is_hub_tokenizer(path: &str) -> bool {
    is_remote(path)
}

/// The `tokenizer.json` of a model of the hub, `hf://OWNER/NAME[@REVISION][/FOLDER]`: fetched into the folder of
/// `config` unless it is there, so that it is asked for once.
///
/// # Errors
/// A path of another form; a hub that cannot be reached or has no such file.
pub fn hub_tokenizer(path: &str, config: HubConfig) -> Result<PathBuf, DataError> {
    let bad = || DataError::BadHubTokenizer { path: path.to_owned() };
    let model = path.strip_prefix("hf://").ok_or_else(bad)?;
    if model.starts_with("datasets/") {
        return Err(bad());
    }
    let remote = RemotePath::parse(&format!("{PREFIX}{model}")).map_err(|_| bad())?;
    let folder = remote.files.trim_end_matches("tokenizer.json");
    let folder = folder.trim_end_matches('/');
    let name = match folder {
        "" => "tokenizer.json".to_owned(),
        folder => format!("{folder}/tokenizer.json"),
    };
    if name.split('/').any(|part| matches!(part, "" | "." | "..")) {
        return Err(bad());
    }
    let repo = Repo::with_revision(remote.repo, RepoType::Model, remote.revision);
    Hub::new(config)?.get(repo, &name)
}

/// Where a remote file is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RemoteFile {
    /// "OWNER/NAME".
    repo: String,
    commit: String,
    /// Path in the repository.
    pub(super) name: String,
    num_bytes: Option<u64>,
}

impl RemoteFile {
    /// A name for messages and for the order of files.
    pub(super) fn display_path(&self) -> PathBuf {
        PathBuf::from(format!("{PREFIX}{}@{}/{}", self.repo, self.commit, self.name))
    }

    pub(super) fn num_bytes(&self) -> u64 {
        self.num_bytes.unwrap_or(0)
    }
}

const PREFIX: &str = "hf://datasets/";

/// Whether a path names a data set of the hub.
pub(super) fn is_remote(path: &str) -> bool {
    path.starts_with("hf://")
}

/// A path, taken apart.
#[derive(Debug, PartialEq, Eq)]
struct RemotePath {
    repo: String,
    revision: String,
    files: String,
}

impl RemotePath {
    fn parse(path: &str) -> Result<Self, DataError> {
        let bad = |reason: &str| DataError::BadHubPath {
            path: path.to_owned(),
            reason: reason.to_owned(),
        };
        let rest = path
            .strip_prefix(PREFIX)
            .ok_or_else(|| bad("only data sets can be read"))?;
        let mut parts = rest.split('/');
        let owner = parts.next().unwrap_or_default();
        let (name, revision) = match parts.next().unwrap_or_default().split_once('@') {
            // refs/convert/parquet and refs/pr/3 are revisions with slashes.
            Some((name, "refs")) => {
                let kind = parts.next().unwrap_or_default();
                let which = parts.next().unwrap_or_default();
                (name, format!("refs/{kind}/{which}"))
            }
            Some((name, revision)) => (name, revision.to_owned()),
            None => {
                let name = rest.split('/').nth(1).unwrap_or_default();
                (name, "main".to_owned())
            }
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
            return Err(bad("the revision behind @ is no branch, tag or commit"));
        }
        Ok(Self {
            repo: format!("{owner}/{name}"),
            revision,
            files: parts.collect::<Vec<_>>().join("/"),
        })
    }

    /// Whether FILES takes a file of the repository.
    fn takes(&self, file: &str, has_extension: &dyn Fn(&Path) -> bool) -> Result<bool, DataError> {
        let folder = self.files.trim_end_matches('/');
        if folder.is_empty() {
            return Ok(has_extension(Path::new(file)));
        }
        if let Some(below) = file.strip_prefix(folder)
            && below.starts_with('/')
        {
            return Ok(has_extension(Path::new(file)));
        }
        let pattern = glob::Pattern::new(&self.files).map_err(|error| DataError::BadGlob {
            pattern: self.files.clone(),
            reason: error.to_string(),
        })?;
        let options = glob::MatchOptions {
            require_literal_separator: true,
            ..Default::default()
        };
        Ok(pattern.matches_with(file, options))
    }
}

/// Says what is wrong with a path, without asking the hub.
pub(super) fn check_path(path: &str) -> Result<(), DataError> {
    RemotePath::parse(path)?.takes("", &|_| true).map(drop)
}

/// What the hub says of a data set, as it is kept.
#[derive(Debug, Serialize, Deserialize)]
struct Listing {
    path: String,
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Sibling {
    #[serde(rename = "rfilename")]
    name: String,
    #[serde(default)]
    size: Option<u64>,
}

/// The hub's answer to a question for a data set.
#[derive(Deserialize)]
struct Answer {
    sha: String,
    siblings: Vec<Sibling>,
}

/// A listing of a million files is about this long.
const MAX_ANSWER_BYTES: u64 = 256 << 20;
/// Tries of one file, each going on where the last stopped.
const NUM_TRIES: usize = 6;
/// Doubled from try to try: 15 seconds in all.
const FIRST_PAUSE: Duration = Duration::from_millis(500);

/// A way to the hub.
pub(super) struct Hub {
    api: Api,
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
        let api = ApiBuilder::from_cache(Cache::new(config.dir.clone()))
            .with_endpoint(config.endpoint.trim_end_matches('/').to_owned())
            .with_token(config.token.clone())
            .with_progress(false)
            .build();
        let api = api.map_err(|error| DataError::Hub {
            repo: "(none yet)".to_owned(),
            endpoint: config.endpoint.clone(),
            reason: error.to_string(),
        })?;
        Ok(Self { api, config })
    }

    /// The files that a path names, by name.
    pub(super) fn list(&self, path: &str, has_extension: &dyn Fn(&Path) -> bool) -> Result<Vec<RemoteFile>, DataError> {
        let remote = RemotePath::parse(path)?;
        let listing = self.listing(path, &remote)?;
        let mut files = Vec::new();
        for sibling in listing.siblings {
            if remote.takes(&sibling.name, has_extension)? {
                files.push(RemoteFile {
                    repo: remote.repo.clone(),
                    commit: listing.sha.clone(),
                    name: sibling.name,
                    num_bytes: sibling.size,
                });
            }
        }
        files.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(files)
    }

    /// The kept listing, or a new one, which is then kept.
    fn listing(&self, path: &str, remote: &RemotePath) -> Result<Listing, DataError> {
        let kept_name = format!("listing-{:016x}.json", xxh3_64(path.as_bytes()));
        let kept = self.config.dir.join(kept_name);
        if kept.exists() {
            let bytes = fs::read(&kept).map_err(DataError::io("read", &kept))?;
            return match serde_json::from_slice::<Listing>(&bytes) {
                Ok(listing) if listing.path == path => Ok(listing),
                Ok(_) => Err(self.bad_listing(&kept, "it lists another path")),
                Err(error) => Err(self.bad_listing(&kept, &error.to_string())),
            };
        }
        let repo = Repo::with_revision(remote.repo.clone(), RepoType::Dataset, remote.revision.clone());
        let request = self.api.repo(repo).info_request().query("blobs", "true");
        let failed = |reason: String| self.failed(&remote.repo, reason);
        let mut response = request.call().map_err(|error| failed(error.to_string()))?;
        let body = response.body_mut().with_config().limit(MAX_ANSWER_BYTES);
        let body = body.read_to_string().map_err(|error| failed(error.to_string()))?;
        let answer = serde_json::from_str::<Answer>(&body)
            .map_err(|error| failed(format!("the answer is no listing: {error}")))?;
        if !answer.sha.bytes().all(|byte| byte.is_ascii_hexdigit()) || answer.sha.is_empty() {
            return Err(failed(format!("the answer's commit {:?} is none", answer.sha)));
        }
        // Names become paths below our folder.
        let leaves = |name: &str| name.starts_with('/') || name.split('/').any(|part| part == "..");
        if let Some(odd) = answer.siblings.iter().find(|sibling| leaves(&sibling.name)) {
            return Err(failed(format!("the file name {:?} leads elsewhere", odd.name)));
        }
        let listing = Listing {
            path: path.to_owned(),
            sha: answer.sha,
            siblings: answer.siblings,
        };
        let json = serde_json::to_vec(&listing).expect("names and numbers serialise");
        write_atomically(&kept, &json)?;
        Ok(listing)
    }

    fn bad_listing(&self, path: &Path, what: &str) -> DataError {
        DataError::BadMeta {
            path: path.to_path_buf(),
            what: format!("no listing of a data set: {what}; remove it to ask the hub again"),
        }
    }

    /// Fetches a file of a repository unless it is there, and gives its path.
    fn get(&self, repo: Repo, name: &str) -> Result<PathBuf, DataError> {
        let of = repo.url().replacen("datasets/", "", 1);
        let repo = self.api.repo(repo);
        let mut pause = FIRST_PAUSE;
        let mut tries = 1;
        loop {
            // Each call goes on with what the one before has left. The crate's own tries do not: they begin at byte 0
            // and put the file behind the part that is there.
            match repo.get(name) {
                Ok(path) => return Ok(path),
                // The hub has answered; asking again changes nothing.
                Err(error) if tries == NUM_TRIES || error.to_string().contains("http status: 4") => {
                    return Err(self.failed(&of, format!("fetching {name}: {error}")));
                }
                Err(_) => std::thread::sleep(pause),
            }
            tries += 1;
            pause *= 2;
        }
    }

    /// Fetches a file of a data set unless it is there, and gives its path.
    pub(super) fn fetch(&self, file: &RemoteFile) -> Result<PathBuf, DataError> {
        self.drop_whole_parts(file);
        let repo = Repo::with_revision(file.repo.clone(), RepoType::Dataset, file.commit.clone());
        let path = self.get(repo, &file.name)?;
        let found = fs::metadata(&path).map_err(DataError::io("read", &path))?.len();
        match file.num_bytes {
            Some(wanted) if wanted != found => {
                self.remove(&path);
                let reason = format!("{} came with {found} bytes, not {wanted}", file.name);
                Err(self.failed(&file.repo, reason))
            }
            _ => Ok(path),
        }
    }

    /// Removes what a file takes on this disk, if anything.
    pub(super) fn discard(&self, file: &RemoteFile) {
        let repo = Repo::with_revision(file.repo.clone(), RepoType::Dataset, file.commit.clone());
        if let Some(path) = Cache::new(self.config.dir.clone()).repo(repo).get(&file.name) {
            self.remove(&path);
        }
    }

    /// Best effort: what stays behind costs disk and nothing else.
    fn remove(&self, path: &Path) {
        if let Ok(blob) = fs::canonicalize(path) {
            let _ = fs::remove_file(&blob);
            let _ = fs::remove_file(blob.with_extension("lock"));
        }
        let _ = fs::remove_file(path);
    }

    /// Removes unfinished files that have all their bytes and only lack their name: asked for the rest of such a file,
    /// a server answers that there is none.
    fn drop_whole_parts(&self, file: &RemoteFile) {
        let folder = format!("datasets--{}", file.repo.replace('/', "--"));
        let blobs = self.config.dir.join(folder).join("blobs");
        let entries = fs::read_dir(blobs).into_iter().flatten().flatten();
        let whole = entries.filter(|entry| {
            let is_part = entry.path().extension().is_some_and(|ending| ending == "part");
            let len = entry.metadata().map_or(0, |metadata| metadata.len());
            is_part && file.num_bytes.is_some_and(|num_bytes| len >= num_bytes)
        });
        for entry in whole {
            // Best effort: what stays shows as an error of the fetch.
            let _ = fs::remove_file(entry.path());
        }
    }

    fn failed(&self, repo: &str, reason: String) -> DataError {
        DataError::Hub {
            repo: repo.to_owned(),
            endpoint: self.config.endpoint.clone(),
            reason,
        }
    }
}

#[cfg(test)]
mod tests;
