//! Resources of a compiled kernel, parsed from the output of `ptxas -v`, which nvcc and NVRTC both print.

/// Registers, local memory and static shared memory of one entry point.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KernelResources {
    /// Registers per thread.
    pub registers: usize,
    /// Bytes that a thread spills to local memory.
    pub spill_store_bytes: usize,
    /// Spilled bytes that a thread loads again.
    pub spill_load_bytes: usize,
    /// Bytes of stack frame per thread.
    pub stack_bytes: usize,
    /// Bytes of a block's static shared memory; dynamic shared memory comes on top.
    pub static_shared_bytes: usize,
}

/// Parses the resources of the entry point `entry` from a compiler's log; `None` when the log does not name them.
pub(super) fn parse(log: &str, entry: &str) -> Option<KernelResources> {
    let mut found: Option<KernelResources> = None;
    let mut inside = false;
    for line in log.lines() {
        if let Some((_, name)) = line.split_once("Function properties for ") {
            inside = name.trim() == entry;
        } else if !inside {
            continue;
        } else if line.contains("bytes stack frame") {
            found = Some(KernelResources {
                stack_bytes: number_before(line, " bytes stack frame")?,
                spill_store_bytes: number_before(line, " bytes spill stores")?,
                spill_load_bytes: number_before(line, " bytes spill loads")?,
                ..KernelResources::default()
            });
        } else if line.contains("Used ") && line.contains(" registers") {
            let resources = found.get_or_insert_default();
            resources.registers = number_before(line, " registers")?;
            resources.static_shared_bytes = number_before(line, " bytes smem").unwrap_or(0);
            return found;
        }
    }
    None
}

fn number_before(line: &str, label: &str) -> Option<usize> {
    let (before, _) = line.split_once(label)?;
    before.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "ptxas info    : 0 bytes gmem
ptxas info    : Function properties for helper
    8 bytes stack frame, 1 bytes spill stores, 2 bytes spill loads
ptxas info    : Compiling entry function 'decode' for 'sm_90a'
ptxas info    : Function properties for decode
    16 bytes stack frame, 12 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 16 bytes cumulative stack size, 49152 bytes smem, 400 bytes cmem[0]
";

    #[test]
    fn the_entry_point_is_read_and_no_other_function() {
        let expected = KernelResources {
            registers: 168,
            spill_store_bytes: 12,
            spill_load_bytes: 24,
            stack_bytes: 16,
            static_shared_bytes: 49152,
        };
        assert_eq!(parse(LOG, "decode"), Some(expected));
        assert_eq!(parse(LOG, "other"), None);
    }

    #[test]
    fn a_kernel_without_static_shared_memory_has_none() {
        let log = "ptxas info    : Function properties for f
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 31 registers, used 0 barriers, 384 bytes cmem[0]
";
        let resources = parse(log, "f").expect("the usual lines");
        assert_eq!((resources.registers, resources.static_shared_bytes), (31, 0));
    }
}
