//! What a server says of each request that it has answered: sizes and times, never a text.
use crate::error::ApiError;
use serde_json::{Value, json};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// A request that was answered, or whose client has gone.
#[derive(Clone, Debug, Default)]
pub struct ServedRequest {
    /// `POST`, for example.
    pub method: String,
    /// The path; one that the server does not have is `other`.
    pub path: &'static str,
    /// The status of the answer; `None` if the client went before. A stream has 200 from its beginning on, also if it
    /// ends with an error.
    pub status: Option<u16>,
    /// Tokens of all prompts.
    pub prompt_tokens: usize,
    /// Generated tokens of the texts that have ended.
    pub new_tokens: usize,
    /// Seconds until the first text of the answer; `None` if there was none.
    pub first_seconds: Option<f64>,
    /// Seconds until the end of the answer.
    pub seconds: f64,
    /// What went wrong behind the status: `client gone`, or the status of an error inside of a stream.
    pub problem: Option<String>,
}

impl ServedRequest {
    /// The request as a JSON object with the names of the fields; what is absent is null.
    pub fn json(&self) -> Value {
        json!({
            "method": self.method, "path": self.path, "status": self.status, "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens, "first_seconds": self.first_seconds, "seconds": self.seconds,
            "problem": self.problem,
        })
    }
}

impl fmt::Display for ServedRequest {
    /// One line: `POST /v1/completions 200  12 + 128 tokens  first after 0.021 s  1.204 s`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let status = self.status.map_or_else(|| "-".to_owned(), |status| status.to_string());
        write!(f, "{} {} {status}", self.method, self.path)?;
        if self.prompt_tokens > 0 {
            write!(f, "  {} + {} tokens", self.prompt_tokens, self.new_tokens)?;
        }
        if let Some(first) = self.first_seconds {
            write!(f, "  first after {first:.3} s")?;
        }
        write!(f, "  {:.3} s", self.seconds)?;
        self.problem.as_ref().map_or(Ok(()), |problem| write!(f, "  {problem}"))
    }
}

/// What is called with each request.
#[derive(Clone)]
pub struct RequestLog(Arc<dyn Fn(&ServedRequest) + Send + Sync>);

impl RequestLog {
    /// Calls `log` with each request, in the thread that answers all of them: it must not wait.
    pub fn new(log: impl Fn(&ServedRequest) + Send + Sync + 'static) -> Self {
        Self(Arc::new(log))
    }
}

impl fmt::Debug for RequestLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RequestLog")
    }
}

/// A request that is being answered. The last holder logs it: the one that sends the end of a stream, or drops it
/// because the client has gone.
#[derive(Debug)]
pub(crate) struct Serving {
    begun: Instant,
    log: RequestLog,
    request: Mutex<ServedRequest>,
}

impl Serving {
    pub(crate) fn new(method: String, path: &'static str, log: RequestLog) -> Self {
        let request = ServedRequest { method, path, ..ServedRequest::default() };
        Self { begun: Instant::now(), log, request: Mutex::new(request) }
    }

    fn request(&self) -> MutexGuard<'_, ServedRequest> {
        self.request.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn has_status(&self, status: u16) {
        let mut request = self.request();
        request.status = Some(status);
        // A status of an error says what it is.
        request.problem.take_if(|_| status >= 400);
    }

    /// The prompts were read. Until [`is_whole`](Self::is_whole) an end means that the client has gone.
    pub(crate) fn has_prompts(&self, num_tokens: usize) {
        let mut request = self.request();
        request.prompt_tokens = num_tokens;
        request.problem = Some("client gone".to_owned());
    }

    /// Some text of the answer is there.
    pub(crate) fn has_text(&self) {
        let seconds = self.begun.elapsed().as_secs_f64();
        self.request().first_seconds.get_or_insert(seconds);
    }

    /// A text has ended after this number of generated tokens.
    pub(crate) fn has_ended(&self, num_tokens: usize) {
        self.request().new_tokens += num_tokens;
    }

    /// All texts have ended.
    pub(crate) fn is_whole(&self) {
        self.request().problem = None;
    }

    /// The answer's stream ends with an error. Any other answer says by its status that it does.
    pub(crate) fn has_failed(&self, error: &ApiError) {
        self.request().problem = Some(format!("ended with status {}", error.status.as_u16()));
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let mut request = self.request().clone();
        request.seconds = self.begun.elapsed().as_secs_f64();
        (self.log.0)(&request);
    }
}
