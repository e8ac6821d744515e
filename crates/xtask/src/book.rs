//! docs/ as pages to read in a browser, in target/book: where a page names another by its path, the book has a link.
use crate::workspace;
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Copies the pages with their links to target/book-pages, and has mdbook make the book of them.
pub(crate) fn run() -> Result<()> {
    let root = workspace::root();
    let (docs, pages) = (root.join("docs"), root.join("target/book-pages"));
    if pages.exists() {
        fs::remove_dir_all(&pages).context("removing the pages of before")?;
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
        match from.extension().is_some_and(|ending| ending == "md") {
            true => fs::write(&to, linked(&read(&from)?, &titles))?,
            false => fs::copy(&from, &to).map(|_| ())?,
        }
    }
    workspace::run("mdbook", &["build"]).context("hint: cargo install mdbook --locked")
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))
}

/// The titles that SUMMARY.md gives to the pages, by the pages' files.
fn titles(summary: &str) -> BTreeMap<&str, &str> {
    let entries = summary.lines().filter_map(|line| {
        let (title, file) = line.split_once("](")?;
        Some((file.trim_end_matches(')'), title.split_once('[')?.1))
    });
    entries.collect()
}

/// `text` with a link for each page that it names by its path outside of code.
fn linked(text: &str, titles: &BTreeMap<&str, &str>) -> String {
    let mut is_block = false;
    let lines = text.lines().map(|line| {
        let fence = line.trim_start().starts_with("```");
        is_block ^= fence;
        if fence || is_block {
            return line.to_owned();
        }
        let mut is_code = false;
        let parts = line.split('`').map(|part| {
            let own = match is_code {
                true => part.to_owned(),
                false => with_links(part, titles),
            };
            is_code = !is_code;
            own
        });
        parts.collect::<Vec<_>>().join("`")
    });
    lines.collect::<Vec<_>>().join("\n") + "\n"
}

fn with_links(text: &str, titles: &BTreeMap<&str, &str>) -> String {
    let mut found = text.to_owned();
    for (file, title) in titles {
        found = found.replace(&format!("docs/{file}"), &format!("[{title}]({file})"));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_pages_become_links_outside_of_code() {
        let titles = titles("# Summary\n\n- [Runs](runs.md)\n  - [Every key](recipe.md)\n");
        assert_eq!(titles.len(), 2);
        let code = "`docs/runs.md`, and docs/other.\n```\ndocs/runs.md\n```\n";
        assert_eq!(
            linked(&format!("See docs/recipe.md, {code}"), &titles),
            format!("See [Every key](recipe.md), {code}")
        );
    }
}
