//! Resources of a compiled kernel, parsed from the output of `ptxas -v`, which NVRTC prints.

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

/// A function of a compiled kernel: its entry point, or a function that was not inlined.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NamedResources {
    /// The function's name; mangled, unless it is the entry point.
    pub name: String,
    /// What it uses. Registers and static shared memory are 0 for a function that is no entry point.
    pub resources: KernelResources,
}

impl NamedResources {
    /// All functions that a compiler's log names, in its order; `None` where a number cannot be read.
    pub fn of_log(log: &str) -> Option<Vec<Self>> {
        let mut functions: Vec<Self> = Vec::new();
        for line in log.lines() {
            if let Some((_, name)) = line.split_once("Function properties for ") {
                functions.push(Self { name: name.trim().to_owned(), ..Self::default() });
                continue;
            }
            let Some(Self { resources, .. }) = functions.last_mut() else {
                continue; // Messages before the first function.
            };
            if line.contains("bytes stack frame") {
                resources.stack_bytes = number_before(line, " bytes stack frame")?;
                resources.spill_store_bytes = number_before(line, " bytes spill stores")?;
                resources.spill_load_bytes = number_before(line, " bytes spill loads")?;
            } else if line.contains("Used ") && line.contains(" registers") {
                resources.registers = number_before(line, " registers")?;
                resources.static_shared_bytes = number_before(line, " bytes smem").unwrap_or(0);
            }
        }
        Some(functions)
    }
}

/// The resources of the entry point `entry`; `None` when the log does not name them.
pub(super) fn of_entry(log: &str, entry: &str) -> Option<KernelResources> {
    let functions = NamedResources::of_log(log)?.into_iter();
    functions.map(|function| (function.name, function.resources)).find(|(name, _)| name == entry).map(|(_, used)| used)
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
    fn every_function_is_read_and_the_entry_point_is_found() {
        let expected = KernelResources {
            registers: 168,
            spill_store_bytes: 12,
            spill_load_bytes: 24,
            stack_bytes: 16,
            static_shared_bytes: 49152,
        };
        assert_eq!(of_entry(LOG, "decode"), Some(expected));
        assert_eq!(of_entry(LOG, "other"), None);
        let all = NamedResources::of_log(LOG).expect("the usual lines");
        let helper =
            KernelResources { stack_bytes: 8, spill_store_bytes: 1, spill_load_bytes: 2, ..Default::default() };
        assert_eq!(
            all,
            [("helper", helper), ("decode", expected)]
                .map(|(name, resources)| NamedResources { name: name.to_owned(), resources })
        );
        assert_eq!(NamedResources::of_log(&LOG.replace("12 bytes spill", "many bytes spill")), None);
    }

    #[test]
    fn a_kernel_without_static_shared_memory_has_none() {
        let log = "ptxas info    : Function properties for f
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 31 registers, used 0 barriers, 384 bytes cmem[0]
";
        let resources = of_entry(log, "f").expect("the usual lines");
        assert_eq!((resources.registers, resources.static_shared_bytes), (31, 0));
    }
}
