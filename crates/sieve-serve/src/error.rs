//! Errors of a server that cannot start, and of a request, in OpenAI's form.
use axum::body::Body;
use axum::http::{Response, StatusCode, header};
use serde_json::{Value, json};
use sieve_core::counted;
use sieve_infer::InferError;
use std::io;

/// Why a server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address cannot be listened at.
    #[error("cannot listen at {host}, port {port}: {error}\n  hint: {}", bind_hint(host))]
    Bind {
        /// Name or address.
        host: String,
        /// The port.
        port: u16,
        /// What the system said.
        error: io::Error,
    },
    /// The system gives no thread or no timer.
    #[error("the server's threads cannot start: {0}\n  hint: raise the limits on threads and open files (ulimit -n)")]
    Runtime(#[from] io::Error),
}

/// What to write in place of an address that cannot be listened at.
fn bind_hint(host: &str) -> String {
    let (_, address) = host.split_once("://").unwrap_or(("", host));
    let address = address.trim_end_matches('/');
    match address.split_once(':') {
        Some((name, port)) if !name.is_empty() && port.parse::<u16>().is_ok() => {
            format!("--host {name} --port {port}")
        }
        _ if address != host && !address.is_empty() => format!("--host {address}"),
        _ => "use a different --port, or a --host that is an address of this machine".to_owned(),
    }
}

/// How the error of a chat template goes on behind the name of its folder.
const TEMPLATE_FAILED: &str = "the chat template cannot be applied";

/// Why a request is not answered. Its message goes to the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    /// OpenAI's `type`.
    kind: &'static str,
    /// OpenAI's `code`, for errors that programs handle.
    code: Option<&'static str>,
    /// The field of the request.
    param: Option<String>,
    message: String,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: String) -> Self {
        // A template's error begins with the folder that holds it, which is no client's business.
        let begin = message.find(TEMPLATE_FAILED).unwrap_or(0);
        // A hint is a line of its own on a terminal.
        let message = message[begin..].replace("\n  hint: ", "; ");
        Self { status, kind, code: None, param: None, message }
    }

    /// A request that is wrong as it is.
    pub(crate) fn invalid(param: &str, message: impl Into<String>) -> Self {
        let param = (!param.is_empty()).then(|| param.to_owned());
        Self { param, ..Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message.into()) }
    }

    /// A request that needs more tokens than a text may have.
    /// They are fewer with another value of the fields `[prompt, length]`.
    pub(crate) fn too_long([param, length]: [&str; 2], prompt: usize, new: usize, context: usize) -> Self {
        let shorter = format!("shorten {param} or lower {length}");
        let message = format!(
            "a prompt of {} and {} do not fit into the context of {context}; {}",
            counted(prompt as u64, "token"),
            counted(new as u64, "new one"),
            // A prompt has a token at least.
            if context < 2 { "it has no room behind a prompt" } else { &shorter }
        );
        Self { code: Some("context_length_exceeded"), ..Self::invalid(param, message) }
    }

    /// A prompt that is too long however its text is cut into tokens.
    pub(crate) fn too_many_bytes(param: &str, prompt: usize, longest: usize, context: usize) -> Self {
        let message = format!(
            "a prompt of {prompt} bytes does not fit into the context of {context} tokens, of at most {longest} bytes \
             each; shorten the prompt"
        );
        Self { code: Some("context_length_exceeded"), ..Self::invalid(param, message) }
    }

    /// 400: an answer would hold more log-probabilities than all answers together may.
    pub(crate) fn too_many_scores(count: usize, most: u32) -> Self {
        let what = format!("the answer would hold {count} log-probabilities, and the limit is {most}");
        Self::invalid("logprobs", format!("{what}; send fewer prompts at once, or ask for fewer logprobs or tokens"))
    }

    pub(crate) fn unknown_model(asked: &str, name: &str) -> Self {
        let message = format!("the model \"{}\" does not exist; this server has {name:?}", shown(asked));
        let invalid = Self::invalid("model", message);
        Self { status: StatusCode::NOT_FOUND, code: Some("model_not_found"), ..invalid }
    }

    pub(crate) fn no_key() -> Self {
        let message = "no API key, or a wrong one; send Authorization: Bearer KEY".to_owned();
        let code = Some("invalid_api_key");
        Self { code, ..Self::new(StatusCode::UNAUTHORIZED, "authentication_error", message) }
    }

    /// 404: nothing is at this path.
    pub(crate) fn no_path(path: &str) -> Self {
        let message = format!(
            "nothing is at {}; this server has a page at /, and /v1/completions, /v1/chat/completions, /v1/models, \
             /health and /metrics",
            shown(path)
        );
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
    }

    pub(crate) fn wrong_method(method: &str, path: &str) -> Self {
        let message = format!("{} is not possible at {}", shown(method), shown(path));
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message)
    }

    pub(crate) fn too_large(most_bytes: usize) -> Self {
        let message = format!("the request has more than {most_bytes} bytes");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
    }

    pub(crate) fn packed_body() -> Self {
        let message = "the body has a Content-Encoding, and this server reads bodies as they are; send it without one";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request_error", message.to_owned())
    }

    /// A name that is not this server's: a page of the web may have bound it to this machine.
    pub(crate) fn foreign_host(host: &str) -> Self {
        let message = format!("this server is not {host:?}; ask for localhost, or start it with --allow-host {host}");
        Self::new(StatusCode::FORBIDDEN, "invalid_request_error", message)
    }

    pub(crate) fn foreign_origin(origin: &str) -> Self {
        let message = format!("pages of {origin:?} may not use this server, unless it is started with --allow-origin");
        Self::new(StatusCode::FORBIDDEN, "invalid_request_error", message)
    }

    /// A body of this type, or of none.
    pub(crate) fn not_json(sent: Option<String>) -> Self {
        let sent =
            sent.map_or_else(|| "the body has no type".to_owned(), |sent| format!("the body's type is {sent:?}"));
        let message =
            format!("{sent}; send Content-Type: application/json (curl: -H 'Content-Type: application/json')");
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request_error", message)
    }

    pub(crate) fn too_slow(seconds: u64) -> Self {
        let message = format!("the request did not arrive within {seconds} seconds");
        Self::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", message)
    }

    pub(crate) fn queue_full(most: usize) -> Self {
        let message = format!("the queue of {most} sequences is full; try again later");
        let code = Some("rate_limit_exceeded");
        Self { code, ..Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message) }
    }

    pub(crate) fn too_many_structures() -> Self {
        let message = "too many answers with a structure are waiting or being written; try again later".to_owned();
        let code = Some("rate_limit_exceeded");
        Self { code, ..Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message) }
    }

    pub(crate) fn no_place() -> Self {
        let message = "the server has as many connections as it takes; try again later".to_owned();
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message)
    }

    pub(crate) fn stopping() -> Self {
        let message = "the server is stopping".to_owned();
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message)
    }

    /// A fault of the server; the message names no part of a prompt.
    pub(crate) fn server(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message.into())
    }

    pub(crate) fn json(&self) -> Value {
        let Self { kind, code, param, message, .. } = self;
        json!({"error": {"message": message, "type": kind, "param": param, "code": code}})
    }

    /// The error as an answer: its status, its JSON, and the headers that HTTP wants beside that status.
    pub(crate) fn response(&self) -> Response<Body> {
        let mut response = Response::new(Body::from(self.json().to_string()));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
        // What HTTP wants beside these codes (RFC 9110; RFC 6585).
        let beside = match self.status {
            StatusCode::TOO_MANY_REQUESTS => Some((header::RETRY_AFTER, "1")),
            StatusCode::UNAUTHORIZED => Some((header::WWW_AUTHENTICATE, "Bearer")),
            StatusCode::UNSUPPORTED_MEDIA_TYPE => Some((header::ACCEPT_ENCODING, "identity")),
            _ => None,
        };
        if let Some((name, value)) = beside {
            headers.insert(name, header::HeaderValue::from_static(value));
        }
        response
    }
}

/// A text of a request as errors repeat it: without control characters, and not whole if it is long.
pub(crate) fn shown(text: &str) -> String {
    const MOST_CHARS: usize = 64;
    let rest = if text.chars().nth(MOST_CHARS).is_some() { "…" } else { "" };
    text.chars().take(MOST_CHARS).flat_map(char::escape_debug).chain(rest.chars()).collect()
}

impl From<InferError> for ApiError {
    fn from(error: InferError) -> Self {
        match error {
            InferError::NotFinite(_) => Self::server(error.to_string()),
            _ => Self::invalid("", error.to_string()),
        }
    }
}
