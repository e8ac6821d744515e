//! The paths of the server.
use crate::error::ApiError;
use crate::queue::{Piece, Text};
use crate::reply::Reply;
use crate::request::{Asked, Form};
use crate::served::Serving;
use crate::server::Server;
use crate::web::Access;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderValue, Method, Response, StatusCode, Uri, Version, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::routing::{get, post};
use futures_util::StreamExt;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::future::ready;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::UnboundedReceiver;

/// Bytes of a request, at most.
const MOST_BYTES: usize = 4 << 20;
/// Bytes from which on a request waits for its turn among the long ones.
const LONG_BYTES: usize = 64 << 10;
/// Bytes that are read of a larger body before it is answered.
const MOST_READ: usize = 64 << 20;
/// Seconds in which a request must arrive.
const BODY_SECONDS: u64 = 30;
/// The page at `/`, which talks to the model.
const PAGE: &str = include_str!("page.html");
/// What the page may do: run the script that it holds and ask this server. Text never becomes elements of it.
const PAGE_POLICY: &str = "default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; \
                           script-src 'unsafe-inline'; require-trusted-types-for 'script'; trusted-types 'none'; \
                           base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
/// The type of numbers for Prometheus.
const NUMBERS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The server's paths.
pub(crate) fn router(server: Arc<Server>) -> Router {
    Router::new()
        .route("/", get(page))
        .route("/v1/completions", post(completion))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/health", get(async || json_response(&json!({"status": "ok"}))))
        .route("/metrics", get(metrics))
        .fallback(async |uri: Uri| ApiError::no_path(uri.path()).response())
        .method_not_allowed_fallback(async |method: Method, uri: Uri| {
            ApiError::wrong_method(method.as_str(), uri.path()).response()
        })
        .layer(from_fn_with_state(server.clone(), guard))
        .with_state(server)
}

/// The paths of a server that has no place for a further connection: one probe asks whether it lives.
pub(crate) fn without_place() -> Router {
    Router::new()
        .route("/health", get(async || json_response(&json!({"status": "ok"}))))
        .fallback(async || ApiError::no_place().response())
}

/// The one path of a server of numbers, which `text` gives.
pub(crate) fn metrics_alone(text: impl Fn() -> String + Clone + Send + Sync + 'static) -> Router {
    Router::new()
        .route("/metrics", get(move || ready(typed(NUMBERS, text().into()))))
        .fallback(async || (StatusCode::NOT_FOUND, "the numbers are at /metrics\n"))
        .method_not_allowed_fallback(async || (StatusCode::METHOD_NOT_ALLOWED, "GET /metrics\n"))
}

/// Checks the head of a request and its key, and counts and logs the answer.
async fn guard(State(server): State<Arc<Server>>, mut request: Request, next: Next) -> Response<Body> {
    // The path that counts; unknown paths share one counter.
    let path = match request.uri().path() {
        "/" => "/",
        "/v1/completions" => "/v1/completions",
        "/v1/chat/completions" => "/v1/chat/completions",
        "/health" => "/health",
        "/metrics" => "/metrics",
        path if path.starts_with("/v1/models") => "/v1/models",
        _ => "other",
    };
    // A stream holds it beyond this function.
    let serving = server.settings.log.clone().filter(|_| !["/health", "/metrics"].contains(&path));
    let serving = serving.map(|log| Arc::new(Serving::new(request.method().as_str().to_owned(), path, log)));
    if let Some(serving) = &serving {
        request.extensions_mut().insert(serving.clone());
    }
    // The page asks a person for the key, and holds nothing of the model.
    let is_open = ["/", "/health", "/metrics"].contains(&path);
    let response = match (server.settings.access.check(&request), &server.settings.api_key) {
        _ if !has_host(&request) => {
            ApiError::invalid("", "a request of HTTP/1.1 has one header Host, and this one lacks it").response()
        }
        (Err(refused), _) => refused.response(),
        (Ok(reader), key) => {
            let mut response = match key {
                // A browser asks without the key that it will send.
                _ if reader.is_some() && request.method() == Method::OPTIONS => Access::preflight(),
                Some(key) if !is_open && !has_key(&request, key) => ApiError::no_key().response(),
                _ => next.run(request).await,
            };
            if let Some(reader) = reader {
                Access::let_read(reader, &mut response);
            }
            response
        }
    };
    let status = response.status().as_u16();
    server.metrics.count_answer(path, status);
    if let Some(serving) = serving {
        serving.has_status(status);
    }
    response
}

/// Whether a request names the host as HTTP/1.1 wants it (RFC 9112, section 3.2).
fn has_host(request: &Request) -> bool {
    request.version() < Version::HTTP_11 || request.headers().get_all(header::HOST).iter().count() == 1
}

/// Whether a request has the key. The comparison takes the same time wherever the keys differ.
fn has_key(request: &Request, key: &str) -> bool {
    let sent = request.headers().get(header::AUTHORIZATION).map(HeaderValue::as_bytes).unwrap_or_default();
    // The name of a scheme has no case (RFC 9110, section 11.1).
    let scheme = b"Bearer ";
    let Some((_, sent)) = sent.split_at_checked(scheme.len()).filter(|(name, _)| name.eq_ignore_ascii_case(scheme))
    else {
        return false;
    };
    let differing = sent.iter().zip(key.as_bytes()).fold(0, |differing, (a, b)| differing | (a ^ b));
    sent.len() == key.len() && differing == 0
}

fn json_response(value: &Value) -> Response<Body> {
    typed("application/json", value.to_string().into())
}

fn typed(kind: &'static str, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

/// The page, which a browser must not take for anything else, nor show inside of another page.
async fn page() -> Response<Body> {
    let mut response = typed("text/html; charset=utf-8", PAGE.into());
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, PAGE_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        // Another program at the same address may have another page.
        (header::CACHE_CONTROL, "no-cache"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

async fn metrics(State(server): State<Arc<Server>>) -> Response<Body> {
    typed(NUMBERS, server.metrics.text(server.queue.len()).into())
}

/// What `/v1/models` says about the model.
fn about(server: &Server) -> Value {
    let settings = &server.settings;
    json!({
        "id": settings.name, "object": "model", "created": server.begun, "owned_by": "sieve",
        "max_model_len": settings.context, "attention": settings.attention, "selector": settings.selector,
        "sampling": {
            "temperature": settings.sampling.temperature, "top_p": settings.sampling.top_p,
            "top_k": settings.sampling.top_k, "min_p": settings.rules.min_p,
            "repetition_penalty": settings.rules.repetition_penalty,
        },
        "texts_at_once": settings.max_texts, "texts_waiting_at_most": settings.max_queue,
        "has_chat_template": settings.template.is_some(), "keys": server.keys(settings.context),
    })
}

async fn models(State(server): State<Arc<Server>>) -> Response<Body> {
    json_response(&json!({"object": "list", "data": [about(&server)]}))
}

/// `GET /v1/models/NAME`: what is said of the served model, or 404 for another name.
async fn model(
    State(server): State<Arc<Server>>,
    name: Result<Path<String>, PathRejection>,
    uri: Uri,
) -> Response<Body> {
    // A name that is not UTF-8 is shown as it was sent.
    let name = name.map_or_else(|_| uri.path().replacen("/v1/models/", "", 1), |Path(name)| name);
    if name == server.settings.name {
        json_response(&about(&server))
    } else {
        ApiError::unknown_model(&name, &server.settings.name).response()
    }
}

async fn completion(State(server): State<Arc<Server>>, request: Request) -> Response<Body> {
    answer(Form::Completion, server, request).await.unwrap_or_else(|error| error.response())
}

async fn chat(State(server): State<Arc<Server>>, request: Request) -> Response<Body> {
    answer(Form::Chat, server, request).await.unwrap_or_else(|error| error.response())
}

/// Answers a request: sends its texts to the worker, and returns what comes back, whole or as a stream.
async fn answer(form: Form, server: Arc<Server>, mut request: Request) -> Result<Response<Body>, ApiError> {
    let serving = request.extensions_mut().remove::<Arc<Serving>>();
    let body = read(request).await?;
    let asking = server.clone();
    let asked = {
        // Long texts take long to cut into tokens, and much memory. Few are read at a time, so that a reader is left
        // for short ones.
        let _turn = if body.len() > LONG_BYTES {
            Some(server.long_requests.acquire().await.map_err(|_| ApiError::stopping())?)
        } else {
            None
        };
        tokio::task::spawn_blocking(move || Asked::read(form, &body, &asking)).await
    };
    let asked = Arc::new(asked.map_err(|_| ApiError::server("the request could not be read"))??);
    // A request whose answer has no room for its log-probabilities yet waits until others are written.
    let num_scores = asked.num_scores() as u32;
    let room = server.scores.clone().acquire_many_owned(num_scores).await.map_err(|_| ApiError::stopping())?;
    let mut pieces = server.queue.send(asked.num_texts(), |index, pieces| {
        let prompt = asked.prompt(index);
        Text {
            index,
            prompt: prompt.tokens.clone(),
            max_tokens: prompt.max_tokens,
            sampling: asked.sampling_of(index),
            rules: asked.rules,
            grammar: asked.grammar.clone(),
            stop: asked.stop.clone(),
            ignores_ends: asked.ignores_ends,
            num_top: asked.num_top,
            scores_prompt: asked.echo && asked.num_top.is_some(),
            pieces,
        }
    })?;
    let mut reply = Reply::new(server, asked.clone(), serving, room);
    if asked.streams {
        return Ok(typed("text/event-stream", stream(reply, pieces)));
    }
    while !reply.is_whole() {
        let (text, piece) = pieces.recv().await.ok_or_else(ApiError::stopping)?;
        reply.add(text, piece)?;
    }
    Ok(json_response(&reply.whole()))
}

/// The body of a request, within its limits of size and time.
async fn read(request: Request) -> Result<Vec<u8>, ApiError> {
    let is_plain = |coding: &HeaderValue| coding.as_bytes().eq_ignore_ascii_case(b"identity");
    if !request.headers().get_all(header::CONTENT_ENCODING).iter().all(is_plain) {
        return Err(ApiError::packed_body());
    }
    let read = async {
        let (mut parts, mut num_bytes) = (request.into_body().into_data_stream(), 0);
        let mut body = Vec::new();
        // A larger body is read on, and dropped: most clients read no answer before they have sent all of theirs.
        while num_bytes < MOST_READ
            && let Some(part) = parts.next().await
        {
            // The error of a connection that broke off, where no client reads the answer.
            let part = part.map_err(|error| ApiError::invalid("", format!("the body broke off: {error}")))?;
            num_bytes += part.len();
            if num_bytes <= MOST_BYTES { body.extend_from_slice(&part) } else { body.clear() }
        }
        if num_bytes <= MOST_BYTES { Ok(body) } else { Err(ApiError::too_large(MOST_BYTES)) }
    };
    let body = tokio::time::timeout(Duration::from_secs(BODY_SECONDS), read);
    body.await.map_err(|_| ApiError::too_slow(BODY_SECONDS))?
}

/// A stream of events: chunks as texts grow, an error if there is one, and `[DONE]`.
fn stream(reply: Reply, pieces: UnboundedReceiver<(usize, Piece)>) -> Body {
    let first = reply.first_chunks().iter().map(event).collect::<String>();
    let events = futures_util::stream::unfold(Some((first, reply, pieces)), async |state| {
        let (mut text, mut reply, mut pieces) = state?;
        // The first chunks go out at once; afterwards each event waits for a piece.
        while text.is_empty() {
            let failed = match pieces.recv().await {
                Some((at, piece)) => match reply.add(at, piece) {
                    Ok(()) => {
                        text += &reply.chunk(at).as_ref().map(event).unwrap_or_default();
                        None
                    }
                    Err(error) => Some(error),
                },
                None => Some(ApiError::stopping()),
            };
            if let Some(error) = &failed {
                reply.has_failed(error);
            }
            if failed.is_none() && !reply.is_whole() {
                continue;
            }
            text += &failed
                .map_or_else(|| reply.last_chunk(), |error| Some(error.json()))
                .as_ref()
                .map(event)
                .unwrap_or_default();
            text += "data: [DONE]\n\n";
            return Some((Ok::<_, Infallible>(Bytes::from(text)), None));
        }
        Some((Ok(Bytes::from(text)), Some((String::new(), reply, pieces))))
    });
    Body::from_stream(events)
}

fn event(value: &Value) -> String {
    format!("data: {value}\n\n")
}
