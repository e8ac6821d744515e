//! Documents to evaluate on, from text files or from prepared shards.
use crate::InferError;
use crate::words::{WordUse, word_uses};
use sieve_core::ShownPath;
use sieve_data::{DataError, Document, Prepared, Tokenizer};

/// A document as token ids, with its size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvalDocument {
    /// Token ids, with the end-of-document token last.
    pub tokens: Vec<u32>,
    /// Bytes of UTF-8 text of the predicted tokens: all but the first.
    pub num_bytes: u64,
    /// Words of the text, separated by white space.
    pub num_words: u64,
    /// For each token, whether it belongs to a word, and how far back that word was last used.
    pub word_uses: Vec<WordUse>,
    /// Size of the text without the end-of-document token.
    pub text: TextSize,
}

/// A text without the end-of-document token, in the units of lm-evaluation-harness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextSize {
    /// Number of tokens of the text.
    pub num_tokens: usize,
    /// Length of the text in bytes of UTF-8.
    pub num_bytes: u64,
    /// `len(re.split(r"\s+", text))` of Python: the words, and an empty string for white space at either end.
    pub num_words: u64,
}

impl TextSize {
    fn new(num_tokens: usize, num_bytes: u64, text: &str) -> Self {
        // Python counts four control characters as white space that Unicode does not.
        let is_space = |c: char| c.is_whitespace() || ('\x1c'..='\x1f').contains(&c);
        let words = text.split(is_space).filter(|word| !word.is_empty()).count();
        let ends = [text.starts_with(is_space), text.ends_with(is_space)];
        let num_words = match words {
            // Python splits "" into one empty string, and " " into two.
            0 => 1 + usize::from(ends[0]),
            words => words + ends.into_iter().filter(|is_space| *is_space).count(),
        };
        Self { num_tokens, num_bytes, num_words: num_words as u64 }
    }
}

/// The documents of a corpus, in its order.
pub fn text_documents<'a>(
    documents: impl Iterator<Item = Result<Document, DataError>> + 'a,
    tokenizer: &'a Tokenizer,
    eos_id: u32,
) -> impl Iterator<Item = Result<EvalDocument, InferError>> + 'a {
    documents.map(move |document| {
        let text = document?.text;
        let mut tokens = tokenizer.encode(&text)?;
        let size = TextSize::new(tokens.len(), text.len() as u64, &text);
        tokens.push(eos_id);
        Ok(EvalDocument {
            num_bytes: text.len() as u64 - first_token_bytes(tokenizer, &tokens, text.len())?,
            num_words: text.split_whitespace().count() as u64,
            word_uses: word_uses(tokenizer, &tokens),
            tokens,
            text: size,
        })
    })
}

/// The held-out documents of prepared data, in the shard's order.
///
/// # Errors
/// Shards made with another tokenizer, or that cannot be read.
pub fn prepared_documents<'a>(
    prepared: &Prepared,
    tokenizer: &'a Tokenizer,
) -> Result<impl Iterator<Item = Result<EvalDocument, InferError>> + use<'a>, InferError> {
    if prepared.meta.tokenizer_hash != format!("{:032x}", tokenizer.hash()) {
        let dir = prepared.dir.shown();
        let what = format!("{dir}: the shards there were made with another tokenizer than the checkpoint's");
        return Err(InferError::refused(what, "name the text with --data instead"));
    }
    if prepared.meta.validation.num_predicted.is_some() {
        let dir = prepared.dir.shown();
        let what = format!("{dir}: the run takes loss of a part of its tokens, and this would take it of all");
        return Err(InferError::refused(
            what,
            "read the validation losses of the run's metrics.jsonl, or name text with --data",
        ));
    }
    let (shard, sizes) = (prepared.validation()?, prepared.validation_sizes()?);
    Ok((0..shard.num_documents()).zip(sizes).map(move |(n, size)| {
        let tokens = shard.document(n)?;
        let first = first_token_bytes(tokenizer, &tokens, size.num_bytes as usize)?;
        Ok(EvalDocument {
            word_uses: word_uses(tokenizer, &tokens),
            text: TextSize::new(tokens.len().saturating_sub(1), size.num_bytes, &tokenizer.decode(&tokens)?),
            tokens,
            num_bytes: size.num_bytes - first,
            num_words: size.num_words,
        })
    }))
}

/// The first documents that together have `max_tokens` tokens to predict; the last one is cut. `None` keeps all.
pub fn first_tokens<'a>(
    mut documents: impl Iterator<Item = Result<EvalDocument, InferError>> + 'a,
    tokenizer: &'a Tokenizer,
    max_tokens: Option<u64>,
) -> impl Iterator<Item = Result<EvalDocument, InferError>> + 'a {
    let mut left = max_tokens.unwrap_or(u64::MAX);
    std::iter::from_fn(move || {
        if left == 0 {
            return None;
        }
        Some(documents.next()?.and_then(|mut document| {
            // The first token of a document is not predicted.
            if (document.tokens.len() as u64).saturating_sub(1) > left {
                cut(&mut document, tokenizer, left as usize + 1)?;
            }
            left -= (document.tokens.len() as u64).saturating_sub(1);
            Ok(document)
        }))
    })
}

/// Cuts a document to its first `num_tokens`, and counts its bytes and words again.
fn cut(document: &mut EvalDocument, tokenizer: &Tokenizer, num_tokens: usize) -> Result<(), InferError> {
    document.tokens.truncate(num_tokens);
    document.word_uses.truncate(num_tokens);
    let later = document.tokens.iter().skip(1);
    let is_first = false;
    let later = later.map(|&token| Ok(tokenizer.token_bytes(token, is_first)? as u64));
    let num_bytes = later.sum::<Result<u64, DataError>>()?;
    document.num_bytes = num_bytes;
    let text = tokenizer.decode(&document.tokens)?;
    document.num_words = text.split_whitespace().count() as u64;
    let first = first_token_bytes(tokenizer, &document.tokens, usize::MAX)?;
    document.text = TextSize::new(document.tokens.len(), num_bytes + first, &text);
    Ok(())
}

/// Bytes of text of the first token, but at most `limit`.
fn first_token_bytes(tokenizer: &Tokenizer, tokens: &[u32], limit: usize) -> Result<u64, InferError> {
    let is_first = true;
    let first = tokens.first().map(|&first| tokenizer.token_bytes(first, is_first));
    Ok(first.transpose()?.unwrap_or(0).min(limit) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_model::llama_tokenizer;
    use sieve_data::{Corpus, CorpusConfig};

    #[test]
    fn bytes_are_those_of_all_tokens_but_the_first() {
        let folder = tempfile::tempdir().expect("a folder");
        // The first text begins with a character of three bytes that no merge makes one token.
        let texts = ["€ uro and two words", "abc abc abc abc"];
        let paths = ["a.txt", "b.txt"].map(|name| folder.path().join(name));
        for (path, text) in paths.iter().zip(texts) {
            std::fs::write(path, text).expect("writable");
        }
        let paths = paths.map(|path| path.shown().to_string()).to_vec();
        let corpus = Corpus::open(CorpusConfig::text(paths)).expect("two files");
        let bytes = Tokenizer::train_on(texts.into_iter(), 262).expect("enough text");
        let first = |word: &str| bytes.encode(word).expect("bytes")[0];
        let firsts = ["€", "abc"].map(|word| bytes.id_token(first(word)).expect("known").chars().count());
        check(&bytes, &corpus, texts, firsts);
        // The space that Llama's tokenizer puts before a text is none of its bytes.
        check(&llama_tokenizer(), &corpus, texts, [0, 1]);
    }

    /// `firsts` are the numbers of bytes of the texts' first tokens.
    fn check(tokenizer: &Tokenizer, corpus: &Corpus, texts: [&str; 2], firsts: [usize; 2]) {
        let eos_id = tokenizer.eos_id().expect("its own name");
        let documents: Vec<EvalDocument> =
            text_documents(corpus.documents(), tokenizer, eos_id).collect::<Result<_, _>>().expect("readable");
        assert_eq!(documents.len(), 2);
        for ((document, text), first) in documents.iter().zip(texts).zip(firsts) {
            assert_eq!(document.tokens.last(), Some(&eos_id));
            assert_eq!(document.num_bytes, (text.len() - first) as u64);
        }
        assert_eq!(documents[0].num_words, 5);
        for (document, text) in documents.iter().zip(texts) {
            let sizes = (document.tokens.len() - 1, text.len() as u64, document.num_words);
            let size = document.text;
            assert_eq!((size.num_tokens, size.num_bytes, size.num_words), sizes);
        }

        // The limits lie in the first document, at its end, in the second, at its end, and after both.
        let whole = |document: &EvalDocument| document.tokens.len() as u64 - 1;
        let [first, second] = [whole(&documents[0]), whole(&documents[1])];
        for limit in [1, first - 4, first, first + 3, first + second, 1 << 40] {
            let cut = first_tokens(documents.iter().cloned().map(Ok), tokenizer, Some(limit));
            let cut: Vec<EvalDocument> = cut.collect::<Result<_, _>>().expect("readable");
            let total = cut.iter().map(whole).sum::<u64>();
            assert_eq!(total, limit.min(first + second));
            assert_eq!(cut.len(), if limit <= first { 1 } else { 2 });
            for (cut, document) in cut.iter().zip(&documents) {
                assert!(document.tokens.starts_with(&cut.tokens));
                assert_eq!(cut.word_uses.len(), cut.tokens.len());
                if cut.tokens.len() == document.tokens.len() {
                    assert_eq!(cut, document);
                }
            }
        }
        // Cut before the end-of-document token, the text is complete.
        let cut = first_tokens(documents.iter().cloned().map(Ok), tokenizer, Some(first - 1));
        let cut: Vec<EvalDocument> = cut.collect::<Result<_, _>>().expect("readable");
        assert_eq!((cut[0].num_bytes, cut[0].num_words), (documents[0].num_bytes, 5));
        assert_eq!(cut[0].text, documents[0].text);
    }

    #[test]
    fn words_are_counted_as_python_splits() {
        // The numbers are Python's `len(re.split(r"\s+", text))`.
        for (text, num_words) in
            [("", 1), (" ", 2), ("a", 1), ("a b", 2), (" a  b\n", 4), ("a\u{a0}b\x1cc", 3), ("\n\na", 2)]
        {
            assert_eq!(TextSize::new(0, 0, text).num_words, num_words, "{text:?}");
        }
    }
}
