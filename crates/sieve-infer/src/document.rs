//! Documents to evaluate on, from text files or from prepared shards.
use crate::InferError;
use crate::words::{WordUse, word_uses};
use sieve_core::ShownPath;
use sieve_data::{DataError, Document, DocumentTokens, Prepared, Tokenizer};
use std::ops::Range;

/// A document as token ids, with its size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvalDocument {
    /// Token ids, with the end-of-document token last, unless the document is a chat.
    pub tokens: Vec<u32>,
    /// Of a document with a prompt or a chat, the ranges of its answers' tokens, in order: only they are predicted.
    /// `None` where all tokens but the first are.
    pub predicted: Option<Vec<Range<usize>>>,
    /// Bytes of UTF-8 text of the predicted tokens.
    pub num_bytes: u64,
    /// Words of the text that is predicted, separated by white space.
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
    /// The size of `text`, of which the tokens and bytes are known, with its words counted.
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

impl EvalDocument {
    /// A document of which only the answers are predicted. Its bytes are counted as in training: token by token, where
    /// a special token has none.
    fn with_answers(
        tokenizer: &Tokenizer,
        tokens: Vec<u32>,
        predicted: Vec<Range<usize>>,
        num_words: u64,
    ) -> Result<Self, InferError> {
        let is_first = false;
        let predicted: Vec<_> = predicted.into_iter().map(|range| range.start.max(1)..range.end.max(1)).collect();
        let answers = predicted.iter().flat_map(|range| &tokens[range.clone()]);
        let bytes = answers.map(|&token| Ok(tokenizer.token_bytes(token, is_first)? as u64));
        let num_bytes = bytes.sum::<Result<u64, DataError>>()?;
        Ok(Self {
            num_bytes,
            num_words,
            text: TextSize { num_tokens: tokens.len(), num_bytes, num_words },
            word_uses: word_uses(tokenizer, &tokens),
            predicted: Some(predicted),
            tokens,
        })
    }

    /// Number of predicted tokens. The first token of a document has none before it that could predict it.
    fn num_predicted(&self) -> u64 {
        match &self.predicted {
            None => (self.tokens.len() as u64).saturating_sub(1),
            Some(ranges) => ranges.iter().map(|range| range.len() as u64).sum(),
        }
    }

    /// Number of tokens from the beginning to the predicted token `number`, counted from 1.
    fn len_with(&self, number: u64) -> usize {
        let Some(ranges) = &self.predicted else {
            return number as usize + 1;
        };
        let nth = ranges.iter().flat_map(Clone::clone).nth((number as usize).saturating_sub(1));
        nth.map_or(self.tokens.len(), |token| token + 1)
    }
}

/// The documents of a corpus, in its order.
pub fn text_documents<'a>(
    documents: impl Iterator<Item = Result<Document, DataError>> + 'a,
    tokenizer: &'a Tokenizer,
    eos_id: u32,
) -> impl Iterator<Item = Result<EvalDocument, InferError>> + 'a {
    documents.map(move |document| {
        let document = document?;
        let found = DocumentTokens::of(tokenizer, eos_id, &document)?;
        let predicted = found.predicted();
        let DocumentTokens { parts, size } = found;
        let tokens = parts.concat();
        if let Some(predicted) = predicted {
            return EvalDocument::with_answers(tokenizer, tokens, predicted, size.num_words);
        }
        let text = document.text;
        Ok(EvalDocument {
            num_bytes: text.len() as u64 - first_token_bytes(tokenizer, &tokens, text.len())?,
            num_words: size.num_words,
            word_uses: word_uses(tokenizer, &tokens),
            text: TextSize::new(tokens.len() - 1, text.len() as u64, &text),
            tokens,
            predicted: None,
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
        let what = format!("{dir}: its shards were made with a different tokenizer from the checkpoint's");
        return Err(InferError::refused(what, "name the text with --data instead"));
    }
    let has_answers = prepared.meta.validation.num_predicted.is_some();
    let (shard, sizes) = (prepared.validation()?, prepared.validation_sizes()?);
    Ok((0..shard.num_documents()).zip(sizes).map(move |(n, size)| {
        let tokens = shard.document(n)?;
        if has_answers {
            let predicted = shard.predicted(n).into_iter().map(|range| range.start as usize..range.end as usize);
            return EvalDocument::with_answers(tokenizer, tokens, predicted.collect(), size.num_words);
        }
        let first = first_token_bytes(tokenizer, &tokens, size.num_bytes as usize)?;
        Ok(EvalDocument {
            word_uses: word_uses(tokenizer, &tokens),
            text: TextSize::new(tokens.len().saturating_sub(1), size.num_bytes, &tokenizer.decode(&tokens)?),
            predicted: None,
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
            if document.num_predicted() > left {
                let num_tokens = document.len_with(left);
                cut(&mut document, tokenizer, num_tokens)?;
            }
            left -= document.num_predicted();
            Ok(document)
        }))
    })
}

/// Cuts a document to its first `num_tokens`, and counts its bytes and words again.
fn cut(document: &mut EvalDocument, tokenizer: &Tokenizer, num_tokens: usize) -> Result<(), InferError> {
    document.tokens.truncate(num_tokens);
    document.word_uses.truncate(num_tokens);
    if let Some(predicted) = &document.predicted {
        let kept = predicted.iter().map(|range| range.start..range.end.min(num_tokens));
        let kept: Vec<_> = kept.filter(|range| !range.is_empty()).collect();
        let texts = kept.iter().map(|range| tokenizer.decode(&document.tokens[range.clone()]));
        let num_words = texts.map(|text| Ok(text?.split_whitespace().count() as u64));
        let num_words = num_words.sum::<Result<u64, DataError>>()?;
        *document = EvalDocument::with_answers(tokenizer, std::mem::take(&mut document.tokens), kept, num_words)?;
        return Ok(());
    }
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
    #![allow(clippy::single_range_in_vec_init, reason = "a document may have one answer")]
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
    fn answers_of_chats_and_of_prompts_are_predicted_and_cut_after_so_many_tokens() {
        let tokenizer = Tokenizer::train_on(["abc"].into_iter(), 258).expect("bytes");
        let eos_id = tokenizer.eos_id().expect("its own name");
        let plain = Document { text: "ask say ask ok".to_owned(), prompt: None, answers: None, file_idx: 0, line: 1 };
        let chat = Document { answers: Some(vec![4..7, 12..14]), ..plain.clone() };
        let question = Document { text: "yes".to_owned(), prompt: Some("ask".to_owned()), ..plain.clone() };
        // An answer without a question begins the text: its first token has nothing before it.
        let alone = Document { text: "yes".to_owned(), prompt: Some(String::new()), ..plain.clone() };
        for (document, predicted, num_bytes) in
            [(&chat, vec![4..7, 12..14], 5), (&question, vec![3..7], 3), (&alone, vec![1..4], 2)]
        {
            let read = |most| {
                let documents = text_documents([Ok(document.clone())].into_iter(), &tokenizer, eos_id);
                let documents = first_tokens(documents, &tokenizer, most);
                documents.collect::<Result<Vec<_>, _>>().expect("readable").remove(0)
            };
            let whole = read(None);
            assert_eq!((whole.predicted.as_ref(), whole.num_bytes), (Some(&predicted), num_bytes));
            for most in 1..=whole.num_predicted() {
                let cut = read(Some(most));
                assert_eq!(cut.num_predicted(), most);
                let last = cut.predicted.iter().flatten().last().expect("an answer").end;
                assert_eq!(cut.tokens, whole.tokens[..last], "no token behind the last answer is read");
            }
        }
        let whole = text_documents([Ok(plain)].into_iter(), &tokenizer, eos_id).next().expect("one").expect("readable");
        assert_eq!((whole.predicted.as_ref(), whole.num_predicted()), (None, 14));
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
