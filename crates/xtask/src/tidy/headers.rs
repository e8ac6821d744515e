//! Every kernel opens with the header a reader needs, and is on the list of what ships.
use crate::kernels::manifest::Manifest;
use crate::workspace;
use anyhow::Result;

/// Fields of the header, in order.
const FIELDS: &[&str] = &["Math", "Layout", "Defines", "Tiling", "Numerics", "Edges"];

/// Checks the kernels against their headers and the manifest.
pub(crate) fn check(problems: &mut Vec<String>) -> Result<()> {
    let manifest = Manifest::load()?;
    let folder = workspace::root().join("kernels");
    let mut names = Vec::new();
    for file in workspace::files()? {
        let Some(name) = file.strip_prefix("kernels/") else {
            continue;
        };
        if !name.ends_with(".cu") {
            continue;
        }
        names.push(name.to_owned());
        let text = workspace::read(&folder.join(name))?;
        let defines = manifest
            .kernels
            .iter()
            .filter(|k| k.file == name)
            .flat_map(|k| k.define_names());
        let referred = referred_headers(&text, |kernel| {
            std::fs::read_to_string(folder.join(format!("{kernel}.cu"))).ok()
        });
        check_header(name, &text, &referred, defines, problems);
        if !manifest.kernels.iter().any(|kernel| kernel.file == name) {
            problems.push(format!(
                "kernels/{name}: not in kernels/manifest.toml, so CI never compiles it"
            ));
        }
    }
    for kernel in &manifest.kernels {
        if !names.contains(&kernel.file) {
            problems.push(format!(
                "kernels/manifest.toml: {} does not exist",
                kernel.file
            ));
        }
    }
    Ok(())
}

fn check_header<'a>(
    name: &str,
    text: &str,
    referred: &str,
    defines: impl Iterator<Item = &'a str>,
    problems: &mut Vec<String>,
) {
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
        match header[next.min(header.len())..].iter().position(|line| {
            line.trim_start_matches("//")
                .trim_start()
                .starts_with(field)
        }) {
            Some(at) => next += at + 1,
            None => problems.push(format!(
                "kernels/{name}: the header has no field `{field}` (order: {})",
                FIELDS.join(", ")
            )),
        }
    }
    let header = header.join("\n") + referred;
    let mut missing: Vec<&str> = defines.filter(|define| !header.contains(*define)).collect();
    missing.sort();
    missing.dedup();
    for define in missing {
        problems.push(format!(
            "kernels/{name}: the manifest sets {define}, which the header does not name"
        ));
    }
}

/// The comment lines that a file opens with.
fn header_of(text: &str) -> Vec<&str> {
    text.lines()
        .take_while(|line| line.starts_with("//"))
        .collect()
}

/// Headers of the kernels that a header refers to as `as <kernel>`, directly or through another.
fn referred_headers(text: &str, read: impl Fn(&str) -> Option<String>) -> String {
    let mut headers = String::new();
    let mut seen = Vec::new();
    let mut open = vec![text.to_owned()];
    while let Some(text) = open.pop() {
        for line in header_of(&text) {
            for rest in line.split("as ").skip(1) {
                let name = rest
                    .split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
                    .next();
                let Some(name) =
                    name.filter(|name| name.contains('_') && !seen.contains(&name.to_string()))
                else {
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
        let count = |text: &str, define| {
            let mut problems = Vec::new();
            check_header("a.cu", text, "", [define].into_iter(), &mut problems);
            problems.len()
        };
        assert_eq!(count(good, "N"), 0);
        assert_eq!(count(good, "UNNAMED"), 1);
        assert_eq!(count(&good.replace("// Tiling 3\n", ""), "N"), 1);
        assert_eq!(count(&good.replace("// a: x", "// b: x"), "N"), 1);
        assert_eq!(count("code", "N"), 8);
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
