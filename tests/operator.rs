//! What an operator uses to watch a run: `--metrics-port`, whose numbers Prometheus reads, and `--on-event`, a command
//! that runs when the run ends.
use crate::tiny_run::{TinyRun, ended, refused, signal, succeed, wait_until};
use crate::train_ranks::started;
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;

/// Settings of a run so long that the test stops it.
const LONG: &str = "--set training.steps=1000000 --set checkpoint.interval=1000000";

/// An `--on-event` command that appends the event to a file.
const KEEP: &str = "echo \"$SIEVE_EVENT $SIEVE_OUT $SIEVE_MESSAGE\" >> events";

fn telling(mut command: Command) -> Command {
    command.args(["--on-event", KEEP]);
    command
}

fn events(tiny: &TinyRun) -> Vec<String> {
    let text = fs::read_to_string(tiny.path("events")).unwrap_or_default();
    _ = fs::remove_file(tiny.path("events"));
    text.lines().map(str::to_owned).collect()
}

#[test]
fn a_run_gives_its_numbers_and_tells_its_end() {
    let tiny = TinyRun::dma();
    // A port that is in use is refused before the run begins.
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let taken = format!("--metrics-port {}", listener.local_addr().expect("its address"));
    refused(&mut tiny.train("none", &taken), "--metrics-port | it cannot be listened on");
    assert_eq!(tiny.names("none"), ["data", "run.lock"]);
    let port = format!("{LONG} --set validation.interval=1000000 --metrics-port 0");
    // With two ranks only rank 0 answers.
    for (out, command) in [("one", tiny.train("one", &port)), ("two", tiny.launch(2, "two", &port))] {
        let child = started(&mut telling(command), 3);
        let log = tiny.read(&format!("{out}/log"));
        let address = log.split("metrics: http://").nth(1).and_then(|rest| rest.split("/metrics").next());
        let asked = || {
            let mut stream = TcpStream::connect(address.expect(&log)).expect("it listens");
            stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").expect("it reads");
            let mut answer = String::new();
            stream.read_to_string(&mut answer).expect("it answers");
            answer
        };
        let number = |name: &str| {
            let answer = asked();
            let value = answer.lines().find_map(|line| line.strip_prefix(&format!("sieve_{name} ")));
            value.and_then(|value| value.parse::<f64>().ok())
        };
        wait_until("steps are counted", || number("steps_total").is_some_and(|steps| steps > 5.0));
        assert_eq!(number("planned_steps"), Some(1e6));
        assert!(number("loss_nats").is_some_and(|loss| loss > 0.0 && loss < 10.0));
        assert_eq!(number("checkpoint_step"), None, "none was written");
        signal(&child, "TERM");
        ended(child, 75);
        assert_eq!(events(&tiny), [format!("stopped {out} ")]);
    }
    succeed(&mut telling(tiny.train("short", "--set training.steps=4")));
    assert_eq!(events(&tiny), ["finished short "]);
    let wrong = telling(tiny.train("wrong", "--set training.steps=4 --set data.paths=['none/*.txt']")).output();
    assert_eq!(wrong.expect("it starts").status.code(), Some(1));
    let told = events(&tiny);
    assert!(told[0].starts_with("failed wrong error: "), "{told:?}");
}
