//! Requests to the hub, with limits on everything that a server controls: the time without an answer, the number of
//! bytes, and the targets of redirects.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ring::digest;
use sieve_files::{AtomicFile, temporary_name};
use ureq::config::RedirectAuthHeaders;
use ureq::http::{Response, Uri, header};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

use super::config::{DownloadProgress, HubConfig, HubLimits, OFFLINE, SeeDownload};
use crate::error::DataError;

/// A download fails if its mean rate is below this, in bytes per second.
const LEAST_RATE: u64 = 16 << 10;
/// Pause before the second attempt; it doubles with every further one.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// A download fails when the file has arrived this many times with a wrong checksum.
const MAX_DAMAGED: u32 = 2;

/// The checksum that a file must have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Checksum {
    kind: ChecksumKind,
    hex: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ChecksumKind {
    /// SHA-256 of the file's bytes, for files in large file storage.
    Sha256,
    /// Git's blob id: SHA-1 of a header with the length, and the bytes.
    GitBlob,
}

impl Checksum {
    /// The checksum from a listing; `None` if the listing has neither kind.
    pub(super) fn of(sha256: Option<&str>, git_blob: Option<&str>) -> Option<Self> {
        let kinds = [(ChecksumKind::Sha256, 64, sha256), (ChecksumKind::GitBlob, 40, git_blob)];
        kinds.into_iter().find_map(|(kind, len, hex)| {
            let hex = hex.filter(|hex| is_hex(hex, &[len]))?;
            let hex = hex.to_ascii_lowercase();
            Some(Self { kind, hex })
        })
    }

    fn name(&self) -> &'static str {
        match self.kind {
            ChecksumKind::Sha256 => "SHA-256",
            ChecksumKind::GitBlob => "Git blob id",
        }
    }

    /// The checksum of a file on this disk, in hexadecimal digits.
    fn measure(&self, path: &Path) -> io::Result<String> {
        let mut file = sieve_files::open_file(path)?;
        let mut sum = match self.kind {
            ChecksumKind::Sha256 => digest::Context::new(&digest::SHA256),
            ChecksumKind::GitBlob => {
                let mut sum = digest::Context::new(&digest::SHA1_FOR_LEGACY_USE_ONLY);
                sum.update(format!("blob {}\0", file.metadata()?.len()).as_bytes());
                sum
            }
        };
        let mut buffer = vec![0; 1 << 20];
        loop {
            match file.read(&mut buffer)? {
                0 => break,
                len => sum.update(&buffer[..len]),
            }
        }
        Ok(sum.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

/// Whether a text is a hexadecimal number of one of these lengths.
pub(super) fn is_hex(text: &str, lengths: &[usize]) -> bool {
    lengths.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// A file to download.
pub(super) struct Download<'a> {
    /// Path of the URL, after the endpoint.
    pub(super) url_path: String,
    /// Name of the file in messages.
    pub(super) name: &'a str,
    /// Where the file is stored on the local disk.
    pub(super) path: PathBuf,
    /// Expected size and checksum; `None` where the hub does not list them.
    pub(super) num_bytes: Option<u64>,
    pub(super) checksum: Option<&'a Checksum>,
}

/// Why an attempt to download failed.
enum Failure {
    /// A temporary problem of server or network: its reason, and the pause that the server requests, if any.
    Passing(String, Option<Duration>),
    /// A permanent problem of the server: its reason.
    Lasting(String),
    /// An error of the local disk, which a repetition does not fix.
    Here(DataError),
}

impl Failure {
    fn passing(reason: impl ToString) -> Self {
        Self::Passing(reason.to_string(), None)
    }
}

impl<E: Into<DataError>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Here(error.into())
    }
}

/// HTTP client of one endpoint.
pub(super) struct Client {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
    is_offline: bool,
    limits: HubLimits,
    see_download: SeeDownload,
    /// Whether the endpoint has ever answered, even with an error.
    has_answered: AtomicBool,
}

impl Client {
    /// A client for the endpoint of `config`.
    ///
    /// # Errors
    /// A file of certificates that cannot be used.
    pub(super) fn new(config: &HubConfig) -> Result<Self, DataError> {
        let endpoint = config.endpoint.trim_end_matches('/').to_owned();
        let is_https = is_https(&endpoint);
        let mut settings = Agent::config_builder()
            .http_status_as_error(false)
            // A request over https must not be redirected to http.
            .https_only(is_https)
            .redirect_auth_headers(RedirectAuthHeaders::SameHost)
            .timeout_connect(Some(config.limits.silence))
            .timeout_recv_response(Some(config.limits.silence))
            .timeout_per_read(Some(config.limits.silence))
            .timeout_per_write(Some(config.limits.silence))
            .user_agent(concat!("sieve/", env!("CARGO_PKG_VERSION")));
        if let Some(path) = &config.certificates {
            let roots = RootCerts::new_with_certs(&certificates(path)?);
            settings = settings.tls_config(TlsConfig::builder().root_certs(roots).build());
        }
        Ok(Self {
            agent: settings.build().into(),
            // Over plain http others could read the token, so it is not sent.
            token: config.token.clone().filter(|_| is_https),
            endpoint,
            is_offline: config.is_offline,
            limits: config.limits,
            see_download: config.see_download.clone(),
            has_answered: AtomicBool::new(false),
        })
    }

    /// Fetches the text at `url_path`, which messages call `what`; a text of more than `max_bytes` is an error.
    ///
    /// # Errors
    /// The reason of the failure, turned into an error by `failed`.
    pub(super) fn text(
        &self,
        (url_path, what): (&str, &str),
        max_bytes: u64,
        failed: &dyn Fn(String) -> DataError,
    ) -> Result<String, DataError> {
        self.insist(what, max_bytes, failed, &mut |budget, _| {
            let first_byte = 0;
            let mut response = self.ask(url_path, first_byte, budget)?;
            let body = response.body_mut().with_config().limit(max_bytes);
            body.read_to_string().map_err(|error| match error {
                ureq::Error::BodyExceedsLimit(limit) => {
                    Failure::Lasting(format!("the listing is longer than {} MiB", limit >> 20))
                }
                error => Failure::passing(error),
            })
        })
    }

    /// Fetches a file; resumes a partial file that an earlier call left.
    ///
    /// # Errors
    /// The reason of the failure, turned into an error by `failed`.
    pub(super) fn download(&self, file: &Download<'_>, failed: &dyn Fn(String) -> DataError) -> Result<(), DataError> {
        let what = format!("fetching {}", file.name);
        // `insist` allows more time for more bytes; without a listed size, none is added.
        let num_bytes = file.num_bytes.unwrap_or(0);
        let mut num_damaged = 0;
        self.insist(&what, num_bytes, failed, &mut |budget, has_progressed| {
            self.fetch_rest(file, budget, has_progressed)?;
            // `publish` returns `Passing` for a wrong checksum alone.
            self.publish(file).inspect_err(|_| num_damaged += 1).map_err(|error| match error {
                Failure::Passing(reason, _) if num_damaged == MAX_DAMAGED => Failure::Lasting(reason),
                error => error,
            })
        })
    }

    /// Fetches the bytes that the partial file lacks. Sets `has_progressed` when bytes arrive.
    fn fetch_rest(&self, file: &Download<'_>, budget: Duration, has_progressed: &mut bool) -> Result<(), Failure> {
        let temporary = temporary_name(&file.path);
        let mut num_fetched = fs::metadata(&temporary).map_or(0, |metadata| metadata.len());
        if file.num_bytes.is_some_and(|num_bytes| num_fetched > num_bytes) {
            // A partial file that is too long is fetched anew.
            num_fetched = 0;
        }
        if num_fetched > 0 && Some(num_fetched) == file.num_bytes {
            return Ok(());
        }
        let response = self.ask(&file.url_path, num_fetched, budget)?;
        if num_fetched > 0 && !begins_at(&response, num_fetched) {
            // A server that cannot send a part sends the whole file, with status 200.
            num_fetched = 0;
            if response.status() != 200 {
                let _ = fs::remove_file(&temporary);
                return Err(Failure::passing("the server sent a different range from the one requested"));
            }
        }
        let body = response.into_body();
        let total = match (file.num_bytes, body.content_length()) {
            (Some(wanted), Some(rest)) if num_fetched.saturating_add(rest) != wanted => {
                let _ = fs::remove_file(&temporary);
                let found = num_fetched.saturating_add(rest);
                return Err(Failure::Lasting(format!("{} came with {found} bytes, not {wanted}", file.name)));
            }
            (Some(wanted), _) => wanted,
            (None, Some(rest)) => num_fetched.saturating_add(rest),
            (None, None) => {
                return Err(Failure::Lasting("neither listing nor answer gives its length".to_owned()));
            }
        };
        let mut out = match num_fetched {
            0 => AtomicFile::create(&file.path)?,
            _ => AtomicFile::resume(&file.path, num_fetched)?,
        };
        // A longer body is cut off here; the checksum then decides.
        let mut body = body.into_reader().take(total - num_fetched);
        let mut buffer = vec![0; 1 << 18];
        let see =
            |num_fetched| (self.see_download)(DownloadProgress { name: file.name, num_fetched, num_bytes: total });
        see(num_fetched);
        let ended = loop {
            match body.read(&mut buffer) {
                Ok(0) => break None,
                Ok(len) => {
                    *has_progressed = true;
                    out.write(&buffer[..len])?;
                    num_fetched += len as u64;
                    see(num_fetched);
                }
                Err(error) => break Some(error.to_string()),
            }
        };
        out.keep()?;
        match ended {
            None if num_fetched == total => Ok(()),
            None => Err(Failure::passing(format!("the connection ended after {num_fetched} of {total} bytes"))),
            Some(reason) => Err(Failure::passing(format!("{reason} after {num_fetched} of {total} bytes"))),
        }
    }

    /// Verifies the checksum of a completely fetched file, and renames the file to its final name.
    fn publish(&self, file: &Download<'_>) -> Result<(), Failure> {
        let temporary = temporary_name(&file.path);
        if let Some(checksum) = file.checksum {
            let found = checksum.measure(&temporary).map_err(DataError::io("read", &temporary))?;
            if found != checksum.hex {
                fs::remove_file(&temporary).map_err(DataError::io("remove", &temporary))?;
                let (kind, wanted) = (checksum.name(), &checksum.hex);
                return Err(Failure::passing(format!("its {kind} is {found}, the listing says {wanted}")));
            }
        }
        let len = fs::metadata(&temporary).map_err(DataError::io("read", &temporary))?.len();
        AtomicFile::resume(&file.path, len)?.finish()?.publish()?;
        Ok(())
    }

    /// Repeats `attempt` until it succeeds. Gives up after a permanent error of the server, after no new byte for
    /// [`HubLimits::outage`], or at a rate below [`LEAST_RATE`]. `attempt` gets the time that is left, and a flag to
    /// set when bytes arrive.
    fn insist<T>(
        &self,
        what: &str,
        num_bytes: u64,
        failed: &dyn Fn(String) -> DataError,
        attempt: &mut dyn FnMut(Duration, &mut bool) -> Result<T, Failure>,
    ) -> Result<T, DataError> {
        let longest = self.limits.outage + Duration::from_secs(num_bytes / LEAST_RATE);
        let started = Instant::now();
        let (mut last_byte, mut pause) = (started, FIRST_PAUSE);
        loop {
            let mut has_progressed = false;
            let budget = longest.saturating_sub(started.elapsed());
            let (reason, asked) = match attempt(budget.max(Duration::from_millis(1)), &mut has_progressed) {
                Ok(found) => return Ok(found),
                Err(Failure::Passing(reason, asked)) => (reason, asked),
                Err(Failure::Lasting(reason)) => return Err(failed(format!("{what}: {reason}"))),
                Err(Failure::Here(error)) => return Err(error),
            };
            if has_progressed {
                (last_byte, pause) = (Instant::now(), FIRST_PAUSE);
            }
            let outage =
                if self.has_answered.load(Ordering::Relaxed) { self.limits.outage } else { self.limits.first_outage };
            let wait = asked.unwrap_or(pause);
            // The server may request any pause, so these sums must not overflow.
            let silence = last_byte.elapsed().saturating_add(wait);
            if silence > outage || started.elapsed().saturating_add(wait) > longest {
                let asked =
                    asked.map_or(String::new(), |wait| format!("; the server asks to wait for {} s", wait.as_secs()));
                let seconds = started.elapsed().as_secs();
                return Err(failed(format!("{what}: {reason}{asked}; given up after {seconds} s")));
            }
            log::warn!(
                "{} at {}: {reason}; the next try is in {:.1} s",
                what.escape_debug(),
                self.endpoint,
                wait.as_secs_f64()
            );
            std::thread::sleep(wait);
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }

    /// Sends a `GET` request for `url_path`, from byte `first` on; fails after the time `budget`.
    fn ask(&self, url_path: &str, first: u64, budget: Duration) -> Result<Response<Body>, Failure> {
        if self.is_offline {
            return Err(Failure::Lasting(format!("it is not on this disk, and {OFFLINE} forbids to ask the hub")));
        }
        let request = self.agent.get(format!("{}{url_path}", self.endpoint));
        let mut request = request.config().timeout_global(Some(budget)).build();
        if let Some(token) = &self.token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        if first > 0 {
            request = request.header(header::RANGE, format!("bytes={first}-"));
        }
        let response = request.call().map_err(|error| match error {
            ureq::Error::BadUri(_)
            | ureq::Error::Http(_)
            | ureq::Error::RequireHttpsOnly(_)
            | ureq::Error::TooManyRedirects
            | ureq::Error::RedirectFailed
            | ureq::Error::InvalidProxyUrl => Failure::Lasting(error.to_string()),
            error => Failure::passing(error),
        })?;
        self.has_answered.store(true, Ordering::Relaxed);
        let status = response.status();
        match status.as_u16() {
            // 416: the file ends before byte `first`; the caller removes its partial file.
            200 | 206 | 416 => Ok(response),
            408 | 429 | 500.. => {
                let asked = response.headers().get(header::RETRY_AFTER);
                let asked = asked.and_then(|seconds| seconds.to_str().ok()?.trim().parse().ok());
                Err(Failure::Passing(format!("http status {status}"), asked.map(Duration::from_secs)))
            }
            _ => {
                let code = response.headers().get(ERROR_CODE).and_then(|code| code.to_str().ok());
                Err(Failure::Lasting(refused(code).map_or_else(|| format!("http status {status}"), str::to_owned)))
            }
        }
    }
}

/// The header by which the hub says why it refuses a request.
const ERROR_CODE: &str = "x-error-code";

/// What a code of the hub means; `None` for an unknown code, or without a code.
fn refused(code: Option<&str>) -> Option<&'static str> {
    Some(match code? {
        "RepoNotFound" => "there is none of this name, or the token may not see it",
        "RevisionNotFound" => "there is no such revision",
        "EntryNotFound" => "there is no such file",
        "GatedRepo" => "it is gated: its owner asks for an agreement on its page, then for a token (HF_TOKEN)",
        "DisabledRepo" => "it was disabled on the hub",
        _ => return None,
    })
}

fn is_https(endpoint: &str) -> bool {
    let uri = endpoint.parse::<Uri>();
    uri.is_ok_and(|uri| uri.scheme_str() == Some("https"))
}

/// Whether a response holds the part of a file that begins at byte `first`.
fn begins_at(response: &Response<Body>, first: u64) -> bool {
    let range = response.headers().get(header::CONTENT_RANGE);
    let range = range.and_then(|range| range.to_str().ok()).unwrap_or_default();
    response.status() == 206 && range.starts_with(&format!("bytes {first}-"))
}

/// Reads the certificates of a file in PEM form.
fn certificates(path: &Path) -> Result<Vec<ureq::tls::Certificate<'static>>, DataError> {
    let text = sieve_files::read_file(path).map_err(DataError::io("read", path))?;
    let items = parse_pem(&text).map(|item| match item {
        Ok(PemItem::Certificate(certificate)) => Ok(Some(certificate)),
        Ok(_) => Ok(None),
        Err(error) => Err(error.to_string()),
    });
    let bad = |reason: String| {
        let what = format!("not usable as root certificates: {reason}");
        let hint = "SSL_CERT_FILE names a file in PEM form; unset it to trust the roots of the web";
        DataError::file(path, what, hint)
    };
    let found = items.collect::<Result<Vec<_>, _>>().map_err(bad)?;
    let found = found.into_iter().flatten().collect::<Vec<_>>();
    if found.is_empty() { Err(bad("there is no certificate in it".to_owned())) } else { Ok(found) }
}

#[cfg(test)]
mod tests {
    use super::super::Surroundings;
    use super::*;

    #[test]
    fn the_access_token_is_kept_for_an_https_endpoint_alone() {
        let token = |endpoint: &str| {
            let variable = |name: &str| (name == "HF_ENDPOINT").then(|| endpoint.to_owned());
            let config = HubConfig {
                token: Some("secret".to_owned()),
                ..HubConfig::new(&Surroundings::unseen(&variable), "x".into())
            };
            Client::new(&config).unwrap().token.is_some()
        };
        for (endpoint, is_sent) in [
            (HubConfig::ENDPOINT, true),
            ("HTTPS://hub.example/", true),
            ("http://hub.example", false),
            ("hub.example", false),
        ] {
            assert_eq!(token(endpoint), is_sent, "{endpoint}");
        }
    }

    #[test]
    fn checksums_are_those_of_sha256sum_and_git() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        fs::write(&path, "hello\n").unwrap();
        let sha256 = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
        let git_blob = "ce013625030ba8dba906f756967f9e9ca394464a";
        for (checksum, wanted) in
            [(Checksum::of(Some(sha256), Some(git_blob)), sha256), (Checksum::of(None, Some(git_blob)), git_blob)]
        {
            assert_eq!(checksum.unwrap().measure(&path).unwrap(), wanted);
        }
        assert_eq!(Checksum::of(Some("x"), Some("x")), None);
    }
}
