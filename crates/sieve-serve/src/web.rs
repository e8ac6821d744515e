//! Who may ask: names of the server, and pages of the web.
//!
//! A page that a person has open can send requests to this machine, and a name that an attacker rebinds to 127.0.0.1
//! makes the page of the server's own origin. So on a loopback address a request must name this machine (`Host`), a
//! request with a foreign `Origin` is refused, and a body must be `application/json`, which a page of another origin
//! cannot send without asking first.
use crate::error::{ApiError, shown};
use axum::body::Body;
use axum::extract::Request;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header};
use std::net::IpAddr;

/// Names by which clients reach a server, and origins whose pages may use it.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// Whether the server listens on a loopback address, so that requests must name this machine.
    pub is_local: bool,
    /// Further names of the server, as a proxy passes them on.
    pub hosts: Vec<String>,
    /// Origins such as `https://chat.example`, whose pages may send requests and read answers.
    pub origins: Vec<String>,
}

impl Access {
    /// The origin of a page that may read the answer; `None` for a request that no page sent, or the server's own.
    ///
    /// # Errors
    /// 403 for a name that is not this server's and for a page that may not ask; 415 for a body of another type.
    pub(crate) fn check(&self, request: &Request) -> Result<Option<HeaderValue>, ApiError> {
        let headers = request.headers();
        // The name in the request's target counts before the header (RFC 9112, section 3.2.2).
        let named = headers.get(header::HOST).and_then(|host| host.to_str().ok());
        let host = request.uri().authority().map(Authority::as_str).or(named);
        if let Some(host) = host.filter(|host| self.is_local && !self.has_host(host)) {
            return Err(ApiError::foreign_host(&shown(host)));
        }
        let reader = match headers.get(header::ORIGIN) {
            None => None,
            Some(origin) if is_own(origin, host) => None,
            Some(origin) if self.has_origin(origin) => Some(origin.clone()),
            Some(origin) => return Err(ApiError::foreign_origin(&shown(&String::from_utf8_lossy(origin.as_bytes())))),
        };
        let is_body = request.method() == Method::POST;
        if is_body && !is_json(headers) {
            let sent = headers.get(header::CONTENT_TYPE).map(|sent| String::from_utf8_lossy(sent.as_bytes()));
            return Err(ApiError::not_json(sent.map(|sent| shown(&sent))));
        }
        Ok(reader)
    }

    fn has_host(&self, host: &str) -> bool {
        let name = without_port(host);
        let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
        let is_this_machine = name.eq_ignore_ascii_case("localhost") || address.is_ok_and(|it| it.is_loopback());
        is_this_machine || self.hosts.iter().any(|known| without_port(known).eq_ignore_ascii_case(name))
    }

    fn has_origin(&self, origin: &HeaderValue) -> bool {
        self.origins.iter().any(|known| origin.as_bytes().eq_ignore_ascii_case(known.as_bytes()))
    }

    /// The answer to the question of a browser whether a page of `reader` may send a request.
    pub(crate) fn preflight() -> Response<Body> {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::NO_CONTENT;
        for (name, value) in [
            (header::ACCESS_CONTROL_ALLOW_METHODS, "GET, POST"),
            (header::ACCESS_CONTROL_ALLOW_HEADERS, "authorization, content-type"),
            (header::ACCESS_CONTROL_MAX_AGE, "600"),
        ] {
            response.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        response
    }

    /// Lets a page of `reader` read an answer.
    pub(crate) fn let_read(reader: HeaderValue, response: &mut Response<Body>) {
        response.headers_mut().insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, reader);
        response.headers_mut().append(header::VARY, HeaderValue::from_static("Origin"));
    }
}

/// Whether an origin is the server's own: a page that it sent, by the name in `host`.
fn is_own(origin: &HeaderValue, host: Option<&str>) -> bool {
    let origin = origin.to_str().unwrap_or_default();
    let own = ["http://", "https://"].into_iter().find_map(|scheme| origin.strip_prefix(scheme));
    own.zip(host).is_some_and(|(own, host)| own.eq_ignore_ascii_case(host))
}

/// The name in `NAME:PORT`, `[ADDRESS]:PORT` or either without a port.
fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|digit| digit.is_ascii_digit()) && !name.ends_with(':') => name,
        _ => host,
    }
}

/// Whether a body is JSON by its type, which may have parameters.
fn is_json(headers: &HeaderMap) -> bool {
    let sent = headers.get(header::CONTENT_TYPE).and_then(|sent| sent.to_str().ok()).unwrap_or_default();
    sent.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(head: &[(&'static str, &str)], method: Method) -> Request {
        let mut request = Request::builder().method(method).uri("/v1/completions");
        for (name, value) in head {
            request = request.header(*name, *value);
        }
        request.body(Body::empty()).expect("a request")
    }

    fn local() -> Access {
        let origins = vec!["https://chat.example".to_owned()];
        Access { is_local: true, hosts: vec!["sieve.lan".to_owned()], origins }
    }

    #[test]
    fn on_a_loopback_address_only_names_of_this_machine_are_answered() {
        let status = |access: &Access, host: &str| {
            access.check(&asked(&[("host", host)], Method::GET)).map_or_else(|error| error.status.as_u16(), |_| 200)
        };
        for host in [
            "localhost",
            "LOCALHOST:8000",
            "127.0.0.1",
            "127.0.0.1:1",
            "127.9.9.9",
            "[::1]",
            "[::1]:8000",
            "sieve.lan",
            "Sieve.Lan:443",
        ] {
            assert_eq!(status(&local(), host), 200, "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:8000",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "10.0.0.1",
            "[::2]:8000",
            "0.0.0.0",
            "",
            "sieve.lan.",
            "localhost:80:80",
        ] {
            assert_eq!(status(&local(), host), 403, "{host}");
            assert_eq!(status(&Access { is_local: false, ..local() }, host), 200, "{host}");
        }
        // A refusal names the host as it was asked for, with its port: started with that name, the server answers.
        let named = Access { hosts: vec!["evil.example:8000".to_owned()], ..local() };
        assert_eq!(["evil.example:8000", "evil.example"].map(|host| status(&named, host)), [200; 2]);
        // A target that names the host counts before the header.
        let mut request = asked(&[("host", "localhost")], Method::GET);
        *request.uri_mut() = "http://evil.example/v1/models".parse().expect("a target");
        assert!(local().check(&request).is_err());
    }

    #[test]
    fn a_page_of_another_origin_asks_and_reads_only_if_it_is_named() {
        let host = ("host", "127.0.0.1:8000");
        let found = |origin: &'static str| local().check(&asked(&[host, ("origin", origin)], Method::GET));
        assert_eq!(found("http://127.0.0.1:8000"), Ok(None));
        assert_eq!(found("https://chat.example"), Ok(Some(HeaderValue::from_static("https://chat.example"))));
        for origin in [
            "https://evil.example",
            "null",
            "",
            "http://127.0.0.1:8001",
            "https://chat.example.evil",
            "file://",
            "http://chat.example",
        ] {
            assert_eq!(found(origin).map_err(|error| error.status.as_u16()), Err(403), "{origin}");
        }
    }

    #[test]
    fn a_body_is_json_by_its_type() {
        let host = ("host", "localhost");
        let status = |kind: Option<&'static str>| {
            let kind = kind.map(|kind| ("content-type", kind));
            let head: Vec<_> = std::iter::once(host).chain(kind).collect();
            local().check(&asked(&head, Method::POST)).map_or_else(|error| error.status.as_u16(), |_| 200)
        };
        for kind in ["application/json", "Application/JSON; charset=utf-8", "application/json;charset=utf-8"] {
            assert_eq!(status(Some(kind)), 200, "{kind}");
        }
        let others = [
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data; a=application/json",
            "",
            "application/jsonp",
        ];
        for kind in others.map(Some).into_iter().chain([None]) {
            assert_eq!(status(kind), 415, "{kind:?}");
        }
    }
}
