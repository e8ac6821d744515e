//! `cargo xtask book`: builds docs/ as HTML pages in target/book, where each path of a page becomes a link to it.
use crate::workspace;
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Copies docs/ to target/book-pages, where paths of pages become links, and builds the book from there with mdbook.
pub(crate) fn run() -> Result<()> {
    let root = workspace::root();
    let (docs, pages) = (root.join("docs"), root.join("target/book-pages"));
    if pages.exists() {
        fs::remove_dir_all(&pages).context("removing the old pages")?;
    }
    fs::create_dir_all(&pages).context("making target/book-pages")?;
    let summary = read(&docs.join("SUMMARY.md"))?;
    let titles = titles(&summary);
    for entry in fs::read_dir(&docs).context("reading docs/")? {
        let from = entry?.path();
        let Some(name) = from.file_name() else {
            continue;
        };
        let to = pages.join(name);
        if from.extension().is_some_and(|ending| ending == "md") {
            fs::write(&to, linked(&read(&from)?, &titles))?
        } else {
            fs::copy(&from, &to).map(|_| ())?
        }
    }
    workspace::run("mdbook", &["build"]).context("hint: cargo install mdbook --locked")
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))
}

/// The title of each page in SUMMARY.md, by the page's file.
fn titles(summary: &str) -> BTreeMap<&str, &str> {
    let entries = summary.lines().filter_map(|line| {
        let (title, file) = line.split_once("](")?;
        Some((file.trim_end_matches(')'), title.split_once('[')?.1))
    });
    entries.collect()
}

/// `text` with each path of a page outside of code replaced by a link. Code is fenced, or four columns to the right.
fn linked(text: &str, titles: &BTreeMap<&str, &str>) -> String {
    let mut is_block = false;
    let lines = text.lines().map(|line| {
        let fence = line.trim_start().starts_with("```");
        is_block ^= fence;
        if fence || is_block || line.starts_with("    ") {
            return line.to_owned();
        }
        // Every second part lies between backticks, where nothing is replaced.
        let parts = line.split('`').enumerate().map(|(index, part)| match index % 2 {
            0 => with_links(part, titles),
            _ => part.to_owned(),
        });
        parts.collect::<Vec<_>>().join("`")
    });
    lines.collect::<Vec<_>>().join("\n") + "\n"
}

/// `text` without code with each path of a page replaced by a link.
fn with_links(text: &str, titles: &BTreeMap<&str, &str>) -> String {
    // Pages of lab/docs/, some of which have the names of pages here, are not in the book.
    let parts = text.split("lab/docs/").map(|part| {
        titles.iter().fold(part.to_owned(), |part, (file, title)| {
            part.replace(&format!("docs/{file}"), &format!("[{title}]({file})"))
        })
    });
    parts.collect::<Vec<_>>().join("lab/docs/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_pages_become_links_outside_of_code() {
        let titles = titles("# Summary\n\n- [Runs](runs.md)\n  - [Every key](recipe.md)\n- [Serving](serving.md)\n");
        assert_eq!(titles.len(), 3);
        let code = "`docs/runs.md`, and docs/other.\n```\ndocs/runs.md\n```\n\n    cat docs/runs.md\n";
        assert_eq!(
            linked(&format!("See docs/recipe.md, {code}"), &titles),
            format!("See [Every key](recipe.md), {code}")
        );
        let elsewhere = "[What was measured](../lab/docs/serving.md)\n";
        assert_eq!(linked(elsewhere, &titles), elsewhere);
    }
}
