//! Takes connections, with limits on their number and on how slowly a client may write and read.
use crate::error::ServeError;
use crate::http;
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Semaphore, watch};
use tokio_io_timeout::TimeoutStream;

/// Connections at a time.
const MOST_CONNECTIONS: usize = 1024;
/// Connections beyond these, which are told so, and asked whether the server lives, and are closed; further ones wait.
const SPARE_CONNECTIONS: usize = 64;
/// Time for the head of a request on a spare connection.
const SPARE_TIME: Duration = Duration::from_secs(1);
/// Time for the head of a request, which also ends connections that are idle.
const HEAD_TIME: Duration = Duration::from_secs(30);
/// Time in which a client that is sent something must read some of it.
const READ_TIME: Duration = Duration::from_secs(30);
/// Time for the answers that are being written when the server is asked to stop.
const STOP_TIME: Duration = Duration::from_secs(30);
/// Time after that for the last event of an answer.
const LAST_TIME: Duration = Duration::from_secs(2);
/// Pause after a connection could not be taken, as when there are too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Listens at an address, before a model is loaded. Port 0 takes a free one.
///
/// # Errors
/// An address that is in use, not allowed, or not this machine's.
pub fn listen(host: &str, port: u16) -> Result<TcpListener, ServeError> {
    TcpListener::bind((host, port)).map_err(|error| ServeError::Bind { host: host.to_owned(), port, error })
}

/// Takes connections until `stop` asks for the end, then waits for the open ones. If some are open after
/// [`STOP_TIME`], calls `end_answers`, and gives them [`LAST_TIME`] to send what is left then.
pub(crate) async fn accept(
    listener: TcpListener,
    router: Router,
    stop: watch::Receiver<bool>,
    end_answers: impl FnOnce(),
) -> io::Result<()> {
    let places = [MOST_CONNECTIONS, SPARE_CONNECTIONS];
    accept_at(places, STOP_TIME, (listener, router), stop, end_answers).await
}

/// [`accept`] with so many usual and spare connections, and so much time.
async fn accept_at(
    places: [usize; 2],
    stop_time: Duration,
    (listener, router): (TcpListener, Router),
    mut stop: watch::Receiver<bool>,
    end_answers: impl FnOnce(),
) -> io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let without_place = http::without_place();
    let connections = GracefulShutdown::new();
    let [places, spare] = places.map(|places| Arc::new(Semaphore::new(places)));
    loop {
        let next = async {
            let place = tokio::select! {
                biased;
                place = places.clone().acquire_owned() => (place, true),
                place = spare.clone().acquire_owned() => (place, false),
            };
            (place, listener.accept().await)
        };
        let ((place, is_usual), accepted) = tokio::select! {
            biased;
            _ = stop.wait_for(|asked| *asked) => break,
            next = next => next,
        };
        let Ok((stream, _)) = accepted else {
            // The client has gone, or the system has no file handle left: other clients may come.
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        // Tokens are sent one by one, so small packets must not wait for more data.
        let _ = stream.set_nodelay(true);
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(READ_TIME));
        let (router, head_time) =
            if is_usual { (router.clone(), HEAD_TIME) } else { (without_place.clone(), SPARE_TIME) };
        let service = TowerToHyperService::new(router);
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(head_time)
            .keep_alive(is_usual)
            .serve_connection(TokioIo::new(Box::pin(stream)), service);
        let connection = connections.watch(connection);
        tokio::spawn(async move {
            // What goes wrong with a connection ends it alone.
            let _ = connection.await;
            drop(place);
        });
    }
    drop(listener);
    let mut ended = std::pin::pin!(connections.shutdown());
    if tokio::time::timeout(stop_time, &mut ended).await.is_err() {
        end_answers();
        let _ = tokio::time::timeout(LAST_TIME, ended).await;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpStream;

    /// The status line of the answer to `GET path`.
    fn asked(stream: &mut TcpStream, path: &str) -> String {
        let head = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
        stream.write_all(head.as_bytes()).expect("it reads");
        let mut answer = [0; 512];
        let length = stream.read(&mut answer).expect("an answer");
        String::from_utf8_lossy(&answer[..length]).lines().next().unwrap_or_default().to_owned()
    }

    #[test]
    fn a_probe_is_answered_where_no_further_connection_has_a_place() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("it listens");
        listener.set_nonblocking(true).expect("a socket");
        let (stop, stopped) = watch::channel(false);
        let router = Router::new().fallback(async || "usual");
        let server = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            let accept = accept_at([2, 1], STOP_TIME, (listener, router), stopped, || ());
            runtime.block_on(accept).expect("it accepts");
        });
        let connect = || TcpStream::connect(address).expect("the server listens");
        let mut held = [connect(), connect()];
        for stream in &mut held {
            assert_eq!(asked(stream, "/v1/models"), "HTTP/1.1 200 OK");
        }
        for (path, status) in [("/health", "200 OK"), ("/v1/models", "503 Service Unavailable")] {
            let mut spare = connect();
            assert_eq!(asked(&mut spare, path), format!("HTTP/1.1 {status}"));
            // It keeps no connection, so that the next probe has its place.
            spare.set_read_timeout(Some(HEAD_TIME)).expect("a time");
            spare.read_to_end(&mut Vec::new()).expect("an end");
        }
        // One that says nothing has its place for a second only.
        let _silent = connect();
        let begun = std::time::Instant::now();
        assert_eq!(asked(&mut connect(), "/health"), "HTTP/1.1 200 OK");
        assert!(begun.elapsed() < SPARE_TIME * 5, "{:?}", begun.elapsed());
        drop(held);
        stop.send_replace(true);
        server.join().expect("it ends");
    }

    #[test]
    fn an_answer_that_is_open_when_the_time_is_over_gets_its_last_event() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("it listens");
        listener.set_nonblocking(true).expect("a socket");
        let (stop, stopped) = watch::channel(false);
        // An answer that goes on until its texts are dropped, as the server's answers do.
        let (texts, dropped) = watch::channel(());
        let answer = move || {
            let events = futures_util::stream::unfold((0, dropped.clone()), async |(at, mut dropped)| {
                let event = match at {
                    0 => "first ",
                    1 => {
                        while dropped.changed().await.is_ok() {}
                        "the server is stopping"
                    }
                    _ => return None,
                };
                Some((Ok::<_, std::convert::Infallible>(event), (at + 1, dropped)))
            });
            std::future::ready(axum::body::Body::from_stream(events))
        };
        let router = Router::new().fallback(answer);
        let server = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            let accept = accept_at([2, 1], Duration::from_millis(200), (listener, router), stopped, || drop(texts));
            runtime.block_on(accept).expect("it accepts");
        });
        let mut stream = TcpStream::connect(address).expect("the server listens");
        assert_eq!(asked(&mut stream, "/v1/completions"), "HTTP/1.1 200 OK");
        stop.send_replace(true);
        let mut rest = String::new();
        stream.read_to_string(&mut rest).expect("an end");
        assert!(rest.contains("the server is stopping"), "{rest}");
        server.join().expect("it ends");
    }
}
