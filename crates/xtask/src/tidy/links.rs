//! Checks that links between pages lead somewhere, that docs/SUMMARY.md lists every page of docs/, and that the lines
//! of diffs on pages exist.
use crate::workspace;
use anyhow::Result;
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::path::{Component, Path};

/// The table of contents of the book.
const SUMMARY: &str = "docs/SUMMARY.md";
/// Endings of files whose text may name pages.
const NAMING: &[&str] = &[".md", ".rs", ".toml", ".cu", ".cuh"];

/// Checks the links, the named pages and the diffs in all files of the repository.
pub(crate) fn check(problems: &mut Vec<String>) -> Result<()> {
    let files = workspace::files()?;
    let pages = files.iter().filter(|file| file.ends_with(".md"));
    let known = files.iter().map(String::as_str).collect::<BTreeSet<_>>();
    let read = |file: &str| workspace::read(file).unwrap_or_default();
    for page in pages.clone() {
        let text = read(page);
        for link in links(&text) {
            if let Some(problem) = broken(page, link, &known, &read) {
                problems.push(format!("{page}: {problem}"));
            }
        }
        for (file, line) in shown_lines(&text) {
            if !read(file).lines().any(|found| found.trim() == line) {
                problems.push(format!("{page}: shows a line that is not in {file}: {line}"));
            }
        }
    }
    let is_naming = |file: &&String| NAMING.iter().any(|ending| file.ends_with(ending));
    for file in files.iter().filter(is_naming) {
        for name in named_pages(&read(file)) {
            if !known.contains(name.as_str()) {
                problems.push(format!("{file}: there is no {name}"));
            }
        }
    }
    let summary = read(SUMMARY);
    let listed = links(&summary).collect::<BTreeSet<_>>();
    for page in pages.filter_map(|page| page.strip_prefix("docs/")) {
        if page != "SUMMARY.md" && !listed.contains(page) {
            problems.push(format!("{SUMMARY}: does not list {page}"));
        }
    }
    Ok(())
}

/// The targets of Markdown links outside of code.
fn links(text: &str) -> impl Iterator<Item = &str> {
    let mut is_code = false;
    let lines = text.lines().filter(move |line| {
        let fence = line.trim_start().starts_with("```");
        is_code ^= fence;
        !fence && !is_code
    });
    lines.flat_map(|line| {
        let parts = line.split("](").skip(1);
        parts.filter_map(|rest| rest.split(')').next())
    })
}

/// The added lines of the diffs on a page, each after its file.
fn shown_lines(text: &str) -> Vec<(&str, &str)> {
    let blocks = text.split("```diff\n").skip(1).filter_map(|rest| rest.split("```").next());
    let mut shown = Vec::new();
    for block in blocks {
        let mut file = "";
        for line in block.lines().filter_map(|line| line.strip_prefix('+')) {
            match line.strip_prefix("++ b/") {
                Some(name) => file = name,
                None => shown.push((file, line.trim())),
            }
        }
    }
    shown
}

/// A message if a link on a page leads nowhere.
fn broken(page: &str, link: &str, known: &BTreeSet<&str>, read: &dyn Fn(&str) -> String) -> Option<String> {
    let is_elsewhere = ["http://", "https://", "mailto:"].iter().any(|start| link.starts_with(start));
    // Code such as `a[i](x)` looks like a link.
    let is_path = link.starts_with('#') || link.contains('.') || link.contains('/');
    if is_elsewhere || !is_path || link.contains(char::is_whitespace) {
        return None;
    }
    let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
    let folder = Path::new(page).parent().unwrap_or(Path::new(""));
    let target = match path {
        "" => page.to_owned(),
        path => without_parents(&folder.join(path)),
    };
    let is_folder = known.iter().any(|file| file.starts_with(&format!("{}/", target.trim_end_matches('/'))));
    if !known.contains(target.as_str()) && !is_folder {
        return Some(format!("the link {link} leads nowhere"));
    }
    let text = read(&target);
    let headings = text.lines().filter(|line| line.starts_with('#'));
    let mut slugs = headings.map(slug);
    (!anchor.is_empty() && !slugs.any(|found| found == anchor)).then(|| format!("{target} has no heading #{anchor}"))
}

/// A path in which each `..` has taken the folder before it, as files of the repository are named.
fn without_parents(path: &Path) -> String {
    let mut parts: Vec<Cow<str>> = Vec::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(parts.pop()),
            Component::CurDir => {}
            part => parts.push(part.as_os_str().to_string_lossy()),
        }
    }
    parts.join("/")
}

/// The anchor of a heading, as links name it.
fn slug(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = text.chars().filter(|letter| letter.is_alphanumeric() || " -_".contains(*letter));
    kept.map(|letter| if letter == ' ' { '-' } else { letter }).collect()
}

/// The pages of docs/, kernels/notes/, lab/docs/ and lab/notes/ that a text names by their paths.
fn named_pages(text: &str) -> Vec<String> {
    let names = ["kernels/notes/", "lab/docs/", "lab/notes/", "docs/"].into_iter().flat_map(|folder| {
        text.match_indices(folder).filter_map(move |(at, _)| {
            // The folder docs/ of the lab is a name of its own.
            if folder == "docs/" && text[..at].ends_with("lab/") {
                return None;
            }
            let rest = &text[at + folder.len()..];
            let end = rest.find(|letter: char| !(letter.is_ascii_alphanumeric() || "_-.".contains(letter)));
            let name = rest[..end.unwrap_or(rest.len())].trim_end_matches('.');
            name.ends_with(".md").then(|| format!("{folder}{name}"))
        })
    });
    names.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_diffs_have_their_files() {
        let text = "```diff\n+++ b/a.rs\n+    x;\n-y;\n```\nt\n```diff\n+++ b/b.rs\n+z\n```\n+no\n";
        assert_eq!(shown_lines(text), [("a.rs", "x;"), ("b.rs", "z")]);
    }
}
