//! `--metrics-port`: serves the numbers of a run in Prometheus' text format at `/metrics`.
use anyhow::{Context, Result};
use sieve_serve::serve_metrics;
use sieve_train::TrainEvent;
use std::fmt::Write as _;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

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
        let found = found.map_err(|error| format!("'{text}' is neither PORT nor HOST:PORT ({error})"))?;
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

/// Collects a run's numbers and serves them from a thread, where a slow client delays nobody.
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
            format!(
                "--metrics-port {port}: it cannot be listened on\n  hint: use a different port, or 0 for a free one"
            )
        })?;
        let address = listener.local_addr()?;
        let numbers = self.clone();
        serve_metrics(listener, move || numbers.lock().text()).context("serving the numbers of the run")?;
        Ok(address)
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
    use std::io::{Read, Write};
    use std::net::TcpStream;

    fn asked(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).expect("it listens");
        write!(stream, "{request}\r\nHost: a\r\nConnection: close\r\n\r\n").expect("it reads");
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
        let _ = long.write_all(&[b'x'; 1 << 20]);
        let answer = asked(address, "GET /metrics HTTP/1.1");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        assert!(head.starts_with("HTTP/1.1 200 OK") && head.contains("version=0.0.4"), "{head}");
        assert!(head.contains(&format!("content-length: {}\r\n", body.len())), "{head}");
        for line in [
            "# TYPE sieve_checkpoint_step gauge",
            "sieve_checkpoint_step 12",
            "# TYPE sieve_warnings_total counter",
            "sieve_warnings_total 2",
        ] {
            assert!(body.lines().any(|found| found == line), "{line}: {body}");
        }
        for (request, status) in [("GET /", 404), ("HEAD /metrics", 200), ("POST /metrics", 405)] {
            let answer = asked(address, &format!("{request} HTTP/1.1"));
            assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{request}: {answer}");
        }
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
