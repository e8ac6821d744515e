//! The processes of the ranks that a launcher has started.
use std::fs;
use std::path::Path;
use std::process::Command;

/// More steps than anybody waits for.
pub(crate) const LONG: &str = "--set training.steps=1000000 --set checkpoint.interval=1000000";

/// The processes that a process has started.
fn children_of(id: u32) -> Vec<u32> {
    let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).expect("Linux");
    let children = children.split_whitespace();
    children.map(|id| id.parse().expect("a number")).collect()
}

/// The process of each rank that a launcher has started.
pub(crate) fn ranks_of(launcher: u32) -> Vec<u32> {
    // One that has just ended has no environment any more.
    let mut found = children_of(launcher)
        .into_iter()
        .filter_map(|id| {
            let environment = fs::read(format!("/proc/{id}/environ")).ok()?;
            let environment = String::from_utf8_lossy(&environment).into_owned();
            let mut variables = environment.split('\0');
            let rank = variables.find_map(|variable| variable.strip_prefix("RANK="))?;
            Some((rank.parse().ok()?, id))
        })
        .collect::<Vec<(usize, u32)>>();
    found.sort_unstable();
    found.into_iter().map(|(_, id)| id).collect()
}

pub(crate) fn is_there(id: u32) -> bool {
    // One that has ended and was not asked for is there with no command line.
    let line = fs::read(Path::new("/proc").join(id.to_string()).join("cmdline"));
    line.is_ok_and(|line| !line.is_empty())
}

pub(crate) fn send(signal: &str, id: u32) {
    let sent = Command::new("kill").args(["-s", signal, &id.to_string()]).status();
    assert!(sent.expect("kill starts").success());
}
