//! Takes connections, with limits on their number and on how slowly a client may write and read.
use crate::error::ServeError;
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

/// Connections at a time; further ones wait.
const MOST_CONNECTIONS: usize = 1024;
/// Time for the head of a request, which also ends connections that are idle.
const HEAD_TIME: Duration = Duration::from_secs(30);
/// Time in which a client that is sent something must read some of it.
const READ_TIME: Duration = Duration::from_secs(30);
/// Time for the answers that are being written when the server is asked to stop.
const STOP_TIME: Duration = Duration::from_secs(30);
/// Pause after a connection could not be taken, as when there are too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Listens at an address, before a model is loaded. Port 0 takes a free one.
///
/// # Errors
/// An address that is in use, not allowed, or not this machine's.
pub fn listen(host: &str, port: u16) -> Result<TcpListener, ServeError> {
    TcpListener::bind((host, port)).map_err(|error| ServeError::Bind { host: host.to_owned(), port, error })
}

/// Takes connections until `stop` asks for the end, then waits for the open ones.
pub(crate) async fn accept(listener: TcpListener, router: Router, mut stop: watch::Receiver<bool>) -> io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let (places, connections) = (Arc::new(Semaphore::new(MOST_CONNECTIONS)), GracefulShutdown::new());
    loop {
        let next = async {
            let place = places.clone().acquire_owned().await;
            (place, listener.accept().await)
        };
        let (place, accepted) = tokio::select! {
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
        let service = TowerToHyperService::new(router.clone());
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIME)
            .serve_connection(TokioIo::new(Box::pin(stream)), service);
        let connection = connections.watch(connection);
        tokio::spawn(async move {
            // What goes wrong with a connection ends it alone.
            let _ = connection.await;
            drop(place);
        });
    }
    drop(listener);
    let _ = tokio::time::timeout(STOP_TIME, connections.shutdown()).await;
    Ok(())
}
