//! Text files named on the command line or in a recipe.
use crate::terminal::{counted, thousands};
use clap::ValueEnum;
use sieve_data::{Corpus, CorpusConfig, DataError, JsonText};

/// Extensions that the line about skipped files names, at most.
const ENDINGS_NAMED: usize = 6;

/// How the files hold documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FormatArg {
    /// One document a file
    Text,
    /// One JSON object a line
    Jsonl,
    /// Apache Parquet, one document a row
    Parquet,
}

/// Configures a corpus of files, folders and globs. Without a format, each file's extension decides.
pub(crate) fn config(paths: Vec<String>, format: Option<FormatArg>, text_column: &str) -> CorpusConfig {
    match format {
        None => CorpusConfig::by_ending(paths, text_column),
        Some(FormatArg::Text) => CorpusConfig::text(paths),
        Some(FormatArg::Jsonl) => CorpusConfig::jsonl(paths, text_column),
        Some(FormatArg::Parquet) => CorpusConfig::parquet(paths, text_column),
    }
}

/// Prints the message of [`json_as_text`] as a warning.
pub(crate) fn warn_of_json(corpus: &Corpus) {
    if let Some(words) = json_as_text(corpus) {
        crate::terminal::warning(&words);
    }
}

/// The first words of a text's first line that is not blank, at most `most` characters. `None` if there is no such
/// line, or the words hold a control character.
pub(crate) fn beginning(text: &str, most: usize) -> Option<String> {
    let line = text.lines().map(str::trim).find(|line| !line.is_empty())?;
    let short = line.chars().take(most).collect::<String>();
    let is_whole = short.len() == line.len();
    let words = match short.rsplit_once(char::is_whitespace) {
        Some((words, _)) if !is_whole => words.trim_end(),
        _ => &short,
    };
    // The words are printed as a prompt: a control character could confuse a terminal or a shell.
    let plain = words.chars().all(|letter| !letter.is_control());
    plain.then(|| words.to_owned())
}

/// A line about files of the folders that were skipped because they are not text.
pub(crate) fn passed_over(corpus: &Corpus) -> Option<String> {
    let mut endings = corpus.passed_over().iter().collect::<Vec<_>>();
    endings.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    let total = endings.iter().map(|(_, count)| **count).sum::<usize>();
    let names = endings.iter().take(ENDINGS_NAMED).map(|(ending, _)| match ending.as_str() {
        "" => "no ending".to_owned(),
        ending => format!(".{ending}"),
    });
    let mut names = names.collect::<Vec<_>>();
    if endings.len() > ENDINGS_NAMED {
        names.push("…".to_owned());
    }
    let num_read = counted(corpus.files().len() as u64, "file");
    let words = || {
        let passed = thousands(total as u64);
        format!("{num_read} read, {passed} skipped: {}", names.join(", "))
    };
    (total > 0).then(words)
}

/// A warning if a file read as plain text holds JSON.
pub(crate) fn json_as_text(corpus: &Corpus) -> Option<String> {
    let (path, json) = corpus.json_as_text()?;
    let path = path.display();
    Some(match json {
        JsonText::Lines => format!(
            "{path} is read as plain text, and its lines are JSON\n  \
             hint: if each line is a document, say so: data.format = \"jsonl\" in a recipe, --format jsonl of a command"
        ),
        JsonText::List => format!(
            "{path} is read as plain text, and it is a list of JSON\n  \
             hint: if each item is a document, write one a line: jq -c '.[]' {path} > NEW.jsonl"
        ),
    })
}

/// Prints the paths that match no file on this machine. Says nothing of paths on the hub, nor of paths with unset
/// variables.
pub(crate) fn remark_on_missing(key: &str, paths: &[String]) {
    for path in paths {
        let expanded = sieve_core::paths::expand(path, &crate::train::variable);
        let corpus = expanded.map(|path| Corpus::open(config(vec![path], None, "text")));
        if let Ok(Err(DataError::NoFiles { .. })) = corpus {
            crate::terminal::remark(&format!("note: {key}: {path:?} matches no file here"));
        }
    }
}
