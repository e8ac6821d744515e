//! Lines about ops that ran as their reference instead of a kernel.
use crate::terminal;
use anyhow::Result;

/// A line for each op that ran as the reference instead of a kernel.
pub fn reference_lines() -> Vec<String> {
    let paths = sieve_ops::op_paths();
    let slow = paths.iter().filter(|(_, path)| path.reference_calls > 0);
    slow.map(|((place, op), path)| {
        let reason = path.reason.as_deref().unwrap_or("no reason given");
        format!("kernels: {op} ran without its kernel on {place}, {} times: {reason}", path.reference_calls)
    })
    .collect()
}

/// Prints [`reference_lines`] after a command, whether it failed or not, and returns its result.
pub fn with_reference_lines<T>(result: Result<T>) -> Result<T> {
    for line in reference_lines() {
        terminal::note(&line);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{DType, Tensor};
    use burn_flex::{Flex, FlexDevice};

    #[test]
    fn a_reference_is_named_with_place_and_reason() {
        let x = Tensor::<Flex, 2>::zeros([2, 4], (&FlexDevice, DType::F64));
        let weight = Tensor::<Flex, 1>::zeros([4], (&FlexDevice, DType::F64));
        let _y = sieve_ops::rms_norm(x, weight, 1e-6);
        let lines = reference_lines();
        let line = lines.iter().find(|line| line.contains("rms_norm"));
        let line = line.expect("counted");
        assert!(line.contains("on the CPU, 1 times: "), "{line}");
        assert!(line.contains("f32"), "{line}");
    }
}
