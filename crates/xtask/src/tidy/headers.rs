//! Checks that every kernel opens with a complete header, and that it ships.
use crate::workspace;
use anyhow::Result;
use sieve_gpu::SourceKernel;

/// The fields of a kernel's header, in order.
const FIELDS: &[&str] = &["Math", "Layout", "Defines", "Tiling", "Numerics", "Edges"];

/// Checks the headers of all kernels.
pub(crate) fn check(problems: &mut Vec<String>) -> Result<()> {
    for (name, text) in kernels()? {
        check_header(&name, &text, problems);
    }
    Ok(())
}

/// A problem for each kernel that does not ship.
pub(crate) fn not_shipped(shipped: &[(SourceKernel, Vec<&str>)]) -> Result<Vec<String>> {
    let ships = |name: &str| shipped.iter().any(|(kernel, _)| name.strip_suffix(".cu") == Some(kernel.name()));
    let missing = kernels()?.into_iter().filter(|(name, _)| !ships(name));
    Ok(missing.map(|(name, _)| format!("kernels/{name}: does not ship, so CI never compiles it")).collect())
}

/// Names and texts of all kernels.
fn kernels() -> Result<Vec<(String, String)>> {
    let mut kernels = Vec::new();
    for file in workspace::files()? {
        let name = file.strip_prefix("kernels/");
        if let Some(name) = name.filter(|name| name.ends_with(".cu")) {
            kernels.push((name.to_owned(), workspace::read(&file)?));
        }
    }
    Ok(kernels)
}

/// Checks that a kernel's first line names it, and that its header has all fields in their order.
fn check_header(name: &str, text: &str, problems: &mut Vec<String>) {
    // The comment lines at the start of the file.
    let header: Vec<&str> = text.lines().take_while(|line| line.starts_with("//")).collect();
    let stem = name.trim_end_matches(".cu");
    if !header.first().is_some_and(|line| line.starts_with(&format!("// {stem}: "))) {
        problems.push(format!("kernels/{name}: the first line must be `// {stem}: what it computes`"));
    }
    let mut next = 0;
    for field in FIELDS {
        match header[next.min(header.len())..]
            .iter()
            .position(|line| line.trim_start_matches("//").trim_start().starts_with(field))
        {
            Some(at) => next += at + 1,
            None => problems
                .push(format!("kernels/{name}: the header has no field `{field}` (order: {})", FIELDS.join(", "))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_lacking_a_field_is_found() {
        let good = "// a: x\n// Math  1\n// Layout 2\n//   more\n// Defines N\n// Tiling 3\n// Numerics 4\n// Edges \
            5\ncode";
        let count = |text: &str| {
            let mut problems = Vec::new();
            check_header("a.cu", text, &mut problems);
            problems.len()
        };
        assert_eq!(count(good), 0);
        assert_eq!(count(&good.replace("// Tiling 3\n", "")), 1);
        assert_eq!(count(&good.replace("// a: x", "// b: x")), 1);
        assert_eq!(count("code"), 7);
    }
}
