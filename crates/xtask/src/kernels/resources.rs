//! What a compiled kernel uses, from the output of `ptxas -v`.
use anyhow::{Context, Result};

/// The registers and memory that one function uses.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Resources {
    /// The function's name; a device function's name is mangled.
    pub(crate) name: String,
    /// Registers of a thread; 0 for a device function.
    pub(crate) registers: usize,
    /// Bytes of a thread's spill stores.
    pub(crate) spill_store_bytes: usize,
    /// Bytes of a thread's spill loads.
    pub(crate) spill_load_bytes: usize,
    /// Bytes of a thread's stack frame.
    pub(crate) stack_bytes: usize,
    /// Bytes of a block's static shared memory.
    pub(crate) shared_bytes: usize,
}

/// Reads the functions out of ptxas' messages.
pub(crate) fn parse(log: &str) -> Result<Vec<Resources>> {
    let mut functions: Vec<Resources> = Vec::new();
    for line in log.lines() {
        if let Some((_, name)) = line.split_once("Function properties for ") {
            functions.push(Resources { name: name.trim().to_owned(), ..Resources::default() });
            continue;
        }
        let Some(function) = functions.last_mut() else {
            continue; // Messages before the first function.
        };
        if line.contains("bytes stack frame") {
            function.stack_bytes = number_before(line, " bytes stack frame").context("stack frame")?;
            function.spill_store_bytes = number_before(line, " bytes spill stores").context("spill stores")?;
            function.spill_load_bytes = number_before(line, " bytes spill loads").context("spill loads")?;
        } else if line.contains(" registers") && line.contains("Used ") {
            function.registers = number_before(line, " registers").context("registers")?;
            function.shared_bytes = number_before(line, " bytes smem").unwrap_or(0);
        }
    }
    Ok(functions)
}

/// The compiler's warnings, about mistakes and about slow code.
pub(crate) fn warnings(log: &str) -> impl Iterator<Item = &str> {
    log.lines()
        .map(str::trim)
        .filter(|line| line.contains("warning") || line.contains("Potential Performance Loss"))
        // A remark explains how to turn warnings off.
        .filter(|line| !line.starts_with("Remark:"))
}

fn number_before(line: &str, label: &str) -> Option<usize> {
    let (before, _) = line.split_once(label)?;
    let digits = before.rsplit(|c: char| !c.is_ascii_digit()).next()?;
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'decode' for 'sm_90a'
ptxas info    : Function properties for decode
    16 bytes stack frame, 12 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 16 bytes cumulative stack size, 49152 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 26.337 ms
ptxas info    : Function properties for combine
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 31 registers, used 0 barriers, 384 bytes cmem[0]
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
";

    #[test]
    fn every_number_is_read() {
        let functions = parse(LOG).expect("ptxas' format");
        assert_eq!(functions.len(), 2);
        let decode = &functions[0];
        assert_eq!((decode.name.as_str(), decode.registers, decode.shared_bytes), ("decode", 168, 49152));
        assert_eq!((decode.stack_bytes, decode.spill_store_bytes, decode.spill_load_bytes), (16, 12, 24));
        assert_eq!(functions[1].registers, 31);
    }

    #[test]
    fn a_serialised_wgmma_is_a_warning() {
        assert_eq!(warnings(LOG).count(), 1);
    }
}
