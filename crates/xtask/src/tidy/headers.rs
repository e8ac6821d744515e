//! Every kernel opens with the header a reader needs, ships, and names its defines there.
use crate::kernels::shipped::Shipped;
use crate::workspace;
use anyhow::Result;

/// Fields of the header, in order.
const FIELDS: &[&str] = &["Math", "Layout", "Defines", "Tiling", "Numerics", "Edges"];

/// Checks that every kernel's header has its fields.
pub(crate) fn check(problems: &mut Vec<String>) -> Result<()> {
    for (name, text) in kernels()? {
        check_header(&name, &text, problems);
    }
    Ok(())
}

/// Kernels that do not ship, and defines that the header of a kernel does not name.
pub(crate) fn unnamed_defines(shipped: &Shipped) -> Result<Vec<String>> {
    let kernels = kernels()?;
    let read = |kernel: &str| {
        let file = format!("{kernel}.cu");
        let found = kernels.iter().find(|(name, _)| *name == file);
        found.map(|(_, text)| text.clone())
    };
    let mut problems = Vec::new();
    for (name, text) in &kernels {
        let forms = shipped.specialisations.iter().filter(|s| s.file == *name);
        let mut defines: Vec<&str> = forms
            .clone()
            .flat_map(|s| s.defines.keys())
            .map(String::as_str)
            .collect();
        defines.sort_unstable();
        defines.dedup();
        if forms.count() == 0 {
            problems.push(format!("kernels/{name}: does not ship, so CI never compiles it"));
        }
        for define in missing(text, &referred_headers(text, read), &defines) {
            problems.push(format!(
                "kernels/{name}: a shipped form sets {define}, which the header does not name"
            ));
        }
    }
    Ok(problems)
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

/// The defines that neither a header nor those that it refers to name.
fn missing<'a>(text: &str, referred: &str, defines: &[&'a str]) -> Vec<&'a str> {
    let header = header_of(text).join("\n") + referred;
    let unnamed = defines.iter().filter(|define| !header.contains(**define));
    unnamed.copied().collect()
}

fn check_header(name: &str, text: &str, problems: &mut Vec<String>) {
    let header = header_of(text);
    let stem = name.trim_end_matches(".cu");
    if !header
        .first()
        .is_some_and(|line| line.starts_with(&format!("// {stem}: ")))
    {
        problems.push(format!(
            "kernels/{name}: the first line must be `// {stem}: what it computes`"
        ));
    }
    let mut next = 0;
    for field in FIELDS {
        match header[next.min(header.len())..]
            .iter()
            .position(|line| line.trim_start_matches("//").trim_start().starts_with(field))
        {
            Some(at) => next += at + 1,
            None => problems.push(format!(
                "kernels/{name}: the header has no field `{field}` (order: {})",
                FIELDS.join(", ")
            )),
        }
    }
}

/// The comment lines that a file opens with.
fn header_of(text: &str) -> Vec<&str> {
    text.lines().take_while(|line| line.starts_with("//")).collect()
}

/// Headers of the kernels that a header refers to as `as <kernel>`, directly or through another.
fn referred_headers(text: &str, read: impl Fn(&str) -> Option<String>) -> String {
    let mut headers = String::new();
    let mut seen = Vec::new();
    let mut open = vec![text.to_owned()];
    while let Some(text) = open.pop() {
        for line in header_of(&text) {
            for rest in line.split("as ").skip(1) {
                let name = rest.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next();
                let Some(name) = name.filter(|name| name.contains('_') && !seen.contains(&name.to_string())) else {
                    continue;
                };
                seen.push(name.to_owned());
                if let Some(other) = read(name) {
                    headers.push_str(&header_of(&other).join("\n"));
                    open.push(other);
                }
            }
        }
    }
    headers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_lacking_a_field_or_a_define_is_found() {
        let good = "// a: x\n// Math  1\n// Layout 2\n//   more\n// Defines N\n// Tiling 3\n// Numerics 4\n// Edges \
            5\ncode";
        let count = |text: &str| {
            let mut problems = Vec::new();
            check_header("a.cu", text, &mut problems);
            problems.len()
        };
        assert_eq!(count(good), 0);
        assert_eq!(missing(good, "", &["N", "UNNAMED"]), ["UNNAMED"]);
        assert_eq!(missing(good, "// Defines UNNAMED", &["N", "UNNAMED"]), [""; 0]);
        assert_eq!(count(&good.replace("// Tiling 3\n", "")), 1);
        assert_eq!(count(&good.replace("// a: x", "// b: x")), 1);
        assert_eq!(count("code"), 7);
    }

    #[test]
    fn a_header_may_refer_to_another() {
        let read = |name: &str| match name {
            "a_forward" => Some("// Defines as a_base\ncode ALSO_NOT".to_owned()),
            "a_base" => Some("// Defines WIDTH, as a_forward\n".to_owned()),
            _ => None,
        };
        let referred = referred_headers("// Defines as a_forward; as shown\n", read);
        assert!(
            referred.contains("WIDTH") && !referred.contains("ALSO_NOT"),
            "{referred}"
        );
    }
}
