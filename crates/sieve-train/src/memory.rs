//! Memory of this process and this machine, where the system tells.
use crate::PeakMemory;

/// `(resident, total)` in bytes; zero where unknown.
pub(crate) fn process_memory() -> (u64, u64) {
    (
        field("/proc/self/status", "VmRSS:"),
        field("/proc/meminfo", "MemTotal:"),
    )
}

/// The most resident memory so far.
pub(crate) fn process_peak() -> Option<PeakMemory> {
    let bytes = field("/proc/self/status", "VmHWM:");
    (bytes > 0).then_some(PeakMemory {
        in_use_bytes: bytes,
        reserved_bytes: bytes,
    })
}

/// A field of the form `NAME   123 kB`.
fn field(file: &str, name: &str) -> u64 {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}
