//! Settings of the hub, and what its client needs of the program that it runs in.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use sieve_core::RecipeError;
use sieve_core::paths::expand;

/// How far the download of a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DownloadProgress<'a> {
    /// Name of the file in its repository.
    pub name: &'a str,
    /// Bytes of the file on this disk. The first call for a resumed download has the bytes that an earlier one left.
    pub num_fetched: u64,
    /// Size of the file in bytes.
    pub num_bytes: u64,
}

/// Called when the download of a file begins, and after each part of it; on the thread that reads the file.
pub type SeeDownload = Arc<dyn Fn(DownloadProgress<'_>) + Send + Sync>;

/// What reading from the hub needs of the program that does it.
#[derive(Clone)]
pub struct Surroundings<'a> {
    /// Looks environment variables up.
    pub variable: &'a dyn Fn(&str) -> Option<String>,
    /// Sees how far downloads are.
    pub see_download: SeeDownload,
}

impl<'a> Surroundings<'a> {
    /// Environment variables, and nobody who sees downloads.
    pub fn unseen(variable: &'a dyn Fn(&str) -> Option<String>) -> Self {
        Self { variable, see_download: Arc::new(|_| {}) }
    }
}

impl fmt::Debug for Surroundings<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.debug_struct("Surroundings").finish_non_exhaustive()
    }
}

/// How to reach the hub, and where fetched files are stored until they are read.
#[derive(Clone)]
pub struct HubConfig {
    /// URL of the hub, usually [`ENDPOINT`](Self::ENDPOINT).
    pub endpoint: String,
    /// Access token for repositories that are not public. It is sent only to the endpoint's host, and only over https.
    pub token: Option<String>,
    /// File with root certificates in PEM form, which replace the built-in web roots.
    pub certificates: Option<PathBuf>,
    /// Whether nothing may be asked: only what is on this disk is read.
    pub is_offline: bool,
    /// How long to wait for the hub.
    pub limits: HubLimits,
    /// Sees how far downloads are.
    pub see_download: SeeDownload,
    /// Folder for listings and fetched files; nothing else may use it. Created if missing.
    pub dir: PathBuf,
}

/// How long to wait for the hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HubLimits {
    /// Longest wait for a connection, and for the next byte of an answer.
    pub silence: Duration,
    /// A transfer fails after this time without a new byte, if the hub has answered before. A pause that the server
    /// requests (`Retry-After`) is respected within this time.
    pub outage: Duration,
    /// As `outage`, for a hub that has never answered: its address may be wrong.
    pub first_outage: Duration,
}

impl Default for HubLimits {
    fn default() -> Self {
        Self {
            silence: Duration::from_secs(60),
            outage: Duration::from_secs(900),
            first_outage: Duration::from_secs(5),
        }
    }
}

impl HubConfig {
    /// URL of the public Hugging Face hub.
    pub const ENDPOINT: &'static str = "https://huggingface.co";

    /// Reads the variables `HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE` and `SSL_CERT_FILE`; each may be unset or empty.
    pub fn new(surroundings: &Surroundings<'_>, dir: PathBuf) -> Self {
        let variable = surroundings.variable;
        let set = |value: Option<String>| value.filter(|value| !value.is_empty());
        Self {
            endpoint: set(variable("HF_ENDPOINT")).unwrap_or_else(|| Self::ENDPOINT.to_owned()),
            token: set(variable("HF_TOKEN")),
            certificates: set(variable("SSL_CERT_FILE")).map(PathBuf::from),
            is_offline: variable(OFFLINE).is_some_and(|value| is_yes(&value)),
            limits: HubLimits::default(),
            see_download: surroundings.see_download.clone(),
            dir,
        }
    }

    /// As [`new`](Self::new), with the folder of `huggingface_hub`'s own cache: `HF_HUB_CACHE`,
    /// or `hub` in `HF_HOME`.
    ///
    /// # Errors
    /// No home folder is known.
    pub fn of_cache(surroundings: &Surroundings<'_>) -> Result<Self, RecipeError> {
        let variable = surroundings.variable;
        let named = variable("HF_HUB_CACHE").filter(|dir| !dir.is_empty());
        let dir = match named {
            Some(dir) => dir,
            None => expand("${HF_HOME:-~/.cache/huggingface}/hub", variable)?,
        };
        Ok(Self::new(surroundings, PathBuf::from(dir)))
    }
}

/// The variable that forbids to ask the hub.
pub(super) const OFFLINE: &str = "HF_HUB_OFFLINE";

/// Whether the value of a variable means yes, as `huggingface_hub` reads it.
fn is_yes(value: &str) -> bool {
    ["1", "on", "yes", "true"].contains(&value.to_ascii_lowercase().as_str())
}

// `Debug` is not derived, so that no message can contain the token.
impl fmt::Debug for HubConfig {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter
            .debug_struct("HubConfig")
            .field("endpoint", &self.endpoint)
            .field("dir", &self.dir)
            .finish_non_exhaustive()
    }
}
