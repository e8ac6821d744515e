//! Memory of this process and this machine, where the system reports it.
use sieve_ops::MemoryPeak;
use std::path::Path;

/// Resident memory of this process and total memory of the machine, in bytes; zero where unknown.
pub(crate) fn process_memory() -> (u64, u64) {
    (field("/proc/self/status", "VmRSS:"), field("/proc/meminfo", "MemTotal:"))
}

/// Peak resident memory of this process.
pub(crate) fn process_peak() -> Option<MemoryPeak> {
    let bytes = field("/proc/self/status", "VmHWM:");
    (bytes > 0).then_some(MemoryPeak { in_use_bytes: bytes, reserved_bytes: bytes })
}

/// Bytes of memory that this process can hold at most, including the bytes that it holds now. The machine's free
/// memory, the limits of memory cgroups and the limit of address space (`ulimit -v`) bound it; zero if the system
/// reports none.
pub(crate) fn process_available() -> u64 {
    let own = field("/proc/self/status", "RssAnon:");
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let machine = Some(field("/proc/meminfo", "MemAvailable:")).filter(|&bytes| bytes > 0);
    let in_groups = cgroup_room(&groups, Path::new("/sys/fs/cgroup"));
    let addresses = address_space(&limits).map(|limit| limit.saturating_sub(field("/proc/self/status", "VmSize:")));
    let left = [machine, in_groups, addresses].into_iter().flatten().min();
    // Each bound counts what is left beside the bytes that this process holds already.
    left.map_or(0, |left| left + own)
}

/// Bytes left in the memory cgroups of a process and in their parents; `None` if no group has a limit. `groups` is the
/// text of `/proc/self/cgroup`, and the cgroup hierarchies are mounted below `root`.
fn cgroup_room(groups: &str, root: &Path) -> Option<u64> {
    let rooms = groups.lines().filter_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let has_memory = controllers.split(',').any(|name| name == "memory");
        // Version 2 of cgroups has one hierarchy, whose line names no controller; version 1 has one for memory.
        let (folder, names) = match controllers {
            "" => (root.to_owned(), UNIFIED),
            _ if has_memory => (root.join("memory"), LEGACY),
            _ => return None,
        };
        // In a container the path may be the host's and not exist here: its parents up to the root are read too.
        let path = folder.join(path.trim_start_matches('/'));
        let around = path.ancestors().take_while(|group| group.starts_with(&folder));
        around.filter_map(|group| group_room(group, names)).min()
    });
    rooms.min()
}

/// Files of a memory cgroup with its limit and usage, and the field of `memory.stat` with the cached file pages that
/// the kernel can drop.
#[derive(Clone, Copy)]
struct GroupFiles {
    limit: &'static str,
    usage: &'static str,
    droppable: &'static str,
}

const UNIFIED: GroupFiles = GroupFiles { limit: "memory.max", usage: "memory.current", droppable: "inactive_file" };
const LEGACY: GroupFiles =
    GroupFiles { limit: "memory.limit_in_bytes", usage: "memory.usage_in_bytes", droppable: "total_inactive_file" };

/// Bytes left in one cgroup: its limit, minus its usage without the file pages that the kernel can drop. `None` without
/// a limit.
fn group_room(group: &Path, names: GroupFiles) -> Option<u64> {
    let number = |name: &str| {
        let text = std::fs::read_to_string(group.join(name)).ok()?;
        text.trim().parse::<u64>().ok()
    };
    // Without a limit the file holds "max".
    let limit = number(names.limit)?;
    let usage = number(names.usage)?;
    let stat = std::fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let droppable = stat.lines().find_map(|line| {
        let (name, bytes) = line.split_once(' ')?;
        (name == names.droppable).then(|| bytes.parse::<u64>().ok())?
    });
    Some((limit + droppable.unwrap_or(0)).saturating_sub(usage))
}

/// The soft limit of address space in the text of `/proc/self/limits`; `None` if it is unlimited.
fn address_space(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Bytes of a field with the form `NAME   123 kB`; zero if it is missing.
fn field(file: &str, name: &str) -> u64 {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn write(folder: &Path, files: &[(&str, &str)]) {
        fs::create_dir_all(folder).expect("a folder");
        for (name, text) in files {
            fs::write(folder.join(name), text).expect("a file");
        }
    }

    #[test]
    fn the_cgroup_with_the_least_room_counts() {
        let dir = tempfile::tempdir().expect("a folder");
        let root = dir.path();
        write(
            &root.join("jobs"),
            &[
                ("memory.max", "1000\n"),
                ("memory.current", "700\n"),
                ("memory.stat", "anon 500\nfile 200\ninactive_file 150\n"),
            ],
        );
        write(&root.join("jobs/mine"), &[("memory.max", "max\n"), ("memory.current", "600\n")]);
        // 300 bytes are free, and 150 bytes of file pages can be dropped.
        assert_eq!(cgroup_room("0::/jobs/mine\n", root), Some(450));
        assert_eq!(cgroup_room("0::/others\n", root), None);
        // In a container, the files of its group are at the root, but the path is the host's.
        write(root, &[("memory.max", "500\n"), ("memory.current", "100\n")]);
        assert_eq!(cgroup_room("0::/of/the/host\n", root), Some(400));
    }

    #[test]
    fn version_1_of_cgroups_has_a_hierarchy_for_memory() {
        let dir = tempfile::tempdir().expect("a folder");
        let root = dir.path();
        write(
            &root.join("memory/job"),
            &[
                ("memory.limit_in_bytes", "4096\n"),
                ("memory.usage_in_bytes", "5000\n"),
                ("memory.stat", "inactive_file 1\ntotal_inactive_file 2000\n"),
            ],
        );
        let groups = "5:devices:/\n4:memory:/job\n1:name=systemd:/\n";
        // 5000 bytes are used, of which 2000 of file pages can be dropped.
        assert_eq!(cgroup_room(groups, root), Some(1096));
    }

    #[test]
    fn a_limit_of_address_space_is_read() {
        let header = "Limit                     Soft Limit           Hard Limit           Units     \n";
        let line =
            |soft: &str| format!("{header}Max address space         {soft:<20} unlimited            bytes     \n");
        assert_eq!(address_space(&line("8192000000")), Some(8_192_000_000));
        assert_eq!(address_space(&line("unlimited")), None);
    }

    #[test]
    fn this_process_has_memory_left() {
        let (resident, total) = process_memory();
        let available = process_available();
        assert!(available > resident && available <= total, "{available}");
    }
}
