//! Text files named on the command line or in a recipe.
use crate::environment::variable;
use crate::terminal::{counted, thousands};
use anyhow::Result;
use clap::ValueEnum;
use sieve_core::recipe::{TokenizerSource, tokens_of_text};
use sieve_core::{Recipe, ShownPath};
use sieve_data::{Corpus, CorpusConfig, DataError, Document, DocumentTokens, TableAsText, Tokenizer, is_hub_tokenizer};
use std::path::Path;

/// Extensions that the line about skipped files names, at most.
const ENDINGS_NAMED: usize = 6;

/// Bytes of a text, about, that are read to judge it.
pub const BEGINNING_BYTES: usize = 1 << 20;

/// How the files hold documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FormatArg {
    /// One document a file
    Text,
    /// One JSON object a line
    Jsonl,
    /// Apache Parquet, one document a row
    Parquet,
}

/// Configures a corpus of files, folders and globs. Without a format, each file's extension decides.
pub fn config(paths: Vec<String>, format: Option<FormatArg>, text_column: &str) -> CorpusConfig {
    match format {
        None => CorpusConfig::by_ending(paths, text_column),
        Some(FormatArg::Text) => CorpusConfig::text(paths),
        Some(FormatArg::Jsonl) => CorpusConfig::jsonl(paths, text_column),
        Some(FormatArg::Parquet) => CorpusConfig::parquet(paths, text_column),
    }
}

/// The first documents of a text, up to about [`BEGINNING_BYTES`].
#[derive(Default)]
pub struct Beginning {
    /// Bytes of the documents; fewer than [`BEGINNING_BYTES`] if these are all documents of the text.
    pub num_bytes: usize,
    /// Tokens of the documents; 0 without a tokenizer.
    pub num_tokens: usize,
    /// The first document.
    pub first: Option<Document>,
}

impl Beginning {
    /// Reads the first documents of a corpus, as a run would.
    pub fn read(corpus: &Corpus, tokenizer: Option<&Tokenizer>) -> Result<Self> {
        let (mut beginning, mut documents) = (Self::default(), corpus.documents());
        while beginning.num_bytes < BEGINNING_BYTES
            && let Some(document) = documents.next().transpose()?
        {
            let text = &document.text[..document.text.ceil_char_boundary(BEGINNING_BYTES)];
            beginning.num_bytes += text.len() + document.prompt.as_ref().map_or(0, String::len);
            if let Some(tokenizer) = tokenizer {
                beginning.num_tokens += num_tokens(tokenizer, text, &document)?;
            }
            beginning.first.get_or_insert(document);
        }
        Ok(beginning)
    }

    /// Bytes of text a token.
    pub fn bytes_per_token(&self) -> f64 {
        self.num_bytes as f64 / self.num_tokens.max(1) as f64
    }

    /// Estimated tokens of a text of `num_bytes` that begins so.
    pub fn tokens_of(&self, num_bytes: u64) -> f64 {
        match self.num_tokens {
            0 => tokens_of_text(num_bytes),
            _ => num_bytes as f64 / self.bytes_per_token(),
        }
    }
}

/// Tokens of a document, of which `text` is the beginning: a run's, with those of its prompt or its template.
fn num_tokens(tokenizer: &Tokenizer, text: &str, document: &Document) -> Result<usize> {
    if document.prompt.is_none() && document.answers.is_none() {
        return Ok(tokenizer.encode(text)?.len());
    }
    let found = DocumentTokens::of(tokenizer, tokenizer.eos_id()?, document)?;
    Ok(found.parts.iter().map(Vec::len).sum())
}

/// The tokenizer of a recipe, if it is a file on this machine. One of the hub is not fetched.
pub fn local_tokenizer(recipe: &Recipe) -> Result<Option<Tokenizer>> {
    let TokenizerSource::Path(path) = recipe.tokenizer.source() else {
        return Ok(None);
    };
    let path = sieve_core::paths::expand(path, &variable)?;
    let is_local = !is_hub_tokenizer(&path);
    Ok(is_local.then(|| Tokenizer::from_file(Path::new(&path))).transpose()?)
}

/// Prints the message of [`table_as_text`] as a warning.
pub fn warn_of_json(corpus: &Corpus) {
    if let Some(words) = table_as_text(corpus) {
        crate::terminal::warning(&words);
    }
}

/// The first words of a text's first line that is not blank, at most `most` characters. `None` if there is no such
/// line, or the words hold a control character.
pub fn first_words(text: &str, most: usize) -> Option<String> {
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
pub fn passed_over(corpus: &Corpus) -> Option<String> {
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

/// A warning if a file read as plain text holds rows of a table.
pub fn table_as_text(corpus: &Corpus) -> Option<String> {
    let (path, table) = corpus.table_as_text()?;
    let path = path.shown();
    // What a document of the file is, and the Python that reads a line of it.
    let separated = |what: &str, reader: &str| {
        format!(
            "{path} {what}\n  hint: if each row is a document, write one a line: \
             python3 -c 'import csv, json, sys; csv.field_size_limit(1 << 30); [print(json.dumps(row)) for row in \
             {reader}]' < {path} > NEW.jsonl"
        )
    };
    Some(match table {
        TableAsText::Commas => {
            separated("is read as plain text, with its header and its commas", "csv.DictReader(sys.stdin)")
        }
        TableAsText::Tabs => separated(
            "is read as plain text, with its header and its tabs",
            "csv.DictReader(sys.stdin, delimiter=\"\\t\")",
        ),
        TableAsText::JsonLines => format!(
            "{path} is read as plain text, but its lines are JSON\n  \
             hint: if each line is a document, set data.format = \"jsonl\" in a recipe, --format jsonl of a command"
        ),
        TableAsText::JsonList => format!(
            "{path} is read as plain text, but it is a list of JSON\n  \
             hint: if each item is a document, write one a line: jq -c '.[]' {path} > NEW.jsonl"
        ),
    })
}

/// Prints the paths that match no file on this machine. Says nothing of paths on the hub, nor of paths with unset
/// variables.
pub fn remark_on_missing(key: &str, paths: &[String]) {
    for path in paths {
        let expanded = sieve_core::paths::expand(path, &variable);
        let corpus = expanded.map(|path| Corpus::open(config(vec![path], None, "text")));
        if let Ok(Err(DataError::NoFiles { searched, .. })) = corpus {
            crate::terminal::remark(&format!("note: {key}: {path:?} matches no file here{searched}"));
        }
    }
}
