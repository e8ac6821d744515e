//! `--metrics-port`: serves the numbers of a run in Prometheus' text format at `/metrics`.
use anyhow::{Context, Result};
use sieve_train::TrainEvent;
use std::fmt::Write as _;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Time limit for receiving a request, and again for sending its answer. One request is served at a time, so a slow
/// client must not block the others.
const LIMIT: Duration = Duration::from_secs(2);
/// Most bytes of an HTTP request.
const MAX_REQUEST: usize = 8 << 10;

/// The addresses of a parsed `--metrics-port`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MetricsPort(Vec<SocketAddr>);

impl FromStr for MetricsPort {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let address = match text.parse::<u16>() {
            Ok(port) => format!("127.0.0.1:{port}"),
            Err(_) => text.to_owned(),
        };
        let found = address.to_socket_addrs();
        let found = found.map_err(|error| format!("'{text}' is no PORT and no HOST:PORT ({error})"))?;
        Ok(Self(found.collect()))
    }
}

/// The metrics served, with their current values.
#[derive(Debug, Default)]
struct Numbers {
    /// (name without the prefix `sieve_`, help text, value). Names that end with `_total` are counters.
    all: Vec<(&'static str, &'static str, f64)>,
}

impl Numbers {
    /// Sets a number.
    fn put(&mut self, name: &'static str, help: &'static str, value: f64) {
        match self.all.iter_mut().find(|(found, ..)| *found == name) {
            Some((.., found)) => *found = value,
            None => self.all.push((name, help, value)),
        }
    }

    fn count(&mut self, name: &'static str, help: &'static str) {
        let before = self.all.iter().find(|(found, ..)| *found == name);
        let before = before.map_or(0.0, |(.., value)| *value);
        self.put(name, help, before + 1.0);
    }

    /// The numbers in Prometheus' text format, version 0.0.4.
    fn text(&self) -> String {
        let mut text = String::new();
        for (name, help, value) in &self.all {
            let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
            let value = match value {
                value if value.is_nan() => "NaN".to_owned(),
                value if value.is_infinite() => format!("{}Inf", if *value > 0.0 { '+' } else { '-' }),
                value => value.to_string(),
            };
            // Writing to a String does not fail.
            let _ = write!(text, "# HELP sieve_{name} {help}\n# TYPE sieve_{name} {kind}\nsieve_{name} {value}\n");
        }
        text
    }
}

/// Collects a run's numbers and serves them from a thread.
#[derive(Clone, Default)]
pub(super) struct Exporter(Arc<Mutex<Numbers>>);

impl Exporter {
    fn lock(&self) -> MutexGuard<'_, Numbers> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the serving thread, which ends with the process. Returns the address it listens on.
    pub(super) fn listen(&self, port: &MetricsPort) -> Result<SocketAddr> {
        let listener = TcpListener::bind(&port.0[..]).with_context(|| {
            let port = port.0.first().map_or(String::new(), SocketAddr::to_string);
            format!("--metrics-port {port}: nothing can listen there\n  hint: another port, or 0 for a free one")
        })?;
        let address = listener.local_addr()?;
        let this = self.clone();
        let serve = move || {
            loop {
                match listener.accept() {
                    // A client that disconnects is no error of the run.
                    Ok((stream, _)) => drop(this.answer(&stream, LIMIT)),
                    // There may be too many open files: waits, then tries again.
                    Err(_) => std::thread::sleep(Duration::from_secs(1)),
                }
            }
        };
        let thread = std::thread::Builder::new().name("sieve-metrics".to_owned());
        thread.spawn(serve).context("starting a thread")?;
        Ok(address)
    }

    /// Reads one request and answers it, each within `limit`.
    fn answer(&self, mut stream: &TcpStream, limit: Duration) -> std::io::Result<()> {
        let until = Instant::now() + limit;
        let mut request = Vec::new();
        let mut piece = [0; 1024];
        while !request.windows(4).any(|end| end == b"\r\n\r\n") {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || request.len() > MAX_REQUEST {
                return Err(ErrorKind::TimedOut.into());
            }
            stream.set_read_timeout(Some(left))?;
            match stream.read(&mut piece)? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                len => request.extend(&piece[..len]),
            }
        }
        let request = String::from_utf8_lossy(&request);
        let mut words = request.split([' ', '?']);
        let (status, body) = match (words.next(), words.next()) {
            (Some("GET"), Some("/metrics")) => ("200 OK", self.lock().text()),
            (Some("GET"), _) => ("404 Not Found", "the numbers are at /metrics\n".to_owned()),
            _ => ("405 Method Not Allowed", "GET /metrics\n".to_owned()),
        };
        stream.set_write_timeout(Some(limit))?;
        let kind = "text/plain; version=0.0.4; charset=utf-8";
        let length = body.len();
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
        );
        stream.write_all((head + &body).as_bytes())
    }

    /// Updates the numbers from an event of the run.
    pub(super) fn see(&self, event: &TrainEvent<'_>) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let mut numbers = self.lock();
        let mut put = |name, help, value| numbers.put(name, help, value);
        put(
            "last_event_timestamp_seconds",
            "When the run last logged a step, a validation, a checkpoint or a warning",
            now.map_or(0.0, |now| now.as_secs_f64()),
        );
        match event {
            TrainEvent::Step(report) => {
                put("steps_total", "Optimizer steps done", report.step as f64);
                put("planned_steps", "Optimizer steps of the whole run", report.num_steps as f64);
                put("tokens_total", "Tokens trained on", report.tokens_seen as f64);
                put("loss_nats", "Mean cross-entropy of the last logged step", report.loss);
                put("gradient_norm", "Global gradient norm before clipping", report.grad_norm);
                put("learning_rate", "Learning rate", report.lr);
                put("tokens_per_second", "Tokens a second of all processes", report.tokens_per_second);
                put("memory_bytes", "Memory in use by rank 0's device", report.memory_bytes as f64);
                put("seconds_left", "Seconds left at the present speed", report.eta_seconds);
                if let Some(mfu) = report.mfu_percent {
                    put("mfu_ratio", "Model FLOPs as a share of the device's peak", mfu / 100.0);
                }
            }
            TrainEvent::Validation(report) => {
                put("validation_loss_nats", "Cross-entropy on held-out text", report.loss);
                put("validation_bits_per_byte", "The same in bits per byte", report.bits_per_byte);
            }
            TrainEvent::Checkpoint(path) => {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                let step = name.strip_prefix("step-").and_then(|step| step.parse().ok());
                put("checkpoint_step", "Step of the last checkpoint on disk", step.unwrap_or(0.0));
            }
            TrainEvent::Skipped(_) => {
                numbers.count("skipped_steps_total", "Steps that were not taken: loss or gradient not finite");
            }
            TrainEvent::Warning(_) => numbers.count("warnings_total", "Warnings that were logged"),
            TrainEvent::FirstStep | TrainEvent::Computed(_) | TrainEvent::Notice(_) | TrainEvent::Sample(..) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).expect("it listens");
        stream.write_all(request.as_bytes()).expect("it reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("it answers");
        answer
    }

    #[test]
    fn a_silent_and_an_endless_request_do_not_block_others() {
        let exporter = Exporter::default();
        let address = exporter.listen(&"0".parse().expect("any port")).expect("a free port");
        assert!(address.ip().is_loopback());
        exporter.see(&TrainEvent::Checkpoint("out/checkpoint/step-12".as_ref()));
        exporter.see(&TrainEvent::Warning("warning: a"));
        exporter.see(&TrainEvent::Warning("warning: b"));
        // One client sends nothing, another one too much.
        let _silent = TcpStream::connect(address).expect("it listens");
        let mut long = TcpStream::connect(address).expect("it listens");
        // The exporter may close the connection before all is sent.
        let _ = long.write_all(&[b'x'; 4 * MAX_REQUEST]);
        let answer = asked(address, "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        assert!(head.starts_with("HTTP/1.1 200 OK") && head.contains("version=0.0.4"), "{head}");
        assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())), "{head}");
        for line in [
            "# TYPE sieve_checkpoint_step gauge",
            "sieve_checkpoint_step 12",
            "# TYPE sieve_warnings_total counter",
            "sieve_warnings_total 2",
        ] {
            assert!(body.lines().any(|found| found == line), "{line}: {body}");
        }
        assert!(asked(address, "GET / HTTP/1.0\r\n\r\n").starts_with("HTTP/1.1 404"));
        assert!(asked(address, "POST /metrics HTTP/1.0\r\n\r\n").starts_with("HTTP/1.1 405"));
        let taken = exporter.listen(&address.to_string().parse().expect("an address"));
        let error = format!("{:#}", taken.expect_err("it is taken"));
        assert!(error.contains(&address.to_string()) && error.contains("hint"), "{error}");
    }

    #[test]
    fn numbers_that_are_not_finite_have_their_own_words() {
        let mut numbers = Numbers::default();
        for (name, value) in [("a", f64::NAN), ("b", f64::INFINITY), ("c", f64::NEG_INFINITY), ("d", 1.5e-7)] {
            numbers.put(name, "help", value);
        }
        let text = numbers.text();
        let values = text.lines().filter(|line| !line.starts_with('#')).collect::<Vec<_>>();
        assert_eq!(values, ["sieve_a NaN", "sieve_b +Inf", "sieve_c -Inf", "sieve_d 0.00000015"]);
    }

    #[test]
    fn a_port_without_an_address_is_reached_from_this_machine_alone() {
        let parsed = |text: &str| text.parse::<MetricsPort>();
        assert_eq!(parsed("9100").expect("a port").0[0].to_string(), "127.0.0.1:9100");
        assert_eq!(parsed("0.0.0.0:9100").expect("an address").0[0].to_string(), "0.0.0.0:9100");
        for wrong in ["", "65536", "a", "a:b", "-1"] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }
}
